"""The connection to a server, and its requests."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx

from .. import models
from .._embedded import Address, EmbeddedServer, server_of
from .._io_async import HttpClient, HttpTransport, Lock, Shared, run_blocking, sleep
from .._wire import EventReader
from ..errors import ServerUnavailable, StreamInterrupted, from_refusal, from_response
from ..results import ServerEvent

Params = Mapping[str, str | int | bool | None]

_CONNECT_WAIT = 10.0
# The server sends a sign of life every 15 seconds on streams of events.
_SILENCE_MAX = 60.0
_RECONNECTS_MAX = 20
_RECONNECT_PAUSE = 0.25
_REFUSAL_LEN_MAX = 1 << 20
_CONNECTIONS_MAX = 1000


class AsyncClient:
    """A server, and the key for it.

    Without `url` it is the one of `PALISADE_URL` with the key of `PALISADE_KEY`; without both, a private server on the
    data directory of `pal` (or on `data`), which ends with the programs that use it. `pal` names the program to start.
    `timeout` is the longest time in seconds that a request without a stream may take.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        data: str | os.PathLike[str] | None = None,
        pal: str | os.PathLike[str] | None = None,
        timeout: float = 300.0,
    ) -> None:
        if url is None and data is None:
            url = os.environ.get("PALISADE_URL")
        self.arguments: dict[str, Any] = {"url": url, "key": key, "data": data, "pal": pal, "timeout": timeout}
        self.embedded: EmbeddedServer | None = None
        self._address: Address | None = None
        if url is None:
            self.embedded = server_of(data, pal)
        else:
            self._address = Address(url.rstrip("/"), key or os.environ.get("PALISADE_KEY"))
        self._timeout = httpx.Timeout(timeout, connect=_CONNECT_WAIT)
        self._stream_timeout = httpx.Timeout(_SILENCE_MAX, connect=_CONNECT_WAIT, pool=timeout)
        self._lock = Lock()
        limits = httpx.Limits(max_connections=_CONNECTIONS_MAX, max_keepalive_connections=100)
        self.http = HttpClient(transport=HttpTransport(limits=limits), trust_env=False)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections. A private server ends when no program uses it any more."""
        await self.http.aclose()

    async def address(self) -> Address:
        """The address of the server; starts a private one if there is none."""
        if self._address is None:
            async with self._lock:
                if self._address is None:
                    assert self.embedded is not None
                    self._address = await run_blocking(self.embedded.address)
        return self._address

    async def _lost(self, address: Address) -> bool:
        """Whether to try again: a private server that has ended is started again."""
        if self.embedded is None:
            return False
        async with self._lock:
            if self._address is address:
                self._address = None
        return True

    async def send(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        content: Any = None,
        timeout: httpx.Timeout | None = None,
        with_key: bool = True,
    ) -> httpx.Response:
        """Sends a request, and returns its response with an unread body. The caller closes it."""
        sent = {name: _query_value(value) for name, value in (params or {}).items() if value is not None}
        for attempt in range(2):
            address = await self.address()
            extra = {"Authorization": f"Bearer {address.key}"} if with_key and address.key else {}
            request = self.http.build_request(
                method,
                address.url + path,
                params=sent or None,
                headers={**extra, **(headers or {})},
                content=content,
                timeout=timeout or self._timeout,
            )
            try:
                return await self.http.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if attempt == 0 and await self._lost(address):
                    continue
                raise ServerUnavailable(
                    f"no server answers at {address.url}: {error}",
                    kind="host",
                    hints=["start it: pal serve", "or unset PALISADE_URL to use a private server"],
                ) from error
            except httpx.TimeoutException as error:
                raise ServerUnavailable(f"the server did not answer {method} {path} in time", kind="host") from error
            except httpx.HTTPError as error:
                raise StreamInterrupted(f"the connection broke during {method} {path}: {error}") from error
        raise AssertionError("unreachable")

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        content: Any = None,
        with_key: bool = True,
    ) -> bytes:
        """Sends a request with `body` as JSON or `content` as it is, and returns the body of the answer."""
        headers = dict(headers or {})
        if body is not None:
            content = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        response = await self.send(method, path, params=params, headers=headers, content=content, with_key=with_key)
        try:
            answer = await response.aread()
        except httpx.HTTPError as error:
            raise StreamInterrupted(f"the connection broke during {method} {path}: {error}") from error
        finally:
            await response.aclose()
        if not response.is_success:
            raise from_response(response.status_code, answer, response.headers.get("retry-after"))
        return answer

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Params | None = None,
        idempotency_key: str | None = None,
    ) -> Any:
        """Calls the native API, and returns its answer from JSON; `None` for an empty one."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key is not None else None
        answer = await self.request(method, path, body=body, params=params, headers=headers)
        return json.loads(answer) if answer else None

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        content: Any = None,
        with_key: bool = True,
        silence_max: float | None = _SILENCE_MAX,
    ) -> AsyncIterator[httpx.Response]:
        """Sends a request whose answer is a stream."""
        headers = dict(headers or {})
        if body is not None:
            content = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        timeout = httpx.Timeout(silence_max, connect=_CONNECT_WAIT)
        response = await self.send(
            method, path, params=params, headers=headers, content=content, timeout=timeout, with_key=with_key
        )
        try:
            if not response.is_success and response.status_code != 101:
                refusal = (await response.aread())[:_REFUSAL_LEN_MAX]
                raise from_response(response.status_code, refusal, response.headers.get("retry-after"))
            yield response
        except httpx.TimeoutException as error:
            raise StreamInterrupted(f"the server was silent for too long during {method} {path}") from error
        except httpx.HTTPError as error:
            raise StreamInterrupted(f"the connection broke during {method} {path}: {error}") from error
        finally:
            await response.aclose()

    async def events_of(
        self, method: str, path: str, *, body: Any = None, params: Params | None = None, after: str | None = None
    ) -> AsyncIterator[ServerEvent]:
        """The server-sent events of one answer."""
        headers = {"Accept": "text/event-stream"}
        if after is not None:
            headers["Last-Event-ID"] = after
        async with self.stream(method, path, body=body, params=params, headers=headers) as response:
            reader = EventReader()
            async for piece in response.aiter_raw():
                for event in reader.feed(piece):
                    yield event

    async def follow(
        self, path: str, *, after: int | None = None, params: Params | None = None
    ) -> AsyncIterator[ServerEvent]:
        """The server-sent events of a log, without a gap: a broken stream goes on after its last event."""
        place = str(after) if after is not None else None
        failures = 0
        while True:
            try:
                async for event in self.events_of("GET", path, params=params, after=place):
                    failures = 0
                    place = event.id if event.id is not None else place
                    yield event
                return
            except (ServerUnavailable, StreamInterrupted):
                failures += 1
                if failures > _RECONNECTS_MAX:
                    raise
                await sleep(min(_RECONNECT_PAUSE * failures, 5.0))

    async def long_work(self, method: str, path: str, body: Any = None) -> Any:
        """Calls the native API for work that takes long, and returns its answer, however long that takes."""
        async for event in self.events_of(method, path, body=body):
            if event.name == "done":
                return json.loads(event.data)
            if event.name == "failed":
                raise from_refusal(json.loads(event.data))
        raise StreamInterrupted(
            f"the stream of {method} {path} ended before the work did", hints=["the server finishes the work"]
        )

    async def items(self, path: str, *, params: Params | None = None) -> AsyncIterator[Any]:
        """The items of all pages of a list."""
        cursor: str | None = None
        while True:
            page = await self.call("GET", path, params={**(params or {}), "cursor": cursor})
            for item in page["items"]:
                yield item
            cursor = page.get("next")
            if cursor is None:
                return

    async def version(self) -> str:
        """The version of the server."""
        return cast(models.Version, await self.call("GET", "/v1/version"))["version"]


def _query_value(value: str | int | bool | None) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_default: Shared[AsyncClient] = Shared()


def default_client() -> AsyncClient:
    """The client for calls that name none."""
    return _default.get(AsyncClient)

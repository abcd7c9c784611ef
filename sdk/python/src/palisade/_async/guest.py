"""Calls to the guest of a Body: files, watches and processes with an input.

The guest speaks the Connect protocol, as E2B's clients do. The server passes such calls on to the guest, records the
commands, and requires the Body's own token.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any

from .._wire import EnvelopeReader, seal
from ..errors import Denied, StreamInterrupted
from .client import AsyncClient

_PORT = "49983"
_KEEPALIVE_S = "15"


class AsyncGuest:
    """The guest of one Body."""

    def __init__(self, client: AsyncClient, body: str) -> None:
        self._client = client
        self._body = body
        self._token: str | None = None

    async def _headers(self, user: str | None) -> dict[str, str]:
        if self._token is None:
            detail = json.loads(
                await self._client.request("GET", f"/sandboxes/{self._body}", headers=await self._api_key())
            )
            self._token = detail.get("envdAccessToken")
            if self._token is None:
                raise Denied("this key may only view Bodies", kind="denied", hints=["use a key of scope run or admin"])
        headers = {"E2b-Sandbox-Id": self._body, "E2b-Sandbox-Port": _PORT, "X-Access-Token": self._token}
        if user is not None:
            headers["Authorization"] = "Basic " + b64encode(f"{user}:".encode()).decode()
        return headers

    async def _api_key(self) -> dict[str, str]:
        key = (await self._client.address()).key
        return {"X-API-Key": key} if key else {}

    async def call(self, service: str, message: dict[str, Any], user: str | None = None) -> dict[str, Any]:
        """Calls a method with one message, and returns the answer."""
        headers = await self._headers(user)
        answer = await self._client.request("POST", f"/{service}", body=message, headers=headers, with_key=False)
        said = json.loads(answer)
        return said if isinstance(said, dict) else {}

    async def stream(
        self, service: str, message: dict[str, Any], *, user: str | None = None, timeout: float | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Calls a method whose answer is a stream of messages."""
        headers = {
            **(await self._headers(user)),
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Keepalive-Ping-Interval": _KEEPALIVE_S,
        }
        if timeout is not None:
            headers["Connect-Timeout-Ms"] = str(max(1, int(timeout * 1000)))
        reader = EnvelopeReader()
        async with self._client.stream(
            "POST", f"/{service}", headers=headers, content=seal(message), with_key=False
        ) as response:
            async for piece in response.aiter_raw():
                for answer in reader.feed(piece):
                    yield answer
        if not reader.ended:
            raise StreamInterrupted("the stream from the Body ended before its end")

"""A terminal of a Body."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from .._io_async import NetworkStream
from .._wire import Frame, WebSocketCodec
from ..errors import StreamInterrupted, from_refusal
from ..results import TerminalOutput
from .client import AsyncClient, Params

_READ_LEN = 64 << 10
# The server sends a ping before a silent connection is this old.
_SILENCE_MAX = 90.0


class AsyncTerminal:
    """A connection to a terminal; used with `async with`.

    Iterating gives its output until its command ends; then `exit_code` is set. Leaving the block leaves the command
    running: another connection finds it by the terminal's name.
    """

    def __init__(self, client: AsyncClient, body: str, params: Params) -> None:
        self._codec = WebSocketCodec()
        self._opening = client.stream(
            "GET",
            f"/v1/bodies/{body}/pty",
            params=params,
            headers=self._codec.request_headers(),
            silence_max=_SILENCE_MAX,
        )
        self._stream: NetworkStream | None = None
        self.pid: int | None = None
        self.mode: str | None = None
        self.size: tuple[int, int] | None = None
        self.exit_code: int | None = None

    async def __aenter__(self) -> AsyncTerminal:
        response = await self._opening.__aenter__()
        if response.status_code != 101 or not self._codec.is_accepted_by(response.headers.get("sec-websocket-accept")):
            await self._opening.__aexit__(None, None, None)
            raise StreamInterrupted("the server did not open a WebSocket")
        self._stream = response.extensions["network_stream"]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            try:
                await self._stream.write(self._codec.close(), timeout=1.0)
            except Exception:  # The connection has ended, which is what closing wants.
                pass
            await self._stream.aclose()
            self._stream = None
        await self._opening.__aexit__(kind, error, trace)

    async def write(self, data: str | bytes) -> None:
        """Types into the terminal."""
        await self._send(self._codec.binary(data.encode() if isinstance(data, str) else data))

    async def resize(self, cols: int, rows: int) -> None:
        """Changes the size of the terminal."""
        await self._send(self._codec.text({"type": "resize", "cols": cols, "rows": rows}))

    async def __aiter__(self) -> AsyncIterator[TerminalOutput]:
        replaces = False
        while self.exit_code is None:
            for frame in self._codec.feed(await self._receive()):
                if frame.kind == "binary":
                    yield TerminalOutput(frame.data, replaces)
                    replaces = False
                elif frame.kind == "ping":
                    await self._send(self._codec.pong(frame.data))
                elif frame.kind == "close":
                    raise StreamInterrupted("the server closed the terminal's connection")
                else:
                    replaces = self._note(frame) or replaces
                if self.exit_code is not None:
                    return

    def _note(self, frame: Frame) -> bool:
        """Reads a message about the terminal; whether the next output replaces everything shown."""
        said: dict[str, Any] = json.loads(frame.data)
        kind = said.get("type")
        if kind == "hello":
            self.pid, self.mode = said.get("pid"), said.get("mode")
        elif kind in ("screen", "size"):
            self.size = (said["cols"], said["rows"])
        elif kind == "ended":
            self.exit_code = int(said.get("code", 0))
        elif kind in ("lost", "failed"):
            raise from_refusal({"kind": "host", "message": said.get("message", "the terminal was lost")})
        return kind == "screen"

    async def _receive(self) -> bytes:
        assert self._stream is not None, "use the terminal in a `with` block"
        try:
            piece = await self._stream.read(_READ_LEN, timeout=_SILENCE_MAX)
        except Exception as error:
            raise StreamInterrupted(f"the connection to the terminal broke: {error}") from error
        if not piece:
            raise StreamInterrupted("the connection to the terminal broke")
        return piece

    async def _send(self, data: bytes) -> None:
        assert self._stream is not None, "use the terminal in a `with` block"
        try:
            await self._stream.write(data, timeout=_SILENCE_MAX)
        except Exception as error:
            raise StreamInterrupted(f"the connection to the terminal broke: {error}") from error

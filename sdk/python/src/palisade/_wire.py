"""Server-sent events, Connect envelopes and WebSocket frames, without I/O.

Trust: everything here comes from a server and, through it, from programs in a Body. Lengths have limits.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from .errors import PalisadeError, StreamInterrupted, from_refusal
from .results import ServerEvent

_EVENT_LEN_MAX = 64 << 20
_MESSAGE_LEN_MAX = 64 << 20


def _too_long(what: str) -> PalisadeError:
    return StreamInterrupted(f"the server sent {what} of more than 64 MiB")


class EventReader:
    """Reads server-sent events from pieces of bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._name = ""
        self._id: str | None = None
        self._data: list[str] = []
        self._data_len = 0

    def feed(self, piece: bytes) -> Iterator[ServerEvent]:
        """Returns the events that are complete with this piece."""
        self._rest += piece
        if len(self._rest) > _EVENT_LEN_MAX:
            raise _too_long("an event")
        while (end := self._rest.find(b"\n")) >= 0:
            line = bytes(self._rest[:end]).removesuffix(b"\r").decode("utf-8", "replace")
            del self._rest[: end + 1]
            event = self._line(line)
            if event is not None:
                yield event

    def _line(self, line: str) -> ServerEvent | None:
        if not line:
            data, self._data, self._data_len = self._data, [], 0
            name, self._name = self._name, ""
            return ServerEvent(name or "message", "\n".join(data), self._id) if data else None
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
            self._data_len += len(value)
            if self._data_len > _EVENT_LEN_MAX:
                raise _too_long("an event")
        elif field == "event":
            self._name = value
        elif field == "id":
            self._id = value
        return None


def seal(message: dict[str, Any]) -> bytes:
    """Puts a message into an envelope of the Connect protocol."""
    text = json.dumps(message).encode()
    return b"\0" + struct.pack(">I", len(text)) + text


class EnvelopeReader:
    """Reads messages of a stream of the Connect protocol; an error at the end of the stream is raised."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self.ended = False

    def feed(self, piece: bytes) -> Iterator[dict[str, Any]]:
        """Returns the messages that are complete with this piece."""
        self._rest += piece
        while len(self._rest) >= 5:
            flags, length = struct.unpack(">BI", self._rest[:5])
            if length > _MESSAGE_LEN_MAX:
                raise _too_long("a message")
            if len(self._rest) < 5 + length:
                return
            message = json.loads(bytes(self._rest[5 : 5 + length]) or b"{}")
            del self._rest[: 5 + length]
            if flags & 2:
                self.ended = True
                if message.get("error"):
                    raise from_refusal(message["error"])
            else:
                yield message


class Frame(NamedTuple):
    """A whole message of a WebSocket. `kind` is `text`, `binary`, `ping` or `close`."""

    kind: str
    data: bytes


_TEXT, _BINARY, _CLOSE, _PING, _PONG = 1, 2, 8, 9, 10
_KINDS = {_TEXT: "text", _BINARY: "binary", _CLOSE: "close", _PING: "ping"}


class WebSocketCodec:
    """The client's side of RFC 6455."""

    def __init__(self) -> None:
        self._key = base64.b64encode(os.urandom(16)).decode()
        self._rest = bytearray()
        self._opcode = 0
        self._message = bytearray()

    def request_headers(self) -> dict[str, str]:
        """The headers that ask for an upgrade."""
        return {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": self._key,
        }

    def is_accepted_by(self, accept: str | None) -> bool:
        """Whether the server's `Sec-WebSocket-Accept` answers this request."""
        digest = hashlib.sha1(f"{self._key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
        return accept == base64.b64encode(digest).decode()

    @staticmethod
    def _frame(opcode: int, data: bytes) -> bytes:
        length = len(data)
        if length < 126:
            head = struct.pack(">BB", 0x80 | opcode, 0x80 | length)
        elif length < 1 << 16:
            head = struct.pack(">BBH", 0x80 | opcode, 0x80 | 126, length)
        else:
            head = struct.pack(">BBQ", 0x80 | opcode, 0x80 | 127, length)
        mask = os.urandom(4)
        long_mask = (mask * (length // 4 + 1))[:length]
        masked = (int.from_bytes(data, "big") ^ int.from_bytes(long_mask, "big")).to_bytes(length, "big")
        return head + mask + masked

    def binary(self, data: bytes) -> bytes:
        """A message of bytes."""
        return self._frame(_BINARY, data)

    def text(self, message: dict[str, Any]) -> bytes:
        """A message of JSON."""
        return self._frame(_TEXT, json.dumps(message).encode())

    def pong(self, data: bytes) -> bytes:
        """The answer to a ping."""
        return self._frame(_PONG, data)

    def close(self) -> bytes:
        """The end of the conversation."""
        return self._frame(_CLOSE, struct.pack(">H", 1000))

    def feed(self, piece: bytes) -> Iterator[Frame]:
        """Returns the messages that are complete with this piece."""
        self._rest += piece
        while (parsed := self._parse()) is not None:
            final, opcode, data = parsed
            if opcode >= 8:
                if opcode in _KINDS:
                    yield Frame(_KINDS[opcode], data)
                continue
            self._opcode = opcode or self._opcode
            self._message += data
            if len(self._message) > _MESSAGE_LEN_MAX:
                raise _too_long("a message")
            if final:
                whole, self._message = bytes(self._message), bytearray()
                yield Frame(_KINDS.get(self._opcode, "binary"), whole)

    def _parse(self) -> tuple[bool, int, bytes] | None:
        if len(self._rest) < 2:
            return None
        first, second = self._rest[0], self._rest[1]
        start, length = 2, second & 0x7F
        if length >= 126:
            size = 2 if length == 126 else 8
            if len(self._rest) < 2 + size:
                return None
            length = int.from_bytes(self._rest[2 : 2 + size], "big")
            start += size
        if length > _MESSAGE_LEN_MAX:
            raise _too_long("a message")
        if len(self._rest) < start + length:
            return None
        data = bytes(self._rest[start : start + length])
        del self._rest[: start + length]
        return bool(first & 0x80), first & 0x0F, data

"""A command that runs in a Body, with its input and output."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from typing import Any, Literal

from ..errors import PalisadeError, StreamInterrupted
from ..results import Output, Result
from .guest import AsyncGuest

_SERVICE = "process.Process"
SignalName = Literal["HUP", "INT", "QUIT", "KILL", "USR1", "USR2", "TERM", "CONT", "TSTP"]
_TIMED_OUT = 124
# The guest's words, in the order of the numbers from 1.
_SIGNALS = (
    "hangup",
    "interrupt",
    "quit",
    "illegal instruction",
    "trace/breakpoint trap",
    "aborted",
    "bus error",
    "floating point exception",
    "killed",
    "user defined signal 1",
    "segmentation fault",
    "user defined signal 2",
    "broken pipe",
    "alarm clock",
    "terminated",
)


class AsyncProcess:
    """A started command.

    Iterating gives its output as it comes; after that, or after `wait`, `result` says how it ended. With `async with`
    the command is killed if the block ends before it does.
    """

    def __init__(self, guest: AsyncGuest, messages: AsyncIterator[dict[str, Any]], pid: int) -> None:
        self._guest = guest
        self._messages = messages
        self.pid = pid
        self.result: Result | None = None

    @classmethod
    async def start(
        cls,
        guest: AsyncGuest,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        timeout: float | None = None,
        stdin: bool = True,
    ) -> AsyncProcess:
        """Starts a command."""
        config: dict[str, Any] = {"cmd": argv[0], "args": argv[1:], "envs": env or {}}
        if workdir is not None:
            config["cwd"] = workdir
        messages = guest.stream(f"{_SERVICE}/Start", {"process": config, "stdin": stdin}, user=user, timeout=timeout)
        async for message in messages:
            started = message.get("event", {}).get("start")
            if started is not None:
                return cls(guest, messages, int(started["pid"]))
        raise StreamInterrupted("the Body did not say that the command has started")

    async def __aenter__(self) -> AsyncProcess:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.result is None:
            await self.kill()
        await self._messages.aclose()  # type: ignore[attr-defined]

    async def __aiter__(self) -> AsyncIterator[Output]:
        if self.result is not None:
            return
        try:
            async for message in self._messages:
                event = message.get("event", {})
                data = event.get("data", {})
                if "stdout" in data:
                    yield Output("stdout", b64decode(data["stdout"]))
                elif "stderr" in data:
                    yield Output("stderr", b64decode(data["stderr"]))
                elif "end" in event:
                    self.result = _ended(event["end"])
        except PalisadeError as error:
            if error.kind != "timeout":
                raise
            self.result = Result(_TIMED_OUT, timed_out=True)
        if self.result is None:
            raise StreamInterrupted("the stream ended before the command did")

    async def wait(self) -> Result:
        """Waits for the end; the result has the output that was not iterated over."""
        stdout, stderr = bytearray(), bytearray()
        async for piece in self:
            (stdout if piece.stream == "stdout" else stderr).extend(piece.data)
        assert self.result is not None
        ended = self.result
        return Result(ended.exit_code, bytes(stdout), bytes(stderr), signal=ended.signal, timed_out=ended.timed_out)

    async def write(self, data: str | bytes) -> None:
        """Writes to the standard input of the command."""
        sent = data.encode() if isinstance(data, str) else data
        for start in range(0, len(sent), 1 << 18):
            piece = b64encode(sent[start : start + (1 << 18)]).decode()
            await self._call("SendInput", input={"stdin": piece})

    async def close_stdin(self) -> None:
        """Ends the standard input of the command."""
        await self._call("CloseStdin")

    async def send_signal(self, signal: SignalName) -> None:
        """Sends a signal to the command."""
        await self._call("SendSignal", signal=f"SIGNAL_SIG{signal}")

    async def kill(self) -> None:
        """Kills the command; nothing happens if it has ended."""
        try:
            await self.send_signal("KILL")
        except PalisadeError as error:
            if error.kind not in ("not_found", "conflict") and "No such process" not in error.message:
                raise

    async def _call(self, method: str, **fields: Any) -> None:
        await self._guest.call(f"{_SERVICE}/{method}", {"process": {"pid": self.pid}, **fields})


def _ended(end: dict[str, Any]) -> Result:
    """How the guest says that a command has ended: a code, or the words for a signal."""
    words = str(end.get("status", ""))
    if end.get("exited") or not words.startswith("signal: "):
        return Result(int(end.get("exitCode", 0)))
    word = words.removeprefix("signal: ")
    number = word.removeprefix("signal ")
    signal = _SIGNALS.index(word) + 1 if word in _SIGNALS else int(number) if number.isdecimal() else None
    return Result(128 + (signal or 0), signal=signal)

"""The errors of this package, each with the server's message and its hints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .results import Result


class PalisadeError(Exception):
    """The base of all errors of this package.

    `kind` is the server's word for the kind of error, `status` the HTTP status, and `hints` are steps that may help.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str = "internal",
        status: int | None = None,
        hints: Sequence[str] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.status = status
        self.hints = tuple(hints)
        self.retry_after = retry_after

    def __str__(self) -> str:
        return "".join([self.message, *(f"\n  hint: {hint}" for hint in self.hints)])


class InvalidRequest(PalisadeError):
    """The server does not accept the request as it is."""


class NotFound(PalisadeError):
    """The Body, file, agent or other thing does not exist, or this key does not reach it."""


class Conflict(PalisadeError):
    """The state of the thing does not allow the request."""


class Denied(PalisadeError):
    """A policy, a permission or the scope of the key forbids the request."""


class Unauthorized(Denied):
    """The server does not know the key."""


class LimitReached(PalisadeError):
    """A limit was reached; `retry_after` says after how many seconds to try again, if the server said so."""


class HostFailure(PalisadeError):
    """The host of the server cannot do it, for the moment or at all."""


class RestoreIncomplete(PalisadeError):
    """The server could not restore a snapshot completely."""


class ServerUnavailable(PalisadeError):
    """No server answers at that address, or the private server did not start."""


class TimedOut(PalisadeError):
    """The time that the request gave a command is over."""


class StreamInterrupted(PalisadeError):
    """A stream ended before its end: the server stopped, or the connection broke."""


class CommandFailed(PalisadeError):
    """A command that was run with `check=True` ended with an exit code other than 0."""

    def __init__(self, result: Result) -> None:
        last = (result.stderr.strip() or result.stdout.strip()).splitlines()[-5:]
        text = "".join(f"\n  {line}" for line in last)
        super().__init__(f"the command ended with exit code {result.exit_code}{text}", kind="command")
        self.result = result


_KINDS: Mapping[str, type[PalisadeError]] = {
    "usage": InvalidRequest,
    "not_found": NotFound,
    "conflict": Conflict,
    "denied": Denied,
    "limit": LimitReached,
    "host": HostFailure,
    "timeout": TimedOut,
    "restore_incomplete": RestoreIncomplete,
}
_STATUSES: Mapping[int, str] = {
    400: "usage",
    403: "denied",
    404: "not_found",
    409: "conflict",
    429: "limit",
    503: "host",
}
# The words of the Connect protocol, in which the guest of a Body refuses.
_CODES: Mapping[str, str] = {
    "invalid_argument": "usage",
    "failed_precondition": "conflict",
    "already_exists": "conflict",
    "not_found": "not_found",
    "permission_denied": "denied",
    "unauthenticated": "denied",
    "resource_exhausted": "limit",
    "unavailable": "host",
    "deadline_exceeded": "timeout",
}


def from_refusal(refusal: Any, status: int | None = None, retry_after: str | None = None) -> PalisadeError:
    """Turns the body of a refusal, as the native API, the guest or a proxy sent it, into an error."""
    said = refusal if isinstance(refusal, dict) else {}
    code = said.get("code")
    status = said.get("status") if isinstance(said.get("status"), int) else status
    kind = said.get("kind") or (_CODES.get(code) if isinstance(code, str) else None) or _STATUSES.get(status or 0)
    message = said.get("message")
    if not isinstance(message, str) or not message:
        message = f"the server answered with status {status}"
    hints = [hint for hint in said.get("hints") or [] if isinstance(hint, str)]
    cls = Unauthorized if status == 401 else _KINDS.get(kind or "", PalisadeError)
    try:
        wait = float(retry_after) if retry_after is not None else None
    except ValueError:
        wait = None
    return cls(message, kind=kind or "internal", status=status, hints=hints, retry_after=wait)


def from_response(status: int, body: bytes, retry_after: str | None = None) -> PalisadeError:
    """Turns an answer that is no success into an error."""
    try:
        refusal = json.loads(body)
    except ValueError:
        refusal = None
    return from_refusal(refusal, status, retry_after)

"""Values that Bodies, files, processes and terminals return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import CommandFailed

EntryType = Literal["file", "directory", "symlink", "other"]
FileEventType = Literal["create", "write", "remove", "rename", "chmod", "other"]


@dataclass(frozen=True)
class Result:
    """How a command ended, and its output."""

    exit_code: int
    """As a shell reports it: 128 + signal when a signal ended the command, 124 at its timeout."""
    stdout_bytes: bytes = field(default=b"", repr=False)
    stderr_bytes: bytes = field(default=b"", repr=False)
    signal: int | None = None
    timed_out: bool = False
    out_of_memory: bool = False
    """Whether the kernel killed a process of the Body for lack of memory while the command ran."""
    body_end: str | None = None
    """Why the Body itself ended while the command ran, if it did."""

    @property
    def stdout(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Standard error as text; bytes that are not UTF-8 are replaced."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Whether the exit code is 0."""
        return self.exit_code == 0

    def check(self) -> Result:
        """Raises `CommandFailed` unless the exit code is 0."""
        if not self.ok:
            raise CommandFailed(self)
        return self


@dataclass(frozen=True)
class Output:
    """A piece of the output of a command."""

    stream: Literal["stdout", "stderr"]
    data: bytes

    @property
    def text(self) -> str:
        """The piece as text. A character that is cut at its end is replaced."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True)
class TerminalOutput:
    """Bytes of a terminal."""

    data: bytes
    replaces: bool = False
    """Whether they replace everything that was shown: at the beginning, and after the viewer was too slow."""


@dataclass(frozen=True)
class Entry:
    """A file, directory or link in a Body."""

    path: str
    name: str
    type: EntryType
    size: int
    mode: int
    owner: str
    group: str
    modified_at: str
    symlink_target: str | None = None

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory, or a link to one."""
        return self.type == "directory"

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Entry:
        """Reads an entry as the guest describes it."""
        kinds: dict[str, EntryType] = {
            "FILE_TYPE_FILE": "file",
            "FILE_TYPE_DIRECTORY": "directory",
            "FILE_TYPE_SYMLINK": "symlink",
        }
        return cls(
            path=said.get("path", ""),
            name=said.get("name", ""),
            type=kinds.get(said.get("type", ""), "other"),
            size=int(said.get("size", 0)),
            mode=int(said.get("mode", 0)),
            owner=said.get("owner", ""),
            group=said.get("group", ""),
            modified_at=said.get("modifiedTime", ""),
            symlink_target=said.get("symlinkTarget"),
        )


@dataclass(frozen=True)
class FileEvent:
    """A change below a watched directory. `name` is relative to that directory."""

    name: str
    type: FileEventType

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> FileEvent:
        """Reads an event as the guest describes it."""
        kinds: dict[str, FileEventType] = {
            "EVENT_TYPE_CREATE": "create",
            "EVENT_TYPE_WRITE": "write",
            "EVENT_TYPE_REMOVE": "remove",
            "EVENT_TYPE_RENAME": "rename",
            "EVENT_TYPE_CHMOD": "chmod",
        }
        return cls(name=said.get("name", ""), type=kinds.get(said.get("type", ""), "other"))


@dataclass(frozen=True)
class Port:
    """The address of a port inside a Body."""

    url: str
    """For browsers and programs that resolve names below `localhost`, or the server's domain."""
    headers: Mapping[str, str] = field(repr=False)
    """Headers with which the server's own address leads to this port, with the Body's token if the port is private."""


@dataclass(frozen=True)
class ServerEvent:
    """A server-sent event."""

    name: str
    data: str
    id: str | None = None


@dataclass(frozen=True)
class AgentEvent:
    """An event of an agent, or a piece of one.

    Events of the log have the name `event` and their place in `pos`. `asking`, `delta` and `output` are pieces of
    answers and of output that come before their event.
    """

    name: str
    data: dict[str, Any]
    pos: int | None = None

    @property
    def type(self) -> str:
        """The type of an event of the log, such as `turn.started`; else the name."""
        return str(self.data.get("type", self.name))

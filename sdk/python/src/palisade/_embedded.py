"""A private `pal serve` for programs that name no server.

The server serves the data directory of `pal`. A data directory has one server, so the first program starts it, and the
others of this user join; a server that the user started is used as it is. Each program holds the writing end of a FIFO
open whose reading end belongs to the server's keeper, a shell: when the last program has ended, however it ended, the
keeper reads the end of the file and stops the server.

Bodies of `with` end with their program: its cleaner, another shell, reads their ids from a pipe and removes them with
`pal` when the pipe ends.

Invariant: nothing here outlives the programs that use it, also after `kill -9`.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import HostFailure, ServerUnavailable

_START_WAIT = 30.0
_PAUSE = 0.005

# The server runs in the background, so that the shell can wait for the end of its input.
_KEEPER = '"$@" & job=$!; exec >/dev/null; cat; kill -TERM "$job" 2>/dev/null; wait "$job"'
_CLEANER = """
pal=$1 data=$2; shift 2
while read -r sign id; do
  if [ "$sign" = + ]; then set -- "$@" "$id"; continue; fi
  for held do shift; [ "$held" = "$id" ] || set -- "$@" "$held"; done
done
[ "$#" -eq 0 ] || "$pal" --data "$data" rm --force "$@"
"""


@dataclass(frozen=True)
class Address:
    """Where a server answers, and the key for it."""

    url: str
    key: str | None


@dataclass(frozen=True)
class _Running:
    """A running server, as its lock file names it."""

    url: str
    pid: int


class EmbeddedServer:
    """The server of a data directory, started on the first use."""

    def __init__(self, data: str | os.PathLike[str] | None = None, pal: str | os.PathLike[str] | None = None) -> None:
        self.data = Path(data) if data is not None else _default_data()
        self._pal = os.fspath(pal) if pal is not None else None
        self._mutex = threading.Lock()
        self._lifeline: int | None = None
        self._held: _Running | None = None
        self._cleaner: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None

    def address(self) -> Address:
        """The address of the running server; starts one if none runs."""
        with self._mutex:
            self._after_fork()
            deadline = time.monotonic() + _START_WAIT
            while True:
                with self._alone():
                    running = self._running()
                    if running is None:
                        running = self._start(deadline)
                    if running == self._held or self._join(running):
                        return Address(running.url, self._key())
                # The server belongs to programs that have ended, and stops now.
                _pause_until(deadline, "the server of another program does not stop")

    def close(self) -> None:
        """Lets go of the server, and removes the Bodies that end with this program."""
        with self._mutex:
            if self._pid != os.getpid():
                return
            if self._cleaner is not None and self._cleaner.stdin is not None:
                self._cleaner.stdin.close()
                with suppress(subprocess.TimeoutExpired):
                    self._cleaner.wait(_START_WAIT)
                self._cleaner = None
            self._let_go()

    def note_created(self, body: str) -> None:
        """Has a Body end with this program."""
        with self._mutex:
            self._after_fork()
            if self._cleaner is None:
                command = ["/bin/sh", "-c", _CLEANER, "palisade-cleaner", self.program(), str(self.data)]
                self._cleaner = _spawn(command, stdin=subprocess.PIPE)
            self._tell(f"+ {body}\n")

    def note_removed(self, body: str) -> None:
        """Forgets a Body that has ended."""
        with self._mutex:
            if self._pid == os.getpid() and self._cleaner is not None:
                self._tell(f"- {body}\n")

    def _tell(self, line: str) -> None:
        if self._cleaner is not None and self._cleaner.stdin is not None:
            self._cleaner.stdin.write(line.encode())
            self._cleaner.stdin.flush()

    def program(self) -> str:
        """The `pal` to start."""
        named = self._pal or os.environ.get("PALISADE_PAL")
        found = shutil.which(named or "pal")
        if found is None:
            raise ServerUnavailable(
                f"no server is named, and there is no program {named or 'pal'} to start one",
                kind="host",
                hints=[
                    "install pal, or say where it is: PALISADE_PAL=/path/to/pal",
                    "or use a server: PALISADE_URL=http://HOST:3900 PALISADE_KEY=e2b_…",
                ],
            )
        return os.path.abspath(found)

    def _after_fork(self) -> None:
        """A forked process keeps the server alive through its copy of the lifeline, but the cleaner is its parent's."""
        if self._pid is None:
            atexit.register(self.close)
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._cleaner = None

    def _key(self) -> str:
        try:
            return (self.data / "serve.key").read_text().strip()
        except OSError as error:
            raise ServerUnavailable(
                f"cannot read the key of the server of {self.data}: {error.strerror}",
                kind="host",
                hints=["name the server and a key: PALISADE_URL=… PALISADE_KEY=…"],
            ) from error

    def _running(self) -> _Running | None:
        """The server of the data directory: it holds a lock on the file that has its address."""
        try:
            file = (self.data / "serve.lock").open("rb")
        except OSError:
            return None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                return None
            try:
                said = json.load(file)
                running = _Running(f"http://{said['address']}", int(said["pid"]))
            except (ValueError, KeyError, TypeError):
                return None  # It has not written its address yet. A second start waits for it or says so.
            # A child that a killed server was about to start may hold the lock for a moment.
            return running if Path(f"/proc/{running.pid}").exists() else None

    def _fifo(self) -> Path:
        name = hashlib.sha256(os.fsencode(self.data.resolve())).hexdigest()[:16]
        return _runtime_dir() / f"{name}.lifeline"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other programs of this user from starting a server at the same time."""
        with self._fifo().with_suffix(".lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _join(self, running: _Running) -> bool:
        """Holds the running server alive, if a program started it. A server that the user started needs no holding."""
        self._let_go()
        if not self._is_kept(running):
            self._held = running
            return True
        try:
            self._lifeline = os.open(self._fifo(), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ENOENT):
                raise
            # No keeper reads: it has stopped the server, or was killed before it could.
            with suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGTERM)
            return False
        self._held = running
        return True

    def _let_go(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
        self._lifeline, self._held = None, None

    def _is_kept(self, running: _Running) -> bool:
        """Whether a program started this server."""
        try:
            return self._kept_file().read_text() == str(running.pid)
        except OSError:
            return False

    def _kept_file(self) -> Path:
        return self._fifo().with_suffix(".pid")

    def _start(self, deadline: float) -> _Running:
        """Starts a server and its keeper, and waits until it listens."""
        self._let_go()
        pal, fifo = self.program(), self._fifo()
        with suppress(FileNotFoundError):
            fifo.unlink()
        os.mkfifo(fifo, 0o600)
        reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            lifeline = os.open(fifo, os.O_WRONLY | os.O_CLOEXEC)
            os.set_blocking(reading, True)
            with tempfile.TemporaryFile() as told:
                serve = [pal, "--data", str(self.data), "serve", "--listen", "127.0.0.1:0", "--json", "--log", "error"]
                keeper = _spawn(
                    ["/bin/sh", "-c", _KEEPER, "palisade-keeper", *serve],
                    stdin=reading,
                    stderr=told.fileno(),
                )
                try:
                    running = self._wait_for_start(keeper, deadline)
                except BaseException as failure:
                    os.close(lifeline)
                    keeper.wait()
                    told.seek(0)
                    talk = told.read(1 << 16).decode("utf-8", "replace").strip()
                    if isinstance(failure, ServerUnavailable) and talk:
                        raise _start_failure(talk) from failure
                    raise
        finally:
            os.close(reading)
        self._kept_file().write_text(str(running.pid))
        self._lifeline, self._held = lifeline, running
        return running

    def _wait_for_start(self, keeper: subprocess.Popen[bytes], deadline: float) -> _Running:
        """The address that the server prints when it listens."""
        assert keeper.stdout is not None
        with keeper.stdout as said:
            os.set_blocking(said.fileno(), False)
            line = b""
            while not line.endswith(b"\n"):
                piece = said.read(4096)
                if piece == b"":
                    raise ServerUnavailable("the private server did not start", kind="host")
                if piece is None:
                    _pause_until(deadline, "the private server does not start")
                line += piece or b""
            told = json.loads(line.splitlines()[0])
            return _Running(told["url"], told["pid"])


def _start_failure(talk: str) -> ServerUnavailable:
    lines = [line.strip() for line in talk.splitlines() if line.strip()]
    message = next((line for line in lines if line.startswith("error:")), lines[0])
    hints = [line.removeprefix("hint:").strip() for line in lines if line.startswith("hint:")]
    return ServerUnavailable(
        f"the private server did not start: {message.removeprefix('error:').strip()}", kind="host", hints=hints
    )


def _pause_until(deadline: float, message: str) -> None:
    if time.monotonic() > deadline:
        raise ServerUnavailable(message, kind="host")
    time.sleep(_PAUSE)


def _spawn(command: list[str], *, stdin: int, stderr: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Starts a shell in a session of its own: Ctrl-C in a terminal is for the program, which then ends it."""
    return subprocess.Popen(
        command, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True, cwd="/"
    )


def _default_data() -> Path:
    """The data directory of `pal`, by its own rules."""
    named = os.environ.get("PAL_DATA")
    if named:
        return Path(named).absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/palisade")
    shared = Path(os.environ.get("XDG_DATA_HOME", ""))
    if shared.is_absolute():
        return shared / "palisade"
    return Path.home() / ".local/share/palisade"


def _runtime_dir() -> Path:
    """A directory that only this user may enter."""
    named = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(named, "palisade") if named else Path(tempfile.gettempdir(), f"palisade-{os.geteuid()}")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise HostFailure(
            f"{path} is not a directory of this user alone", kind="host", hints=[f"remove it: rm -r {path}"]
        )
    return path


_servers: dict[tuple[Path, str | None], EmbeddedServer] = {}
_servers_mutex = threading.Lock()


def server_of(data: str | os.PathLike[str] | None, pal: str | os.PathLike[str] | None) -> EmbeddedServer:
    """The server of a data directory; all clients of this program share it."""
    fresh = EmbeddedServer(data, pal)
    with _servers_mutex:
        return _servers.setdefault((fresh.data.absolute(), fresh._pal), fresh)

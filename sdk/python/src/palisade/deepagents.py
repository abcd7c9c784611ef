"""Bodies as sandboxes of Deep Agents.

    from deepagents import create_deep_agent
    from palisade.deepagents import PalisadeSandbox, make_backend

    sandbox = PalisadeSandbox.create()
    agent = create_deep_agent(model=…, backend=make_backend(sandbox))

Install it with `pip install palisade[deepagents]`.
"""

from __future__ import annotations

import hashlib
import posixpath
from typing import TYPE_CHECKING, Any

from deepagents.backends import CompositeBackend
from deepagents.backends.protocol import (
    BackendProtocol,
    DeleteResult,
    EditResult,
    ExecuteOffloadResult,
    ExecuteResponse,
    FileDownloadResponse,
    FileUploadResponse,
    GlobResult,
    GrepResult,
    LsResult,
    ReadResult,
    WriteResult,
)
from deepagents.backends.sandbox import BaseSandbox

from . import models
from ._async.agent_files import AsyncAgentFiles
from ._async.body import AsyncBody
from ._async.client import AsyncClient
from ._io_async import Shared
from ._sync.agent_files import AgentFiles
from ._sync.body import Body
from ._sync.client import Client
from .errors import NotFound
from .results import Result

if TYPE_CHECKING:
    from typing_extensions import Unpack

ARTIFACTS_ROOT = "/tmp/palisade-agent"
"""Where `make_backend` has the middleware keep large results; every user of a Body may write there."""

DEFAULT_TIMEOUT = 120
"""The seconds that a command gets if the agent names no timeout."""

_OUTPUT_LEN_MAX = 10 << 20
_OUTPUT_TAIL = 1 << 20
# Both outputs in the order in which they were written, in bash if the Body has it.
_SHELL = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1" 2>&1; else exec sh -c "$1" 2>&1; fi'
_CAN_CAPTURE = 'mkdir -p -- "$1" 2>/dev/null && [ -w "$1" ] && command -v head tail wc tr cat >/dev/null'


class BodyFiles(BackendProtocol):
    """The files of a Body below `root`, as a backend without commands."""

    def __init__(self, body: Body, *, root: str = "") -> None:
        self.body = body
        self._root = root
        self._files = AgentFiles(body, root)
        # Connections belong to the event loop that opened them.
        self._async_files: Shared[AsyncAgentFiles] = Shared()

    @property
    def _afiles(self) -> AsyncAgentFiles:
        def make() -> AsyncAgentFiles:
            client = AsyncClient(**self.body.client.arguments)
            return AsyncAgentFiles(AsyncBody._known(client, self.body.info), self._root)

        return self._async_files.get(make)

    def ls(self, path: str) -> LsResult:
        """The entries of a directory."""
        return self._files.ls(path)

    async def als(self, path: str) -> LsResult:
        """The entries of a directory."""
        return await self._afiles.ls(path)

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        """A page of a text file, or a whole file that is no text."""
        return self._files.read(file_path, offset, limit)

    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        """A page of a text file, or a whole file that is no text."""
        return await self._afiles.read(file_path, offset, limit)

    def write(self, file_path: str, content: str) -> WriteResult:
        """Creates or replaces a file, and creates its directories."""
        return self._files.write(file_path, content)

    async def awrite(self, file_path: str, content: str) -> WriteResult:
        """Creates or replaces a file, and creates its directories."""
        return await self._afiles.write(file_path, content)

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        """Replaces text in a file."""
        return self._files.edit(file_path, old_string, new_string, replace_all)

    async def aedit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        """Replaces text in a file."""
        return await self._afiles.edit(file_path, old_string, new_string, replace_all)

    def delete(self, file_path: str) -> DeleteResult:
        """Removes a file, or a directory with its contents."""
        return self._files.delete(file_path)

    async def adelete(self, file_path: str) -> DeleteResult:
        """Removes a file, or a directory with its contents."""
        return await self._afiles.delete(file_path)

    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        """The regular files whose paths match a pattern; without a path those below the working directory."""
        return self._files.glob(pattern, path)

    async def aglob(self, pattern: str, path: str | None = None) -> GlobResult:
        """The regular files whose paths match a pattern; without a path those below the working directory."""
        return await self._afiles.glob(pattern, path)

    def grep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> GrepResult:
        """The lines that contain a text; without a path those of files below the working directory."""
        return self._files.grep(pattern, path, glob, max_count=max_count)

    async def agrep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> GrepResult:
        """The lines that contain a text; without a path those of files below the working directory."""
        return await self._afiles.grep(pattern, path, glob, max_count=max_count)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Writes files; each has its own error."""
        return self._files.upload_files(files)

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Writes files; each has its own error."""
        return await self._afiles.upload_files(files)

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """The contents of files; each has its own error."""
        return self._files.download_files(paths)

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """The contents of files; each has its own error."""
        return await self._afiles.download_files(paths)


class PalisadeSandbox(BodyFiles, BaseSandbox):
    """A Body as a sandbox of Deep Agents.

    `create` makes a Body that is kept, `attach` takes one that exists, and `for_thread` gives each thread of
    conversation its own. `with` removes the Body at the end of the block.
    """

    enable_capture_offload = True
    """Large output of a command stays in the Body; the model gets a preview and the path."""

    def __init__(self, body: Body, *, timeout: int = DEFAULT_TIMEOUT) -> None:
        super().__init__(body)
        self._timeout = timeout
        self._capture_dirs: dict[str, bool] = {}

    @classmethod
    def create(
        cls, *, client: Client | None = None, timeout: int = DEFAULT_TIMEOUT, **options: Unpack[models.NewBody]
    ) -> PalisadeSandbox:
        """A new Body, which is kept until it is removed."""
        return cls(Body.create(client=client, **options), timeout=timeout)

    @classmethod
    def attach(cls, name: str, *, client: Client | None = None, timeout: int = DEFAULT_TIMEOUT) -> PalisadeSandbox:
        """The Body with that id or name."""
        return cls(Body.attach(name, client=client), timeout=timeout)

    @classmethod
    def for_thread(
        cls,
        thread_id: str,
        *,
        client: Client | None = None,
        timeout: int = DEFAULT_TIMEOUT,
        **options: Unpack[models.NewBody],
    ) -> PalisadeSandbox:
        """The Body of a thread of conversation, which is created with these options at the first time."""
        name = _name_of_thread(thread_id)
        try:
            return cls.attach(name, client=client, timeout=timeout)
        except NotFound:
            options["name"] = name
            return cls.create(client=client, timeout=timeout, **options)

    def __enter__(self) -> PalisadeSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def id(self) -> str:
        """The id of the Body."""
        return self.body.id

    def snapshot(self, name: str | None = None) -> models.Snapshot:
        """Keeps the files as they are; `create(template=…)` starts from them."""
        return self.body.snapshot(name)

    def fork(self, thread_id: str | None = None) -> PalisadeSandbox:
        """A new sandbox with the files that this one has now, for another thread if one is named."""
        name = _name_of_thread(thread_id) if thread_id is not None else None
        return type(self)(self.body.fork(name=name), timeout=self._timeout)

    def remove(self) -> None:
        """Removes the Body."""
        self.body.remove()

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Runs a command in the shell. A timeout of 0 means none."""
        limit = self._timeout if timeout is None else timeout
        return _response(self.body.run(_command(command), timeout=limit or None), limit, timeout)

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Runs a command in the shell. A timeout of 0 means none."""
        limit = self._timeout if timeout is None else timeout
        return _response(await self._afiles.body.run(_command(command), timeout=limit or None), limit, timeout)

    def execute_with_offload(self, command: str, capture_path: str, **options: Any) -> ExecuteOffloadResult:
        """Runs a command, and leaves large output in the Body if there is a place for it."""
        directory = posixpath.dirname(capture_path)
        if directory not in self._capture_dirs:
            asked = self.body.run(["/bin/sh", "-c", _CAN_CAPTURE, "sh", directory])
            self._capture_dirs[directory] = asked.ok
        if self._capture_dirs[directory]:
            return super().execute_with_offload(command, capture_path, **options)
        return _uncaptured(self.execute(command, timeout=options.get("timeout")))

    async def aexecute_with_offload(self, command: str, capture_path: str, **options: Any) -> ExecuteOffloadResult:
        """Runs a command, and leaves large output in the Body if there is a place for it."""
        directory = posixpath.dirname(capture_path)
        if directory not in self._capture_dirs:
            asked = await self._afiles.body.run(["/bin/sh", "-c", _CAN_CAPTURE, "sh", directory])
            self._capture_dirs[directory] = asked.ok
        if self._capture_dirs[directory]:
            return await super().aexecute_with_offload(command, capture_path, **options)
        return _uncaptured(await self.aexecute(command, timeout=options.get("timeout")))


def make_backend(
    sandbox: PalisadeSandbox,
    *,
    memories: str | None = "memories",
    routes: dict[str, BackendProtocol] | None = None,
    artifacts_root: str = ARTIFACTS_ROOT,
) -> CompositeBackend:
    """The backend for `create_deep_agent`.

    Large results are kept where the Body's user may write. `/memories/` is a directory of a Body of its own with the
    name `memories`, which is created at the first time and kept, so that all agents that name it share their memories;
    with `memories=None` there is none. `routes` adds further places.
    """
    places: dict[str, BackendProtocol] = dict(routes or {})
    if memories is not None:
        client = sandbox.body.client
        try:
            body = Body.attach(memories, client=client)
        except NotFound:
            body = Body.create(client=client, name=memories, metadata={"palisade": "memories"})
        if body.status in ("stopped", "dead", "interrupted"):
            body.start()
        elif body.status == "paused":
            body.resume()
        home = body.run('printf %s "$HOME"', check=True).stdout
        root = posixpath.join(home, "memories")
        if not body.files.exists(root):
            body.files.make_dir(root)
        places.setdefault("/memories/", BodyFiles(body, root=root))
    return CompositeBackend(default=sandbox, routes=places, artifacts_root=artifacts_root)


def _name_of_thread(thread_id: str) -> str:
    """A Body's name is short and plain; a thread's id may be any text."""
    return "thread-" + hashlib.sha256(thread_id.encode()).hexdigest()[:24]


def _command(command: str) -> list[str]:
    return ["/bin/sh", "-c", _SHELL, "sh", command]


def _response(result: Result, limit: int, asked: int | None) -> ExecuteResponse:
    if result.timed_out:
        told = "For long-running commands, re-run using the timeout parameter."
        custom = ""
        if asked is not None:
            told, custom = "The command may be stuck or require more time.", " (custom timeout)"
        text = f"Error: Command timed out after {limit} seconds{custom}. {told}"
        return ExecuteResponse(output=text, exit_code=124, truncated=False)
    data = result.stdout_bytes + result.stderr_bytes
    is_truncated = len(data) > _OUTPUT_LEN_MAX
    if is_truncated:
        missing = len(data) - _OUTPUT_LEN_MAX
        head, tail = data[: _OUTPUT_LEN_MAX - _OUTPUT_TAIL], data[-_OUTPUT_TAIL:]
        data = head + f"\n[{missing} bytes of the output are left out here]\n".encode() + tail
    return ExecuteResponse(output=data.decode("utf-8", "replace"), exit_code=result.exit_code, truncated=is_truncated)


def _uncaptured(response: ExecuteResponse) -> ExecuteOffloadResult:
    return ExecuteOffloadResult(offloaded=False, response=response)

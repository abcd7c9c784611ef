"""Files of a Body."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from os import PathLike
from pathlib import Path
from typing import Any, List

from .._io_async import pieces_of_file, run_blocking
from ..errors import NotFound
from ..results import Entry, FileEvent
from .client import AsyncClient
from .guest import AsyncGuest

_SERVICE = "filesystem.Filesystem"


class AsyncFiles:
    """The files of one Body.

    A path that does not begin with `/` is relative to the user's home directory. These calls may read and write every
    file of the Body, as root there may; what they create belongs to `user`, or to the Body's user.
    """

    def __init__(self, client: AsyncClient, body: str, guest: AsyncGuest) -> None:
        self._client = client
        self._path = f"/v1/bodies/{body}/files"
        self._guest = guest

    async def read(self, path: str, *, user: str | None = None) -> bytes:
        """The contents of a file."""
        return await self._client.request("GET", self._path, params={"path": path, "user": user})

    async def read_text(self, path: str, *, user: str | None = None) -> str:
        """The contents of a file of UTF-8 text."""
        return (await self.read(path, user=user)).decode()

    @asynccontextmanager
    async def open(self, path: str, *, user: str | None = None) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """The length of a file (-1 if the server does not know it), and its contents as they arrive."""
        async with self._client.stream("GET", self._path, params={"path": path, "user": user}) as response:
            yield int(response.headers.get("content-length", -1)), response.aiter_bytes()

    async def pieces(self, path: str, *, user: str | None = None) -> AsyncIterator[bytes]:
        """The contents of a file as they arrive."""
        async with self.open(path, user=user) as (_, pieces):
            async for piece in pieces:
                yield piece

    async def write(self, path: str, content: str | bytes, *, user: str | None = None) -> None:
        """Creates or replaces a file, and creates its directories."""
        data = content.encode() if isinstance(content, str) else content
        await self._put(path, user, data)

    async def upload(self, local: str | PathLike[str], path: str, *, user: str | None = None) -> None:
        """Copies a file of this machine into the Body, however long it is."""
        await self._put(path, user, pieces_of_file(Path(local)))

    async def _put(self, path: str, user: str | None, content: Any) -> None:
        headers = {"Content-Type": "application/octet-stream"}
        await self._client.request(
            "PUT", self._path, params={"path": path, "user": user}, headers=headers, content=content
        )

    async def download(self, path: str, local: str | PathLike[str], *, user: str | None = None) -> None:
        """Copies a file of the Body to this machine, however long it is. A copy that breaks off leaves no file."""
        target = Path(local)
        part = target.with_name(f".{target.name}.part")
        try:
            with part.open("wb") as file:
                async for piece in self.pieces(path, user=user):
                    await run_blocking(lambda piece=piece: file.write(piece))  # type: ignore[misc]
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    async def list(self, path: str = ".", *, depth: int = 1, user: str | None = None) -> List[Entry]:
        """The entries of a directory, and of those below it down to that depth."""
        answer = await self._guest.call(f"{_SERVICE}/ListDir", {"path": path, "depth": depth}, user)
        return [Entry.of(said) for said in answer.get("entries", [])]

    async def stat(self, path: str, *, user: str | None = None) -> Entry:
        """The entry at a path; `NotFound` if there is none."""
        answer = await self._guest.call(f"{_SERVICE}/Stat", {"path": path}, user)
        return Entry.of(answer.get("entry", {}))

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether something is at a path."""
        try:
            await self.stat(path, user=user)
        except NotFound:
            return False
        return True

    async def make_dir(self, path: str, *, user: str | None = None) -> Entry:
        """Creates a directory, and those that it is in."""
        answer = await self._guest.call(f"{_SERVICE}/MakeDir", {"path": path}, user)
        return Entry.of(answer.get("entry", {}))

    async def move(self, source: str, target: str, *, user: str | None = None) -> Entry:
        """Renames a file or directory."""
        answer = await self._guest.call(f"{_SERVICE}/Move", {"source": source, "destination": target}, user)
        return Entry.of(answer.get("entry", {}))

    async def remove(self, path: str, *, user: str | None = None) -> None:
        """Removes a file, or a directory with its contents; nothing happens if there is none."""
        await self._guest.call(f"{_SERVICE}/Remove", {"path": path}, user)

    async def watch(
        self, path: str, *, recursive: bool = False, user: str | None = None
    ) -> AsyncIterator[FileEvent | None]:
        """The changes below a directory. The first value is `None`: from then on no change is missed."""
        message = {"path": path, "recursive": recursive}
        async for answer in self._guest.stream(f"{_SERVICE}/WatchDir", message, user=user):
            if "start" in answer:
                yield None
            elif "filesystem" in answer:
                yield FileEvent.of(answer["filesystem"])

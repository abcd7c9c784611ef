"""The files of a Body as Deep Agents' backends offer them.

No operation needs Python in the Body. Listing, reading, writing and deleting are calls of the server's interface for
files; `grep` and `glob` are `find` and `grep` of the Body, which busybox has, too.

Trust: paths, patterns and contents come from a model. They are arguments of programs, never text of a script.
"""

from __future__ import annotations

import base64
import dataclasses
import posixpath
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, TypeVar, cast

from deepagents.backends import protocol
from deepagents.backends.protocol import (
    ASYNC_GREP_TIMEOUT,
    DeleteResult,
    EditResult,
    FileData,
    FileDownloadResponse,
    FileInfo,
    FileUploadResponse,
    GlobResult,
    GrepMatch,
    GrepResult,
    LsResult,
    ReadResult,
    WriteResult,
)
from deepagents.backends.sandbox import MAX_BINARY_BYTES, MAX_OUTPUT_BYTES, TRUNCATION_MSG
from deepagents.backends.utils import _get_backend_read_file_type, compile_grep_include_glob

from .._io_async import for_each
from .._pages import PREFIX_LEN, PageReader, is_binary
from ..errors import Denied, InvalidRequest, NotFound, PalisadeError
from .body import AsyncBody

R = TypeVar("R")

_EMPTY_FILE = "System reminder: File exists but has empty contents"
_EMPTY_OLD_STRING = "Error: old_string cannot be empty. Provide the exact text to replace."
_GLOB_TIMEOUT: int = getattr(protocol, "ASYNC_GLOB_TIMEOUT", 30)
_GLOB_SECONDS = 5.0
_GLOB_MATCHES_MAX = 10_000
_EDIT_LEN_MAX = 64 << 20

# Prints the regular files below `$1`, and the links to those, each followed by a NUL. Links out of the directory and
# the kernel's file systems are left out.
_FIND = r"""
cd -- "$1" || exit 70
root=$(pwd -P)
if [ "$root" = / ]; then set -- -path ./proc -prune -o -path ./sys -prune -o -path ./dev -prune -o; root=
else set --; fi
export root
exec find . "$@" -type f -print0 -o -type l -exec sh -c '
  for link do
    target=$(readlink -f -- "$link") && [ -f "$target" ] || continue
    case $target in "$root"/*) printf "%s\0" "$link" ;; esac
  done' sh {} +
"""
# Prints the lines of files below `$1` that contain the text `$2`: for each file a line of `$3` and its path, then lines of
# a number, a colon and the text.
_GREP = r"""
name=$(basename -- "$1")
LC_ALL=C; export LC_ALL
if [ -d "$1" ] && [ "$name" != .git ]; then find "$1" -name .git -prune -o -type f -exec grep -lF -e "$2" -- {} +
elif [ -d "$1" ]; then find "$1" -type f -exec grep -lF -e "$2" -- {} +
else grep -lF -e "$2" -- "$1"; fi 2>/dev/null | while IFS= read -r file; do
  printf '%s %s\n' "$3" "$file"
  grep -nF -e "$2" -- "$file" 2>/dev/null
done
"""
_KIND = '[ -e "$1" ] || [ -L "$1" ] || exit 66; [ -d "$1" ] || exit 67; [ -r "$1" ] && [ -x "$1" ] || exit 68'
_KINDS = {66: "path_not_found", 67: "not_a_directory", 68: "permission_denied"}


class AsyncAgentFiles:
    """The files of a Body below `root`, as absolute paths from there."""

    def __init__(self, body: AsyncBody, root: str = "") -> None:
        self.body = body
        self._root = root.rstrip("/")
        self._workdir: str | None = None

    def _inside(self, path: str) -> str:
        return self._root + path if path.startswith("/") else f"{self._root}/{path}"

    def _outside(self, path: str) -> str:
        return path.removeprefix(self._root) or "/"

    async def ls(self, path: str) -> LsResult:
        """The entries of a directory."""
        try:
            entries = await self.body.files.list(self._inside(path))
        except PalisadeError as error:
            word = "path_not_found" if isinstance(error, NotFound) else "not_a_directory"
            word = "permission_denied" if isinstance(error, Denied) else word
            return LsResult(entries=None, error=f"Path '{path}': {word}")
        return LsResult(
            entries=[
                FileInfo(
                    path=posixpath.join(path, entry.name),
                    is_dir=entry.is_dir and entry.symlink_target is None,
                    size=entry.size,
                    modified_at=entry.modified_at,
                )
                for entry in sorted(entries, key=lambda entry: entry.name)
            ]
        )

    async def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        """A page of a text file, or a whole file that is no text."""
        path, offset, limit = self._inside(file_path), max(int(offset), 0), max(int(limit), 0)
        is_text = _get_backend_read_file_type(file_path) == "text"
        try:
            async with self.body.files.open(path) as (size, pieces):
                return await self._page(file_path, size, pieces, is_text, offset, limit)
        except PalisadeError as error:
            return ReadResult(error=f"File '{file_path}': {_read_word(error)}")

    async def _page(
        self, file_path: str, size: int, pieces: AsyncIterator[bytes], is_text: bool, offset: int, limit: int
    ) -> ReadResult:
        if size == 0:
            return ReadResult(file_data=FileData(content=_EMPTY_FILE, encoding="utf-8"))
        prefix = b""
        async for piece in pieces:
            prefix += piece
            if len(prefix) >= PREFIX_LEN:
                break
        if not is_text or is_binary(prefix):
            if size > MAX_BINARY_BYTES:
                why = f"Binary file exceeds maximum preview size of {MAX_BINARY_BYTES} bytes"
                return ReadResult(error=f"File '{file_path}': {why}")
            async for piece in pieces:
                prefix += piece
            return ReadResult(file_data=FileData(content=base64.b64encode(prefix).decode(), encoding="base64"))
        if limit == 0:
            return _result(ReadResult, file_data=FileData(content="", encoding="utf-8"), no_lines_requested=True)
        page = PageReader(offset, limit, size, MAX_OUTPUT_BYTES, TRUNCATION_MSG)
        is_done = page.feed(prefix)
        if not is_done:
            async for piece in pieces:
                is_done = page.feed(piece)
                if is_done:
                    break
        if not is_done:
            page.end()
        if page.is_past_end:
            why = f"Line offset {offset} exceeds file length ({page.lines} lines)"
            return ReadResult(error=f"File '{file_path}': {why}")
        return _result(
            ReadResult,
            file_data=FileData(content=page.content, encoding="utf-8"),
            total_lines=page.total_lines,
            start_line=offset + 1,
            end_line=page.end_line,
            next_offset=page.next_offset,
        )

    async def write(self, file_path: str, content: str) -> WriteResult:
        """Creates or replaces a file, and creates its directories."""
        try:
            await self.body.files.write(self._inside(file_path), content.encode("utf-8", "surrogatepass"))
        except PalisadeError as error:
            return WriteResult(error=f"Failed to write file '{file_path}': {_file_word(error)}")
        return WriteResult(path=file_path)

    async def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        """Replaces text in a file."""
        if not old_string:
            return EditResult(error=_EMPTY_OLD_STRING)
        path = self._inside(file_path)
        try:
            async with self.body.files.open(path) as (size, pieces):
                if size > _EDIT_LEN_MAX:
                    why = f"the file has {size} bytes, and an edit may have {_EDIT_LEN_MAX}"
                    return EditResult(error=f"Error editing file '{file_path}': {why}")
                raw = b"".join([piece async for piece in pieces])
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            return EditResult(error=f"Error: File '{file_path}' is not a text file")
        except PalisadeError as error:
            return EditResult(error=_edit_error(error, file_path))
        old, new, count = _find_occurrences(text, old_string, new_string)
        if count == 0:
            return EditResult(error=f"Error: String not found in file: '{old_string}'")
        if count > 1 and not replace_all:
            why = "appears multiple times. Use replace_all=True to replace all occurrences."
            return EditResult(error=f"Error: String '{old_string}' {why}")
        try:
            await self.body.files.write(path, text.replace(old, new).encode("utf-8", "surrogatepass"))
        except PalisadeError as error:
            return EditResult(error=_edit_error(error, file_path))
        return EditResult(path=file_path, occurrences=count)

    async def delete(self, file_path: str) -> DeleteResult:
        """Removes a file, or a directory with its contents."""
        path = self._inside(file_path)
        try:
            if not await self._is_there(path):
                return DeleteResult(error=f"Error: '{file_path}' not found")
            await self.body.files.remove(path)
        except PalisadeError as error:
            return DeleteResult(error=f"Error deleting file '{file_path}': {error.message}")
        return DeleteResult(path=file_path)

    async def _is_there(self, path: str) -> bool:
        """Whether something is at a path, also a link to nothing."""
        if await self.body.files.exists(path):
            return True
        return (await self.body.run(["/bin/sh", "-c", '[ -L "$1" ]', "sh", path])).ok

    async def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Writes files, in the order of the list; each has its own error."""
        return list(await for_each(self._upload, files))

    async def _upload(self, file: tuple[str, bytes]) -> FileUploadResponse:
        path, content = file
        if not path.startswith("/") or "\0" in path:
            return FileUploadResponse(path=path, error="invalid_path")
        try:
            await self.body.files.write(self._inside(path), content)
        except PalisadeError as error:
            return FileUploadResponse(path=path, error=_file_word(error))
        return FileUploadResponse(path=path, error=None)

    async def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """The contents of files, in the order of the list; each has its own error."""
        return list(await for_each(self._download, paths))

    async def _download(self, path: str) -> FileDownloadResponse:
        if not path.startswith("/") or "\0" in path:
            return FileDownloadResponse(path=path, content=None, error="invalid_path")
        try:
            content = await self.body.files.read(self._inside(path))
        except PalisadeError as error:
            return FileDownloadResponse(path=path, content=None, error=_file_word(error))
        return FileDownloadResponse(path=path, content=content, error=None)

    async def _search_root(self, path: str | None) -> str:
        """Where a search begins: without a path in the working directory."""
        if path:
            return self._inside(path)
        if self._root:
            return self._root
        if self._workdir is None:
            self._workdir = (await self.body.run("pwd", check=True)).stdout.removesuffix("\n")
        return self._workdir

    async def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        """The regular files whose paths match a pattern."""
        root = await self._search_root(path)
        shown = path or self._outside(root)
        try:
            matches = compile_grep_include_glob(pattern)
        except ValueError:
            word = "invalid_pattern" if ".." in pattern.replace("\\", "/").split("/") else "pattern_too_broad"
            return GlobResult(matches=None, error=f"Path '{shown}': {word}")
        deadline = time.monotonic() + _GLOB_SECONDS
        found: list[str] = []
        kind = await self.body.run(["/bin/sh", "-c", _KIND, "sh", root])
        if not kind.ok:
            return GlobResult(matches=None, error=f"Path '{shown}': {_KINDS.get(kind.exit_code, 'unreadable')}")
        rest, reason = b"", None
        async with await self.body.spawn(
            ["/bin/sh", "-c", _FIND, "sh", root], stdin=False, timeout=_GLOB_TIMEOUT
        ) as finding:
            async for output in finding:
                if output.stream == "stderr":
                    reason = "unreadable"
                    continue
                *names, rest = (rest + output.data).split(b"\0")
                found += [name for name in (_relative(name) for name in names) if matches(name)]
                if len(found) > _GLOB_MATCHES_MAX or time.monotonic() > deadline:
                    reason = reason or "budget"
                    break
        infos = [
            FileInfo(path=self._outside(posixpath.join(root, name)), is_dir=False)
            for name in sorted(found[:_GLOB_MATCHES_MAX])
        ]
        return _result(GlobResult, matches=infos, truncated=reason is not None, truncation_reason=reason)

    async def grep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> GrepResult:
        """The lines that contain a text; `.git` directories are left out."""
        root = await self._search_root(path)
        shown = path or self._outside(root)
        try:
            is_included = compile_grep_include_glob(glob) if glob else None
        except ValueError as error:
            return GrepResult(error=f"Path '{shown}': {error}")
        kind = await self.body.run(["/bin/sh", "-c", _KIND, "sh", root])
        if kind.exit_code == 66:
            return GrepResult(error=f"Path '{shown}': path_not_found")
        mark = secrets.token_hex(8)
        lines = _GrepLines(mark, root, is_included if kind.exit_code != 67 else None)
        is_full = False
        script = ["/bin/sh", "-c", _GREP, "sh", root, pattern, mark]
        async with await self.body.spawn(script, stdin=False, timeout=ASYNC_GREP_TIMEOUT) as searching:
            async for output in searching:
                if output.stream == "stdout":
                    lines.feed(output.data)
                is_full = max_count is not None and len(lines.matches) > max_count
                if is_full:
                    break
        if not is_full:
            lines.feed(b"\n")
            if searching.result is not None and searching.result.timed_out:
                advice = "Try a more specific pattern or a narrower path."
                return GrepResult(error=f"Error: grep timed out after {ASYNC_GREP_TIMEOUT}s. {advice}")
        matches = [
            GrepMatch(path=self._outside(match["path"]), line=match["line"], text=match["text"])
            for match in lines.matches[: max_count if is_full else None]
        ]
        matches.sort(key=lambda match: (match["path"], match["line"]))
        return _result(GrepResult, matches=matches, truncated=is_full)


class _GrepLines:
    """Reads the output of the script for `grep`."""

    def __init__(self, mark: str, root: str, is_included: Any) -> None:
        self._mark = mark.encode() + b" "
        self._root = root
        self._is_included = is_included
        self._path: str | None = None
        self._rest = b""
        self.matches: list[GrepMatch] = []

    def feed(self, piece: bytes) -> None:
        """Takes a piece of output."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        if line.startswith(self._mark):
            path = line.removeprefix(self._mark).decode("utf-8", "replace")
            relative = posixpath.relpath(path, self._root)
            self._path = path if self._is_included is None or self._is_included(relative) else None
            return
        number, colon, text = line.partition(b":")
        # A file that is no text has other lines, or lines with a NUL.
        if self._path is None or not colon or not number.isdigit() or b"\0" in text:
            return
        found = GrepMatch(path=self._path, line=int(number), text=text.decode("utf-8", "replace"))
        self.matches.append(found)


def _relative(name: bytes) -> str:
    return name.decode("utf-8", "replace").removeprefix("./")


def _result(cls: type[R], **fields: Any) -> R:
    """A result of this version of deepagents: older ones have fewer fields."""
    known = {field.name for field in dataclasses.fields(cast(Any, cls))}
    return cls(**{name: value for name, value in fields.items() if name in known})


def _find_occurrences(text: str, old: str, new: str) -> tuple[str, str, int]:
    """The text to replace in the line ends that the file has, and how often it occurs."""
    old_lf, new_lf = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    styles = [(old, new), (old_lf.replace("\n", "\r\n"), new_lf.replace("\n", "\r\n")), (old_lf, new_lf)]
    for wanted, replacement in styles:
        count = text.count(wanted)
        if count:
            return wanted, replacement, count
    return old, new, 0


def _read_word(error: PalisadeError) -> str:
    if isinstance(error, NotFound):
        return "file_not_found"
    if isinstance(error, Denied):
        return "permission_denied"
    return "not_a_file" if isinstance(error, InvalidRequest) else error.message


def _edit_error(error: PalisadeError, file_path: str) -> str:
    if isinstance(error, NotFound):
        return f"Error: File '{file_path}' not found"
    if isinstance(error, Denied):
        return f"Error: Permission denied editing file '{file_path}'"
    if isinstance(error, InvalidRequest):
        return f"Error: '{file_path}' is not a regular file"
    return f"Error editing file '{file_path}': {error.message}"


def _file_word(error: PalisadeError) -> str:
    """The word of the protocol for an error of one file."""
    if isinstance(error, NotFound):
        return "file_not_found"
    if isinstance(error, Denied):
        return "permission_denied"
    if isinstance(error, InvalidRequest):
        return "is_directory" if "is a directory" in error.message else "invalid_path"
    return error.message

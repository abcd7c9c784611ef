"""The files of a Body as Deep Agents' backends offer them.

No operation needs Python in the Body. Contents go through the server's interface for files, after a look whether the
Body's user may do that; `delete`, `grep` and `glob` are `rm`, `grep` and `find` of the Body, which busybox has, too.

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
from ..errors import Denied, NotFound, PalisadeError
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
[ -e "$1" ] || exit 66; [ -d "$1" ] || exit 67; [ -r "$1" ] && cd -- "$1" 2>/dev/null || exit 68
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
# Prints the lines of files below `$1` that contain the text `$2`. With GNU's grep a line is `$3`, and the others are a
# path, a NUL, a number, a colon and the text; with another grep, before the lines of each file (a number, a colon, the
# text) there is a line of `$3` and its path.
_GREP = r"""
[ -e "$1" ] || exit 66; [ -r "$1" ] && { [ -x "$1" ] || [ -f "$1" ]; } || exit 68
LC_ALL=C; export LC_ALL
grep -FIZ -e x /dev/null 2>/dev/null
if [ "$?" -le 1 ]; then printf '%s\n' "$3"; how=-HnFIZ; else how=-lF; fi
find_lines() {
  if [ -d "$1" ] && [ "$(basename -- "$1")" != .git ]; then
    find "$1" -name .git -prune -o -type f -exec grep "$how" -e "$2" -- {} +
  elif [ -d "$1" ]; then find "$1" -type f -exec grep "$how" -e "$2" -- {} +
  else grep "$how" -e "$2" -- "$1"; fi 2>/dev/null
}
if [ "$how" != -lF ]; then find_lines "$@"; exit 0; fi
find_lines "$@" | while IFS= read -r file; do
  printf '%s %s\n' "$3" "$file"
  grep -nF -e "$2" -- "$file" 2>/dev/null
done
"""
# Prints for each pair of a letter and a path what the Body's user finds there: `ok`, `missing`, `denied`, `directory`,
# `file`. The letters are `l` (list), `r` (read), `w` (write or create) and `e` (read and write).
_RIGHTS = r"""
find_right() {
  if [ -d "$2" ]; then
    if [ "$1" != l ]; then echo directory
    elif [ -r "$2" ] && [ -x "$2" ]; then echo ok; else echo denied; fi
  elif [ -e "$2" ]; then
    case $1 in
      l) echo file ;;
      r) if [ -r "$2" ]; then echo ok; else echo denied; fi ;;
      w) if [ -w "$2" ]; then echo ok; else echo denied; fi ;;
      e) if [ -r "$2" ] && [ -w "$2" ]; then echo ok; else echo denied; fi ;;
    esac
  else
    up=$2
    until [ -e "$up" ]; do up=${up%/*}; [ -n "$up" ] || up=/; done
    if ! [ -d "$up" ]; then echo file
    elif ! [ -x "$up" ]; then echo denied
    elif [ "$1" != w ]; then echo missing
    elif [ -w "$up" ]; then echo ok; else echo denied; fi
  fi
}
while [ "$#" -gt 0 ]; do find_right "$1" "$2"; shift 2; done
"""
_DELETE = '[ -e "$1" ] || [ -L "$1" ] || exit 66; exec rm -rf -- "$1" 2>&1'
_MISSING = 66
_PAIRS_MAX = 1000


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

    async def _right(self, letter: str, path: str) -> str:
        return (await self._rights([(letter, path)]))[0]

    async def _rights(self, wants: list[tuple[str, str]]) -> list[str]:
        """The rights of the Body's user at each path.

        The server's interface for files itself acts as root in the Body.
        """
        words: list[str] = []
        for start in range(0, len(wants), _PAIRS_MAX):
            pairs = [word for want in wants[start : start + _PAIRS_MAX] for word in want]
            words += (await self.body.run(["/bin/sh", "-c", _RIGHTS, "sh", *pairs], check=True)).stdout.split()
        return words

    async def ls(self, path: str) -> LsResult:
        """The entries of a directory."""
        try:
            right = await self._right("l", self._inside(path))
            if right != "ok":
                return LsResult(entries=None, error=f"Path '{path}': {_LS_WORDS[right]}")
            entries = await self.body.files.list(self._inside(path))
        except PalisadeError as error:
            return LsResult(entries=None, error=f"Path '{path}': {_ls_word(error)}")
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
            right = await self._right("r", path)
            if right != "ok":
                return ReadResult(error=f"File '{file_path}': {_READ_WORDS[right]}")
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
        (uploaded,) = await self.upload_files([(file_path, content.encode("utf-8", "surrogatepass"))])
        if uploaded.error:
            return WriteResult(error=f"Failed to write file '{file_path}': {uploaded.error}")
        return WriteResult(path=file_path)

    async def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        """Replaces text in a file."""
        if not old_string:
            return EditResult(error=_EMPTY_OLD_STRING)
        path = self._inside(file_path)
        try:
            right = await self._right("e", path)
            if right != "ok":
                return EditResult(error=_EDIT_ERRORS[right].format(file_path))
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
        try:
            done = await self.body.run(["/bin/sh", "-c", _DELETE, "sh", self._inside(file_path)])
        except PalisadeError as error:
            return DeleteResult(error=f"Error deleting file '{file_path}': {error.message}")
        if done.exit_code == _MISSING:
            return DeleteResult(error=f"Error: '{file_path}' not found")
        if not done.ok:
            return DeleteResult(error=f"Error deleting file '{file_path}': {done.stdout.strip() or 'unknown error'}")
        return DeleteResult(path=file_path)

    async def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Writes files; each has its own error. The answers are in the order of the list."""
        errors = await self._errors("w", [path for path, _ in files])

        async def write(file: tuple[str, bytes]) -> FileUploadResponse:
            path, content = file
            if path in errors:
                return FileUploadResponse(path=path, error=errors[path])
            try:
                await self.body.files.write(self._inside(path), content)
            except PalisadeError as error:
                return FileUploadResponse(path=path, error=_file_word(error))
            return FileUploadResponse(path=path, error=None)

        return list(await for_each(write, files))

    async def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """The contents of files; each has its own error. The answers are in the order of the list."""
        errors = await self._errors("r", paths)

        async def read(path: str) -> FileDownloadResponse:
            if path in errors:
                return FileDownloadResponse(path=path, content=None, error=errors[path])
            try:
                content = await self.body.files.read(self._inside(path))
            except PalisadeError as error:
                return FileDownloadResponse(path=path, content=None, error=_file_word(error))
            return FileDownloadResponse(path=path, content=content, error=None)

        return list(await for_each(read, paths))

    async def _errors(self, letter: str, paths: list[str]) -> dict[str, str]:
        """The word of the protocol for each path at which the Body's user may not do that."""
        errors = {path: "invalid_path" for path in paths if not path.startswith("/") or "\0" in path}
        others = [path for path in dict.fromkeys(paths) if path not in errors]
        try:
            rights = await self._rights([(letter, self._inside(path)) for path in others])
        except PalisadeError as error:
            return {**errors, **{path: _file_word(error) for path in others}}
        return {**errors, **{path: _FILE_WORDS[right] for path, right in zip(others, rights) if right != "ok"}}

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
        try:
            return await self._glob(pattern, path)
        except PalisadeError as error:
            return GlobResult(matches=None, error=f"Path '{path}': {error.message}")

    async def _glob(self, pattern: str, path: str | None) -> GlobResult:
        root = await self._search_root(path)
        shown = path or self._outside(root)
        if ".." in pattern.replace("\\", "/").split("/"):
            return GlobResult(matches=None, error=f"Path '{shown}': invalid_pattern")
        try:
            matches = compile_grep_include_glob(pattern)
        except Exception:  # Older versions of deepagents pass on what wcmatch raises.
            return GlobResult(matches=None, error=f"Path '{shown}': pattern_too_broad")
        deadline = time.monotonic() + _GLOB_SECONDS
        found: list[str] = []
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
        ended = finding.result
        if ended is not None and ended.exit_code in _ENDS:
            return GlobResult(matches=None, error=f"Path '{shown}': {_ENDS[ended.exit_code]}")
        infos = [
            FileInfo(path=self._outside(posixpath.join(root, name)), is_dir=False)
            for name in sorted(found[:_GLOB_MATCHES_MAX])
        ]
        return _result(GlobResult, matches=infos, truncated=reason is not None, truncation_reason=reason)

    async def grep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> GrepResult:
        """The lines that contain a text; `.git` directories are left out."""
        try:
            return await self._grep(pattern, path, glob, max_count)
        except PalisadeError as error:
            return GrepResult(error=f"Path '{path}': {error.message}")

    async def _grep(self, pattern: str, path: str | None, glob: str | None, max_count: int | None) -> GrepResult:
        root = await self._search_root(path)
        shown = path or self._outside(root)
        try:
            is_included = compile_grep_include_glob(glob) if glob else None
        except Exception as error:  # Older versions of deepagents pass on what wcmatch raises.
            return GrepResult(error=f"Path '{shown}': {error}")
        mark = secrets.token_hex(8)
        lines = _GrepLines(mark, root, is_included)
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
            assert searching.result is not None
            if searching.result.exit_code in _ENDS:
                return GrepResult(error=f"Path '{shown}': {_ENDS[searching.result.exit_code]}")
            if searching.result.timed_out:
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
        self._has_paths = False
        self._raw_path = b""
        self._path: str | None = None
        self._rest = b""
        self.matches: list[GrepMatch] = []

    def feed(self, piece: bytes) -> None:
        """Takes a piece of output."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        if line == self._mark.rstrip():
            self._has_paths = True
            return
        if line.startswith(self._mark):
            self._enter(line.removeprefix(self._mark))
            return
        if self._has_paths:
            path, nul, line = line.partition(b"\0")
            if not nul:
                return
            self._enter(path)
        number, colon, text = line.partition(b":")
        # A file that is no text has other lines, or lines with a NUL.
        if self._path is None or not colon or not number.isdigit() or b"\0" in text:
            return
        self.matches.append(GrepMatch(path=self._path, line=int(number), text=text.decode("utf-8", "replace")))

    def _enter(self, path: bytes) -> None:
        """Takes the path of the lines that follow."""
        if path == self._raw_path:
            return
        self._raw_path = path
        shown = path.decode("utf-8", "replace")
        # A pattern chooses among the files of a directory; a search of one file needs none.
        is_included = shown == self._root or self._is_included is None
        self._path = shown if is_included or self._is_included(posixpath.relpath(shown, self._root)) else None


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


_ENDS = {66: "path_not_found", 67: "not_a_directory", 68: "permission_denied"}
_LS_WORDS = {"missing": "path_not_found", "file": "not_a_directory", "denied": "permission_denied"}
_READ_WORDS = {
    "missing": "file_not_found",
    "file": "file_not_found",
    "directory": "not_a_file",
    "denied": "permission_denied",
}
_FILE_WORDS = {
    "missing": "file_not_found",
    "file": "invalid_path",
    "directory": "is_directory",
    "denied": "permission_denied",
}
_EDIT_ERRORS = {
    "missing": "Error: File '{}' not found",
    "file": "Error: File '{}' not found",
    "directory": "Error: '{}' is not a regular file",
    "denied": "Error: Permission denied editing file '{}'",
}


def _ls_word(error: PalisadeError) -> str:
    return _LS_WORDS["missing"] if isinstance(error, NotFound) else error.message


def _read_word(error: PalisadeError) -> str:
    return _READ_WORDS["missing"] if isinstance(error, NotFound) else error.message


def _edit_error(error: PalisadeError, file_path: str) -> str:
    if isinstance(error, NotFound):
        return _EDIT_ERRORS["missing"].format(file_path)
    return f"Error editing file '{file_path}': {error.message}"


def _file_word(error: PalisadeError) -> str:
    """The word of the protocol for an error of one file."""
    if isinstance(error, NotFound):
        return _FILE_WORDS["missing"]
    return _FILE_WORDS["denied"] if isinstance(error, Denied) else error.message

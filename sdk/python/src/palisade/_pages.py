"""Pages of a text file, as Deep Agents' `read` gives them, from pieces of bytes.

Invariant: a page and its numbers are those that `BaseSandbox.read` gives for the same file; a test compares them.
"""

from __future__ import annotations

import codecs
import io

COUNT_LEN_MAX = 1 << 20
"""The longest file whose lines are counted although the page ends before its end."""
PREFIX_LEN = 8192
"""A file is text if this much of its beginning is UTF-8."""


def is_binary(prefix: bytes) -> bool:
    """Whether the beginning of a file is no UTF-8; it may end within a character."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(prefix[:PREFIX_LEN], final=False)
    except UnicodeDecodeError:
        return True
    return False


class PageReader:
    """Collects the lines from `offset` to `offset + limit` of a file of `size` bytes."""

    def __init__(self, offset: int, limit: int, size: int, len_max: int, notice: str) -> None:
        self._offset, self._limit, self._size = offset, limit, size
        self._room = len_max - len(notice.encode())
        self._notice = notice
        self._decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
        self._rest: list[str] = []
        self._parts: list[str] = []
        self.lines = 0
        self.returned = 0
        self._is_cut = False
        self._at_end = False

    def feed(self, piece: bytes) -> bool:
        """Takes a piece; whether the rest of the file is not needed."""
        first, *others = self._decoder.decode(piece).split("\n")
        self._rest.append(first)
        for other in others:
            self._line("".join(self._rest))
            self._rest = [other]
        return self._is_full and self._size > COUNT_LEN_MAX and (len(others) > 0 or bool(first))

    def end(self) -> None:
        """Notes that the file has ended."""
        last = "".join(self._rest) + self._decoder.decode(b"", final=True)
        if last:
            self._line(last.removesuffix("\n"))
        self._at_end = True

    @property
    def _is_full(self) -> bool:
        return self._is_cut or self.returned >= self._limit

    def _line(self, line: str) -> None:
        self.lines += 1
        if self.lines <= self._offset or self._is_full:
            return
        piece = line if self.returned == 0 else "\n" + line
        data = piece.encode()
        if len(data) > self._room:
            self._is_cut = True
            self._parts.append(data[: self._room].decode("utf-8", "ignore"))
            return
        self._room -= len(data)
        self._parts.append(piece)
        self.returned += 1

    @property
    def is_past_end(self) -> bool:
        """Whether the file has no line behind the offset."""
        return self.returned == 0 and not self._is_cut

    @property
    def content(self) -> str:
        """The text of the page."""
        return "".join(self._parts) + (self._notice if self._is_cut else "")

    @property
    def end_line(self) -> int:
        """The number of the last line; a first line that is too long counts, so that reading goes on behind it."""
        return self._offset + (self.returned or 1)

    @property
    def total_lines(self) -> int | None:
        """The number of lines of the file, if all were read."""
        return self.lines if self._at_end else None

    @property
    def next_offset(self) -> int | None:
        """The number of lines to skip for the next page, if there is one."""
        total = self.total_lines
        return None if total is not None and self.end_line >= total else self.end_line

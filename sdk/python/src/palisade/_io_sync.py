"""The differences between the asynchronous classes and their generated twins: waiting, files and streams."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
from httpcore import NetworkStream as _NetworkStream

T = TypeVar("T")
PIECE_LEN = 256 << 10

HttpClient = httpx.Client
HttpTransport = httpx.HTTPTransport
NetworkStream = _NetworkStream
Lock = threading.Lock
sleep = time.sleep


def run_blocking(work: Callable[[], T]) -> T:
    """Runs work that may block."""
    return work()


def pieces_of_file(path: Path) -> Iterator[bytes]:
    """The contents of a local file."""
    with path.open("rb") as file:
        while piece := file.read(PIECE_LEN):
            yield piece


class Shared(Generic[T]):
    """One value for each process: a forked process must not use the connections of its parent."""

    def __init__(self) -> None:
        self._values: dict[int, T] = {}
        self._mutex = threading.Lock()

    def get(self, make: Callable[[], T]) -> T:
        """The value of this process."""
        with self._mutex:
            pid = os.getpid()
            if pid not in self._values:
                self._values[pid] = make()
            return self._values[pid]


def for_each(work: Callable[[Any], T], items: Sequence[Any], *, at_once: int = 16) -> list[T]:
    """Does work for each item, one after the other, and returns the results in order."""
    return [work(item) for item in items]

"""The differences between the asynchronous classes and their generated twins: waiting, files and streams."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
from httpcore import AsyncNetworkStream

T = TypeVar("T")
PIECE_LEN = 256 << 10

HttpClient = httpx.AsyncClient
HttpTransport = httpx.AsyncHTTPTransport
NetworkStream = AsyncNetworkStream
Lock = asyncio.Lock
sleep = asyncio.sleep


async def run_blocking(work: Callable[[], T]) -> T:
    """Runs work that may block without blocking the event loop."""
    return await asyncio.to_thread(work)


async def pieces_of_file(path: Path) -> AsyncIterator[bytes]:
    """The contents of a local file."""
    with await asyncio.to_thread(path.open, "rb") as file:
        while piece := await asyncio.to_thread(file.read, PIECE_LEN):
            yield piece


class Shared(Generic[T]):
    """One value for each event loop: connections belong to the loop that opened them."""

    def __init__(self) -> None:
        self._values: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, T] = weakref.WeakKeyDictionary()

    def get(self, make: Callable[[], T]) -> T:
        """The value of the running loop."""
        loop = asyncio.get_running_loop()
        # The connections of a loop that has ended are of no use, and keep files open.
        for ended in [known for known in self._values if known.is_closed()]:
            del self._values[ended]
        value = self._values.get(loop)
        if value is None:
            value = self._values[loop] = make()
        return value


async def for_each(work: Callable[[Any], Awaitable[T]], items: Sequence[Any], *, at_once: int = 16) -> list[T]:
    """Does work for each item, several at once, and returns the results in order."""
    places = asyncio.Semaphore(at_once)

    async def one(item: Any) -> T:
        async with places:
            return await work(item)

    return list(await asyncio.gather(*(one(item) for item in items)))

"""The asynchronous twins. They have the code of the others; here is what only they do."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from palisade import AsyncBody, AsyncClient, AsyncHost, NotFound


async def test_three_lines() -> None:
    async with AsyncBody() as body:
        assert (await body.run("echo $((6 * 7))")).stdout == "42\n"
    with pytest.raises(NotFound):
        await body.refresh()


async def test_everything_once(tmp_path: Path) -> None:
    async with AsyncBody() as body:
        await body.files.write("a/b", b"x" * 300_000)
        await body.files.download("a/b", tmp_path / "b")
        await body.files.upload(tmp_path / "b", "c")
        assert await body.files.read("c") == b"x" * 300_000
        async with await body.spawn(["cat"]) as process:
            await process.write("one\n")
            await process.close_stdin()
            assert (await process.wait()).stdout == "one\n"
        async with body.terminal(command="sh") as terminal:
            await terminal.write("exit 6\n")
            async for _ in terminal:
                pass
            assert terminal.exit_code == 6
        fork = await body.fork()
        assert fork.id in [other.id for other in await AsyncBody.list()]
        await fork.remove()
        events = AsyncHost().follow_events(after=0, body=body.id)
        assert (await events.__anext__())["type"] == "body.created"
        await events.aclose()  # type: ignore[attr-defined]


async def test_five_hundred_calls_at_once() -> None:
    async with AsyncBody() as body:
        looks = asyncio.gather(*(body.files.exists("/etc") for _ in range(400)))
        commands = asyncio.gather(*(body.run("echo x") for _ in range(100)))
        assert await looks == [True] * 400
        assert {result.stdout for result in await commands} == {"x\n"}


async def test_a_cancelled_call_leaves_the_client_usable() -> None:
    async with AsyncBody() as body:
        task = asyncio.create_task(body.run("sleep 30"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        start = time.monotonic()
        assert (await body.run("echo on")).stdout == "on\n"
        assert time.monotonic() - start < 10


def test_each_event_loop_has_its_own_connections() -> None:
    async def run() -> str:
        async with AsyncBody() as body:
            return (await body.run("echo loop")).stdout

    assert [asyncio.run(run()) for _ in range(3)] == ["loop\n"] * 3


async def test_a_client_of_ones_own(server: tuple[str, str, Path]) -> None:
    async with AsyncClient(server[0], server[1]) as client:
        assert await client.version()
        async with AsyncBody(client=client) as body:
            assert (await body.run("true")).ok

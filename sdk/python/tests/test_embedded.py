"""The private server of programs that name none: each program here is a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NEEDS_NO_SERVER = True
HEAD = "import os, sys, time\nfrom palisade import *\ntold = lambda *words: print(*words, flush=True)\n"


class Programs:
    """Programs that share a data directory."""

    def __init__(self, pal: str, work: Path) -> None:
        self.pal, self.data = pal, work / "data"
        (work / "run").mkdir(mode=0o700)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PALISADE_")},
            "PALISADE_PAL": pal,
            "PAL_DATA": str(self.data),
            "XDG_RUNTIME_DIR": str(work / "run"),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        self.started: list[subprocess.Popen[str]] = []

    def start(self, program: str, **more: str) -> subprocess.Popen[str]:
        """Starts a program."""
        process = subprocess.Popen(
            [sys.executable, "-c", HEAD + program],
            env={**self.environment, **more},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, program: str, **more: str) -> tuple[str, str]:
        """Runs a program to its end."""
        return self.start(program, **more).communicate(timeout=60)

    def bodies(self) -> list[dict[str, Any]]:
        """The Bodies of the data directory."""
        listed = subprocess.run([self.pal, "--data", str(self.data), "ls", "--json"], capture_output=True, text=True)
        return [json.loads(line) for line in listed.stdout.splitlines()]

    def server(self) -> int | None:
        """The pid of the server, if one runs."""
        try:
            pid = int(json.loads((self.data / "serve.lock").read_text())["pid"])
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, ValueError):
            return None
        # A zombie has closed its files, so its port is free; before that, connections are reset.
        return pid if state != "Z" else None

    def wait_for_the_end(self) -> None:
        """Waits until no server runs and no Body is left."""
        deadline = time.monotonic() + 20
        while self.server() is not None or self.bodies():
            assert time.monotonic() < deadline, (self.server(), self.bodies())
            time.sleep(0.1)


@pytest.fixture
def programs(pal: str, tmp_path: Path) -> Iterator[Programs]:
    programs = Programs(pal, tmp_path)
    yield programs
    for process in programs.started:
        process.kill()
        process.wait()
    programs.wait_for_the_end()


USES = """
with Body() as body:
    told(body.run("echo inside").stdout.strip())
    sys.stdin.readline()
    told(body.run("echo again").stdout.strip())
"""


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None and process.stderr is not None
    return process.stdout.readline().strip() or process.stderr.read()


def test_a_program_has_a_server_while_it_runs(programs: Programs) -> None:
    process = programs.start(USES)
    assert line(process) == "inside"
    assert programs.server() is not None and len(programs.bodies()) == 1
    assert process.communicate("\n", timeout=30) == ("again\n", "")
    programs.wait_for_the_end()


def test_nothing_is_left_after_kill_9(programs: Programs) -> None:
    process = programs.start(USES)
    assert line(process) == "inside"
    process.send_signal(signal.SIGKILL)
    programs.wait_for_the_end()


def test_programs_share_one_server_and_the_last_one_ends_it(programs: Programs) -> None:
    first, *others = [programs.start(USES) for _ in range(4)]
    assert [line(process) for process in (first, *others)] == ["inside"] * 4
    server = programs.server()
    assert server is not None and len(programs.bodies()) == 4
    first.send_signal(signal.SIGKILL)
    for process in others[1:]:
        assert process.communicate("\n", timeout=30) == ("again\n", "")
    deadline = time.monotonic() + 10
    while len(programs.bodies()) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert programs.server() == server
    assert others[0].communicate("\n", timeout=30) == ("again\n", "")
    programs.wait_for_the_end()


def test_a_server_that_was_killed_is_started_again(programs: Programs) -> None:
    process = programs.start(USES)
    assert line(process) == "inside"
    server = programs.server()
    assert server is not None
    host, _, port = json.loads((programs.data / "serve.lock").read_text())["address"].rpartition(":")
    os.kill(server, signal.SIGKILL)
    deadline = time.monotonic() + 10
    # The kernel closes the port some time after the kill; until then it resets connections, which no client repeats.
    while True:
        assert time.monotonic() < deadline
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except ConnectionRefusedError:
            break
        except OSError:
            pass
        time.sleep(0.05)
    assert process.communicate("\n", timeout=40) == ("again\n", "")


def test_a_server_of_the_user_is_used_and_left_running(programs: Programs) -> None:
    command = [programs.pal, "--data", str(programs.data), "serve", "--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            json.loads(server.stdout.readline())
            assert programs.run("with Body() as body: told(body.run('echo hi').stdout.strip())") == ("hi\n", "")
            assert programs.server() == server.pid and server.poll() is None
        finally:
            server.terminate()


def test_kept_bodies_are_kept_for_the_next_program(programs: Programs) -> None:
    assert programs.run("body = Body.create(name='kept'); body.files.write('f', '1')") == ("", "")
    programs_left = programs.bodies()
    assert [body.get("name") for body in programs_left] == ["kept"]
    assert programs.run("body = Body.attach('kept'); told(body.files.read_text('f')); body.remove()") == ("1\n", "")


def test_threads_and_the_asynchronous_twin_share_the_server(programs: Programs) -> None:
    program = """
import asyncio
from concurrent.futures import ThreadPoolExecutor
def use(_):
    with Body() as body: return body.run("echo x").stdout.strip()
async def ause():
    async with AsyncBody() as body: return (await body.run("echo y")).stdout.strip()
with ThreadPoolExecutor(4) as pool: told(*pool.map(use, range(4)), asyncio.run(ause()))
"""
    assert programs.run(program) == ("x x x x y\n", "")


def test_a_program_without_pal_is_told_what_to_do(programs: Programs) -> None:
    _, errors = programs.run("Client().version()", PALISADE_PAL="no-such-pal")
    assert "no program no-such-pal" in errors and "hint: install pal" in errors and "PALISADE_URL" in errors


def test_a_server_that_does_not_start_says_why(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, errors = programs.run("Client().version()", PAL_DATA=str(tmp_path / "file"))
    assert "the private server did not start: " in errors


def test_a_directory_that_others_may_enter_is_refused(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "open" / "palisade").mkdir(parents=True)
    (tmp_path / "open" / "palisade").chmod(0o777)
    _, errors = programs.run("Client().version()", XDG_RUNTIME_DIR=str(tmp_path / "open"))
    assert "is not a directory of this user alone" in errors

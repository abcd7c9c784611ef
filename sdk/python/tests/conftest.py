"""A real `pal serve` on a data directory of its own, for all tests of this run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
MODELS = """
[aliases]
default = "script:hello.toml"
"""
HELLO = """
[[turns]]
text = "hello"
repeat = "forever"
"""


@pytest.fixture(scope="session")
def pal() -> str:
    """The `pal` to test."""
    return os.environ["PALISADE_PAL"]


@pytest.fixture(scope="session")
def server(pal: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """The address of a server, the key for it, and its data directory."""
    work = tmp_path_factory.mktemp("server")
    (work / "config" / "scripts").mkdir(parents=True)
    (work / "config" / "models.toml").write_text(MODELS)
    (work / "config" / "scripts" / "hello.toml").write_text(HELLO)
    environment = {**os.environ, "PAL_CONFIG": str(work / "config")}
    command = [pal, "--data", str(work / "data"), "serve", "--listen", "127.0.0.1:0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        yield said["url"], said["secret"], work / "data"
    finally:
        process.terminate()
        process.wait(30)
        listed = subprocess.run([pal, "--data", str(work / "data"), "ls", "--json"], capture_output=True, text=True)
        bodies = [json.loads(line)["id"] for line in listed.stdout.splitlines()]
        if bodies:
            subprocess.run([pal, "--data", str(work / "data"), "rm", "--force", *bodies], capture_output=True)


@pytest.fixture(autouse=True)
def named_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every test use that server, but those of a file that says `NEEDS_NO_SERVER`."""
    if getattr(request.module, "NEEDS_NO_SERVER", False):
        return
    server = request.getfixturevalue("server")
    monkeypatch.setenv("PALISADE_URL", server[0])
    monkeypatch.setenv("PALISADE_KEY", server[1])


@pytest.fixture
def config(server: tuple[str, str, Path]) -> Path:
    """The configuration directory of the server."""
    return server[2].parent / "config"

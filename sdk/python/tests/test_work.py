"""Repositories in Bodies: in, changed, and out again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from palisade import Body, CommandFailed


def git(repository: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(repository), *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit."""
    path = tmp_path / "app"
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    git(path, "config", "user.name", "A Person")
    git(path, "config", "user.email", "person@example.org")
    (path / "file").write_text("one\n")
    git(path, "add", ".")
    git(path, "commit", "-qm", "one")
    return path


def test_work_lands_on_a_branch(repository: Path) -> None:
    (body,) = Body.up(str(repository))
    with body:
        body.run("echo two >> file; echo new > new", check=True)
        changed = {file["path"]: file["added"] for file in body.diff()["files"]}
        assert changed == {"file": 1, "new": 1}
        assert b"+two" in body.patch()
        (saved,) = body.save()
        assert saved["uncommitted"]
        assert isinstance(body.log()["commits"], list)
        landed = body.land(message="two", branch="work")
        assert landed["commits"] == 1
        assert git(repository, "show", "work:file") == "one\ntwo\n"


def test_a_branch_comes_in(repository: Path) -> None:
    (body,) = Body.up(str(repository))
    with body:
        (repository / "later").write_text("later\n")
        git(repository, "add", ".")
        git(repository, "commit", "-qm", "later")
        assert body.sync(mode="merge")["commits"] == 1
        assert body.run("cat later", check=True).stdout == "later\n"
        with pytest.raises(CommandFailed):
            body.run("cat nothing", check=True)

"""Generated files are up to date with what they are generated from."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import generate


def test_the_types_are_those_of_the_server(server: tuple[str, str, Path]) -> None:
    with urllib.request.urlopen(f"{server[0]}/openapi.json") as answer:
        document = json.load(answer)
    stale = [str(path) for path, text in generate.generated(document).items() if path.read_text() != text]
    assert not stale, f"run: python generate.py {server[0]}/openapi.json"


def test_no_twin_is_left_over() -> None:
    names = {path.name for path in (generate.PACKAGE / "_async").glob("*.py")}
    assert {path.name for path in (generate.PACKAGE / "_sync").glob("*.py")} == names


def test_a_twin_has_no_waiting() -> None:
    for path in (generate.PACKAGE / "_sync").glob("*.py"):
        text = path.read_text()
        assert "await " not in text and "async " not in text, path.name

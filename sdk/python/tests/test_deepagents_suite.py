"""The sandbox suite of LangChain, as its partners run it.

Seven of its tests assert the contract of deepagents 0.6: writing creates only, and glob gives relative paths and
directories. deepagents 0.7.7 and later contradict them; `test_deepagents.py` has tests of today's contract in their place.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("deepagents")
from langchain_tests.integration_tests import SandboxIntegrationTests

from palisade import Body
from palisade.deepagents import PalisadeSandbox

STALE_WRITE = "deepagents 0.7 replaces a file that exists; the suite asserts the contract of 0.6"
STALE_GLOB = "deepagents 0.7.7 gives absolute paths of files; the suite asserts the contract of 0.6"


class TestSuite(SandboxIntegrationTests):
    """The suite, in a Body."""

    @pytest.fixture(scope="class")
    def sandbox(self, server: tuple[str, str, object]) -> Iterator[PalisadeSandbox]:
        from palisade import Client

        with Body(client=Client(server[0], server[1])) as body:
            # The suite runs `python`; this host has `python3`.
            body.run("ln -sf $(command -v python3) /usr/local/bin/python", user="root", check=True)
            yield PalisadeSandbox(body)

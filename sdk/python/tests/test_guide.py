"""Every Python example of the guide and of the package's page runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from palisade import Body

PACKAGE = Path(__file__).resolve().parents[1]
PAGES = [PACKAGE / "README.md", PACKAGE.parents[1] / "docs" / "guides" / "python.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def model_for_examples() -> Any:
    """A chat model that says one thing. Scripted, no model."""
    from langchain_core.language_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage

    class Model(GenericFakeChatModel):
        def bind_tools(self, tools: Any, **_: Any) -> Any:
            return self

    return Model(messages=iter([AIMessage(content="hello")]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path) -> None:
    blocks = BLOCK.findall(page.read_text())
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        if "deepagents" in block:
            pytest.importorskip("deepagents")
            names["model"] = model_for_examples()
        exec(compile(block, str(page), "exec"), names)
    for body in Body.list():
        if body.name == "memories":
            body.remove()

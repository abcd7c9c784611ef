"""A whole Deep Agent in a Body, with a scripted chat model: every tool, a sub-agent, a person in the loop, a resumed
checkpoint. Scripted, no model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepagents")
from deepagents import create_deep_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from palisade import Body, Client
from palisade.deepagents import ARTIFACTS_ROOT, PalisadeSandbox, make_backend


class Scripted(BaseChatModel):
    """Answers with the next turn of its script: a list of calls, or the last words."""

    turns: list[Any]
    seen: list[Any] = []

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        # The number of its own answers in the conversation is the number of the turn: a resumed one goes on there.
        turn = self.turns[sum(isinstance(message, AIMessage) for message in messages)]
        answer = AIMessage(content=turn if isinstance(turn, str) else "")
        if not isinstance(turn, str):
            answer.tool_calls = [
                {"name": name, "args": arguments, "id": f"c{len(messages)}-{index}", "type": "tool_call"}
                for index, (name, arguments) in enumerate(turn)
            ]
        return ChatResult(generations=[ChatGeneration(message=answer)])


ROOT = "/home/user/app"
TURNS: list[Any] = [
    [
        ("write_file", {"file_path": f"{ROOT}/main.py", "content": "print('one')\n"}),
        ("write_file", {"file_path": f"{ROOT}/b.txt", "content": "needle\n"}),
    ],
    [("ls", {"path": ROOT}), ("read_file", {"file_path": f"{ROOT}/main.py"})],
    [("edit_file", {"file_path": f"{ROOT}/main.py", "old_string": "one", "new_string": "two"})],
    [
        ("glob", {"pattern": "*.py", "path": ROOT}),
        ("grep", {"pattern": "needle", "path": ROOT, "output_mode": "content"}),
    ],
    [("execute", {"command": f"sh -c 'cat {ROOT}/main.py; exit 3'"})],
    [("execute", {"command": "i=0; while [ $i -lt 30000 ]; do echo line $i; i=$((i+1)); done"})],
    [
        ("write_file", {"file_path": "/memories/kept.md", "content": "remembered\n"}),
        ("delete", {"file_path": f"{ROOT}/b.txt"}),
    ],
    [
        ("read_file", {"file_path": "/memories/kept.md"}),
        ("read_file", {"file_path": f"{ROOT}/b.txt"}),
        ("execute", {"command": "ls /memories"}),
    ],
    [("task", {"description": "write the report", "subagent_type": "writer"})],
    "all done",
]
WRITER: list[Any] = [[("write_file", {"file_path": f"{ROOT}/report.md", "content": "by the sub-agent\n"})], "written"]


@pytest.mark.parametrize("twin", ["sync", "async"])
def test_every_tool_in_a_body(server: tuple[str, str, Path], twin: str) -> None:
    client = Client(server[0], server[1])
    with PalisadeSandbox.create(client=client) as sandbox:
        backend = make_backend(sandbox, memories=f"memories-{twin}")
        writer: Any = {
            "name": "writer",
            "description": "writes reports",
            "system_prompt": "write",
            "model": Scripted(turns=WRITER),
        }
        agent: Any = create_deep_agent(model=Scripted(turns=TURNS), backend=backend, subagents=[writer])
        asked = {"messages": [("user", "go")]}
        done = agent.invoke(asked) if twin == "sync" else asyncio.run(agent.ainvoke(asked))
        texts = [str(message.content) for message in done["messages"] if isinstance(message, ToolMessage)]
        assert done["messages"][-1].content == "all done"
        expected = [
            f"Updated file {ROOT}/main.py",
            f"Updated file {ROOT}/b.txt",
            f"['{ROOT}/b.txt', '{ROOT}/main.py']",
            "print('one')",
            f"Successfully replaced 1 instance(s) of the string in '{ROOT}/main.py'",
            f"['{ROOT}/main.py']",
            "1: needle",
            "print('two')\n\n[Command failed with exit code 3]",
            "large_tool_results",
            "Updated file /memories/kept.md",
            f"Deleted {ROOT}/b.txt",
            "remembered",
            "file_not_found",
            "No such file or directory",
            "written",
        ]
        assert len(texts) == len(expected)
        for text, part in zip(texts, expected):
            assert part in text, text
        assert sandbox.body.files.read_text(f"{ROOT}/report.md") == "by the sub-agent\n"
        (kept,) = sandbox.body.files.list(f"{ARTIFACTS_ROOT}/large_tool_results")
        assert sandbox.body.files.read_text(kept.path).count("\n") == 30000
    Body.attach(f"memories-{twin}", client=client).remove()


def test_a_person_decides_and_a_new_agent_resumes(server: tuple[str, str, Path]) -> None:
    turns: list[Any] = [
        [("execute", {"command": "echo yes > /tmp/allowed"}), ("execute", {"command": "echo no > /tmp/refused"})],
        "decided",
    ]
    with PalisadeSandbox.create(client=Client(server[0], server[1])) as sandbox:
        saver = InMemorySaver()

        def make() -> Any:
            return create_deep_agent(
                model=Scripted(turns=turns),
                backend=make_backend(sandbox, memories=None),
                interrupt_on={"execute": True},
                checkpointer=saver,
            )

        config: Any = {"configurable": {"thread_id": "1"}}
        paused = make().invoke({"messages": [("user", "go")]}, config)
        assert len(paused["__interrupt__"][0].value["action_requests"]) == 2
        assert not sandbox.body.files.exists("/tmp/allowed")
        decisions = [{"type": "approve"}, {"type": "reject", "message": "not that"}]
        done = make().invoke(Command(resume={"decisions": decisions}), config)
        assert done["messages"][-1].content == "decided"
        assert sandbox.body.files.exists("/tmp/allowed") and not sandbox.body.files.exists("/tmp/refused")

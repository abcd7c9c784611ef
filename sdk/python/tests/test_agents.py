"""Agents, driven by scripted models. Scripted, no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from palisade import Agent, Body, NotFound, PalisadeError

WRITES = """
[[turns]]
text = "I write a file."
calls = [{ tool = "write_file", arguments = { file_path = "/tmp/made", content = "by an agent" } }]

[[turns]]
text = "done"
repeat = "forever"
"""


@pytest.fixture
def writer(config: Path) -> str:
    """A model that writes a file."""
    (config / "scripts" / "writes.toml").write_text(WRITES)
    return "script:writes.toml"


def test_an_agent_works_to_its_end(writer: str) -> None:
    with Body() as body:
        agent = Agent.run("write the file", body=body.id, model=writer, approve="never")
        info = agent.wait()
        assert (info["status"], info.get("summary")) == ("finished", "done")
        assert body.files.read_text("/tmp/made") == "by an agent"
        events = []
        for event in agent.events():
            events.append(event.type)
            if event.type == "agent.finished":
                break
        assert events[0] == "agent.created" and len(events) > 3
        assert agent.export().count(b"\n") >= len(events)
        assert agent.cost()["total"]["calls"] == 1
        assert agent.id in [other.id for other in Agent.list()]
        agent.send("again")
        assert agent.wait()["turn"] == 3
        agent.remove()
        with pytest.raises(NotFound):
            Agent.attach(agent.id)


def test_calls_wait_for_approval_and_denial(writer: str) -> None:
    with Body() as body:
        agent = Agent.run("write the file", body=body.id, model=writer, approve="ask")
        info = agent.wait()
        assert info["status"] == "paused"
        assert [waiting["tool"] for waiting in info["approvals"]] == ["write_file"]
        assert not body.files.exists("/tmp/made")
        agent.approve(info["approvals"][0]["call"])
        assert agent.wait()["status"] == "finished"
        assert body.files.exists("/tmp/made")
        agent.remove()

        body.files.remove("/tmp/made")
        agent = Agent.run("write the file", body=body.id, model=writer, approve="ask")
        agent.wait()
        agent.deny(message="not today")
        assert agent.wait()["status"] == "finished"
        assert not body.files.exists("/tmp/made")
        agent.remove()


def test_a_fork_goes_on_in_a_body_of_its_own(writer: str) -> None:
    with Body() as body:
        agent = Agent.run("write the file", body=body.id, model=writer, approve="never")
        agent.wait()
        fork = agent.fork(message="go on")
        assert fork.wait()["status"] == "finished"
        assert fork.body not in (None, body.id)
        assert Body.attach(str(fork.body)).files.read_text("/tmp/made") == "by an agent"
        fork.remove(body=True)
        agent.remove()


def test_a_model_that_is_not_there_is_an_error() -> None:
    with pytest.raises(PalisadeError, match="nothing"):
        Agent.run("work", model="script:nothing.toml", create={})

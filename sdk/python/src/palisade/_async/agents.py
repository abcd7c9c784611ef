"""Agents: models that work in Bodies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, List, Literal, cast
from urllib.parse import quote

from .. import models
from ..results import AgentEvent
from .client import AsyncClient, default_client

if TYPE_CHECKING:
    from typing_extensions import Unpack

_AT_WORK = "working"
_ENDS = ("agent.paused", "agent.finished", "agent.removed")


class AsyncAgent:
    """An agent of a server: started with `run`, found with `attach` and `list`."""

    def __init__(self, client: AsyncClient, info: models.AgentSummary) -> None:
        self.client = client
        self._summary = info

    @classmethod
    async def run(
        cls,
        task: str,
        *,
        client: AsyncClient | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[models.AgentOptions],
    ) -> AsyncAgent:
        """Gives a task to a new agent, which begins at once.

        It works in `body`, in a new Body as `create` describes it, or in one with the repositories of `up`.
        """
        return (await cls.attempts(task, 1, client=client, idempotency_key=idempotency_key, **options))[0]

    @classmethod
    async def attempts(
        cls,
        task: str,
        count: int,
        *,
        client: AsyncClient | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[models.AgentOptions],
    ) -> List[AsyncAgent]:
        """Gives one task to several new agents, each in a Body of its own."""
        client = client or default_client()
        asked = {"task": task, "count": count, **options}
        made = await client.call("POST", "/v1/agents", asked, idempotency_key=idempotency_key)
        return [cls(client, info) for info in made["items"]]

    @classmethod
    async def attach(cls, agent: str, *, client: AsyncClient | None = None) -> AsyncAgent:
        """The agent with that id."""
        client = client or default_client()
        return cls(client, await client.call("GET", f"/v1/agents/{quote(agent, safe='')}"))

    @classmethod
    async def list(cls, *, client: AsyncClient | None = None) -> List[AsyncAgent]:
        """The agents that the key reaches."""
        client = client or default_client()
        return [cls(client, info) async for info in client.items("/v1/agents")]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id})"

    @property
    def id(self) -> str:
        """Its id."""
        return self._summary["id"]

    @property
    def body(self) -> str | None:
        """The id of its Body."""
        return self._summary.get("body")

    @property
    def status(self) -> models.AgentState:
        """Its status when the server last said it."""
        return self._summary["status"]

    async def _call(self, method: str, path: str = "", body: Any = None) -> models.Agent:
        self._summary = info = cast(models.Agent, await self.client.call(method, f"/v1/agents/{self.id}{path}", body))
        return info

    async def info(self) -> models.Agent:
        """Everything about it: its answer, sums, checkpoints, and the approvals and questions that wait."""
        return await self._call("GET")

    async def events(self, *, after: int | None = None, live: bool = False) -> AsyncIterator[AgentEvent]:
        """Its events from the first one, or those after a place; with `live` also pieces that come before their event.

        The stream goes on while the agent exists, also when it waits; a broken connection goes on without a gap.
        """
        path = f"/v1/agents/{self.id}/events"
        async for event in self.client.follow(path, after=after):
            if event.name == "message":
                data = json.loads(event.data)
                yield AgentEvent("event", data, data.get("pos"))
            elif live:
                yield AgentEvent(event.name, json.loads(event.data))

    async def wait(self) -> models.Agent:
        """Waits until it does not work: it has finished, or it waits for a person."""
        info = await self.info()
        if info["status"] != _AT_WORK:
            return info
        async for event in self.events(after=info["pos"]):
            if event.type in _ENDS:
                info = await self.info()
                if info["status"] != _AT_WORK:
                    break
        return info

    async def send(self, text: str) -> models.Agent:
        """Sends a message; an agent that waits or has finished goes on with it."""
        return await self._call("POST", "/messages", {"text": text})

    async def approve(self, call: str | None = None, *, scope: models.DecisionScope = "once") -> models.Agent:
        """Approves a call that waits, or all."""
        return await self._decide("approve", call, scope=scope)

    async def edit(self, call: str, arguments: dict[str, Any]) -> models.Agent:
        """Approves a call that waits, with other arguments."""
        return await self._decide("edit", call, arguments=arguments)

    async def deny(self, call: str | None = None, *, message: str | None = None) -> models.Agent:
        """Rejects a call that waits, or all; the agent gets the message."""
        return await self._decide("reject", call, **({"message": message} if message is not None else {}))

    async def respond(self, call: str, message: str) -> models.Agent:
        """Answers a call that waits in the place of its tool."""
        return await self._decide("answer", call, message=message)

    async def _decide(
        self, decision: Literal["approve", "edit", "reject", "answer"], call: str | None, **more: Any
    ) -> models.Agent:
        return await self._call("POST", "/approvals", {"decision": decision, "call": call, **more})

    async def answer(self, text: str, *, call: str | None = None) -> models.Agent:
        """Answers a question of the agent."""
        return await self._call("POST", "/answers", {"answer": text, "call": call})

    async def interrupt(self) -> models.Agent:
        """Ends its turn."""
        return await self._call("POST", "/interrupt")

    async def stop(self) -> models.Agent:
        """Ends its turn, and processes that it left in the background."""
        return await self._call("POST", "/stop")

    async def resume(self, *, budget: models.BudgetRequest | None = None) -> models.Agent:
        """Lets it go on after a pause, with a new budget if one is given."""
        return await self._call("POST", "/resume", {"budget": budget} if budget is not None else None)

    async def fork(self, *, at: int | None = None, message: str | None = None) -> AsyncAgent:
        """A new agent in a fork of the Body, which goes on from here or from the checkpoint of a turn.

        Without a message it waits for one.
        """
        asked = {name: value for name, value in {"at": at, "message": message}.items() if value is not None}
        made = await self.client.call("POST", f"/v1/agents/{self.id}/fork", asked)
        return type(self)(self.client, made["items"][0])

    async def rewind(self, turn: int) -> models.Agent:
        """Goes back to the beginning of a turn, with its files."""
        return await self._call("POST", "/rewind", {"turn": turn})

    async def cost(self) -> models.CostReport:
        """The tokens, money and time that it and its sub-agents used."""
        return cast(models.CostReport, await self.client.call("GET", f"/v1/agents/{self.id}/cost"))

    async def export(self) -> bytes:
        """All its events, as lines of JSON."""
        return await self.client.request("GET", f"/v1/agents/{self.id}/export")

    async def remove(self, *, body: bool = False, force: bool = False) -> None:
        """Removes it and its checkpoints; with `body` also its Body, with `force` also while it works."""
        await self.client.call("DELETE", f"/v1/agents/{self.id}", params={"body": body, "force": force})

"""Bodies: computers for agents."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, List, Union, cast
from urllib.parse import quote, urlsplit

from .. import models
from .._io_async import HttpClient, HttpTransport
from ..errors import PalisadeError, StreamInterrupted, from_refusal
from ..results import Port, Result, ServerEvent
from .client import AsyncClient, default_client
from .files import AsyncFiles
from .guest import AsyncGuest
from .process import AsyncProcess
from .terminal import AsyncTerminal
from .work import AsyncWork

if TYPE_CHECKING:
    from typing_extensions import Unpack

Command = Union[str, Sequence[str]]
_ENDED_KINDS = ("not_found",)
_RUNS_ON = "the command runs on, and is recorded to its end: Body.attach(…).logs()"


class AsyncBody(AsyncWork):
    """A Body, used with `async with`: created at the beginning of the block, and removed at its end.

    The options are those of `models.NewBody`, such as `template`, `env`, `limits`, `network` and `mounts`. `create`
    makes one that is kept, `attach` finds one by its id or name, `list` all.
    """

    def __init__(self, *, client: AsyncClient | None = None, **options: Unpack[models.NewBody]) -> None:
        self._client = client
        self._options: models.NewBody | None = options
        self._info: models.Body | None = None
        self._guest: AsyncGuest | None = None

    @classmethod
    async def create(
        cls, *, client: AsyncClient | None = None, idempotency_key: str | None = None, **options: Unpack[models.NewBody]
    ) -> AsyncBody:
        """Creates a Body that is kept until a client removes it or its deadline comes.

        A repeated request with the same `idempotency_key` returns the Body of the first one.
        """
        body = cls(client=client, **options)
        await body._create(idempotency_key)
        return body

    @classmethod
    async def attach(cls, name: str, *, client: AsyncClient | None = None) -> AsyncBody:
        """The Body with that id or name."""
        client = client or default_client()
        return cls._known(client, await client.call("GET", f"/v1/bodies/{quote(name, safe='')}"))

    @classmethod
    async def list(
        cls, *, client: AsyncClient | None = None, status: models.BodyStatus | None = None
    ) -> List[AsyncBody]:
        """The Bodies that the key reaches, oldest first."""
        client = client or default_client()
        return [cls._known(client, info) async for info in client.items("/v1/bodies", params={"status": status})]

    @classmethod
    async def up(
        cls, *repositories: str, client: AsyncClient | None = None, count: int = 1, **options: Unpack[models.UpOptions]
    ) -> List[AsyncBody]:
        """Creates Bodies with repositories of the server's host, named by absolute paths or addresses."""
        client = client or default_client()
        asked = {"repositories": list(repositories), "count": count, **options}
        created = await client.long_work("POST", "/v1/up", asked)
        return [cls._known(client, info) for info in created["items"]]

    @classmethod
    def _known(cls, client: AsyncClient, info: models.Body) -> AsyncBody:
        body = cls(client=client)
        body._info = info
        body._options = None
        return body

    async def _create(self, idempotency_key: str | None = None) -> None:
        self._client = self._client or default_client()
        self._info = await self._client.call("POST", "/v1/bodies", self._options, idempotency_key=idempotency_key)

    async def __aenter__(self) -> AsyncBody:
        if self._info is None:
            await self._create()
        if self.client.embedded is not None:
            self.client.embedded.note_created(self.id)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.remove()
        except PalisadeError as error:
            if error.kind not in _ENDED_KINDS:
                raise

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._info['id'] if self._info else 'not created'})"

    @property
    def client(self) -> AsyncClient:
        """The server of this Body."""
        if self._client is None:
            raise PalisadeError(
                "this Body has not been created", kind="usage", hints=["use `with Body() as body:`, or `Body.create()`"]
            )
        return self._client

    @property
    def info(self) -> models.Body:
        """The server's last description of this Body; `refresh` asks again."""
        if self._info is None:
            raise PalisadeError(
                "this Body has not been created", kind="usage", hints=["use `with Body() as body:`, or `Body.create()`"]
            )
        return self._info

    @property
    def id(self) -> str:
        """Its id."""
        return self.info["id"]

    @property
    def name(self) -> str | None:
        """Its name, if it has one."""
        return self.info.get("name")

    @property
    def status(self) -> models.BodyStatus:
        """Its status when the server last said it."""
        return self.info["status"]

    @property
    def guest(self) -> AsyncGuest:
        """The guest of this Body, which works on its files and processes."""
        if self._guest is None:
            self._guest = AsyncGuest(self.client, self.id)
        return self._guest

    @property
    def files(self) -> AsyncFiles:
        """Its files."""
        return AsyncFiles(self.client, self.id, self.guest)

    async def call(self, method: str, path: str, body: Any = None, params: Mapping[str, Any] | None = None) -> Any:
        """Calls a route of the native API below this Body."""
        return await self.client.call(method, f"/v1/bodies/{self.id}{path}", body, params=params)

    async def _changed(self, path: str, body: Any = None) -> None:
        self._info = await self.call("POST", path, body)

    async def refresh(self) -> models.Body:
        """Asks the server about this Body."""
        self._info = await self.call("GET", "")
        return self.info

    # Commands.

    async def run(
        self,
        command: Command,
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        timeout: float | None = None,
        check: bool = False,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
    ) -> Result:
        """Runs a command and waits for its end.

        A text is for the shell, a sequence is a program and its arguments. After `timeout` seconds the command is
        killed, and its exit code is 124. `on_stdout` and `on_stderr` get the output as it comes; the result has it,
        too. With `check` an exit code other than 0 raises `CommandFailed`.
        """
        asked: dict[str, Any] = {"argv": _argv(command), "env": dict(env or {})}
        if timeout is not None:
            asked["timeout_ms"] = max(1, int(timeout * 1000))
        asked.update(_given(stdin=stdin, user=user, workdir=workdir))
        ran = _Running(on_stdout, on_stderr)
        try:
            async for event in self.client.events_of("POST", f"/v1/bodies/{self.id}/exec", body=asked):
                result = ran.feed(event)
                if result is not None:
                    return result.check() if check else result
        except StreamInterrupted as error:
            raise StreamInterrupted(error.message, kind="host", hints=[_RUNS_ON]) from error
        raise StreamInterrupted("the server stopped before the command ended", kind="host", hints=[_RUNS_ON])

    async def spawn(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        timeout: float | None = None,
        stdin: bool = True,
    ) -> AsyncProcess:
        """Starts a command, and returns while it runs. With `stdin=False` it has no input."""
        return await AsyncProcess.start(
            self.guest,
            _argv(command),
            env=dict(env or {}),
            user=user,
            workdir=workdir,
            timeout=timeout,
            stdin=stdin,
        )

    def terminal(
        self,
        name: str = "main",
        *,
        command: str | None = None,
        cols: int = 80,
        rows: int = 24,
        watch: bool = False,
        user: str | None = None,
        workdir: str | None = None,
    ) -> AsyncTerminal:
        """Joins the terminal of that name, or starts one; with `watch` it only looks on."""
        params = {"name": name, "command": command, "cols": cols, "rows": rows, "user": user, "workdir": workdir}
        return AsyncTerminal(self.client, self.id, {**params, "mode": "watch" if watch else None})

    async def terminals(self) -> List[models.Terminal]:
        """Its running terminals."""
        return cast("List[models.Terminal]", (await self.call("GET", "/terminals"))["items"])

    async def processes(self) -> List[models.Process]:
        """The processes in it."""
        return cast("List[models.Process]", (await self.call("GET", "/processes"))["items"])

    async def logs(self) -> List[models.LogEntry]:
        """The recorded commands, with their output."""
        return [entry async for entry in self.client.items(f"/v1/bodies/{self.id}/logs")]

    # Ports.

    async def port(self, port: int) -> Port:
        """The address of a port inside."""
        url = (await self.client.address()).url
        at = urlsplit(url)
        host = f"{port}-{self.id}.localhost" + (f":{at.port}" if at.port else "")
        headers = {"E2b-Sandbox-Id": self.id, "E2b-Sandbox-Port": str(port)}
        token = self.info.get("traffic_token")
        if token is not None:
            headers["E2b-Traffic-Access-Token"] = token
        return Port(f"{at.scheme}://{host}", headers)

    async def http(self, port: int) -> HttpClient:
        """An HTTP client of `httpx` for a port inside. The caller closes it."""
        address = await self.client.address()
        headers = dict((await self.port(port)).headers)
        return HttpClient(base_url=address.url, headers=headers, transport=HttpTransport(), trust_env=False)

    async def share_ports(self, access: models.Ports) -> None:
        """Opens the ports to every caller that reaches the server (`public`), or to those with the token."""
        self._info = await self.call("PUT", "/access", {"ports": access})

    # Life.

    async def pause(self) -> None:
        """Freezes its processes."""
        await self._changed("/pause")

    async def resume(self) -> None:
        """Lets frozen processes go on."""
        await self._changed("/resume")

    async def suspend(self) -> None:
        """Writes the memory of a microVM to disk, and ends it until `resume`."""
        await self._changed("/suspend")

    async def stop(self, *, grace: float | None = None) -> None:
        """Ends its processes, after `grace` seconds by force, and keeps its files."""
        await self._changed("/stop", {"grace_ms": int(grace * 1000)} if grace is not None else None)

    async def start(self) -> None:
        """Starts it from its files."""
        await self._changed("/start")

    async def change_limits(self, limits: models.NewLimits) -> models.LimitedBody:
        """Changes its limits, some only at its next start."""
        changed = cast(models.LimitedBody, await self.call("PATCH", "/limits", limits))
        self._info = changed["body"]
        return changed

    async def snapshot(self, name: str | None = None) -> models.Snapshot:
        """Keeps its files as they are; new Bodies can start from it as a template."""
        return cast(models.Snapshot, await self.call("POST", "/snapshot", _given(name=name)))

    async def fork(self, *, name: str | None = None) -> AsyncBody:
        """A new Body with the files that this one has now."""
        return (await self.forks(1, name=name))[0]

    async def forks(self, count: int, *, name: str | None = None) -> List[AsyncBody]:
        """Several new Bodies with the files that this one has now."""
        made = await self.call("POST", "/fork", {"count": count, **_given(name=name)})
        return [self._known(self.client, info) for info in made["items"]]

    async def remove(self, *, force: bool = True) -> None:
        """Removes it and its files; without `force` only if that loses no work."""
        await self.client.call("DELETE", f"/v1/bodies/{self.id}", params={"force": force})
        if self.client.embedded is not None:
            self.client.embedded.note_removed(self.id)

    # Network and secrets.

    async def network(self) -> models.NetworkPolicy:
        """Its network policy, and whether it is in force."""
        return cast(models.NetworkPolicy, await self.call("GET", "/network"))

    async def replace_network(self, **terms: Unpack[models.NetworkTerms]) -> models.NetworkPolicy:
        """Gives it another network policy."""
        return cast(models.NetworkPolicy, await self.call("PUT", "/network", terms))

    async def extend_network(self, **terms: Unpack[models.NetworkTerms]) -> models.NetworkPolicy:
        """Adds rules to its network policy."""
        return cast(models.NetworkPolicy, await self.call("PATCH", "/network", terms))

    async def grant_secret(self, secret: str) -> List[models.BodySecret]:
        """Lets it use a secret, whose value it never sees."""
        granted = await self.call("PUT", f"/secrets/{quote(secret, safe='')}")
        return cast("List[models.BodySecret]", granted["items"])

    async def revoke_secret(self, secret: str) -> None:
        """Takes a secret away from it."""
        await self.call("DELETE", f"/secrets/{quote(secret, safe='')}")


class _Running:
    """Collects what the stream of a command says."""

    def __init__(
        self, on_stdout: Callable[[bytes], object] | None, on_stderr: Callable[[bytes], object] | None
    ) -> None:
        self._outputs = {"stdout": bytearray(), "stderr": bytearray()}
        self._listeners = {"stdout": on_stdout, "stderr": on_stderr}

    def feed(self, event: ServerEvent) -> Result | None:
        """Takes an event; the result, if it is the end."""
        said = json.loads(event.data)
        if event.name in self._outputs:
            piece = b64decode(said["base64"])
            self._outputs[event.name] += piece
            listener = self._listeners[event.name]
            if listener is not None:
                listener(piece)
        elif event.name == "failed":
            raise from_refusal(said)
        elif event.name == "ended":
            return Result(
                said["code"],
                bytes(self._outputs["stdout"]),
                bytes(self._outputs["stderr"]),
                signal=said.get("signal"),
                timed_out=said["timed_out"],
                out_of_memory=said["out_of_memory"],
                body_end=said.get("body_end"),
            )
        return None


def _argv(command: Command) -> List[str]:
    return ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}

"""Contexts: named kernels, the executions that wait for them, and what one execution says.

Invariant: a context runs one execution at a time, in the order of arrival; contexts do not wait for each other.
Invariant: an execution is always ended by `end_of_execution`, also when its kernel died or could not start.
Invariant: a client that went away never keeps a context busy: its execution is interrupted, then killed.
"""

import asyncio
import json
import os
import time
from collections import deque

import kernels
from kernels import KernelFailed, failure

CONTEXTS_MAX = 64
EXECUTIONS_WAITING_MAX = 64
# What one execution may say; the rest of it is dropped and the client is told so.
OUTPUT_BYTES_MAX = 64 * 1024 * 1024
# What may lie here for a client that reads slowly, before its kernel has to wait.
BACKLOG_BYTES_MAX = 1024 * 1024
KEEPALIVE_SECONDS = 5.0
INTERRUPTS_MAX = 4
INTERRUPT_SECONDS = 0.75
HOME = "/home/user"
ENVS_BYTES_MAX = 1024 * 1024
ENVS_SECONDS_MAX = 2.0

ALIASES = {"js": "javascript", "ts": "typescript", "py": "python", "python3": "python", "sh": "bash", "shell": "bash"}
FORMATS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}


class Refused(Exception):
    """A request that cannot be done, with the HTTP status that says so."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class NotSupported(Refused):
    """A language that has no kernel here."""

    def __init__(self, language):
        able = ", ".join(kernels.KERNELS)
        super().__init__(400, f"Language {language} is not supported here; supported are {able}")


class Execution:
    """What one execution has said and its client has not yet read."""

    def __init__(self):
        self.abandoned = asyncio.Event()
        self._lines = deque()
        self._waiting_bytes = 0
        self._said_bytes = 0
        self._closed = False
        self._cut = False
        self._wake = asyncio.Event()
        self._kernel = None

    @classmethod
    def failed(cls, name, value):
        """An execution that ends before it begins."""
        execution = cls()
        execution.say(failure(name, value))
        execution.close()
        return execution

    def attach(self, kernel):
        """Say from now on what this kernel says."""
        self._kernel = kernel

    def say(self, message):
        """Add a message for the client, as long as there is one and the limit is not reached."""
        if self.abandoned.is_set() or self._closed:
            return
        line = _line(message)
        important = message["type"] in ("error", "number_of_executions")
        if self._said_bytes + len(line) > OUTPUT_BYTES_MAX and not important:
            if self._cut:
                return
            self._cut = True
            line = _line(_output("stderr", f"\n[output cut: an execution may say {OUTPUT_BYTES_MAX} bytes]\n"))
        self._said_bytes += len(line)
        self._waiting_bytes += len(line)
        self._lines.append(line)
        self._wake.set()
        if self._waiting_bytes > BACKLOG_BYTES_MAX and self._kernel is not None:
            self._kernel.pause()

    def close(self):
        """Nothing will follow."""
        if not self._closed:
            self._lines.append(_line({"type": "end_of_execution"}))
            self._closed = True
            self._wake.set()

    def abandon(self):
        """The client has gone."""
        self.abandoned.set()
        self._lines.clear()
        self._waiting_bytes = 0
        if self._kernel is not None:
            self._kernel.resume()

    async def read(self):
        """The next bytes for the client, a keepalive when there are none, or b"" at the end."""
        if not self._lines and not self._closed:
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), KEEPALIVE_SECONDS)
            except asyncio.TimeoutError:
                return _line({"type": "keepalive"})
        if not self._lines:
            return b""
        data = b"".join(self._lines)
        self._lines.clear()
        self._waiting_bytes = 0
        if self._kernel is not None:
            self._kernel.resume()
        return data


class Context:
    """A language, a directory, and at most one kernel."""

    def __init__(self, language, cwd, envd):
        self.id = os.urandom(16).hex()
        self.language = language
        self.cwd = cwd
        self.removed = False
        self._envd = envd
        self._kernel = None
        self._always = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._lost = None

    def describe(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def start(self):
        """Have a kernel ready before code comes. Raises KernelFailed."""
        async with self._turn:
            await self._ready_kernel()

    def execute(self, code, once, token):
        """Queue code; what it says is in the Execution that is returned at once."""
        if self._waiting >= EXECUTIONS_WAITING_MAX:
            raise Refused(429, f"Context {self.id} has {self._waiting} executions waiting; wait for some of them")
        execution = Execution()
        self._waiting += 1
        _keep(asyncio.create_task(self._execute(execution, code, once, token)))
        return execution

    async def restart(self):
        """Forget everything. What runs now ends with an error."""
        await self._end("Context was restarted")

    async def remove(self):
        """End the kernel for good."""
        self.removed = True
        await self._end("Context was removed")

    async def _end(self, why):
        kernel = self._kernel
        if kernel is not None:
            await kernel.kill(why)
        if self._kernel is kernel:
            self._kernel = None

    async def _execute(self, execution, code, once, token):
        try:
            async with self._turn:
                self._waiting -= 1
                if not execution.abandoned.is_set():
                    await self._run(execution, code, once, token)
        except KernelFailed as error:
            execution.say(failure("KernelFailed", str(error)))
        finally:
            execution.close()

    async def _run(self, execution, code, once, token):
        if self.removed:
            raise KernelFailed(f"Context {self.id} was removed")
        kernel = await self._ready_kernel()
        if self._lost:
            execution.say(_output("stderr", f"[the {self.language} kernel was restarted: {self._lost}]\n"))
            self._lost = None
        always = {}
        if self._always is None:
            self._always = always = await self._envd.variables(token)
        done = asyncio.Event()
        kernel.listener = lambda message: _hear(execution, message, done)
        execution.attach(kernel)
        try:
            await kernel.run(code, once, always or {})
            await self._until_done(execution, kernel, done)
        finally:
            kernel.listener = None
            kernel.resume()

    async def _until_done(self, execution, kernel, done):
        finished = asyncio.create_task(done.wait())
        gone = asyncio.create_task(execution.abandoned.wait())
        try:
            await asyncio.wait({finished, gone, kernel.ended}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not finished.done() and not kernel.ended.done():
                await self._stop(kernel, finished)
            if kernel.ended.done() and not done.is_set():
                self._mourn(execution, kernel)
        finally:
            finished.cancel()
            gone.cancel()

    async def _stop(self, kernel, finished):
        # bash misses an interrupt that comes just when it starts a command, so one is not enough.
        for _ in range(INTERRUPTS_MAX):
            kernel.interrupt()
            await asyncio.wait({finished, kernel.ended}, timeout=INTERRUPT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if finished.done() or kernel.ended.done():
                return
        await kernel.kill(f"an execution did not stop after {INTERRUPTS_MAX} interrupts when its client had gone")
        self._lost = kernel.ended.result()

    def _mourn(self, execution, kernel):
        """Tell the client how its kernel ended; the next execution gets a new one."""
        why = kernel.ended.result()
        if self._kernel is kernel:
            self._kernel = None
        if why.startswith("Context was"):
            execution.say(failure("ContextRestarting", why))
        elif (epitaph := kernel.epitaph()) is not None:
            execution.say(epitaph)

    async def _ready_kernel(self):
        if self._kernel is not None and self._kernel.ended.done():
            # It ended while nothing ran, so nobody has been told yet.
            if not self._kernel.left and not self._lost:
                self._lost = self._kernel.ended.result()
            self._kernel = None
        if self._kernel is None:
            kernel = kernels.KERNELS[self.language](self.language, self.cwd)
            await kernel.start()
            if self.removed:
                await kernel.kill("Context was removed")
                raise KernelFailed(f"Context {self.id} was removed")
            self._kernel = kernel
            self._always = None
        return self._kernel


class Contexts:
    """All contexts of this server, and for each language the one that is used when none is named."""

    def __init__(self, envd, cwd=None):
        self._envd = envd
        self._all = {}
        self._default = {}
        self._cwd = cwd or (HOME if os.path.isdir(HOME) else os.getcwd())
        # E2B's clients expect these two to be listed; a kernel is started only when there is code for it.
        self.default("python")
        if kernels.node() is not None:
            self.default("javascript")

    def list(self):
        return [context.describe() for context in self._all.values()]

    def get(self, context_id):
        context = self._all.get(context_id)
        if context is None:
            raise Refused(404, f"Context {context_id} not found")
        return context

    def default(self, language):
        """The context that code of this language runs in when none is named."""
        language = known(language)
        context = self._default.get(language)
        if context is None or context.removed:
            context = self._default[language] = self._add(language, self._cwd)
        return context

    async def create(self, language, cwd):
        """A new context with its kernel started."""
        context = self._add(known(language), cwd or self._cwd)
        try:
            if not os.path.isdir(context.cwd):
                raise Refused(400, f"Cannot create a context in {context.cwd}: there is no such directory")
            await context.start()
        except KernelFailed as error:
            del self._all[context.id]
            raise Refused(500, str(error)) from error
        except BaseException:
            del self._all[context.id]
            raise
        return context

    async def remove(self, context_id):
        context = self.get(context_id)
        del self._all[context_id]
        await context.remove()

    async def close(self):
        """End every kernel."""
        await asyncio.gather(*(context.remove() for context in self._all.values()))

    def _add(self, language, cwd):
        if len(self._all) >= CONTEXTS_MAX:
            raise Refused(429, f"There are {CONTEXTS_MAX} contexts, which is the most; remove one that is not used")
        context = Context(language, cwd, self._envd)
        self._all[context.id] = context
        return context


class Envd:
    """The variables that the sandbox was created with; envd on this machine has them."""

    def __init__(self, host, port):
        self._host = host
        self._port = port

    async def variables(self, token):
        """All of them, or None when envd does not answer; then the next execution asks again."""
        try:
            return await asyncio.wait_for(self._ask(token), ENVS_SECONDS_MAX)
        except (OSError, ValueError, asyncio.TimeoutError):
            return None

    async def _ask(self, token):
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            lines = ["GET /envs HTTP/1.0", f"Host: {self._host}:{self._port}", "Accept: application/json"]
            if token:
                lines.append(f"X-Access-Token: {token}")
            writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
            answer = await reader.read(ENVS_BYTES_MAX)
            while len(answer) < ENVS_BYTES_MAX and (more := await reader.read(ENVS_BYTES_MAX)):
                answer += more
        finally:
            writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        if head.split(b" ", 2)[1:2] != [b"200"]:
            raise ValueError("envd refused")
        return checked_variables(json.loads(body))


def known(language):
    """The language by its full name. Refuses one that has no kernel here."""
    name = (language or "python").strip().lower()
    name = ALIASES.get(name, name)
    if name not in kernels.KERNELS:
        raise NotSupported(name)
    return name


def checked_variables(variables):
    """Environment variables as str to str. Raises ValueError."""
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise ValueError("env_vars must be an object")
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name or not isinstance(value, str) or "\0" in value:
            raise ValueError(f"env_vars has a name or value that cannot be in an environment: {name!r}")
    return variables


_tasks = set()


def _keep(task):
    """asyncio holds tasks weakly; this keeps one until it is done."""
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def _hear(execution, message, done):
    kind = message["type"]
    if kind == "done":
        done.set()
    elif kind == "result":
        execution.say(_result(message["data"], bool(message.get("main"))))
    elif kind in ("stdout", "stderr"):
        execution.say(_output(kind, message["text"]))
    elif kind in ("error", "number_of_executions"):
        execution.say(message)
    else:
        raise ValueError(f"unknown message {kind}")


def _output(kind, text):
    return {"type": kind, "text": text, "timestamp": time.time_ns()}


def _result(data, main):
    result = {"type": "result", "is_main_result": main}
    extra = {}
    for mime, value in data.items():
        if mime in FORMATS:
            result[FORMATS[mime]] = value
        else:
            extra[mime] = value
    text = result.get("text")
    if text and len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        result["text"] = text[1:-1]
    if extra:
        result["extra"] = extra
    return result


def _line(message):
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"

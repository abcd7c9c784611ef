"""A kernel: one child process that runs code of one language and keeps its state.

All kernels are driven alike. Code goes in, and results come out, over a socket pair (one JSON object a line;
bash, which has no program of ours in it, gets commands and answers with an exit status). What the code prints
comes through two ordinary pipes, so prints, C libraries and child processes keep their order.

Invariant: a message on the socket is handled only after everything that was printed before it.
Invariant: nothing is read faster than the listener takes it; a kernel that prints too fast waits in its own write.
Trust: the kernel runs the user's code with our rights. It is not believed about sizes or forms, only obeyed less.
"""

import asyncio
import codecs
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import sys
import termios

HERE = os.path.dirname(os.path.abspath(__file__))
CHUNK_BYTES = 64 * 1024
MESSAGE_BYTES_MAX = 48 * 1024 * 1024
START_SECONDS_MAX = 60.0
# An unfinished line waits this long for its end, so that `print("a")` is one message and not two.
LINE_SECONDS = 0.02
PR_SET_PDEATHSIG = 1
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class KernelFailed(Exception):
    """A kernel could not be started; the text says why and what to do."""


def node():
    """The path of node, if this machine has one."""
    return shutil.which("node") or shutil.which("nodejs")


class Output:
    """One of the two pipes that a kernel prints to."""

    def __init__(self, name, fd):
        self.name = name
        self.fd = fd
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.pending = ""
        self.timer = None
        self.open = True


class Kernel:
    """A running kernel. `listener(message)` gets every message while it is set; else output is dropped."""

    def __init__(self, language, cwd):
        self.language = language
        self.cwd = cwd
        self.listener = None
        self.ended = None
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._outputs = []
        self._channel = None
        self._received = bytearray()
        self._searched = 0
        self._paused = False
        self._why_killed = None
        self._said_at_start = ""
        self._process = None

    async def start(self):
        """Start the process and wait until it can take code."""
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        writers = []
        try:
            for name in ("stdout", "stderr"):
                reader, writer = os.pipe()
                os.set_blocking(reader, False)
                self._outputs.append(Output(name, reader))
                writers.append(writer)
            await self._spawn(theirs, *writers)
        except OSError as error:
            self._close()
            raise KernelFailed(f"cannot start the {self.language} kernel in {self.cwd}: {error}") from error
        except KernelFailed:
            self._close()
            raise
        finally:
            theirs.close()
            for writer in writers:
                os.close(writer)
        self._watch()
        self.ended = self._loop.create_task(self._reap())
        await self._begin()
        await asyncio.wait({self._ready, self.ended}, timeout=START_SECONDS_MAX, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            late = not self.ended.done()
            await self.kill("it did not start in time")
            why = f"no answer in {START_SECONDS_MAX:.0f} s" if late else self.ended.result()
            raise KernelFailed(f"the {self.language} kernel did not start: {why}\n{self._said_at_start}".rstrip())

    async def run(self, code, once, always):
        """Give the kernel code: `once` are variables of this execution only, `always` stay."""
        await self._send(json.dumps({"code": code, "once": once, "always": always}) + "\n")

    def interrupt(self):
        """Ask what runs to stop, as Ctrl-C does."""
        self._signal(signal.SIGINT)

    async def kill(self, why):
        """End the kernel and every process of its group."""
        self._why_killed = self._why_killed or why
        self._signal(signal.SIGKILL)
        await self.ended

    def pause(self):
        """Stop reading; the kernel will wait in its next write."""
        if not self._paused and self._channel is not None:
            self._paused = True
            self._unwatch()

    def resume(self):
        """Read again."""
        if self._paused:
            self._paused = False
            if self._channel is not None:
                self._watch()

    # What differs between kernels.

    def _command(self, channel_fd):
        raise NotImplementedError

    def _environment(self):
        return {}

    async def _begin(self):
        """Sent before anything else, where a kernel does not report by itself that it is ready."""

    def _message(self, line):
        message = json.loads(line)
        if message["type"] == "ready":
            self._is_ready()
        else:
            self._tell(message)

    # What is common to them.

    def _is_ready(self):
        if not self._ready.done():
            self._ready.set_result(None)

    def _tell(self, message):
        if self.listener is not None:
            self.listener(message)

    async def _send(self, text):
        try:
            await self._loop.sock_sendall(self._channel, text.encode("utf-8", "surrogatepass"))
        except (OSError, AttributeError):
            # It is ending, or has ended; `ended` tells the rest.
            pass

    async def _spawn(self, theirs, out, err):
        command, stdin = self._command(theirs.fileno())
        environment = {**os.environ, **self._environment()}
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=theirs if stdin == "channel" else asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=self.cwd,
            env={**environment, "PWD": self.cwd},
            pass_fds=() if stdin == "channel" else (theirs.fileno(),),
            start_new_session=True,
            preexec_fn=_tie_to_server(),
        )

    def _watch(self):
        for output in self._outputs:
            if output.open:
                self._loop.add_reader(output.fd, self._on_output, output)
        self._loop.add_reader(self._channel, self._on_channel)

    def _unwatch(self):
        for output in self._outputs:
            self._loop.remove_reader(output.fd)
        self._loop.remove_reader(self._channel)

    def _on_output(self, output):
        self._take(output, CHUNK_BYTES)

    def _take(self, output, size):
        try:
            data = os.read(output.fd, size)
        except BlockingIOError:
            return 0
        if not data:
            output.open = False
            self._loop.remove_reader(output.fd)
            return 0
        output.pending += output.decoder.decode(data)
        if output.pending.endswith("\n") or len(output.pending) >= CHUNK_BYTES:
            self._flush(output)
        elif output.timer is None:
            output.timer = self._loop.call_later(LINE_SECONDS, self._flush, output)
        return len(data)

    def _flush(self, output):
        if output.timer is not None:
            output.timer.cancel()
            output.timer = None
        text, output.pending = output.pending, ""
        if not self._ready.done():
            self._said_at_start = (self._said_at_start + text)[-4096:]
        elif text:
            self._tell({"type": output.name, "text": text})

    def _drain(self):
        """Take what is in the pipes now, but not what somebody keeps adding meanwhile."""
        for output in self._outputs:
            left = _waiting(output.fd) if output.open else 0
            while left > 0:
                taken = self._take(output, min(left, CHUNK_BYTES))
                if taken == 0:
                    break
                left -= taken
            self._flush(output)

    def _on_channel(self):
        self._drain()
        try:
            data = self._channel.recv(4 * CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._channel)
            return False
        self._received += data
        while (end := self._received.find(b"\n", self._searched)) >= 0:
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            self._searched = 0
            try:
                self._message(line)
            except (ValueError, KeyError, TypeError):
                self._why_killed = "it sent something that is not a message"
                self._signal(signal.SIGKILL)
        self._searched = len(self._received)
        if self._searched > MESSAGE_BYTES_MAX:
            self._why_killed = f"it sent a message of more than {MESSAGE_BYTES_MAX} bytes"
            self._signal(signal.SIGKILL)
        return True

    async def _reap(self):
        """Wait for the end of the process and say in words how it ended."""
        status = await self._process.wait()
        self._signal(signal.SIGKILL)
        self._unwatch()
        while self._on_channel():
            pass
        self._close()
        if self._why_killed:
            return self._why_killed
        if status >= 0:
            return f"it ended with status {status}"
        name = signal.Signals(-status).name
        hint = "; most often because memory ran out" if -status == signal.SIGKILL else ""
        return f"it was ended by {name}{hint}"

    @property
    def left(self):
        """Whether it ended by itself and in order, as after `exit()`."""
        return self._process.returncode == 0 and not self._why_killed

    def epitaph(self):
        """What a client is told whose execution the kernel did not survive, or None if there is nothing to say."""
        if self.left:
            return None
        value = f"The {self.language} kernel has gone: {self.ended.result()}. Its variables are lost; the next execution starts anew."
        return failure("KernelDied", value)

    def _signal(self, number):
        if self._process is None:
            return
        try:
            # The kernel leads a session of its own, so its pid is its group.
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def _close(self):
        for output in self._outputs:
            if output.timer is not None:
                output.timer.cancel()
            self._loop.remove_reader(output.fd)
            os.close(output.fd)
        self._outputs = []
        if self._channel is not None:
            self._loop.remove_reader(self._channel)
            self._channel.close()
            self._channel = None


class PythonKernel(Kernel):
    """IPython in a process of its own: python_kernel.py."""

    def _command(self, channel_fd):
        return [sys.executable, os.path.join(HERE, "python_kernel.py"), str(channel_fd)], "null"

    def _environment(self):
        return {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}


class NodeKernel(Kernel):
    """node in its REPL mode: node_kernel.js. TypeScript is JavaScript whose types node takes away."""

    def _command(self, channel_fd):
        program = node()
        if program is None:
            raise KernelFailed(f"{self.language} needs node, which is not installed here (apt-get install nodejs)")
        return [program, os.path.join(HERE, "node_kernel.js"), str(channel_fd), self.language], "null"


class BashKernel(Kernel):
    """bash itself, interactive so that an interrupt ends the whole execution and not only one command of it."""

    def __init__(self, language, cwd):
        super().__init__(language, cwd)
        self._count = 0

    def _command(self, channel_fd):
        return ["bash", "--norc", "--noprofile", "--noediting", "+m", "-i"], "channel"

    def _environment(self):
        return {"PS1": "", "PS2": "", "PROMPT_COMMAND": "", "HISTFILE": ""}

    async def _begin(self):
        await self._send("set +H; unset HISTFILE\nbuiltin printf 'ready\\n' >&0\n")

    async def run(self, code, once, always):
        self._count += 1
        self._tell({"type": "number_of_executions", "execution_count": self._count})
        before = [f"export {name}={shlex.quote(value)}" for name, value in always.items() if NAME.match(name)]
        after = []
        for number, (name, value) in enumerate((n, v) for n, v in once.items() if NAME.match(n)):
            kept = f"__pal_kept_{number}"
            before.append(f'if [[ -v {name} ]]; then {kept}=("${name}"); else {kept}=(); fi')
            before.append(f"export {name}={shlex.quote(value)}")
            after.append(f'if ((${{#{kept}[@]}})); then export {name}="${{{kept}[0]}}"; else unset {name}; fi; unset {kept}')
        lines = [*before, f"eval {shlex.quote(code)} </dev/null", "__pal_status=$?", *after]
        await self._send("\n".join(lines) + "\nbuiltin printf '%s\\n' \"$__pal_status\" >&0\n")

    def _message(self, line):
        if line == b"ready":
            self._is_ready()
            return
        self._tell_status(int(line))
        self._tell({"type": "done"})

    def _tell_status(self, status):
        if status != 0:
            self._tell(failure("ExitStatus", str(status), f"bash: the last command ended with status {status}"))

    def epitaph(self):
        status = self._process.returncode
        if status > 0 and not self._why_killed:
            return failure("ExitStatus", str(status), f"bash: the shell ended with status {status}; the next execution gets a new one")
        return super().epitaph()


KERNELS = {
    "python": PythonKernel,
    "javascript": NodeKernel,
    "typescript": NodeKernel,
    "bash": BashKernel,
}


def failure(name, value, traceback=""):
    """An error as the client gets it."""
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def _waiting(fd):
    return struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]


def _tie_to_server():
    """What the child does before it becomes the kernel: die with us, and be the first to go when memory runs out."""
    import ctypes

    prctl = ctypes.CDLL(None).prctl

    def tie():
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        try:
            with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
                file.write("500")
        except OSError:
            pass

    return tie

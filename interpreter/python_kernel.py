"""The Python kernel: IPython in a process of its own, driven over the socket whose number is the first argument.

In: {"code", "once", "always"}, one JSON object a line. Out: messages of type ready, number_of_executions, result,
error and done. What the code prints goes to the ordinary stdout and stderr, which the server reads.

Cells run inside one event loop that lives as long as the kernel, so `await` works at top level and tasks go on
between cells. `asyncio.run` works too.
"""

import asyncio
import base64
import datetime
import fcntl
import importlib.abc
import importlib.util
import io
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import warnings

RESULT_BYTES_MAX = 32 * 1024 * 1024
DATA_CELLS_MAX = 2_000_000
DEPTH_MAX = 64
TAKEN_SECONDS_MAX = 0.05


class Channel:
    """The socket to the server. A message is written whole or not at all, also when an interrupt comes."""

    def __init__(self, fd):
        os.set_inheritable(fd, False)
        self.socket = socket.socket(fileno=fd)
        self.sending = False
        self.interrupted = False
        self._pid = os.getpid()
        self._lock = threading.RLock()

    def send(self, message):
        self._send(json.dumps(message, allow_nan=False).encode("utf-8", "surrogatepass"))

    def result(self, data, main):
        """Send a mime bundle."""
        flush()
        data = {mime: _portable(value) for mime, value in data.items() if value is not None}
        line = json.dumps({"type": "result", "data": data, "main": main}, allow_nan=False, default=str).encode()
        if len(line) > RESULT_BYTES_MAX:
            text = f"<a result of {len(line)} bytes; the most is {RESULT_BYTES_MAX}>"
            line = json.dumps({"type": "result", "data": {"text/plain": text}, "main": main}).encode()
        self._send(line)
        self.until_taken()

    def until_taken(self):
        """Wait a moment until the server has read everything, so that what is printed next comes after it."""
        end = time.monotonic() + TAKEN_SECONDS_MAX
        while self._untaken() and time.monotonic() < end:
            time.sleep(0.0002)

    def _send(self, line):
        if os.getpid() != self._pid:
            # A forked child has no business on this socket.
            return
        with self._lock:
            self.sending = True
            try:
                self.socket.sendall(line + b"\n")
            except OSError:
                os._exit(0)
            finally:
                self.sending = False
        if self.interrupted and threading.current_thread() is threading.main_thread():
            self.interrupted = False
            raise KeyboardInterrupt

    def _untaken(self):
        return struct.unpack("i", fcntl.ioctl(self.socket, termios.TIOCOUTQ, b"\0\0\0\0"))[0] > 0


class Out(io.TextIOWrapper):
    """stdout or stderr: every write goes out at once, so that its order with child processes is kept."""

    def __init__(self, fd):
        raw = open(fd, "wb", closefd=False)
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", newline="\n")

    def write(self, text):
        count = super().write(text)
        self.flush()
        return count


def flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass


def plain(value, other=None, depth=0):
    """The value as JSON can hold it. `other` makes something of what JSON cannot; without it TypeError is raised."""
    if depth > DEPTH_MAX:
        raise ValueError("nested too deeply")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_key(key): plain(item, other, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, other, depth + 1) for item in value]
    if type(value).__name__ in ("NaTType", "NAType"):
        return None
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        made = value.tolist()
        if type(made) is not type(value):
            return plain(made, other, depth + 1)
    if other is None:
        raise TypeError(f"JSON has no {type(value).__name__}")
    return other(value)


def _key(key):
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, (bool, int, float)):
        return json.dumps(key)
    return str(key)


def _portable(value):
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value


def make_shell(channel):
    """IPython's shell, with what it shows sent to the server."""
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.formatters import BaseFormatter, JSONFormatter
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets import ObjectName, Type, Unicode
    from traitlets.config import Config

    class Hook(DisplayHook):
        def start_displayhook(self):
            pass

        def write_output_prompt(self):
            pass

        def write_format_data(self, format_dict, md_dict=None):
            channel.result(format_dict, True)

        def finish_displayhook(self):
            pass

    class Publisher(DisplayPublisher):
        def publish(self, data, metadata=None, *, transient=None, update=False, **_):
            if self.shell is not None and getattr(self, "_is_publishing", False) is False and not update:
                channel.result(data, False)

        def clear_output(self, wait=False):
            pass

    class Shell(InteractiveShell):
        displayhook_class = Type(Hook)
        display_pub_class = Type(Publisher)
        leaving = False

        def _showtraceback(self, etype, evalue, stb):
            lines = stb if isinstance(stb, list) else [str(stb)]
            flush()
            channel.send({"type": "error", "name": str(etype.__name__), "value": str(evalue), "traceback": "\n".join(lines)})

        def system(self, cmd):
            """`!command`: its output goes straight to ours."""
            flush()
            command = self.var_expand(cmd, depth=1)
            self.user_ns["_exit_code"] = subprocess.call(command, shell=True, executable=os.environ.get("SHELL") or None)

        system_piped = system_raw = system

        def enable_gui(self, gui=None):
            pass

        def ask_exit(self):
            self.leaving = True

    class DataFormatter(BaseFormatter):
        """A DataFrame as its columns."""

        format_type = Unicode("e2b/data")
        print_method = ObjectName("_repr_e2b_data_")
        _return_type = (dict, str)

        def __call__(self, obj):
            # A DataFrame can only exist if pandas has been imported; importing it here would cost everybody.
            pandas = sys.modules.get("pandas")
            if pandas is None or not isinstance(obj, getattr(pandas, "DataFrame", ())):
                return super().__call__(obj)
            if obj.size > DATA_CELLS_MAX:
                return None
            return plain(obj.to_dict(orient="list"), str)

    class ChartFormatter(BaseFormatter):
        """A matplotlib figure as the numbers it was drawn from."""

        format_type = Unicode("e2b/chart")
        print_method = ObjectName("_repr_e2b_chart_")
        _return_type = (dict, str)

        def __call__(self, obj):
            figure = sys.modules.get("matplotlib.figure")
            if figure is None or not isinstance(obj, figure.Figure):
                return super().__call__(obj)
            try:
                return plain(_charts().chart(obj))
            except Exception:
                # The picture is there all the same.
                return None

    class PlainJson(JSONFormatter):
        """Lists and dictionaries also as JSON, if they can be."""

        def __call__(self, obj):
            if isinstance(obj, (list, dict)):
                try:
                    return plain(obj), {"expanded": True}
                except (TypeError, ValueError, RecursionError):
                    pass
            return super().__call__(obj)

    config = Config()
    config.InteractiveShell.colors = "nocolor"
    config.HistoryManager.enabled = False
    config.PlainTextFormatter.max_seq_length = 0
    shell = Shell.instance(config=config)
    formatters = shell.display_formatter.formatters
    formatters["e2b/data"] = DataFormatter(parent=shell.display_formatter)
    formatters["e2b/chart"] = ChartFormatter(parent=shell.display_formatter)
    formatters["application/json"] = PlainJson(parent=shell.display_formatter)
    return shell


def _charts():
    name = "palisade_charts"
    if name not in sys.modules:
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "charts.py")
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function on a module when, and only when, somebody imports it."""

    def __init__(self, hooks):
        self._hooks = hooks

    def find_spec(self, name, path=None, target=None):
        hook = self._hooks.pop(name, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                hook(module)

            spec.loader.exec_module = exec_module
        return spec


def show_saved_images(module):
    """An image that is saved to a file is shown too, as E2B does."""
    from IPython.display import display

    original = module.Image.save

    def save(self, fp, format=None, **params):
        if isinstance(fp, str):
            display(self)
        return original(self, fp, format, **params)

    module.Image.save = save


def show_images_here(module):
    """`Image.show()` looks for a desktop's viewer; the client is the only one there is."""
    if hasattr(module, "IPythonViewer"):
        module._viewers[:] = [module.IPythonViewer()]


class Runner:
    """Runs one cell after the other, and knows what an interrupt may break off."""

    def __init__(self, channel, shell, loop):
        self._channel = channel
        self._shell = shell
        self._loop = loop
        self._cell = None
        self._nested = 0
        self._requests = asyncio.Queue()
        self._received = bytearray()
        signal.signal(signal.SIGINT, self._interrupt)
        self._allow_asyncio_run()

    async def serve(self):
        self._loop.add_reader(self._channel.socket, self._receive)
        self._channel.send({"type": "ready"})
        while not self._shell.leaving and (request := await self._requests.get()) is not None:
            self._cell = self._loop.create_task(self._run(request))
            try:
                await self._cell
            except (KeyboardInterrupt, asyncio.CancelledError):
                # It came when no code of the user ran any more; the cell itself reports what hits it.
                pass
            self._cell = None
            flush()
            self._channel.interrupted = False
            if not self._shell.leaving:
                # Who leaves is not ready for more: the end of the process ends the execution.
                self._channel.send({"type": "done"})

    def _receive(self):
        data = self._channel.socket.recv(1 << 20)
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            self._requests.put_nowait(json.loads(line))
        if not data:
            self._loop.remove_reader(self._channel.socket)
            self._requests.put_nowait(None)

    async def _run(self, request):
        os.environ.update(request["always"])
        kept = {name: os.environ.get(name) for name in request["once"]}
        os.environ.update(request["once"])
        self._channel.send({"type": "number_of_executions", "execution_count": self._shell.execution_count})
        self._channel.until_taken()
        try:
            await self._run_cell(request["code"])
        finally:
            for name, value in kept.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    async def _run_cell(self, code):
        shell, problem, transformed = self._shell, None, None
        try:
            transformed = shell.transform_cell(code)
        except Exception:
            problem = sys.exc_info()
        result = None
        try:
            result = await shell.run_cell_async(
                code, store_history=True, transformed_cell=transformed, preprocessing_exc_tuple=problem
            )
        finally:
            shell.events.trigger("post_execute")
            shell.events.trigger("post_run_cell", result)

    def _interrupt(self, *_):
        if self._channel.sending:
            self._channel.interrupted = True
        elif self._cell is None:
            pass
        elif self._nested or asyncio.current_task(self._loop) is self._cell:
            raise KeyboardInterrupt
        else:
            # The cell waits in `await`: the loop has to be woken to hear of it.
            self._loop.call_soon_threadsafe(self._cell.cancel)

    def _allow_asyncio_run(self):
        """Let a cell call `asyncio.run`, although it runs in a loop itself: that loop steps aside meanwhile."""
        original = asyncio.run

        def run(main, **options):
            loop = asyncio._get_running_loop()
            if loop is not self._loop:
                return original(main, **options)
            task = asyncio.current_task()
            asyncio._leave_task(loop, task)
            asyncio._set_running_loop(None)
            self._nested += 1
            try:
                return original(main, **options)
            finally:
                self._nested -= 1
                asyncio.set_event_loop(loop)
                asyncio._set_running_loop(loop)
                asyncio._enter_task(loop, task)

        asyncio.run = run


def main():
    channel = Channel(int(sys.argv[1]))
    sys.argv = [""]
    sys.path[0] = ""
    sys.stdout, sys.stderr = Out(1), Out(2)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    shell = make_shell(channel)
    # IPython's advice for a terminal; the error says it all.
    warnings.filterwarnings("ignore", message="To exit: use 'exit'")
    sys.meta_path.insert(0, AfterImport({"PIL.Image": show_saved_images, "PIL.ImageShow": show_images_here}))
    serving = loop.create_task(Runner(channel, shell, loop).serve())
    while not serving.done():
        try:
            loop.run_until_complete(serving)
        except KeyboardInterrupt:
            # asyncio lets it through its loop; the cell that it belongs to has been ended by it.
            continue
    flush()


if __name__ == "__main__":
    main()

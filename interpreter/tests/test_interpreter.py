"""The interpreter as its clients meet it: a real server, real kernels, HTTP over loopback."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from http.server import BaseHTTPRequestHandler, HTTPServer

HERE = os.path.dirname(os.path.abspath(__file__))
SERVER = os.path.join(os.path.dirname(HERE), "server.py")
WAIT_SECONDS = 60


class FakeEnvd(BaseHTTPRequestHandler):
    """envd's /envs: variables for who has the token."""

    def do_GET(self):
        right = self.path == "/envs" and self.headers.get("X-Access-Token") == "secret"
        body = json.dumps({"FROM_ENVD": "it's here", "KEPT": "envd"}).encode()
        self.send_response(200 if right else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Interpreter:
    """A server of its own, with a directory of its own, that ends with all its kernels."""

    def __init__(self):
        self.directory = tempfile.mkdtemp(prefix="interpreter-")
        self.envd = HTTPServer(("127.0.0.1", 0), FakeEnvd)
        threading.Thread(target=self.envd.serve_forever, daemon=True).start()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        envd = f"127.0.0.1:{self.envd.server_port}"
        command = [sys.executable, SERVER, "--port", str(self.port), "--envd", envd, "--cwd", self.directory]
        self.process = subprocess.Popen(command, env={**os.environ, "HOME": self.directory})
        end = time.monotonic() + WAIT_SECONDS
        while True:
            with contextlib.suppress(OSError):
                assert self.ask("GET", "/health") == (200, "OK")
                return
            assert self.process.poll() is None and time.monotonic() < end, "the server did not come up"
            time.sleep(0.02)

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(WAIT_SECONDS)
        self.envd.shutdown()
        self.envd.server_close()
        shutil.rmtree(self.directory)

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)

    def ask(self, method, path, body=None):
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, json.dumps(body) if body is not None else None)
            answer = connection.getresponse()
            text = answer.read().decode()
            kind = answer.getheader("content-type")
            return answer.status, json.loads(text) if kind == "application/json" else text

    def run(self, code, language=None, token=None, **more):
        """All messages of an execution but the last, which must be its end."""
        with contextlib.closing(self.connect()) as connection:
            headers = {"X-Access-Token": token} if token else {}
            body = {"code": code, "language": language, **more}
            connection.request("POST", "/execute", json.dumps(body), headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            messages = [json.loads(line) for line in answer.read().splitlines()]
        assert messages[-1] == {"type": "end_of_execution"}, messages
        return messages[:-1]

    def leave(self, code, **more):
        """Start an execution and go away when it has printed something."""
        connection = self.connect()
        connection.request("POST", "/execute", json.dumps({"code": code, **more}))
        answer = connection.getresponse()
        while b"stdout" not in answer.readline():
            pass
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()


def said(messages, kind="stdout"):
    return "".join(message["text"] for message in messages if message["type"] == kind)


def results(messages):
    return [message for message in messages if message["type"] == "result"]


def text(messages):
    return results(messages)[-1]["text"]


def error(messages):
    found = [message for message in messages if message["type"] == "error"]
    return (found[0]["name"], found[0]["value"]) if found else None


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.it = Interpreter()

    @classmethod
    def tearDownClass(cls):
        cls.it.close()


class Python(Case):
    def test_state_is_kept_and_the_last_expression_is_the_result(self):
        self.it.run("kept = 20")
        messages = self.it.run("print('to stdout'); kept + 1")
        self.assertEqual(messages[0]["type"], "number_of_executions")
        self.assertEqual(said(messages), "to stdout\n")
        self.assertEqual(results(messages), [{"type": "result", "is_main_result": True, "text": "21"}])

    def test_text_of_a_string_is_unquoted_and_collections_are_json_too(self):
        self.assertEqual(text(self.it.run("'plain'")), "plain")
        (result,) = results(self.it.run("{'a': [1, float('nan')], 2: None}"))
        self.assertEqual(result["json"], {"a": [1, None], "2": None})

    def test_an_error_has_name_value_and_traceback(self):
        messages = self.it.run("def fails():\n    return missing\nfails()")
        self.assertEqual(error(messages), ("NameError", "name 'missing' is not defined"))
        self.assertIn("----> 2     return missing", messages[-1]["traceback"])

    def test_await_and_asyncio_run_both_work(self):
        self.assertEqual(text(self.it.run("import asyncio\nawait asyncio.sleep(0, 'awaited')")), "awaited")
        self.assertEqual(text(self.it.run("asyncio.run(asyncio.sleep(0, 'run'))")), "run")
        self.assertEqual(text(self.it.run("await asyncio.sleep(0, 'again')")), "again")

    def test_prints_children_and_results_keep_their_order(self):
        code = "import os\nfor i in range(20):\n    print('p', i)\n    os.system(f'echo c {i}')\n    display(i)\n    print('after', i)"
        order = []
        for message in self.it.run(code):
            if message["type"] == "stdout":
                order += message["text"].splitlines()
            elif message["type"] == "result":
                order.append(f"shown {message['text']}")
        self.assertEqual(order, [f"{word} {i}" for i in range(20) for word in ("p", "c", "shown", "after")])

    def test_rich_results_come_in_their_formats(self):
        code = "from IPython.display import *\nfor made in (HTML('<b>'), Markdown('# h'), Latex('$x$'), SVG('<svg></svg>'), Javascript('1')):\n    display(made)"
        found = [set(result) - {"type", "is_main_result", "text"} for result in results(self.it.run(code))]
        self.assertEqual(found, [{"html"}, {"markdown"}, {"latex"}, {"svg"}, {"javascript"}])
        (result,) = results(self.it.run("display({'text/latex': 'x', 'a/b': 1}, raw=True)"))
        self.assertEqual(result, {"type": "result", "is_main_result": False, "latex": "x", "extra": {"a/b": 1}})

    def test_a_table_comes_with_its_data(self):
        (result,) = results(self.it.run("import pandas as pd\npd.DataFrame({'a': [1, None], 't': pd.to_datetime(['2024-01-02', None])})"))
        self.assertEqual(result["data"], {"a": [1.0, None], "t": ["2024-01-02T00:00:00", None]})
        self.assertIn("<table", result["html"])

    def test_variables_are_for_one_execution_or_from_envd(self):
        code = "import os; [os.environ.get(name) for name in ('ONCE', 'KEPT', 'FROM_ENVD')]"
        context = self.it.ask("POST", "/contexts", {})[1]["id"]
        first = self.it.run(code, token="secret", context_id=context, env_vars={"ONCE": "1", "KEPT": "mine"})
        self.assertEqual(results(first)[0]["json"], ["1", "mine", "it's here"])
        self.assertEqual(results(self.it.run(code, context_id=context))[0]["json"], [None, "envd", "it's here"])

    def test_a_kernel_that_dies_is_reported_and_replaced(self):
        name, value = error(self.it.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
        self.assertEqual(name, "KernelDied")
        self.assertIn("SIGKILL", value)
        self.assertEqual(error(self.it.run("os"))[0], "NameError")
        self.assertIsNone(error(self.it.run("exit()")))
        self.assertEqual(text(self.it.run("'alive'")), "alive")

    def test_output_is_cut_at_the_limit_but_the_execution_goes_on(self):
        messages = self.it.run("for _ in range(70):\n    print('x' * 1024 * 1024)\n'end of it'")
        self.assertLess(len(said(messages)), 66 * 1024 * 1024)
        self.assertIn("output cut", said(messages, "stderr"))


class Charts(Case):
    def chart(self, code):
        (result,) = results(self.it.run(f"import matplotlib.pyplot as plt\n{code}\nplt.show()"))
        self.assertTrue(result["png"])
        return result["chart"]

    def test_lines(self):
        chart = self.chart("import datetime\nplt.plot([datetime.date(2024, 1, d) for d in (1, 2)], [1, 10], label='l')\nplt.yscale('log')\nplt.ylabel('Speed (m/s)'); plt.title('t')")
        self.assertEqual((chart["type"], chart["title"], chart["y_unit"]), ("line", "t", "m/s"))
        self.assertEqual((chart["x_scale"], chart["y_scale"]), ("datetime", "log"))
        self.assertEqual(chart["elements"], [{"label": "l", "points": [["2024-01-01", 1.0], ["2024-01-02", 10.0]]}])

    def test_scatter(self):
        chart = self.chart("plt.scatter([1, 2], [3, 4], label='s')")
        self.assertEqual(chart["elements"], [{"label": "s", "points": [[1.0, 3.0], [2.0, 4.0]]}])

    def test_bars_upright_and_lying(self):
        for draw, label in (("bar", "x_label"), ("barh", "y_label")):
            axis = "x" if draw == "bar" else "y"
            chart = self.chart(f"plt.{draw}(['A', 'B'], [5, 7], label='g')\nplt.{axis}label('names')")
            self.assertEqual((chart["type"], chart["x_label"]), ("bar", "names"))
            self.assertEqual([tuple(bar.values()) for bar in chart["elements"]], [("A", "g", 5.0), ("B", "g", 7.0)])

    def test_pie(self):
        chart = self.chart("plt.pie([90, 10], labels=['No', 'Yes'])")
        self.assertEqual([tuple(wedge.values()) for wedge in chart["elements"]], [("No", 324.0, 1.0), ("Yes", 36.0, 1.0)])

    def test_boxes_upright_and_lying(self):
        for vert in (True, False):
            chart = self.chart(f"plt.boxplot([[95, 89, 76, 91, 84, 87], [1, 2, 3]], tick_labels=['A', 'B'], patch_artist=True, vert={vert})")
            first = {"label": "A", "min": 84, "first_quartile": 84.75, "median": 88, "third_quartile": 90.5, "max": 95, "outliers": [76]}
            self.assertEqual((chart["type"], chart["elements"][0]), ("box_and_whisker", first))

    def test_several_axes_and_unknown_ones(self):
        chart = self.chart("f, (a, b) = plt.subplots(1, 2); f.suptitle('both')\na.plot([1, 2, 3]); b.imshow([[1]])")
        self.assertEqual((chart["type"], chart["title"]), ("superchart", "both"))
        self.assertEqual([part["type"] for part in chart["elements"]], ["line", "unknown"])


class Bash(Case):
    def test_state_output_and_status(self):
        self.it.run("cd /; NAME=value; greet() { echo hello; }", "bash")
        messages = self.it.run("pwd; echo $NAME; greet; echo \"it's\" >&2; false", "bash")
        self.assertEqual((said(messages), said(messages, "stderr")), ("/\nvalue\nhello\n", "it's\n"))
        self.assertEqual(error(messages), ("ExitStatus", "1"))

    def test_variables_of_one_execution(self):
        code = "echo ${ONCE-none}"
        self.assertEqual(said(self.it.run(code, "bash", env_vars={"ONCE": "it's $HOME"})), "it's $HOME\n")
        self.assertEqual(said(self.it.run(code, "bash")), "none\n")

    def test_a_shell_that_exits_is_replaced(self):
        self.assertEqual(error(self.it.run("exit 3", "bash")), ("ExitStatus", "3"))
        self.assertEqual(said(self.it.run("echo again", "bash")), "again\n")


@unittest.skipUnless(shutil.which("node"), "there is no node")
class JavaScript(Case):
    def test_state_redeclaration_await_and_results(self):
        self.it.run("const n = 1", "js")
        messages = self.it.run("const n = 2; console.log('said'); await Promise.resolve({ n })", "js")
        self.assertEqual((said(messages), text(messages)), ("said\n", "{ n: 2 }"))
        self.assertEqual(text(self.it.run("Promise.resolve('waited for')", "js")), "waited for")

    def test_imports_only_where_they_are_code(self):
        code = "import fs, { existsSync as e } from 'node:fs'\nimport * as p from 'path'\n"
        code += "[typeof fs.open, typeof e, typeof p.join, `import a from 'b' ${typeof (await import('os')).cpus}`, /import 'x'/.source].join()"
        self.assertEqual(text(self.it.run(code, "js")), "function,function,function,import a from 'b' function,import 'x'")

    def test_errors(self):
        messages = self.it.run("function f() { throw new TypeError('bad') }\nf()", "js")
        self.assertEqual(error(messages), ("TypeError", "bad"))
        self.assertRegex(messages[-1]["traceback"], r"at f \(cell-\d+\.js:1:22\)\n    at cell-\d+\.js:2:1$")
        self.assertEqual(error(self.it.run("const = 1", "js"))[0], "SyntaxError")

    def test_typescript_runs_or_says_what_it_needs(self):
        messages = self.it.run("const typed: number = 5; typed", "ts")
        if error(messages):
            self.assertIn("TypeScript needs node 22.13", error(messages)[1])
        else:
            self.assertEqual(text(messages), "5")


class Contexts(Case):
    def test_contexts_are_made_listed_restarted_and_removed(self):
        status, made = self.it.ask("POST", "/contexts", {"cwd": "/"})
        self.assertEqual((status, made["language"], made["cwd"]), (200, "python", "/"))
        self.assertEqual(self.it.ask("GET", "/contexts")[1][-1], made)
        self.it.run("x = 1", context_id=made["id"])
        self.assertEqual(self.it.ask("POST", f"/contexts/{made['id']}/restart")[0], 200)
        self.assertEqual(error(self.it.run("x", context_id=made["id"])), ("NameError", "name 'x' is not defined"))
        self.assertEqual(self.it.ask("DELETE", f"/contexts/{made['id']}")[0], 200)
        self.assertEqual(self.it.ask("POST", "/execute", {"code": "1", "context_id": made["id"]})[0], 404)

    def test_what_cannot_be_is_refused(self):
        both = {"code": "1", "context_id": "x", "language": "js"}
        self.assertEqual(self.it.ask("POST", "/execute", both), (400, "Only one of context_id or language can be provided"))
        self.assertEqual(self.it.ask("POST", "/contexts", {"cwd": "/nowhere"})[0], 400)
        self.assertEqual(self.it.ask("POST", "/contexts", {"language": "r"})[0], 400)
        self.assertEqual(self.it.ask("POST", "/execute", {"code": 1})[0], 400)
        self.assertEqual(self.it.ask("GET", "/nothing")[0], 404)
        self.assertEqual(error(self.it.run("1", "java"))[0], "LanguageNotSupported")

    def test_a_connection_serves_many_executions(self):
        with contextlib.closing(self.it.connect()) as connection:
            sockets = set()
            for number in range(5):
                connection.request("POST", "/execute", json.dumps({"code": f"{number} + 1"}))
                answer = connection.getresponse()
                self.assertIn(f'"text":"{number + 1}"'.encode(), answer.read())
                sockets.add(connection.sock)
            self.assertEqual(len(sockets), 1)
            self.assertIsNotNone(connection.sock)

    def test_one_context_is_serial_and_two_are_parallel(self):
        other = self.it.ask("POST", "/contexts", {})[1]["id"]
        seen = {}

        def run(name, **where):
            code = "import time; began = time.time(); time.sleep(0.5); [began, time.time()]"
            seen[name] = results(self.it.run(code, **where))[0]["json"]

        threads = [threading.Thread(target=run, args=(n,), kwargs=k) for n, k in (("a", {}), ("b", {}), ("c", {"context_id": other}))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first, second = sorted((seen["a"], seen["b"]))
        self.assertLessEqual(first[1], second[0])
        self.assertTrue(any(seen["c"][0] < span[1] and span[0] < seen["c"][1] for span in (first, second)))

    def test_a_client_that_goes_interrupts_and_state_stays(self):
        self.it.run("kept = 'state'")
        for code in ("print('on', flush=True)\nimport time; time.sleep(600)", "print('on')\nimport asyncio; await asyncio.sleep(600)", "print('on')\n!sleep 600"):
            self.it.leave(code)
            self.assertEqual(text(self.it.run("kept")), "state", code)
        self.it.run("kept=state", "bash")
        self.it.leave("echo on; while true; do sleep 1; done; kept=wrong", language="bash")
        self.assertEqual(said(self.it.run("echo $kept", "bash")), "state\n")

    def test_what_ignores_the_interrupt_is_killed_and_the_next_is_told(self):
        context = self.it.ask("POST", "/contexts", {})[1]["id"]
        self.it.leave("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print('on')\nwhile True: pass", context_id=context)
        messages = self.it.run("'new'", context_id=context)
        self.assertEqual(text(messages), "new")
        self.assertIn("kernel was restarted", said(messages, "stderr"))

    def test_kernels_end_with_the_server(self):
        own = Interpreter()
        pid = int(text(own.run("import os; os.getpid()")))
        own.process.kill()
        own.close()
        end = time.monotonic() + WAIT_SECONDS
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
            time.sleep(0.05)
        self.assertFalse(os.path.exists(f"/proc/{pid}"))


if __name__ == "__main__":
    unittest.main()

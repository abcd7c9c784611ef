"""Runs a model script through Python's deepagents, and prints the time of each request to the model in nanoseconds.

    python peer.py SCRIPT ROOT subprocess|local|pal [PAL BODY]

The scripted model and the sandbox over subprocesses are those of tests/differential/reference.py.
"""

import json
import subprocess
import sys
import time
import tomllib

from deepagents import create_deep_agent
from deepagents.backends import LocalShellBackend
from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from langchain_core.messages import ToolMessage
from reference import Scripted, Subprocesses


class InBody(Subprocesses):
    """deepagents' BaseSandbox whose commands `pal exec` runs in a Body."""

    def __init__(self, root, pal, body):
        super().__init__(root)
        self.prefix = [pal, "exec", body, "--"]

    def execute(self, command, *, timeout=None):
        done = subprocess.run([*self.prefix, "/bin/bash", "-c", command], stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output = done.stdout.decode("utf-8", errors="replace")
        return ExecuteResponse(output=output, exit_code=done.returncode, truncated=False)

    def upload_files(self, files):
        for path, content in files:
            subprocess.run([*self.prefix, "/bin/sh", "-c", 'cat >"$1"', "sh", path], input=content, check=True)
        return [FileUploadResponse(path=path, error=None) for path, _ in files]

    def download_files(self, paths):
        reads = [subprocess.run([*self.prefix, "cat", path], stdin=subprocess.DEVNULL, capture_output=True) for path in paths]
        return [FileDownloadResponse(path=path, content=read.stdout, error=None) for path, read in zip(paths, reads)]


class Timed(Scripted):
    """The scripted model, with the times of its requests."""

    times: list = []

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        self.times.append(time.time_ns())
        return super()._generate(messages, stop, run_manager, **kwargs)


def main():
    script, root, kind, *body = sys.argv[1:]
    with open(script, "rb") as file:
        turns = tomllib.load(file)["turns"]
    if kind == "pal":
        backend = InBody(root, *body)
    elif kind == "local":
        backend = LocalShellBackend(root_dir=root, virtual_mode=False, inherit_env=True)
    else:
        backend = Subprocesses(root)
    model = Timed(turns=turns)
    state = create_deep_agent(model=model, backend=backend).invoke({"messages": [("user", "go")]}, {"recursion_limit": 100_000})
    results = [message for message in state["messages"] if isinstance(message, ToolMessage)]
    failed = [message.content for message in results if message.status == "error" or str(message.content).startswith("Error")]
    if failed or len(results) != len(turns) - 1:
        sys.exit(f"{len(results)} results, and {len(failed)} of them failed: {failed[:1]}")
    print(json.dumps(model.times))


if __name__ == "__main__":
    main()

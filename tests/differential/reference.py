"""Runs a model script through Python's deepagents, and prints each result as a line of JSON.

    python reference.py SCRIPT ROOT

ROOT is a directory of this machine that stands for /workspace/differential. The sandbox is deepagents' own BaseSandbox
over a subprocess; tools, checks and texts are those of its FilesystemMiddleware in an agent of `create_deep_agent`.
"""

import json
import os
import signal
import subprocess
import sys
import tomllib

from deepagents import create_deep_agent
from deepagents.backends import CompositeBackend
from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse, LsResult
from deepagents.backends.sandbox import BaseSandbox
from langchain.agents.middleware import TodoListMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

INSIDE = "/workspace/differential"
TIMEOUT_DEFAULT = 120


class Subprocesses(BaseSandbox):
    """A sandbox that is none: commands run here. Output is merged as it arrives."""

    def __init__(self, root):
        self.root = root

    @property
    def id(self):
        return "subprocesses"

    def execute(self, command, *, timeout=None):
        if not command:
            # The only text of deepagents for this case is the one of its LocalShellBackend.
            return ExecuteResponse(output="Error: Command must be a non-empty string.", exit_code=1, truncated=False)
        limit = TIMEOUT_DEFAULT if timeout is None else timeout
        process = subprocess.Popen(
            ["/bin/bash", "-c", command], cwd=self.root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": self.root, "LANG": "C.UTF-8"},
        )
        try:
            output, _ = process.communicate(timeout=limit or None)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            # The texts of deepagents' LocalShellBackend.
            told = "For long-running commands, re-run using the timeout parameter."
            if timeout is not None:
                told = "The command may be stuck or require more time."
            custom = " (custom timeout)" if timeout is not None else ""
            output = f"Error: Command timed out after {limit} seconds{custom}. {told}"
            return ExecuteResponse(output=output, exit_code=124, truncated=False)
        # A shell that ends by a signal has 128 and the signal's number, as in any shell.
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return ExecuteResponse(output=output.decode("utf-8", errors="replace"), exit_code=code, truncated=False)

    def ls(self, path):
        # The kernel's order says nothing and differs between file systems.
        found = super().ls(path)
        entries = found.entries and sorted(found.entries, key=lambda entry: entry["path"])
        return LsResult(error=found.error, entries=entries)

    def upload_files(self, files):
        responses = []
        for path, content in files:
            try:
                with open(path, "wb") as file:
                    file.write(content)
                responses.append(FileUploadResponse(path=path, error=None))
            except IsADirectoryError:
                responses.append(FileUploadResponse(path=path, error="is_directory"))
            except OSError:
                responses.append(FileUploadResponse(path=path, error="invalid_path"))
        return responses

    def download_files(self, paths):
        responses = []
        for path in paths:
            try:
                with open(path, "rb") as file:
                    responses.append(FileDownloadResponse(path=path, content=file.read(), error=None))
            except OSError:
                responses.append(FileDownloadResponse(path=path, content=None, error="file_not_found"))
        return responses


class Scripted(BaseChatModel):
    """Answers with the turns of a script, one after the other."""

    turns: list
    # The results in the newest request: what the model saw.
    seen: dict = {}

    @property
    def _llm_type(self):
        return "scripted"

    def bind_tools(self, tools, **kwargs):
        return self

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        answers = sum(isinstance(message, AIMessage) for message in messages)
        self.seen.update({message.tool_call_id: message.content for message in messages if isinstance(message, ToolMessage)})
        turn = self.turns[answers]
        calls = [
            {"id": f"call_main_{answers + 1}_{number}", "name": call["tool"], "args": call["arguments"]}
            for number, call in enumerate(turn.get("calls", []), 1)
        ]
        message = AIMessage(content=turn.get("text", ""), tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])


def main():
    script, root = sys.argv[1], sys.argv[2].rstrip("/")
    with open(script, "rb") as file:
        text = file.read().decode()
    turns = tomllib.loads(text.replace(INSIDE, root))["turns"]
    backend = CompositeBackend(default=Subprocesses(root), routes={}, artifacts_root=os.environ["ARTIFACTS"])
    model = Scripted(turns=turns)
    agent = create_deep_agent(model=model, backend=backend, middleware=[TodoListMiddleware()])
    state = agent.invoke({"messages": [("user", "go")]}, {"recursion_limit": 100_000})
    for message in state["messages"]:
        if not isinstance(message, ToolMessage):
            continue
        blocks = model.seen[message.tool_call_id]
        content = blocks if isinstance(blocks, str) else "\n".join(block.get("text", json.dumps(block)) for block in blocks)
        code = (message.artifact or {}).get("exit_code")
        line = {"call": message.tool_call_id, "text": content.replace(root, INSIDE), "exit_code": code}
        print(json.dumps({**line, "failed": message.status == "error"}, ensure_ascii=False))


if __name__ == "__main__":
    main()

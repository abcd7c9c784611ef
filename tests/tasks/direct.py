"""The tools of an agent without an agent: enough of each to check a script before Palisade runs it.

Results have the parts that scripts expect, not the exact texts of the real tools.
"""

import os
import re
import select
import shutil
import subprocess
import time
from pathlib import Path


class Refused(Exception):
    """A call that a real tool would refuse."""


class Tools:
    """Tools in a directory of this machine that stands for a directory of a Body."""

    def __init__(self, inside, outside, script, answers=()):
        self.inside, self.outside, self.script, self.answers = inside, str(outside), script, list(answers)
        self.sessions = []
        # A mutant may stumble over what it left out, as a model would.
        self.strict = any("expect" in turn for turn in script["turns"])

    def run(self, call):
        """Carries out one call, and returns the text of its result."""
        name, arguments = call["tool"], call.get("arguments", {})
        tool = getattr(self, name, None)
        if tool is None or name == "run":
            raise Refused(f"there is no tool {name}")
        try:
            return tool(**arguments).replace(self.outside, self.inside)
        except (Refused, OSError) as refused:
            if self.strict:
                raise
            return str(refused)

    def path(self, text):
        if not text.startswith(self.inside):
            raise Refused(f"{text} is not in the project")
        return Path(self.outside + text[len(self.inside):])

    def write_todos(self, todos):
        return f"Updated todo list to {todos}"

    def task(self, subagent_type, description):
        """A sub-agent, in the same directory."""
        turns = [turn for turn in self.script["turns"] if turn.get("role") == subagent_type
                 and turn.get("task", "") in description]
        return converse(self, turns)

    def compact_conversation(self):
        return ""

    def ask_user(self, question, choices=()):
        return self.answers.pop(0)

    def ls(self, path):
        return str(sorted(f"{self.path(path)}/{name}" for name in os.listdir(self.path(path))))

    def read_file(self, file_path, offset=0, limit=100):
        lines = self.path(file_path).read_text().splitlines(keepends=True)
        page = lines[offset:offset + limit]
        return f"@@ lines {offset + 1}-{offset + len(page)} of {len(lines)} @@\n" + "".join(page)

    def write_file(self, file_path, content):
        self.path(file_path).parent.mkdir(parents=True, exist_ok=True)
        self.path(file_path).write_text(content)
        return f"Updated file {file_path}"

    def edit_file(self, file_path, old_string, new_string, replace_all=False):
        text = self.path(file_path).read_text()
        count = text.count(old_string) if old_string else 0
        if count == 0 or (count > 1 and not replace_all):
            raise Refused(f"{old_string!r} occurs {count} times in {file_path}")
        self.path(file_path).write_text(text.replace(old_string, new_string))
        return f"Successfully replaced {count} instance(s) of the string in '{file_path}'"

    def delete(self, file_path):
        path = self.path(file_path)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        return f"Deleted {file_path}"

    def files(self, path):
        return sorted(file for file in self.path(path).rglob("*") if file.is_file() and ".git" not in file.parts)

    def glob(self, pattern, path):
        ends = re.search(r"\*(\.\w+|\.\{[\w,]+\})$", pattern)
        endings = tuple("." + ending for ending in ends[1].strip(".{}").split(","))
        return str([str(file) for file in self.files(path) if file.name.endswith(endings)])

    def grep(self, pattern, path, glob="*", output_mode="files_with_matches"):
        said = []
        for file in self.files(path):
            lines = file.read_text().splitlines()
            found = [(number, line) for number, line in enumerate(lines, 1) if pattern in line]
            if not found or not file.match(glob):
                continue
            said += {
                "files_with_matches": [str(file)],
                "count": [f"{file}: {len(found)}"],
                "content": [f"{file}:", *(f"  {number}: {line}" for number, line in found)],
            }[output_mode]
        return "\n".join(said) or "No matches found"

    def execute(self, command, timeout=60):
        return self.shell(command, self.outside, timeout)

    def exec_command(self, cmd, workdir=None, tty=False, yield_time_ms=10_000):
        process = subprocess.Popen(["sh", "-c", cmd.replace(self.inside, self.outside)],
                                   cwd=self.path(workdir or self.inside), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT)
        self.sessions.append(process)
        return self.listen(len(self.sessions), yield_time_ms)

    def write_stdin(self, session_id, chars="", yield_time_ms=10_000):
        process = self.sessions[session_id - 1]
        process.stdin.write(chars.encode())
        process.stdin.flush()
        return self.listen(session_id, yield_time_ms)

    def listen(self, number, yield_time_ms):
        process, said, end = self.sessions[number - 1], b"", time.monotonic() + yield_time_ms / 1000
        while (left := end - time.monotonic()) > 0 and select.select([process.stdout], [], [], left)[0]:
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                return f"{said.decode()}\nProcess exited with code {process.wait()}"
            said += piece
        return f"{said.decode()}\nProcess running with session ID {number}"

    def close(self):
        for process in self.sessions:
            process.kill()
            process.wait()

    def shell(self, command, directory, timeout):
        outside = command.replace(self.inside, self.outside)
        done = subprocess.run(["sh", "-c", outside], cwd=directory, timeout=timeout, text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        word = "succeeded" if done.returncode == 0 else "failed"
        return f"{done.stdout}\n[Command {word} with exit code {done.returncode}]"

    def apply_patch(self, input):
        lines = input.strip("\n").split("\n")
        if lines[0] != "*** Begin Patch" or lines[-1] != "*** End Patch":
            raise Refused("no patch")
        files = re.split(r"^\*\*\* (Add|Update|Delete) File: (.*)\n", "\n".join(lines[1:-1]) + "\n", flags=re.M)
        for verb, name, body in zip(files[1::3], files[2::3], files[3::3]):
            if verb == "Add":
                self.write_file(name, "".join(line[1:] + "\n" for line in body.splitlines()))
            elif verb == "Delete":
                self.delete(name)
            else:
                self.patch(name, body)
        return "Success."

    def patch(self, name, body):
        text, begin, target = self.path(name).read_text(), 0, name
        if body.startswith("*** Move to: "):
            target, _, body = body.removeprefix("*** Move to: ").partition("\n")
        for hunk in re.split(r"^@@", body.replace("*** End of File\n", ""), flags=re.M)[1:]:
            head, _, changes = hunk.partition("\n")
            if head.strip():
                begin = text.index(head.strip(), begin)
            rows = changes.splitlines(keepends=True)
            old = "".join(row[1:] for row in rows if row[0] in " -")
            new = "".join(row[1:] for row in rows if row[0] in " +")
            at = text.find(old, begin)
            if at < 0:
                raise Refused(f"{old!r} does not occur in {name}")
            text, begin = text[:at] + new + text[at + len(old):], at + len(new)
        self.write_file(target, text)
        if target != name:
            self.path(name).unlink()


def converse(tools, turns):
    """Carries out turns in their order, and returns the last text. A turn whose expectation fails ends it."""
    said, text = "", ""
    for number, turn in enumerate(turns, 1):
        missing = [expected for expected in turn.get("expect", []) if expected not in said]
        if missing:
            raise Refused(f"turn {number} expects {missing[0]!r}, but saw:\n{said}")
        said, text = "\n".join(tools.run(call) for call in turn.get("calls", [])), turn.get("text", "")
    return text

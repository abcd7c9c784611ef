"""Model scripts of tasks: the gold solution, the mutant without one call, and the model that does nothing."""

import json
import tomllib
from pathlib import Path

TASKS = Path(__file__).parent


class Task:
    """One directory of tests/tasks."""

    def __init__(self, directory):
        self.name = directory.name
        self.project = directory / "project"
        self.hidden = directory / "hidden"
        self.instruction = (directory / "instruction.md").read_text()
        about = tomllib.loads((directory / "task.toml").read_text())
        self.language = about["language"]
        # The number of the call that the mutant leaves out, from 1.
        self.drop = about["drop"]
        # Answers of the user to the questions of the agent, in order.
        self.answers = about.get("answers", [])
        self.gold = tomllib.loads((directory / "solution.toml").read_text())

    def scripts(self):
        """The three scripts, by name."""
        return {"gold": self.gold, "nothing": idle(), "mutant": without_call(self.gold, self.drop)}


def tasks(names=()):
    """The tasks with these names, or all."""
    known = sorted(path.parent for path in TASKS.glob("*/solution.toml"))
    unknown = set(names) - {path.name for path in known}
    if unknown:
        raise SystemExit(f"error: there is no task {', '.join(sorted(unknown))} in {TASKS}")
    return [Task(path) for path in known if not names or path.name in names]


def idle():
    return {"turns": [{"text": "There is nothing to do."}]}


def calls(script):
    """The calls of all turns, in the order of the file."""
    return [call for turn in script["turns"] for call in turn.get("calls", [])]


def without_call(script, number):
    """The script without one call, and without expectations, which may name the effect of that call."""
    dropped = calls(script)[number - 1]
    if dropped["tool"] not in ("edit_file", "write_file", "apply_patch", "delete", "execute"):
        raise SystemExit(f"error: call {number} is {dropped['tool']}, which changes nothing")
    turns = []
    for turn in script["turns"]:
        kept = {key: value for key, value in turn.items() if key != "expect"}
        if "calls" in turn:
            kept["calls"] = [call for call in turn["calls"] if call is not dropped]
        if kept.get("calls") or not turn.get("calls"):
            turns.append(kept)
    return {**script, "turns": turns}


def to_toml(script):
    """A script as TOML."""
    turns = [{key: value for key, value in turn.items()} for turn in script["turns"]]
    lines = [f"{key} = {inline(value)}" for key, value in script.items() if key != "turns"]
    for turn in turns:
        lines += ["", "[[turns]]", *(f"{key} = {inline(value)}" for key, value in turn.items())]
    return "\n".join(lines) + "\n"


def inline(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{quote(key)} = {inline(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(inline(item) for item in value) + "]"
    return quote(value) if isinstance(value, str) else json.dumps(value)


def quote(text):
    # JSON escapes what TOML wants escaped, except one character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

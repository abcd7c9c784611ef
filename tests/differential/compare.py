"""Runs one script of tool calls through Python's deepagents and through `pal agent`, and compares byte for byte.

    python3 compare.py PYTHON_WITH_DEEPAGENTS

Compared are the text and the exit code of every result, whether it is an error, and the tree of files at the end: names,
kinds, modes, targets of links, contents. Only the root of the reference is normalised, to the path of the Body.
Differences that are meant to be are in accepted.toml, each with the text that `pal agent` gives and the reason.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tasks"))
sys.dont_write_bytecode = True
from pal import ROOT, Pal

INSIDE = "/workspace/differential"
# Where `pal agent` keeps large results.
ARTIFACTS = "/tmp/palisade-agent"
TREE = r"""
cd "$1" || exit 2
find . -path ./.git -prune -o -mindepth 1 -printf '%y %m %P -> %l\n' | LC_ALL=C sort
find . -path ./.git -prune -o -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum --
"""


def tree(command):
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    return done.stdout.splitlines()


def reference(python):
    """The results and the tree of deepagents."""
    # A root as long as the path in the Body: some results are cut at a number of characters.
    root = tempfile.mkdtemp(dir="/tmp", prefix="x" * (len(INSIDE) - len("/tmp/") - 8))
    try:
        shutil.copytree(HERE / "project", root, symlinks=True, dirs_exist_ok=True)
        # Modes as git would check them out.
        os.umask(0o022)
        for path in [Path(root), *Path(root).rglob("*")]:
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        subprocess.run(["git", "init", "-q"], cwd=root, check=True)
        done = subprocess.run([python, HERE / "reference.py", HERE / "script.toml", root], text=True,
                              capture_output=True, env={**os.environ, "ARTIFACTS": ARTIFACTS})
        if done.returncode != 0:
            raise SystemExit(f"error: deepagents failed:\n{done.stderr[-4000:]}")
        results = {line["call"]: line for line in map(json.loads, done.stdout.splitlines())}
        return results, tree(["sh", "-c", TREE, "tree", root])
    finally:
        shutil.rmtree(root)
        shutil.rmtree(f"{ARTIFACTS}/large_tool_results", ignore_errors=True)


def ours():
    """The results and the tree of `pal agent`."""
    pal = Pal(ROOT / "target" / "differential")
    repository = pal.repository("differential", HERE / "project")
    script = (HERE / "script.toml").read_text()
    pal.clean()
    agent = pal.start("differential", repository, "go", script, ["--no-prepare"])
    if agent.status != "finished":
        raise SystemExit(f"error: the agent has not finished: {agent.explain()}")
    results = {
        call: {"text": text, "exit_code": code, "failed": outcome != "done"}
        for call, (outcome, text, code) in agent.results().items()
    }
    found = tree([pal.binary, "--data", str(pal.place / "data"), "exec", agent.body, "--", "sh", "-c", TREE, "tree", INSIDE])
    pal.run("agent", "rm", agent.id)
    pal.remove(agent.body)
    return results, found


def name_of(call):
    return f"{call['tool']} {json.dumps(call['arguments'], ensure_ascii=False, sort_keys=True)}"


def is_accepted(one, text):
    return text == one["ours"] if "ours" in one else text.startswith(one["ours_begins"])


def show(result):
    if result is None:
        return "no result"
    text = result["text"] if len(result["text"]) < 800 else f"{result['text'][:600]}… {len(result['text'])} characters"
    return f"{'error' if result['failed'] else 'done'} {result['exit_code']} {text!r}"


def main():
    script = tomllib.loads((HERE / "script.toml").read_text())
    accepted = {one["call"]: one for one in tomllib.loads((HERE / "accepted.toml").read_text()).get("accepted", [])}
    calls = {
        f"call_main_{turn}_{number}": name_of(call)
        for turn, one in enumerate(script["turns"], 1)
        for number, call in enumerate(one.get("calls", []), 1)
    }
    (theirs, their_tree), (mine, my_tree) = reference(sys.argv[1]), ours()
    equal, wrong, used = 0, [], set()
    for call, name in calls.items():
        left, right = theirs.get(call), mine.get(call)
        same = left and right and all(left[part] == right[part] for part in ("text", "exit_code", "failed"))
        if same:
            equal += 1
        elif name in accepted and right and is_accepted(accepted[name], right["text"]):
            used.add(name)
        else:
            wrong.append(f"{call} {name}\n  deepagents: {show(left)}\n  pal agent:  {show(right)}")
    stale = [name for name in accepted if name not in used]
    wrong += [f"accepted.toml: {name} is no difference any more, or another one" for name in stale]
    missing, extra = sorted(set(their_tree) - set(my_tree)), sorted(set(my_tree) - set(their_tree))
    wrong += [f"tree: only deepagents has {line}" for line in missing]
    wrong += [f"tree: only pal agent has {line}" for line in extra]

    for difference in wrong:
        print(difference)
    for name in used:
        print(f"accepted: {name}\n  {accepted[name]['reason']}")
    print(f"{equal} of {len(calls)} results equal, {len(used)} accepted differences, {len(calls) - equal - len(used)} others; "
          f"{len(their_tree)} entries and hashes of the tree {'equal' if not missing and not extra else 'differ'} (scripted, no model)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

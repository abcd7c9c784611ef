"""Drives `pal agent` for the suites: repositories, agents with scripted models, their events."""

import json
import os
import shutil
import subprocess
from pathlib import Path

from scripts import to_toml

ROOT = Path(__file__).resolve().parent.parent.parent
# `pal agent run` exits with this code if the agent waits for a person.
WAITS = 3
GIT = ["git", "-c", "user.name=Task", "-c", "user.email=task@example.org", "-c", "init.defaultBranch=main"]


def find_binary():
    """The `pal` of the debug build, or the one that PAL names."""
    if "PAL" in os.environ:
        return os.environ["PAL"]
    built = sorted(ROOT.glob("target/*/debug/pal")) + sorted(ROOT.glob("target/debug/pal"))
    if not built:
        raise SystemExit("error: there is no pal\n  hint: cargo build -p cli")
    return str(built[0])


class Pal:
    """One data directory, one configuration directory, one home."""

    def __init__(self, place, environment=()):
        self.place = Path(place)
        self.binary = find_binary()
        self.home, self.config, self.scripts = (self.place / name for name in ("home", "config", "scripts"))
        for directory in (self.home, self.config, self.scripts):
            directory.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **{name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ},
            "HOME": str(self.home), "PAL_DATA": str(self.place / "data"), "PAL_CONFIG": str(self.config),
            **dict(environment),
        }

    def run(self, *arguments, cwd=None, timeout=300, codes=(0,), config=None):
        """Runs `pal`, and fails with what it said unless it exits with one of the codes."""
        environment = {**self.environment, **({"PAL_CONFIG": str(config)} if config else {})}
        done = subprocess.run([self.binary, *map(str, arguments)], cwd=cwd, timeout=timeout, env=environment, text=True,
                              errors="replace", stdin=subprocess.DEVNULL, capture_output=True)
        if codes is not None and done.returncode not in codes:
            said = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
            raise RuntimeError(f"pal {' '.join(map(str, arguments))[:300]} exits with {done.returncode}:\n{said}")
        return done

    def repository(self, name, project):
        """A git repository with the files of a project; its directory has the name that the Body shows."""
        directory = self.place / "repositories" / name
        target = directory / name.split("@")[0]
        if directory.exists():
            shutil.rmtree(directory)
        if project.exists():
            shutil.copytree(project, target, symlinks=True)
        else:
            target.mkdir(parents=True)
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "--allow-empty", "-m", "Start"]):
            subprocess.run([*GIT, *command], cwd=target, check=True, env=self.environment)
        return target

    def start(self, label, repository, task, script, options=(), timeout=180, config=None):
        """Runs an agent until it waits or has finished."""
        file = self.scripts / f"{label}.toml"
        file.write_text(script if isinstance(script, str) else to_toml(script))
        done = self.run("--json", "agent", "run", "--model", f"script:{file}", *options, "--", task, cwd=repository,
                        timeout=timeout, codes=(0, WAITS), config=config)
        events = [json.loads(line) for line in done.stdout.splitlines()]
        agent = next(event["data"]["spec"]["id"] for event in events if event["type"] == "agent.created")
        return Agent(self, agent, config)

    def remove(self, *bodies):
        self.run("rm", "--force", "--discard", *bodies, codes=None)

    def clean(self):
        """Ends what a failed run left: drivers of agents go on by themselves."""
        for line in self.run("--json", "agent", "ls", codes=None).stdout.splitlines():
            agent = json.loads(line)
            identity = agent.get("id") or agent["spec"]["id"]
            self.run("agent", "stop", identity, codes=None)
            self.run("agent", "rm", identity, codes=None)
        bodies = [json.loads(line)["id"] for line in self.run("--json", "ls", codes=None).stdout.splitlines()]
        if bodies:
            self.remove(*bodies)


class Agent:
    """An agent and its events, with the content of messages that the log keeps elsewhere."""

    def __init__(self, pal, agent, config=None):
        self.pal, self.id, self.config = pal, agent, config
        self.read()

    def read(self):
        said = self.pal.run("agent", "export", self.id, "--as", "events").stdout
        self.events = [json.loads(line) for line in said.splitlines()]

    def of(self, kind):
        return [event["data"] for event in self.events if event["type"] == kind]

    @property
    def body(self):
        return self.of("agent.embodied")[-1]["body"]

    @property
    def status(self):
        """`finished`, or `paused: REASON`."""
        last = [event for event in self.events if event["type"] in ("agent.finished", "agent.paused")][-1]
        return "finished" if last["type"] == "agent.finished" else f"paused: {last['data']['reason']}"

    @property
    def why(self):
        """The newest reason of a pause, in words."""
        return (self.of("agent.paused") or [{"why": ""}])[-1]["why"]

    def results(self):
        """The results of the calls: id to outcome and text."""
        return {
            end["call"]: (end["outcome"], text_of(end["result"]), end.get("exit_code"))
            for end in self.of("call.ended")
        }

    def go_on(self, *arguments, timeout=300):
        """Gives an input of a person, and waits until the agent waits again or has finished."""
        self.pal.run("agent", *arguments, config=self.config)
        self.pal.run("--json", "agent", "attach", self.id, codes=(0, WAITS), timeout=timeout)
        self.read()

    def finish(self, answers=()):
        """Answers the questions of the agent in their order."""
        for answer in answers:
            if self.status == "paused: question":
                self.go_on("answer", self.id, answer)

    def explain(self):
        """What a person wants to see of an agent that did not do what it should."""
        failed = [f"  {call}: {outcome}: {text[:500]}" for call, (outcome, text, _) in self.results().items()
                  if outcome != "done"]
        models = [f"  model: {failure['why'][:1500]}" for failure in self.of("model.failed")]
        return "\n".join([f"{self.status} {self.why}", *failed, *models])


def text_of(message):
    """The text of the blocks of a stored message."""
    blocks = message.get("blocks") or []
    blocks = blocks if isinstance(blocks, list) else [blocks]
    return "\n".join(block.get("text", json.dumps(block)) if isinstance(block, dict) else str(block) for block in blocks)

"""Agents in a Body with placeholder keys: each asks its model once. The models' API is a stand-in under the real names, which
must receive the real keys; the Body must hold none.
"""

import json
import os
import secrets
import subprocess

from leaks import found_in

ADDRESS = "11.0.0.6"
NAMES = ["api.anthropic.com", "api.openai.com", "generativelanguage.googleapis.com"]
HERE = "/mnt/agents"
ASK = "Which word is it? Answer with one sentence and use no tools."
BIN = f"{HERE}/node_modules/.bin"
# Agent, command, service of its key, header that must have the key.
AGENTS = [
    ("Claude Code", f"{BIN}/claude -p '{ASK}'", "anthropic", "x-api-key"),
    ("Codex", f"{BIN}/codex exec --skip-git-repo-check --sandbox danger-full-access '{ASK}'", "openai", "authorization"),
    ("Gemini CLI", f"{BIN}/gemini --skip-trust --model gemini-2.5-flash -p '{ASK}'", "gemini", "x-goog-api-key"),
    ("opencode, Anthropic", f"{BIN}/opencode run --model anthropic/claude-sonnet-4-5 '{ASK}'", "anthropic", "x-api-key"),
    ("opencode, OpenAI", f"{BIN}/opencode run --model openai/gpt-4o '{ASK}'", "openai", "authorization"),
    ("aider, OpenAI", f"{HERE}/python/bin/python -m aider --model openai/gpt-4o --no-check-update --no-analytics --no-git --yes-always --no-show-model-warnings --message '{ASK}'", "openai", "authorization"),
    ("aider, Anthropic", f"{HERE}/python/bin/python -m aider --model anthropic/claude-sonnet-4-5 --no-check-update --no-analytics --no-git --yes-always --no-show-model-warnings --message '{ASK}'", "anthropic", "x-api-key"),
]


class ModelServer:
    """The stand-in, in the servers' namespace."""

    def __init__(self, enter, home, key, certificate):
        self.log = os.path.join(home, "models.jsonl")
        open(self.log, "w").close()
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "model_api.js")
        self.process = subprocess.Popen([*enter, "node", program, key, certificate, self.log, ADDRESS], stdout=subprocess.PIPE)
        assert self.process.stdout.readline() == b"ready\n"

    def take(self):
        with open(self.log) as file:
            seen = [json.loads(line) for line in file]
        open(self.log, "w").close()
        return seen

    def stop(self):
        self.process.kill()
        self.process.wait()


def agent_cases(pal, enter, home, key, certificate, show, tools, body, inside, expect):
    server = ModelServer(enter, home, key, certificate)
    values = {service: f"{service}-{secrets.token_urlsafe(48)}" for service in ("anthropic", "openai", "gemini")}
    try:
        for service, value in values.items():
            pal("secret", "set", service, "--for", service, input=value)
        options = [word for service in values for word in ("--secret", service)]
        name = body("--net", "models", *show(f"{tools}/agents", "/agents"), "--memory", "4GiB", "--pids", "4096", *options)
        for agent, command, service, header in AGENTS:
            setup = "mkdir -p /tmp/work && cd /tmp/work && export HOME=/tmp/home && mkdir -p $HOME && "
            text, code, took = inside(name, setup + f"timeout 90 {command} < /dev/null", timeout=120)
            seen = server.take()
            sent = [one["headers"].get(header, "") for one in seen if one["method"] == "POST"]
            print(f"    {agent}: {took:.1f} s, {sorted({one['method'] + ' ' + one['url'].split('?')[0] + ' ' + one['httpVersion'] for one in seen})}")
            expect(f"{agent} has its answer", code == 0 and "BANANA" in text, (text[-3000:], code))
            expect(f"{agent}: the API has the real key", sent and all(values[service] in one for one in sent), sent)
            expect(f"{agent}: no placeholder in a header arrives", not any("palph0" in value for one in seen for value in map(str, one["headers"].values())), seen)
        # The Body has placeholders, and nothing of the keys.
        text, _, _ = inside(name, "env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; find / -xdev -type f -not -path '/usr/*' -not -path '/mnt/*' -not -path '/proc/*' -not -path '/sys/*' -size -50M -print0 2>/dev/null | xargs -0 cat 2>/dev/null | tr -cd '\\11\\12\\40-\\176'", timeout=120)
        marks = {f"key of {service}": value for service, value in values.items()}
        expect("no file or variable of the Body has a key", not found_in(text.encode(), marks), found_in(text.encode(), marks))
        expect("the Body has placeholders", text.count("palph0") >= 3, text.count("palph0"))
        denied = [json.loads(line)["data"]["to"] for line in pal("events", "--body", name, "--json").stdout.splitlines() if "network.denied" in line]
        print(f"    also asked for, and denied: {sorted(set(denied))}")
        pal("rm", "--force", name)
    finally:
        server.stop()

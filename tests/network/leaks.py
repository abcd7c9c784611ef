"""A search for secrets: after Bodies have used keys in every way, no form of a key may be in anything that a Body can read or
that `pal` writes.

The same search must find a canary that was planted at each kind of place, and the placeholders; the receiving server must
have had the real values.
"""

import base64
import json
import os
import re
import secrets
import subprocess
import time
import urllib.request

CLEAN = "unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; "
API = "https://api.inspected.test"
# Part of a form that counts as found: a cut value is a leak, too.
PART = 24


def forms(value):
    """A value as it is, and in base64 of both alphabets at every alignment, hexadecimal, percent-encoded and escaped for JSON."""
    raw = value.encode()
    told = [raw, raw.hex().encode(), raw.hex().upper().encode()]
    for mark, width in (("%", 2), ("\\u", 4)):
        told.append("".join(f"{mark}{byte:0{width}x}" for byte in raw).encode())
        told.append("".join(f"{mark}{byte:0{width}X}" for byte in raw).encode())
    for front in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            text = encode(b"\0" * front + raw)
            told.append(text[(8 * front + 5) // 6 : 8 * (front + len(raw)) // 6])
    return told


def needles(marks):
    """Parts of all forms of each value, with the name of the value."""
    found = {}
    for name, value in marks.items():
        for form in forms(value):
            middle = (len(form) - PART) // 2
            for at in (0, middle, len(form) - PART):
                found[form[at : at + PART]] = name
    return found


def found_in(data, marks):
    """The names of the values of which a form is in some bytes."""
    return {name for needle, name in needles(marks).items() if needle in data}


class Search:
    """A search of files and streams for some values."""

    def __init__(self, home, marks):
        self.needles = needles(marks)
        self.list = os.path.join(home, "needles")
        with open(self.list, "wb") as file:
            file.write(b"\n".join(self.needles) + b"\n")

    def run(self, words, **options):
        # Records end at NUL bytes, which memory has many of.
        done = subprocess.run(["grep", "-zaoF", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={"LC_ALL": "C", "PATH": os.environ["PATH"]}, **options)
        return done.stdout

    def text(self, data):
        """The names of the values in some bytes."""
        data = data.encode() if isinstance(data, str) else data
        return {self.needles[match] for match in self.run(["-hf", self.list], input=data).split(b"\0") if match}

    def tree(self, place, skipped=()):
        """The names of the values in the files below a directory, each with the files."""
        words = [f"--exclude-dir={name}" for name in skipped]
        out = self.run(["-rHZf", self.list, "-D", "skip", *words, place]).split(b"\0")
        found = {}
        for path, match in zip(out[::2], out[1::2]):
            found.setdefault(self.needles[match], set()).add(path.decode(errors="replace"))
        return found

    def memory(self, pid):
        """The names of the values in the memory that a process can read."""
        found = set()
        try:
            with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as mem:
                pieces = []
                for line in maps:
                    span, access, _, _, _, *path = line.split(maxsplit=5)
                    if access[0] != "r" or (path and path[0].startswith(("[vvar", "[vsyscall"))):
                        continue
                    # Programs of the host, which nobody has changed.
                    if path and "w" not in access and path[0].startswith("/usr/"):
                        continue
                    start, end = (int(word, 16) for word in span.split("-"))
                    pieces.append((start, end))
                for start, end in pieces:
                    while start < end:
                        try:
                            mem.seek(start)
                            data = mem.read(min(end - start, 64 << 20))
                        except (OSError, OverflowError):
                            break
                        if not data:
                            break
                        found |= self.text(data)
                        start += len(data)
        except (FileNotFoundError, ProcessLookupError):
            pass
        return found


def processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def of_process(pid, name):
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def namespace(pid, kind="pid"):
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def serve(pal, body):
    """What `pal serve` says about Bodies, secrets, events and itself."""
    command = [*pal.drop, pal.program, "--data", pal.data, "serve", "--json", "--listen", "127.0.0.1:0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=pal.env, cwd="/")
    told = [server.stdout.readline()]
    url = json.loads(told[0])["url"]
    with open(os.path.join(pal.data, "serve.key")) as file:
        key = file.read().strip()
    for path in ("/v1/bodies", f"/v1/bodies/{body}", f"/v1/bodies/{body}/network", "/v1/secrets", f"/v1/events?body={body}", "/metrics", "/openapi.json"):
        asked = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(asked, timeout=20) as answer:
            told.append(answer.read())
    server.terminate()
    out, err = server.communicate(timeout=30)
    return b"\n".join([*told, out, err])


def leak_cases(pal, home, server, body, inside, expect, layer):
    values = {source: secrets.token_urlsafe(64) for source in ("stdin", "file", "env", "command")}
    canary = secrets.token_urlsafe(64)
    for source in ("file", "command"):
        place = os.path.join(home, f"value-{source}")
        with open(place, "w") as file:
            file.write(values[source])
        os.chown(place, os.stat(pal.data).st_uid, -1)
        os.chmod(place, 0o400)
    told = []

    def say(*words, **options):
        done = pal(*words, **options)
        told.append(done.stdout + done.stderr)
        return done

    places = ["--to", "api.inspected.test", "--header", "authorization", "--basic", "--query", "--body"]
    pal.env["PLANTED_VALUE"] = values["env"]
    say("secret", "set", "stdin", *places, "--to", "git.inspected.test", "--git", "--env", "KEY_STDIN", input=values["stdin"])
    say("secret", "set", "file", *places, "--env", "KEY_FILE", "--file", f"{home}/value-file")
    say("secret", "set", "env", *places, "--env", "KEY_ENV", "--from-env", "PLANTED_VALUE")
    say("secret", "set", "command", *places, "--env", "KEY_COMMAND", "--", "cat", f"{home}/value-command")
    name = body("--allow", "free.inspected.test", *(word for source in values for word in ("--secret", source)))
    placeholders = {f"placeholder {source}": inside(name, f"printenv KEY_{source.upper()}")[0].strip() for source in values}
    search = Search(home, {**values, **placeholders, "canary": canary})
    expect("each secret has a placeholder of its own", len({*placeholders.values()}) == 4 and all("palph0" in one for one in placeholders.values()), placeholders)

    # Every way to use a key; the server sends everything back, in all forms.
    curl = "curl -sSi --max-time 20 "
    received = []
    for source, value in values.items():
        key = f"$KEY_{source.upper()}"
        for line in (
            f'-H "Authorization: Bearer {key}" {API}/forms',
            f'--http1.1 -H "Authorization: Bearer {key}" {API}/forms',
            f'-u "me:{key}" {API}/basic',
            f'-d "{{\\"key\\": \\"{key}\\"}}" {API}/body',
            f'"{API}/query?key={key}"',
            # Refused: the reason must not repeat it.
            f'-A "{key}" {API}/agent',
            f'"{API}/{key}"',
            # A header to a host without the secret, and one over plain HTTP.
            f'-H "Authorization: Bearer {key}" https://free.inspected.test/',
            f'-H "Authorization: Bearer {key}" http://api.inspected.test/',
        ):
            text, _, _ = inside(name, CLEAN + curl + line)
            told.append(text)
    text, _, _ = inside(name, CLEAN + "GIT_TRACE_CURL=1 GIT_TRACE=1 GIT_TERMINAL_PROMPT=0 timeout 30 git ls-remote https://git.inspected.test/auth/repo.git")
    told.append(text)
    for one in server.take():
        received.append(json.dumps(one))
    for source, value in values.items():
        mine = [one for one in received if value in one]
        basic = base64.b64encode(f"me:{value}".encode()).decode()
        expect(f"the server has the value from {source}", len(mine) == 4 and any(basic in one for one in received), (len(mine), len(received)))
    git = base64.b64encode(f"x-access-token:{values['stdin']}".encode()).decode()
    expect("the server has the token from git", any(git in one for one in received))

    # Processes that stay, one of which has used a key and holds the answer; a canary in variables, files and memory.
    program = "import os, time, urllib.request as u; held = u.urlopen(u.Request('%s/forms', headers={'Authorization': 'Bearer ' + os.environ['KEY_FILE']}), timeout=20).read(); print('held', flush=True); time.sleep(1000)" % API
    line = CLEAN + f"echo {canary} > /tmp/canary; export CANARY={canary}; exec python3 -c \"{program}\""
    held = subprocess.Popen([*pal.drop, pal.program, "--data", pal.data, "exec", name, "--", "bash", "-c", line], env={**pal.env, "PLANTED_VALUE": ""}, cwd="/", stdout=subprocess.PIPE)
    told.append(held.stdout.readline())
    expect("a process holds an answer", told[-1] == b"held\n", told[-1])
    text, _, _ = inside(name, f"mkdir -p /tmp/core && cd /tmp/core && ulimit -c unlimited && CANARY={canary} python3 -c 'import os; os.abort()'; ls -s /tmp/core")
    told.append(text)
    # A crash writes no core dump, unless a later version lets a Body ask for one; then the search of files has it.
    expect("no core dump", "cannot modify limit" in text and "core." not in text, text)
    fork = say("fork", name).stdout.split()[0]
    del pal.env["PLANTED_VALUE"]
    snapshot = say("snapshot", name, check=False)
    expect("a snapshot", snapshot.returncode == 0, snapshot)
    say("net", "test", name, f"{canary[:40].lower().replace('_', '-').strip('-')}.test", check=False)

    began = time.monotonic()
    inner = namespace_of(pal, name)
    body_pids = [pid for pid in processes() if inner and namespace(pid) == inner and inner != namespace(os.getpid())]
    if layer == "microvm":
        body_pids = [pid for pid in processes() if of_process(pid, "comm").startswith(b"qemu")]
    found = set()
    for pid in body_pids:
        found |= search.memory(pid)
    expect("memory of the Body: the canary and placeholders", {"canary", *placeholders} <= found, (found, body_pids))
    expect("memory of the Body: no value", not found & {*values}, found)
    for kind in ("environ", "cmdline"):
        everything = b"".join(of_process(pid, kind) for pid in processes() if pid != os.getpid())
        found = search.text(everything)
        expect(f"{kind} of all processes: the canary", "canary" in found or layer == "microvm", found)
        expect(f"{kind} of all processes: no value", not found & {*values}, found)
    # The supervisor and each `pal` that waits; `pal-egress` alone holds the values.
    egress = set()
    for pid in processes():
        comm = of_process(pid, "comm").strip().decode(errors="replace")
        if comm.startswith("pal") and namespace(pid, "net") == namespace(os.getpid(), "net"):
            found = search.memory(pid)
            if comm == "pal-egress":
                egress |= found
            else:
                expect(f"memory of {comm}: no value", not found & {*values}, found)
    expect("memory of pal-egress: the values, so the search finds what is there", {*values} <= egress, egress)
    if layer != "microvm" and body_pids:
        found = search.tree(f"/proc/{body_pids[-1]}/root", ["proc", "sys", "usr", "dev"])
        expect("files of the Body: the canary", "canary" in found, found)
        expect("files of the Body: no value", not {*found} & {*values}, found)
    found = search.tree(pal.data)
    expect("the data directory: the canary", "canary" in found, found)
    expect("the data directory: no value", not {*found} & {*values}, found)

    # What `pal` and the server say.
    for words in (["events", "--json"], ["events"], ["logs", name], ["inspect", name, "--json"], ["inspect", name], ["net", "show", name, "--json"], ["secret", "ls", "--json"], ["secret", "ls"], ["ls", "--json"], ["snapshot", "ls", "--json"], ["doctor"]):
        say(*words, check=False)
    told.append(serve(pal, name))
    found = search.text(b"\n".join(one.encode() if isinstance(one, str) else one for one in told))
    expect("all output: the canary and placeholders", {"canary", *placeholders} <= found, found)
    expect("all output: no value", not found & {*values}, found)
    print(f"    searched in {time.monotonic() - began:.1f} s: {len(body_pids)} processes of the Body")
    held.kill()
    held.wait()
    for one in (name, fork):
        say("rm", "--force", one)
    for one in json_lines(pal("snapshot", "ls", "--json").stdout):
        say("snapshot", "rm", one["id"], check=False)
    for source in values:
        say("secret", "rm", source)
    found = search.tree(pal.data)
    expect("after `pal rm` and `pal secret rm`: no value", not {*found} & {*values}, found)


def json_lines(text):
    return [json.loads(line) for line in text.splitlines()]


def namespace_of(pal, name):
    return pal("exec", name, "--", "readlink", "/proc/self/ns/pid").stdout.strip()

"""git over ssh with a key that the Body never sees: real sshd servers, and the ways around the agent that must fail."""

import base64
import json
import os
import socket
import struct
import subprocess
import threading
import time

from inspection import leaks

# Two hosts with one list of keys: only the first one is a host of the secret.
HOSTS = {"git.ssh.test": "11.0.0.7", "other.ssh.test": "11.0.0.8"}
GIT, OTHER = HOSTS
AGENT = "/run/palisade/egress.sock"
# Asks an agent: messages in hexadecimal, one reply for each line.
ASK = """
import socket, struct, sys
agent = socket.socket(socket.AF_UNIX)
agent.settimeout(20)
agent.connect(sys.argv[1])
for line in sys.argv[2:]:
    message = bytes.fromhex(line)
    agent.sendall(struct.pack('>I', len(message)) + message)
    reply = b''
    while len(reply) < 4 or len(reply) < 4 + struct.unpack('>I', reply[:4])[0]:
        piece = agent.recv(65536)
        if not piece: raise SystemExit('closed')
        reply += piece
    print('reply', reply[4])
"""


def string(data):
    return struct.pack(">I", len(data)) + data


class SshServers:
    """A user `git` with a repository, on two hosts."""

    def __init__(self, enter, home):
        self.root = os.path.join(home, "ssh")
        self.enter, self.running = enter, []
        os.makedirs(self.root)
        with open("/etc/passwd", "a") as users:
            users.write(f"git:x:1234:1234::{self.root}:/bin/sh\n")
        with open("/etc/shadow", "a") as shadow:
            shadow.write("git:*:1::::::\n")
        for name in ("key", "git_host", "other_host"):
            self.make_key(name)
        self.public = self.read("key.pub").split()[1]
        with open(f"{self.root}/authorized", "w") as file:
            file.write(f"restrict,command=\"cd {self.root} && GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0=* git-shell -c \\\"$SSH_ORIGINAL_COMMAND\\\"\" {self.read('key.pub')}")
        repository, work = f"{self.root}/repo.git", f"{self.root}/work"
        for words in (
            ["git", "init", "-q", "--bare", "-b", "main", repository],
            ["git", "init", "-q", "-b", "main", work],
            ["git", "-C", work, "-c", "user.name=w", "-c", "user.email=w@w", "commit", "-q", "--allow-empty", "-m", "first"],
            ["git", "-C", work, "push", "-q", repository, "main"],
            ["chown", "-R", "1234:1234", repository],
        ):
            subprocess.run(words, check=True)
        os.makedirs("/run/sshd", exist_ok=True)
        for (name, address), key in zip(HOSTS.items(), ("git_host", "other_host")):
            with open(f"{self.root}/{name}.conf", "w") as file:
                file.write(
                    f"ListenAddress {address}\nHostKey {self.root}/{key}\nAuthorizedKeysFile {self.root}/authorized\nPidFile none\n"
                    "StrictModes no\nUsePAM no\nPermitRootLogin yes\n"
                )
            log = open(f"{self.root}/{name}.log", "w")
            self.running.append(subprocess.Popen([*enter, "/usr/sbin/sshd", "-D", "-e", "-f", f"{self.root}/{name}.conf"], stderr=log))
        time.sleep(0.5)

    def make_key(self, name):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{self.root}/{name}"], check=True)

    def read(self, name):
        with open(f"{self.root}/{name}") as file:
            return file.read()

    def known(self, host, key):
        return f"{host} {' '.join(self.read(f'{key}.pub').split()[:2])}"

    def branches(self):
        return subprocess.run(["git", "-C", f"{self.root}/repo.git", "-c", "safe.directory=*", "branch", "--list"], capture_output=True, text=True, check=True).stdout

    def values(self):
        """The key's secret half, and the lines of its file."""
        lines = self.read("key").splitlines()[1:-1]
        seed = base64.b64decode("".join(lines)).split(b"\0\0\0\x40")[1][:32]
        return [seed, *lines[1:]]

    def foreign_session(self):
        """What another machine's ssh asks of its agent: the session, and then the login."""
        path, asked = f"{self.root}/fake.sock", []
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()

        def serve():
            stream, _ = listener.accept()
            while head := stream.recv(4, socket.MSG_WAITALL):
                message = stream.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL)
                asked.append(message)
                identities = b"\x0c" + struct.pack(">I", 1) + string(base64.b64decode(self.public)) + string(b"")
                stream.sendall(string({11: identities, 27: b"\x06"}.get(message[0], b"\x05")))

        threading.Thread(target=serve, daemon=True).start()
        line = ["ssh", "-F", "none", "-o", f"IdentityAgent={path}", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
        subprocess.run([*line, f"git@{HOSTS[GIT]}", "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
        listener.close()
        return [next(message for message in asked if message[0] == kind).hex() for kind in (27, 13)]

    def stop(self):
        for process in self.running:
            process.kill()
            process.wait()


def ssh_cases(pal, servers, body, inside, expect, kill_egress):
    key = servers.read("key")
    set_key = ["secret", "set", "deploy", "--ssh", "--to", GIT]
    refused = pal(*set_key, check=False, input=key)
    expect("a host whose key nobody knows", refused.returncode != 0 and "--host-key" in refused.stderr, refused)
    known = os.path.join(pal.env["HOME"], ".ssh")
    os.makedirs(known, exist_ok=True)
    with open(f"{known}/known_hosts", "w") as file:
        file.write(servers.known(GIT, "git_host") + "\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", f"{known}/known_hosts"], check=True, capture_output=True)
    subprocess.run(["chmod", "-R", "a+rX", known], check=True)
    pal(*set_key, input=key)
    holder = body("--secret", "deploy", "--allow", f"{OTHER}:22")
    shown = pal("net", "show", holder).stdout
    expect("a rule for the host", f"{GIT}:22+tcp" in shown, shown)

    clean = "unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; cd /tmp; "
    commit = "git -c user.name=w -c user.email=w@w commit -q --allow-empty -m pushed"

    def push(branch, user="git", host=GIT, ssh=""):
        return f"{clean} {ssh} rm -rf g; timeout 40 git clone -q {user}@{host}:repo.git g && cd g && {commit} && git push -q origin HEAD:{branch} && echo done"

    def login(host=GIT, user="git", options=""):
        return f"{clean} timeout 40 ssh -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR {options} {user}@{host} \"git-upload-pack 'repo.git'\" </dev/null | head -c 300 | tr '\\0' ' '"

    # git clones and pushes, and nobody is asked about the host.
    text, code, _ = inside(holder, push("one"), timeout=90)
    expect("git over ssh with a secret", "done" in text and "one" in servers.branches(), (text, code))
    text, code, _ = inside(holder, login())
    expect("plain ssh with a secret", "refs/heads/main" in text, (text, code))
    text, _, _ = inside(holder, "ssh-add -l")
    expect("the key is listed by the secret's name", "deploy (ED25519)" in text, text)
    # An ordinary user's Body has one user id.
    if not pal.drop:
        done = pal("exec", "--user", "nobody", holder, "--", "ssh-add", "-l", check=False)
        expect("another user of the Body, too", "deploy (ED25519)" in done.stdout, done)
    used = [json.loads(line)["data"] for line in pal("events", "--body", holder, "--json").stdout.splitlines() if "network.allowed" in line]
    used = [one for one in used if one["why"] == "the secret deploy logs in as git"]
    expect("each signature is in the log", len(used) == 3 and {one["to"] for one in used} == {f"{GIT}:22"}, used)

    # The same key opens these, and the agent does not.
    text, code, _ = inside(holder, login(user="root"))
    expect("another user of the host", "refs/" not in text and "Permission denied" in text, (text, code))
    text, code, _ = inside(holder, login(host=OTHER))
    expect("another host that is allowed", "refs/" not in text and "Permission denied" in text, (text, code))
    pal("secret", "set", "wide", "--ssh", "--ssh-user", "root", "--ssh-user", "git", "--to", GIT, "--to", OTHER, "--host-key", servers.known(OTHER, "other_host"), input=key)
    wide = body("--secret", "wide")
    for what, line in [("another user", login(user="root")), ("another host", login(host=OTHER))]:
        text, code, _ = inside(wide, line)
        expect(f"{what}, where the secret names it", "refs/heads/main" in text, (text, code))
    text, code, _ = inside(wide, push("two", host=OTHER), timeout=90)
    expect("git at a second host of a secret", "done" in text and "two" in servers.branches(), (text, code))
    pal("secret", "set", "wrong", "--ssh", "--to", GIT, "--host-key", servers.known(GIT, "other_host"), input=key)
    wrong = body("--secret", "wrong")
    text, code, _ = inside(wrong, push("never"), timeout=90)
    expect("a host that shows another key, and git", "done" not in text and "verification failed" in text, (text, code))
    text, code, _ = inside(wrong, login())
    expect("a host that shows another key, and a program that accepts it", "refs/" not in text and "Permission denied" in text, (text, code))

    # A session of another machine, any text, and any other message, at the agent itself; a real agent signs all of them.
    session, sign = servers.foreign_session()
    any_text = (b"\x0d" + string(base64.b64decode(servers.public)) + string(b"any text") + bytes(4)).hex()
    bound = bytes.fromhex(sign)[5 + len(base64.b64decode(servers.public)):]
    real = subprocess.run(["ssh-agent", "-a", f"{servers.root}/real.sock"], capture_output=True, text=True, check=True).stdout
    real_pid = real.split("SSH_AGENT_PID=")[1].split(";")[0]
    subprocess.run(["ssh-add", "-q", f"{servers.root}/key"], env={**os.environ, "SSH_AUTH_SOCK": f"{servers.root}/real.sock"}, check=True)
    for what, messages, by_a_real_one, by_ours in [
        ("a session of another machine", [session, sign], ["6", "14"], ["6", "5"]),
        ("a login without a session", [sign], ["14"], ["5"]),
        ("any text", [any_text], ["14"], ["5"]),
        ("removal of all keys", ["13"], ["6"], ["5"]),
    ]:
        signed = subprocess.run(["python3", "-c", ASK, f"{servers.root}/real.sock", *messages], capture_output=True, text=True).stdout
        expect(f"{what}: a real agent does it", [line.split()[1] for line in signed.splitlines()] == by_a_real_one, signed)
        text, _, _ = inside(holder, f"python3 - {AGENT} {' '.join(messages)} <<'P'\n{ASK}\nP")
        expect(f"{what}: ours does not", [line.split()[1] for line in text.splitlines() if "reply" in line] == by_ours, text)
    subprocess.run(["kill", real_pid], check=True)
    expect("the session was one of git", b"ssh-connection" in bound and b"git" in bound, bound)
    text, _, _ = inside(holder, f"head -c 100000 /dev/zero | tr '\\0' '\\377' | (printf '\\0'; cat) | timeout 9 python3 -c 'import socket,sys; s=socket.socket(1); s.connect(\"{AGENT}\"); s.sendall(sys.stdin.buffer.read()); print(len(s.recv(9)))'")
    text, code, _ = inside(holder, login())
    expect("after a message that is too long", "refs/heads/main" in text, (text, code))

    # Bodies without the secret have a network and no key.
    bare = body("--allow", f"{GIT}:22")
    text, code, _ = inside(bare, f"export SSH_AUTH_SOCK={AGENT}; ssh-add -l; " + login())
    expect("a Body without the secret", "no identities" in text and "refs/" not in text, (text, code))
    pal("secret", "revoke", holder, "deploy")
    text, code, _ = inside(holder, f"export SSH_AUTH_SOCK={AGENT}; " + login())
    expect("a revoked secret", "refs/" not in text, (text, code))
    pal("secret", "grant", holder, "deploy")
    text, code, _ = inside(holder, push("three"), timeout=90)
    expect("a secret that is granted again", "done" in text and "three" in servers.branches(), (text, code))
    kill_egress(pal)
    text, code, _ = inside(holder, push("four"), timeout=90)
    expect("after a kill of pal-egress", "done" in text and "four" in servers.branches(), (text, code))
    fork = pal("fork", holder).stdout.split()[0]
    text, code, _ = inside(fork, push("five"), timeout=90)
    expect("a fork", "done" in text and "five" in servers.branches(), (text, code))

    # The key is nowhere.
    values = servers.values()
    expect("the scan finds the key in its file", leaks(servers.read("key").encode(), values) and leaks(base64.b64decode("".join(key.splitlines()[1:-1])), values[:1]))
    words = (["events", "--json"], ["logs", holder], ["inspect", holder, "--json"], ["net", "show", holder, "--json"], ["secret", "ls", "--json"])
    told = "".join(pal(*line, check=False).stdout for line in words)
    expect("no output of pal has the key", not leaks(told.encode(), values) and "deploy" in told)
    found = []
    for place, _, names in os.walk(pal.data):
        for name in names:
            path = os.path.join(place, name)
            if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) < 64 << 20:
                with open(path, "rb") as file:
                    if leaks(file.read(), values):
                        found.append(path)
    expect("no file of the data directory has the key", found == [], found)
    line = values[1]
    inside(holder, f"echo {line} > /tmp/planted")
    text, _, _ = inside(holder, f"grep -rlsF {line} / --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr; cat /proc/[0-9]*/environ | tr '\\0' '\\n'", timeout=120)
    expect("no file and no variable of the Body has the key", text.splitlines()[0] == "/tmp/planted" and text.count("/tmp/planted") == 1 and not leaks(text.encode(), values) and "SSH_AUTH_SOCK=" in text, text[-500:])
    for name in (holder, wide, wrong, bare, fork):
        pal("rm", "--force", name)
    for name in ("deploy", "wide", "wrong"):
        pal("secret", "rm", name)

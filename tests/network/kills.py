"""Kills under load: the egress process, its supervisor and every `pal` are killed at random times while a Body connects.

What the servers saw is compared with the log afterwards: every byte that arrived has a decision, nothing arrived that the
policy denies at that moment, and the log is whole.
"""

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time

CLONE_NEWNET = 0x40000000
# One Body, one order of kills. The supervisor starts a killed egress process again after a pause that doubles.
KILLS_OF_ROUND = ["pal-egress", "pal", "pal-egress", "pal-supervisor", "pal-egress"]
WORKERS = 4
NAMES_OF_WORKER = 400

# Every name is tried once, so that each connection has a decision of its own.
LOAD = r"""
import socket, sys, threading, time
def ask(host, name):
    try:
        with socket.create_connection((host, 80), timeout=2) as stream:
            stream.settimeout(2)
            stream.sendall(b"GET / HTTP/1.1\r\nHost: " + name.encode() + b"\r\nConnection: close\r\n\r\n")
            while stream.recv(4096):
                pass
    except OSError:
        pass
def work(worker):
    for number in range(%d):
        ask(f"n{worker}-{number}.load.test", f"n{worker}-{number}.load.test")
        ask("flip.test", "flip.test")
        ask(f"n{worker}-{number}.shut.test", f"n{worker}-{number}.shut.test")
        ask(f"n{worker}-{number}.load.test", "stolen.shut.test")
        ask(sys.argv[1], "address.shut.test")
for worker in range(%d):
    threading.Thread(target=work, args=(worker,)).start()
""" % (NAMES_OF_WORKER, WORKERS)


def name_hosts(server):
    """The lines of /etc/hosts for the names of the load."""
    names = [f"n{worker}-{number}" for worker in range(WORKERS) for number in range(NAMES_OF_WORKER)]
    lines = [f"{server} {name}.{zone}.test\n" for name in names for zone in ("load", "shut")]
    return [*lines, f"{server} flip.test\n"]


class ArrivalLog:
    """The host names of the requests that reached a server, with their times."""

    def __init__(self, process, address):
        """Listens in the network namespace of a process."""
        self.arrived, self.address = [], address
        threading.Thread(target=self.serve, args=(process,), daemon=True).start()

    def serve(self, process):
        # A socket belongs to the namespace of the thread that makes it.
        with open(f"/proc/{process}/ns/net") as there:
            if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
                raise OSError("cannot enter the servers' namespace")
        listener = socket.create_server((self.address, 80), backlog=512)
        while True:
            stream, _ = listener.accept()
            threading.Thread(target=self.answer, args=(stream,), daemon=True).start()

    def answer(self, stream):
        with stream:
            stream.settimeout(5)
            data = b""
            try:
                while b"\r\n\r\n" not in data:
                    piece = stream.recv(4096)
                    if not piece:
                        break
                    data += piece
            except OSError:
                pass
            if data:
                hosts = [line[5:].strip().decode() for line in data.split(b"\r\n") if line.lower().startswith(b"host:")]
                self.arrived.append((time.monotonic(), hosts[0] if len(hosts) == 1 else repr(data)))
            try:
                stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
            except OSError:
                pass


def of_this_world(name):
    """The processes with this name in this network namespace."""
    here = os.readlink("/proc/self/ns/net")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if open(f"/proc/{pid}/comm").read().strip() == name and os.readlink(f"/proc/{pid}/ns/net") == here:
                yield int(pid)
        except OSError:
            pass


def kill_all(name):
    killed = 0
    for pid in of_this_world(name):
        try:
            os.kill(pid, signal.SIGKILL)
            killed += 1
        except ProcessLookupError:
            pass
    return killed


def kill_cases(pal, arrivals, count, layer, expect):
    """`arrivals` is the log of the server of all names. `KILL_SEED` repeats a run."""
    seed, rounds = int(os.environ.get("KILL_SEED") or random.randrange(1 << 32)), count // len(KILLS_OF_ROUND)
    with open("/etc/hosts", "a") as file:
        file.writelines(name_hosts(arrivals.address))
    print(f"kills: {rounds * len(KILLS_OF_ROUND)} with seed {seed}")
    rng = random.Random(seed)
    killed = {"pal-egress": 0, "pal": 0, "pal-supervisor": 0}
    for number in range(rounds):
        kill_round(pal, arrivals, rng, layer, killed, lambda what, right, seen="": expect(f"round {number} of seed {seed}: {what}", right, seen))
    expect("each kind of process was killed", all(killed.values()), killed)
    expect("the log is whole", pal("events", "verify", check=False).returncode == 0)
    print(f"kills: {killed}")


def kill_round(pal, arrivals, rng, layer, killed, expect):
    arrivals.arrived = []
    name = pal("create", "--layer", layer, "--allow", "*.load.test:80", "--allow", "flip.test:80").stdout.strip()
    pal("exec", name, "--", "bash", "-c", f"cat > /tmp/load.py <<'EOF'\n{LOAD}\nEOF\nunset http_proxy; setsid python3 /tmp/load.py {arrivals.address} >/dev/null 2>&1 </dev/null &")
    deadline = time.monotonic() + 20
    while not arrivals.arrived and time.monotonic() < deadline:
        time.sleep(0.02)
    expect("the load reaches the server", bool(arrivals.arrived))
    # While flip.test is denied, it must not arrive: from the end of `pal net deny` to the start of the next `pal net allow`.
    shut, kinds = [], rng.sample(KILLS_OF_ROUND, len(KILLS_OF_ROUND))
    for kind in kinds:
        time.sleep(rng.uniform(0, 0.25))
        if kind == "pal":
            # A change of the policy that is killed at a random moment is either made or not.
            change = subprocess.Popen(
                [*pal.words(), "net", rng.choice(["allow", "deny"]), name, "other.test:80"],
                env=pal.env, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            time.sleep(rng.uniform(0, 0.06))
            change.kill()
            killed[kind] += 1
            change.wait()
        else:
            killed[kind] += kill_all(kind)
        done = pal("net", "deny", name, "flip.test:80", check=False)
        began = time.monotonic()
        time.sleep(rng.uniform(0.05, 0.15))
        if done.returncode == 0:
            shut.append((began, time.monotonic()))
        pal("net", "allow", name, "flip.test:80", check=False)
    time.sleep(0.2)
    pal("rm", "--force", name)
    time.sleep(0.2)
    arrived = list(arrivals.arrived)
    foreign = [host for _, host in arrived if host != "flip.test" and not host.endswith(".load.test")]
    expect("no byte goes to a host that no rule names", not foreign, foreign[:5])
    for began, ended in shut:
        # A request that was judged before the change may be on its way for a moment.
        late = [at - began for at, host in arrived if host == "flip.test" and began + 0.02 < at < ended]
        expect("no byte goes to a host while it is denied", not late, late)
    events = [json.loads(line) for line in pal("events", "--body", name, "--json").stdout.splitlines()]
    allowed = {event["data"]["to"] for event in events if event["type"] == "network.allowed"}
    lost = [host for _, host in arrived if f"{host}:80" not in allowed]
    expect("every byte has its decision in the log", not lost, lost[:5])
    expect("denials are in the log", any(event["type"] == "network.denied" for event in events))
    left = [pid for kind in ("pal-egress", "pal-supervisor") for pid in of_this_world(kind)]
    expect("no process is left", not left, left)

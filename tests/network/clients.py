"""Programs that people use, unchanged: package managers, git over https and ssh, HTTP libraries, a database client.

Their servers are real, in the servers' namespace; each program runs once through TLS that is passed on unopened and once
through TLS that is inspected, and once more where the policy names nothing.
"""

import base64
import hashlib
import io
import json
import os
import subprocess
import tarfile
import time
import zipfile

from registries import write_apt, write_cargo, write_go

ADDRESS = "11.0.0.5"
NAME = "clients.test"
TOKEN = "t0ken-of-the-git-server-0123456789"
# An HTTPS server of files, and of git by its own CGI program, with basic authentication for git.
SERVER = """
import base64, http.server, os, ssl, subprocess, sys
root, certificate, key, address, token = sys.argv[1:]
wanted = 'Basic ' + base64.b64encode(f'x-access-token:{token}'.encode()).decode()

class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def __init__(self, *given):
        super().__init__(*given, directory=os.path.join(root, 'files'))
    def log_message(self, *given):
        pass
    def git(self):
        if self.headers.get('authorization') != wanted:
            self.send_response(401)
            self.send_header('WWW-Authenticate', 'Basic realm="git"')
            self.send_header('Content-Length', '0')
            return self.end_headers()
        path, _, query = self.path.partition('?')
        body = b''
        if 'chunked' in self.headers.get('transfer-encoding', ''):
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get('content-length') or 0))
        env = {**os.environ, 'GIT_PROJECT_ROOT': root, 'GIT_HTTP_EXPORT_ALL': '1', 'REMOTE_USER': 'me', 'REMOTE_ADDR': '1.2.3.4',
               'PATH_INFO': path, 'QUERY_STRING': query, 'REQUEST_METHOD': self.command, 'CONTENT_TYPE': self.headers.get('content-type', ''),
               'CONTENT_LENGTH': str(len(body)), 'HTTP_CONTENT_ENCODING': self.headers.get('content-encoding', ''),
               'GIT_PROTOCOL': self.headers.get('git-protocol', '')}
        out = subprocess.run(['git', 'http-backend'], input=body, stdout=subprocess.PIPE, env=env).stdout
        head, _, rest = out.partition(b'\\r\\n\\r\\n')
        lines = [line.split(': ', 1) for line in head.decode().split('\\r\\n')]
        self.send_response(int(dict(lines).get('Status', '200').split()[0]))
        for name, value in lines:
            self.send_header(name, value)
        self.send_header('Content-Length', str(len(rest)))
        self.end_headers()
        self.wfile.write(rest)
    def do_GET(self):
        self.git() if self.path.startswith('/git/') else super().do_GET()
    def do_POST(self):
        self.git()

server = http.server.ThreadingHTTPServer((address, 443), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate, key)
server.socket = context.wrap_socket(server.socket, server_side=True)
print('ready', flush=True)
server.serve_forever()
"""


def wheel():
    """A package for pip with one module."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("tinypkg.py", "WORD = 'installed'\n")
        archive.writestr("tinypkg-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinypkg\nVersion: 1.0\n")
        archive.writestr("tinypkg-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tinypkg-1.0.dist-info/RECORD", "")
    return out.getvalue()


def tarball():
    """A package for npm with one module."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in [("package.json", '{"name":"tinypkg","version":"1.0.0"}'), ("index.js", "module.exports = 'installed';")]:
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return out.getvalue()


def write_files(root):
    """What the servers offer: an index for pip, a registry for npm, a repository."""
    def put(path, data):
        path = os.path.join(root, "files", path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)

    put("simple/tinypkg/index.html", b'<a href="/tinypkg-1.0-py3-none-any.whl">tinypkg-1.0-py3-none-any.whl</a>')
    put("tinypkg-1.0-py3-none-any.whl", wheel())
    packed = tarball()
    digest = "sha512-" + base64.b64encode(hashlib.sha512(packed).digest()).decode()
    dist = {"tarball": f"https://{NAME}/tinypkg-1.0.0.tgz", "integrity": digest}
    about = {"name": "tinypkg", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": {"name": "tinypkg", "version": "1.0.0", "dist": dist}}}
    put("tinypkg/index.html", json.dumps(about).encode())
    put("tinypkg-1.0.0.tgz", packed)
    put("hello.txt", b"REACHED\n")
    write_cargo(put, NAME)
    write_go(put, NAME)
    write_apt(put, root)
    repository = os.path.join(root, "git", "repo.git")
    work = os.path.join(root, "work")
    for words in (
        ["git", "init", "-q", "--bare", "-b", "main", repository],
        ["git", "-C", repository, "config", "http.receivepack", "true"],
        ["git", "init", "-q", "-b", "main", work],
        ["git", "-C", work, "-c", "user.name=w", "-c", "user.email=w@w", "commit", "-q", "--allow-empty", "-m", "first"],
        ["git", "-C", work, "push", "-q", repository, "main"],
    ):
        subprocess.run(words, check=True)


class ClientServers:
    """HTTPS, git, ssh and Redis at one address."""

    def __init__(self, enter, home, key, certificate):
        self.root = os.path.join(home, "clients")
        write_files(self.root)
        self.running = []
        https = [*enter, "python3", "-c", SERVER, self.root, certificate, key, ADDRESS, TOKEN]
        self.running.append(subprocess.Popen(https, stdout=subprocess.PIPE))
        assert self.running[0].stdout.readline() == b"ready\n"
        self.start_ssh(enter)
        self.start_redis(enter)

    def start_ssh(self, enter):
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{self.root}/{name}"], check=True)
        # `pal cp` reads it as an ordinary user.
        os.chmod(f"{self.root}/user_key", 0o644)
        os.makedirs("/run/sshd", exist_ok=True)
        with open(f"{self.root}/user_key.pub") as public, open(f"{self.root}/authorized", "w") as file:
            file.write(f"restrict,command=\"git-shell -c \\\"$SSH_ORIGINAL_COMMAND\\\"\" {public.read()}")
        with open(f"{self.root}/sshd_config", "w") as file:
            file.write(
                f"ListenAddress {ADDRESS}\nHostKey {self.root}/host_key\nAuthorizedKeysFile {self.root}/authorized\nPidFile none\n"
                "StrictModes no\nUsePAM no\nPermitRootLogin forced-commands-only\n"
            )
        self.running.append(subprocess.Popen([*enter, "/usr/sbin/sshd", "-D", "-e", "-f", f"{self.root}/sshd_config"], stderr=subprocess.DEVNULL))

    def start_redis(self, enter):
        self.running.append(
            subprocess.Popen([*enter, "redis-server", "--bind", ADDRESS, "--save", "", "--protected-mode", "no"], stdout=subprocess.DEVNULL, cwd=self.root)
        )
        time.sleep(0.5)

    def stop(self):
        for process in self.running:
            process.kill()
            process.wait()


def client_cases(pal, servers, body, inside, expect):
    url = f"https://{NAME}"
    clean = "unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; cd /tmp; "
    clients = [
        ("pip", f"rm -rf p; python3 -m pip install -q --no-input --disable-pip-version-check --target p --index-url {url}/simple tinypkg && PYTHONPATH=p python3 -c 'import tinypkg; print(tinypkg.WORD)'"),
        ("npm", f"rm -rf n && mkdir n && cd n && echo '{{}}' > package.json && npm install --silent --no-audit --no-fund --registry {url}/ tinypkg && node -p 'require(\"tinypkg\")'"),
        ("requests", f"python3 -c 'from pip._vendor import requests; print(requests.get(\"{url}/hello.txt\", timeout=20).text.replace(\"REACHED\", \"installed\"))'"),
        ("node fetch", f"node -e 'fetch(\"{url}/hello.txt\").then(r => r.text()).then(t => console.log(t.replace(\"REACHED\", \"installed\")))'"),
        ("wget", f"wget -q -T 20 -O- {url}/hello.txt | sed s/REACHED/installed/"),
        ("openssl", f"printf 'GET /hello.txt HTTP/1.0\\r\\nHost: {NAME}\\r\\n\\r\\n' | timeout 20 openssl s_client -quiet -verify_return_error -connect {NAME}:443 -servername {NAME} 2>/dev/null | sed s/REACHED/installed/"),
    ]
    spliced, inspected, closed = body("--allow", f"{NAME}:443"), body("--allow", f"{NAME}:443+inspect"), body("--allow", "other.test")
    for what, line in clients:
        for kind, name in [("spliced", spliced), ("inspected", inspected)]:
            text, code, _ = inside(name, clean + line, timeout=90)
            expect(f"{what}, {kind}", "installed" in text, (text, code))
            text, code, _ = inside(name, line, timeout=90)
            expect(f"{what}, {kind}, by the proxy's variables", "installed" in text, (text, code))
        text, code, took = inside(closed, clean + line.replace("timeout 20", "timeout 5"), timeout=120)
        expect(f"{what}, where nothing is named", "installed" not in text, (text, code))

    # git asks its credential helper for a token that is only a placeholder; a path rule lets it fetch and not push.
    pal("secret", "set", "gitserver", "--to", NAME, "--git", input=TOKEN + "\n")
    git = clean + "export GIT_TERMINAL_PROMPT=0; "
    commit = "git -c user.name=w -c user.email=w@w commit -q --allow-empty -m pushed"
    writer = body("--secret", "gitserver")
    text, code, _ = inside(writer, git + f"rm -rf g && git clone -q {url}/git/repo.git g && cd g && {commit} && git push -q origin HEAD:pushed && echo done", timeout=60)
    heads = subprocess.run(["git", "-C", f"{servers.root}/git/repo.git", "branch", "--list"], capture_output=True, text=True, check=True).stdout
    expect("git over https with a secret", "done" in text and "pushed" in heads, (text, code, heads))
    text, _, _ = inside(writer, "cat /tmp/g/.git/config; env")
    expect("git's settings hold no token", TOKEN not in text and "palph0" in text, text)
    reader = body("--secret", "gitserver", "--allow", f"GET {NAME}/git/repo.git/info/refs", "--allow", f"POST {NAME}/git/repo.git/git-upload-pack")
    line = f"rm -rf g && git clone -q {url}/git/repo.git g && echo cloned; cd g && {commit} && git push -q origin HEAD:never && echo pushed"
    text, code, _ = inside(reader, git + line, timeout=60)
    heads = subprocess.run(["git", "-C", f"{servers.root}/git/repo.git", "branch", "--list"], capture_output=True, text=True, check=True).stdout
    expect("a rule lets git fetch and not push", "cloned" in text and "\npushed" not in text and "never" not in heads, (text, code, heads))

    # Protocols in which the server speaks first, and any other.
    over_ssh = body("--allow", f"{NAME}:22", "--allow", f"{NAME}:6379")
    with open(f"{servers.root}/user_key") as file:
        pal("exec", over_ssh, "--", "sh", "-c", "cat > /tmp/key", input=file.read())
    ssh = "GIT_SSH_COMMAND='ssh -i /tmp/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR'"
    text, code, _ = inside(over_ssh, clean + f"chmod 600 key; rm -rf s; {ssh} timeout 20 git clone -q root@{NAME}:{servers.root}/git/repo.git s && git -C s log --format=%s", timeout=60)
    expect("git over ssh", "first" in text, (text, code))
    text, code, _ = inside(closed, clean + f"{ssh} timeout 5 git clone -q root@{NAME}:{servers.root}/git/repo.git s", timeout=60)
    expect("git over ssh, where nothing is named", code != 0, (text, code))
    text, code, _ = inside(over_ssh, clean + f"redis-cli -h {NAME} set word stored && redis-cli -h {NAME} get word")
    expect("redis-cli", "stored" in text, (text, code))
    for name in (spliced, inspected, closed, writer, reader, over_ssh):
        pal("rm", "--force", name)
    pal("secret", "rm", "gitserver")

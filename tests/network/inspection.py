"""Requests inside TLS: judged one by one, with secrets that the Body never sees. The server writes down what arrives.

Every denial has a positive control: the same program, with a request that the policy allows.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

LAYER = sys.argv[2]
VALUE = "s3cr3t/Value+with=odd.bytes-0123456789"
SERVER = """
const fs = require('fs'), http2 = require('http2');
const [key, cert, log] = process.argv.slice(1).map((path, at) => at < 2 ? fs.readFileSync(path) : path);
const server = http2.createSecureServer({ key, cert, allowHTTP1: true }, (request, response) => {
  let body = '';
  request.on('data', piece => body += piece);
  request.on('end', () => {
    const { method, url, headers, httpVersion } = request;
    fs.appendFileSync(log, JSON.stringify({ method, url, headers, httpVersion, body }) + '\\n');
    if (url.startsWith('/auth') && !headers.authorization) {
      response.writeHead(401, { 'www-authenticate': 'Basic realm="x"' });
      return response.end();
    }
    if (url.startsWith('/sse')) {
      response.writeHead(200, { 'content-type': 'text/event-stream' });
      let left = 3;
      const timer = setInterval(() => {
        response.write(`data: ${left}\\n\\n`);
        if (--left === 0) { clearInterval(timer); response.end(); }
      }, 300);
      return;
    }
    if (url.startsWith('/large')) return response.end(Buffer.alloc(5 << 20, 'x'));
    if (url.startsWith('/forms')) {
      // Everything that a server may make of what it was sent.
      const value = Buffer.from((headers.authorization || '').slice(7)), hex = value.toString('hex');
      const forms = [value.toString(), hex, hex.toUpperCase()];
      for (const digits of [hex, hex.toUpperCase()]) forms.push(digits.replace(/../g, '%$&'), digits.replace(/../g, '\\\\u00$&'));
      for (const front of ['', 'a', 'ab']) for (const form of ['base64', 'base64url']) forms.push(Buffer.from(front + value + 'b').toString(form));
      response.setHeader('x-forms', forms.join(' '));
      return response.end('REACHED ' + forms.join('\\n'));
    }
    response.setHeader('x-echo', headers.authorization || 'none');
    response.end('REACHED ' + JSON.stringify(headers) + body);
  });
});
server.listen(443, '11.0.0.4', () => console.log('ready'));
"""


class InspectedServer:
    """An HTTPS server for HTTP/1.1 and HTTP/2 in the servers' namespace."""

    def __init__(self, enter, home, key, certificate):
        self.log = os.path.join(home, "inspected.jsonl")
        open(self.log, "w").close()
        command = [*enter, "node", "-e", SERVER, key, certificate, self.log]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout.readline() == b"ready\n"

    def take(self):
        time.sleep(0.05)
        with open(self.log) as file:
            seen = [json.loads(line) for line in file]
        open(self.log, "w").close()
        return seen


def inspection_cases(pal, server, body, inside, expect):
    clean = "unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; "
    judged = body("--allow", "GET,HEAD api.inspected.test/ok/**", "--allow", "POST api.inspected.test:443/ok/post", "--allow", "free.inspected.test")
    ok = "https://api.inspected.test/ok/"

    # Clients that know nothing of the authority trust it, by variables and by the system's certificates.
    python = "python3 -c 'import urllib.request as u; print(u.urlopen(\"%s\", timeout=20).read())'"
    clients = [
        ("curl, HTTP/2", f"curl -sS --max-time 20 {ok}a", "2.0"),
        ("curl, HTTP/1.1", f"curl -sS --http1.1 --max-time 20 {ok}a", "1.1"),
        ("curl without variables", f"env -i curl -sS --max-time 20 {ok}a", "2.0"),
        ("wget", f"env -i wget -q -T 20 -O- {ok}a", "1.1"),
        ("python", python % (ok + "a"), "1.1"),
        ("python without variables", "env -i " + python % (ok + "a"), "1.1"),
        ("node", f"node -e 'fetch(\"{ok}a\").then(r => r.text()).then(console.log)'", "1.1"),
        ("openssl", f"printf 'GET /ok/a HTTP/1.1\\r\\nHost: api.inspected.test\\r\\nConnection: close\\r\\n\\r\\n' | timeout 20 env -i openssl s_client -quiet -verify_return_error -connect api.inspected.test:443 -servername api.inspected.test", "1.1"),
    ]
    for what, line, version in clients:
        text, code, _ = inside(judged, clean + line)
        seen = server.take()
        versions = [request["httpVersion"] for request in seen]
        expect(f"{what} reaches an inspected host", "REACHED" in text and versions == [version], (text, code, seen))
    text, _, _ = inside(judged, f"curl -sS --max-time 20 {ok}a")
    expect("a tunnel by variable", "REACHED" in text and len(server.take()) == 1, text)

    # A rule names methods and paths; a refusal can be read, and nothing arrives.
    curl = clean + "curl -sS --max-time 20 --path-as-is "
    text, _, _ = inside(judged, curl + f"-d some=thing {ok}post")
    seen = server.take()
    expect("a method on a path", "REACHED" in text and [one["body"] for one in seen] == ["some=thing"], (text, seen))
    for what, line in [
        ("another method", f"-d some=thing {ok}a"),
        ("another path", "https://api.inspected.test/other"),
        ("a path with dots", "https://api.inspected.test/ok/../other"),
        ("a path with encoded dots", "https://api.inspected.test/ok/%2e%2e/other"),
        ("a path with an encoded slash", "https://api.inspected.test/ok/..%2fother"),
        ("a doubled slash", "https://api.inspected.test//ok/a"),
        ("an override of the method", f"-H 'X-HTTP-Method-Override: DELETE' {ok}a"),
        ("another Host", f"-H 'Host: free.inspected.test' {ok}a"),
        ("another Host, HTTP/1.1", f"--http1.1 -H 'Host: free.inspected.test' {ok}a"),
    ]:
        text, code, _ = inside(judged, curl + "-w ' %{http_code}' " + line)
        seen = server.take()
        expect(what, seen == [] and text.startswith("palisade: ") and text.endswith((" 403", " 421")), (text, code, seen))
    smuggled = r"printf 'GET /ok/a HTTP/1.1\r\nHost: api.inspected.test\r\n\r\nGET /other HTTP/1.1\r\nHost: api.inspected.test\r\nConnection: close\r\n\r\n'"
    text, _, _ = inside(judged, clean + smuggled + " | timeout 20 openssl s_client -quiet -connect api.inspected.test:443 -servername api.inspected.test")
    expect("a pipelined request", [one["url"] for one in server.take()] == ["/ok/a"] and "403" in text, text)
    both = r"printf 'POST /ok/post HTTP/1.1\r\nHost: api.inspected.test\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\nGET /other HTTP/1.1\r\nHost: api.inspected.test\r\n\r\n'"
    inside(judged, clean + both + " | timeout 20 openssl s_client -quiet -connect api.inspected.test:443 -servername api.inspected.test")
    expect("a smuggled request", not any(one["url"] == "/other" for one in server.take()))
    tested = pal("net", "test", judged, "POST api.inspected.test/ok/a", check=False)
    expect("pal net test with a method", tested.returncode == 1 and "pal net allow" in tested.stdout + tested.stderr, tested)

    # Streams come as they are sent, and large bodies go through.
    text, _, took = inside(judged, clean + "curl -sSN --max-time 20 https://api.inspected.test/ok/x && python3 - <<'P'\nimport time, urllib.request as u\n"
        "began = time.monotonic()\nP")
    server.take()
    sse = body("--allow", "api.inspected.test:443+inspect")
    text, _, _ = inside(sse, clean + "python3 - <<'P'\nimport time, urllib.request as u\nanswer = u.urlopen('https://api.inspected.test/sse', timeout=20)\nfirst = answer.readline(); began = time.monotonic(); rest = answer.read()\nprint(first, time.monotonic() - began > 0.4)\nP")
    expect("an event stream comes as it is sent", "b'data: 3\\n' True" in text, text)
    text, _, _ = inside(sse, clean + "curl -sS --max-time 60 https://api.inspected.test/large | wc -c; head -c 5242880 /dev/zero | curl -sS --max-time 60 --data-binary @- https://api.inspected.test/up | wc -c")
    expect("large bodies", text.split()[:1] == ["5242880"] and int(text.split()[1]) > 5242880, text)
    server.take()
    # What is not inspected goes through unopened, with the host's own certificate.
    issuer = clean + "echo | timeout 20 openssl s_client -connect %s.inspected.test:443 -servername %s.inspected.test 2>/dev/null | openssl x509 -noout -issuer"
    text, _, _ = inside(judged, issuer % ("free", "free"))
    expect("TLS that no rule inspects is not opened", "Palisade" not in text and "world" in text, text)
    text, _, _ = inside(judged, issuer % ("api", "api"))
    expect("inspected TLS has the Body's authority", "Palisade Body" in text, text)
    # The policy changes in the middle of a connection: the next request is judged by the new one.
    pal("net", "deny", sse, "GET api.inspected.test/x/**")
    text, _, _ = inside(sse, curl + "https://api.inspected.test/x/y https://api.inspected.test/z")
    expect("a rule about requests is added", [one["url"] for one in server.take()] == ["/z"], text)
    for name in (judged, sse):
        pal("rm", "--force", name)


def secret_cases(pal, server, body, inside, expect, kill_egress, drained):
    clean = "unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; "
    pal("secret", "set", "key", "--to", "api.inspected.test", "--header", "authorization", "--basic", "--query", "--body", "--env", "API_KEY", input=VALUE + "\n")
    pal("secret", "set", "gitkey", "--to", "git.inspected.test", "--basic", "--git", "--env", "GIT_KEY", input="git-" + VALUE)
    holder = body("--secret", "key", "--secret", "gitkey", "--allow", "free.inspected.test", "--allow", "web.test:80")
    curl = clean + "curl -sS --max-time 20 "
    url = "https://api.inspected.test"
    text, _, _ = inside(holder, "printenv API_KEY")
    placeholder = text.strip()
    expect("the Body has a placeholder", "palph0" in placeholder and VALUE not in placeholder, text)

    # The value arrives where the secret says, and the Body never sees it.
    basic = base64.b64encode(f"me:{VALUE}".encode()).decode()
    for what, line, arrived in [
        ("a header", f"-H \"Authorization: Bearer $API_KEY\" {url}/a", lambda one: one["headers"]["authorization"] == f"Bearer {VALUE}"),
        ("a header, HTTP/1.1", f"--http1.1 -H \"Authorization: Bearer $API_KEY\" {url}/a", lambda one: one["headers"]["authorization"] == f"Bearer {VALUE}"),
        ("a password", f"-u \"me:$API_KEY\" {url}/a", lambda one: one["headers"]["authorization"] == f"Basic {basic}"),
        ("a query", f"\"{url}/a?key=$API_KEY&x=1\"", lambda one: one["url"].startswith("/a?key=s3cr3t%2FValue%2Bwith%3Dodd")),
        ("a body", f"-d \"{{\\\"key\\\": \\\"$API_KEY\\\"}}\" {url}/a", lambda one: VALUE in one["body"]),
    ]:
        text, _, _ = inside(holder, curl + "-i " + line)
        seen = server.take()
        expect(f"{what} gets the value", len(seen) == 1 and arrived(seen[0]), (text, seen))
        forms = [VALUE, basic, VALUE.encode().hex(), base64.b64encode(VALUE.encode()).decode().rstrip("="), "s3cr3t%2FValue%2Bwith%3Dodd"]
        expect(f"{what}: no form of it comes back", "REACHED" in text and not any(form in text for form in forms), text)

    # A placeholder anywhere else refuses the request; to another host it is only a placeholder.
    for what, line in [
        ("a header that servers repeat", f"-A \"$API_KEY\" {url}/a"),
        ("a path", f"\"{url}/$API_KEY\""),
        ("the placeholder of another secret", f"-H \"Authorization: Bearer $GIT_KEY\" {url}/a"),
        ("a made-up placeholder", f"-H 'Authorization: Bearer palph0abcdefghij' {url}/a"),
    ]:
        text, _, _ = inside(holder, curl + line)
        expect(f"{what} refuses the request", server.take() == [] and text.startswith("palisade: "), text)
    text, _, _ = inside(holder, curl + "-H \"Authorization: Bearer $API_KEY\" https://free.inspected.test/a")
    seen = server.take()
    expect("another host gets the placeholder", [one["headers"]["authorization"] for one in seen] == [f"Bearer {placeholder}"], (text, seen))
    text, _, _ = inside(holder, curl + "-H \"Authorization: Bearer $API_KEY\" http://web.test/a")
    arrived = [data for found in drained().values() for data in found[0]]
    expect("no secret goes over plain http", "no secret goes over plain http" in text and arrived == [], (text, arrived))

    # git asks the helper, which gives the placeholder.
    text, _, _ = inside(holder, clean + "GIT_TERMINAL_PROMPT=0 timeout 30 git ls-remote https://git.inspected.test/auth/repo.git")
    seen = [one["headers"].get("authorization") for one in server.take()]
    sent = base64.b64encode(f"x-access-token:git-{VALUE}".encode()).decode()
    expect("git has the token from its helper", f"Basic {sent}" in seen, (text, seen))

    # The process dies and comes back with the secrets; a revoked secret is gone at once, and a granted one is there.
    kill_egress(pal)
    text, _, _ = inside(holder, curl + f"-H \"Authorization: Bearer $API_KEY\" {url}/b")
    expect("after a kill of pal-egress", [one["headers"]["authorization"] for one in server.take()] == [f"Bearer {VALUE}"], text)
    pal("secret", "revoke", holder, "key")
    text, _, _ = inside(holder, curl + f"-H 'Authorization: Bearer {placeholder}' {url}/b")
    expect("a revoked secret", all(VALUE not in json.dumps(one) for one in server.take()), text)
    pal("secret", "grant", holder, "key")
    text, _, _ = inside(holder, curl + f"-H \"Authorization: Bearer $API_KEY\" {url}/c")
    expect("a secret that is granted again", [one["headers"]["authorization"] for one in server.take()] == [f"Bearer {VALUE}"], text)
    pal("stop", holder)
    pal("start", holder)
    text, _, _ = inside(holder, curl + f"-H \"Authorization: Bearer $API_KEY\" {url}/d")
    expect("after a stop and a start", [one["headers"]["authorization"] for one in server.take()] == [f"Bearer {VALUE}"], text)
    fork = pal("fork", holder).stdout.split()[0]
    text, _, _ = inside(fork, curl + f"-H \"Authorization: Bearer $API_KEY\" {url}/e")
    expect("a fork", [one["headers"]["authorization"] for one in server.take()] == [f"Bearer {VALUE}"], text)

    # No form of the value is in anything that the Body can read, or that `pal` writes.
    values = [VALUE, f"git-{VALUE}"]
    told = "".join(
        pal(*words, check=False).stdout
        for words in (["events", "--json"], ["logs", holder], ["inspect", holder, "--json"], ["net", "show", holder, "--json"], ["secret", "ls", "--json"], ["ls", "--json"])
    )
    expect("no output of pal has a value", not leaks(told.encode(), values) and "palph0" in told)
    found = []
    for place, _, names in os.walk(pal.data):
        for name in names:
            path = os.path.join(place, name)
            if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) < 64 << 20:
                with open(path, "rb") as file:
                    if leaks(file.read(), values):
                        found.append(path)
    expect("no file of the data directory has a value", found == [], found)
    text, _, _ = inside(holder, "cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; grep -rl s3cr3t / --include='*' -s --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr 2>/dev/null | head", timeout=120)
    expect("nothing in the Body has a value", not leaks(text.encode(), values) and "palph0" in text, text[-500:])
    used = [json.loads(line)["data"] for line in pal("events", "--body", holder, "--json").stdout.splitlines() if "network.allowed" in line]
    expect("the log names the secret that was used", any("with the secret key" in one["why"] for one in used), used)
    refused = pal("secret", "rm", "key", check=False)
    expect("a secret in use is not removed", refused.returncode == 122 and "is in use by Body" in refused.stderr, refused)
    for name in (holder, fork):
        pal("rm", "--force", name)
    for name in ("key", "gitkey"):
        pal("secret", "rm", name, check=False)


RULES = """
[[network.rules]]
to = "GET api.inspected.test:443/canned"
respond = { status = 203, headers = { x-own = "yes" }, body = "CANNED" }

[[network.rules]]
to = "GET api.inspected.test:443/pages"
query = { page = "[0-9]*" }
headers = { x-team = "agents" }

[[network.rules]]
to = "old.inspected.test:443"
forward = "free.inspected.test:443"

[[network.rules]]
to = "web.test:80"
limit = { bytes = "256KiB" }
"""


def rule_cases(pal, user, server, inside, expect, kill_egress, drained):
    """Rules of a palisade.toml with conditions, answers, other hosts and budgets."""
    repository = tempfile.mkdtemp(prefix="palisade-rules-")
    with open(os.path.join(repository, "palisade.toml"), "w") as file:
        file.write(RULES)
    make = "git init -q && git add . && git -c user.name=a -c user.email=a@b.test commit -qm rules"
    subprocess.run(make, shell=True, check=True, cwd=repository)
    for place, _, names in os.walk(repository):
        for name in ["", *names]:
            os.chown(os.path.join(place, name), user, user)
    ruled = pal("up", "--layer", LAYER, "--repo", repository, "--committed", "--no-prepare").stdout.split()[-1]
    clean = "unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; "
    curl = clean + "curl -sS --max-time 20 -w ' %{http_code}' "
    api = "https://api.inspected.test"

    for version in ("--http2", "--http1.1"):
        text, _, _ = inside(ruled, curl + f"{version} -i {api}/canned")
        expect(f"an answer of a rule, {version}", "CANNED 203" in text and "x-own: yes" in text and server.take() == [], text)
        text, _, _ = inside(ruled, curl + f"{version} -H 'x-team: agents' '{api}/pages?page=7'")
        expect(f"conditions that hold, {version}", [one["url"] for one in server.take()] == ["/pages?page=7"] and "REACHED" in text, text)
        for line in (f"'{api}/pages?page=7'", f"-H 'x-team: agents' '{api}/pages?page=x'", f"-H 'x-team: agents' '{api}/pages?page=7&page=x'"):
            text, _, _ = inside(ruled, curl + f"{version} {line}")
            expect(f"a condition that does not hold, {version} {line}", server.take() == [] and text.endswith(" 403"), text)
        text, _, _ = inside(ruled, curl + f"{version} -d some=thing https://old.inspected.test/x")
        seen = server.take()
        host = [one["headers"].get(":authority") or one["headers"].get("host") for one in seen]
        expect(f"a request goes to the other host, {version}", host == ["free.inspected.test"] and seen[0]["body"] == "some=thing", (text, seen))
        expect(f"it says for whom, {version}", [one["headers"].get("forwarded") for one in seen] == ["host=old.inspected.test"], seen)

    # A budget counts what arrives, and neither a new connection nor a new process has more.
    text, _, _ = inside(ruled, curl + "-d some=thing http://web.test/small")
    arrived = sum(len(data) for found in drained().values() for data in found[0])
    expect("a request within the budget", "REACHED" in text and arrived > 0, text)
    text, _, _ = inside(ruled, "head -c 1000000 /dev/zero >/tmp/large; " + curl + "--data-binary @/tmp/large http://web.test/large")
    time.sleep(0.5)
    arrived = sum(len(data) for found in drained().values() for data in found[0])
    expect("no more than the budget arrives", "REACHED" not in text and 100 << 10 < arrived <= 256 << 10, (text, arrived))
    for round in ("a new connection", "a new process"):
        text, _, _ = inside(ruled, curl + "http://web.test/more")
        expect(f"{round} after the budget is spent", "has spent its budget of 256KiB" in text and drained() == {}, text)
        kill_egress(pal)
    shown = pal("net", "show", ruled).stdout
    expect("pal net show names the terms", "forwards to free.inspected.test:443" in shown and "at most 256KiB" in shown, shown)
    spent = [json.loads(line)["data"] for line in pal("events", "--body", ruled, "--json").stdout.splitlines() if "network.spent" in line]
    expect("what was spent is in the log", spent and spent[-1]["bytes"] == 256 << 10, spent)
    pal("rm", "--force", ruled)
    shutil.rmtree(repository)


def leaks(data, values):
    """Whether bytes have a value as it is, in base64 at any alignment, in hexadecimal, percent-encoded or escaped for JSON."""
    for value in values:
        raw = value if isinstance(value, bytes) else value.encode()
        forms = [raw, raw.hex().encode(), raw.hex().upper().encode(), "".join(f"\\u{byte:04x}" for byte in raw).encode()]
        forms.append("".join(chr(byte) if chr(byte).isalnum() or chr(byte) in "-._~" else f"%{byte:02X}" for byte in raw).encode())
        for front in range(3):
            for encode in (base64.b64encode, base64.urlsafe_b64encode):
                text = encode(b"\0" * front + raw)
                forms.append(text[(8 * front + 5) // 6 : 8 * (front + len(raw)) // 6])
        if any(form in data for form in forms):
            return True
    return False

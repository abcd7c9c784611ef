"""Programs that people use, unchanged: package managers beside pip and npm, HTTP libraries, Java, a browser, a database client.

Each runs without proxy variables, once through TLS that is passed on unopened and once through TLS that is inspected, and
once where the policy names another host: there it must end soon, with a message, and nothing may arrive.
"""

import itertools
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

from clients import ADDRESS, NAME

URL = f"https://{NAME}"
TOOLS = "/mnt/tools"
CLEAN = "unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY CARGO_HTTP_PROXY npm_config_proxy npm_config_https_proxy PIP_PROXY; cd /tmp; "
# A refused program says so in one of these ways: the name has no address, or the connection is refused.
READABLE = re.compile(
    r"[Cc]ould not resolve|not known|\bENOTFOUND\b|dns error|no such host|UnresolvedAddress|UnknownHost|ERR_NAME_NOT_RESOLVED|ERR_TUNNEL|palisade:|tunnel error|response 403|Denied by|ERR_INTERNET_DISCONNECTED"
)
# pnpm would try for 70 seconds, to any host that does not answer.
QUICK = "export npm_config_fetch_retries=0 pnpm_config_fetch_retries=0; "
JAVA = """
import java.net.*; import java.net.http.*; import java.time.Duration;
class Fetch {
  public static void main(String[] words) throws Exception {
    var client = HttpClient.newBuilder().proxy(HttpClient.Builder.NO_PROXY).connectTimeout(Duration.ofSeconds(20)).build();
    var request = HttpRequest.newBuilder(URI.create(words[0])).build();
    System.out.println(client.send(request, HttpResponse.BodyHandlers.ofString()).body().replace("REACHED", "installed"));
    var old = (HttpURLConnection) new URL(words[0]).openConnection(Proxy.NO_PROXY);
    System.out.println(old.getResponseCode());
  }
}
"""


def python(text):
    return f"PYTHONPATH=$(echo {TOOLS}/python/lib/python3*/site-packages) /usr/bin/python3 -c '{text}'"


USUAL = [
    ("curl", f"curl -sS --max-time 20 {URL}/hello.txt | sed s/REACHED/installed/"),
    ("uv", f"rm -rf u; UV_CACHE_DIR=/tmp/uv {TOOLS}/python/bin/uv pip install -q --no-config --python /usr/bin/python3 --target u --index-url {URL}/simple tinypkg && PYTHONPATH=u python3 -c 'import tinypkg; print(tinypkg.WORD)'; rm -rf /tmp/uv"),
    ("pnpm", f"export HOME=/tmp/pn; rm -rf pn; mkdir pn && cd pn && echo '{{}}' > package.json && {TOOLS}/node_modules/.bin/pnpm add --reporter append-only --registry {URL}/ --store-dir /tmp/pn/store tinypkg && node -p 'require(\"tinypkg\")'"),
    ("cargo", "rm -rf c; mkdir -p c/src && cd c && export CARGO_HOME=/tmp/c/home PATH=/mnt/rust/bin:$PATH && printf '[package]\\nname = \"c\"\\nversion = \"1.0.0\"\\nedition = \"2021\"\\n[dependencies]\\ntinypkg = { version = \"1\", registry = \"tiny\" }\\n' > Cargo.toml && echo 'fn main() { println!(\"{}\", tinypkg::WORD); }' > src/main.rs && "
        f"cargo --config 'registries.tiny.index=\"sparse+{URL}/cargo/\"' run -q"),
    ("go", f"rm -rf go; mkdir go && cd go && export GOPROXY={URL}/go GOSUMDB=off GOPATH=/tmp/go/path GOFLAGS=-modcacherw && go mod init -x a.test/a 2>/dev/null || printf 'module a.test/a\\n' > go.mod; go mod download {NAME}/tiny@v1.0.0 && cat path/pkg/mod/{NAME}/tiny@v1.0.0/tiny.go"),
    ("apt", f"rm -rf apt; mkdir -p apt/state/lists/partial apt/cache/archives/partial && echo 'deb [trusted=yes] {URL}/apt ./' > apt/list && touch apt/status && cd apt && printf 'Dir::State \"/tmp/apt/state\"; Dir::State::status \"/tmp/apt/status\"; Dir::Cache \"/tmp/apt/cache\"; Dir::Etc::sourcelist \"/tmp/apt/list\"; Dir::Etc::sourceparts \"-\"; Dir::Etc::main \"-\"; APT::Sandbox::User \"\"; Acquire::Languages \"none\";' > conf && export APT_CONFIG=/tmp/apt/conf && apt-get update -q && apt-get download -q tinypkg && dpkg-deb --fsys-tarfile tinypkg_1.0_all.deb | tar -xO ./usr/share/tinypkg/word"),
    ("httpx, HTTP/1.1", python(f'import httpx; print(httpx.get("{URL}/hello.txt", timeout=20).text.replace("REACHED", "installed"))')),
    ("httpx, HTTP/2", python('import httpx; answer = httpx.Client(http2=True).get("https://HOST/ok", timeout=20); assert answer.http_version == "HTTP/2"; print("installed" if "REACHED" in answer.text else answer)')),
    ("requests", python(f'import requests; print(requests.get("{URL}/hello.txt", timeout=20).text.replace("REACHED", "installed"))')),
    ("aiohttp", python(f"""
import aiohttp, asyncio
async def main():
    async with aiohttp.ClientSession() as session:
        async with session.get("{URL}/hello.txt") as answer:
            print((await answer.text()).replace("REACHED", "installed"))
asyncio.run(main())""")),
]
LARGE = [
    ("Java", f"cat > Fetch.java <<'J'\n{JAVA}\nJ\njava Fetch.java {URL}/hello.txt"),
    ("Chromium", "export HOME=/tmp/ch; rm -rf ch; mkdir -p ch/.pki/nssdb && certutil -d sql:ch/.pki/nssdb -N --empty-password && "
        # A browser has a store of its own, which gets the authorities that this Body trusts and Debian does not know.
        "csplit -sz -f ch/root- -b %03d.pem /run/palisade/certificates.pem '/-----BEGIN/' '{*}' && "
        "for file in $(ls ch/root-*.pem | tail -n 2); do certutil -d sql:ch/.pki/nssdb -A -t C,, -n $file -i $file; done; "
        f"timeout 60 chromium --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking --no-first-run --user-data-dir=/tmp/ch/data --dump-dom {URL}/hello.txt 2>ch/err | sed s/REACHED/installed/; grep -q ERR_ ch/err && cat ch/err >&2; true"),
]


class Arrivals:
    """Counts the TCP connections that the servers' namespace has accepted."""

    def __init__(self, enter):
        self.enter = enter

    def count(self):
        text = subprocess.run([*self.enter, "cat", "/proc/net/snmp"], capture_output=True, text=True, check=True).stdout
        names, values = [line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:")]
        return int(dict(zip(names, values))["PassiveOpens"])


def program_cases(programs, pal, enter, show, tools, body, inside, expect):
    """Runs programs of the list."""
    rust = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True).stdout.strip()
    mounts = [*show(f"{tools}/clients", "/tools"), *show(rust, "/rust")]
    both = [f"{NAME}:443", "free.inspected.test:443"]
    spliced = body(*mounts, *(word for host in both for word in ("--allow", host)))
    inspected = body(*mounts, *(word for host in both for word in ("--allow", f"{host}+inspect")))
    closed, other = (body(*mounts, "--allow", "other.test") for _ in range(2))
    arrivals = Arrivals(enter)
    programs = [(what, line.replace("HOST", "free.inspected.test")) for what, line in programs]
    for what, line in programs:
        for kind, name in [("spliced", spliced), ("inspected", inspected)]:
            before = arrivals.count()
            text, code, _ = inside(name, CLEAN + line, timeout=120)
            expect(f"{what}, {kind}", "installed" in text and arrivals.count() > before, (text, code))

    # Most try again for some seconds, so all of them run at once.
    def denied(case):
        (what, line), (kind, name, front) = case
        text, code, took = inside(name, front + QUICK + line, timeout=120)
        expect(f"{what}, {kind}, ends soon", took < 30 and "installed" not in text, (text, code, took))
        expect(f"{what}, {kind}, with a message", READABLE.search(text), text)
        return f"{what}, {kind}: {took:.1f} s, {text.strip()[-150:]!r}"

    ways = [("denied", closed, CLEAN), ("denied by the proxy", other, "cd /tmp; ")]
    before = arrivals.count()
    with ThreadPoolExecutor(6) as pool:
        for line in pool.map(denied, itertools.product(programs, ways)):
            if os.environ.get("VERBOSE"):
                print(f"    {line}")
    expect("of denied programs nothing arrives", arrivals.count() == before, arrivals.count() - before)
    for name in (spliced, inspected, closed, other):
        pal("rm", "--force", name)


class Postgres:
    """A PostgreSQL server of Debian's package."""

    def __init__(self, enter, home):
        self.binaries = sorted(os.path.join("/usr/lib/postgresql", version, "bin") for version in os.listdir("/usr/lib/postgresql"))[-1]
        place = os.path.join(home, "postgres")
        os.makedirs(place)
        os.chown(place, 65534, 65534)
        # It refuses to run as root.
        plain = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        subprocess.run([*plain, f"{self.binaries}/initdb", "-D", place, "-U", "me", "--auth=trust", "--no-sync"], check=True, stdout=subprocess.DEVNULL, cwd="/")
        with open(f"{place}/pg_hba.conf", "a") as file:
            file.write("host all all 0.0.0.0/0 trust\n")
        command = [*enter, *plain, f"{self.binaries}/postgres", "-D", place, "-h", ADDRESS, "-k", "", "-F"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/", text=True)
        for line in self.process.stderr:
            if "ready to accept" in line:
                break

    def stop(self):
        self.process.terminate()
        self.process.wait()


def psql_cases(pal, enter, home, body, inside, expect):
    server, arrivals = Postgres(enter, home), Arrivals(enter)
    try:
        line = CLEAN + f"PGCONNECT_TIMEOUT=10 psql -h {NAME} -U me -d postgres -Atc \"select 'installed'\""
        named, closed = body("--allow", f"{NAME}:5432"), body("--allow", f"{NAME}:443")
        text, code, _ = inside(named, line)
        expect("psql", "installed" in text, (text, code))
        before = arrivals.count()
        text, code, took = inside(closed, line)
        print(f"    psql, denied: {took:.1f} s: {text.strip()!r}")
        expect("psql, denied", code != 0 and took < 10 and arrivals.count() == before and len(text) > 20, (text, code, took))
        for name in (named, closed):
            pal("rm", "--force", name)
    finally:
        server.stop()

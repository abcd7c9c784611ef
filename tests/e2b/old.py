"""Old E2B SDKs (1.x and 2.5) against a server with a domain: a sandbox from its start to its end, its files and a port."""

import os
import ssl
import time
import urllib.request
from importlib.metadata import version

from e2b import Sandbox

is_first = version("e2b").startswith("1.")
template = os.environ["SMOKE_TEMPLATE"]


def check(name, told, wanted):
    print("PASS" if told == wanted else "FAIL", f"{version('e2b')} {name}")
    assert told == wanted, f"{name}: {told!r} is not {wanted!r}"


sandbox = Sandbox(template=template, timeout=120) if is_first else Sandbox.create(template, timeout=120)
try:
    check("run", sandbox.commands.run("echo hi; id -un").stdout.split(), ["hi", "user"])
    sandbox.files.write("a/b.txt", "hello")
    check("read", sandbox.files.read("a/b.txt"), "hello")
    check("list", [entry.name for entry in sandbox.files.list("a")], ["b.txt"])
    sandbox.set_timeout(200)
    listed = Sandbox.list()
    listed = listed if isinstance(listed, list) else listed.next_items()
    check("listed", sandbox.sandbox_id.split("-")[0] in [item.sandbox_id.split("-")[0] for item in listed], True)
    # Early clients of version 1 append the id of a client.
    named = sandbox.sandbox_id.split("-")[0] + ("-palisade" if is_first else "")
    check("connect", Sandbox.connect(named).commands.run("cat a/b.txt").stdout, "hello")
    server = sandbox.commands.run("python3 -m http.server 8123", background=True)
    strict = ssl.create_default_context()
    strict.verify_flags |= ssl.VERIFY_X509_STRICT
    url = f"https://{sandbox.get_host(8123)}/"
    for left in range(100, 0, -1):
        try:
            status = urllib.request.urlopen(url, context=strict).status
            break
        except urllib.error.HTTPError:
            assert left > 1, "the port did not open"
            time.sleep(0.1)
    check("port", status, 200)
    server.kill()
finally:
    sandbox.kill()
check("killed", sandbox.is_running(), False)

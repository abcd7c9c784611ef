"""Bodies behind a corporate proxy: a real one with a login, hosts that only it reaches, and hosts that are reached without it."""

import base64
import json
import socket
import threading

from inspection import leaks

# No route leads there from this host, and no name server here knows the name.
ADDRESS, NAME = "12.0.0.9", "far.test"
PROXY, PORT = "proxy.test", 3128
USER, PASSWORD = "me", "hunter2-of-the-proxy"
LOGIN = base64.b64encode(f"{USER}:{PASSWORD}".encode())


def serve(server, stream):
    """Serves one CONNECT in the servers' namespace."""
    head = b""
    while b"\r\n\r\n" not in head:
        piece = stream.recv(65536)
        if not piece:
            return
        head += piece
    server.seen.append(head)
    if b"\r\nproxy-authorization: Basic " + LOGIN + b"\r\n" not in head:
        stream.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
        return
    name, port = head.split()[1].decode().rsplit(":", 1)
    with socket.create_connection(({NAME: ADDRESS}.get(name, name), int(port)), 10) as host:
        stream.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        back = threading.Thread(target=pump, args=(host, stream), daemon=True)
        back.start()
        pump(stream, host)
        back.join(20)


def pump(source, sink):
    try:
        while piece := source.recv(65536):
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def corporate_cases(pal, body, inside, drained, expect):
    clean = "unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; "
    curl = clean + "curl -sS --max-time 20 "
    rules = ["--allow", NAME, "--allow", f"{NAME}:22", "--allow", "web.test", "--allow", "inner.test:80+private"]
    settings = ("network.proxy", "network.proxy_secret", "network.no_proxy")
    try:
        # Without the settings nothing leads there.
        before = body(*rules)
        text, _, _ = inside(before, curl + f"http://{NAME}/")
        expect("a far host without the proxy", drained() == {} and "cannot be resolved" in text, text)
        refused = pal("config", "set", "network.proxy", f"http://{USER}:{PASSWORD}@{PROXY}:{PORT}", check=False)
        said = refused.stdout + refused.stderr
        expect("a password is no setting", refused.returncode == 2 and PASSWORD not in said and "pal secret set" in said, said)
        pal("config", "set", "network.proxy", f"http://{PROXY}:{PORT}")
        pal("config", "set", "network.no_proxy", "web.test,.direct.test")
        text, _, _ = inside(before, curl + f"http://{NAME}/")
        expect("a Body that started before the setting", drained() == {}, text)

        # Without its login, the proxy refuses, and the Body learns of the reason.
        unnamed = body(*rules)
        text, _, _ = inside(unnamed, curl + f"http://{NAME}/")
        seen = drained()
        expect("407", list(seen) == [("11.0.0.2", PORT)] and f"the corporate proxy {PROXY}:{PORT} refuses: 407 Proxy Authentication Required" in text, (text, seen))
        wrong = pal("config", "set", "network.proxy_secret", "nothing", check=False)
        expect("a secret that is not there", wrong.returncode != 0 and "there is no secret" in wrong.stderr, wrong)
        pal("secret", "set", "elsewhere", "--to", "web.test", input="x:y\n")
        pal("config", "set", "network.proxy_secret", "elsewhere")
        wrong = pal("create", *rules, check=False)
        expect("a secret of another host", wrong.returncode == 2 and f"does not belong to {PROXY}:{PORT}" in wrong.stderr, wrong)
        pal("secret", "set", "corporate", "--to", f"{PROXY}:{PORT}", input=f"{USER}:{PASSWORD}\n")
        pal("config", "set", "network.proxy_secret", "corporate")

        behind = body(*rules)
        for what, line, port in [
            ("http", curl + f"http://{NAME}/x", 80),
            ("https, with an authority that this machine trusts", curl + f"https://{NAME}/x", 443),
            ("a server that speaks first", clean + f"exec 3<>/dev/tcp/{NAME}/22; read -t 9 line <&3; echo me >&3; cat <&3; echo $line", 22),
            ("a tunnel by variable", f"curl -sS --max-time 20 https://{NAME}/x", 443),
        ]:
            text, code, _ = inside(behind, line)
            seen = drained()
            heads = seen.get(("11.0.0.2", PORT), ([], 0))[0]
            expect(f"{what} through the proxy", code == 0 and seen.get((ADDRESS, port), ([], 0))[0] and len(seen) == 2, (text, code, seen))
            expect(f"{what}, as a name", len(heads) == 1 and heads[0].startswith(f"CONNECT {NAME}:{port} HTTP/1.1\r\n".encode()), heads)
        for what, line, place in [
            ("a name in no_proxy", curl + "http://web.test/x", ("11.0.0.2", 80)),
            ("a host of the own network", curl + "http://inner.test/x", ("10.9.9.9", 80)),
        ]:
            text, code, _ = inside(behind, line)
            seen = drained()
            expect(f"{what}, directly", code == 0 and list(seen) == [place], (text, code, seen))
        for target in ("http://evil.test/", f"http://{NAME}:8080/", f"http://{ADDRESS}/", "http://169.254.169.254/"):
            text, _, _ = inside(behind, curl + target)
            expect(f"{target} does not reach the proxy", drained() == {} and "REACHED" not in text, text)
        everything = body("--allow", "*:*")
        text, _, _ = inside(everything, curl + "http://169.254.169.254/")
        expect("an inner address does not reach the proxy", drained() == {} and "REACHED" not in text, text)
        text, _, _ = inside(everything, curl + f"http://{ADDRESS}/")
        expect("a public address does", (ADDRESS, 80) in drained() and "REACHED" in text, text)

        # A restart takes the setting over, and nothing shows the login.
        pal("stop", before)
        pal("start", before)
        text, _, _ = inside(before, curl + f"http://{NAME}/")
        expect("a Body that was started again", (ADDRESS, 80) in drained(), text)
        events = pal("events", "--json").stdout
        decided = [json.loads(line)["data"] for line in events.splitlines() if f'"{NAME}:80"' in line]
        expect("decisions are in the log", {one["allowed"] for one in decided} == {True, False}, decided)
        shown = events + "".join(pal("config", "get", name).stdout for name in settings)
        expect("settings are in the log", "network.no_proxy" in shown and not leaks(shown.encode(), [PASSWORD, LOGIN]), shown)
        for one in (before, unnamed, behind, everything):
            pal("rm", "--force", one)
    finally:
        for name in settings:
            pal("config", "set", name, "")
        for name in ("corporate", "elsewhere"):
            pal("secret", "rm", "--force", name, check=False)

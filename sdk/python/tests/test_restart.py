"""A server that stops in the middle of a stream, and comes back at its address."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palisade import Body, Client, Host, ServerUnavailable, StreamInterrupted

NEEDS_NO_SERVER = True


class Server:
    """A server that can be killed and started again."""

    def __init__(self, pal: str, data: Path, *options: str) -> None:
        self._command = [pal, "--data", str(data), "serve", "--json", *options, "--listen"]
        self._process: subprocess.Popen[str] | None = None
        self.address = "127.0.0.1:0"
        self.secret = ""
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen([*self._command, self.address], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        said = json.loads(self._process.stdout.readline())
        self._process.stdout.close()
        self.url = said["url"]
        self.address = said["url"].partition("://")[2]
        self.secret = said.get("secret", self.secret)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@pytest.fixture
def server_of_its_own(pal: str, tmp_path: Path) -> Iterator[Server]:
    server = Server(pal, tmp_path / "data")
    yield server
    server.kill()


def test_streams_go_on_where_they_can_and_say_so_where_not(server_of_its_own: Server) -> None:
    server = server_of_its_own
    client = Client(f"http://{server.address}", server.secret)
    with Body(client=client) as body:
        seen: list[Any] = []
        failures: list[Exception] = []

        def follow() -> None:
            for event in Host(client).follow_events(after=0, body=body.id):
                seen.append(event)
                if event["type"] == "exec.ended" and seen[-2]["data"].get("argv", [""])[-1] == "echo last":
                    return

        def run() -> None:
            try:
                body.run("sleep 4; echo survived > /tmp/survived")
            except StreamInterrupted as error:
                failures.append(error)

        threads = [threading.Thread(target=follow, daemon=True), threading.Thread(target=run, daemon=True)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 20
        while not any(event["type"] == "exec.started" for event in seen):
            assert time.monotonic() < deadline and threads[0].is_alive()
            time.sleep(0.05)
        server.kill()
        with pytest.raises(ServerUnavailable):
            client.version()
        server.start()
        threads[1].join(20)
        assert len(failures) == 1 and "hint: the command runs on" in str(failures[0])
        deadline = time.monotonic() + 20
        while not body.files.exists("/tmp/survived"):
            assert time.monotonic() < deadline, "the command ran on without its server"
            time.sleep(0.1)
        body.run("echo last", check=True)
        threads[0].join(20)
        assert not threads[0].is_alive()
        places = [event["pos"] for event in seen]
        listed = [event["pos"] for event in Host(client).events(after=0, body=body.id)["items"]]
        assert places == sorted(set(places)) and places == listed[: len(places)], "no gap, and nothing twice"


def test_a_server_that_speaks_nonsense_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for reply in (b"not http at all\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(reply)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", "key")
        for _ in range(2):
            with pytest.raises(StreamInterrupted):
                client.version()
        thread.join(5)


def test_a_silent_server_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", "key", timeout=0.5)
        with pytest.raises(ServerUnavailable, match="in time"):
            client.version()


def test_an_encrypted_server_is_trusted_by_its_authority(
    pal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(pal, tmp_path / "data", "--tls")
    try:
        assert server.url.startswith("https://")
        with pytest.raises(ServerUnavailable, match="(?i)certificate"):
            Client(server.url, server.secret).version()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "data" / "tls-ca.pem"))
        with Body(client=Client(server.url, server.secret)) as body:
            assert body.run("echo encrypted").stdout == "encrypted\n"
            with body.terminal(command="sh") as terminal:
                terminal.write("exit 4\n")
                for _ in terminal:
                    pass
                assert terminal.exit_code == 4
            with body.http(8000) as http:
                assert http.get("/").status_code >= 400
    finally:
        server.kill()

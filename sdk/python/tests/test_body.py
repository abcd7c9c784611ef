"""Bodies, through a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from palisade import (
    Body,
    Client,
    CommandFailed,
    Denied,
    Host,
    InvalidRequest,
    NotFound,
    Output,
    PalisadeError,
    ServerUnavailable,
    Unauthorized,
)


@pytest.fixture(scope="module")
def body(server: tuple[str, str, Path]) -> Iterator[Body]:
    with Body(client=Client(server[0], server[1])) as body:
        yield body


def test_three_lines() -> None:
    with Body() as body:
        assert body.run("echo $((6 * 7))").stdout == "42\n"
    with pytest.raises(NotFound):
        body.refresh()


def test_a_body_that_was_not_created_says_what_to_do() -> None:
    with pytest.raises(PalisadeError, match="hint: use `with Body"):
        Body().run("true")


def test_the_block_ends_its_body_also_by_an_error_and_after_removal() -> None:
    with pytest.raises(ZeroDivisionError):
        with Body() as body:
            raise ZeroDivisionError
    with pytest.raises(NotFound):
        Body.attach(body.id)
    with Body() as body:
        body.remove()


def test_results_have_outputs_code_and_signal(body: Body) -> None:
    result = body.run("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("out\n", "err\n", 3, False)
    assert body.run("kill -9 $$").signal == 9
    assert body.run(["printf", "%s", "$HOME"]).stdout == "$HOME"
    assert body.run(["cat"], stdin="ä\n").stdout == "ä\n"
    assert body.run("echo $A; pwd", env={"A": "b"}, workdir="/tmp").stdout == "b\n/tmp\n"
    assert body.run("id -u", user="root").stdout == "0\n"


def test_a_command_ends_at_its_timeout(body: Body) -> None:
    result = body.run("echo early; sleep 60", timeout=0.5)
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, "early\n")


def test_check_raises_with_the_output(body: Body) -> None:
    with pytest.raises(CommandFailed, match="exit code 7\n  the reason") as caught:
        body.run("echo the reason >&2; exit 7", check=True)
    assert caught.value.result.exit_code == 7


def test_output_comes_as_it_is_written(body: Body) -> None:
    times: list[float] = []
    seen: list[bytes] = []

    def listener(piece: bytes) -> None:
        times.append(time.monotonic())
        seen.append(piece)

    result = body.run("echo one; sleep 0.5; echo two", on_stdout=listener)
    assert result.stdout == "one\ntwo\n" and b"".join(seen) == b"one\ntwo\n"
    assert times[-1] - times[0] > 0.3


def test_large_output_is_whole(body: Body) -> None:
    assert len(body.run("head -c 5000000 /dev/zero").stdout_bytes) == 5_000_000


def test_a_program_that_is_not_there_is_an_error(body: Body) -> None:
    with pytest.raises(PalisadeError, match="no-such-program"):
        body.run(["no-such-program"])
    with pytest.raises(PalisadeError):
        body.spawn(["no-such-program"])


def test_a_process_has_input_output_and_signals(body: Body) -> None:
    with body.spawn(["cat"]) as process:
        process.write("one\n")
        assert next(iter(process)) == Output("stdout", b"one\n")
        process.write(b"two\n")
        process.close_stdin()
        result = process.wait()
        assert (result.stdout, result.exit_code) == ("two\n", 0)
    with body.spawn("trap 'exit 5' TERM; echo ready; while :; do sleep 0.1; done", stdin=False) as process:
        assert next(iter(process)).text == "ready\n"
        process.send_signal("TERM")
        assert process.wait().exit_code == 5
    with body.spawn("sleep 60") as process:
        process.kill()
        assert process.wait().signal == 9
    assert body.spawn("sleep 60", timeout=0.3).wait().timed_out


def test_leaving_the_block_kills_the_process(body: Body) -> None:
    def wait_until(is_there: bool) -> None:
        deadline = time.monotonic() + 5
        while ("77777" in str([process["command"] for process in body.processes()])) != is_there:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    with body.spawn(["sleep", "77777"]):
        wait_until(True)
    wait_until(False)


def test_a_terminal_is_typed_into_resized_and_joined(body: Body) -> None:
    with body.terminal("t", command="sh", cols=90, rows=30) as terminal:
        output = iter(terminal)
        assert next(output).replaces
        assert terminal.size == (90, 30) and terminal.pid
        terminal.resize(100, 40)
        terminal.write("stty size; echo $((40 + 2))\n")
        text = b""
        while b"\n42" not in text:
            text += next(output).data
        assert b"40 100" in text
        assert [terminal["name"] for terminal in body.terminals()] == ["t"]
    with body.terminal("t", watch=True) as watcher, body.terminal("t") as terminal:
        assert b"42" in next(iter(watcher)).data, "the screen is shown again"
        terminal.write("exit 5\n")
        for _ in terminal:
            pass
        assert terminal.exit_code == 5


def test_files_are_written_read_listed_moved_and_removed(body: Body) -> None:
    files = body.files
    files.write("dir/ä b.txt", "text")
    files.write("dir/bytes", bytes(range(256)))
    assert files.read_text("dir/ä b.txt") == "text" and files.read("dir/bytes") == bytes(range(256))
    assert [(entry.name, entry.type, entry.size) for entry in files.list("dir")] == [
        ("bytes", "file", 256),
        ("ä b.txt", "file", 4),
    ]
    files.move("dir/bytes", "dir/moved")
    assert not files.exists("dir/bytes") and files.stat("dir/moved").size == 256
    files.make_dir("dir/deep/er")
    assert {entry.name for entry in files.list("dir", depth=2)} == {"ä b.txt", "moved", "deep", "er"}
    files.remove("dir")
    assert not files.exists("dir")
    files.remove("dir")


def test_files_that_cannot_be_read_or_written_are_errors(body: Body) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        body.files.read("nothing")
    with pytest.raises(InvalidRequest, match="is a directory"):
        body.files.read("/tmp")
    with pytest.raises(InvalidRequest, match="is a directory|not a regular file"):
        body.files.write("/tmp", "")
    for path in ("", "a\0b"):
        with pytest.raises(InvalidRequest):
            body.files.read(path)
    with pytest.raises(PalisadeError):
        body.files.write("/" + "a/" * 2100, "")
    with pytest.raises(NotFound):
        body.files.list("nothing")


def test_long_files_are_copied_in_pieces(body: Body, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.write_bytes(b"0123456789abcdef" * (1 << 20))
    body.files.upload(local, "long")
    assert body.run("wc -c < long").stdout.strip() == str(16 << 20)
    body.files.download("long", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == local.read_bytes()
    with pytest.raises(NotFound):
        body.files.download("nothing", tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "local"], "no part is left"


def test_changes_are_watched(body: Body) -> None:
    body.files.make_dir("watched/below")
    events = body.files.watch("watched", recursive=True)
    assert next(events) is None
    body.files.write("watched/below/a", "1")
    seen: list[str] = []
    for event in events:
        assert event is not None
        seen.append(event.type)
        if event.name == "below/a" and event.type == "write":
            break
    assert "create" in seen
    events.close()  # type: ignore[attr-defined]


def test_a_port_answers_with_the_token_and_not_without(body: Body) -> None:
    body.files.write("www/index.html", "from inside")
    with body.spawn("cd www && exec python3 -m http.server 8000", stdin=False):
        with body.http(8000) as http:
            deadline = time.monotonic() + 20
            while (answer := http.get("/")).status_code != 200:
                assert time.monotonic() < deadline, answer.text
                time.sleep(0.1)
            assert answer.text == "from inside"
            del http.headers["E2b-Traffic-Access-Token"]
            assert http.get("/").status_code == 403
            body.share_ports("public")
            assert http.get("/").status_code == 200
    assert body.port(8000).url.startswith(f"http://8000-{body.id}.localhost:")


def test_bodies_pause_stop_and_start() -> None:
    with Body() as body:
        body.files.write("kept", "1")
        body.pause()
        assert body.refresh()["status"] == "paused"
        body.resume()
        assert body.refresh()["status"] == "running"
        body.stop(grace=0.1)
        with pytest.raises(PalisadeError, match="hint"):
            body.run("true")
        body.start()
        assert body.files.read_text("kept") == "1"


def test_forks_and_snapshots_begin_with_the_files() -> None:
    with Body() as body:
        body.files.write("kept", "1")
        snapshot = body.snapshot()
        forks = body.forks(2)
        body.files.write("kept", "2")
        for fork in forks:
            assert fork.files.read_text("kept") == "1"
            fork.remove()
        with Body(template=snapshot["id"]) as other:
            assert other.files.read_text("kept") == "1"
        assert snapshot["id"] in [found["id"] for found in Host().snapshots()]
    Host().remove_snapshot(snapshot["id"])
    with pytest.raises(NotFound):
        Host().snapshot(snapshot["id"])


def test_bodies_have_names_options_and_are_found_again() -> None:
    made = Body.create(
        name="named", env={"A": "b"}, metadata={"team": "web"}, idempotency_key="sdk-1", timeout_ms=600_000
    )
    try:
        assert Body.attach("named").id == made.id
        again = Body.create(
            name="named", env={"A": "b"}, metadata={"team": "web"}, idempotency_key="sdk-1", timeout_ms=600_000
        )
        assert again.id == made.id
        assert made.id in [body.id for body in Body.list(status="running")]
        assert made.run("echo $A").stdout == "b\n"
        assert (made.name, made.info["metadata"]) == ("named", {"team": "web"})
        assert made.change_limits({"pids": 100})["body"]["limits"]["pids"] == 100
        assert [entry["argv"][-1] for entry in made.logs()] == ["echo $A"]
        with pytest.raises(PalisadeError):
            Body.create(name="named")
    finally:
        made.remove()


def test_networks_and_secrets() -> None:
    host = Host()
    host.set_secret("sdk-token", value="s3cr3t", hosts=["api.example.org"], env=["TOKEN"])
    try:
        assert [secret["name"] for secret in host.secrets()] == ["sdk-token"]
        with Body(network={"allow": ["api.example.org:443"]}) as body:
            assert [rule["to"] for rule in body.network()["rules"]] == ["api.example.org:443"]
            body.extend_network(deny=["evil.example.org:443"])
            assert len(body.network()["rules"]) == 2
            assert body.replace_network(preset=["closed"])["rules"] == []
            body.replace_network(allow=["api.example.org:443"])
            (granted,) = body.grant_secret("sdk-token")
            assert granted["placeholder"] != "s3cr3t"
            body.revoke_secret("sdk-token")
            assert body.network().get("secrets", []) == []
    finally:
        host.remove_secret("sdk-token")


def test_templates_are_listed_and_a_missing_one_has_a_hint() -> None:
    assert "host" in [template["name"] for template in Host().templates()]
    with pytest.raises(NotFound, match="hint: templates are"):
        Body.create(template="nothing")


def test_events_are_paged_and_followed() -> None:
    host = Host()
    before = host.events(limit=1000)["next"]
    with Body() as body:
        body.run("echo followed")
        types = []
        for event in host.follow_events(after=before, body=body.id):
            types.append(event["type"])
            if event["type"] == "exec.ended":
                break
        page = host.events(after=before, body=body.id)
    assert types[0] == "body.created" and [event["type"] for event in page["items"]][: len(types)] == types


def test_a_wrong_key_no_key_and_no_server_are_told_apart(server: tuple[str, str, Path]) -> None:
    with pytest.raises(Unauthorized):
        Client(server[0], "e2b_0000").call("GET", "/v1/bodies")
    with pytest.raises(ServerUnavailable, match="hint: start it: pal serve"):
        Client("http://127.0.0.1:9", "x").version()
    key = Client(*server[:2]).call("POST", "/v1/keys", {"name": "reader", "scope": "read"})["secret"]
    with pytest.raises(Denied):
        Body.create(client=Client(server[0], key))


def test_many_calls_at_once(body: Body) -> None:
    with ThreadPoolExecutor(50) as pool:
        results = list(pool.map(lambda number: body.run(f"echo {number}").stdout.strip(), range(200)))
    assert results == [str(number) for number in range(200)]


def test_a_stream_does_not_block_other_threads(body: Body) -> None:
    thread = threading.Thread(target=lambda: body.run("sleep 1"))
    thread.start()
    start = time.monotonic()
    assert body.run("true").ok and time.monotonic() - start < 0.9
    thread.join()

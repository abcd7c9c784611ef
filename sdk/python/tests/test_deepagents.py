"""The contract of deepagents 0.7, and `BaseSandbox` as the reference: both work on the same Body."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepagents")
from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox

from palisade import Body, Client
from palisade.deepagents import ARTIFACTS_ROOT, PalisadeSandbox, make_backend

ROOT = "/tmp/contract"
# The oldest supported version lacks a refusal and an exclusion that today's contract has, and this package always.
IS_NEWEST = tuple(map(int, version("deepagents").split("."))) >= (0, 7, 32)
PREPARE = r"""
set -e
mkdir -p /tmp/contract/src/deep /tmp/contract/.hidden /tmp/contract/.git /tmp/contract/void "/tmp/contract/a dir"
cd /tmp/contract
printf 'one\ntwo\nthree\n' > plain.txt
printf 'one\r\ntwo\r\n' > crlf.txt
printf 'old\rmac\r' > mac.txt
printf 'no end' > noend.txt
: > empty.txt
printf 'caf\351\n' > latin1.txt
printf '\000\001\377' > bytes.bin
printf 'needle\n' > .hidden/in.py
printf 'needle\n' > .git/config
printf 'x = "needle"\nneedle needle\nNeedle\n' > src/a.py
printf 'needle: 1:2\n' > "a dir/b c.py"
printf 'no\n' > src/deep/c.py
printf 'needle\n' > src/deep/d.txt
printf 'binary needle\000\n' > src/blob.py
ln -s src/a.py link.py
ln -s /etc/passwd outside.txt
ln -s nowhere broken.txt
ln -s src linked
i=0; while [ $i -lt 3000 ]; do echo "line $i"; i=$((i+1)); done > long.txt
head -c 600000 /dev/zero | tr '\0' 'x' > oneline.txt
i=0; while [ $i -lt 400 ]; do head -c 4000 /dev/zero | tr '\0' 'y'; echo; i=$((i+1)); done > wide.txt
mkdir locked; echo 1 > locked/f; chmod 000 locked
echo 1 > unreadable.txt; chmod 000 unreadable.txt
echo 1 > readonly.txt; chmod 444 readonly.txt
"""


class Reference(BaseSandbox):
    """deepagents' own operations, which run Python in the Body."""

    def __init__(self, sandbox: PalisadeSandbox) -> None:
        self.sandbox = sandbox

    @property
    def id(self) -> str:
        return "reference"

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        return self.sandbox.execute(command, timeout=timeout)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return self.sandbox.upload_files(files)

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return self.sandbox.download_files(paths)


@pytest.fixture(scope="module")
def sandbox(server: tuple[str, str, Path]) -> Iterator[PalisadeSandbox]:
    with Body(client=Client(server[0], server[1])) as body:
        body.run(PREPARE, check=True)
        yield PalisadeSandbox(body)


def both(sandbox: PalisadeSandbox, method: str, *arguments: Any) -> tuple[Any, Any]:
    """The result of a method here and of its reference; the asynchronous twin must agree with the other."""
    own = getattr(sandbox, method)(*arguments)
    if method not in ("write", "edit", "delete"):
        assert asyncio.run(getattr(sandbox, "a" + method)(*arguments)) == own
    return own, getattr(Reference(sandbox), method)(*arguments)


def listed(result: Any) -> list[tuple[str, bool]]:
    return sorted((entry["path"], entry["is_dir"]) for entry in result.entries or [])


def paths(result: Any) -> list[str]:
    return sorted(match["path"] for match in result.matches or [])


def found(result: Any) -> list[tuple[str, int, str]]:
    return sorted((match["path"], match["line"], match["text"]) for match in result.matches or [])


@pytest.mark.parametrize(
    "path", ["", "/", "/void", "/src", "/a dir", "/nothing", "/plain.txt", "/locked", "/locked/x", "/plain.txt/x"]
)
def test_ls_is_that_of_the_reference(sandbox: PalisadeSandbox, path: str) -> None:
    own, expected = both(sandbox, "ls", ROOT + path)
    assert own.error == expected.error
    assert listed(own) == listed(expected)


@pytest.mark.parametrize("offset", [0, 1, 2, 2999, 3000, 4000, -5])
@pytest.mark.parametrize("limit", [1, 100, 2000, 0, -1])
def test_pages_are_those_of_the_reference(sandbox: PalisadeSandbox, offset: int, limit: int) -> None:
    own, expected = both(sandbox, "read", f"{ROOT}/long.txt", offset, limit)
    assert own == expected


@pytest.mark.parametrize(
    "name",
    ["plain.txt", "crlf.txt", "mac.txt", "noend.txt", "empty.txt", "latin1.txt", "bytes.bin", "oneline.txt", "wide.txt"]
    + [
        "link.py",
        "broken.txt",
        "nothing",
        "void",
        "locked",
        "locked/f",
        "unreadable.txt",
        "plain.txt/x",
        "a dir/b c.py",
    ],
)
def test_files_read_as_with_the_reference(sandbox: PalisadeSandbox, name: str) -> None:
    own, expected = both(sandbox, "read", f"{ROOT}/{name}")
    if name == "plain.txt/x":  # The reference has no word for it.
        assert own.error == f"File '{ROOT}/{name}': file_not_found"
        return
    assert own == expected


@pytest.mark.parametrize(
    ("name", "old", "new", "all_of_them"),
    [
        ("plain.txt", "two", "2", False),
        ("plain.txt", "o", "0", False),
        ("plain.txt", "o", "0", True),
        ("plain.txt", "absent", "x", False),
        ("plain.txt", "", "x", False),
        ("crlf.txt", "one\ntwo", "1\n2", False),
        ("crlf.txt", "one\r\n", "1\r\n", False),
        ("latin1.txt", "caf", "x", False),
        ("nothing", "a", "b", False),
        ("void", "a", "b", False),
        ("unreadable.txt", "1", "2", False),
        ("readonly.txt", "1", "2", False),
    ],
)
def test_edits_are_those_of_the_reference(
    sandbox: PalisadeSandbox, name: str, old: str, new: str, all_of_them: bool
) -> None:
    path, twin = f"{ROOT}/{name}", f"{ROOT}/{name}.twin"
    sandbox.body.run(["cp", "-a", path, twin], user="root")
    own = sandbox.edit(path, old, new, all_of_them)
    expected = Reference(sandbox).edit(twin, old, new, all_of_them)
    if not old and not IS_NEWEST:
        assert own.error == "Error: old_string cannot be empty. Provide the exact text to replace."
        return
    assert (own.error or "").replace(path, twin) == (expected.error or "")
    assert own.occurrences == expected.occurrences
    if sandbox.body.run(["test", "-f", twin]).ok:
        assert sandbox.body.run(["cmp", path, twin], user="root").ok
        assert (
            sandbox.body.run(["stat", "-c", "%a", path]).stdout == sandbox.body.run(["stat", "-c", "%a", twin]).stdout
        )
    sandbox.body.run(["rm", "-rf", twin], user="root")


@pytest.mark.parametrize("path", ["gone", "nothing", "broken-link", "full", "locked-in/f"])
def test_deletes_are_those_of_the_reference(sandbox: PalisadeSandbox, path: str) -> None:
    prepare = (
        "cd /tmp && rm -rf del && mkdir -p del/full/deep del/locked-in && ln -s x del/broken-link "
        "&& touch del/gone del/full/deep/f del/locked-in/f && chmod 500 del/locked-in"
    )
    results = []
    for remove in (sandbox.delete, Reference(sandbox).delete):
        sandbox.body.run("chmod -R u+w /tmp/del 2>/dev/null; " + prepare, check=True)
        result = remove(f"/tmp/del/{path}")
        left = sandbox.body.run("cd /tmp/del && find . | sort").stdout
        results.append((result, left))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*.py", ROOT),
        ("**/*.py", ROOT),
        ("src/*.py", ROOT),
        ("/*.py", ROOT),
        (".*", ROOT),
        ("*.{py,txt}", ROOT + "/src"),
        ("[ab].py", ROOT),
        ("[!a].py", ROOT + "/src"),
        ("?.txt", ROOT),
        ("*", ROOT + "/void"),
        ("b c.py", ROOT),
        ("../*.py", ROOT),
        ("*.py", ROOT + "/nothing"),
        ("*.py", ROOT + "/plain.txt"),
        ("*.py", ROOT + "/locked"),
    ],
)
def test_glob_is_that_of_the_reference(sandbox: PalisadeSandbox, pattern: str, path: str) -> None:
    own, expected = both(sandbox, "glob", pattern, path)
    assert own.error == expected.error
    assert paths(own) == paths(expected)
    assert (own.truncated, getattr(own, "truncation_reason", None)) == (
        expected.truncated,
        getattr(expected, "truncation_reason", None),
    )


@pytest.mark.parametrize(
    ("pattern", "search", "glob"),
    [
        ("needle", ROOT, None),
        ("needle", ROOT, "*.py"),
        ("needle", ROOT + "/src", "a.*"),
        ("needle", ROOT + "/src/a.py", None),
        ("needle", ROOT + "/.git", None),
        ('"needle"', ROOT, None),
        ("-e", ROOT + "/src", None),
        ("$(touch /tmp/hit)", ROOT, None),
        ("nowhere to be found", ROOT, None),
    ],
)
def test_grep_is_that_of_the_reference(sandbox: PalisadeSandbox, pattern: str, search: str, glob: str | None) -> None:
    own, expected = both(sandbox, "grep", pattern, search, glob)
    assert own.error == expected.error
    wanted = [match for match in found(expected) if IS_NEWEST or "/.git/" not in match[0].removeprefix(search)]
    assert found(own) == wanted
    assert not sandbox.body.files.exists("/tmp/hit")


def test_grep_works_without_gnu(sandbox: PalisadeSandbox) -> None:
    """A grep that has no option `-Z`, as busybox' has none, gives the same matches."""
    other = """#!/bin/sh
for word do case $word in --) break ;; -*Z*) echo "grep: invalid option -- 'Z'" >&2; exit 2 ;; esac; done
exec /usr/bin/grep "$@"
"""
    with_gnu = found(sandbox.grep("needle", ROOT))
    sandbox.body.files.write("/usr/local/bin/grep", other, user="root")
    sandbox.body.run("chmod 755 /usr/local/bin/grep", user="root", check=True)
    try:
        assert sandbox.body.run("grep -Z x /dev/null").exit_code == 2, "the other grep is the one that is found"
        assert found(sandbox.grep("needle", ROOT)) == with_gnu != []
    finally:
        sandbox.body.files.remove("/usr/local/bin/grep")


def test_grep_stops_at_its_limit_and_names_a_missing_path(sandbox: PalisadeSandbox) -> None:
    own = sandbox.grep("line", ROOT, max_count=5)
    assert own.matches is not None and len(own.matches) == 5 and getattr(own, "truncated", True)
    assert sandbox.grep("needle", ROOT + "/nothing").error == f"Path '{ROOT}/nothing': path_not_found"
    exactly = sandbox.grep("needle", ROOT + "/src/a.py", max_count=2)
    assert exactly.matches is not None and len(exactly.matches) == 2 and not getattr(exactly, "truncated", False)


def test_a_search_without_a_path_is_in_the_working_directory(sandbox: PalisadeSandbox) -> None:
    sandbox.body.files.write("here/x.note", "needle in the working directory")
    assert paths(sandbox.glob("*.note")) == ["/home/user/here/x.note"]
    assert paths(sandbox.grep("needle in the working")) == ["/home/user/here/x.note"]


def test_writing_replaces_creates_parents_and_has_the_users_rights(sandbox: PalisadeSandbox) -> None:
    for content in ("first", "second", ""):
        assert sandbox.write(f"{ROOT}/new/deep/f.txt", content).error is None
        assert sandbox.body.files.read_text(f"{ROOT}/new/deep/f.txt") == content
    assert sandbox.write("/etc/passwd", "x").error == "Failed to write file '/etc/passwd': permission_denied"
    assert sandbox.write("/etc/new/deep", "x").error == "Failed to write file '/etc/new/deep': permission_denied"
    assert sandbox.write(ROOT, "x").error == f"Failed to write file '{ROOT}': is_directory"
    assert sandbox.edit("/etc/passwd", "root", "x").error == "Error: Permission denied editing file '/etc/passwd'"
    assert sandbox.read("/etc/shadow").error == "File '/etc/shadow': permission_denied"
    assert "Permission denied" in str(sandbox.delete("/etc/passwd").error)
    assert sandbox.download_files(["/etc/shadow"])[0].error == "permission_denied"
    assert "root" in sandbox.execute("cat /etc/passwd").output


@pytest.mark.parametrize("path", ["relative", "/a\0b", "/" + "a/" * 2100 + "x", "/" + "n" * 300, "/tmp/\udcff"])
def test_bad_paths_are_errors_and_no_exceptions(sandbox: PalisadeSandbox, path: str) -> None:
    assert sandbox.upload_files([(path, b"x")])[0].error
    assert sandbox.download_files([path])[0].error
    if path != "relative":
        assert sandbox.read(path).error and sandbox.ls(path).error and sandbox.edit(path, "a", "b").error
        assert sandbox.delete(path).error and sandbox.glob("*", path).error and sandbox.grep("x", path).error


def test_commands_merge_their_outputs_and_end_at_their_timeout(sandbox: PalisadeSandbox) -> None:
    done = sandbox.execute("echo 1; echo 2 >&2; echo 3; exit 4")
    assert (done.output, done.exit_code, done.truncated) == ("1\n2\n3\n", 4, False)
    late = sandbox.execute("sleep 30", timeout=1)
    assert late.exit_code == 124 and late.output.startswith("Error: Command timed out after 1 seconds (custom timeout)")
    assert sandbox.execute("echo ${BASH_VERSION:+bash}").output == "bash\n"
    assert sandbox.execute("true", timeout=0).exit_code == 0


def test_long_output_has_its_beginning_and_its_end(sandbox: PalisadeSandbox) -> None:
    done = sandbox.execute("echo begin; head -c 11000000 /dev/zero | tr '\\0' x; echo; echo end")
    assert done.truncated and done.output.startswith("begin\n") and done.output.endswith("\nend\n")
    assert "bytes of the output are left out here" in done.output


def test_large_output_stays_in_the_body_if_there_is_a_place(sandbox: PalisadeSandbox) -> None:
    command = "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; exit 3"
    kept = sandbox.execute_with_offload(command, f"{ARTIFACTS_ROOT}/large_tool_results/c1", max_inline_bytes=1000)
    assert kept.offloaded and kept.response.exit_code == 3 and "lines truncated" in kept.response.output
    assert sandbox.body.files.read_text(f"{ARTIFACTS_ROOT}/large_tool_results/c1").count("\n") == 20000
    # A place that is not writable: the output is not lost.
    inline = sandbox.execute_with_offload(command, "/large_tool_results/c1", max_inline_bytes=1000)
    assert not inline.offloaded and inline.response.exit_code == 3 and inline.response.output.count("\n") == 20000
    again = asyncio.run(sandbox.aexecute_with_offload("echo x", "/large_tool_results/c2", max_inline_bytes=1000))
    assert again.response.output == "x\n"


def test_memories_are_shared_and_outlive_the_sandbox(server: tuple[str, str, Path]) -> None:
    client = Client(server[0], server[1])
    first = PalisadeSandbox.create(client=client)
    backend = make_backend(first, memories="memories-of-a-test")
    assert backend.write("/memories/notes/a.md", "remember needle").error is None
    assert backend.write("/tmp/own.md", "own").error is None
    assert [entry["path"] for entry in backend.ls("/memories/").entries or []] == ["/memories/notes"]
    first.remove()
    with PalisadeSandbox.create(client=client) as second:
        backend = make_backend(second, memories="memories-of-a-test")
        assert (backend.read("/memories/notes/a.md").file_data or {"content": ""})["content"] == "remember needle"
        assert [match["path"] for match in backend.grep("needle", "/memories/").matches or []] == [
            "/memories/notes/a.md"
        ]
        assert backend.read("/tmp/own.md").error
        assert backend.read("/memories/none.md").error == "File '/none.md': file_not_found"
        assert second.execute("ls /memories").exit_code != 0, "commands do not see them"
    Body.attach("memories-of-a-test", client=client).remove()


def test_threads_have_sandboxes_of_their_own_that_fork(server: tuple[str, str, Path]) -> None:
    client = Client(server[0], server[1])
    one = PalisadeSandbox.for_thread("thread/1", client=client)
    one.write("/tmp/f", "1")
    assert PalisadeSandbox.for_thread("thread/1", client=client).id == one.id
    other = one.fork("thread/2")
    assert PalisadeSandbox.for_thread("thread/2", client=client).id == other.id != one.id
    assert other.body.files.read_text("/tmp/f") == "1"
    snapshot = one.snapshot()
    with PalisadeSandbox.create(client=client, template=snapshot["id"]) as later:
        assert later.body.files.read_text("/tmp/f") == "1"
    one.remove()
    other.remove()
    client.call("DELETE", f"/v1/snapshots/{snapshot['id']}")

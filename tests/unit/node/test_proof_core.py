"""The proof of a core: where a pattern sends it, which file is ours, and what is made of it."""

from __future__ import annotations

import dataclasses
import os
import secrets
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nodeready.node.cores import core_pattern
from nodeready.node.proofs import core
from nodeready.node.proofs.core import CrashCanary, Mark
from nodeready.node.runtime import Supervisor
from nodeready.policy import Policy
from nodeready.subjects import wire
from nodeready.subjects.base import Unknown
from nodeready.subjects.proof import checks as proof_core
from nodeready.subjects.proof.facts import (
    Config,
    Core,
    Directory,
    Limit,
    Proved,
    SessionLimits,
    User,
)

WANT = Policy()
SYSTEMD = Policy(core_handler="systemd-coredump")
PIPE = "|/usr/lib/systemd/systemd-coredump %P %u %g %s %t %c %h"
VALUES = {
    "p": "42", "i": "42", "P": "42", "I": "42", "u": "2000", "g": "2000", "s": "11", "h": "n1",
    "d": "1", "e": "sh", "E": "/usr/bin/dash", "c": "18446744073709551615", "t": "1700000000",
}  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("/var/crash/core.%e.%P.%h.%t", "/var/crash/core.sh.42.n1.1700000000"),
        ("/c/%u/%g/%s-%d-%i-%I-%c", "/c/2000/2000/11-1-42-42-18446744073709551615"),
        ("core", "core"),
        ("/c/%E", "/c/!usr!bin!dash"),
        ("/c/100%%p", "/c/100%p"),
        ("/c/core%", "/c/core"),
        ("/c/%z%q%%", "/c/%"),
        ("/c/%C.%p", "/c/\0.42"),
        ("", ""),
    ],
)
def test_a_pattern_is_expanded_as_the_kernel_does(pattern: str, path: str) -> None:
    assert core_pattern.expand(pattern, VALUES) == path


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("core", "core.42"), ("core.%p", "core.42"), ("core.%P", "core.42.42"), ("%%p", "%p.42")],
)
def test_core_uses_pid_counts_where_there_is_no_p(pattern: str, name: str) -> None:
    assert core_pattern.expand(pattern, VALUES, uses_pid=True) == name


@pytest.mark.parametrize(
    ("name", "safe"), [("a/b", "a!b"), ("..", "!."), (".", "!"), ("", "!"), ("...", "...")]
)
def test_a_name_leads_into_no_other_directory(name: str, safe: str) -> None:
    assert core_pattern.expand("/c/%e", {"e": name}) == f"/c/{safe}"


@pytest.mark.parametrize(
    ("pattern", "program"),
    [
        (PIPE, "/usr/lib/systemd/systemd-coredump"),
        ("|bin/false", "/bin/false"),
        ("|", "|"),
        ("@/run/cores.socket", "@/run/cores.socket"),
        ("/var/crash/|x", ""),
        ("", ""),
    ],
)
def test_a_handler_is_named(pattern: str, program: str) -> None:
    assert core_pattern.handler_of(pattern) == program


def test_an_unknown_number_is_only_ever_a_number(tmp_path) -> None:
    for name in ("core.17.n1", "core.x.n1", "core.17.n1.old", "core..n1"):
        (tmp_path / name).write_text("")
    path = core_pattern.expand(f"{tmp_path}/core.%P.%h", {"h": "n1"})
    found = sorted(os.path.basename(one) for one in core_pattern.existing(path))
    assert found == ["core..n1", "core.17.n1"]
    assert core_pattern.printable(path) == f"{tmp_path}/core.*.n1"
    hostile = core_pattern.expand(f"{tmp_path}/core.%P.%h", {"h": "*"})
    assert list(core_pattern.existing(hostile)) == []


def elf(*ends: int, kind: bytes = b"\x02\x01") -> bytes:
    """The head of a core whose segments end there."""
    head = bytearray(64 + 56 * len(ends))
    head[:6] = b"\x7fELF" + kind
    struct.pack_into("<Q", head, 0x20, 64)
    struct.pack_into("<HH", head, 0x36, 56, len(ends))
    for number, end in enumerate(ends):
        struct.pack_into("<QQQQ", head, 64 + 56 * number + 8, end - 1, 0, 0, 1)
    return bytes(head)


@pytest.mark.parametrize(
    ("head", "size"),
    [
        (elf(4096, 471040, 8192), 471040),
        (elf(), 0),
        (elf(4096)[:100], None),
        (elf(4096, kind=b"\x07\x01"), None),
        (b"", None),
        (b"\x7fELF", None),
        (b"#!/bin/sh\n" * 20, None),
    ],
)
def test_a_cores_headers_tell_its_size(head: bytes, size: int | None) -> None:
    assert core.whole_bytes(head) == size


def test_only_our_own_file_is_taken_and_removed(tmp_path) -> None:
    mark = Mark("0123456789abcdef", os.geteuid(), time.time())
    ours, others = tmp_path / "core.1", tmp_path / "core.2"
    ours.write_bytes(elf(4096) + mark.word.encode())
    others.write_bytes(elf(4096) + b"somebody else's")
    (tmp_path / "link").symlink_to(ours)
    os.mkfifo(tmp_path / "pipe")

    assert core.find_core(str(others), mark, named=False) is None
    for name in ("link", "pipe", "nothing", "."):
        assert core.find_core(str(tmp_path / name), mark, named=True) is None
    assert core.find_core(str(ours), replace(mark, uid=mark.uid + 1), named=True) is None
    # An empty one with our number is ours, unless it was there before.
    others.write_bytes(b"")
    assert core.find_core(str(others), mark, named=True) is not None
    assert core.find_core(str(others), replace(mark, since=time.time() + 60), named=True) is None

    found = core.find_core(str(ours), mark, named=False)
    assert found is not None
    assert found.whole_bytes == 4096
    ours.rename(tmp_path / "moved")
    ours.write_text("another one by now")
    assert core.remove(found) == ""
    assert ours.read_text() == "another one by now"
    (tmp_path / "moved").rename(ours)
    assert core.remove(found) == ""
    assert not ours.exists()
    assert core.remove(found) == ""
    os.link(others, tmp_path / "second")
    assert core.find_core(str(others), mark, named=True) is None


PLACE = Directory("/var/crash", mode=0o1777, writable=True, free_bytes=2**30, free_files=1000)
GOOD = Core(
    pattern=WANT.core_pattern,
    dumped=True,
    expected="/var/crash/core.sh.42.n1.1700000000",
    path="/var/crash/core.sh.42.n1.1700000000",
    size_bytes=471040,
    whole_bytes=471040,
    directory=PLACE,
    gdb="/usr/bin/gdb",
    frames=3,
)
NONE = replace(GOOD, dumped=False, path="", size_bytes=0, whole_bytes=None, frames=0)
CUT = replace(GOOD, size_bytes=4002, frames=0)
PIPED = replace(NONE, dumped=True, directory=None, expected="")
FALSE = replace(PIPED, pattern="|/bin/false", handler="/bin/false")
KEPT = replace(
    PIPED,
    pattern=PIPE,
    handler="/usr/lib/systemd/systemd-coredump",
    path="/var/lib/systemd/coredump/core.sh.2000.b.42.1.zst",
    size_bytes=471040,
    whole_bytes=471040,
    frames=3,
)
LOST = replace(KEPT, path="", size_bytes=0, whole_bytes=None, frames=0)


def place(**how) -> Directory:
    return replace(PLACE, **how)


def judged(seen: Core | Unknown | None, want: Policy = WANT, **more):
    whole = Proved(User("ml", 2000, True, ""), core=seen, **more)
    return proof_core.core(whole, want), proof_core.backtrace(whole, want)


# what was seen, the words of the cause, who repairs it with what
CAUSES = [
    (replace(NONE, limit_bytes=0), "core limit of ml's session is 0 bytes", "--only limits"),
    (
        replace(CUT, limit_bytes=8192),
        "cut off at 4002 of 471040 bytes by the core limit of ml's session, 8192",
        "--only limits",
    ),
    (
        replace(NONE, directory=Directory("/var/crash", "No such file or directory")),
        "/var/crash: No such file or directory",
        "--only core_dumps",
    ),
    (
        replace(NONE, directory=place(mode=0o755, writable=False)),
        "/var/crash (mode 755) is not writable for ml",
        "--only core_dumps",
    ),
    (
        replace(NONE, directory=place(read_only=True, writable=False)),
        "read-only file system",
        "mount /var/crash read-write",
    ),
    (
        replace(NONE, directory=place(free_files=0)),
        "no space left on /var/crash",
        "remove old cores from /var/crash",
    ),
    (
        replace(CUT, directory=place(free_bytes=0)),
        "cut off at 4002 of 471040 bytes: no space left on /var/crash",
        "remove old cores from /var/crash",
    ),
    (
        replace(CUT, size_bytes=0, whole_bytes=None, directory=place(free_bytes=0)),
        "no space left on /var/crash",
        "remove old cores from /var/crash",
    ),
    (CUT, "a quota, or the limit of file sizes", "raise it"),
    (NONE, "neither limit nor directory forbids it", "dmesg"),
    (replace(NONE, dumpable=False), "/bin/sh is not readable for ml", "chmod 755"),
    (replace(NONE, dumped=None), "not written within 10 s to /var/crash", "look at /var/crash"),
    (
        replace(NONE, dumped=True),
        "none at /var/crash/core.sh.42.n1.1700000000, and the kernel says that it dumped",
        "container's host",
    ),
    (
        replace(GOOD, stray=True, path="/tmp/nodeready-x/core"),
        "in the working directory: the kernel's core_pattern is not the one shown",
        "container's host",
    ),
    (replace(NONE, pattern=""), "core_pattern is empty", "--only core_dumps"),
    (
        replace(NONE, skipped="/c/core is there, and a crash would replace it"),
        "/c/core is there, and a crash would replace it",
        "--only core_dumps",
    ),
    (
        replace(GOOD, pattern="core", path="/tmp/nodeready-x/core"),
        "in whatever directory the process works in: core_pattern is core",
        "--only core_dumps",
    ),
    (
        replace(GOOD, pattern="/scratch/%h.%p", path="/scratch/n1.42"),
        "in /scratch: core_pattern is /scratch/%h.%p",
        "--only core_dumps",
    ),
    (
        replace(FALSE, dumped=False, handler_there=False),
        "pipes to /bin/false, which is no program that can be run",
        "--only core_dumps",
    ),
    (replace(FALSE, dumped=False), "/bin/false, which does not start", "--only core_dumps"),
    (FALSE, "/bin/false, which took it and left no core", "--only core_dumps"),
    # A pipe is no matter of the limit, unless the handler makes it one.
    (replace(FALSE, limit_bytes=0), "/bin/false, which took it", "--only core_dumps"),
    (replace(LOST, limit_bytes=0), "systemd-coredump heeds the session's core limit, 0", "limits"),
    (
        replace(LOST, gdb_said="coredumpctl: No coredumps found."),
        "kept nothing (coredumpctl: No coredumps found.)",
        "--only core_dumps",
    ),
    (KEPT, "with /usr/lib/systemd/systemd-coredump: core_pattern is |", "--only core_dumps"),
]


@pytest.mark.parametrize(("seen", "words", "fix"), CAUSES, ids=[case[1] for case in CAUSES])
def test_one_cause_is_one_failure_that_names_it(seen: Core, words: str, fix: str) -> None:
    result, trace = judged(seen)
    assert result.status == "fail"
    assert words in result.actual
    assert fix in result.fix
    assert result.fixable == ("nodeready deploy" in result.fix)
    assert trace.status in ("na", "ok"), trace
    if seen is not KEPT and not seen.frames:
        assert (trace.status, trace.actual) == ("na", "no core: see proof.core")
    # The limits' check leaves to this one what this one tells.
    assert proof_core.limited(seen) == ("limits" in fix)


def test_a_core_where_the_policy_wants_it_is_ok() -> None:
    assert [one.status for one in judged(GOOD)] == ["ok", "ok"]
    assert [one.status for one in judged(replace(GOOD, limit_bytes=10**9))] == ["ok", "ok"]
    assert [one.status for one in judged(KEPT, SYSTEMD)] == ["ok", "ok"]
    # Pids and names are not among the words: thousands of nodes share one result.
    assert judged(GOOD)[0] == judged(replace(GOOD, path="/var/crash/core.sh.7.n2.1"))[0]


def test_what_gdb_cannot_read_is_one_failure_of_the_backtrace_alone() -> None:
    said = replace(GOOD, frames=0, gdb_said="not in executable format: file format not recognized")
    result, trace = judged(said)
    assert (result.status, trace.status) == ("ok", "fail")
    assert "file format not recognized" in trace.actual
    unread = replace(KEPT, whole_bytes=None, frames=0, gdb_said="coredumpctl: No such file")
    result, trace = judged(unread, SYSTEMD)
    assert (result.status, trace.status) == ("ok", "fail")
    result, trace = judged(replace(GOOD, gdb="", frames=0))
    assert (result.status, trace.status) == ("ok", "na")
    assert trace.actual == "gdb is not installed: see proof.gdb"


def test_what_is_left_is_told() -> None:
    result, _ = judged(replace(GOOD, left="/var/crash/core.1: Permission denied"))
    assert result.status == "warn"
    assert "/var/crash/core.1: Permission denied" in result.actual


def test_a_limit_of_the_policys_own_or_of_a_profile_is_no_deploys_to_raise() -> None:
    seen = replace(NONE, limit_bytes=0)
    result, _ = judged(seen, Policy(limit_core="0"))
    assert not result.fixable
    assert "in the policy" in result.fix
    open_, zero = Limit(-1, -1), Limit(0, -1)
    session = SessionLimits(zero, open_, open_, (open_, open_, open_), (), None)
    result, _ = judged(seen, limits=session)
    assert not result.fixable
    assert "profile" in result.fix


def test_without_a_crash_nothing_is_claimed() -> None:
    for seen, status in ((None, "na"), (Unknown("timed out"), "unknown")):
        assert [one.status for one in judged(seen)] == [status, status]
    lost = Proved(User("ml", 2000, True, "no session: x"), core=None)
    assert proof_core.core(lost, WANT).status == "na"


def ours(word: str) -> list[str]:
    return [name for name in os.listdir("/tmp") if word in name]


def test_a_crash_here_is_told_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own kernel, whatever its core_pattern."""
    monkeypatch.setattr(secrets, "token_hex", lambda size: "feedfacecafebeef")
    config = Config("nonce", "nodeready:test-core")
    with Supervisor(config.tag, 60) as supervisor:
        seen = core.prove(supervisor, config)
    assert seen.left == ""
    assert ours("feedfacecafebeef") == []
    assert wire.decode(Core, dataclasses.asdict(seen)) == seen
    if seen.path:
        assert seen.dumped
        assert not os.path.exists(seen.path)
    else:
        assert judged(seen)[0].status == "fail"


def test_an_end_in_the_middle_leaves_nothing() -> None:
    with Supervisor("nodeready:test-core", 60) as supervisor:
        canary = CrashCanary(supervisor, "core")
        supervisor.at_end(canary.tidy)
        canary.begin()
        Path(canary.home, "core.partial").write_text("cut off")
        assert ours(canary.mark.word)
        pid = canary.pid
    assert ours(canary.mark.word) == []
    assert not Path(f"/proc/{pid}").exists()

"""The proof of a core: where a pattern sends it, which file is ours, and how it is judged."""

import dataclasses
import os
import secrets
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nodeready.agent.cores import core_pattern
from nodeready.agent.proofs import core
from nodeready.agent.proofs.core import CrashCanary, Mark
from nodeready.agent.runtime import ProcessSupervisor
from nodeready.core import wire
from nodeready.core.base import Unknown
from nodeready.core.policy import Policy
from nodeready.subjects.proof import debugging
from nodeready.subjects.proof.facts import (
    CoreDirectory,
    Limit,
    ProofConfig,
    Proved,
    ProvedCore,
    SessionLimits,
    User,
)
from tests.cases import cases, read_table, with_table

WANT = Policy()
PIPE = "|/usr/lib/systemd/systemd-coredump %P %u %g %s %t %c %h"
VALUES = read_table(__file__, "VALUES")
EXPANDERS = {
    "expand": lambda pattern: core_pattern.expand(pattern, VALUES),
    "core_uses_pid": lambda pattern: core_pattern.expand(pattern, VALUES, uses_pid=True),
    # A name leads into no other directory.
    "names": lambda name: core_pattern.expand("/c/%e", {"e": name}),
    "handlers": core_pattern.handler_of,
}


@pytest.mark.parametrize("case", cases(__file__, "cases/core_patterns.json"))
def test_a_pattern_is_read_as_the_kernel_does(case):
    """The name of a case is one of EXPANDERS."""
    for pattern, expected in case["patterns"].items():
        assert EXPANDERS[case["name"]](pattern) == expected, pattern


def test_an_unknown_number_is_only_ever_a_number(tmp_path):
    for name in ("core.17.n1", "core.x.n1", "core.17.n1.old", "core..n1"):
        (tmp_path / name).touch()
    for host, names in (("n1", ["core..n1", "core.17.n1"]), ("*", [])):
        path = core_pattern.expand(f"{tmp_path}/core.%P.%h", {"h": host})
        assert sorted(core_pattern.existing_files(path)) == [
            f"{tmp_path}/{name}" for name in names
        ]
        assert core_pattern.printable(path) == f"{tmp_path}/core.*.{host}"


def elf(*ends: int, kind: bytes = b"\x02\x01") -> bytes:
    """The head of a core whose segments end there."""
    head = bytearray(64 + 56 * len(ends))
    head[:6] = b"\x7fELF" + kind
    struct.pack_into("<Q", head, 0x20, 64)
    struct.pack_into("<HH", head, 0x36, 56, len(ends))
    for number, end in enumerate(ends):
        struct.pack_into("<QQQQ", head, 64 + 56 * number + 8, end - 1, 0, 0, 1)
    return bytes(head)


@pytest.mark.parametrize(("head", "size"), [
    (elf(4096, 471040, 8192), 471040),
    (elf(), 0),
    (elf(4096)[:100], None),
    (elf(4096, kind=b"\x07\x01"), None),
    (b"\x7fELF", None),
    (b"#!/bin/sh\n" * 20, None),
])  # fmt: skip
def test_the_headers_of_a_core_tell_its_size(head, size):
    assert core.whole_bytes(head) == size


@pytest.mark.parametrize("since_s", [-1e9, -7200, 0, 7200, 1e9])
def test_a_clock_that_is_set_in_the_middle_makes_no_million_names(monkeypatch, since_s):
    """The names are those of the seconds after the start and before the end, by either clock."""
    asked = []
    monkeypatch.setattr(core_pattern, "existing_files", lambda path: asked.append(path) or [])
    with ProcessSupervisor("nodeready:x", 9) as supervisor:
        canary = CrashCanary(supervisor, "/x/core.%t")
        canary._values = {"p": "7"}
        canary.mark = replace(canary.mark, since=time.time() + since_s)
        assert canary.cores() == []
    assert len(asked) < 20
    for second in (time.time(), canary.mark.since):
        assert f"/x/core.{int(second)}" in asked


def test_only_our_own_file_is_taken_and_removed(tmp_path):
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

    file = core.find_core(str(ours), mark, named=False)
    assert file is not None
    assert file.whole_bytes == 4096
    ours.rename(tmp_path / "moved")
    ours.write_text("another one by now")
    assert core.remove(file) == ""
    assert ours.read_text() == "another one by now"
    (tmp_path / "moved").rename(ours)
    assert core.remove(file) == ""
    assert not ours.exists()
    assert core.remove(file) == ""
    os.link(others, tmp_path / "second")
    assert core.find_core(str(others), mark, named=True) is None


PLACE = CoreDirectory("/var/crash", mode=0o1777, writable=True, free_bytes=2**30, free_files=1000)
PATH = "/var/crash/core.sh.42.n1.1700000000"
WHOLE = {"path": PATH, "size_bytes": 471040, "whole_bytes": 471040, "frames": 3}
GONE = {"path": "", "size_bytes": 0, "whole_bytes": None, "frames": 0}
GOOD = ProvedCore(
    pattern=WANT.core_pattern, dumped=True, expected=PATH, directory=PLACE, gdb="/usr/bin/gdb",
    **WHOLE,
)  # fmt: skip
NONE = replace(GOOD, dumped=False, **GONE)
PIPED = replace(NONE, dumped=True, directory=None, expected="")
HANDLER = {"pattern": PIPE, "handler": "/usr/lib/systemd/systemd-coredump"}
LOST = replace(PIPED, **HANDLER)
STORED = "/var/lib/systemd/coredump/core.sh.2000.b.42.1.zst"
KEPT = replace(LOST, **{**WHOLE, "path": STORED})
CORES = {
    **{"GOOD": GOOD, "NONE": NONE, "LOST": LOST, "KEPT": KEPT},
    "CUT": replace(GOOD, size_bytes=4002, frames=0),
    "FALSE": replace(PIPED, pattern="|/bin/false", handler="/bin/false"),
    **{"not asked": None, "late": Unknown("timed out")},
}
POLICIES = {"KEPT": Policy(core_handler="systemd-coredump")}


def judged(seen: ProvedCore | Unknown | None, want: Policy = WANT, **more):
    whole = Proved(User("ml", 2000, True, ""), core=seen, **more)
    return debugging.core(whole, want), debugging.backtrace(whole, want)


@pytest.mark.parametrize("case", cases(__file__, "cases/core_causes.json"))
def test_each_cause_is_one_failure_that_names_it(case):
    """A case is one of CORES with other fields; its name, or its words, are in the result."""
    changes = {key: case[key] for key in case.keys() - {"name", "words", "fix", "core"}}
    if "directory" in changes:
        changes["directory"] = replace(PLACE, **changes["directory"])
    seen = replace(CORES[case["core"]], **changes)
    result, trace = judged(seen)
    assert result.status == "fail"
    assert case.get("words", case["name"]) in result.actual
    assert case["fix"] in result.fix
    assert result.fixable == ("nodeready deploy" in result.fix)
    assert trace.status in ("na", "ok"), trace
    if not seen.frames:
        assert (trace.status, trace.actual) == ("na", "no core: see proof.core")
    # The limits' check leaves to this one what this one tells.
    assert seen.is_cut_by_limit == ("limits" in case["fix"])


@with_table("core, changes, expected, words")
def test_a_core_and_its_backtrace_are_judged_apart(core, changes, expected, words):
    seen = CORES[core]
    results = judged(replace(seen, **changes) if changes else seen, POLICIES.get(core, WANT))
    assert tuple(result.status for result in results) == expected
    assert any(words in result.actual for result in results)


def test_thousands_of_nodes_share_one_result():
    assert judged(GOOD)[0] == judged(replace(GOOD, path="/var/crash/core.sh.7.n2.1"))[0]
    lost = Proved(User("ml", 2000, True, "no session: x"), core=None)
    assert debugging.core(lost, WANT).status == "na"


def test_a_limit_of_the_policys_own_or_of_a_profile_is_no_deploys_to_raise():
    seen = replace(NONE, limit_bytes=0)
    open_, zero = Limit(-1, -1), Limit(0, -1)
    limits = SessionLimits(zero, open_, open_, (open_, open_, open_), (), None)
    for word, (result, _) in (
        ("in the policy", judged(seen, Policy(limit_core="0"))),
        ("profile", judged(seen, limits=limits)),
    ):
        assert (result.fixable, word in result.fix) == (False, True)


def test_a_crash_here_leaves_nothing(monkeypatch):
    """This machine's own kernel, whatever its core_pattern."""
    word = secrets.token_hex(8)
    monkeypatch.setattr(secrets, "token_hex", lambda size: word)
    config = ProofConfig("nonce", "nodeready:test-core")
    with ProcessSupervisor(config.tag, 60) as supervisor:
        seen = core.prove(supervisor, config)
    assert (seen.leftover, list(Path("/tmp").glob(f"*{word}*"))) == ("", [])
    assert wire.decode(ProvedCore, dataclasses.asdict(seen)) == seen
    assert seen.dumped if seen.path else judged(seen)[0].status == "fail"
    assert not os.path.exists(seen.path)


def test_an_end_in_the_middle_leaves_nothing():
    with ProcessSupervisor("nodeready:test-core", 60) as supervisor:
        canary = CrashCanary(supervisor, "core")
        supervisor.at_end(canary.clean_up)
        canary.begin()
        Path(canary.home, "core.partial").write_text("cut off")
        assert canary.mark.word in canary.home
    assert not list(Path("/tmp").glob(f"*{canary.mark.word}*"))
    assert not Path(f"/proc/{canary.pid}").exists()

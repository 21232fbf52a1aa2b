"""Every parser of text takes what its grammar is made of, in any order and in any amount."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyinfra.api.exceptions import InventoryError

from nodeready.healthcheck import policy_file
from nodeready.inventory import hostfile, nodeset, slurm
from nodeready.node.cores import core_pattern
from nodeready.node.stacks import py_spy
from nodeready.policy import Policy
from nodeready.policy.load import PolicyError, make_policy
from nodeready.subjects import snapshot
from nodeready.subjects.base import Output
from nodeready.subjects.ssh_client.checks import cause_of
from nodeready.text import sanitise
from nodeready.triage.cores import document as cores
from nodeready.triage.logs import document as logs
from nodeready.triage.stacks import archive, trace
from tests.builders.hostile import PIECES, RECORDED, encoded, mutated, recorded
from tests.unit.fuzz.alone import well

_DUMPS = Path(__file__).parent.parent / "triage" / "dumps"
_NAMES = logs.node_names("host", "host.example.org")


def dump(text: str) -> None:
    for one in archive.parse_dump(text, "gpu1"):
        trace.read(one, "gpu1")


def backtrace(text: str) -> None:
    for row in (text, f"{cores.CRASHED}\n#0 {text}\n#1 a ({text}\n#2 b at {text}:1\n"):
        found = cores.parse(f"{row}\n{cores.EVERY}\nThread 1 (LWP 1)\n{text}")
        cores.crash_key(found.crashed)
        cores.headline(found.crashed)


def words(text: str) -> None:
    lines = [f"a{text}"[:8192], f"{text}b"[-8192:]]
    logs.normalised(lines, _NAMES, logs.ranks_of(f"{text[:8192]}.7.out"))


def safe(text: str) -> None:
    assert sanitise(text, 1 << 30).isprintable()


def folded(text: str) -> None:
    names = [name[:300] for name in text.split(",")[:500]]
    sorted(names, key=nodeset.natural)
    assert nodeset.folded(names).isprintable()


def gate_policy(text: str) -> None:
    make_policy(policy_file._settings(text.encode("utf-8", "surrogateescape"), "/etc/p.json"))


def job(text: str) -> None:
    slurm.job_nodes(text[:100_000], "/nonexistent", 1)


def short(problem: Exception) -> None:
    assert len(str(problem)) < 2000, problem


def some(number: int) -> tuple[str, ...]:
    """A third of the pieces, another one for each number; all, when more than in CI is tried."""
    return PIECES if "NODEREADY_FUZZ" in os.environ else PIECES[number % 3 :: 3]


#: What reads text, texts to mutate, and how it may refuse.
Parser = tuple[Callable[[str], object], tuple[str, ...], tuple[type[Exception], ...]]
PARSERS: dict[str, Parser] = {
    "py-spy's text": (
        dump,
        tuple(path.read_text() for path in sorted(_DUMPS.iterdir())),
        (trace.TraceError,),
    ),
    "gdb's text": (backtrace, ("#0 0x7f12 in f<a> (x=1) at a.c:3\n#1 g () from /b.so\n",), ()),
    "log lines": (words, ("2026-01-01 12:00:00 [rank7] step 3 [05:23<06:33, 1it/s] pid 1",), ()),
    "a text": (safe, ("a\x1b[31m\u202eb",), ()),
    "node names": (folded, ("gpu001,gpu002,login1,10.0.0.1,fe80::1",), ()),
    "a node set": (nodeset.expand, ("gpu[001-064,070],login1,@local",), (nodeset.NodeSetError,)),
    "a hostfile": (
        lambda text: hostfile.parse(text, "f"),
        ("gpu001 slots=8\ngpu002:8\n# x\ngpu[3-4] max_slots=9\n",),
        (InventoryError,),
    ),
    "sinfo": (slurm._partitions, ("gpu001 main\ngpu002 main\n",), (InventoryError,)),
    "a job's nodes": (job, ("gpu[001-003],login1",), (InventoryError,)),
    "ssh's words": (
        lambda text: cause_of(text[:65536]),
        ("Host key verification failed.\nOffending ED25519 key in /a:3\n",),
        (),
    ),
    "py-spy's JSON": (
        lambda text: py_spy.parse(text, 7),
        ('[{"thread_name": "MainThread", "frames": [{"name": "f", "line": 1}]}]',),
        (),
    ),
    "a core_pattern": (
        lambda text: core_pattern.Place(text[:4096]).shown,
        ("/var/crash/core.%e.%p.%h.%t", "|/usr/bin/x %P"),
        (),
    ),
    "the gate's policy": (
        gate_policy,
        ('{"port_range": "29500-29510", "ptrace_scope": 0, "waivers": {"limits.core": "x"}}',),
        (PolicyError,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
def test_mutated_text_is_read_or_refused_in_one_line(name: str) -> None:
    read, texts, refusals = PARSERS[name]

    def tried(text: str) -> None:
        try:
            read(text)
        except refusals as problem:
            short(problem)

    @given(mutated(*texts))
    def near(text: str) -> None:
        tried(text)

    @given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
    def far(text: str) -> None:
        tried(text)

    well(lambda: (near(), far()), 600)


#: Characters of one piece again and again: what takes the square of it takes minutes.
LONG = 1 << 17


@pytest.mark.parametrize("name", PARSERS)
def test_a_piece_without_end_takes_no_more_than_it_is_long(name: str) -> None:
    read, texts, refusals = PARSERS[name]

    def all_pieces() -> None:
        for piece in some([*PARSERS].index(name)):
            for text in (piece * (LONG // len(piece)), texts[0][:9] + piece * 9999 + texts[0][9:]):
                try:
                    read(text)
                except refusals as problem:
                    short(problem)

    well(all_pieces)


POLICY = Policy()
PROBES = {probe.subject: probe for probe in snapshot.probes()}


@pytest.mark.parametrize("subject", PROBES)
def test_a_section_without_end_takes_no_more_than_it_is_long(subject: str) -> None:
    """The first line of each section, and a line in the middle, with a piece that does not end."""
    probe, one, other = PROBES[subject], recorded("h100"), recorded("mi300x")
    whole = {s.name: one.get(s.name) or other.get(s.name, "") for s in probe.sections}
    outputs = {name: Output(encoded(text), 0, nonce=RECORDED) for name, text in whole.items()}

    def all_pieces() -> None:
        for number, (section, text) in enumerate(whole.items()):
            lines = text.split("\n")
            middle = len(lines) // 2
            head, tail = "\n".join(lines[:middle]), "\n".join(lines[middle:])
            at = tail.find("=") + 1 or len(lines[middle]) // 2
            for piece in some(number):
                long = piece * (LONG // len(piece))
                spoilt = Output(encoded(f"{head}\n{tail[:at]}{long}{tail[at:]}"), 0, nonce=RECORDED)
                seen = snapshot._observe(probe, {**outputs, section: spoilt}, POLICY)
                snapshot.judge(snapshot.Snapshot({subject: seen}), POLICY)

    well(all_pieces)

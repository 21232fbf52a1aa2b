"""Every parser of text takes what its grammar is made of, in any order and in any amount."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyinfra.api.exceptions import InventoryError

from nodeready.audit import run as history
from nodeready.healthcheck import drain, gate, here
from nodeready.inventory import hostfile, nodeset, slurm
from nodeready.node import tail
from nodeready.node.cores import core_pattern
from nodeready.node.stacks import py_spy
from nodeready.node.stacks.processes import read_and_written
from nodeready.node.witnesses import flight_recorder, nccl_ras
from nodeready.node.witnesses import logs as watchdog
from nodeready.policy import Policy
from nodeready.policy.policy import PolicyError, make_policy
from nodeready.ready.job_env import read_installed
from nodeready.subjects import snapshot, sysctl, wire
from nodeready.subjects.access import ACCESS, parse_access
from nodeready.subjects.base import Output, ProbeError, decoded, file_lines, kernel_arguments
from nodeready.subjects.debug_tools.facts import parse_versions
from nodeready.subjects.gpus import amd
from nodeready.subjects.host import facts as host_facts
from nodeready.subjects.host import mounts, processes
from nodeready.subjects.iommu import facts as iommu
from nodeready.subjects.limits import facts as limits
from nodeready.subjects.ports import facts as ports
from nodeready.subjects.ports import firewall, nft
from nodeready.subjects.ssh_client import facts as ssh_client
from nodeready.subjects.ssh_client import known_hosts
from nodeready.subjects.ssh_client.checks import cause_of
from nodeready.text import sanitise
from nodeready.transport.dialogue import Dialogue
from nodeready.transport.srun import StepOutput
from nodeready.triage import cores, logs
from nodeready.triage.stacks import archive, trace
from tests.builders.hostile import PIECES, RECORDED, encoded, mutated, recorded
from tests.builders.ras_port import member, missing, report
from tests.paths import PACKAGE, ROOT
from tests.unit.fuzz.alone import DO

_RULES = ROOT / "tests" / "unit" / "subjects" / "data" / "ports"
_DUMPS = Path(__file__).parent.parent / "triage" / "dumps"
_RECORDS = ROOT / "tests/unit/node/data/flight_recorder"
POLICY = Policy()
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
    make_policy(here._settings(text.encode("utf-8", "surrogateescape"), "/etc/p.json"))


def raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def step(text: str) -> None:
    """What srun prints, in pieces, and what it says of itself."""
    output, heard = StepOutput("N", ("gpu1", "gpu2"), lambda name, answer: None), raw(text)
    for at in range(0, len(heard), 4096):
        output.add(heard[at : at + 4096])
    output.add_error(heard)
    assert output.unlaunched.keys() or output.last() is not None
    assert output.has_no_overlap in (True, False)
    assert output.has_no_gres in (True, False)


class Said:
    """A command that prints this, and ends."""

    def __init__(self, text: str) -> None:
        self.left = raw(text)

    def read(self, limit_s: float) -> bytes:
        piece, self.left = self.left[:65536], self.left[65536:]
        return piece

    def write(self, data: bytes, limit_s: float) -> None:
        return

    def close(self) -> None:
        return


def spoken(text: str) -> None:
    dialogue = Dialogue(lambda: Said(text), "", "N ", sudo=True)
    while dialogue.read_line(1) is not None:
        pass
    short(Exception(dialogue.error))


def mounted(text: str) -> None:
    lines = list(file_lines(text))
    said = mounts.answers(text)
    mounts.fold(lines, said, POLICY)
    mounts.parse_fstab(lines, lines)


def limited(text: str) -> None:
    lines = list(file_lines(text))
    limits.parse_pam_limits(lines)
    limits.parse_unit_limits("slurmd", "/etc/systemd/system/slurmd.service", lines)


def booted(text: str) -> None:
    words = kernel_arguments(text)
    iommu.expand(text, {"a": "1"})
    assert all(isinstance(iommu.option(word), str) for word in words)


def next_boot(text: str) -> None:
    for key in ("kernel.core_pattern", "kernel.yama.ptrace_scope"):
        sysctl.boot_value(sysctl.parse(Output(text, 0)), key)


def known(text: str) -> None:
    for line in text.splitlines():
        known_hosts.parse_line(line)
    ssh_client.parse_known_hosts(raw(text))
    known_hosts.read_block(text, "0" * 64)


def packed(text: str) -> None:
    decoded(text)
    wire.unpack(text, 1 << 20)


def amd_tools(text: str) -> None:
    more = amd.parse_kfd(text)
    for read in (lambda: amd.parse_rocm_smi(text, more),
                 lambda: amd.parse_amd_smi(text, text, text, more)):  # fmt: skip
        try:
            list(read())
        except ProbeError as problem:
            short(problem)


def job(text: str) -> None:
    slurm.job_nodes(text[:100_000], "/nonexistent", 1)


def short(problem: Exception) -> None:
    assert len(str(problem)) < 2000, problem


def some(number: int, effort: str) -> tuple[str, ...]:
    """All pieces; in short, some of them, others for each number."""
    return PIECES if effort == "long" else PIECES[number % 9 :: 9]


#: What reads text, texts to mutate, and how it may refuse.
Parser = tuple[Callable[[str], object], tuple[str, ...], tuple[type[Exception], ...]]
PARSERS: dict[str, Parser] = {
    "NCCL's report": (
        nccl_ras.read_json,
        tuple(
            report([member(0, 7), member(1, 8)], [missing(2, 9)], comma=comma)
            for comma in (True, False)
        ),
        (),
    ),
    "NCCL's report in words": (
        nccl_ras.read_text,
        (
            "NCCL version 2.27.3 compiled with CUDA 12.9\n"
            "    0         1         2         4         8         8   RUNNING  MISMATCH\n"
            "#0-0 (9723b2ac2b5f5a15) MISMATCH\n"
            "  Communicator ranks have different AllReduce operation counts\n"
            "  6 ranks have launched up to operation 41\n"
            "  2 ranks have launched up to operation 40\n"
            "  Rank 3 -- GPU 3 managed by process 4714 on node 10.0.0.1\n",
        ),
        (),
    ),
    "an installed torch": (
        lambda text: read_installed(text, "nonce"),
        ("nonce version 2.15.0+cu132\nnonce cuda 13.2\n", "nonce why no torch\n"),
        (),
    ),
    "py-spy's text": (
        dump,
        tuple(path.read_text() for path in sorted(_DUMPS.iterdir())),
        (trace.TraceError,),
    ),
    "gdb's text": (backtrace, ("#0 0x7f12 in f<a> (x=1) at a.c:3\n#1 g () from /b.so\n",), ()),
    "a recorder's dump": (
        lambda text: flight_recorder.parse(text.encode("latin-1", "replace")),
        tuple(path.read_bytes().decode("latin-1") for path in sorted(_RECORDS.glob("late*"))),
        (flight_recorder.NoDumpError,),
    ),
    "a watchdog's lines": (
        lambda text: watchdog.reports(text.splitlines()),
        (
            "[rank1]:[E1 P.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 1] Exception (either an "
            "error or timeout) detected by watchdog at work: 7, last enqueued NCCL work: 9, last "
            "completed NCCL work: 6.\n[Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier\n"
            "[0, 1] finished collective #4, but didn't join collective #5\n",
        ),
        (),
    ),
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
    "what Slurm knows of a node": (
        drain.parse,
        ("NodeName=gpu1 Arch=x86_64\n   State=DOWN*+DRAIN ThreadsPerCore=1\n"
         "   Reason=nodeready: gpus.ecc [root@2026-01-01T00:00:00]\n",),
        (drain.DrainError,),
    ),
    "a verdict that was kept": (
        lambda text: gate.parse(raw(text)),
        ('{"schema": "nodeready.verdict/1", "time": 1.6e9, "boot_id": "x", "policy_digest": "y", '
         '"go": false, "reasons": ["a: b"]}',),
        (),
    ),
    "a look that was kept": (
        history.read_counted,
        ('{"boot_id": "x", "taken": {"nics": [1.6e9, {"eth0.rx_errors": 5}]}}',),
        (),
    ),
    "mountinfo": (tail.parse_mounts, ("36 35 98:0 /a /b rw,noatime - ext3 /dev/root rw\n",), ()),
    "nft's rules": (nft.parse, ((_RULES / "firewalld.nft").read_text(),), (ValueError,)),
    "iptables' rules": (
        lambda text: firewall.parse_iptables_rules(text, 4),
        ((_RULES / "ufw.save").read_text(),),
        (ValueError,),
    ),
    "ipset's sets": (
        firewall.parse_ipsets,
        ("create a hash:net family inet\nadd a 10.0.0.0/8\nadd a 10.1.0.0/16 nomatch\n"
         "create b hash:ip,port\nadd b 10.0.0.1,tcp:22 timeout 5\n",),
        (),
    ),
    "modes of files": (
        lambda text: parse_access({ACCESS.name: Output(text, 0)}),
        ("at=81a4 0 0 12 /etc/hosts\nlink=/etc/mtab /proc/mounts\n",),
        (ProbeError,),
    ),
    "known_hosts": (known, ("gpu1,10.0.0.1 ssh-ed25519 AAAAC3Nz\n@revoked * ssh-rsa A\n",),
                    (ValueError,)),
    "a node's JSON": (wire.load_json, ('{"a": [1, "x", {"b": null}]}',), (wire.DecodeError,)),
    "a packed text": (packed, ("eJwrSS0uAQAEXQHB",), (ProbeError,)),
    "the time services": (host_facts.parse_clock, (recorded("h100")["host_slow"][-900:],), ()),
    "reads and writes": (
        lambda text: read_and_written(text, "syscr", "syscw"),
        ("rchar: 9000\nwchar: 800\nsyscr: 7\nsyscw: 2\nread_bytes: 4096\n",),
        (),
    ),
    "processes": (processes.parse, (recorded("h100")["host_slow"][-900:],), ()),
    "mounts and fstab": (
        mounted,
        (recorded("h100")["host_slow"][-400:] + recorded("h100")["host"][-900:],),
        (),
    ),
    "packages": (parse_versions, (recorded("h100")["host_slow"][:900],), ()),
    "a kernel's command line": (booted, ("root=/dev/sda1 iommu=pt,nofullflush a=\"b c\" $a",), ()),
    "limits.conf and units": (
        limited,
        ("/etc/security/limits.conf:1:* - core unlimited\n"
         "/etc/systemd/system/slurmd.service:2:LimitCORE=infinity\n",),
        (),
    ),
    "sysctl.d": (
        next_boot,
        ("file=/etc/sysctl.d/a.conf\nreader=systemd\n/etc/sysctl.d/a.conf:1:-kernel.* = 1\n",),
        (),
    ),
    "AMD's tools": (amd_tools, (recorded("mi300x")["amd"][:3000],), ()),
    "ranges of ports": (
        lambda text: (ports.parse_range(text), ports.parse_ranges(text)),
        ("32768 60999", "29500-29510,30000"),
        (),
    ),
    "srun's output": (step, ("0: N at gpu1\n0: a\n1: N at gpu2\n0: N end\n",), ()),
    "a dialogue": (spoken, ("motd\nN 1\nsudo: a password is required\nN 2\n",), ()),
    "the gate's policy": (
        gate_policy,
        ('{"port_range": "29500-29510", "ptrace_scope": 0, "waivers": {"limits.core": "x"}}',),
        (PolicyError,),
    ),
}  # fmt: skip


def tried(name: str, text: str) -> None:
    read, _, refusals = PARSERS[name]
    try:
        read(text)
    except refusals as problem:
        short(problem)


@pytest.mark.parametrize("name", PARSERS)
def test_mutated_text_is_read_or_refused_in_one_line(name, effort):
    pieces = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)

    @given(st.one_of(mutated(*PARSERS[name][1]), pieces))
    def each(text: str) -> None:
        tried(name, text)

    DO[effort](each, 600)


#: Characters of one piece again and again: what takes the square of it takes minutes.
LONG = 1 << 17


@pytest.mark.parametrize("name", PARSERS)
def test_a_piece_without_end_takes_no_more_than_it_is_long(name, effort):
    text = PARSERS[name][1][0]

    def all_pieces() -> None:
        for piece in some([*PARSERS].index(name), effort):
            tried(name, piece * (LONG // len(piece)))
            tried(name, text[:9] + piece * 9999 + text[9:])

    DO[effort](all_pieces)


PROBES = {probe.subject: probe for probe in snapshot.probes()}


@pytest.mark.parametrize("subject", PROBES)
def test_a_section_without_end_takes_no_more_than_it_is_long(subject, effort):
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
            for piece in some(number, effort):
                long = piece * (LONG // len(piece))
                spoilt = Output(
                    encoded(f"{head}\n{tail[:at]}{long}{tail[at:]}"), 0, nonce=RECORDED
                )
                seen = snapshot._observe(probe, {**outputs, section: spoilt}, POLICY)
                snapshot.judge(snapshot.Snapshot({subject: seen}), POLICY)

    DO[effort](all_pieces)


# --- No parser is left out.

#: What takes a text, bytes or lines that were written elsewhere, by its name and first parameter.
_PARSER = re.compile(
    r"_?(parse|read|load_json|unpack|expand|answers|cause_of|decoded|tokens)(_|$)"
)
_TAKES = ("str", "str | bytes", "bytes", "Output", "Iterable[Line]", "Iterable[str]",
          "Mapping[str, Output]")  # fmt: skip
#: Where else a parser is fuzzed, or why nobody else writes its text -> its names.
ELSEWHERE = {
    "test_answers.py": "node/stacks/program.py:unpack subjects/proof/facts.py:read "
    "subjects/snapshot.py:_unpack subjects/snapshot.py:parse_answer subjects/snapshot.py:read "
    "triage/logs.py:read triage/stacks/trace.py:parse",
    "tests/unit/node": "node/cores/core_file.py:parse node/smoke/orders.py:read",
    "a file of /proc": "node/cores/gcore.py:_read node/proofs/mesh.py:_read "
    "node/witnesses/nccl_ras.py:_read node/stacks/processes.py:_read",
    "a path of ours": "audit/peers.py:_read healthcheck/here.py:_read healthcheck/gate.py:read "
    "transport/connection.py:answers",
    "a text of ours or of the user": "node/cores/core_pattern.py:expand "
    "subjects/base.py:_parse_own_files transport/ssh_config.py:expand",
    "values that were decoded": "ready/localize.py:_answers",
}


def parsers() -> set[str]:
    """Every function of the package that reads foreign text: "subjects/base.py:decoded"."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE).as_posix()
        if where.startswith(("lab/", "cli/", "reports/")):
            continue
        for function in ast.parse(path.read_text()).body:
            if not isinstance(function, ast.FunctionDef) or not _PARSER.match(function.name):
                continue
            first = function.args.args[0].annotation if function.args.args else None
            if first is not None and ast.unparse(first) in _TAKES:
                names.add(f"{where}:{function.name}")
    return names


def forget() -> None:
    """What was read before is read again."""
    for name, module in list(sys.modules.items()):
        if name.startswith("nodeready."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    for facts in ("gpus.nvidia", "nics.facts", "rdma.facts"):
        known = sys.modules[f"nodeready.subjects.{facts}"]._KNOWN
        getattr(known, "_known", known).clear()


def test_every_parser_is_fuzzed():
    """ELSEWHERE has the parsers that the tables above do not reach."""
    forget()
    reached: set[str] = set()

    def called(frame: FrameType, event: str, given: object) -> None:
        if event == "call" and "/nodeready/" in frame.f_code.co_filename:
            path = frame.f_code.co_filename.rpartition("/nodeready/")[2]
            reached.add(f"{path}:{frame.f_code.co_name}")

    sys.setprofile(called)
    try:
        for read, texts, refusals in PARSERS.values():
            for text in texts:
                try:
                    read(text)
                except refusals:
                    continue
        for profile in ("h100", "mi300x"):
            for probe in PROBES.values():
                whole = {s.name: recorded(profile).get(s.name, "") for s in probe.sections}
                outputs = {n: Output(encoded(t), 0, nonce=RECORDED) for n, t in whole.items()}
                snapshot._observe(probe, outputs, POLICY)
    finally:
        sys.setprofile(None)
    every = parsers()
    assert len(every) > 40
    elsewhere = {name for names in ELSEWHERE.values() for name in names.split()}
    assert every - reached - elsewhere == set()
    assert elsewhere - every == set()

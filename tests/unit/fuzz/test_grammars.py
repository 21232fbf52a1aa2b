"""Every parser of text takes what its grammar is made of, in any order and in any amount."""

import ast
import json
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyinfra.api.exceptions import InventoryError

from nodeready.agent import leftovers, log_variables, proc
from nodeready.agent.cores import core_pattern
from nodeready.agent.failures import log_file
from nodeready.agent.gate import drain, gate, here
from nodeready.agent.local import LineChannel
from nodeready.agent.proofs import active, rdma
from nodeready.agent.stacks import py_spy, system_calls
from nodeready.agent.stacks.processes import read_and_written
from nodeready.agent.witnesses import flight_recorder, nccl_log, nccl_ras
from nodeready.agent.witnesses import logs as watchdog
from nodeready.core import sysctl, wire
from nodeready.core.base import Output, ProbeError, decode_base64, file_lines, kernel_arguments
from nodeready.core.parsed_template import TemplateCache
from nodeready.core.policy import Policy, PolicyError, make_policy
from nodeready.core.text import sanitise
from nodeready.fleet.inventory import hostfile, nodeset, slurm
from nodeready.fleet.transport.srun import StepOutput
from nodeready.runs import cores
from nodeready.runs import tail as logs
from nodeready.runs.audit.learned import read_settings
from nodeready.runs.deploy.command import parse_undo
from nodeready.runs.memory import diff
from nodeready.runs.memory.history import parse_drains, parse_jobs
from nodeready.runs.postmortem import kernel_files, slurm_records
from nodeready.runs.ready.environment import read_installed
from nodeready.runs.stacks import trace
from nodeready.subjects import snapshot
from nodeready.subjects.access import ACCESS, parse_access
from nodeready.subjects.gpus import amd_gpu, amd_json
from nodeready.subjects.host import facts as host_facts
from nodeready.subjects.host import mounts
from nodeready.subjects.host.facts import parse_versions
from nodeready.subjects.iommu import facts
from nodeready.subjects.limits import limit_files as limits
from nodeready.subjects.ports import facts as ports
from nodeready.subjects.ports.facts import parse_ranges
from nodeready.subjects.ssh_client import facts as ssh_client
from nodeready.subjects.ssh_client import known_hosts
from nodeready.subjects.ssh_client.checks import cause_of
from tests.builders.hostile import FILTER, PIECES, RECORDED, encoded, mutated, recorded
from tests.builders.ras_port import member, missing, report
from tests.cases import read_table
from tests.paths import PACKAGE, ROOT
from tests.unit.fuzz.alone import DO

_DUMPS = Path(__file__).parent.parent / "triage" / "dumps"
_ACTIVE = ROOT / "tests/unit/subjects/data/active"
_RECORDS = ROOT / "tests/unit/node/data/flight_recorder"
POLICY = Policy()
_NAMES = logs.node_names("host", "host.example.org")


def dump(text: str) -> None:
    for one in trace.parse_dump(text, "gpu1"):
        trace.read(one, "gpu1")


def backtrace(text: str) -> None:
    for row in (text, f"{cores.CRASHED}\n#0 {text}\n#1 a ({text}\n#2 b at {text}:1\n"):
        found = cores.parse(f"{row}\n{cores.EVERY}\nThread 1 (LWP 1)\n{text}")
        cores.crash_key(found.crashed)
        cores.headline(found.crashed)


def words(text: str) -> None:
    lines = [f"a{text}"[:8192], f"{text}b"[-8192:]]
    logs.normalise(lines, _NAMES, logs.path_ranks(f"{text[:8192]}.7.out"))


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
    assert output.unlaunched.keys() or output.last_error() is not None
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
    channel = LineChannel(lambda: Said(text), "", "N ", sudo=True)
    while channel.read_line(1) is not None:
        pass
    short(Exception(channel.error))


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
    facts.expand(text, {"a": "1"})
    assert all(isinstance(facts.option(word), str) for word in words)


def next_boot(text: str) -> None:
    for key in ("kernel.core_pattern", "kernel.yama.ptrace_scope"):
        sysctl.boot_value(sysctl.parse(Output(text, 0)), key)


def known(text: str) -> None:
    for line in text.splitlines():
        known_hosts.parse_line(line)
    ssh_client.parse_known_hosts(raw(text))
    known_hosts.read_block(text, "0" * 64)


def packed(text: str) -> None:
    decode_base64(text)
    wire.unpack(text, 1 << 20)


def amd_tools(text: str) -> None:
    more = amd_json.parse_kfd(text)
    for read in (lambda: amd_gpu.parse_rocm_smi(text, more),
                 lambda: amd_gpu.parse_amd_smi(text, text, text, more)):  # fmt: skip
        try:
            list(read())
        except ProbeError as problem:
            short(problem)


def job(text: str) -> None:
    with pytest.MonkeyPatch.context() as without_scontrol:
        without_scontrol.setenv("PATH", "/nonexistent")
        slurm.job_nodes(text[:100_000])


def short(problem: Exception) -> None:
    assert len(str(problem)) < 2000, problem


def some(number: int, effort: str) -> tuple[str, ...]:
    """All pieces; in short, some of them, others for each number."""
    return PIECES if effort == "long" else PIECES[number % 9 :: 9]


#: What reads text, and how it may refuse; the texts to mutate.
def read_audit(text: str) -> list[Any]:
    """The nodes of an audit's file."""
    file = diff.AuditFile("audit.json", text.encode("utf-8", "surrogatepass"))
    return [file.look(name) for name in file.names]


PARSERS: dict[str, Any] = {
    "NCCL's report": (nccl_ras.read_json,),
    "NCCL's report in words": (nccl_ras.read_text,),
    "an installed torch": (lambda text: read_installed(text, "nonce"),),
    "py-spy's text": (dump, trace.TraceError),
    "gdb's text": (backtrace,),
    "a recorder's dump": (
        lambda text: flight_recorder.parse(text.encode("latin-1", "replace")),
        flight_recorder.NoDumpError,
    ),
    "a watchdog's lines": (lambda text: watchdog.reports(text.splitlines()),),
    "NCCL's lines": (lambda text: nccl_log.read_log(text.splitlines()),),
    "the jobs of a node": (parse_jobs,),
    "what an undo takes back": (parse_undo,),
    "nvbandwidth's text": (
        lambda text: [*active.read_rates(text, dict.fromkeys(range(8), "H100"))],
    ),
    "NVLink's errors": (active.read_link_errors,),
    "ib_write_bw's text": (rdma.read_rate,),
    "DCGM's diagnostic": (lambda text: active.read_diagnostic(text, 1), wire.DecodeError),
    "the drains of nodes": (parse_drains,),
    "a file of learn": (read_settings, ValueError),
    "an audit's file": (read_audit, diff.DocumentError),
    "a dead job's lines": (lambda text: log_file.read_lines(text.splitlines(), 2026),),
    "a batch script": (log_variables.script_variables,),
    "torchrun's error file": (log_file.read_error_file,),
    "sacct's rows": (lambda text: slurm_records.steps_of(slurm_records.parse_sacct(text)),),
    "a job by scontrol": (slurm_records.parse_scontrol,),
    "a record of Slurm": (lambda text: slurm_records.read_records(text, is_certain=True),),
    "a kernel's log": (
        lambda text: [
            *kernel_files.faults([kernel_files.read_kernel_file("n", text, 0.0)], {"n"}, 1.0)
        ],
    ),
    "log lines": (words,),
    "a text": (safe,),
    "node names": (folded,),
    "a node set": (nodeset.expand, nodeset.NodeSetError),
    "a hostfile": (lambda text: hostfile.parse(text, "f"), InventoryError),
    "sinfo": (slurm._partitions, InventoryError),
    "a job's nodes": (job, InventoryError),
    "ssh's words": (lambda text: cause_of(text[:65536]),),
    "py-spy's JSON": (lambda text: py_spy.parse(text, 7),),
    "strace's lines": (lambda text: system_calls.CallCounter().feed(raw(text)),),
    "a core_pattern": (lambda text: core_pattern.CorePlace(text[:4096]).shown,),
    "what Slurm knows of a node": (drain.parse_all, drain.DrainError),
    "a verdict that was kept": (lambda text: gate.parse(raw(text)),),
    "mountinfo": (lambda text: (proc.parse_mounts(text), [*leftovers.find_mounts(text)]),),
    "rules of a packet filter": (lambda text: ports.parse_firewall(Output(text, 0), POLICY),),
    "modes of files": (lambda text: parse_access({ACCESS.name: Output(text, 0)}), ProbeError),
    "known_hosts": (known, ValueError),
    "a node's JSON": (wire.load_json, wire.DecodeError),
    "a packed text": (packed, ProbeError),
    "the time services": (host_facts.parse_clock,),
    "reads and writes": (lambda text: read_and_written(text, "syscr", "syscw"),),
    "processes": (mounts.parse_processes,),
    "mounts and fstab": (mounted,),
    "packages": (parse_versions,),
    "a kernel's command line": (booted,),
    "limits.conf and units": (limited,),
    "sysctl.d": (next_boot,),
    "AMD's tools": (amd_tools,),
    "ranges of ports": (lambda text: (ports.parse_range(text), parse_ranges(text)),),
    "srun's output": (step,),
    "a dialogue": (spoken,),
    "the gate's policy": (gate_policy, PolicyError),
}
TEXTS: dict[str, Any] = {
    **json.loads((Path(__file__).parent / "data" / "texts.json").read_text()),
    "NCCL's report": tuple(
        report([member(0, 7), member(1, 8)], [missing(2, 9)], comma=comma)
        for comma in (True, False)
    ),
    "py-spy's text": tuple(path.read_text() for path in sorted(_DUMPS.iterdir())),
    "nvbandwidth's text": tuple(path.read_text() for path in sorted(_ACTIVE.glob("nvb*.txt"))),
    "NVLink's errors": ((_ACTIVE / "nvlink-e-h100.txt").read_text(),),
    "ib_write_bw's text": tuple(path.read_text() for path in sorted(_ACTIVE.glob("ib*.txt"))),
    "DCGM's diagnostic": tuple(path.read_text() for path in sorted(_ACTIVE.glob("*.json"))),
    "a recorder's dump": tuple(
        path.read_bytes().decode("latin-1") for path in sorted(_RECORDS.glob("late*"))
    ),
    "rules of a packet filter": (FILTER,),
    "an audit's file": (
        (Path(__file__).parents[1] / "reports" / "golden" / "audit-mixed.json").read_text(),
        '{"schema":"nodeready.audit/1","started":"2030-01-02T03:04:05Z","nodes":[{"name":"a",'
        '"facts":{"nics":{"interfaces":{"eth0":{"mtu":9000}}},"gpus":{"nvidia":[{"serial":"1"}]}},'
        '"results":[{"check":"nics.mtu","status":"ok"}]}]}',
    ),
    "the time services": (recorded("h100")["host_slow"][-900:],),
    "processes": (recorded("h100")["host_slow"][-900:],),
    "mounts and fstab": (recorded("h100")["host_slow"][-400:] + recorded("h100")["host"][-900:],),
    "packages": (recorded("h100")["host_slow"][:900],),
    "AMD's tools": (recorded("mi300x")["amd"][:3000],),
}


def tried(name: str, text: str) -> None:
    read, *refusals = PARSERS[name]
    try:
        read(text)
    except tuple(refusals) as problem:
        short(problem)


@pytest.mark.parametrize("name", PARSERS)
def test_mutated_text_is_read_or_refused_in_one_line(name, effort):
    pieces = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)

    @given(st.one_of(mutated(*TEXTS[name]), pieces))
    def each(text: str) -> None:
        tried(name, text)

    DO[effort](each, 600)


#: Characters of one piece again and again: what takes the square of it takes minutes.
LONG = 1 << 17


@pytest.mark.parametrize("name", PARSERS)
def test_a_piece_without_end_takes_no_more_than_it_is_long(name, effort):
    text = TEXTS[name][0]

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
                seen = snapshot.observe(probe, {**outputs, section: spoilt}, POLICY)
                snapshot.judge(snapshot.Snapshot({subject: seen}), POLICY)

    DO[effort](all_pieces)


#: What takes a text, bytes or lines that were written elsewhere, by its name and first parameter.
_PARSER = re.compile(
    r"_?(parse|read|load_json|unpack|expand|answers|cause_of|decoded|decode_base64|tokens)(_|$)"
)
_TAKES = ("str", "str | bytes", "bytes", "Output", "Iterable[Line]", "Iterable[str]",
          "Mapping[str, Output]")  # fmt: skip
#: Where else a parser is fuzzed, or why nobody else writes its text -> its names.
ELSEWHERE = read_table(__file__, "ELSEWHERE")


def parsers() -> set[str]:
    """Every function of the package that reads foreign text: "core/base.py:decode_base64"."""
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
    for module in ("gpus.nvidia", "nics.facts", "rdma.facts"):
        for value in vars(sys.modules[f"nodeready.subjects.{module}"]).values():
            if isinstance(value, TemplateCache):
                value._known.clear()


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
        for name, (read, *refusals) in PARSERS.items():
            for text in TEXTS[name]:
                try:
                    read(text)
                except tuple(refusals):
                    continue
        for profile in ("h100", "mi300x"):
            for probe in PROBES.values():
                whole = {s.name: recorded(profile).get(s.name, "") for s in probe.sections}
                outputs = {n: Output(encoded(t), 0, nonce=RECORDED) for n, t in whole.items()}
                snapshot.observe(probe, outputs, POLICY)
    finally:
        sys.setprofile(None)
    every = parsers()
    assert len(every) > 40
    elsewhere = {name for names in ELSEWHERE.values() for name in names.split()}
    assert every - reached - elsewhere == set()
    assert elsewhere - every == set()

"""`benchmarks/run simulated`: thousands of nodes' answers, from the wire to the report.

The answers are made of one real answer of a lab node. Values that differ between the nodes of a
cluster differ here too (`_IDENTITIES`, `_MEASURES`), so that only such sections are equal as on a
cluster. Every hundredth node has another policy, so that the report has failures. The answers pass
through `nodeready audit` without its connections: its readers read and judge them, the host keys
and addresses of the fleet are added, nodes are compared, and the report is written to a file: once
in the formats without facts, such as the table, and once in those with the facts of all nodes,
such as JSON. Times and memory are those of all processes together.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import os
import random
import re
import string
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.command import (
    Benchmark,
    BenchmarkError,
    BenchmarkReport,
    Budget,
    budget_rows,
    cpu_s,
    in_child,
)
from benchmarks.contenders import cluster, probe_command
from nodeready.agent.asking import Answer, Request
from nodeready.agent.audit_document import Audit
from nodeready.agent.snapshots import SnapshotQuestion
from nodeready.core import probe_script
from nodeready.core.outcome import Outcome
from nodeready.core.policy import Policy
from nodeready.reports.registry import FORMATS
from nodeready.runs.audit.workers import AuditWorkers
from nodeready.subjects import snapshot
from nodeready.subjects.context import context_of
from nodeready.subjects.registry import select
from nodeready.subjects.ssh_client.known_hosts import Endpoint

NONCE = "0" * 16
_HOST, _ADDRESS = "thenode", "10.255.255.254"
#: Number of answers -> seconds in which they are to be read, judged, compared and rendered.
BUDGETS = {10_000: 20, 50_000: 60}

# --- The answers: what differs between two nodes of a cluster differs here.

#: The lab's network is small: all nodes have an address in a larger one, 10.64.0.0/14.
_NETWORK, _MASK, _LAST = "10.64.0.0", "255.252.0.0", "10.67.255.255"


def _in_hex(address: str) -> str:
    """The address in the form of /proc/net/route."""
    return "".join(f"{int(byte):02X}" for byte in reversed(address.split(".")))


def _with_placeholders(text: str, host: str) -> str:
    """The text with placeholders for the node's name and address, and a larger network."""
    route = r"^/proc/net/route:\d+:eth0\t([0-9A-F]{8})\t0{8}(?:\t\d+){4}\t([0-9A-F]{8})\t"
    match = re.search(route, text, re.M)
    hosts_line = re.search(rf"^/etc/hosts:\d+:([0-9.]+) {host}$", text, re.M)
    if match is None or hosts_line is None:
        raise BenchmarkError("the lab node shows no network")
    first, mask = (bytes.fromhex(group)[::-1] for group in match.groups())
    last = bytes(byte | ~bits & 255 for byte, bits in zip(first, mask, strict=True))
    for old, new in (
        (host, _HOST),
        (match[1], _in_hex(_NETWORK)),
        (match[2], _in_hex(_MASK)),
        (".".join(map(str, last)), _LAST),
    ):
        text = text.replace(old, new)
    for old, new in ((".".join(map(str, first)), _NETWORK), (hosts_line[1], _ADDRESS)):
        text = re.sub(rf"(?<![0-9.]){re.escape(old)}(?![0-9.])", new, text)
    return text


#: The text of a node, from its number, its random generator and the text of the lab node.
Replacement = Callable[[int, random.Random, str], str]
_DIGITS = string.ascii_letters + string.digits + "+/"


def _ip(node: int, draw: random.Random, text: str) -> str:
    host = (10 << 24 | 64 << 16) + node + 2
    return ".".join(str(host >> shift & 255) for shift in (24, 16, 8, 0))


def _identity(node: int, draw: random.Random, text: str) -> str:
    """Another hexadecimal or decimal identity of the same form."""
    digits = "123456789" if text.isdigit() else "0123456789abcdef"
    return re.sub("[0-9a-f]", lambda _: draw.choice(digits), text)


def _key(node: int, draw: random.Random, text: str) -> str:
    return "".join(draw.choices(_DIGITS, k=len(text)))


def _around(spread: float) -> Replacement:
    def value(node: int, draw: random.Random, text: str) -> str:
        number = float(text) * draw.uniform(1 - spread, 1 + spread)
        return f"{number:.2f}" if "." in text else str(round(number))

    return value


def _drawn(function: Callable[[random.Random], object], share: float = 1) -> Replacement:
    """share: of the nodes, whose text is another"""
    return lambda node, draw, text: (
        str(function(draw)) if share == 1 or draw.random() < share else text
    )


def _errors(maximum: int) -> Replacement:
    """A counter of errors, which is 0 on most nodes."""
    return _drawn(lambda draw: draw.randrange(1, maximum), 0.02)


def _number_below(maximum: int) -> Replacement:
    return _drawn(lambda draw: draw.randrange(maximum))


_LOAD = _drawn(lambda draw: f"{draw.uniform(0, 9):.2f}")
#: (pattern: the text before an identity, and the identity; replacement). Equal identities of a
#: node get equal replacements.
_IDENTITIES: tuple[tuple[str, Replacement], ...] = (
    (rf"()({_HOST})", lambda node, draw, text: f"gpu{node:05}"),
    (rf"()({re.escape(_ADDRESS)})", _ip),
    (r"\b()([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b", _identity),
    (r"(_guid:1:[0-9a-f]{4}:)([0-9a-f:]{14})$", _identity),
    (r"(/sys/class/net/\w+/address:.*:)((?:[0-9a-f]{2}:){2}[0-9a-f]{2})$", _identity),
    (r"(<serial>)(\d+)", _identity),
    (r"(AAAAC3NzaC1lZDI1NTE5AAAAI)(\S{43})", _key),
    (r"(/lid:1:0x)([1-9a-f][0-9a-f]*)$", _identity),
    (r"(/gids/[01]:.*:)([0-9a-f]{4}:[0-9a-f]{4})$", _identity),
    (r"(/gids/[23]:.*:)(0a00:000b)$", lambda node, draw, text: f"0a40:{node + 2 & 65535:04x}"),
    (r"^(/proc/|ceiling=)(\d+)(?=/limits:|$)", _number_below(90000)),
)
#: The same for measures, times and numbers of processes.
_MEASURES: tuple[tuple[str, Replacement], ...] = (
    (r"(<gpu_temp>)(\d+)", _around(0.2)),
    (r"(<gpu_temp_tlimit>)(\d+)", _around(0.1)),
    (r"(<memory_temp>)(\d+)", _around(0.2)),
    (r"(<power_draw>)([\d.]+)", _around(0.1)),
    (r"(<timestamp>.*:)(\d\d:\d\d) 20", _drawn(lambda draw: f"{draw.randrange(60):02}:00")),
    (
        r"^(/proc/meminfo:\d+:(?:Mem[FA]|Buff|Cach|Act|Inact|Anon|Mapp|Slab)[^:]*: +)(\d+)",
        _around(0.3),
    ),
    (r"^(/proc/uptime:1:)([\d.]+)", _around(0.9)),
    (r"^(/proc/uptime:1:[\d.]+ )([\d.]+)", _around(0.9)),
    (r"^(/proc/loadavg:1:)(\d+\.\d+)", _LOAD),
    (r"^(/proc/loadavg:1:\S+ )(\d+\.\d+)", _LOAD),
    (r"^(/proc/loadavg:.*/)(\d+)", _number_below(3000)),
    (r"^(/proc/loadavg:.* )(\d+)$", _number_below(90000)),
    (r"(se\.exec_start *: *)([\d.]+)", _around(0.5)),
    (r"(/proc/sys/fs/file-nr:1:)(\d+)", _number_below(90000)),
    (r"(/statistics/rx_dropped:1:)(\d+)$", _number_below(5000)),
)
#: The same for what stays between two looks: counters of errors, services and their sockets.
_COUNTERS: tuple[tuple[str, Replacement], ...] = (
    (r"(/carrier_changes:1:)(\d+)$", _drawn(lambda draw: draw.choice((2, 2, 2, 3, 4)))),
    (r"(_(?:errors?|err):1:)(\d+)$", _errors(9)),
    (r"(/link_downed:1:)(\d+)$", _errors(3)),
    (r"(nr_fabric_manager=)(\d+)", _number_below(90000)),
    (r"( 0A 0 )(\d+)$", _number_below(90000000)),
)
_REPLACEMENTS = (*_IDENTITIES, *_COUNTERS, *_MEASURES)
_FIRST_MEASURE = len(_IDENTITIES) + len(_COUNTERS)


class SimulatedNodes:
    """The answers of many nodes, made of one node's answer; each is the same in every run."""

    def __init__(self, answer: str, host: str) -> None:
        text = probe_script.unpack(answer, NONCE).decode("utf-8", "surrogateescape")
        text = _with_placeholders(text, host)
        places: dict[int, tuple[int, int]] = {}
        for row, (pattern, _) in enumerate(_REPLACEMENTS):
            for match in re.finditer(pattern, text, re.M):
                places.setdefault(match.start(2), (match.end(2), row))
        for match in re.finditer(f"@()({NONCE})", text):
            places[match.start(2)] = (match.end(2), -1)
        self.pieces: list[str] = []
        self.slots: list[tuple[int, str]] = []
        position = 0
        for start, (end, row) in sorted(places.items()):
            if start >= position:
                self.pieces.append(text[position:start])
                self.slots.append((row, text[start:end]))
                position = end
        self.tail = text[position:]

    def text(self, node: int, nonce: str, look: int = 0) -> str:
        """What the node of this number printed.

        look: each has other measures; from the third on, one node in a hundred has a broken link
        """
        draw, measure = random.Random(node), random.Random(f"{node} {look}")
        identities: dict[tuple[int, str], str] = {}
        parts: list[str] = []
        for (row, text), constant_text in zip(self.slots, self.pieces, strict=True):
            new_text = nonce if row < 0 else identities.get((row, text))
            if new_text is None:
                numbers = measure if row >= _FIRST_MEASURE else draw
                new_text = _REPLACEMENTS[row][1](node, numbers, text)
                if row < len(_IDENTITIES):
                    identities[row, text] = new_text
            parts += (constant_text, new_text)
        text = "".join((*parts, self.tail))
        return text.replace("4: ACTIVE", "1: DOWN", 1) if look > 1 and node % 100 == 50 else text

    def answer(self, node: int, nonce: str, look: int = 0) -> str:
        """The same text as it comes over the wire."""
        packing = zlib.compressobj(1, wbits=31)
        text = self.text(node, nonce, look).encode("utf-8", "surrogateescape")
        packed = base64.encodebytes(packing.compress(text) + packing.flush()).decode()
        return f"{probe_script.mark(nonce)} gzip\n{packed}{probe_script.mark(nonce)} end\n"


# --- The run.


@dataclass(frozen=True)
class Simulated:
    """The cost of these answers; times are seconds of wall time."""

    profile: str
    nodes: int
    facts: bool  # whether the formats are those that show the nodes' facts
    readers: int
    read_s: float
    combine_s: float  # host keys and addresses of all nodes together
    judge_s: float  # judging, comparing
    render_s: dict[str, float]  # by format, one after another
    cpu_s: float  # of all processes, all formats
    peak_mb: float = 0.0  # of all processes together, shared memory once

    @property
    def total_s(self) -> float:
        """The sum, with the slowest of the formats: a run renders one."""
        return self.read_s + self.combine_s + self.judge_s + max(self.render_s.values())

    @property
    def name(self) -> str:
        return f"{self.nodes} {self.profile}, {'with' if self.facts else 'without'} facts"

    def row(self) -> tuple[str, ...]:
        render = ", ".join(f"{name} {value:.1f}" for name, value in self.render_s.items())
        before = [f"{value:.1f} s" for value in (self.read_s, self.combine_s, self.judge_s)]
        after = f"{render} s", f"{self.total_s:.1f} s", f"{self.cpu_s:.1f} s"
        return self.name, str(self.readers), *before, *after, f"{self.peak_mb:.0f} MiB"

    def budgets(self) -> Iterator[Budget]:
        if limit := BUDGETS.get(self.nodes):
            yield Budget(f"{self.name}: to the report", limit, self.total_s, " s")
        yield Budget(f"{self.name}: peak memory", 1024, self.peak_mb, " MiB")


HEAD = ("answers", "readers", "read", "combine", "judge", "render", "all", "CPU", "peak memory")


def probe(profile: str, name: str) -> tuple[str, str]:
    """The answer of a lab node of this profile, and its name."""
    line, stdin = probe_command(Policy(), NONCE)
    with cluster(1, name, profile=profile) as nodes:
        node = nodes.lab.nodes[0]
        return node.run(line, input=stdin).stdout, node.name


def make_answers(answer: tuple[str, str], nodes: int, place: Path, look: int = 0) -> None:
    """Write the answers of this many nodes. answer: of a lab node, from `probe`"""
    part_count = len(os.sched_getaffinity(0))
    limits = [nodes * index // part_count for index in range(part_count + 1)]
    place.mkdir()
    with ProcessPoolExecutor(part_count) as pool:
        make = partial(_make, answer, place=place, look=look)
        list(pool.map(make, itertools.pairwise(limits)))


def _make(answer: tuple[str, str], numbers: tuple[int, int], place: Path, look: int) -> None:
    nodes = SimulatedNodes(*answer)
    with (place / f"{numbers[0]:09}").open("wb") as out:
        for node in range(*numbers):
            nonce = f"{random.Random(-1 - node).getrandbits(64):016x}"
            text = nodes.answer(node, nonce, look).encode()
            out.write(b"%s %d\n%s" % (nonce.encode(), len(text), text))


def _answers(directory: Path) -> Iterator[tuple[str, str]]:
    """Every answer with its nonce."""
    for file in sorted(directory.iterdir()):
        with file.open("rb") as text:
            while head := text.readline():
                nonce, size = head.split()
                yield nonce.decode(), text.read(int(size)).decode()


@contextmanager
def answers(profile: str, nodes: int, name: str) -> Iterator[str]:
    """A directory with the answers of this many nodes like a lab node of this profile."""
    with tempfile.TemporaryDirectory(prefix="nodeready-benchmark-") as directory:
        make_answers(probe(profile, name), nodes, Path(directory, "answers"))
        yield directory


def measured(profile: str, nodes: int, directory: str, *, facts: bool) -> Simulated:
    """The cost in a new process; its reports are in the directory, which has `answers`."""
    peaks_kib = [0]
    words = profile, nodes, Path(directory), facts
    run: Simulated = in_child(_run, *words, watch=lambda pid: peaks_kib.append(_memory(pid)))
    return replace(run, peak_mb=max(peaks_kib) / 1024)


def _memory(pid: int) -> int:
    """KiB of a process and its children: the memory that several share counts once (PSS)."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    pss = re.search(r"^Pss: +([0-9]+) kB", text, re.M)
    return (int(pss[1]) if pss else 0) + sum(_memory(int(child)) for child in children)


def policies_of(nodes: int) -> dict[str, Policy]:
    """The policy of each node; every hundredth node has another one."""
    policy, odd = Policy(), Policy(ptrace_scope=1, timezone="Mars/Olympus", shm_min_mb=1 << 29)
    return {f"gpu{n:05}": policy if n % 100 else odd for n in range(nodes)}


def audit_answers(
    workers: AuditWorkers,
    policies: Mapping[str, Policy],
    place: Path,
    earlier_counters: Callable[[str], str] = lambda name: "",
) -> tuple[Audit, tuple[float, float, float]]:
    """The audit of the answers in a directory; when all were read, combined and judged."""
    chosen, selection = snapshot.probes(), select(policies.values())
    replies = []
    for name, (nonce, text) in zip(policies, _answers(place), strict=True):
        question = SnapshotQuestion(Request(name, "", 60), policies[name], chosen, nonce)
        replies.append(Outcome(name, workers.read(question, Answer(text)), seconds=1.0))
    replies = workers.settle(replies)
    read = time.perf_counter()
    snapshots = {reply.node: reply.value for reply in replies if reply.value is not None}
    endpoints = {name: Endpoint() for name in policies}
    context = context_of(policies, snapshots, endpoints, bytes, lambda name: "")
    context = workers.complete(context, {})
    combined = time.perf_counter()
    arguments = replies, context, selection, "2026-01-01T00:00:00Z", lambda _: ()
    audit = workers.audit(*arguments, earlier_counters=earlier_counters)
    return audit, (read, combined, time.perf_counter())


def _run(profile: str, nodes: int, directory: Path, facts: bool) -> Simulated:
    os.environ["XDG_STATE_HOME"] = str(directory)
    policies = policies_of(nodes)
    formats = {n: f for n, f in FORMATS["audit"].items() if (f.write_facts is not None) == facts}
    tell = next(iter(formats.values())).write_facts
    render: dict[str, float] = {}
    start = time.perf_counter()
    with AuditWorkers(policies, tell) as workers:
        audit, (read, combined, judged) = audit_answers(workers, policies, directory / "answers")
        if len(audit.nodes) != nodes or audit.summary["nodes"]["failed"]:
            raise BenchmarkError(f"not what is measured: {audit.summary}")
        for name, form in formats.items():
            moment = time.perf_counter()
            with (directory / f"report{form.extension}").open("w", encoding="utf-8") as out:
                out.writelines(form.render(audit))
            render[name] = time.perf_counter() - moment
        count = workers.count
    times = (read - start, combined - read, judged - combined)
    return Simulated(profile, nodes, facts, count, *times, render, cpu_s())


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    runs = list[Simulated]()
    for profile in arguments.profiles.split(","):
        for nodes in arguments.nodes:
            with answers(profile, nodes, arguments.name) as directory:
                runs += (measured(profile, nodes, directory, facts=f) for f in (False, True))
    budgets = budget_rows(budget for run in runs for budget in run.budgets())
    tables = [("", [HEAD, *(run.row() for run in runs)]), ("", budgets)]
    return BenchmarkReport("Answers of a large fleet", tables)


BENCHMARK = Benchmark(_measure, {"nodes": "1000,10000,50000", "profiles": "h100"})

"""`benchmarks/run memory`: the cost of keeping looks, for thousands of nodes.

The answers are those of `benchmarks/run simulated`. They are judged without a memory, as the first
look of an empty memory, as a second look (which has the counters of the first to compare with),
and as a third look in which the measures (temperatures, loads, free memory, numbers of processes)
differ and nothing else. Then a watch looks three times: in its second look, all measures differ;
in its third look, all differ again, and one node in a hundred has a broken link. Further looks
follow; in each, one node in a hundred has a fact and a result that no look before had. The size
after 90 days with a look each hour is extrapolated from the growth of these looks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.command import Benchmark, BenchmarkError, BenchmarkReport, cpu_s, in_child
from benchmarks.simulated import audit_answers, make_answers, policies_of, probe
from nodeready.cli.screen import Screen
from nodeready.runs.audit.workers import AuditWorkers
from nodeready.runs.memory.diff import Diff, Side, compare, dated, looks_since, since_changes
from nodeready.runs.memory.history import read_history
from nodeready.runs.memory.kept_looks import LookKeeper, MemorySettings
from nodeready.runs.memory.lemons import find_lemons
from nodeready.runs.memory.look import NodeSections, Value, dump, facts_text, node_sections
from nodeready.runs.memory.store import Memory
from nodeready.subjects.registry import select

_QUARTER = 90 * 24  # looks of a quarter of a year, one each hour
_HOUR_S = 3600.0


class Pass(NamedTuple):
    """One audit of all answers; seconds."""

    judged_s: float  # until all were judged
    cpu_s: float  # of all processes, with the keeping
    keep_s: float = 0.0  # to keep the look; 0: it was not kept
    keep_cpu_s: float = 0.0  # CPU time of that


@dataclass(frozen=True)
class MemoryCost:
    passes: dict[str, Pass]
    changed: int  # nodes that the third look changed
    sizes: tuple[int, int]  # bytes after three looks, and after all
    keeps: list[tuple[float, float]]  # wall and CPU seconds to keep each further look
    reads: dict[str, tuple[float, float]]  # likewise, to read


def _audit(nodes: int, place: Path, *, is_kept: bool) -> Pass:
    policies = policies_of(nodes)
    keeper = LookKeeper(Screen(), "audit", "prod.py")
    checks = select(policies.values()).results
    start, before_cpu_s = time.perf_counter(), cpu_s()
    writer = keeper.section_writer(checks) if is_kept else None
    with AuditWorkers(policies, None, None, writer) as workers:
        earlier = [keeper.earlier_counters] if is_kept else []
        audit, (_, _, judged) = audit_answers(workers, policies, place, *earlier)
        if audit.summary["nodes"]["failed"]:
            raise BenchmarkError(f"not what is measured: {audit.summary}")
        before_s = time.process_time()
        if is_kept:
            keeper.keep_audit(audit, 3, workers)
        keep = (time.perf_counter() - judged, time.process_time() - before_s) if is_kept else ()
    return Pass(judged - start, cpu_s() - before_cpu_s, *keep)


def _cpu_with_workers_s() -> float:
    """CPU seconds of this process and of its children, also of those that have not ended."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in children]
    ticks = sum(int(stat[11]) + int(stat[12]) for stat in stats)
    return cpu_s() + ticks / os.sysconf("SC_CLK_TCK")


def _watch(nodes: int, *places: Path) -> Iterator[Pass]:
    policies, keeper = policies_of(nodes), LookKeeper(Screen(), "audit", "prod.py")
    writer = keeper.section_writer(select(policies.values()).results)
    with AuditWorkers(policies, None, None, writer, is_watch=True) as workers:
        for place in places:
            start, before_s = time.perf_counter(), _cpu_with_workers_s()
            workers.begin_look()
            _, (_, _, judged) = audit_answers(workers, policies, place, keeper.earlier_counters)
            yield Pass(judged - start, _cpu_with_workers_s() - before_s)


def _changed(name: str, facts: dict[str, Value], look: int) -> NodeSections:
    """A look at two sections of a node: one with a new fact, one with a new result."""
    results = {"gpus.ecc_errors": {"status": "warn", "actual": f"{look} errors on {name}"}}
    texts = {
        "nics.facts": facts_text({**facts, "nics.interfaces[eth0].mtu": look}),
        "gpus.results": dump(results),
    }
    return node_sections(name, texts)


def _further_looks(memory: Memory, looks: int) -> Iterator[tuple[float, float]]:
    """Wall and CPU time to keep each of ``looks`` looks, each with 1 % of the nodes changed."""
    names = memory.names()
    newest = memory.looks()[0]
    states = {
        name: NodeSections(name, state, ("nics", "rdma"), tuple)
        for name, state in memory._rows("SELECT name, state FROM nodes")
    }
    for number in range(looks):
        start = number * len(names) // 100
        changed = [names[(start + index) % len(names)] for index in range(len(names) // 100)]
        for node in memory.nodes(changed, newest.time_s):
            facts = {key: value for key, value in node.facts.items() if key[:5] == "nics."}
            states[node.node] = _changed(node.node, facts, number)
        look = replace(newest, time_s=newest.time_s + _HOUR_S * (number + 1))
        moment, before_s = time.perf_counter(), cpu_s()
        memory.keep(look, states.values())
        yield time.perf_counter() - moment, cpu_s() - before_s


def _diff(memory: Memory, since_s: float) -> Diff:
    """What `nodeready diff --since` does with the memory."""
    until_s = float("inf")
    looks = looks_since(memory, memory.names(), since_s, until_s)
    side = Side("", "")
    diff = compare(since_changes(looks), side, side, only_before=(), only_after=())
    return dated(diff, memory, since_s, until_s)


def _run(nodes: int, directory: Path, looks: int) -> MemoryCost:
    """Measure; the directory has the answers of two looks."""
    os.environ["XDG_STATE_HOME"] = str(directory)
    passes = {
        "without a memory": _audit(nodes, directory / "first", is_kept=False),
        "the first look": _audit(nodes, directory / "first", is_kept=True),
        "the second look": _audit(nodes, directory / "first", is_kept=True),
        "the third look": _audit(nodes, directory / "measures", is_kept=True),
    }
    watches = "a watch, its first look", "its second look", "a further look, 1 % changed"
    places = (directory / place for place in ("first", "measures", "changed"))
    passes |= zip(watches, _watch(nodes, *places), strict=True)
    path = MemorySettings.load().path
    assert path is not None
    with Memory.open(path) as memory:
        third, second = (look.time_s for look in memory.looks()[:2])
        changed = len(memory.changed(second, third))
        size = memory.size_bytes
        keeps = [*_further_looks(memory, looks - 3)]
        sizes = size, memory.size_bytes
        reads = {}
        names = memory.names()
        for name, read in (
            ("all nodes at one time", lambda: [*memory.nodes(names, third)]),
            ("the life of a node", lambda: read_history(memory, names[0])),
            ("the lemons among all nodes", lambda: find_lemons(memory, {*names}, 0, time.time())),
            (f"{looks - 3} looks for a diff", lambda: _diff(memory, third)),
        ):
            moment, before_s = time.perf_counter(), time.process_time()
            read()
            reads[name] = time.perf_counter() - moment, time.process_time() - before_s
    return MemoryCost(passes, changed, sizes, keeps, reads)


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    (nodes,) = arguments.nodes
    answer = probe(arguments.profile, arguments.name)
    with tempfile.TemporaryDirectory(prefix="nodeready-benchmark-") as directory:
        for look, name in enumerate(("first", "measures", "changed")):
            make_answers(answer, nodes, Path(directory, name), look)
        measured: MemoryCost = in_child(_run, nodes, Path(directory), arguments.looks)
    passes = [(name, *(f"{s:.1f} s" for s in costs)) for name, costs in measured.passes.items()]
    walls, cpus = zip(*measured.keeps, strict=True)
    first, last = measured.sizes
    growth = (last - first) / len(walls)
    rows = [
        ("nodes that the third look changed", str(measured.changed)),
        ("a further look, 1 % changed: to keep it", f"{statistics.median(walls):.2f} s"),
        ("its CPU", f"{statistics.median(cpus):.2f} s"),
        ("the file after three looks", f"{first / 1e6:.1f} MB"),
        (f"the file after {arguments.looks} looks", f"{last / 1e6:.1f} MB"),
        ("a further look, 1 % changed", f"{growth / 1e6:.3f} MB"),
        ("90 days of looks, one each hour", f"{(first + growth * _QUARTER) / 1e6:.0f} MB"),
    ]
    for name, (wall_s, read_cpu_s) in measured.reads.items():
        rows.append((f"to read {name}", f"{wall_s:.2f} s, CPU {read_cpu_s:.2f} s"))
    head = ("audit", "until judged", "CPU", "to keep", "CPU of keeping")
    measures = [(f"{nodes} nodes", "measured"), *rows]
    return BenchmarkReport("The memory", [("", [head, *passes]), ("", measures)])


BENCHMARK = Benchmark(_measure, {"nodes": "10000", "profile": "h100", "looks": 24})

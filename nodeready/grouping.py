"""Ranks that stand at the same place, from the raw traces of all nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nodeready import hints, missing_ranks, stack_advice
from nodeready.nodesets import natural
from nodeready.places import Places
from nodeready.stacks import KINDS, Group, Rank, Stacks, Thread
from nodeready.standing import standing

_MAIN = "MainThread"
#: Groups that are at a place; the others differ in their reason alone.
_PLACED = ("stack", "uninterruptible")


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Traces hold no cycles, and looking for some at each of so many tuples costs a third."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _Process(NamedTuple):
    """One process, with its `Rank.group` not known yet."""

    node: str
    pid: int
    rank: int | None
    local_rank: int | None
    state: str
    wait_channel: str
    cpu_s: float | None
    note: str


class _Bucket:
    """Processes of one group. stacks: the different ones; None among them: one that has none."""

    __slots__ = ("kind", "native", "processes", "stacks", "threads", "verdict", "why")

    def __init__(self, kind: str, verdict: str | None, why: str) -> None:
        self.kind, self.verdict, self.why = kind, verdict, why
        self.processes: list[_Process] = []
        self.stacks: set[int | None] = set()
        self.native: int | None = None
        self.threads: list[tuple[str, int]] = []


class _Job:
    """What was found of one job."""

    def __init__(self) -> None:
        self.buckets: dict[tuple[Any, ...], _Bucket] = {}
        self.world_sizes: dict[int, int] = {}
        self.count = 0


class _Reader:
    """Reads one trace after the other, and keeps of each only what is needed."""

    def __init__(self, all_threads: bool) -> None:
        self.all_threads = all_threads
        self.places = Places()
        self.jobs: dict[str, _Job] = {}
        self.nodes: dict[str, None] = {}
        #: Nodes with processes, of whatever job.
        self.answered: set[str] = set()
        self.errors: dict[str, str] = {}
        self.instead: dict[str, Sequence[str]] = {}
        self.started: list[str] = []
        self._texts: dict[str, str] = {}

    def read(self, trace: Mapping[str, Any]) -> None:
        node, interval = trace["node"], trace["interval_s"]
        self.nodes[node] = None
        self.started.append(trace["started"])
        if trace["error"]:
            self.errors[node] = trace["error"]
        if trace["processes"]:
            self.answered.add(node)
        elif trace["instead"]:
            self.instead[node] = trace["instead"]
        numbers = self.places.numbers(trace)
        # Every trace has strings of its own, and most of them are the same.
        shared = self._texts.setdefault
        for process in trace["processes"]:
            job = self.jobs.get(process["job"])
            if job is None:
                job = self.jobs[process["job"]] = _Job()
            job.count += 1
            world = process["world_size"]
            if world is not None:
                job.world_sizes[world] = job.world_sizes.get(world, 0) + 1
            found = standing(process, numbers, self.places, interval)
            threads = self._threads(process, numbers) if self.all_threads else []
            path = None
            if found.stack is not None and found.kind in _PLACED:
                path = self.places.path_of[found.stack]
            others = tuple(sorted(self.places.path_of[stack] for _, stack in threads))
            key = (found.kind, found.why, path, others, found.verdict)
            bucket = job.buckets.get(key)
            if bucket is None:
                bucket = job.buckets[key] = _Bucket(found.kind, found.verdict, found.why)
                bucket.threads = threads
            bucket.stacks.add(found.stack)
            if process["native"] is not None and bucket.native is None:
                bucket.native = numbers[process["native"]]
            state, wait, note = process["state"], process["wait_channel"], process["note"]
            if found.kind == "traced" and process["tracer"] and not note:
                note = f"traced by pid {process['tracer']}"
            bucket.processes.append(
                _Process(
                    node,
                    process["pid"],
                    _rank(process["rank"]),
                    _rank(process["local_rank"]),
                    shared(state, state),
                    shared(wait, wait),
                    found.cpu_s,
                    shared(note, note),
                )
            )

    def _threads(self, process: Mapping[str, Any], numbers: list[int]) -> list[tuple[str, int]]:
        """The other threads at the last sample that has a stack."""
        for sample in reversed(process["samples"]):
            if sample["main"] is not None:
                pairs = sample["threads"]
                return [(name, numbers[at]) for name, at in pairs if name != _MAIN]
        return []


def _rank(value: int | None) -> int | None:
    """Launchers say -1 for "none", and what is beyond every job is no rank."""
    return value if value is not None and 0 <= value < missing_ranks.MAX_RANKS else None


def _merged(buckets: Mapping[tuple[Any, ...], _Bucket]) -> list[_Bucket]:
    """The buckets; who was seen once at a place says nothing against the others there."""
    largest: dict[tuple[Any, ...], _Bucket] = {}
    for key, bucket in buckets.items():
        other = largest.get(key[:-1])
        if bucket.verdict and (other is None or len(bucket.processes) > len(other.processes)):
            largest[key[:-1]] = bucket
    kept = []
    for key, bucket in buckets.items():
        home = largest.get(key[:-1])
        if bucket.verdict is None and home is not None:
            home.processes += bucket.processes
            home.stacks |= bucket.stacks
            home.native = bucket.native if home.native is None else home.native
        else:
            kept.append(bucket)
    return kept


def _group(bucket: _Bucket, places: Places, order: Mapping[str, int]) -> Group:
    stacks = sorted(stack for stack in bucket.stacks if stack is not None)
    # For the other kinds the place is worth telling when all are there.
    one_path = len({places.path_of[stack] for stack in stacks}) == 1
    frames = places.frames(stacks) if one_path and None not in bucket.stacks else ()
    native = () if bucket.native is None else places.frames([bucket.native])
    waits = bucket.kind in _PLACED and bucket.verdict != "progressing"
    hint = hints.find(frames, native) if waits else None
    nodes = {process.node for process in bucket.processes}
    return Group(
        bucket.kind,
        bucket.verdict,
        tuple(sorted({one.rank for one in bucket.processes if one.rank is not None})),
        tuple(sorted(nodes, key=order.__getitem__)),
        frames,
        hint.text if hint else "",
        bucket.why,
        len(frames),
        len(bucket.processes),
        native,
        tuple(Thread(name, places.frames([stack])) for name, stack in bucket.threads),
    )


def _silent(errors: Mapping[str, str]) -> list[Group]:
    """The nodes without an answer, those with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for node in sorted(errors, key=natural):
        reasons.setdefault(errors[node].replace(node, "NODE"), []).append(node)
    return [
        Group("no-data", None, (), tuple(nodes), why=why if len(nodes) > 1 else errors[nodes[0]])
        for why, nodes in reasons.items()
    ]


def _forks(groups: Sequence[Group]) -> list[int]:
    """For each group the index of the first frame that no larger group shares."""
    tree: dict[tuple[int, str, str], int] = {}
    forks = [len(group.frames) for group in groups]
    sizes: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        if group.kind == "stack":
            sizes.setdefault(group.processes, []).append(index)
    for size in sorted(sizes, reverse=True):
        for index in sizes[size] if tree else ():
            at = depth = 0
            for frame in groups[index].frames:
                at = tree.get((at, frame.function, frame.file), 0)
                if not at:
                    break
                depth += 1
            forks[index] = depth
        for index in sizes[size]:
            at = 0
            for frame in groups[index].frames:
                at = tree.setdefault((at, frame.function, frame.file), len(tree) + 1)
    return forks


def _with_fork(one: Group, fork: int) -> Group:
    return one if one.fork == fork else dataclasses.replace(one, fork=fork)


def _suspicion(group: Group, everything: int) -> tuple[int, int, int, int]:
    """The order: kinds without a stack, unless they are the most; then few before many."""
    size = max(group.processes, len(group.ranks), len(group.nodes))
    usual = group.kind != "stack" and 2 * size > everything
    kind = len(KINDS) if usual else KINDS.index(group.kind)
    return kind, size, group.ranks[0] if group.ranks else missing_ranks.MAX_RANKS, group.fork


def _world(job: _Job) -> int | None:
    """What all ranks that say it agree on."""
    return next(iter(job.world_sizes)) if len(job.world_sizes) == 1 else None


def group(
    traces: Iterable[Mapping[str, Any]],
    errors: Mapping[str, str],
    *,
    all_threads: bool = False,
    started: str = "",
    finished: str = "",
    complete: bool = True,
) -> Stacks:
    """All traces as one document, the most suspicious group first. No trace is kept.

    traces: as `traces.read` has checked them. Of several jobs the one with most processes is
        grouped, and the advice names the others
    errors: node -> why it gave no answer; looked at after all traces (see `traces.load`)
    all_threads: ranks are together only when their other threads stand at the same places too
    started, finished: "": when the first and the last trace were taken
    complete: False: no rank counts as missing, because not all nodes were asked
    """
    reader = _Reader(all_threads)
    with _no_collector():
        for trace in traces:
            reader.read(trace)
    said = {**errors, **reader.errors}
    silent = {node: why for node, why in said.items() if node not in reader.answered}
    order = {node: at for at, node in enumerate(sorted(reader.nodes, key=natural))}
    names = sorted(reader.jobs, key=lambda name: (-reader.jobs[name].count, natural(name)))
    name = names[0] if names else ""
    job = reader.jobs[name] if names else _Job()
    buckets = _merged(job.buckets)
    found: list[tuple[Group, _Bucket | None]] = [
        (_group(bucket, reader.places, order), bucket) for bucket in buckets
    ]
    found += [(one, None) for one in _silent(silent)]
    by_node: dict[str, set[int]] = {}
    for bucket in buckets:
        for process in bucket.processes:
            if process.rank is not None:
                by_node.setdefault(process.node, set()).add(process.rank)
    without = [node for node in order if node not in by_node and node not in silent]
    lost = missing_ranks.missing(_world(job), by_node, silent, without) if complete else None
    if lost:
        found.append((lost, None))
    forks = _forks([one for one, _ in found])
    everything = max(job.count + len(lost.ranks if lost else ()), 1)
    found = [
        (_with_fork(one, fork), bucket) for (one, bucket), fork in zip(found, forks, strict=True)
    ]
    found.sort(key=lambda pair: _suspicion(pair[0], everything))
    ranks = [
        Rank(*process[:7], at, process.note)
        for at, (_, bucket) in enumerate(found)
        if bucket
        for process in bucket.processes
    ]
    ranks.sort(key=lambda one: (one.rank is None, one.rank or 0, order[one.node], one.pid))
    times = [text for text in reader.started if text]
    made = Stacks(
        started or min(times, default=""),
        finished or max(times, default=""),
        name,
        _world(job),
        tuple(one for one, _ in found),
        tuple(ranks),
        said,
        (),
        complete,
    )
    others = {other: reader.jobs[other].count for other in names[1:]}
    return stack_advice.advised(made, job.world_sizes, others, reader.instead)

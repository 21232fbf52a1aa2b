"""Ranks that stand at the same place, from the raw traces of all nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nodeready import hints, missing_ranks, stack_advice
from nodeready.gathered import PLACED, Bucket, Gathered, Job
from nodeready.nodesets import natural
from nodeready.places import Places
from nodeready.stacks import KINDS, Group, Rank, Stacks, Thread


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


def _merged(buckets: Mapping[tuple[Any, ...], Bucket]) -> list[Bucket]:
    """The buckets; who was seen once at a place says nothing against the others there."""
    largest: dict[tuple[Any, ...], Bucket] = {}
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


def _group(bucket: Bucket, places: Places, order: Mapping[str, int]) -> Group:
    stacks = sorted(stack for stack in bucket.stacks if stack is not None)
    # For the other kinds the place is worth telling when all are there.
    one_path = len({places.path_of[stack] for stack in stacks}) == 1
    frames = places.frames(stacks) if one_path and None not in bucket.stacks else ()
    native = () if bucket.native is None else places.frames([bucket.native])
    waits = bucket.kind in PLACED and bucket.verdict != "progressing"
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
    """For each group the index of the first frame that no larger one with a stack shares.

    Of two as large, the one with the lower rank counts as the larger.
    """
    tree: dict[tuple[int, str, str], int] = {}
    forks = [0] * len(groups)
    for at in sorted(range(len(groups)), key=lambda at: _largest_first(groups[at])):
        place = depth = 0
        for frame in groups[at].frames:
            place = tree.get((place, frame.function, frame.file), 0)
            if not place:
                break
            depth += 1
        forks[at] = depth
        place = 0
        for frame in groups[at].frames if groups[at].kind == "stack" else ():
            place = tree.setdefault((place, frame.function, frame.file), len(tree) + 1)
    return forks


def _largest_first(group: Group) -> tuple[bool, int, tuple[int, ...]]:
    return group.kind != "stack", -group.processes, group.ranks[:1]


def _with_fork(one: Group, fork: int) -> Group:
    return one if one.fork == fork else dataclasses.replace(one, fork=fork)


def _suspicion(group: Group, everything: int) -> tuple[int, int, int, int]:
    """The order: kinds without a stack, unless they are the most; then few before many."""
    size = max(group.processes, len(group.ranks), len(group.nodes))
    usual = group.kind != "stack" and 2 * size > everything
    kind = len(KINDS) if usual else KINDS.index(group.kind)
    return kind, size, group.ranks[0] if group.ranks else missing_ranks.MAX_RANKS, group.fork


def _world(job: Job) -> int | None:
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
    with _no_collector():
        reader = Gathered(all_threads)
        for trace in traces:
            reader.read(trace)
        return _grouped(reader, errors, started, finished, complete)


def _grouped(
    reader: Gathered, errors: Mapping[str, str], started: str, finished: str, complete: bool
) -> Stacks:
    said = {**errors, **reader.errors}
    silent = {node: why for node, why in said.items() if node not in reader.answered}
    order = {node: at for at, node in enumerate(sorted(reader.nodes, key=natural))}
    names = sorted(reader.jobs, key=lambda name: (-reader.jobs[name].count, natural(name)))
    name = names[0] if names else ""
    job = reader.jobs[name] if names else Job()
    buckets = _merged(job.buckets)
    found: list[tuple[Group, Bucket | None]] = [
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
    everything = job.count + len(silent) + len(lost.ranks if lost else ())
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

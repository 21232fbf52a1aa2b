"""What is kept of every node's trace until all are there: processes, by where they stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nodeready import missing_ranks
from nodeready.places import Places
from nodeready.standing import standing

_MAIN = "MainThread"
#: Groups that are at a place; the others differ in their reason alone.
PLACED = ("stack", "uninterruptible")


class Process(NamedTuple):
    """One process, with its `Rank.group` not known yet."""

    node: str
    pid: int
    rank: int | None
    local_rank: int | None
    state: str
    wait_channel: str
    cpu_s: float | None
    note: str


class Bucket:
    """Processes of one group. stacks: the different ones; None among them: one that has none."""

    __slots__ = ("kind", "native", "processes", "stacks", "threads", "verdict", "why")

    def __init__(self, kind: str, verdict: str | None, why: str) -> None:
        self.kind, self.verdict, self.why = kind, verdict, why
        self.processes: list[Process] = []
        self.stacks: set[int | None] = set()
        self.native: int | None = None
        self.threads: list[tuple[str, int]] = []


class Job:
    """What was found of one job."""

    def __init__(self) -> None:
        self.buckets: dict[tuple[Any, ...], Bucket] = {}
        self.world_sizes: dict[int, int] = {}
        self.count = 0


class Gathered:
    """Reads one trace after the other, and keeps of each only what is needed."""

    def __init__(self, all_threads: bool) -> None:
        self.all_threads = all_threads
        self.places = Places()
        self.jobs: dict[str, Job] = {}
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
                job = self.jobs[process["job"]] = Job()
            job.count += 1
            world = process["world_size"]
            if world is not None:
                job.world_sizes[world] = job.world_sizes.get(world, 0) + 1
            found = standing(process, numbers, self.places, interval)
            threads = self._threads(process, numbers) if self.all_threads else []
            path = None
            if found.stack is not None and found.kind in PLACED:
                path = self.places.path_of[found.stack]
            others: tuple[int, ...] = ()
            if threads:
                others = tuple(sorted(self.places.path_of[stack] for _, stack in threads))
            key = (found.kind, found.why, path, others, found.verdict)
            bucket = job.buckets.get(key)
            if bucket is None:
                bucket = job.buckets[key] = Bucket(found.kind, found.verdict, found.why)
                bucket.threads = threads
            bucket.stacks.add(found.stack)
            if process["native"] is not None and bucket.native is None:
                bucket.native = numbers[process["native"]]
            state, wait, note = process["state"], process["wait_channel"], process["note"]
            if found.kind == "traced" and process["tracer"] and not note:
                note = f"traced by pid {process['tracer']}"
            bucket.processes.append(
                Process(
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

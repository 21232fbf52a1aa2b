"""The documents of `audit` and `ready`: pure data, from the looks at all nodes.

A node costs its results and its snapshot; the plain data of its facts is made when a report asks,
and never kept, so that 10,000 nodes fit in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from nodeready.exit_codes import exit_code
from nodeready.subjects.gpus.gpu import Gpus
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.result import STATUSES, Result, worst
from nodeready.subjects.snapshot import Snapshot
from nodeready.subjects.wire import plain
from nodeready.text import sanitise

# --- The document of an audit.

#: Statuses of a node beside those of its results: it was not reached, or was lost on the way; it
#: could not be probed for another reason (sudo, an interrupt, a bug).
UNREACHABLE, FAILED = "unreachable", "failed"
#: The statuses of a node, worst first.
NODE_STATUSES: tuple[str, ...] = (UNREACHABLE, FAILED, *STATUSES)


@dataclass(frozen=True)
class NodeReport:
    """One node of an audit.

    status:  one of NODE_STATUSES
    seconds: wall time of its look, connection included; 0 when there was none
    error:   one line when it could not be looked at, else ""
    groups:  of the inventory that it is in
    age_s:   of a recorded verdict; None: the node was probed, or has no verdict
    counts:  of a recorded verdict: status -> number of further results with only a status
    read_facts: gives the facts as text of the run's format, where a worker made that text
    """

    name: str
    status: str
    seconds: float = 0.0
    error: str = ""
    groups: tuple[str, ...] = ()
    results: tuple[Result, ...] = ()
    snapshot: Snapshot | None = field(default=None, repr=False)
    age_s: float | None = None
    counts: tuple[tuple[str, int], ...] = ()
    read_facts: Callable[[], str] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        name: str,
        results: Iterable[Result] = (),
        *,
        snapshot: Snapshot | None = None,
        seconds: float = 0.0,
        error: str = "",
        unreachable: bool = False,
        groups: Iterable[str] = (),
    ) -> NodeReport:
        """The report of a node, with its status: the worst of its results, or the error's."""
        results = tuple(results)
        status = worst(results)
        if error:
            status = UNREACHABLE if unreachable else FAILED
        return cls(name, status, seconds, error, tuple(groups), results, snapshot)

    @property
    def statuses(self) -> Counter[str]:
        """Status -> how many of its results have it."""
        counts = Counter(result.status for result in self.results)
        counts.update(dict(self.counts))
        return counts

    @property
    def facts(self) -> dict[str, Any]:
        """Subject -> what was observed of it, as plain data; made anew each time."""
        if self.snapshot is None:
            return {}
        subjects = self.snapshot.subjects
        return {name: plain(subjects[name]) for name in SUBJECTS if name in subjects}


@dataclass(frozen=True)
class Outlier:
    """One fact in which some nodes of a group differ from most of it.

    fact:     ``SUBJECT.NAME``, e.g. ``gpus.driver``
    group:    the group of the inventory in which the nodes were compared
    majority: the value that most of them have; None: there is no such thing on the node
    count:    the number of nodes that have it
    nodes:    who differs -> their value
    """

    fact: Annotated[str, {"minLength": 1}]
    group: str
    majority: Any
    count: Annotated[int, {"minimum": 1}]
    nodes: Annotated[Mapping[str, Any], {"minProperties": 1}]


@dataclass(frozen=True)
class Recorded:
    """The source of the verdicts that the nodes gave themselves, when no node was probed.

    source:   the directory, or the address of Prometheus
    texts:    whether the results have their texts: metrics have none
    believed: nodes with a verdict that is believed
    stale:    nodes whose verdict is too old, or from the future
    missing:  nodes without a verdict
    newest_s, oldest_s: ages of the believed verdicts; None: without any
    """

    source: str
    texts: bool
    believed: Annotated[int, {"minimum": 0}]
    stale: Annotated[int, {"minimum": 0}]
    missing: Annotated[int, {"minimum": 0}]
    newest_s: Annotated[float | None, {"minimum": 0}]
    oldest_s: Annotated[float | None, {"minimum": 0}]


@dataclass(frozen=True)
class Audit:
    """What one audit found.

    started, finished: ISO 8601, UTC, with a Z
    policy_digest:     of the nodes' policies: equal digests, equal expectations
    complete:          False when it was interrupted: nodes that were not looked at are there with
                       the status FAILED and the error NOT_LOOKED_AT
    recorded:          None: the nodes were asked
    """

    started: str
    finished: str
    policy_digest: str
    nodes: Sequence[NodeReport]
    outliers: tuple[Outlier, ...] = ()
    complete: bool = True
    recorded: Recorded | None = None

    @cached_property
    def summary(self) -> dict[str, dict[str, int]]:
        """``{"nodes": {status: count}, "results": {status: count}}``, with every status."""
        nodes = Counter(node.status for node in self.nodes)
        results: Counter[str] = Counter()
        for node in self.nodes:
            results.update(node.statuses)
        return {
            "nodes": {status: nodes[status] for status in NODE_STATUSES},
            "results": {status: results[status] for status in STATUSES},
        }


# --- Readiness: whether a node may get a job, and why not. The node's own program asks, too.

#: The statuses with which a node gets no job. What could not be observed does not pass.
STOPPING: tuple[str, ...] = ("fail", "unknown")
#: Characters of one reason: Slurm and a prolog's log have a line for all of them.
_LENGTH = 160


def go(results: Iterable[Result]) -> bool:
    """Whether nothing failed and nothing is unknown, after waivers; a warning stops no job.

    Without any result nothing is shown: that is no go.
    """
    statuses = {result.status for result in results}
    return bool(statuses) and statuses.isdisjoint(STOPPING)


def reasons(results: Iterable[Result]) -> list[str]:
    """Why not: a short line ``check: actual`` for each result that stops, failures first."""
    results = list(results)
    if not results:
        return ["nothing was looked at"]
    ranked = [
        (STOPPING.index(result.status), _line(result))
        for result in results
        if result.status in STOPPING
    ]
    return [line for _, line in sorted(ranked, key=lambda row: row[0])]


def _line(result: Result) -> str:
    actual = " ".join(sanitise(result.actual).split()) or result.status
    text = f"{result.check}: {actual}"
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH - 3]}..."


# --- The document of `nodeready ready`: which nodes may get the job.


@dataclass(frozen=True)
class Ready:
    """The audit with the proofs among its results, and what follows from it.

    budget_s: seconds that it was allowed to take
    needed:   nodes that have to be ready; None: all of them
    """

    audit: Audit
    budget_s: int
    needed: int | None = None

    @cached_property
    def go(self) -> tuple[str, ...]:
        """The nodes that are ready, in the inventory's order."""
        return tuple(node.name for node in self.audit.nodes if _ready(node))

    @cached_property
    def no_go(self) -> Mapping[str, tuple[str, ...]]:
        """The nodes that are not ready, with reasons: ``CHECK: actual``, ``unreachable: ...``."""
        return {node.name: _reasons(node) for node in self.audit.nodes if not _ready(node)}

    @property
    def enough(self) -> bool:
        """Whether the job can start."""
        needed = len(self.audit.nodes) if self.needed is None else self.needed
        return self.audit.complete and len(self.go) >= max(1, needed)


def _ready(node: NodeReport) -> bool:
    return node.status not in (UNREACHABLE, FAILED) and go(node.results)


def _reasons(node: NodeReport) -> tuple[str, ...]:
    if node.error:
        return (f"{node.status}: {node.error}",)
    return tuple(reasons(node.results))


def slots(snapshot: Snapshot | None) -> int:
    """The job's processes that a node holds: one per GPU; 1 without a GPU."""
    gpus = snapshot.subjects.get("gpus") if snapshot else None
    return max(1, len(gpus.gpus)) if isinstance(gpus, Gpus) else 1


# --- The exit codes of both documents.


def audit_code(audit: Audit, fail_on: str = "fail") -> int:
    """The exit code of an audit; ``fail_on="warn"``: a warning or an outlier fails too."""
    have, results = audit.summary["nodes"], audit.summary["results"]
    bad = results["fail"] + results["unknown"]
    if fail_on == "warn":
        bad += results["warn"] + len(audit.outliers)
    return exit_code(
        interrupted=not audit.complete,
        usage=not audit.nodes,
        failed=have["failed"] > 0,
        unreachable=have["unreachable"] > 0,
        check=bad > 0,
    )


def ready_code(ready: Ready) -> int:
    """The exit code of ``ready``: with ``--nodes-needed``, enough ready nodes are all good."""
    have = ready.audit.summary["nodes"]
    return exit_code(
        interrupted=not ready.audit.complete,
        usage=not ready.audit.nodes,
        failed=have["failed"] > 0 and not ready.enough,
        unreachable=have["unreachable"] > 0 and not ready.enough,
        check=not ready.enough,
    )

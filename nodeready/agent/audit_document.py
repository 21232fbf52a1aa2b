"""The documents of `audit` and `ready`: pure data, from the snapshots of all nodes.

Memory has the results and the snapshot of each node. The plain data of its facts is made when a
report needs it, and not kept, so that 10,000 nodes fit in memory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, TypedDict

from nodeready.core.json_types import Count, Moment, Name, Positive
from nodeready.core.outcome import FAILED_WORD, UNREACHABLE_WORD, Gap, NodeGap, NodeGaps, gaps_code
from nodeready.core.result import STATUSES, Result, worst
from nodeready.core.text import sanitise
from nodeready.core.wire import plain
from nodeready.subjects.gpus.gpu import Gpus
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.snapshot import Snapshot, shown_facts

# --- The document of an audit.

#: Statuses of a node beside those of its results: it was not reached, or its connection was lost;
#: it could not be probed for another reason (sudo, an interrupt, a bug).
UNREACHABLE, FAILED = UNREACHABLE_WORD, FAILED_WORD
#: The statuses of a node, worst first.
NODE_STATUSES: tuple[str, ...] = (UNREACHABLE, FAILED, *STATUSES)

_Observation = Annotated[Any, {"type": ["object", "array", "string", "number", "boolean", "null"]}]
_Facts = Annotated[dict[str, _Observation], {"propertyNames": {"pattern": "^[a-z][a-z0-9_]*$"}}]


@dataclass(frozen=True)
class NodeReport:
    """One node of an audit."""

    JSON: ClassVar = ("name", "status", "seconds", "age_s?", "facts", "results")
    JSON_KEYS: ClassVar = {"age_s": "age_seconds"}

    name: Name
    # the worst of its results; unreachable: it was not reached, or the connection was lost;
    # failed: it could not be probed for another reason
    status: Annotated[str, {"enum": NODE_STATUSES}]
    # wall time of its probe, connection included; 0: there was none
    seconds: Annotated[float, {"minimum": 0}] = 0.0
    gap: Gap | None = None  # why it could not be probed; None: it was probed
    groups: tuple[str, ...] = ()  # of the inventory that it is in
    results: tuple[Result, ...] = ()
    snapshot: Snapshot | None = field(default=None, repr=False)
    # of a recorded verdict, by the clock of the machine that collected it; None: the node was
    # probed, or has no verdict
    age_s: float | None = None
    # gives the facts as text of the run's format, where a worker made that text
    read_facts: Callable[[], str] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        name: str,
        results: Iterable[Result] = (),
        *,
        snapshot: Snapshot | None = None,
        seconds: float = 0.0,
        gap: Gap | None = None,
        groups: Iterable[str] = (),
    ) -> NodeReport:
        """The report of a node, with its status: the worst of its results, or the gap's."""
        results = tuple(results)
        status = gap.word if gap else worst(results)
        return cls(name, status, seconds, gap, tuple(groups), results, snapshot)

    @property
    def error(self) -> str:
        """Why it could not be probed, one line; "": it was probed."""
        return self.gap.reason if self.gap else ""

    @property
    def statuses(self) -> Counter[str]:
        """Status -> how many of its results have it."""
        return Counter(result.status for result in self.results)

    @property
    def facts(self) -> _Facts:
        """Subject -> its observation, as plain data. A subject that could not
        be observed has the field unknown alone, with the reason.
        """
        if self.read_facts is not None:
            facts: _Facts = json.loads(self.read_facts())
            return facts
        if self.snapshot is None:
            return {}
        subjects = self.snapshot.subjects
        names = [name for name in SUBJECTS if name in subjects]
        return {name: plain(shown_facts(name, subjects[name])) for name in names}


@dataclass(frozen=True)
class Outlier:
    """One fact in which some nodes of a group differ from most of it."""

    fact: Name  # ``SUBJECT.NAME``, e.g. ``gpus.driver``
    group: str  # the group of the inventory in which the nodes were compared
    majority: Any  # the value that most of them have; None: there is no such thing on the node
    count: Positive  # the number of nodes that have it
    nodes: Annotated[Mapping[str, Any], {"minProperties": 1}]  # who differs -> their value


@dataclass(frozen=True)
class Recorded:
    """The source of the verdicts that the nodes gave themselves, when no node was probed."""

    source: str  # the directory
    texts: bool  # true: the results have their texts
    believed: Count  # nodes with a verdict that is believed
    stale: Count  # nodes whose verdict is too old, or from the future
    missing: Count  # nodes without a verdict
    # ages of the believed verdicts; None: without any
    newest_s: Annotated[float | None, {"minimum": 0}]
    oldest_s: Annotated[float | None, {"minimum": 0}]  # likewise


class AuditSummary(TypedDict):
    """Counts."""

    nodes: Annotated[dict[str, Count], {"keys": NODE_STATUSES}]  # nodes by status
    results: Annotated[dict[str, Count], {"keys": STATUSES}]  # results by status


@dataclass(frozen=True)
class Audit:
    """The document of `nodeready audit`. Text is one line without control characters; bytes that
    are no UTF-8 stand in it as \\xNN. Units are in the names of fields.

    gaps:          the nodes that were not probed, each with the reason
    """

    SCHEMA: ClassVar = "audit"
    VERSION: ClassVar = 2
    JSON: ClassVar[tuple[str, ...]] = (
        *("started", "finished", "policy_digest", "complete", "recorded?"),
        *("gaps", "nodes", "outliers", "summary"),
    )

    started: Moment  # when the audit began, UTC
    finished: Moment  # when it ended, UTC
    # of the nodes' policies: equal digests, equal expectations
    policy_digest: Annotated[str, {"pattern": "^[0-9a-f]*$"}]
    nodes: Sequence[NodeReport]
    outliers: tuple[Outlier, ...] = ()  # facts in which some nodes differ from most of their group
    complete: bool = True  # False when it was interrupted: some nodes were not probed
    # the source of the verdicts, of an audit of recorded verdicts; None: the nodes were probed
    recorded: Recorded | None = None

    @cached_property
    def gaps(self) -> NodeGaps:
        return tuple(NodeGap(node.name, *node.gap) for node in self.nodes if node.gap)

    @cached_property
    def summary(self) -> AuditSummary:
        """How many nodes and results have each status, with every status."""
        nodes = Counter(node.status for node in self.nodes)
        results: Counter[str] = Counter()
        for node in self.nodes:
            results.update(node.statuses)
        return {
            "nodes": {status: nodes[status] for status in NODE_STATUSES},
            "results": {status: results[status] for status in STATUSES},
        }


# --- Readiness: whether a node may get a job, and why not. The node's own program uses this, too.

STOPPING: tuple[str, ...] = ("fail", "unknown")  # the statuses with which a node gets no job


def go(results: Iterable[Result]) -> bool:
    """Whether there are results, and none has failed or is unknown; a warning stops no job."""
    statuses = {result.status for result in results}
    return bool(statuses) and statuses.isdisjoint(STOPPING)


def reasons(results: Iterable[Result]) -> list[str]:
    """A line ``check: actual`` for each result that stops a job, in their order."""
    results = list(results)
    if not results:
        return ["nothing was looked at"]
    return [_line(result) for result in _stopping(results)]


def _stopping(results: Iterable[Result]) -> list[Result]:
    """The results that stop a job: the worst severity first, and of one severity the failures."""
    stopping = [result for result in results if result.status in STOPPING]
    return sorted(stopping, key=lambda result: result.rank[::-1])


def _line(result: Result) -> str:
    actual = " ".join(sanitise(result.actual).split()) or result.status
    return f"{result.check}: {actual}"


# --- The document of `nodeready ready`: which nodes may get the job.


@dataclass(frozen=True)
class Ready:
    """The document of `nodeready ready`: an audit with the proofs among its results, and the nodes
    that are ready.
    """

    SCHEMA: ClassVar = "ready"
    VERSION: ClassVar = 2
    JSON: ClassVar = (
        *(f"audit.{name}" for name in Audit.JSON[:5]),
        *("budget_s", "needed", "enough", "go", "no_go"),
        *(f"audit.{name}" for name in Audit.JSON[5:]),
    )

    audit: Audit
    budget_s: Positive  # maximum of seconds that the command was allowed to take
    # nodes that have to be ready; None: all of them
    needed: Annotated[int | None, {"minimum": 1}] = None

    @cached_property
    def go(self) -> tuple[str, ...]:
        """The nodes that are ready, in the order of the inventory."""
        return tuple(node.name for node in self.audit.nodes if _ready(node))

    @cached_property
    def no_go(self) -> Mapping[str, tuple[str, ...]]:
        """The nodes that are not ready, each with its reasons: ``CHECK: value``, or why it could
        not be probed.
        """
        return {node.name: _reasons(node) for node in self.audit.nodes if not _ready(node)}

    @property
    def enough(self) -> bool:
        """Whether the job can start."""
        needed = len(self.audit.nodes) if self.needed is None else self.needed
        return self.audit.complete and len(self.go) >= max(1, needed)


def _ready(node: NodeReport) -> bool:
    return node.status not in (UNREACHABLE, FAILED) and go(node.results)


def _reasons(node: NodeReport) -> tuple[str, ...]:
    return (f"{node.status}: {node.error}",) if node.error else tuple(reasons(node.results))


def slots(snapshot: Snapshot | None) -> int:
    """The job's processes that a node holds: one per GPU; 1 without a GPU."""
    gpus = snapshot.subjects.get("gpus") if snapshot else None
    return max(1, len(gpus.gpus)) if isinstance(gpus, Gpus) else 1


# --- The exit codes of both documents.


def nagios_code(audit: Audit) -> int:
    """The exit code of an audit in Nagios's format.

    2 when a check failed or a node could not be reached; else 3 when something could not be
    observed, a node could not be probed, or the audit is partial or empty; else 1 for a warning.
    Unknown outranks a warning, because it may hide a failure.
    """
    counts, results = audit.summary["nodes"], audit.summary["results"]
    if results["fail"] or counts[UNREACHABLE]:
        return 2
    if results["unknown"] or counts[FAILED] or not audit.complete or not audit.nodes:
        return 3
    return 1 if results["warn"] else 0


def audit_code(audit: Audit, fail_on: str = "fail") -> int:
    """The exit code of an audit; ``fail_on="warn"``: a warning or an outlier fails too."""
    results = audit.summary["results"]
    bad = results["fail"] + results["unknown"]
    if fail_on == "warn":
        bad += results["warn"] + len(audit.outliers)
    return gaps_code(audit.gaps, complete=audit.complete, usage=not audit.nodes, check=bad > 0)


def ready_code(ready: Ready) -> int:
    """The exit code of ``ready``: 0 with enough ready nodes (``--nodes-needed``)."""
    audit = ready.audit
    gaps = () if ready.enough else audit.gaps
    return gaps_code(gaps, complete=audit.complete, usage=not audit.nodes, check=not ready.enough)

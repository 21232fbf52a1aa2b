"""The document of `nodeready postmortem`: who failed first, of what, and who only lost a peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

from nodeready.agent.failure_rules import KINDS, ROLES
from nodeready.core.json_types import Count, Moment, MomentOrEmpty
from nodeready.core.outcome import NodeGaps, gaps_code
from nodeready.runs.stacks.document import Suspect

#: Kinds of a cause; `environment`: a variable of the job keeps its ranks apart; `unclear`: the
#: evidence does not tell.
CAUSE_KINDS = (*KINDS, "environment", "unclear")
#: Who saw the fault of a cause on its node itself: the kernel, or a log that only this node has.
KERNEL, LOG = "kernel", "log"


@dataclass(frozen=True)
class FirstFailure:
    """The cause of a job's end.

    kind:     see CAUSE_KINDS
    text:     one line: who failed, of what
    ranks:    that failed first; (): not known, or the whole job
    nodes:    of these
    frame:    innermost call of the user's code, `train.py:12 in step`; "": not known
    time:     by this machine's clock; "": not known
    suspects: what failed, with the evidence for and against; the most suspicious first
    missing:  what would help, one line each
    """

    kind: Annotated[str, {"enum": CAUSE_KINDS}]
    text: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    frame: str = ""
    time: MomentOrEmpty = ""
    suspects: tuple[Suspect, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class FailureGroup:
    """Equal failures of several ranks.

    role:    `failed`: by themselves; `lost`: they lost a peer; `waited`: until a timeout; `ended`:
             by a signal or the scheduler; `report`: a launcher reports how they ended
    kind:    see CAUSE_KINDS
    text:    of one of them
    count:   how many
    example: `NODE:PATH:LINE` of one of them
    time:    of the first; "": not known
    """

    role: Annotated[str, {"enum": ROLES}]
    kind: Annotated[str, {"enum": CAUSE_KINDS}]
    text: str
    count: Annotated[int, {"minimum": 1}]
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    example: str
    time: MomentOrEmpty = ""


class NodeEvent(NamedTuple):
    """What a node keeps beside the logs, in the job's time.

    kind:  `core`: a core file; `gate`: the node's own check is no-go, or has drained the node
    ranks: of a core; (): not known
    """

    node: str
    kind: Annotated[str, {"enum": ("core", "gate")}]
    ranks: tuple[int, ...]
    time: MomentOrEmpty
    text: str


class ClockOffset(NamedTuple):
    """How far a node's clock is ahead of this machine's, in seconds, and how sure that is."""

    offset_s: float
    uncertainty_s: Annotated[float, {"minimum": 0}]


@dataclass(frozen=True)
class Postmortem:
    """The document of `nodeready postmortem`. Texts of nodes are one line.

    started:     UTC
    finished:    UTC
    job:         "": not named
    source:      the pattern or the directory of the logs
    cause:       of the job's end
    failures:    all failures, the cause first, victims last
    logs:        number of files that were read
    sources:     source of evidence -> what it gave
    missing:     source of evidence -> why it gave nothing
    nodes:       cores and no-gos of the nodes in the job's time
    clocks:      node -> its clock; only where it was measured
    gaps:        the nodes that gave no answer, or only a part of it
    complete:    False when it was interrupted
    witnesses:   node of the cause -> KERNEL or LOG; a node without a witness was named elsewhere
    """

    SCHEMA: ClassVar = "postmortem"
    VERSION: ClassVar = 2
    JSON: ClassVar = (
        *("started", "finished", "job", "source", "complete", "cause", "failures", "logs"),
        *("sources", "missing", "nodes", "clocks", "gaps"),
    )

    started: Moment
    finished: Moment
    job: str
    source: str
    cause: FirstFailure
    failures: tuple[FailureGroup, ...]
    logs: Count
    sources: Mapping[str, str]
    missing: Mapping[str, str]
    nodes: tuple[NodeEvent, ...]
    clocks: Mapping[str, ClockOffset]
    gaps: NodeGaps
    complete: bool = True
    witnesses: Mapping[str, str] = field(default_factory=dict)


def postmortem_code(document: Postmortem) -> int:
    """The exit code: 0 if a cause is named and no node's answer is missing."""
    return gaps_code(
        document.gaps, complete=document.complete, check=document.cause.kind == "unclear"
    )

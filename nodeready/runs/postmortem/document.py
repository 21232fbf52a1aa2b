"""The document of `nodeready postmortem`: who failed first, of what, and who only lost a peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

from nodeready.agent.failures.rules import KINDS, ROLES
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
    """The cause of a job's end."""

    kind: Annotated[str, {"enum": CAUSE_KINDS}]  # see CAUSE_KINDS
    text: str  # one line: who failed, of what
    ranks: tuple[int, ...] = ()  # that failed first; (): not known, or the whole job
    nodes: tuple[str, ...] = ()  # of these
    frame: str = ""  # innermost call of the user's code, `train.py:12 in step`; "": not known
    time: MomentOrEmpty = ""  # by this machine's clock; "": not known
    # what failed, with the evidence for and against; the most suspicious first
    suspects: tuple[Suspect, ...] = ()
    missing: tuple[str, ...] = ()  # what would help, one line each


@dataclass(frozen=True)
class FailureGroup:
    """Equal failures of several ranks."""

    # `failed`: by themselves; `lost`: they lost a peer; `waited`: until a timeout; `consequence`:
    # the error says that its cause is elsewhere; `ended`: by a signal or the scheduler;
    # `report`: a launcher reports how they ended
    role: Annotated[str, {"enum": ROLES}]
    kind: Annotated[str, {"enum": CAUSE_KINDS}]  # see CAUSE_KINDS
    text: str  # of one of them
    count: Annotated[int, {"minimum": 1}]  # how many
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    example: str  # `NODE:PATH:LINE` of one of them
    time: MomentOrEmpty = ""  # of the first; "": not known


class NodeEvent(NamedTuple):
    """What a node keeps beside the logs, in the job's time."""

    node: str
    # `core`: a core file; `gate`: the node's own check is no-go, or has drained the node
    kind: Annotated[str, {"enum": ("core", "gate")}]
    ranks: tuple[int, ...]  # of a core; (): not known
    time: MomentOrEmpty
    text: str


class ClockOffset(NamedTuple):
    """How far a node's clock is ahead of this machine's, in seconds, and how sure that is."""

    offset_s: float
    uncertainty_s: Annotated[float, {"minimum": 0}]


@dataclass(frozen=True)
class Postmortem:
    """The document of `nodeready postmortem`. Texts of nodes are one line."""

    SCHEMA: ClassVar = "postmortem"
    VERSION: ClassVar = 2
    JSON: ClassVar = (
        *("started", "finished", "job", "source", "complete", "cause", "failures", "logs"),
        *("sources", "missing", "nodes", "clocks", "gaps"),
    )

    started: Moment  # UTC
    finished: Moment  # UTC
    job: str  # "": not named
    source: str  # the pattern or the directory of the logs
    cause: FirstFailure  # of the job's end
    failures: tuple[FailureGroup, ...]  # all failures, the cause first, victims last
    logs: Count  # number of files that were read
    sources: Mapping[str, str]  # source of evidence -> what it gave
    missing: Mapping[str, str]  # source of evidence -> why it gave nothing
    nodes: tuple[NodeEvent, ...]  # cores and no-gos of the nodes in the job's time
    clocks: Mapping[str, ClockOffset]  # node -> its clock; only where it was measured
    gaps: NodeGaps  # the nodes that gave no answer, or only a part of it
    complete: bool = True  # False when it was interrupted
    # node of the cause -> KERNEL or LOG; a node without a witness was named elsewhere
    witnesses: Mapping[str, str] = field(default_factory=dict)


def postmortem_code(document: Postmortem) -> int:
    """The exit code: 0 if a cause is named and no node's answer is missing."""
    return gaps_code(
        document.gaps, complete=document.complete, check=document.cause.kind == "unclear"
    )

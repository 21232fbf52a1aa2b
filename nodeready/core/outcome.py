"""The outcome of asking one node: a value, or the gap that it leaves; the same for every command.

A transport yields outcomes. A document names its gaps, and everything that follows from them is
derived from these: the exit code, ``--limit @last-failed``, the nodes that are named after an
interrupt, the rows of a table, and the JSON key ``gaps``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Generic, NamedTuple, TypeVar

from nodeready.core.exit_codes import exit_code

ValueT = TypeVar("ValueT")

# --- The kinds of gaps.

#: No connection; the connection was lost.
UNREACHABLE, LOST = "unreachable", "lost"
#: No answer within the limit; the limit ended the command; the deadline of all requests was first.
HUNG, TIMEOUT, LATE = "hung", "timeout", "late"
#: sudo wants a password; sudo refuses.
SUDO, REFUSED = "sudo", "refused"
#: The node printed too much; its answer cannot be read; it has no Python for the program.
OUTPUT, INVALID, NO_PYTHON = "output", "invalid", "no_python"
#: The node answered, and its answer is not complete.
INCOMPLETE = "incomplete"
#: An internal error; the user interrupted the run before the node had answered.
FAILED, INTERRUPTED = "failed", "interrupted"

KINDS = (
    UNREACHABLE, LOST, HUNG, TIMEOUT, LATE, SUDO, REFUSED, OUTPUT, INVALID, NO_PYTHON,
    INCOMPLETE, FAILED, INTERRUPTED,
)  # fmt: skip

#: The node's own connection is the trouble: exit status 4.
UNREACHED = frozenset({UNREACHABLE, LOST})
#: After these, further questions to the node are useless.
OVER = frozenset({UNREACHABLE, LOST, HUNG, SUDO, REFUSED, LATE, INTERRUPTED})
#: A finding about the node, and no failure of nodeready: exit status 3.
FINDINGS = frozenset({NO_PYTHON, INCOMPLETE, INTERRUPTED})
#: A failure of nodeready: exit status 1.
FAILURES = frozenset(KINDS) - UNREACHED - FINDINGS

#: The words for a node of a gap, in tables and in a node's status: it was not reached, or its
#: connection was lost; its answer is not complete; it gave no answer for another reason.
UNREACHABLE_WORD, INCOMPLETE_WORD, FAILED_WORD = WORDS = ("unreachable", "incomplete", "failed")


class Gap(NamedTuple):
    """Why a node gave no answer, or only a part of it."""

    kind: str  # see KINDS
    reason: str  # one line
    evidence: str = ""  # what the node printed instead; "": nothing

    @property
    def is_unreached(self) -> bool:
        """Whether the node was not reached, or its connection was lost."""
        return self.kind in UNREACHED

    @property
    def word(self) -> str:
        """One of WORDS."""
        if self.kind in UNREACHED:
            return UNREACHABLE_WORD
        return INCOMPLETE_WORD if self.kind == INCOMPLETE else FAILED_WORD


class NodeGap(NamedTuple):
    """A node that gave no answer, or only a part of it."""

    node: str
    kind: Annotated[str, {"enum": KINDS}]
    reason: str  # one line
    evidence: str = ""  # what the node printed instead; "": nothing

    @property
    def gap(self) -> Gap:
        return Gap(self.kind, self.reason, self.evidence)


#: The gaps of a document: each node at most once.
NodeGaps = tuple[NodeGap, ...]


class GapError(Exception):
    """Ends a conversation without a value."""

    def __init__(self, gap: Gap) -> None:
        super().__init__(gap.reason)
        self.gap = gap


@dataclass(frozen=True)
class Outcome(Generic[ValueT]):
    """What asking one node gave: a value, a gap, or both, where only a part of the value came."""

    node: str
    value: ValueT | None = None
    gap: Gap | None = None
    seconds: float = 0.0  # from the first question to the last answer, with the connection

    @property
    def reason(self) -> str:
        """The reason of the gap, one line; "": the node answered."""
        return self.gap.reason if self.gap else ""

    @property
    def is_interrupted(self) -> bool:
        """Whether the user interrupted the run before the node had answered."""
        return self.gap is not None and self.gap.kind == INTERRUPTED

    @property
    def is_unreached(self) -> bool:
        """Whether the node was not reached, or its connection was lost."""
        return self.gap is not None and self.gap.is_unreached


# --- What follows from gaps.


def gaps_of(outcomes: Iterable[Outcome[ValueT]]) -> NodeGaps:
    return tuple(NodeGap(outcome.node, *outcome.gap) for outcome in outcomes if outcome.gap)


def node_gaps(gaps: Mapping[str, Gap]) -> NodeGaps:
    """The gaps by node, as a document has them."""
    return tuple(NodeGap(node, *gap) for node, gap in gaps.items())


def reasons_of(gaps: Iterable[NodeGap]) -> dict[str, str]:
    """Node -> the reason of its gap."""
    return {gap.node: gap.reason for gap in gaps}


def interrupted_nodes(gaps: Iterable[NodeGap]) -> Iterator[str]:
    """The nodes that had not answered when the user interrupted the run."""
    return (gap.node for gap in gaps if gap.kind == INTERRUPTED)


def failed_nodes(gaps: Iterable[NodeGap]) -> Iterator[str]:
    """The nodes that ``--limit @last-failed`` means: those that were asked and did not answer."""
    return (gap.node for gap in gaps if gap.kind not in (INTERRUPTED, INCOMPLETE))


def gaps_code(
    gaps: Iterable[NodeGap],
    *,
    complete: bool,
    usage: bool = False,
    failed: bool = False,
    check: bool = False,
    failures: frozenset[str] = FAILURES,
) -> int:
    """The exit code of a document with these gaps; see `exit_codes.exit_code`.

    complete: False when the run was interrupted
    failures: kinds that are failures of nodeready; a gap of another kind is a finding, or the
              node's own connection
    """
    kinds = {gap.kind for gap in gaps}
    failed, unreachable = failed or not kinds.isdisjoint(failures), not kinds.isdisjoint(UNREACHED)
    check = check or bool(kinds)
    return exit_code(
        interrupted=not complete, usage=usage, failed=failed, unreachable=unreachable, check=check
    )

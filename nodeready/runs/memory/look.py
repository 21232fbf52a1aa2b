"""The plain types of the memory: a look, a node at a look, and an event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nodeready.core.result import Result

Value = str | int | float | bool | None


@dataclass(frozen=True)
class NodeLook:
    """What the memory knows of one node at one look."""

    node: str
    time_s: float  # of the look, seconds since 1970
    boot_id: str  # of the boot that the node was in; "": not observed
    look: int  # id of the look; 0: of no look of the memory, but of a JSON file
    error: str  # why the node gave no answer; "": it answered. The rest is of its last answer
    # ``SUBJECT.path.to[identity].key`` -> its value; the stable facts alone
    facts: Mapping[str, Value]
    # ``SUBJECT.PART.NAME`` -> its total in this boot: ``nics.eth0.rx_errors``
    counters: Mapping[str, int]
    results: Mapping[str, Result]  # check id -> its result; ok and na have no texts
    unreachable: bool = False  # the error is that the node was not reached
    # of the node's newest change or look, among the looks at it; 0: of a JSON file
    number: int = 0
    # owner of results (a subject, or a check that a policy declares) -> the words of the policy
    # that decided them (`sections.policy_words`)
    policies: Mapping[str, str] = field(default_factory=dict)
    # owner of results -> the number of earlier looks at the node that did not make them
    missed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """One run of a command over nodes."""

    id: int  # 0: not yet kept
    time_s: float  # when its nodes had answered, seconds since 1970
    command: str
    inventory: str  # as the command line named it
    policy_digest: str  # of the nodes' policies: equal digests, equal expectations
    complete: bool  # False: it was interrupted
    code: int  # its exit code
    # as `Audit.summary`: nodes by status, results by status
    summary: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Event:
    """Something that happened to a node or a part, and is no state."""

    time_s: float  # seconds since 1970
    look: int  # id of the look that reported it
    node: str
    serial: str  # of the part; "": the node itself
    kind: str  # one of `lemons.WITNESSES`
    text: str  # one line
    user: str = ""  # of the job in whose log it is, by Slurm; "": another source


@dataclass(frozen=True)
class PartSpan:
    """A part in one place, from the first look that saw it there."""

    kind: str  # ``gpu``, ``adapter``
    serial: str  # of the part, or its uuid where it has no serial
    uuid: str  # "": it has none
    node: str
    slot: str  # its place in the node: the PCI address
    first_s: float  # time of the first look that saw it there, seconds since 1970
    # of the last look that saw it there; where it is gone: of the first look without it
    last_s: float
    is_there: bool  # it was there at the last look at the node

    def was_there(self, time_s: float) -> bool:
        """Whether a look at this time may have seen the part there."""
        return self.first_s <= time_s and (
            time_s < self.last_s or (self.is_there and time_s == self.last_s)
        )

"""The plain types of the memory: a look, a node at a look, and an event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nodeready.core.result import Result

Value = str | int | float | bool | None


@dataclass(frozen=True)
class NodeLook:
    """What the memory knows of one node at one look.

    time_s:   of the look, seconds since 1970
    boot_id:  of the boot that the node was in; "": not observed
    look:     id of the look; 0: of no look of the memory, but of a JSON file
    error:    why the node gave no answer; "": it answered. The rest is of its last answer
    facts:    ``SUBJECT.path.to[identity].key`` -> its value; the stable facts alone
    counters: ``SUBJECT.PART.NAME`` -> its total in this boot: ``nics.eth0.rx_errors``
    results:  check id -> its result; ok and na have no texts
    unreachable: the error is that the node was not reached
    number:   of the node's newest change or look, among the looks at it; 0: of a JSON file
    policies: owner of results (a subject, or a check that a policy declares) -> the words of the
              policy that decided them (`sections.policy_words`)
    missed:   owner of results -> the number of earlier looks at the node that did not make them
    """

    node: str
    time_s: float
    boot_id: str
    look: int
    error: str
    facts: Mapping[str, Value]
    counters: Mapping[str, int]
    results: Mapping[str, Result]
    unreachable: bool = False
    number: int = 0
    policies: Mapping[str, str] = field(default_factory=dict)
    missed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """One run of a command over nodes.

    id:            0: not yet kept
    time_s:        when its nodes had answered, seconds since 1970
    inventory:     as the command line named it
    policy_digest: of the nodes' policies: equal digests, equal expectations
    complete:      False: it was interrupted
    code:          its exit code
    summary:       as `Audit.summary`: nodes by status, results by status
    """

    id: int
    time_s: float
    command: str
    inventory: str
    policy_digest: str
    complete: bool
    code: int
    summary: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Event:
    """Something that happened to a node or a part, and is no state.

    time_s:  seconds since 1970
    look:    id of the look that reported it
    serial:  of the part; "": the node itself
    kind:    one of `witnesses.WITNESSES`
    text:    one line
    user:    of the job in whose log it is, by Slurm; "": another source
    """

    time_s: float
    look: int
    node: str
    serial: str
    kind: str
    text: str
    user: str = ""


@dataclass(frozen=True)
class PartSpan:
    """A part in one place, from the first look that saw it there.

    kind:    ``gpu``, ``adapter``
    serial:  of the part, or its uuid where it has no serial
    uuid:    "": it has none
    slot:    its place in the node: the PCI address
    first_s: time of the first look that saw it there, seconds since 1970
    last_s:  of the last look that saw it there; where it is gone: of the first look without it
    is_there: it was there at the last look at the node
    """

    kind: str
    serial: str
    uuid: str
    node: str
    slot: str
    first_s: float
    last_s: float
    is_there: bool

    def was_there(self, time_s: float) -> bool:
        """Whether a look at this time may have seen the part there."""
        return self.first_s <= time_s and (
            time_s < self.last_s or (self.is_there and time_s == self.last_s)
        )

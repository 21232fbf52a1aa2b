"""The ranks that a rank waits for, over all nodes: the opposite ends of its waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nodeready.agent.stacks.links import DESCENDANTS, WHOLE_PROCESS
from nodeready.runs.stacks.trace import TracedProcess

#: Maximum connections that are kept, over all nodes.
_MAX_ENDS = 1 << 20
#: Activities of hints where the main thread waits for a descendant; and where a library's threads
#: have the connections, or the main thread polls.
_CHILD_ACTIVITIES = frozenset({"data", "child"})
_PROCESS_ACTIVITIES = frozenset({"network", "sleep"})

#: Prefix of an end that several processes share.
_UNCERTAIN = "may "

#: Node and pid of a process.
Place = tuple[str, int]


class LinkEnds(NamedTuple):
    """The peers that a process waits for: `pid 55` of its node, or a connection's addresses."""

    direct: tuple[str, ...]  # of the classified thread
    child_ends: tuple[str, ...]  # of the descendants
    all_ends: tuple[str, ...]  # of any connection


def ends(process: TracedProcess, thread: str) -> LinkEnds | None:
    """The waits of one process; None: not known. thread: the classified thread"""
    rows = process.waits_for
    # Another rank may wait for a connection to another node, too.
    far = [" ".join(reversed(end.split(" "))) for end in process.ends if " " in end]
    if not rows and not far:
        return None
    return LinkEnds(
        tuple(text for name, text in rows if name == thread),
        tuple(text for name, text in rows if name == DESCENDANTS),
        (*(text for name, text in rows if name == WHOLE_PROCESS), *far),
    )


def hosts(link_ends: LinkEnds | None) -> tuple[str, ...]:
    """The peers without the numbers that differ between processes."""
    texts = link_ends.direct if link_ends else ()
    return tuple(sorted({text.rpartition(":")[0].partition(" ")[0] for text in texts}))


class Links:
    """The owners of the ends of connections."""

    def __init__(self) -> None:
        #: Own address and peer's, or the address of a listener -> process; None: several.
        self._owner: dict[str, Place | None] = {}

    def read(self, node: str, process: TracedProcess) -> None:
        """Keep the ends of one process."""
        for end in process.ends if len(self._owner) < _MAX_ENDS else ():
            place = node, process.pid
            self._owner[end] = place if self._owner.get(end, place) == place else None

    def owner(self, node: str, text: str) -> Place | None:
        """The process at the opposite end; None: not known, or no rank."""
        if text.startswith("pid "):
            return node, int(text[4:]) if text[4:].isdecimal() else 0
        return self._owner.get(text) or self._owner.get(text.partition(" ")[0])


class LinkWait(NamedTuple):
    """Processes of one group."""

    ranks: frozenset[int]
    activity: str  # of their hint
    ends: Mapping[Place, LinkEnds]  # node and pid -> the ends of that process
    processes: int
    awake: bool  # they woke up between the samples


def waited_for(
    groups: Sequence[LinkWait],
    links: Links,
    rank_of: Mapping[Place, int],
    waiting_activities: frozenset[str],
) -> list[tuple[int, ...]]:
    """For each group the ranks that all of its processes wait for; (): not all of them wait.

    waiting_activities: activities of hints in which a process waits for ranks
    Of several ends only one may count: such a group waits if one of those ranks does not wait.
    """
    waited: list[tuple[int, ...]] = [()] * len(groups)
    waiting = {
        rank for group in groups if group.activity in waiting_activities for rank in group.ranks
    }
    awake = {rank for group in groups if group.awake for rank in group.ranks}
    # The surest first: a rank that waits is not the awaited one of a group with several ends.
    for level in (_certain_ends, _direct, _all_ends):
        candidates: list[tuple[int, list[set[int]]]] = []
        for at, group in enumerate(groups):
            if (
                waited[at]
                or group.activity in waiting_activities
                or len(group.ends) < group.processes
            ):
                continue
            sets = []
            for place, ends in group.ends.items():
                owners = [links.owner(place[0], end) for end in level(ends, group.activity)]
                ranks = {rank_of[owner] for owner in owners if owner and owner in rank_of}
                sets.append(ranks - {rank_of.get(place, -1)})
            candidates.append((at, sets))
        # Groups with one end wait for it; then groups with several wait for the remaining ranks.
        candidates.sort(key=lambda row: max(map(len, row[1]), default=0))
        for at, ends_of in candidates:
            # For an arbitrary connection it is only likely: an active rank may use it.
            excluded = {_certain_ends: set(), _direct: waiting, _all_ends: waiting | awake}[level]
            sets = [ranks - excluded for ranks in ends_of]
            if all(sets) and (
                level is not _certain_ends or all(len(ranks) == 1 for ranks in sets)
            ):
                waited[at] = tuple(sorted(set().union(*sets)))
                waiting |= groups[at].ranks
    return waited


def _certain_ends(ends: LinkEnds, activity: str) -> tuple[str, ...]:
    """The ends that the thread waits for and that only one process has."""
    texts = _waited(ends, activity)
    return () if any(text.startswith(_UNCERTAIN) for text in texts) else texts


def _direct(ends: LinkEnds, activity: str) -> tuple[str, ...]:
    """The ends that the thread waits for, including ends that several processes share."""
    return tuple(text.removeprefix(_UNCERTAIN) for text in _waited(ends, activity))


def _waited(ends: LinkEnds, activity: str) -> tuple[str, ...]:
    return (*ends.direct, *(ends.child_ends if activity in _CHILD_ACTIVITIES else ()))


def _all_ends(ends: LinkEnds, activity: str) -> tuple[str, ...]:
    """The ends of all connections, where the thread waits for no particular one."""
    return ends.all_ends if activity in _PROCESS_ACTIVITIES and not _direct(ends, activity) else ()

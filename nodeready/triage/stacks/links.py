"""Which ranks a rank waits for, over all nodes: whoever has the other end of what it waits at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nodeready.node.stacks.links import BELOW, WHOLE

#: Connections that are kept of all nodes together.
_MOST_ENDS = 1 << 20
#: What a hint is about where the main thread waits for a process below its own; and where a
#: library's own threads have the connections, or it looks again and again.
_BELOW_ABOUTS = frozenset({"data", "child"})
_WHOLE_ABOUTS = frozenset({"network", "sleep"})

#: Before an end that others have as well.
_UNCERTAIN = "may "

Place = tuple[str, int]


class LinkEnds(NamedTuple):
    """Whom one process waits for, each a `pid 55` of its node or both addresses of a connection.

    direct: of the thread that counts; below: of the processes below; whole: of any connection
    """

    direct: tuple[str, ...]
    child_ends: tuple[str, ...]
    all_ends: tuple[str, ...]


def ends(process: Mapping[str, Any], thread: str) -> LinkEnds | None:
    """What one process waits for; None: nothing is told. thread: the one that counts"""
    rows = process["waits_for"]
    # A connection to another node is also one that others may wait for.
    far = [" ".join(reversed(end.split(" "))) for end in process["ends"] if " " in end]
    if not rows and not far:
        return None
    return LinkEnds(
        tuple(text for name, text in rows if name == thread),
        tuple(text for name, text in rows if name == BELOW),
        (*(text for name, text in rows if name == WHOLE), *far),
    )


def hosts(link_ends: LinkEnds | None) -> tuple[str, ...]:
    """Where the other ends are, without the numbers that everybody has of its own."""
    texts = link_ends.direct if link_ends else ()
    return tuple(sorted({text.rpartition(":")[0].partition(" ")[0] for text in texts}))


class Links:
    """Whose the ends of the connections are."""

    def __init__(self) -> None:
        #: Own address and peer's, or the address alone where it listens -> process; None: several.
        self._owner: dict[str, Place | None] = {}

    def read(self, node: str, process: Mapping[str, Any]) -> None:
        """Keep which ends one process has."""
        for end in process["ends"] if len(self._owner) < _MOST_ENDS else ():
            place = node, process["pid"]
            self._owner[end] = place if self._owner.get(end, place) == place else None

    def owner(self, node: str, text: str) -> Place | None:
        """The process at the other end; None: not known, or no rank's."""
        if text.startswith("pid "):
            return node, int(text[4:]) if text[4:].isdecimal() else 0
        return self._owner.get(text) or self._owner.get(text.partition(" ")[0])


class LinkWait(NamedTuple):
    """Processes of one group.

    ranks: of them; about: of their hint; ends: node and pid -> Ends
    awake: they woke up between the samples
    """

    ranks: frozenset[int]
    about: str
    ends: Mapping[Place, LinkEnds]
    processes: int
    awake: bool


def waited_for(
    groups: Sequence[LinkWait],
    links: Links,
    rank_of: Mapping[Place, int],
    for_ranks: Iterable[str],
) -> list[tuple[int, ...]]:
    """For each group the ranks that all of its processes wait for; (): not all of them wait.

    One of several ends may be the one that counts: such a group waits when one of those ranks does
    not wait itself.
    """
    waiting_abouts = frozenset(for_ranks)
    waited: list[tuple[int, ...]] = [()] * len(groups)
    waiting = {rank for group in groups if group.about in waiting_abouts for rank in group.ranks}
    awake = {rank for group in groups if group.awake for rank in group.ranks}
    # The surest first: who waits for others keeps nobody waiting that may wait for several.
    for level in (_certain_ends, _direct, _all_ends):
        candidates: list[tuple[int, list[set[int]]]] = []
        for at, group in enumerate(groups):
            if waited[at] or group.about in waiting_abouts or len(group.ends) < group.processes:
                continue
            sets = []
            for place, ends in group.ends.items():
                owners = [links.owner(place[0], end) for end in level(ends, group.about)]
                ranks = {rank_of[owner] for owner in owners if owner and owner in rank_of}
                sets.append(ranks - {rank_of.get(place, -1)})
            candidates.append((at, sets))
        # Who has one other end waits for that; then who has several waits for the rest.
        candidates.sort(key=lambda row: max(map(len, row[1]), default=0))
        for at, ends_of in candidates:
            # Of any connection it is only likely: a rank that does something may use it.
            excluded = {_certain_ends: set(), _direct: waiting, _all_ends: waiting | awake}[level]
            sets = [ranks - excluded for ranks in ends_of]
            if all(sets) and (
                level is not _certain_ends or all(len(ranks) == 1 for ranks in sets)
            ):
                waited[at] = tuple(sorted(set().union(*sets)))
                waiting |= groups[at].ranks
    return waited


def _certain_ends(ends: LinkEnds, about: str) -> tuple[str, ...]:
    """The ends that the thread waits for, where nobody else has them."""
    texts = _waited(ends, about)
    return () if any(text.startswith(_UNCERTAIN) for text in texts) else texts


def _direct(ends: LinkEnds, about: str) -> tuple[str, ...]:
    """The ends that the thread waits for, though others may have them as well."""
    return tuple(text.removeprefix(_UNCERTAIN) for text in _waited(ends, about))


def _waited(ends: LinkEnds, about: str) -> tuple[str, ...]:
    return (*ends.direct, *(ends.child_ends if about in _BELOW_ABOUTS else ()))


def _all_ends(ends: LinkEnds, about: str) -> tuple[str, ...]:
    """The ends of all connections, where the thread itself waits for none of its own."""
    return ends.all_ends if about in _WHOLE_ABOUTS and not _direct(ends, about) else ()

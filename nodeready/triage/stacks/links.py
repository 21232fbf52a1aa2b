"""Which ranks a rank waits for, over all nodes: whoever has the other end of what it waits at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nodeready.node.stacks.links import BELOW, WHOLE

#: Connections that are kept of all nodes together.
_MOST_ENDS = 1 << 20
#: What a hint is about where the main thread waits for a process below its own; and where a
#: library's own threads have the connections.
_BELOW_ABOUTS = frozenset({"data", "child"})
_WHOLE_ABOUTS = frozenset({"network"})

#: Before an end that others have as well.
_MAY = "may "

Place = tuple[str, int]


class Ends(NamedTuple):
    """Whom one process waits for, each a `pid 55` of its node or both addresses of a connection.

    direct: of the thread that counts; below: of the processes below; whole: of any connection
    """

    direct: tuple[str, ...]
    below: tuple[str, ...]
    whole: tuple[str, ...]


def ends(process: Mapping[str, Any], thread: str) -> Ends | None:
    """What one process waits for; None: nothing is told. thread: the one that counts"""
    rows = process["waits_for"]
    # A connection to another node is also one that others may wait for.
    far = [" ".join(reversed(end.split(" "))) for end in process["ends"] if " " in end]
    if not rows and not far:
        return None
    return Ends(
        tuple(text for name, text in rows if name == thread),
        tuple(text for name, text in rows if name == BELOW),
        (*(text for name, text in rows if name == WHOLE), *far),
    )


def hosts(found: Ends | None) -> tuple[str, ...]:
    """Where the other ends are, without the numbers that everybody has of its own."""
    texts = found.direct if found else ()
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


class Waiting(NamedTuple):
    """Processes of one group. ranks: of them; about: of their hint; ends: node and pid -> Ends"""

    ranks: frozenset[int]
    about: str
    ends: Mapping[Place, Ends]
    processes: int


def waited_for(
    groups: Sequence[Waiting], links: Links, rank_of: Mapping[Place, int], for_ranks: Iterable[str]
) -> list[tuple[int, ...]]:
    """For each group the ranks that all of its processes wait for; (): not all of them wait.

    One of several ends may be the one that counts: such a group waits when one of those ranks does
    not wait itself.
    """
    known = frozenset(for_ranks)
    found: list[tuple[int, ...]] = [()] * len(groups)
    waiting = {rank for one in groups if one.about in known for rank in one.ranks}
    several: list[tuple[int, list[set[int]]]] = []
    for at, one in enumerate(groups):
        if one.about in known or len(one.ends) < one.processes:
            continue
        rows = [_ranks(place, ends, one.about, links, rank_of) for place, ends in one.ends.items()]
        if all(len(ranks) == 1 and sure for ranks, sure in rows):
            found[at] = tuple(sorted({rank for ranks, _ in rows for rank in ranks}))
            waiting |= one.ranks
        elif all(ranks for ranks, _ in rows):
            several.append((at, [ranks for ranks, _ in rows]))
    for at, sets in several:
        free = [ranks - waiting for ranks in sets]
        if all(free):
            found[at] = tuple(sorted(set().union(*free)))
    return found


def _ranks(
    place: Place, ends: Ends, about: str, links: Links, rank_of: Mapping[Place, int]
) -> tuple[set[int], bool]:
    """The other ranks at the other ends of one process; and whether that is sure."""
    texts = ends.direct
    if about in _BELOW_ABOUTS:
        texts = (*texts, *ends.below)
    if not texts and about in _WHOLE_ABOUTS:
        texts = ends.whole
    owners = (links.owner(place[0], text.removeprefix(_MAY)) for text in texts)
    ranks = {rank_of[owner] for owner in owners if owner is not None and owner in rank_of}
    sure = not any(text.startswith(_MAY) for text in texts)
    return ranks - {rank_of.get(place, -1)}, sure

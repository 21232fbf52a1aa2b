"""The way from a node to others and back, as all nodes together saw it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trouble:
    """One thing that is wrong with a node's logins, told once however many attempts show it.

    kind:  ``target``: others cannot log in to it; ``source``: it cannot log in to others;
           ``both``; ``pair``: it cannot log in to one peer, and neither fails with others;
           ``namesake``: other nodes have the same host name
    peers: the others
    tried: how many others there were attempts with, in that direction
    cause: a key of `nodeready.checks.ssh_causes.CAUSES`
    said:  the line of ssh that tells it, or the host name that answered
    back:  whether the other direction works; None: nobody tried
    """

    kind: str
    peers: tuple[str, ...]
    tried: int
    cause: str
    said: str = ""
    back: bool | None = None


@dataclass(frozen=True)
class Missing:
    """A peer that ssh reaches and pdsh does not; what pdsh said about it, one line or ""."""

    name: str
    said: str


@dataclass(frozen=True)
class Same:
    """Peers of which pdsh brought the same answer."""

    answer: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Reach:
    """How a node reaches others and is reached.

    to:        how many peers it tried to log in to
    by:        how many tried to log in to it
    ssh:       what is wrong with that, for which this node is to blame
    excused:   peers that it does not reach because of what is wrong with them
    asked:     how many peers pdsh was asked for, without those that ssh does not reach
    distinct:  how many different answers it brought
    missing:   those without an answer
    same:      those that cannot be told apart, for another reason than their own host names
    pdsh_said: what pdsh said when it brought no answer at all, one line
    """

    to: int = 0
    by: int = 0
    ssh: tuple[Trouble, ...] = ()
    excused: tuple[str, ...] = ()
    asked: int = 0
    distinct: int = 0
    missing: tuple[Missing, ...] = ()
    same: tuple[Same, ...] = ()
    pdsh_said: str = ""

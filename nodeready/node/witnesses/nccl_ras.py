"""NCCL's RAS port: what the library says of its communicators; asked on one node of a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """A process in a communicator. rank: the communicator's own, so join it by node and pid.

    counts: launches of each collective: ((``AllReduce``, 41), ...)
    missing: "": it is there; ``unresponsive``, ``dead`` or ``missing``
    problem: an asynchronous error, an abort, or that it is still in initialisation; "": none
    """

    rank: int
    host: str
    pid: int
    counts: tuple[tuple[str, int], ...] = ()
    missing: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Communicator:
    """One communicator. size: how many ranks it should have.

    members: those that are missing, have a problem or are behind or before the others come first;
             of the others, and of all in the report's older form, not all are told
    usual:   the counts that most members have; () where nobody tells
    """

    hash: str
    size: int
    members: tuple[Member, ...]
    usual: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Ras:
    """The answer of the port.

    absent:  why there is none, one line; "": there is one
    version: of NCCL
    timeouts: peers that did not answer the port's own question
    """

    absent: str = ""
    version: str = ""
    timeouts: int = 0
    communicators: tuple[Communicator, ...] = ()

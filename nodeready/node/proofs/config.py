"""The configuration of one run of the proofs on a node."""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.subjects.proof.facts import SESSION


@dataclass(frozen=True)
class Config:
    """What the program of the proofs is told.

    nonce:     random word with which each of its lines begins
    tag:       ``nodeready:RUN``, in the arguments of every process that it starts and leaves
               running for a while, so that an interrupt finds it
    user:      the job's user; "": whoever the login is
    wanted:    which of SESSION
    peers:     the other nodes to which ssh and pdsh are tried, by the names of the inventory
    limit_s:   seconds after which it must have ended
    py_spy:    the path of py-spy; "": where the user's PATH finds it
    """

    nonce: str
    tag: str
    user: str = ""
    wanted: tuple[str, ...] = tuple(SESSION)
    peers: tuple[str, ...] = ()
    limit_s: int = 50
    py_spy: str = "/usr/local/bin/py-spy"

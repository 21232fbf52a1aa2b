"""What one run of the proofs on a node is told."""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.node import payload
from nodeready.node.payload import NO_PYTHON, Program
from nodeready.subjects.proof.facts import SESSION


@dataclass(frozen=True)
class Config:
    """What the program on the node has to do.

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


# --- The programs of the proofs, as they travel.

__all__ = ["NO_PYTHON", "program"]


def program(
    config: Config,
    main: str = "program",
    *,
    stdin: bool = False,
    first: str = "",
    descriptor: int = 3,
    **how: object,
) -> Program:
    """`carried.program` of a module of this package."""
    name = f"nodeready.node.proofs.{main}"
    return payload.program(name, config, stdin=stdin, first=first, descriptor=descriptor, **how)

"""Prove that gdb and strace attach to a process, and that it goes on when they have left."""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.proofs.attempt import Attempt, Guards, guards
from nodeready.proofs.config import Config
from nodeready.proofs.own import Own


@dataclass(frozen=True)
class Tracers:
    """What gdb and strace made of a canary each, of the same user.

    guards: what may refuse them
    error:  why no canary came up; "": it did
    """

    guards: Guards
    error: str
    gdb: Attempt | None
    strace: Attempt | None


def prove(own: Own, config: Config) -> Tracers:
    """One after the other."""
    return Tracers(guards(), "", None, None)

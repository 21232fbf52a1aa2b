"""The programs of the proofs, as they travel."""

from __future__ import annotations

from nodeready import carried
from nodeready.carried import NO_PYTHON, Program
from nodeready.proofs.config import Config

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
    name = f"nodeready.proofs.{main}"
    return carried.program(name, config, stdin=stdin, first=first, descriptor=descriptor, **how)

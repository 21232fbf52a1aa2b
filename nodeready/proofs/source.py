"""The programs of the proofs as the text of one command."""

from __future__ import annotations

from nodeready import carried
from nodeready.carried import NO_PYTHON
from nodeready.proofs.config import Config

__all__ = ["NO_PYTHON", "script"]


def script(
    config: Config, main: str = "program", stdin: bool = False, first: str = "", **how: object
) -> str:
    """`carried.script` of a module of this package."""
    return carried.script(f"nodeready.proofs.{main}", config, stdin=stdin, first=first, **how)

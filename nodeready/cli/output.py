"""Where a report is written: FILE of ``-o`` and of other options, or standard output."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import click

from nodeready.cli.exits import Refused
from nodeready.files import write_atomically


def refuse_unwritable(output: str | None, name: str = "-o") -> None:
    """Raises Refused for a file that cannot be written, before any node is looked at."""
    if output is None:
        return
    path = Path(os.path.realpath(output))
    if path.is_dir():
        raise Refused(f"{name} {output}: is a directory")
    if not path.parent.is_dir():
        raise Refused(f"{name} {output}: no directory {path.parent}")
    if not os.access(path if path.exists() and not path.is_file() else path.parent, os.W_OK):
        raise Refused(f"{name} {output}: cannot write to {path.parent}")


def deliver(pieces: Iterable[str], output: str | None) -> None:
    """Write a report to FILE, whole or not at all, or to standard output as it comes.

    Raises OSError.
    """
    if output is not None:
        write_atomically(Path(output), pieces)
        return
    for piece in pieces:
        click.echo(piece, nl=False)

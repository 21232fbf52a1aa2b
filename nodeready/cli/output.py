"""Where a report goes: to the terminal, to a pipe, or to FILE of ``-o`` and of other options."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nodeready.cli.exits import Refused
from nodeready.files import write_atomically
from nodeready.reports import registry
from nodeready.reports.registry import PLAIN, Options

if TYPE_CHECKING:
    from nodeready.cli.screen import Screen


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


def show(
    document: str,
    form: str,
    made: Any,
    screen: Screen,
    *,
    output: str | None = None,
    silent: bool = False,
    options: Options = PLAIN,
) -> None:
    """A command's document in one of its formats, to FILE of ``-o`` or to standard output.

    document: whose formats these are, as in `registry.FORMATS`
    silent:   a person is told nothing (-q, and all is well); a file and a program still are
    options:  beside those that the screen tells
    Raises OSError when FILE cannot be written.
    """
    found = registry.find(document, form)
    asked = replace(options, verbose=screen.verbose, width=PLAIN.width)
    if output is not None:
        write_atomically(Path(output), found.render(made, asked))
    elif not found.styled:
        for piece in found.render(made, asked):
            click.echo(piece, nl=False)
    elif not silent:
        screen.show(found.lines(made, replace(asked, width=screen.width)))

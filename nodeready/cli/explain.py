"""`nodeready explain`: what a check means, which settings decide it, what repairs it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

import click

from nodeready.cli.exits import Refused
from nodeready.cli.options import option
from nodeready.policy import Policy
from nodeready.reports.text import Line, line
from nodeready.subjects import SUBJECTS

if TYPE_CHECKING:
    from nodeready.catalog import Entry

#: Longer lines of prose are hard to read.
_WIDEST = 90
_FIELDS = {field.name: field for field in fields(Policy)}


def _prose(text: str) -> str:
    """A docstring's words without its markup."""
    return re.sub(r"``(.+?)``", r"\1", text, flags=re.S)


def _wrapped(text: str, width: int, indent: str = "") -> Iterator[Line]:
    """Paragraphs, each filled anew; lists and examples stay as they stand."""
    for number, paragraph in enumerate(_prose(text).split("\n\n")):
        if number:
            yield line("")
        lines = paragraph.splitlines()
        if any(row.startswith((" ", "- ", ">>>")) or re.match(r"\w+: {2,}", row) for row in lines):
            yield from (line(indent, row) for row in lines)
            continue
        yield from (
            line(row)
            for row in textwrap.wrap(
                " ".join(lines),
                width,
                initial_indent=indent,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )


def _part(title: str, text: str, width: int) -> Iterator[Line]:
    """A title of its own line, its text below it."""
    yield line("")
    yield line((title, "bold"))
    yield from _wrapped(text, width, "  ")


def _entry(entry: Entry, width: int) -> Iterator[Line]:
    """The whole page of one check."""
    yield line((entry.id, "bold"))
    yield line("")
    yield from _wrapped(entry.meaning, width)
    for key in entry.settings:
        field = _FIELDS[key]
        yield from _part(
            f"Setting {key}, by default {field.default!r}", field.metadata["doc"], width
        )
    for name, does in entry.repairs:
        told = f"{does}\n\nnodeready deploy INVENTORY --only {entry.subject}"
        yield from _part(f"Repaired by the operation {name}", told, width)
    by: dict[str, list[str]] = {}
    for act in entry.acts:
        who, _, what = act.partition(": ")
        by.setdefault(who, []).append(what)
    for who, whats in by.items():
        yield line("")
        yield line((who, "bold"))
        for what in whats:
            first, *rest = textwrap.wrap(_prose(what), width - 4, break_long_words=False)
            yield line(f"  - {first}")
            yield from (line(f"    {row}") for row in rest)


def _listed(subjects: list[str], width: int) -> Iterator[Line]:
    """Every check of these subjects, a line each."""
    from nodeready import catalog

    room = max(len(entry.id) for subject in subjects for entry in catalog.entries(subject))
    for number, subject in enumerate(subjects):
        if number:
            yield line("")
        yield from (
            line((row, "bold"))
            for row in textwrap.wrap(f"{subject}: {catalog.about(subject)}", width)
        )
        for entry in catalog.entries(subject):
            brief = textwrap.shorten(
                _prose(entry.brief), max(30, width - room - 4), placeholder="..."
            )
            yield line(f"  {entry.id:<{room}}  {brief}")


@click.command()
@click.argument("check", nargs=-1)
@option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    help="Colours on the terminal.",
)
def explain(check: tuple[str, ...], color: str) -> int:
    """Say what CHECK judges and why, which settings decide it, and what repairs what it finds.

    CHECK is an id such as ptrace.scope, as the audit prints it, or a subject such as ptrace.
    Without one, every check is listed. No node is asked.

    \b
    Examples:
      nodeready explain
      nodeready explain limits
      nodeready explain ptrace.scope
    """
    from nodeready import catalog
    from nodeready.cli.screen import Screen

    screen = Screen(color)
    width = min(screen.width, _WIDEST)
    pages: list[Iterator[Line]] = []
    for word in check:
        if word in SUBJECTS:
            pages.append(_listed([word], width))
            continue
        try:
            pages.append(_entry(catalog.entry(word), width))
        except KeyError:
            meant = catalog.meant(word)
            hint = f"did you mean {meant}?" if meant else "nodeready explain lists all"
            raise Refused(f"explain {word}: no such check or subject; {hint}") from None
    for number, page in enumerate(pages or [_listed(list(SUBJECTS), width)]):
        if number:
            screen.show([line("")])
        screen.show(page)
    return 0

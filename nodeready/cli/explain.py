"""`nodeready explain`: what a check means."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import click

from nodeready.cli.options import candidates_of, color_option, command
from nodeready.core.exit_codes import Refused
from nodeready.core.policy import FOLDER, Policy, reason
from nodeready.core.result import Page
from nodeready.core.severity import SEVERITIES, ladder_text, words
from nodeready.reports.lines import StyledLine, line
from nodeready.runs.options import opt
from nodeready.subjects.registry import SUBJECTS, meant, page

_MAX_WIDTH = 90  # maximum columns: longer lines of prose are hard to read
_DEFAULTS = {field.name: field.default for field in fields(Policy)}


def _prose(text: str) -> str:
    """A docstring's words without its markup."""
    return re.sub(r"``(.+?)``", r"\1", text, flags=re.S)


def _wrapped(text: str, width: int, indent: str = "") -> Iterator[StyledLine]:
    """Paragraphs, each filled to the width; lists and examples keep their lines."""
    for number, paragraph in enumerate(_prose(text).split("\n\n")):
        if number:
            yield line("")
        lines = paragraph.splitlines()
        if any(row.startswith((" ", "- ", ">>>")) or re.match(r"\w+: {2,}", row) for row in lines):
            yield from (line(indent, row) for row in lines)
            continue
        filled = textwrap.TextWrapper(width, indent, indent)
        filled.break_long_words = filled.break_on_hyphens = False
        yield from map(line, filled.wrap(" ".join(lines)))


def _part(title: str, text: str, width: int) -> Iterator[StyledLine]:
    """A title on a line, its text below it."""
    yield line("")
    yield line((title, "bold"))
    yield from _wrapped(text, width, "  ")


def _page(page: Page, width: int) -> Iterator[StyledLine]:
    yield line((page.id, "bold"))
    yield line("")
    yield from _wrapped(page.meaning, width)
    for key in page.settings:
        title = f"Setting {key}, by default {_DEFAULTS[key]!r}"
        yield from _part(title, reason(key), width)
    if page.fixed_by:
        from nodeready.operations import STEPS

        does = {step.name: step.does for step in STEPS}[page.fixed_by]
        text = f"{does}\n\nnodeready deploy INVENTORY --only {page.subject}"
        yield from _part(f"Repaired by the operation {page.fixed_by}", text, width)
    if page.cost.severity:
        text = f"{words(page.cost.severity)}: {SEVERITIES[page.cost.severity]}"
        yield from _part("A failure", text, width)
    if page.cost.actions:
        yield from _part("Actions, the mildest first", ladder_text(page.cost), width)
    actions_of: dict[str, list[str]] = {}
    for owner, action in page.remedies:
        actions_of.setdefault(owner, []).append(action)
    for owner, actions in actions_of.items():
        yield line("")
        yield line((owner, "bold"))
        for action in actions:
            first, *lines = textwrap.wrap(_prose(action), width - 4, break_long_words=False)
            yield line(f"  - {first}")
            yield from (line(f"    {row}") for row in lines)


def _listed(subjects: list[str], policies: list[Policy], width: int) -> Iterator[StyledLine]:
    checks_of = {name: SUBJECTS[name].declared(policies) for name in subjects}
    room = max((len(check.id) for checks in checks_of.values() for check in checks), default=0)
    for number, subject in enumerate(subjects):
        if number:
            yield line("")
        rows = textwrap.wrap(f"{subject}: {SUBJECTS[subject].about}", width)
        yield from (line((row, "bold")) for row in rows)
        for check in checks_of[subject]:
            room_left = max(30, width - room - 4)
            brief = textwrap.shorten(_prose(check.brief), room_left, placeholder="...")
            yield line(f"  {check.id:<{room}}  {brief}")


def _declared(inventory: str | None) -> list[Policy]:
    """A policy with the site's own checks, of ./checks.d and beside this inventory."""
    if inventory and not Path(inventory).is_file():
        raise Refused(f"--inventory {inventory}: no such file")
    places = [Path.cwd(), *([Path(inventory).resolve().parent] if inventory else [])]
    folders = [folder for place in dict.fromkeys(places) if (folder := place / FOLDER).is_dir()]
    if not folders:
        return []
    # Imported only here, because it imports pyinfra.
    from nodeready.fleet.inventory.site_files import read

    authors = {Path(inventory).stat().st_uid} if inventory else ()
    checks, problems = read(folders, authors=authors)
    if problems:
        raise Refused("\n".join(problems))
    return [Policy(site_checks=tuple(checks))]


@dataclass(kw_only=True)
class ExplainWords:
    inventory: str | None = opt(
        "--inventory FILE",
        "Also the site's own checks beside this inventory; always those of ./checks.d.",
        general=False,
    )
    color: str = color_option()


@command(ExplainWords)
@click.argument("check", nargs=-1, shell_complete=candidates_of("checks"))
def explain(check: tuple[str, ...], options: ExplainWords) -> int:
    """Explain what CHECK judges and why, which settings decide it, and what repairs it.

    CHECK is an id such as ptrace.scope, as the audit prints it, or a subject such as ptrace.
    Without CHECK, every check is listed. No node is contacted.

    \b
    Examples:
      nodeready explain
      nodeready explain limits
      nodeready explain ptrace.scope
      nodeready explain site --inventory inventories/prod.py
    """
    from nodeready.cli.screen import Screen

    screen = Screen(options.color)
    width = min(screen.width, _MAX_WIDTH)
    policies = _declared(options.inventory)
    pages: list[Iterator[StyledLine]] = []
    for word in check:
        if word in SUBJECTS:
            pages.append(_listed([word], policies, width))
            continue
        try:
            pages.append(_page(page(word, policies), width))
        except KeyError:
            close = meant(word, policies)
            hint = f"did you mean {close}?" if close else "nodeready explain lists all"
            raise Refused(f"explain {word}: no such check or subject; {hint}") from None
    for number, rows in enumerate(pages or [_listed(list(SUBJECTS), policies, width)]):
        if number:
            screen.show([line("")])
        screen.show(rows)
    return 0

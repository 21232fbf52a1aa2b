"""The stacks as one HTML page that loads no other file: to send, to keep, to search.

The page is stacks_page/page.html.j2, with page.css and page.js written into it. Style and script
are constant, and the page's Content-Security-Policy names their digests: a browser obeys no other
style or script, even if a text of a node became one in spite of the escaping.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from jinja2.ext import Extension
from markupsafe import Markup

from nodeready.reports import stacks_table
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.stacks_table import Branch, branches
from nodeready.reports.text import nodes
from nodeready.text import counted, sanitise
from nodeready.triage.stacks.document import Group, Rank, Stacks, fold_ranks

#: Groups that are unfolded at first, and processes that are listed in each group.
_OPEN, _PROCESSES = 3, 1000
#: Branches at one place, and one below the other: browsers nest 512 elements.
_BRANCHES, _DEEPEST = 200, 100
#: Characters of a name, of a set of ranks or nodes in a row, and of any other text.
_LONG, _SET, _TEXT = 300, 60, 4000
_WHOLE = 1_000_000_000


class _Tight(Extension):
    """A template whose line breaks and indentation are not part of the page."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return re.sub(r"\n\s*", "", source)


def shown(value: object) -> Markup:
    """A value as it stands in the page: no tag, no attribute, nothing that hides or reorders.

    Jinja calls this for every expression of the template. What the template made itself, and what
    is marked as safe here, stays as it is.
    """
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(sanitise("" if value is None else str(value), _WHOLE)))


def _text(text: str, limit: int = _TEXT) -> str:
    """A text of a node, cut after ``limit`` characters."""
    return sanitise(text, limit)


def _lines(texts: Iterable[str], limit: int) -> Markup:
    """Texts with line breaks between them; a line break inside of a text is an escape."""
    return Markup("\n").join(shown(_text(text, limit)) for text in texts)


def _folded(group: Group, limit: int = _WHOLE) -> str:
    return nodes(group.nodes, limit) if group.nodes else ""


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("nodeready", "reports/stacks_page"),
        extensions=[_Tight],
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
    )
    environment.filters.update(text=_text, lines=_lines)
    environment.globals.update(
        OPEN=_OPEN, PROCESSES=_PROCESSES, LONG=_LONG, SET=_SET, NEWLINE=Markup("\n"),
        counted=counted, fold_ranks=fold_ranks, folded=_folded, place=stacks_table.place,
        ranks=stacks_table.ranks, who=stacks_table.who, word=stacks_table.word,
    )  # fmt: skip
    return environment.get_template("page.html.j2")


@lru_cache(maxsize=2)
def part(name: str) -> Markup:
    """The style sheet or the script as it stands in the page: a constant file of ours."""
    loader = PackageLoader("nodeready", "reports/stacks_page")
    return Markup("\n" + loader.get_source(Environment(autoescape=True), name)[0])


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _policy(style: str, script: str) -> Markup:
    """The Content-Security-Policy: this style and this script, and nothing from anywhere."""
    return Markup(
        f"default-src 'none'; style-src 'sha256-{_digest(style)}'; "
        f"script-src 'sha256-{_digest(script)}'; base-uri 'none'; form-action 'none'"
    )


@dataclass(frozen=True)
class _Card:
    """A group with its place in the page.

    number:  as the page counts, from 1
    largest: the other groups are compared with this one
    begun:   other groups have gone on from where this one stands
    """

    number: int
    group: Group
    processes: Sequence[Rank]
    largest: bool
    begun: bool


@dataclass(frozen=True)
class _Row:
    """A branch of the merged tree.

    opens:  further rows are inside of this row
    closes: how many of the rows around this row end with it
    """

    branch: Branch
    opens: bool
    closes: int


def _cards(stacks: Stacks) -> Iterator[_Card]:
    found: dict[int, list[Rank]] = {}
    for one in stacks.processes:
        found.setdefault(one.group, []).append(one)
    largest, begun = stacks_table.largest(stacks), stacks_table.begun(stacks)
    for at, group in enumerate(stacks.groups):
        yield _Card(at + 1, group, found.get(at, ()), group is largest, at in begun)


def _tree(stacks: Stacks) -> Iterator[_Row]:
    rows = list(branches(stacks, _BRANCHES, _DEEPEST))
    depths = [*(row.depth for row in rows[1:]), 0]
    for row, after in zip(rows, depths):
        yield _Row(row, after > row.depth, max(0, row.depth - after))


def render(stacks: Stacks, options: Options = PLAIN) -> Iterator[str]:
    """The whole page. It folds without its script, and searches with it."""
    style, script = part("page.css"), part("page.js")
    yield _template().render(
        stacks=stacks,
        title=stacks_table.headline(stacks),
        policy=_policy(style, script),
        style=style,
        script=script,
        groups=list(_cards(stacks)),
        tree=list(_tree(stacks)) if any(group.frames for group in stacks.groups) else (),
        silent=[f"{node}: {why}" for node, why in stacks_table.silent(stacks)],
    )

"""The formats of every command's document, a row each: a format is a file and its rows here.

A row's module is imported when its format is used, so that ``--help`` costs none of them and a
node needs only those that it has.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nodeready.reports.text import Line


@dataclass(frozen=True)
class Options:
    """What was asked of a report. A format takes of it what means something to it.

    verbose: from 1 on nothing is folded by example, cut or left out of a table
    width:   columns that a table has for node sets
    fail_on: "fail" or "warn": the status from which on a check fails the run
    diff:    the differences of a deploy's files are shown, too
    quiet:   of what is well, nothing is said
    """

    verbose: int = 0
    width: int = 80
    fail_on: str = "fail"
    diff: bool = False
    quiet: bool = False


#: What a person asked nothing special of.
PLAIN = Options()


@dataclass(frozen=True)
class Format:
    """One form of one command's document.

    document:  the command whose document it shows
    name:      as ``--format`` takes it
    renderer:  ``MODULE:FUNCTION`` of this package: ``(document, options) -> Iterator``, of texts,
               or of Lines where ``styled``
    extension: of a file that holds it
    styled:    it is made of lines with styles, for a terminal
    on_node:   the node's own program has it, too: standard library and Python 3.9
    part:      the attribute of the document that it shows; "": all of it
    """

    document: str
    name: str
    renderer: str
    extension: str
    styled: bool = False
    on_node: bool = False
    part: str = ""

    @property
    def module(self) -> str:
        """The dotted name of the renderer's module."""
        return f"nodeready.reports.{self.renderer.partition(':')[0]}"

    def _made(self, document: Any, options: Options) -> Iterator[Any]:
        function: Callable[[Any, Options], Iterable[Any]] = getattr(
            importlib.import_module(self.module), self.renderer.partition(":")[2]
        )
        return iter(function(getattr(document, self.part) if self.part else document, options))

    def render(self, document: Any, options: Options = PLAIN) -> Iterator[str]:
        """The text in pieces, as a file holds it."""
        made = self._made(document, options)
        return (f"{line.plain}\n" for line in made) if self.styled else made

    def lines(self, document: Any, options: Options = PLAIN) -> Iterator[Line]:
        """The lines with their styles. Raises ValueError for a format that has none."""
        if not self.styled:
            raise ValueError(f"{self.document} as {self.name} is not made of lines")
        return self._made(document, options)


#: Every format of every document; a command's first one is its default.
_ROWS = (
    Format("audit", "table", "table:show_audit", ".txt", styled=True, on_node=True),
    Format("audit", "junit", "junit:render", ".xml"),
    Format("audit", "json", "json_report:audit", ".json", on_node=True),
    Format("audit", "prometheus", "prometheus:render", ".prom", on_node=True),
    Format("audit", "nagios", "nagios:render", ".txt", on_node=True),
    Format("ready", "table", "table:show_ready", ".txt", styled=True, on_node=True),
    Format("ready", "junit", "junit:render", ".xml", part="audit"),
    Format("ready", "json", "json_report:ready", ".json", on_node=True),
    Format("ready", "prometheus", "prometheus:render", ".prom", part="audit"),
    Format("ready", "nagios", "nagios:render", ".txt", part="audit"),
    Format("deploy", "table", "plan:show", ".txt", styled=True),
    Format("deploy", "json", "json_report:deploy", ".json"),
    Format("stacks", "table", "stacks_table:show", ".txt", styled=True),
    Format("stacks", "json", "json_report:stacks", ".json"),
    Format("stacks", "html", "stacks_html:render", ".html"),
    Format("stacks", "speedscope", "speedscope:render", ".speedscope.json"),
    Format("cores", "table", "cores_table:show", ".txt", styled=True),
    Format("cores", "json", "json_report:cores", ".json"),
    Format("tail", "table", "tail_table:show", ".txt", styled=True),
    Format("tail", "json", "json_report:tail", ".json"),
    Format("env", "sh", "exports:shell_lines", ".env"),
    Format("env", "json", "json_report:env", ".json"),
)

#: document -> name -> its format, in the order in which ``--help`` names them.
FORMATS: dict[str, dict[str, Format]] = {}
for _row in _ROWS:
    FORMATS.setdefault(_row.document, {})[_row.name] = _row


def names(document: str, *, on_node: bool = False) -> tuple[str, ...]:
    """The words of a command's ``--format``; the first one is its default.

    on_node: only those that the node's own program has
    """
    rows = FORMATS[document].values()
    return tuple(row.name for row in rows if row.on_node or not on_node)


def find(document: str, name: str) -> Format:
    """One format. Raises KeyError for a document or a name that there is not."""
    return FORMATS[document][name]

"""The formats of every command's document, a row each: a format is a file and its rows here.

A row's module is imported when its format is used: ``--help`` imports none of them, and a node
needs only the modules of its own formats.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nodeready.reports.text import Line


@dataclass(frozen=True)
class Options:
    """What the command line asks of a report. A format ignores the options that it has no use for.

    verbose: from 1 on, a table folds nothing by example, cuts nothing and leaves nothing out
    width:   columns of the terminal
    fail_on: "fail" or "warn": the mildest status with which a check fails the run
    diff:    a deploy's table shows the differences of its files
    quiet:   a table says nothing of what is well
    """

    verbose: int = 0
    width: int = 80
    fail_on: str = "fail"
    diff: bool = False
    quiet: bool = False


#: The options of a command line without any.
PLAIN = Options()


@dataclass(frozen=True)
class Format:
    """One form of one command's document.

    document:  the command whose document is shown; `debuggable`: that of ``stacks --check``
    name:      the word of ``--format``
    renderer:  ``MODULE:FUNCTION`` of this room: ``(document, options) -> Iterator``, of texts, or
               of Lines where ``styled``
    extension: of a file in this format
    styled:    the format is made of lines with styles, for a terminal
    on_node:   the node's own program has the format, too: standard library and Python 3.9
    part:      the attribute of the document that is shown; "": the whole document
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
    Format("smoke", "table", "smoke_table:show", ".txt", styled=True),
    Format("smoke", "json", "json_report:smoke", ".json"),
    Format("smoke", "junit", "junit:smoke", ".xml"),
    Format("smoke", "prometheus", "prometheus:smoke", ".prom"),
    Format("deploy", "table", "plan:show", ".txt", styled=True),
    Format("deploy", "json", "json_report:deploy", ".json"),
    Format("stacks", "table", "stacks_table:show", ".txt", styled=True),
    Format("stacks", "json", "json_report:stacks", ".json"),
    Format("stacks", "html", "stacks_html:render", ".html"),
    Format("stacks", "speedscope", "exports:speedscope", ".speedscope.json"),
    Format("debuggable", "table", "stacks_table:debuggable", ".txt", styled=True),
    Format("debuggable", "json", "json_report:debuggable", ".json"),
    Format("cores", "table", "cores_table:show", ".txt", styled=True),
    Format("cores", "json", "json_report:cores", ".json"),
    Format("tail", "table", "tail_table:show", ".txt", styled=True),
    Format("tail", "json", "json_report:tail", ".json"),
    Format("incident", "table", "stacks_table:incident_index", ".txt", styled=True),
    Format("incident", "json", "json_report:incident", ".json"),
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
    """The format of this document and name. Raises KeyError when there is none."""
    return FORMATS[document][name]

"""The formats of every command's document, a row each: a format is a file and its rows here; and
the pieces that they are made of on a terminal.

A row's module is imported when its format is used: ``--help`` imports none of them, and a node
needs only the modules of its own formats.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, Union

from nodeready.subjects.result import Result
from nodeready.text import cut, sanitise

# --- Pieces of a terminal report: sanitised, aligned, the meaning never carried by colour alone.
#
# A style is a word here, which the control machine hands to rich; a node shows the plain text.

STYLES = {
    "fail": "bold red",
    "warn": "yellow",
    "unknown": "magenta",
    "unreachable": "bold red",
    "failed": "bold red",
    "changed": "green",
    "change": "cyan",
    "ok": "green",
    "na": "dim",
    "waived": "dim",
    # Groups of ranks, by their verdict or kind: see nodeready.triage.stacks.document.
    "missing": "bold red",
    "dead": "bold red",
    "no-data": "bold red",
    "uninterruptible": "bold red",
    "stopped": "red",
    "traced": "magenta",
    "blocked": "yellow",
    "spinning": "yellow",
    "unsure": "magenta",
    "suspect": "bold red",
    "victim": "cyan",
    "progressing": "green",
    "stack": "bold",
}

Key = TypeVar("Key", bound=Hashable)
#: A text, or a text with its style.
Part = Union[str, tuple[str, str]]


@dataclass(frozen=True)
class Line:
    """One line of a report: pieces of safe text, each with its style, or ""."""

    parts: tuple[tuple[str, str], ...]

    @property
    def plain(self) -> str:
        """The text alone."""
        return "".join(text for text, _ in self.parts)

    def cut(self, limit: int) -> Line:
        """This line, cut after ``limit`` characters, with ``...``."""
        kept, room = [], limit
        for text, style in self.parts:
            kept.append((text[:room], style))
            room -= len(text)
            if room < 0:
                return Line((*kept, ("...", "")))
        return self


def grouped(pairs: Iterable[tuple[Key, str]]) -> list[tuple[Key, list[str]]]:
    """Equal keys with the names of all their nodes, the most common key first."""
    found: dict[Key, list[str]] = {}
    for key, name in pairs:
        found.setdefault(key, []).append(name)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def nodes(names: Iterable[str], limit: int = 60) -> str:
    """A folded node set; a very long one is cut, with the count."""
    names = list(names)
    if len(names) == 1:
        return cut(sanitise(names[0]), limit, 1)
    # A node has no ClusterShell, and knows one name only: its own.
    from nodeready.inventory.nodeset import folded

    return folded(names, limit)


def line(*parts: Part) -> Line:
    """One line of parts, each a text or (text, style); everything is sanitised."""
    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Line(tuple((sanitise(text), style) for text, style in pairs))


def told(result: Result) -> str:
    """What was observed, what is wanted, and the source, in one clause."""
    text = result.actual
    if result.expected and result.status in ("fail", "warn") and result.expected != result.actual:
        text = f"{text} (want {result.expected})"
    return f"{text}  [{result.source}]" if result.source else text


# --- The formats.


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
    Format("audit", "prometheus", "monitoring:prometheus", ".prom", on_node=True),
    Format("audit", "nagios", "monitoring:nagios", ".txt", on_node=True),
    Format("ready", "table", "table:show_ready", ".txt", styled=True, on_node=True),
    Format("ready", "junit", "junit:render", ".xml", part="audit"),
    Format("ready", "json", "json_report:ready", ".json", on_node=True),
    Format("ready", "prometheus", "monitoring:prometheus", ".prom", part="audit"),
    Format("ready", "nagios", "monitoring:nagios", ".txt", part="audit"),
    Format("smoke", "table", "smoke_table:show", ".txt", styled=True),
    Format("smoke", "json", "json_report:smoke", ".json"),
    Format("smoke", "junit", "junit:smoke", ".xml"),
    Format("smoke", "prometheus", "monitoring:prometheus_smoke", ".prom"),
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

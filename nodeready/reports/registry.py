"""The formats of every command's document, a row each: a format is a file and its rows here.

A row's module is imported when its format is used: ``--help`` imports none of them, and a node
needs only the modules of its formats.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nodeready.reports.lines import StyledLine

if TYPE_CHECKING:
    # A node has no memory.
    from nodeready.runs.memory.look import Look

#: Lines of a table on a terminal of unknown height.
SCREEN = 40


def _no_history(node: str) -> Sequence[Any]:
    return ()


@dataclass(frozen=True)
class Options:
    """Options of a report. A format ignores the options that it does not need."""

    # from 1 on, a table folds nothing by example, cuts nothing and leaves nothing out
    verbose: int = 0
    width: int = 80  # columns of the terminal
    fail_on: str = "fail"  # "fail" or "warn": the mildest status with which a check fails the run
    diff: bool = False  # a deploy's table shows the differences of its files
    quiet: bool = False  # a table leaves out what is ok
    # approximate maximum lines of a table on a terminal; 0: a pipe or a file, without limit
    lines: int = SCREEN
    # the inventory of the run, as words of a shell, for the commands that repair
    inventory: str = "INVENTORY"
    # gives the kept looks at this inventory, the oldest first
    looks: Callable[[], Sequence[Look]] = tuple
    # node -> the HistoryEntry objects of the node and of its parts, the newest first
    history: Callable[[str], Sequence[Any]] = _no_history


#: The options of a command line without any.
PLAIN = Options()


@dataclass(frozen=True)
class Format:
    """One format of one command's document."""

    document: str  # the command whose document is shown; `debuggable`: that of ``stacks --check``
    name: str  # the word of ``--format``
    # ``MODULE:FUNCTION`` of this room: ``(document, options) -> Iterator``, of texts, or of
    # StyledLines where ``styled``
    renderer: str
    extension: str  # of a file in this format
    styled: bool = False  # the format is made of lines with styles, for a terminal
    # the node's own program has the format, too: standard library and Python 3.9
    on_node: bool = False
    part: str = ""  # the attribute of the document that is shown; "": the whole document
    # ``MODULE:FUNCTION`` that makes the text of one observation, which the workers of an audit
    # call; "": the format shows no observations
    facts: str = ""

    @property
    def write_facts(self) -> Callable[[Any], str] | None:
        """The function of ``facts``."""
        return _imported(self.facts) if self.facts else None

    @property
    def module(self) -> str:
        """The dotted name of the renderer's module."""
        return f"nodeready.reports.{self.renderer.partition(':')[0]}"

    def _rendered(self, document: Any, options: Options) -> Iterator[Any]:
        shown = getattr(document, self.part) if self.part else document
        return iter(_imported(self.renderer)(shown, options))

    def render(self, document: Any, options: Options = PLAIN) -> Iterator[str]:
        """The text in pieces, as a file holds it."""
        rendered = self._rendered(document, options)
        return (f"{line.plain}\n" for line in rendered) if self.styled else rendered

    def lines(self, document: Any, options: Options = PLAIN) -> Iterator[StyledLine]:
        """The lines with their styles. Raises ValueError for a format that has none."""
        if not self.styled:
            raise ValueError(f"{self.document} as {self.name} is not made of lines")
        return self._rendered(document, options)


def _imported(function: str) -> Callable[..., Any]:
    """A function of this room by its ``MODULE:FUNCTION``."""
    module, _, name = function.partition(":")
    imported: Callable[..., Any] = getattr(
        importlib.import_module(f"nodeready.reports.{module}"), name
    )
    return imported


#: Every format of every document; a command's first one is its default.
_ROWS = (
    Format("audit", "table", "audit_table:show_audit", ".txt", styled=True, on_node=True),
    Format("audit", "junit", "junit:render", ".xml"),
    Format(
        "audit", "json", "json_report:render", ".json", on_node=True, facts="json_report:shown"
    ),
    Format(
        "audit",
        "evidence",
        "evidence_html:render",
        ".evidence.html",
        facts="json_report:shown",
    ),
    Format("audit", "html", "audit_html:render", ".html", facts="json_report:shown"),
    Format("audit", "prometheus", "prometheus:prometheus", ".prom", on_node=True),
    Format("audit", "nagios", "nagios:nagios", ".txt", on_node=True),
    Format("audit", "csv", "csv_report:render", ".csv"),
    Format("ready", "table", "audit_table:show_ready", ".txt", styled=True, on_node=True),
    Format("ready", "junit", "junit:render", ".xml", part="audit"),
    Format(
        "ready", "json", "json_report:render", ".json", on_node=True, facts="json_report:shown"
    ),
    Format("ready", "html", "audit_html:render", ".html", facts="json_report:shown"),
    Format("ready", "prometheus", "prometheus:prometheus", ".prom", part="audit"),
    Format("ready", "nagios", "nagios:nagios", ".txt", part="audit"),
    Format("ready", "csv", "csv_report:render", ".csv", part="audit"),
    Format("waivers", "table", "waivers_table:show", ".txt", styled=True),
    Format("waivers", "json", "json_report:render", ".json"),
    Format("history", "table", "memory_tables:history", ".txt", styled=True),
    Format("history", "json", "json_report:render", ".json"),
    Format("smoke", "table", "smoke_table:show", ".txt", styled=True),
    Format("smoke", "json", "json_report:render", ".json"),
    Format("smoke", "junit", "junit:smoke", ".xml"),
    Format("smoke", "prometheus", "prometheus:prometheus_smoke", ".prom"),
    Format("deploy", "table", "deploy_table:show", ".txt", styled=True),
    Format("deploy", "json", "json_report:render_deploy", ".json"),
    Format("stacks", "table", "stacks_table:show", ".txt", styled=True),
    Format("stacks", "json", "json_report:render", ".json"),
    Format("stacks", "html", "stacks_html:render", ".html"),
    Format("debuggable", "table", "stacks_table:debuggable", ".txt", styled=True),
    Format("debuggable", "json", "json_report:render", ".json"),
    Format("jobs", "table", "jobs_table:jobs", ".txt", styled=True),
    Format("jobs", "json", "json_report:render", ".json"),
    Format("lemons", "table", "memory_tables:lemons", ".txt", styled=True),
    Format("lemons", "json", "json_report:render", ".json"),
    Format("cores", "table", "triage_tables:cores_lines", ".txt", styled=True),
    Format("cores", "json", "json_report:render", ".json"),
    Format("tail", "table", "triage_tables:tail_lines", ".txt", styled=True),
    Format("tail", "json", "json_report:render", ".json"),
    Format("postmortem", "table", "triage_tables:postmortem", ".txt", styled=True),
    Format("postmortem", "json", "json_report:render", ".json"),
    Format("incident", "table", "triage_tables:incident_index", ".txt", styled=True),
    Format("incident", "json", "json_report:render", ".json"),
    Format("diff", "table", "memory_tables:diff_lines", ".txt", styled=True),
    Format("diff", "json", "json_report:render", ".json"),
    Format("env", "sh", "env_script:shell_lines", ".env"),
    Format("env", "json", "json_report:render", ".json"),
)

#: document -> name -> its format, in the order in which ``--help`` names them.
FORMATS: dict[str, dict[str, Format]] = {}

for _row in _ROWS:
    FORMATS.setdefault(_row.document, {})[_row.name] = _row


def format_names(document: str, *, on_node: bool = False) -> tuple[str, ...]:
    """The words of a command's ``--format``; the first one is its default.

    on_node: only those that the node's own program has
    """
    rows = FORMATS[document].values()
    return tuple(row.name for row in rows if row.on_node or not on_node)


def find_format(document: str, name: str) -> Format:
    """The format of this document and name. Raises KeyError for an unknown one."""
    return FORMATS[document][name]

"""The formats of every command's document, a row each: a format is a file and its rows here.

A row's module is imported when its format is used: ``--help`` imports none of them, and a node
needs only the modules of its formats.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nodeready.reports.lines import StyledLine

    # A node has no memory.
    from nodeready.runs.memory.look import Look

SCREEN = 40  # lines of a table on a terminal of unknown height


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
    history: Callable[[str], Sequence[Any]] = lambda node: ()


PLAIN = Options()  # the options of a command line without any


@dataclass(frozen=True)
class Format:
    """One format of one command's document."""

    document: str  # the command whose document is shown; `debuggable`: that of ``stacks --check``
    name: str  # the word of ``--format``
    # ``MODULE:FUNCTION`` of this room: ``(document, options) -> Iterator``, of texts, or of
    # StyledLines where ``styled``
    renderer: str
    # the node's own program has the format, too: standard library and Python 3.9
    on_node: bool = False
    part: str = ""  # the attribute of the document that is shown; "": the whole document
    # ``MODULE:FUNCTION`` that makes the text of one observation, which the workers of an audit
    # call; "": the format shows no observations
    facts: str = ""

    @property
    def extension(self) -> str:
        return _EXTENSIONS.get(self.name, f".{self.name}")

    @property
    def styled(self) -> bool:
        """Whether the format is made of lines with styles, for a terminal."""
        return self.name == "table"

    @property
    def write_facts(self) -> Callable[[Any], str] | None:
        return _imported(self.facts) if self.facts else None

    @property
    def module(self) -> str:
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


#: Format -> the ending of its files, where that is not its name.
_EXTENSIONS = {
    "table": ".txt", "nagios": ".txt", "junit": ".xml", "prometheus": ".prom",
    "evidence": ".evidence.html", "sh": ".env",
}  # fmt: skip
#: Documents whose JSON is the generic one -> the function of their table.
_TABLES = {
    "smoke": "smoke_table:show", "stacks": "stacks_table:show",
    "waivers": "memory_tables:waivers", "history": "memory_tables:history",
    "debuggable": "stacks_table:debuggable", "jobs": "triage_tables:jobs",
    "undrain": "triage_tables:undrain", "lemons": "memory_tables:lemons",
    "cores": "triage_tables:cores_lines", "tail": "triage_tables:tail_lines",
    "postmortem": "triage_tables:postmortem", "incident": "triage_tables:incident_index",
    "diff": "memory_tables:diff_lines",
}  # fmt: skip
#: Every format of every document; a command's first one is its default.
_ROWS = (
    Format("audit", "table", "audit_table:show_audit", on_node=True),
    Format("audit", "junit", "exports:junit"),
    Format("audit", "json", "json_report:render", on_node=True, facts="json_report:shown"),
    Format("audit", "evidence", "evidence_html:render", facts="json_report:shown"),
    Format("audit", "html", "audit_html:render", facts="json_report:shown"),
    Format("audit", "prometheus", "monitoring:prometheus", on_node=True),
    Format("audit", "nagios", "monitoring:nagios", on_node=True),
    Format("audit", "csv", "exports:csv_lines"),
    Format("ready", "table", "audit_table:show_ready", on_node=True),
    Format("ready", "junit", "exports:junit", part="audit"),
    Format("ready", "json", "json_report:render", on_node=True, facts="json_report:shown"),
    Format("ready", "html", "audit_html:render", facts="json_report:shown"),
    Format("ready", "prometheus", "monitoring:prometheus", part="audit"),
    Format("ready", "nagios", "monitoring:nagios", part="audit"),
    Format("ready", "csv", "exports:csv_lines", part="audit"),
    Format("deploy", "table", "deploy_table:show"),
    Format("deploy", "json", "json_report:render_deploy"),
    *(Format(document, "table", table) for document, table in _TABLES.items()),
    Format("env", "sh", "env_script:shell_lines"),
    Format("script", "sh", "env_script:script_lines"),
    *(Format(document, "json", "json_report:render") for document in (*_TABLES, "env", "script")),
    Format("smoke", "junit", "exports:junit_smoke"),
    Format("smoke", "prometheus", "monitoring:prometheus_smoke"),
    Format("stacks", "html", "stacks_html:render"),
)

#: document -> name -> its format, in the order in which ``--help`` names them.
FORMATS: dict[str, dict[str, Format]] = {}

for _row in _ROWS:
    FORMATS.setdefault(_row.document, {})[_row.name] = _row


def format_names(document: str, *, on_node: bool = False) -> tuple[str, ...]:
    """The words of ``--format``, the default first. on_node: only those of a node"""
    rows = FORMATS[document].values()
    return tuple(row.name for row in rows if row.on_node or not on_node)


def find_format(document: str, name: str) -> Format:
    """The format of this document and name. Raises KeyError for an unknown one."""
    return FORMATS[document][name]

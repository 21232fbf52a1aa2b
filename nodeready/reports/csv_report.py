"""An audit as CSV: a row for each result of each node, for a spreadsheet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from nodeready.agent.audit_document import Audit
from nodeready.core.text import sanitise
from nodeready.reports.registry import PLAIN, Options

COLUMNS = (
    *("node", "status", "check", "severity", "expected", "actual", "source", "fix", "actions"),
    "owner",
)
#: A spreadsheet takes a cell that begins so for a formula, also in full-width characters (OWASP,
#: CSV Injection). A leading apostrophe makes it a text.
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")


def _cell(text: str) -> str:
    text = sanitise(text)
    return f"'{text}" if _FORMULA.match(text) else text


def render(audit: Audit, options: Options = PLAIN) -> Iterator[str]:
    """The rows of a node at a time. A node that could not be probed has one row, without a check:
    its own status, and the reason as its actual value.
    """
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for node in audit.nodes:
        if node.error:
            error = {"node": node.name, "status": node.status, "actual": node.error}
            writer.writerow({column: _cell(text) for column, text in error.items()})
        for result in node.results:
            texts = {**vars(result), "node": node.name, "actions": " ".join(result.actions)}
            writer.writerow({column: _cell(texts[column]) for column in COLUMNS})
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()

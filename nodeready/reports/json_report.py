"""The audit as JSON, ``nodeready.audit/1``: docs/schema/audit-1.json. One line per node.

The text is plain ASCII. What a terminal would obey, and bytes that are no UTF-8, stand in it as
visible escapes (``\\x1b``), as in every other report; tabs stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from nodeready.audit import Audit, NodeReport
from nodeready.plain import plain
from nodeready.ready import Ready
from nodeready.results import Result
from nodeready.sanitise import sanitise

SCHEMA = "nodeready.audit/1"
READY = "nodeready.ready/1"

# The escapes of a JSON text, each as a whole; a surrogate pair is one character.
_ESCAPE = re.compile(
    r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|u([0-9a-f]{4})|([bfnrt\"\\/]))"
)
_CONTROL = {"b": "\b", "f": "\f", "n": "\n", "r": "\r"}
_RESULT = tuple(f.name for f in fields(Result))


def _safe(match: re.Match[str]) -> str:
    if match[1]:
        return match[0]
    char = chr(int(match[3], 16)) if match[3] else _CONTROL.get(match[4], "")
    shown = sanitise(char)
    return match[0] if shown == char else shown.replace("\\", "\\\\")


def dump(data: Any) -> str:
    """Plain data as one line of JSON in which nothing is left that a terminal would obey."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return _ESCAPE.sub(_safe, text) if "\\" in text else text


def _node(node: NodeReport) -> dict[str, Any]:
    return {
        "name": node.name,
        "status": node.status,
        "seconds": round(node.seconds, 3),
        "error": node.error,
        "facts": node.facts,
        "results": [{name: getattr(r, name) for name in _RESULT} for r in node.results],
    }


def listed(rows: Iterator[str]) -> Iterator[str]:
    """A JSON list, a row per line."""
    yield "["
    before = "\n"
    for row in rows:
        yield before + row
        before = ",\n"
    yield "\n]" if before != "\n" else "]"


def render_ready(ready: Ready) -> Iterator[str]:
    """``nodeready.ready/1``: the audit's document, and who is ready: docs/schema/ready-1.json."""
    return render(
        ready.audit,
        READY,
        budget_s=ready.budget_s,
        needed=ready.needed,
        enough=ready.enough,
        go=list(ready.go),
        no_go={name: list(reasons) for name, reasons in ready.no_go.items()},
    )


def render(audit: Audit, schema: str = SCHEMA, **more: Any) -> Iterator[str]:
    """The pieces of the document; a node's facts are in memory only while it is written.

    more: further fields, before the nodes
    """
    head = {
        "schema": schema,
        "started": audit.started,
        "finished": audit.finished,
        "policy_digest": audit.policy_digest,
        "complete": audit.complete,
        **more,
    }
    yield "{\n" + "".join(f"{dump(key)}: {dump(value)},\n" for key, value in head.items())
    yield '"nodes": '
    yield from listed(dump(_node(node)) for node in audit.nodes)
    yield ',\n"outliers": '
    yield from listed(dump(plain(outlier)) for outlier in audit.outliers)
    yield f',\n"summary": {dump(audit.summary)}\n}}\n'

"""The last lines as JSON, ``nodeready.tail/1``: docs/schema/tail-1.json. One line per group.

The text is plain ASCII; what a terminal would obey stands in it as visible escapes.
"""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.plain import plain
from nodeready.reports.json_report import dump, listed
from nodeready.tailing import Tail

SCHEMA = "nodeready.tail/1"


def render(tail: Tail) -> Iterator[str]:
    """The pieces of the document: within each kind, the smallest group first."""
    head = {
        "schema": SCHEMA,
        "started": tail.started,
        "finished": tail.finished,
        "pattern": tail.pattern,
        "grep": tail.grep,
        "complete": tail.complete,
        "left_out": tail.left_out,
    }
    yield "{\n" + "".join(f"{dump(key)}: {dump(value)},\n" for key, value in head.items())
    yield '"groups": '
    yield from listed(dump(plain(group)) for group in tail.groups)
    yield f',\n"notes": {dump(dict(tail.notes))}'
    yield f',\n"unreachable": {dump(dict(tail.unreachable))}'
    yield f',\n"failed": {dump(dict(tail.failed))}\n}}\n'

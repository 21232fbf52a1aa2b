"""The witnesses of what counts against a node or a part.

The rule: it counts if root saw it on that node, or if two users did who know nothing of each
other. A finding of a check and a failed connection are root's: this machine saw them itself. Each
kind of event declares its witness here. A part's history elsewhere has a second witness when the
part fails in its new node, too (`lemons`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from nodeready.runs.memory.look import Event

#: Root on the node, or the node's kernel: the event counts.
ROOT = "root"
#: A user's log on the node: it counts beside those of other users.
USER = "user"
#: No hardware is to blame, or it is not known which: the event is history alone.
NOBODY = "nobody"

_SOFTWARE = (
    *("oom", "exception", "segfault", "storage", "timeout", "limit", "signal", "environment"),
    "unclear",
)
#: Kind of event -> its witness.
WITNESSES = {
    "smoke-suspect": ROOT,
    # Either of the two nodes may have made all of their tests fail.
    "smoke-pair": NOBODY,
    # A cause of `postmortem` that the node's kernel has logged as well.
    "confirmed-gpu": ROOT,
    "confirmed-network": ROOT,
    "postmortem-gpu": USER,
    "postmortem-network": USER,
    **dict.fromkeys((f"postmortem-{cause}" for cause in _SOFTWARE), NOBODY),
}


def events_that_count(events: Iterable[Event]) -> Iterator[Event]:
    """The events that have their witnesses.

    Of the logs of users that name the same node, those of the user with the most days are left
    out: what remains, no user has said alone.
    """
    # (node, kind) -> user -> day -> an event of the day
    logs: dict[tuple[str, str], dict[str, dict[float, Event]]] = defaultdict(dict)
    for event in events:
        witness = WITNESSES.get(event.kind, NOBODY)
        if witness == ROOT:
            yield event
        elif witness == USER and event.user:
            days = logs[event.node, event.kind].setdefault(event.user, {})
            days[event.time_s // 86400] = event
    for by_user in logs.values():
        loudest = max(by_user.values(), key=len)
        for days in by_user.values():
            if days is not loudest:
                yield from days.values()

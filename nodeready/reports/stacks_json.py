"""The stacks as JSON, ``nodeready.stacks/1``: docs/schema/stacks-1.json. One line per process.

The text is plain ASCII; what a terminal would obey stands in it as visible escapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nodeready.reports.json_report import dump, listed
from nodeready.stacks import Frame, Group, Stacks

SCHEMA = "nodeready.stacks/1"


def _frames(frames: tuple[Frame, ...]) -> list[dict[str, Any]]:
    return [frame._asdict() for frame in frames]


def _group(group: Group) -> dict[str, Any]:
    return {
        "kind": group.kind,
        "verdict": group.verdict,
        "ranks": list(group.ranks),
        "nodes": list(group.nodes),
        "frames": _frames(group.frames),
        "hint": group.hint,
        "why": group.why,
        "fork": group.fork,
        "processes": group.processes,
        "native": _frames(group.native),
        "threads": [
            {"name": thread.name, "frames": _frames(thread.frames)} for thread in group.threads
        ],
    }


def render(stacks: Stacks) -> Iterator[str]:
    """The pieces of the document: groups in the order of suspicion, frames root to leaf."""
    head = {
        "schema": SCHEMA,
        "started": stacks.started,
        "finished": stacks.finished,
        "job": stacks.job,
        "world_size": stacks.world_size,
        "complete": stacks.complete,
    }
    yield "{\n" + "".join(f"{dump(key)}: {dump(value)},\n" for key, value in head.items())
    yield '"groups": '
    yield from listed(dump(_group(group)) for group in stacks.groups)
    yield ',\n"processes": '
    yield from listed(dump(process._asdict()) for process in stacks.processes)
    yield f',\n"errors": {dump(dict(stacks.errors))}'
    yield f',\n"advice": {dump(list(stacks.advice))}\n}}\n'

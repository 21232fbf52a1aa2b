"""The cores as JSON, ``nodeready.cores/1``: docs/schema/cores-1.json. One line per core.

The text is plain ASCII; what a terminal would obey stands in it as visible escapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nodeready.cores import Cores, Crash, Group, file_names, signal_name
from nodeready.reports.json_report import dump, listed

SCHEMA = "nodeready.cores/1"


def _group(group: Group, numbers: dict[int, int]) -> dict[str, Any]:
    top = group.headline
    return {
        "signal": group.signal,
        "signal_name": signal_name(group.signal),
        "program": group.program,
        "function": top.function if top else "",
        "cores": [numbers[id(crash)] for crash in group.crashes],
        "nodes": list(dict.fromkeys(crash.node for crash in group.crashes)),
        "ranks": sorted({c.core.rank for c in group.crashes if c.core.rank is not None}),
        "frames": [
            {name: getattr(frame, name) for name in ("function", "file", "line", "library")}
            for frame in group.frames
        ],
    }


def _core(crash: Crash, text_file: str) -> dict[str, Any]:
    file, core = crash.found.file, crash.core
    return {
        "node": crash.node,
        "seen_on": list(crash.found.nodes),
        "path": file.path,
        "written": crash.when,
        "age_s": round(file.age_s, 1),
        "size_bytes": file.size_bytes,
        "whole_bytes": core.whole_bytes,
        "truncated": crash.truncated,
        "signal": crash.signal,
        "pid": crash.pid,
        "uid": core.uid,
        "user": core.user,
        "comm": core.comm,
        "program": core.program,
        "command": core.command,
        "threads": core.threads,
        "rank": core.rank,
        "job": core.job,
        "unread": core.unread,
        "warning": core.warning,
        "text_file": text_file if crash.text else "",
        "python": list(crash.backtrace.python),
    }


def render(cores: Cores) -> Iterator[str]:
    """The pieces of the document; frames innermost first, as gdb numbers them."""
    head = {
        "schema": SCHEMA,
        "started": cores.started,
        "finished": cores.finished,
        "complete": cores.complete,
    }
    numbers = {id(crash): number for number, crash in enumerate(cores.crashes)}
    names = file_names(cores.crashes)
    yield "{\n" + "".join(f"{dump(key)}: {dump(value)},\n" for key, value in head.items())
    yield '"groups": '
    yield from listed(dump(_group(group, numbers)) for group in cores.groups)
    yield ',\n"cores": '
    yield from listed(dump(_core(crash, name)) for crash, name in zip(cores.crashes, names))
    yield f',\n"errors": {dump(dict(cores.errors))}'
    yield f',\n"notes": {dump({node: list(rows) for node, rows in cores.notes.items()})}'
    yield f',\n"more": {dump(dict(cores.more))}\n}}\n'

"""The progress that the logs of a process show: counters that rise, such as steps."""

from __future__ import annotations

import contextlib
import os
import re

from nodeready import knowledge
from nodeready.agent.witnesses import logs

#: Bytes at the end of a log that are searched.
_TAIL_BYTES = 16 << 10
#: Characters of a line that are searched.
_MAX_CHARACTERS = 400
#: Beginning of the sentence about a log.
LOG_COUNTS = "its log counts: "
_ROWS = {
    key: (re.compile(row["pattern"], re.I), row["counter"])
    for key, row in knowledge.rows("progress").items()
}


def row_of(line: str) -> str | None:
    """The row of the table that a line matches; None: no row."""
    return next((key for key, (pattern, _) in _ROWS.items() if pattern.search(line)), None)


def counters(text: str) -> dict[str, float]:
    """The counters of progress in a log and their largest values.

    >>> counters("step=4\\nstep=5\\n 45%|##  | 45/100 [00:30<00:36]")
    {'step {}': 5.0, '{}/100': 45.0}
    """
    values: dict[str, float] = {}
    # A progress bar writes its lines over each other.
    for line in re.split(r"[\r\n]+", text):
        shown = line[-_MAX_CHARACTERS:]
        if key := row_of(shown):
            pattern, counter = _ROWS[key]
            for match in pattern.finditer(shown) if counter else ():
                words = {**match.groupdict(), "count": "{}"}
                name = counter.format(**words).lower()
                values[name] = max(values.get(name, 0.0), float(match["count"]))
    return values


def observe(pid: int, uid: int, *, has_log: bool) -> dict[str, float]:
    """The counters in the files to which a process writes its output, and in the other file that
    it wrote last. It runs in a fork, as `logs.observe`.

    has_log: its output goes to a file
    """
    values: dict[str, float] = {}
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError, logs.NoLogError):
        files = logs.open_written_log(pid, uid, [logs.other_descriptors(pid)])
        for file in files:
            stack.callback(os.close, file.number)
        if has_log:
            files += stack.enter_context(logs.open_logs(pid, uid))
        for file in files:
            start = max(0, file.file_stat.st_size - _TAIL_BYTES)
            tail = os.pread(file.number, _TAIL_BYTES, start)
            values |= {} if b"\0" in tail else counters(tail.decode("utf-8", "replace"))
    return values


def difference(before: dict[str, float], after: dict[str, float]) -> str:
    """What has risen in a log, in words; "": nothing."""
    for name, count in after.items():
        if name in before and count > before[name]:
            first, last = name.format(f"{before[name]:g}"), name.format(f"{count:g}")
            return f"{LOG_COUNTS}{first}, then {last}"
    return ""

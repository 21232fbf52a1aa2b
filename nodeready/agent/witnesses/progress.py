"""The progress that the logs of a process show: counters that rise, such as steps."""

from __future__ import annotations

import contextlib
import os
import re

from nodeready import knowledge
from nodeready.agent.witnesses import logs

#: Bytes at the end of a log that are read: in more of them the counts of an earlier epoch stand.
_TAIL_BYTES = 1 << 10
_MAX_FILES = 4  # maximum files that are read beside the output
#: Beginnings of the sentences about a log, and about a variable, whose values are not shown: they
#: are read while the loop changes them, and may be wrong.
LOG_COUNTS, LOOP_CHANGES = "its log counts: ", "its loop changes "
_ROWS = {key: (re.compile(row["pattern"], re.I), row["counter"])
         for key, row in knowledge.rows("progress").items()}  # fmt: skip


def row_of(line: str) -> str | None:
    """The row of the table that a line matches; None: no row."""
    return next((key for key, (pattern, _) in _ROWS.items() if pattern.search(line)), None)


def observe(pid: int, uid: int, *, has_log: bool) -> dict[str, list[float]]:
    """The counters at the ends of the files to which a process writes its output, and of others
    that it wrote last; for a fork, as `logs.observe`. has_log: its output goes to a file
    """
    counters: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError, logs.NoLogError):
        files = logs.open_written_log(pid, uid, [logs.other_descriptors(pid)], _MAX_FILES)
        for file in files:
            stack.callback(os.close, file.number)
        for file in [*files, *(stack.enter_context(logs.open_logs(pid, uid)) if has_log else ())]:
            start = max(0, file.file_stat.st_size - _TAIL_BYTES)
            text = os.pread(file.number, _TAIL_BYTES, start).decode("utf-8", "replace")
            # A progress bar writes its lines over each other.
            for line in re.split(r"[\r\n]+", text):
                pattern, counter = _ROWS[row_of(line) or "waits"]
                for match in pattern.finditer(line) if counter else ():
                    name = counter.format(**{**match.groupdict(), "count": "{}"}).lower()
                    counters.setdefault(name, []).append(float(match["count"]))
    return counters


def difference(before: dict[str, list[float]], after: dict[str, list[float]]) -> str:
    """What has counted in a log, in words; "": nothing, or ranks that repeat their numbers."""
    for name, counts in after.items():
        if new := [count for count in counts if count not in before.get(name, counts)]:
            first, last = (name.format(f"{count:g}") for count in (before[name][-1], new[-1]))
            return f"{LOG_COUNTS}{first}, then {last}"
    return ""

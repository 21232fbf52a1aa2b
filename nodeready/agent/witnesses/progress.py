"""The progress that the logs of a process show: counters that rise, such as steps."""

from __future__ import annotations

import contextlib
import os
import re

from nodeready import knowledge
from nodeready.agent.witnesses import logs

#: Maximum bytes of a log that are searched: in a longer part an earlier count may stand again.
_TAIL_BYTES = 4 << 10
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


def counters(text: str) -> dict[str, list[float]]:
    """The counters of progress in the text of a log and their values, in their order.

    >>> counters("step=4\\nstep=5\\n 45%|##  | 45/100 [00:30<00:36]")
    {'step {}': [4.0, 5.0], '{}/100': [45.0]}
    """
    values: dict[str, list[float]] = {}
    # A progress bar writes its lines over each other.
    for line in re.split(r"[\r\n]+", text):
        shown = line[-_MAX_CHARACTERS:]
        if key := row_of(shown):
            pattern, counter = _ROWS[key]
            for match in pattern.finditer(shown) if counter else ():
                name = counter.format(**{**match.groupdict(), "count": "{}"}).lower()
                values.setdefault(name, []).append(float(match["count"]))
    return values


#: Path of a log -> its size, and the counters in the part that was read.
LogCounters = dict[str, tuple[int, dict[str, list[float]]]]


def observe(pid: int, uid: int, before: LogCounters, *, has_log: bool) -> LogCounters:
    """The counters in the files to which a process writes its output, and in the other file that
    it wrote last. It runs in a fork, as `logs.observe`.

    before:  earlier counters, after which a log is read; of another log its end is read
    has_log: its output goes to a file
    """
    found: LogCounters = {}
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError, logs.NoLogError):
        files = logs.open_written_log(pid, uid, [logs.other_descriptors(pid)])
        for file in files:
            stack.callback(os.close, file.number)
        if has_log:
            files += stack.enter_context(logs.open_logs(pid, uid))
        for file in files:
            size = file.file_stat.st_size
            start, _ = before.get(file.path, (size - _TAIL_BYTES, {}))
            part = os.pread(file.number, _TAIL_BYTES, max(0, start, size - _TAIL_BYTES))
            if b"\0" not in part:
                found[file.path] = size, counters(part.decode("utf-8", "replace"))
    return found


def difference(before: LogCounters, after: LogCounters) -> str:
    """What has counted in a log, in words; "": nothing. Ranks that stand still may repeat their
    numbers.
    """
    for path, (_, values) in after.items():
        earlier = before.get(path, (0, {}))[1]
        for name, counts in values.items():
            new = [count for count in counts if count not in earlier.get(name, counts)]
            if new:
                first, last = (name.format(f"{count:g}") for count in (earlier[name][-1], new[-1]))
                return f"{LOG_COUNTS}{first}, then {last}"
    return ""

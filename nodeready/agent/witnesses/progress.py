"""The progress that the logs of a process show: counters that rise, such as steps."""

from __future__ import annotations

import contextlib
import os
import re

from nodeready import knowledge
from nodeready.agent.witnesses import logs

#: Bytes at the end of a log that are read first, and maximum bytes of what is written later: in
#: a longer part the counts of an earlier epoch stand, too.
_FIRST_BYTES, _LATER_BYTES = 1 << 10, 4 << 10
#: Beginning of the sentence about a log.
LOG_COUNTS = "its log counts: "
_ROWS = {
    key: (re.compile(row["pattern"], re.I), row["counter"])
    for key, row in knowledge.rows("progress").items()
}
#: Path of a log -> its size, and its counters with their values.
LogCounters = dict[str, tuple[int, dict[str, list[float]]]]


def row_of(line: str) -> str | None:
    """The row of the table that a line matches; None: no row."""
    return next((key for key, (pattern, _) in _ROWS.items() if pattern.search(line)), None)


def observe(pid: int, uid: int, before: LogCounters, *, has_log: bool) -> LogCounters:
    """The counters in the files to which a process writes its output, and in the other file that
    it wrote last, since they were read before. It runs in a fork, as `logs.observe`.
    has_log: its output goes to a file
    """
    found: LogCounters = {}
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError, logs.NoLogError):
        files = logs.open_written_log(pid, uid, [logs.other_descriptors(pid)])
        for file in files:
            stack.callback(os.close, file.number)
        for file in [*files, *(stack.enter_context(logs.open_logs(pid, uid)) if has_log else ())]:
            size, counters = file.file_stat.st_size, dict[str, list[float]]()
            start = max(before[file.path][0] if file.path in before else size - _FIRST_BYTES, 0)
            part = os.pread(file.number, _LATER_BYTES, max(start, size - _LATER_BYTES))
            # A progress bar writes its lines over each other.
            for line in re.split(r"[\r\n]+", part.decode("utf-8", "replace")):
                pattern, counter = _ROWS.get(row_of(line) or "", (re.compile(""), ""))
                for match in pattern.finditer(line) if counter else ():
                    name = counter.format(**{**match.groupdict(), "count": "{}"}).lower()
                    counters.setdefault(name, []).append(float(match["count"]))
            found[file.path] = size, counters
    return found


def difference(before: LogCounters, after: LogCounters) -> str:
    """What has counted in a log, in words; "": nothing. Ranks that stand still may repeat their
    numbers.
    """
    for path, (_, counters) in after.items():
        earlier = before.get(path, (0, {}))[1]
        for name, counts in counters.items():
            if new := [count for count in counts if count not in earlier.get(name, counts)]:
                first, last = (name.format(f"{count:g}") for count in (earlier[name][-1], new[-1]))
                return f"{LOG_COUNTS}{first}, then {last}"
    return ""

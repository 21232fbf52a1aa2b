"""Files with a node's kernel log: of ``dmesg``, of ``journalctl -k``, or of syslog.

syslog's times have no year, and those of ``dmesg`` are seconds since boot. The logs beside such a
file say the year, and a line with both times says when the node was booted.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

from nodeready.agent.log_lines import stamp, utc_calendar
from nodeready.agent.witnesses.kernel_log import (
    KernelMessage,
    LogLine,
    message_of,
    record_lines,
    split_line,
)
from nodeready.runs.postmortem.clocks import ClockStep, clock_step
from nodeready.runs.postmortem.evidence import NodeFault

#: The names of such files; the first two are believed with any lines.
_NAMED = re.compile(
    r"(?:^|/)kernel/([\w.-]+?)(?:\.(?:txt|log))?$|(?:^|/)([\w.-]+?)\.kernel\.(?:txt|log)$"
)
_SYSLOG = re.compile(
    r"(?i)(?:^|/)(?:([\w.-]+?)[._-])?(?:dmesg|kern(?:el)?|messages|syslog|journal(?:ctl)?)"
    r"(?:[._-]([\w.-]*?))?(?:\.(?:txt|log|out))?$"
)
#: Parts of such a name that are no node: an option, a date, a word for the kernel or an excerpt.
_NO_NODE = re.compile(
    r"(?i)[\d.-]*|[a-z]|kernel|kern|dmesg|boot|current|log|txt|out|tail|last|full|oom"
)
#: The kernel's line about the time at which it set its clock (drivers/rtc/class.c).
_CLOCK_SET = re.compile(r"setting system clock to \S+ UTC \((\d{9,11})\)")
#: The beginning of a line of ``dmesg -T`` or ``dmesg --time-format iso``.
_DMESG = re.compile(
    r"(?:<\d+>|[a-z]+ *:[a-z]+ *: )?"
    r"(?:\[\w{3} \w{3} +\d+ [\d:]{8} \d{4}\]|\d{4}-\d\d-\d\dT[\d:]{8},\d{6}[+-])"
)
#: What follows the line of a kill before Linux 5.0: it may be a child of that process.
_KILLED = re.compile(r"Killed process (\d{1,9})(?:,| \().{0,200}total-vm:")
#: The process that writes a line of a syslog.
_PROCESS = re.compile(
    r"\S{1,40} (?:[ \d]\d \S{1,20} )?[\w.-]{1,255} ([\w.@/-]{1,80}\[\d{1,10}\]): "
)
#: Lines of a file whose form says whether it is a kernel's log, and their least share.
_SAMPLE, _SHARE = 200, 0.8
#: Seconds after the end of the logs from which on a time is of another year.
_DAY_S = 86400


class KernelFile(NamedTuple):
    """The lines of one file."""

    node: str  # by its name; "": not known
    lines: tuple[LogLine, ...]
    mtime_s: float


def named_node(name: str) -> str | None:
    """The node in the name of a kernel's log; "": it has none; None: it is no such name."""
    if match := _NAMED.search(name):
        return match[1] or match[2]
    match = _SYSLOG.search(name)
    if match is None:
        return None
    parts = [part for part in (match[2], match[1]) if part and not _NO_NODE.fullmatch(part)]
    return parts[0] if parts else ""


def is_certain(name: str) -> bool:
    """Whether a file of this name is a kernel's log, with any lines."""
    return _NAMED.search(name) is not None


def has_kernel_lines(text: str) -> bool:
    """Whether the lines are of a kernel, or of a syslog with its lines.

    A log with times in brackets may be any program's, so most lines must have seconds since boot.
    """
    rows = text.splitlines()
    lines = [split_line(row) for row in rows if row.strip()][:_SAMPLE]
    stamped = sum(line.boot_s is not None or _DMESG.match(line.head) is not None for line in lines)
    return stamped >= max(1, _SHARE * len(lines)) or any(split_line(row).host for row in rows)


def is_of_process(text: str) -> bool:
    """Whether one process, such as a job that systemd has started, writes most lines of a syslog.

    >>> is_of_process("Jun 02 01:00:00 g3 trainer[2210]: step 1")
    True
    """
    rows = [row for row in text.splitlines() if row.strip()]
    counts = Counter(match[1] for row in rows if (match := _PROCESS.match(row)))
    return 2 * max(counts.values(), default=0) > len(rows)


def read_kernel_file(node: str, text: str, mtime_s: float) -> KernelFile:
    """The lines of the kernel in this text."""
    lines = tuple(split_line(row) for row in text.splitlines() if row.strip())
    if any(line.head for line in lines):
        # A line without a time continues the line before it: a user may have written it.
        lines = tuple(line for line in lines if line.head)
    return KernelFile(node, lines, mtime_s)


def faults(
    files: Iterable[KernelFile], nodes: Set[str], end_s: float | None
) -> Iterator[NodeFault]:
    """The faults that the kernels report.

    nodes: the job's; a file that names none is the log of the only node
    end_s: the last time in the job's logs; None: they have none
    """
    names = {name.partition(".")[0].lower(): name for name in nodes if name}
    only = next(iter(nodes)) if len(nodes) == 1 else ""
    by_node: dict[str, list[KernelFile]] = {}
    for file in files:
        by_node.setdefault(file.node, []).append(file)
    for node, node_files in by_node.items():
        boot_s: float | None = None
        for file in node_files:
            boot_s = _boot_moment(file, end_s, boot_s)
        for file in node_files:
            for host, fault in _faults(file, end_s, boot_s):
                by_host = names.get(host.partition(".")[0].lower(), "")
                is_known = node.partition(".")[0].lower() in names
                name = (node if is_known else by_host or node) or host or only
                yield fault._replace(node=name)


def clock_steps(
    files: Iterable[KernelFile], nodes: Set[str], end_s: float | None
) -> Iterator[tuple[str, ClockStep]]:
    """The node and each step of its clock that a syslog reports; arguments: see `faults`."""
    only = next(iter(nodes)) if len(nodes) == 1 else ""
    for file in files:
        for line in file.lines:
            if (seconds := clock_step(line.head + line.text)) is not None:
                moment = _moment(line, file.mtime_s, end_s)
                yield file.node or line.host or only, ClockStep(moment, seconds)


def _boot_moment(file: KernelFile, end_s: float | None, boot_s: float | None) -> float | None:
    """When the node was booted, in seconds since 1970, by the last line with both times."""
    for line in file.lines:
        if line.boot_s is None:
            continue
        if match := _CLOCK_SET.search(line.text):
            boot_s = int(match[1]) - line.boot_s
        elif (moment := _moment(line, file.mtime_s, end_s)) is not None:
            boot_s = moment - line.boot_s
    return boot_s


def _faults(
    file: KernelFile, end_s: float | None, boot_s: float | None
) -> Iterator[tuple[str, NodeFault]]:
    """The host that each line names, and the fault."""
    cgroup, victim = "", 0
    # Lines without seconds since boot are separate records.
    rows = [
        (-number if line.boot_s is None else line.boot_s, line.text, line)
        for number, line in enumerate(file.lines, 1)
    ]
    for _, _, line in record_lines(rows):
        if line.text.startswith("oom-kill:"):
            # Its cgroup may have the number of Slurm's task; the line of the kill follows.
            cgroup = line.text
        match = _KILLED.match(line.text)
        message = KernelMessage("oom", 0, int(match[1]), line.text) if match else None
        message = message or message_of(line.text, 0)
        if message is None or (match and victim == message.pid):
            continue
        text = message.text
        if message.kind == "oom":
            text, cgroup, victim = f"{text} {cgroup}"[:600], "", message.pid
        moment = _moment(line, file.mtime_s, end_s)
        if moment is None and None not in (boot_s, line.boot_s):
            moment = boot_s + line.boot_s  # type: ignore[operator]
        yield line.host, NodeFault("", message.kind, moment, message.pid, text)


def _moment(line: LogLine, mtime_s: float, end_s: float | None) -> float | None:
    """The time of a line in seconds since 1970; None: it has none, or only seconds since boot.

    Of a time without a year, the last one that is not after the end of the logs, or not after the
    last change of the file.
    """
    last_s = mtime_s if end_s is None else end_s
    year = time.gmtime(last_s).tm_year
    for candidate in (year + 1, year, year - 1):
        moment = stamp(line.head, candidate, utc_calendar)
        has_year = moment == stamp(line.head, candidate - 1, utc_calendar)
        if moment is None or has_year or moment <= last_s + _DAY_S:
            return moment
    return moment

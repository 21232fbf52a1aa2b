"""The kernel's log: messages since the job began about faults that kill or hang jobs."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from nodeready import knowledge
from nodeready.agent.runtime import Ended, ProcessSupervisor, changeable_by_root_only
from nodeready.agent.stacks import processes
from nodeready.subjects.gpus import xids as xids_table

# --- Tools of the system, such as nvidia-smi and dmesg, which run as root under a limit.

#: Directories of tools; ROCm, and NVIDIA in containers, have separate ones.
_PATH = (
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/rocm/bin"
    ":/usr/local/nvidia/bin"
)
_MAX_OUTPUT_BYTES = 8 << 20  # maximum bytes of a tool's output; the last ones are kept


def tool_path(name: str) -> str:
    """The path of a tool; "": it is missing, or a user other than root could change it."""
    path = shutil.which(name, path=_PATH)
    return path if path and changeable_by_root_only(path) else ""


def run_tool(
    supervisor: ProcessSupervisor, argv: Sequence[str], limit_s: float
) -> tuple[Ended, str]:
    """How a tool ended, and the end of its output. Raises OSError."""
    tail = bytearray()

    def keep(process: object, stream: int, data: bytes) -> None:
        tail.extend(data if stream == 1 else b"")
        if len(tail) > 2 * _MAX_OUTPUT_BYTES:
            del tail[:-_MAX_OUTPUT_BYTES]

    environment = {**os.environ, "LC_ALL": "C", "PATH": _PATH}
    ended = supervisor.run(argv, max(0.2, limit_s), keep, env=environment)
    return ended, bytes(tail[-_MAX_OUTPUT_BYTES:]).decode("utf-8", "replace")


_SPARE_S = 0.5  # seconds of a limit that are reserved for ending a tool and reading its output


def tool_deadline(supervisor: ProcessSupervisor, limit_s: float) -> float:
    limit_s = max(limit_s / 2, limit_s - _SPARE_S)
    return min(supervisor.deadline, time.monotonic() + limit_s)


# --- The messages of the log.


@dataclass(frozen=True)
class KernelMessage:
    """A line of the kernel's log about a fault that kills or hangs jobs."""

    kind: str  # ``oom``, ``xid``, ``link``, ``filesystem``, ``hung``, ``memory``, ``segfault``
    ago_s: int  # whole seconds before the snapshot
    pid: int  # the process that it names; 0: none
    text: str  # the line, at most 200 characters


@dataclass(frozen=True)
class KernelLog:
    """The kernel's log since the job began. absent: why it cannot be read, one line."""

    absent: str = ""
    messages: tuple[KernelMessage, ...] = ()


def uptime_s() -> float:
    return float(processes.contents("/proc/uptime").split()[0] or 0)


class LogUnreadable(Exception):
    """The kernel's log cannot be read: why, one line."""


#: Maximum messages, and maximum messages of one kind and shape.
_MAX_MESSAGES, _MAX_ALIKE = 50, 5
_TEXT = 200
_MAX_LINE = 1000  # maximum characters of a line that are searched
_SLACK_S = 2.0  # seconds that the clocks of the kernel's log and of a process's start may differ
#: Before the text of a line: its priority or level; its time, in seconds since boot or as a date;
#: the host in the journal and in syslog; the number of the caller, which some kernels print.
_BOOT = r"\[ *(\d{1,12}\.\d{1,9})\] ?"
_CALLER = r"(?:\[ *[TC]\d+\] ?)?"
_DATE = (
    r"(?:\w{3} )?(?:\w{3} +\d+ [\d:.]{8,15}|\d{4}-\d\d-\d\d[T ][\d:.,]{8,18}(?:Z|[+-]\d\d:?\d\d)?)"
    r"(?: \d{4}| [A-Z]{3,5})? |\d{10}\.\d{6} |\[[^\]]{1,40}\] ?"
)
_HEAD = re.compile(
    rf"(?:<\d+>(?:1 )?)?(?:[a-z]+ *:[a-z]+ *: )?(?:{_BOOT}|{_DATE})?{_CALLER}"
    rf"(?:(\S+) kernel(?:\[\d+\])?: )?(?:{_BOOT})?{_CALLER}"
)


class LogLine(NamedTuple):
    """A line of the kernel's log, in any form in which tools write it."""

    head: str  # all before the text, with the time; "": the line has nothing before its text
    boot_s: float | None  # seconds since boot; None: it has none
    host: str  # that the journal or syslog names; ""
    text: str


def split_line(row: str) -> LogLine:
    """A line of dmesg, of ``journalctl -k``, or of the kernel in syslog."""
    match = _HEAD.match(row)
    assert match  # Every part is optional.
    boot_s = match[1] or match[3]
    return LogLine(match[0], float(boot_s) if boot_s else None, match[2] or "", row[match.end() :])


#: The rows of knowledge/kernel_lines.toml as (kind, pattern). Rows of messages that begin with the
#: name of a process stand first, because a user chooses that name.
_ROWS = knowledge.rows("kernel_lines").values()
_RULES = tuple(
    (row["kind"], re.compile(row["pattern"]))
    for row in sorted(_ROWS, key=lambda row: not row.get("names_process"))
)
#: How the messages of GPUs' drivers and their bus begin.
_DRIVERS = tuple({beginning for row in xids_table.BEGINNINGS.values() for beginning in row})


def witness_log(supervisor: ProcessSupervisor, since_s: float, limit_s: float) -> KernelLog:
    """The kernel's messages about faults that kill or hang jobs, the oldest first; of too many,
    the newest. since_s: seconds ago that the job began; limit_s: seconds for it
    """
    try:
        lines = read_log(supervisor, since_s, limit_s)
    except LogUnreadable as problem:
        return KernelLog(str(problem))
    messages: list[KernelMessage] = []
    shape_counts: Counter[tuple[str, str]] = Counter()
    for ago_s, text in reversed(record_lines(lines)):
        message = message_of(text, ago_s)
        if message is None or len(messages) >= _MAX_MESSAGES:
            continue
        shape = (message.kind, re.sub(r"[0-9a-fx]*\d[0-9a-fx]*", "#", message.text))
        shape_counts[shape] += 1
        if shape_counts[shape] <= _MAX_ALIKE:
            messages.append(message)
    return KernelLog("", tuple(reversed(messages)))


def message_of(text: str, ago_s: float) -> KernelMessage | None:
    """The line as a message; None: its kind is not known."""
    for kind, words in _RULES:
        match = words.match(text[:_MAX_LINE])
        if match and not kind:
            return None
        if match:
            pid = match.groupdict().get("pid") or "0"
            return KernelMessage(kind, max(0, int(ago_s)), int(pid[:9]), text[:_TEXT])
    if not text.startswith(_DRIVERS):
        return None
    # The audit's rules for GPUs and their bus.
    rule = xids_table.find_rule(text)
    if rule is None or not rule.action or rule.action == xids_table.APPLICATION:
        return None
    kind = "link" if rule.driver == "pcie" else "xid"
    return KernelMessage(kind, max(0, int(ago_s)), 0, text[:_TEXT])


_HEX = "[0-9a-fA-F]"
_XID = re.compile(
    rf"NVRM: Xid \(PCI:({_HEX}{{4,8}}):({_HEX}{{2}}):({_HEX}{{2}})[^)]*\): (\d{{1,5}})\b"
)


def xids(lines: Iterable[tuple[float, str]]) -> Iterator[tuple[str, int]]:
    """The PCI address (in the form of sysfs, without the function) and the code of each Xid."""
    for _, text in record_lines(list(lines)):
        match = _XID.match(text)
        if match:
            yield f"{match[1][-4:]}:{match[2]}:{match[3]}".lower(), int(match[4])


_Row = TypeVar("_Row", bound="tuple[Any, ...]")


def record_lines(lines: Sequence[_Row]) -> list[_Row]:
    """The lines that begin a record; each has its moment and its text first. A newline in a
    message, from the name of a user's file or mount, starts a line of the same moment that could
    forge any message.
    """
    own_lines: list[_Row] = []
    record_s, is_known = None, False
    for row in lines:
        moment, text = row[:2]
        if record_s is None or moment != record_s:
            record_s = moment
            kind = next((kind for kind, words in _RULES if words.match(text)), None)
            is_known = bool(kind) or (kind is None and text.startswith(_DRIVERS))
        elif not is_known:
            continue
        own_lines.append(row)
    return own_lines


def read_log(
    supervisor: ProcessSupervisor, since_s: float, limit_s: float
) -> list[tuple[float, str]]:
    """Age in seconds and text of each line since then, the oldest first. Raises LogUnreadable."""
    until = tool_deadline(supervisor, limit_s)
    boot_s = uptime_s()
    reason, best = "", None
    journalctl = ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-q"]
    for argv in (["dmesg"], [*journalctl, f"--since=-{int(since_s) + 60}s"]):
        path = tool_path(argv[0])
        if not path or time.monotonic() > until:
            continue
        limit_s = until - time.monotonic()
        try:
            ended, text = run_tool(supervisor, [path, *argv[1:]], limit_s)
        except OSError as problem:
            reason = reason or f"{argv[0]}: {problem.strerror or problem}"
            continue
        rows = map(split_line, text.splitlines())
        lines = [(row.boot_s, row.text) for row in rows if row.boot_s is not None]
        if ended.rc != 0 or not lines:
            error = ended.err.strip().partition("\n")[0][:150]
            reason = reason or f"{argv[0]}{f': {error}' if error else ' shows nothing'}"
            continue
        if best is None or lines[0][0] < best[0][0]:
            best = lines
        if lines[0][0] <= max(5.0, boot_s - since_s):
            break
    if best is None:
        raise LogUnreadable(f"the kernel's log cannot be read: {reason or 'there is no dmesg'}")
    begins = boot_s - since_s - _SLACK_S
    return [(max(0.0, boot_s - stamp_s), text) for stamp_s, text in best if stamp_s >= begins]

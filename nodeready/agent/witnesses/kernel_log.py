"""The kernel's log: messages since the job began about faults that kill or hang jobs."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from nodeready.agent.runtime import Ended, ProcessSupervisor, changeable_by_root_only
from nodeready.agent.stacks import processes

# --- Tools of the system, such as nvidia-smi and dmesg, which run as root under a limit.

#: Directories of tools; ROCm, and NVIDIA in containers, have separate ones.
_PATH = (
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/rocm/bin"
    ":/usr/local/nvidia/bin"
)
#: Maximum bytes of a tool's output; the last ones are kept.
_MAX_OUTPUT_BYTES = 8 << 20


def tool_path(name: str) -> str:
    """The path of a tool; "": it is missing, or a user other than root could change it."""
    path = shutil.which(name, path=_PATH)
    return path if path and changeable_by_root_only(path) else ""


@dataclass
class _OutputTail:
    """The last bytes of a tool's output."""

    data: bytearray = field(default_factory=bytearray)

    def __call__(self, process: object, stream: int, data: bytes) -> None:
        if stream == 1:
            self.data += data
            if len(self.data) > 2 * _MAX_OUTPUT_BYTES:
                del self.data[:-_MAX_OUTPUT_BYTES]


def run_tool(
    supervisor: ProcessSupervisor, argv: Sequence[str], limit_s: float
) -> tuple[Ended, str]:
    """How a tool ended, and the end of its output. Raises OSError."""
    tail = _OutputTail()
    ended = supervisor.run(
        argv, max(0.2, limit_s), tail, env={**os.environ, "LC_ALL": "C", "PATH": _PATH}
    )
    return ended, bytes(tail.data[-_MAX_OUTPUT_BYTES:]).decode("utf-8", "replace")


#: Seconds of a limit that are reserved for ending a tool and reading its output.
_SPARE_S = 0.5


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
#: Maximum characters of a line that are searched.
_MAX_LINE = 1000
#: Seconds that the clocks of the kernel's log and of a process's start may differ.
_SLACK_S = 2.0
_STAMPED = re.compile(r"(?:<\d+>)?\[ *(\d{1,12}\.\d{1,9})\] ?(.*)")
#: Before the text: the caller's number, which some kernels print; the host in the journal.
_BEFORE = re.compile(r"\[ *[TC]\d+\] |\S+ kernel: ")

#: Lines of the kernel about faults that kill or hang jobs: kind, pattern with the pid. A line
#: that begins with a process's name (15 bytes of the user's choice) matches one of the first two
#: rows, or none. Sources: Linux' arch/x86/mm/fault.c, arch/x86/kernel/traps.c, mm/page_alloc.c,
#: mm/oom_kill.c, kernel/hung_task.c, kernel/watchdog.c, kernel/rcu/tree_stall.h,
#: mm/memory-failure.c, drivers/edac/edac_mc.c, block/blk-core.c, fs/ext4/super.c,
#: fs/xfs/xfs_message.c, fs/btrfs/messages.c, fs/nfs (net/sunrpc/clnt.c), net/ceph, fs/smb/client,
#: drivers/nvme/host; Lustre's libcfs; drivers of network cards; net/sched/sch_generic.c.
_PATTERNS = (
    ("segfault", r".{1,15}\[(?P<pid>\d+)\]: (?:segfault at |bad frame in )"),
    ("segfault", r"traps: .{1,15}\[(?P<pid>\d+)\] (?:general protection|trap )"),
    ("memory", r".{1,15}: page allocation failure: "),
    ("oom", r"(?:Memory cgroup out|Out) of memory.*?: Kill(?:ed)? process (?P<pid>\d+) "),
    ("xid", r"NVRM: Xid \([^)]*\): \d+(?:, pid='?(?P<pid>\d+))?"),
    ("hung",
     r"INFO: task .{1,15}:(?P<pid>\d+) blocked (?:in I/O wait )?for more than \d+ seconds"),
    ("hung", r"watchdog: BUG: soft lockup - CPU#\d+ stuck .*:(?P<pid>\d+)\]"),
    ("hung", r"rcu: INFO: rcu_\w+ (?:self-)?detected (?:expedited )?stall"),
    ("memory", r"Memory failure: 0x[0-9a-f]+: "),
    ("memory", r"EDAC \w+: \d+ UE "),
    ("memory", r"mce: (?:\[Hardware Error\]: )?(?:Uncorrected|Fatal|Action required)"),
    ("memory", r"(?:\{\d+\})?\[Hardware Error\]: event severity: (?:fatal|recoverable)"),
    ("link", r"\S+(?: [0-9a-f:.]+(?: \S+)?)?: (?:\S+ ){0,3}[Ll]ink (?:is )?[Dd]own(?![\w-])"),
    ("link", r"\S+: link status definitely down for interface "),
    ("link", r"NETDEV WATCHDOG: \S+ \(\S+\): transmit queue \d+ timed out"),
    ("link", r"mlx[45]_core [0-9a-f:.]+: .*(?:health compromised|Fatal error|cmd.{0,80} timeout)"),
    ("link", r"\S+ [0-9a-f:.]+(?: \S+)?: .*(?:transmit queue|TX).{0,80} timed? ?out"),
    ("filesystem", r"nfs: server \S+ not responding"),
    ("filesystem", r"(?:Lustre|LustreError): .*(?:was lost|timed out|evicted|failed|-110|-107)"),
    ("filesystem", r"(?:EXT4-fs error|EXT4-fs \(\S+\): (?:Remounting|shut)|JBD2: .*error)"),
    ("filesystem", r"XFS \(\S+\): .*(?:error|[Cc]orruption|[Ss]hutting down)"),
    ("filesystem", r"BTRFS (?:error|critical)"),
    ("filesystem", r"(?:blk_update_request: |print_req_error: )?\w* ?I/O error,? (?:on )?dev "),
    ("filesystem", r"Buffer I/O error on dev"),
    ("filesystem",
     r"(?:libceph: (?:osd|mds|mon)\d+|ceph:) .*(?:down|hung|stale|lost|timed? ?out)"),
    ("filesystem", r"CIFS: .*(?:has not responded|timed out|-110)"),
    ("filesystem", r"nvme nvme\d+: (?:I/O .*timeout|I/O tag .*timeout|controller is down)"),
    ("filesystem", r"(?:beegfs|mmfs|GPFS): .*(?:error|timed? ?out|unreachable|lost)"),
)  # fmt: skip
_RULES = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS)


def witness_log(supervisor: ProcessSupervisor, since_s: float, limit_s: float) -> KernelLog:
    """The kernel's messages about faults that kill or hang jobs, since the job began.

    The oldest message comes first. Of too many messages, the newest are kept.

    since_s: seconds ago that the job began; limit_s: seconds for it
    """
    try:
        lines = read_log(supervisor, since_s, limit_s)
    except LogUnreadable as problem:
        return KernelLog(str(problem))
    messages: list[KernelMessage] = []
    shape_counts: Counter[tuple[str, str]] = Counter()
    for ago_s, text in reversed(_record_lines(lines)):
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
        if match:
            pid = match.groupdict().get("pid") or "0"
            return KernelMessage(kind, max(0, int(ago_s)), int(pid[:9]), text[:_TEXT])
    if not text.startswith(_DRIVERS):
        return None
    # The audit's rules for GPUs and their bus.
    from nodeready.subjects.gpus import xids

    rule = xids.find_rule(text)
    if rule is None or not rule.action or rule.action == xids.APPLICATION:
        return None
    return KernelMessage(
        "link" if rule.driver == "pcie" else "xid", max(0, int(ago_s)), 0, text[:_TEXT]
    )


_DRIVERS = ("NVRM: ", "nvidia-nvswitch", "nvidia ", "amdgpu", "[drm", "kfd kfd: ", "pcieport ")
_HEX = "[0-9a-fA-F]"
_XID = re.compile(
    rf"NVRM: Xid \(PCI:({_HEX}{{4,8}}):({_HEX}{{2}}):({_HEX}{{2}})[^)]*\): (\d{{1,5}})\b"
)


def xids(lines: Iterable[tuple[float, str]]) -> Iterator[tuple[str, int]]:
    """The PCI address (in the form of sysfs, without the function) and the code of each Xid."""
    for _, text in _record_lines(list(lines)):
        match = _XID.match(text)
        if match:
            yield f"{match[1][-4:]}:{match[2]}:{match[3]}".lower(), int(match[4])


def _record_lines(lines: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """The lines that begin a record. Some messages contain the name of a user's file or mount. A
    newline in that name starts a line of the same moment that could forge any message.
    """
    own_lines: list[tuple[float, str]] = []
    record_ago_s, is_known = None, False
    for ago_s, text in lines:
        if record_ago_s is None or ago_s != record_ago_s:
            record_ago_s = ago_s
            is_known = any(words.match(text) for _, words in _RULES) or text.startswith(_DRIVERS)
        elif not is_known:
            continue
        own_lines.append((ago_s, text))
    return own_lines


def read_log(
    supervisor: ProcessSupervisor, since_s: float, limit_s: float
) -> list[tuple[float, str]]:
    """Age in seconds and text of each line since then, the oldest first. Raises LogUnreadable.
    ``dmesg`` shows the kernel's ring buffer, which drops old lines; journald keeps them.
    """
    until = tool_deadline(supervisor, limit_s)
    boot_s = uptime_s()
    reason, best = "", None
    for argv in (
        ["dmesg"],
        ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-q",
         f"--since=-{int(since_s) + 60}s"],
    ):  # fmt: skip
        path = tool_path(argv[0])
        if not path or time.monotonic() > until:
            continue
        limit_s = until - time.monotonic()
        try:
            ended, text = run_tool(supervisor, [path, *argv[1:]], limit_s)
        except OSError as problem:
            reason = reason or f"{argv[0]}: {problem.strerror or problem}"
            continue
        lines = list(_timestamped_lines(text))
        if ended.rc != 0 or not lines:
            error = ended.err.strip().partition("\n")[0][:150]
            reason = reason or (f"{argv[0]}: {error}" if error else f"{argv[0]} shows nothing")
            continue
        if best is None or lines[0][0] < best[0][0]:
            best = lines
        if lines[0][0] <= max(5.0, boot_s - since_s):
            break
    if best is None:
        raise LogUnreadable(f"the kernel's log cannot be read: {reason or 'there is no dmesg'}")
    begins = boot_s - since_s - _SLACK_S
    return [(max(0.0, boot_s - stamp_s), text) for stamp_s, text in best if stamp_s >= begins]


def _timestamped_lines(text: str) -> Iterator[tuple[float, str]]:
    """Seconds since boot and text of each line that has both."""
    for row in text.splitlines():
        if match := _STAMPED.fullmatch(row):
            words = match[2]
            while before := _BEFORE.match(words):
                words = words[before.end() :]
            yield float(match[1]), words

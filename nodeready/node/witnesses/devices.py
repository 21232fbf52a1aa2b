"""GPUs, network ports and the kernel's log: events of the node's hardware since the job began.

A faulty driver blocks its callers: a tool runs under a limit and is left behind when it cannot be
ended, none is started where an earlier one hangs, and files of /sys are read in a fork.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nodeready.node.runtime import (
    Ended,
    ForkedWorker,
    ProcessSupervisor,
    Send,
    changeable_by_root_only,
)
from nodeready.node.stacks import processes


@dataclass(frozen=True)
class WitnessedGpu:
    """One GPU. None: the tool does not report the value.

    sm_percent, memory_percent: utilisation; power_w, limit_w: watts; xids: since the job began
    pids: the processes that compute on it, as this node's kernel numbers them
    throttle: the hardware's reasons for a lower clock: see `nodeready.subjects.gpus.gpu.Gpu`
    """

    index: int
    name: str
    bus_id: str
    sm_percent: int | None
    memory_percent: int | None
    power_w: int | None
    limit_w: int | None
    xids: tuple[int, ...]
    pids: tuple[int, ...]
    throttle: tuple[str, ...] = ()


@dataclass(frozen=True)
class WitnessedGpus:
    """All GPUs of the node. absent: why there are none, one line."""

    absent: str = ""
    devices: tuple[WitnessedGpu, ...] = ()


@dataclass(frozen=True)
class Port:
    """One network or RDMA port between two samples.

    kind:   ``ethernet``, ``infiniband`` or ``roce``
    state:  ``up``, ``down``, ``gone`` or another state of the kernel's
    received, sent: bytes between the samples
    errors: counters that rose, and by how much: ((``symbol_error``, 3), ...)
    gbps:   the rate of the link, Gb/s; 0: unknown
    """

    name: str
    kind: str
    state: str
    received: int
    sent: int
    errors: tuple[tuple[str, int], ...] = ()
    gbps: float = 0.0


@dataclass(frozen=True)
class Network:
    """All ports of the node. seconds: between the two samples. absent: why there are none."""

    absent: str = ""
    seconds: float = 0.0
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True)
class Message:
    """A line of the kernel's log about a fault that kills or hangs jobs.

    kind:  ``oom``, ``xid``, ``link``, ``filesystem``, ``hung``, ``memory``, ``segfault``
    ago_s: whole seconds before the snapshot
    pid:   the process that it names; 0: none
    text:  the line, at most 200 characters
    """

    kind: str
    ago_s: int
    pid: int
    text: str


@dataclass(frozen=True)
class Kernel:
    """The kernel's log since the job began. absent: why it cannot be read, one line."""

    absent: str = ""
    messages: tuple[Message, ...] = ()


# --- Tools of the system, run under a limit.

#: Directories of tools; ROCm, and NVIDIA in containers, have separate ones.
_PATH = (
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/rocm/bin"
    ":/usr/local/nvidia/bin"
)
#: Maximum bytes of a tool's output; the last ones are kept.
_MOST_BYTES = 8 << 20


def _tool_path(name: str) -> str:
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
            if len(self.data) > 2 * _MOST_BYTES:
                del self.data[:-_MOST_BYTES]


def _run(supervisor: ProcessSupervisor, argv: Sequence[str], limit_s: float) -> tuple[Ended, str]:
    """How a tool ended, and the end of its output. Raises OSError."""
    tail = _OutputTail()
    ended = supervisor.run(
        argv, max(0.2, limit_s), tail, env={**os.environ, "LC_ALL": "C", "PATH": _PATH}
    )
    return ended, bytes(tail.data[-_MOST_BYTES:]).decode("utf-8", "replace")


#: Seconds of a limit that are reserved for ending a tool and reading its output.
_SPARE_S = 0.5


def _deadline(supervisor: ProcessSupervisor, limit_s: float) -> float:
    limit_s = max(limit_s / 2, limit_s - _SPARE_S)
    return min(supervisor.deadline, time.monotonic() + limit_s)


# --- GPUs.


def gpus(
    supervisor: ProcessSupervisor, pids: Iterable[int], since_s: float, limit_s: float
) -> WitnessedGpus:
    """The node's GPUs, with the Xids since the job began.

    pids:    of the job: where a GPU has many processes, these are listed first
    since_s: seconds ago that the job began; limit_s: seconds for everything
    """
    until = _deadline(supervisor, limit_s)
    job_pids = frozenset(pids)
    if _driver("nvidia"):
        observation = _nvidia(supervisor, job_pids, until)
    elif _driver("amdgpu"):
        observation = _amd(supervisor, job_pids, until)
    else:
        return WitnessedGpus("no driver of a GPU is loaded")
    if not observation.devices:
        return observation
    try:
        xids = list(_xids(_log(supervisor, since_s, max(0.5, until - time.monotonic()))))
    except _LogUnreadableError:
        xids = []
    return WitnessedGpus("", tuple(_with_xids(gpu, xids) for gpu in observation.devices))


def _driver(name: str) -> bool:
    """Whether this kernel module is loaded: the tool would load a missing one."""
    return any(
        os.path.exists(path) for path in (f"/sys/module/{name}", f"/proc/driver/{name}/version")
    ) or os.path.isdir(f"/sys/bus/pci/drivers/{name}")


def _with_xids(gpu: WitnessedGpu, xids: Iterable[tuple[str, int]]) -> WitnessedGpu:
    # A function's number is not in a message.
    card = gpu.bus_id[:10]
    codes = dict.fromkeys(code for address, code in xids if address[:10] == card)
    return replace(gpu, xids=tuple(codes)[:32])


def _hung_process(words: re.Pattern[str], until: float) -> int:
    """The process of such a tool that hangs in the kernel; 0: none.

    Any user can start a process of that name that waits there, so only processes of root and of
    this user count."""
    from nodeready.subjects.gpus.nvidia import STUCK_AFTER_S

    uptime_s = _uptime_s()
    waiting = []
    for pid in processes.pids():
        process = processes.stat(processes.contents(f"/proc/{pid}/stat", 4096))
        if process is None or process.state != "D" or uptime_s - process.start_s <= STUCK_AFTER_S:
            continue
        # amd-smi is a script of Python's.
        if words.search(process.name) or process.name.startswith("python"):
            waiting.append(pid)
    owners = processes.owners(waiting)
    trusted = [pid for pid in waiting if owners.get(pid) in (0, os.geteuid())]

    def look(pid: int) -> str:
        # The read may hang, too: the process may hang on its own memory.
        return " ".join(
            processes.contents(f"/proc/{pid}/{name}", 512) for name in ("comm", "cmdline")
        )

    texts = processes.each(look, trusted, until)
    return next(
        (pid for pid, text in texts.items() if text is processes.HANGS or words.search(text)), 0
    )


def _uptime_s() -> float:
    return float(processes.contents("/proc/uptime").split()[0] or 0)


def _nvidia(
    supervisor: ProcessSupervisor, job_pids: frozenset[int], until: float
) -> WitnessedGpus:
    """``nvidia-smi -q -x``, once."""
    from nodeready.subjects.base import Output
    from nodeready.subjects.gpus import nvidia, nvidia_gpu, nvidia_xml

    path = _tool_path(nvidia.NAME)
    if not path:
        return WitnessedGpus("nvidia-smi is not installed")
    stuck = _hung_process(re.compile("nvidia-smi"), until)
    if stuck:
        return WitnessedGpus(f"an earlier nvidia-smi (pid {stuck}) hangs in the kernel: not asked")
    limit_s = until - time.monotonic()
    try:
        ended, text = _run(supervisor, [path, "-q", "-x"], limit_s)
    except OSError as problem:
        return WitnessedGpus(f"nvidia-smi: {problem.strerror or problem}")
    smi = nvidia.parse(Output(text or ended.err or " ", ended.rc))
    if not smi.gpus:
        reason = f"gave no answer in {limit_s:.0f} s" if ended.rc is None else smi.tool.detail
        return WitnessedGpus(f"nvidia-smi: {reason or smi.tool.state}")
    nodes: dict[str, Any] = {}
    root = nvidia_xml.tree(text)
    for node in () if root is None else root.iterfind("gpu"):
        address = nvidia_gpu.address(node.get("id", ""))
        # A process's name can contain a forged GPU: the forged one is shorter.
        if address and (address not in nodes or len(node) > len(nodes[address])):
            nodes[address] = node
    return WitnessedGpus(
        "",
        tuple(
            WitnessedGpu(
                gpu.index,
                gpu.model or "",
                gpu.pci_address,
                _percent(nodes.get(gpu.pci_address), "utilization/gpu_util"),
                _percent(nodes.get(gpu.pci_address), "utilization/memory_util"),
                _watts(nodes.get(gpu.pci_address)),
                gpu.power_limit_w,
                (),
                _pick_pids(
                    (process.pid for process in gpu.processes if "C" in (process.kind or "C")),
                    job_pids,
                ),
                gpu.throttle,
            )
            for gpu in smi.gpus
        ),
    )


#: Maximum processes listed of one GPU.
_MOST_PIDS = 64


def _pick_pids(pids: Iterable[int], job_pids: frozenset[int]) -> tuple[int, ...]:
    unique = dict.fromkeys(pids)
    return tuple(sorted(sorted(unique, key=lambda pid: pid not in job_pids)[:_MOST_PIDS]))


def _percent(node: Any, path: str) -> int | None:
    text = (node.findtext(path) or "") if node is not None else ""
    match = re.fullmatch(r"\s*(\d{1,3}) ?%\s*", text)
    return int(match[1]) if match and int(match[1]) <= 100 else None


#: What a GPU draws, under the names of several schemas.
_DRAWS = (
    "gpu_power_readings/instant_power_draw",
    "gpu_power_readings/average_power_draw",
    "gpu_power_readings/power_draw",
    "power_readings/power_draw",
)


def _watts(node: Any) -> int | None:
    for path in _DRAWS if node is not None else ():
        match = re.fullmatch(r"\s*(\d{1,5})(?:\.\d+)? W\s*", node.findtext(path) or "")
        if match:
            return int(match[1])
    return None


# --- AMD's: amd-smi, or rocm-smi where there is no amd-smi; the processes are the kernel's word.

_KFD = "/sys/class/kfd/kfd"


def _amd(supervisor: ProcessSupervisor, job_pids: frozenset[int], until: float) -> WitnessedGpus:

    name = next((tool for tool in ("amd-smi", "rocm-smi") if _tool_path(tool)), "")
    if not name:
        return WitnessedGpus("neither amd-smi nor rocm-smi is installed")
    stuck = _hung_process(re.compile("(amd|rocm)[-_]smi"), until)
    if stuck:
        return WitnessedGpus(f"an earlier {name} (pid {stuck}) hangs in the kernel: not asked")
    calls = (["metric"], ["static"]) if name == "amd-smi" else (["-a"],)
    printed = []
    for call in calls:
        try:
            ended, text = _run(
                supervisor, [_tool_path(name), *call, "--json"], until - time.monotonic()
            )
        except OSError as problem:
            return WitnessedGpus(f"{name}: {problem.strerror or problem}")
        if ended.rc is None:
            return WitnessedGpus(f"{name} {call[0]} gave no answer in time")
        printed.append(text)
    pids = _kfd_processes(until)
    observed = _amd_smi(*printed) if name == "amd-smi" else _rocm_smi(*printed)
    devices = tuple(
        replace(gpu, pids=_pick_pids(pids.get(gpu.bus_id, ()), job_pids)) for gpu in observed
    )
    return WitnessedGpus(
        "" if devices else f"{name}: {printed[0].strip()[:100] or 'it shows no GPU'}", devices
    )


def _amd_smi(metric: str, static: str) -> Iterator[WitnessedGpu]:
    from nodeready.subjects.gpus import amd_json, amd_smi

    fixed = {amd_json.whole_number(entry.get("gpu")): entry for entry in amd_json.entries(static)}
    for entry in amd_json.entries(metric):
        index = amd_json.whole_number(entry.get("gpu")) or 0
        about = fixed.get(index, {})
        yield WitnessedGpu(
            index,
            amd_json.text(amd_json.value_at(about, "asic", "market_name")) or "",
            amd_json.pci_address(amd_json.value_at(about, "bus", "bdf")),
            amd_json.whole_number(amd_json.value_at(entry, "usage", "gfx_activity")),
            amd_json.whole_number(amd_json.value_at(entry, "usage", "umc_activity")),
            _rounded(amd_json.number(amd_json.value_at(entry, "power", "socket_power"))),
            _rounded(amd_json.number(amd_json.value_at(about, "limit", "max_power"))),
            (),
            (),
            amd_smi.throttle_reasons(entry),
        )


def _rounded(value: float | None) -> int | None:
    return None if value is None else int(value)


def _rocm_smi(printed: str) -> Iterator[WitnessedGpu]:
    from nodeready.subjects.gpus import amd_json, rocm_smi

    for index, card in sorted(rocm_smi.cards(printed).items()):
        # ROCm 5 and 6 name what is drawn differently.
        watts = next((value for key, value in card.items() if _DRAWN.fullmatch(key)), None)
        yield WitnessedGpu(
            index,
            amd_json.text(card.get("card series")) or "",
            amd_json.pci_address(card.get("pci bus")),
            amd_json.whole_number(card.get("gpu use (%)")),
            amd_json.whole_number(card.get("gpu memory read/write activity (%)")),
            _rounded(amd_json.number(watts)),
            _rounded(amd_json.number(card.get("max graphics package power (w)"))),
            (),
            (),
        )


_DRAWN = re.compile(r"(average|current) (graphics package|socket graphics package) power \(w\)")


def _kfd_processes(until: float) -> dict[str, list[int]]:
    """Address -> the processes with memory on that GPU (amdgpu's part for computing)."""
    from nodeready.subjects.gpus import kfd

    rows = []
    for folder, names in (
        (f"{_KFD}/topology/nodes", ("gpu_id", "properties")),
        (f"{_KFD}/proc", ()),
    ):
        for entry in _list_directory(folder)[:4096]:
            for name in names or [
                n for n in _list_directory(f"{folder}/{entry}") if n.startswith("vram_")
            ]:
                path = f"{folder}/{entry}/{name}"
                rows += [f"{path}:{row}" for row in processes.contents(path, 4096).splitlines()]
            if time.monotonic() > until:
                return {}
    pids_by_address = kfd.parse_kfd("\n".join(rows)).processes
    return {
        address: [process.pid for process in processes_of]
        for address, processes_of in pids_by_address.items()
    }


def _list_directory(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


# --- The kernel's log.


class _LogUnreadableError(Exception):
    """The kernel's log cannot be read: why, one line."""


#: Maximum messages, and maximum messages of one kind and shape.
_MOST_MESSAGES, _MOST_ALIKE = 50, 5
_TEXT = 200
#: Seconds that the clocks of the kernel's log and of a process's start may differ.
_SLACK_S = 2.0
_STAMPED = re.compile(r"(?:<\d+>)?\[ *(\d{1,12}\.\d{1,9})\] ?(.*)")
#: The caller's number, which some kernels print; the host, which the journal prints.
_BEFORE = re.compile(r"\[ *[TC]\d+\] |\S+ kernel: ")

#: Lines of the kernel's about faults that kill or hang jobs: kind, pattern with the pid. A line
#: that begins with a process's name (15 bytes of the user's choice) matches one of the first two
#: rows, or none. Sources: Linux' arch/x86/mm/fault.c, arch/x86/kernel/traps.c, mm/page_alloc.c,
#: mm/oom_kill.c, kernel/hung_task.c, kernel/watchdog.c, kernel/rcu/tree_stall.h,
#: mm/memory-failure.c, drivers/edac/edac_mc.c, block/blk-core.c, fs/ext4/super.c,
#: fs/xfs/xfs_message.c, fs/btrfs/messages.c, fs/nfs (net/sunrpc/clnt.c), net/ceph, fs/smb/client,
#: drivers/nvme/host; Lustre's libcfs; drivers of network cards; net/sched/sch_generic.c.
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(words))
    for kind, words in (
        ("segfault", r".{1,15}\[(?P<pid>\d+)\]: (?:segfault at |bad frame in )"),
        ("segfault", r"traps: .{1,15}\[(?P<pid>\d+)\] (?:general protection|trap )"),
        ("memory", r".{1,15}: page allocation failure: "),
        ("oom", r"(?:Memory cgroup out|Out) of memory.*?: Kill(?:ed)? process (?P<pid>\d+) "),
        ("xid", r"NVRM: Xid \([^)]*\): \d+(?:, pid='?(?P<pid>\d+))?"),
        (
            "hung",
            r"INFO: task .{1,15}:(?P<pid>\d+) blocked (?:in I/O wait )?for more than \d+ seconds",
        ),
        ("hung", r"watchdog: BUG: soft lockup - CPU#\d+ stuck .*:(?P<pid>\d+)\]"),
        ("hung", r"rcu: INFO: rcu_\w+ (?:self-)?detected (?:expedited )?stall"),
        ("memory", r"Memory failure: 0x[0-9a-f]+: "),
        ("memory", r"EDAC \w+: \d+ UE "),
        ("memory", r"mce: (?:\[Hardware Error\]: )?(?:Uncorrected|Fatal|Action required)"),
        ("memory", r"(?:\{\d+\})?\[Hardware Error\]: event severity: (?:fatal|recoverable)"),
        (
            "link",
            r"\S+(?: [0-9a-f:.]+(?: \S+)?)?: (?:\S+ ){0,3}[Ll]ink (?:is )?[Dd]own(?![\w-])",
        ),
        ("link", r"\S+: link status definitely down for interface "),
        ("link", r"NETDEV WATCHDOG: \S+ \(\S+\): transmit queue \d+ timed out"),
        ("link", r"mlx[45]_core [0-9a-f:.]+: .*(?:health compromised|Fatal error|cmd.* timeout)"),
        ("link", r"\S+ [0-9a-f:.]+(?: \S+)?: .*(?:transmit queue|TX).* timed? ?out"),
        ("filesystem", r"nfs: server \S+ not responding"),
        (
            "filesystem",
            r"(?:Lustre|LustreError): .*(?:was lost|timed out|evicted|failed|-110|-107)",
        ),
        ("filesystem", r"(?:EXT4-fs error|EXT4-fs \(\S+\): (?:Remounting|shut)|JBD2: .*error)"),
        ("filesystem", r"XFS \(\S+\): .*(?:error|[Cc]orruption|[Ss]hutting down)"),
        ("filesystem", r"BTRFS (?:error|critical)"),
        (
            "filesystem",
            r"(?:blk_update_request: |print_req_error: )?\w* ?I/O error,? (?:on )?dev ",
        ),
        ("filesystem", r"Buffer I/O error on dev"),
        (
            "filesystem",
            r"(?:libceph: (?:osd|mds|mon)\d+|ceph:) .*(?:down|hung|stale|lost|timed? ?out)",
        ),
        ("filesystem", r"CIFS: .*(?:has not responded|timed out|-110)"),
        ("filesystem", r"nvme nvme\d+: (?:I/O .*timeout|I/O tag .*timeout|controller is down)"),
        ("filesystem", r"(?:beegfs|mmfs|GPFS): .*(?:error|timed? ?out|unreachable|lost)"),
    )
)


def kernel(supervisor: ProcessSupervisor, since_s: float, limit_s: float) -> Kernel:
    """The kernel's messages about faults that kill or hang jobs, since the job began.

    The oldest message comes first; where there are too many, the newest are kept.

    since_s: seconds ago that the job began; limit_s: seconds for it
    """
    try:
        lines = _log(supervisor, since_s, limit_s)
    except _LogUnreadableError as problem:
        return Kernel(str(problem))
    messages: list[Message] = []
    shape_counts: Counter[tuple[str, str]] = Counter()
    for ago_s, text in reversed(_record_lines(lines)):
        message = message_of(text, ago_s)
        if message is None or len(messages) >= _MOST_MESSAGES:
            continue
        shape = (message.kind, re.sub(r"[0-9a-fx]*\d[0-9a-fx]*", "#", message.text))
        shape_counts[shape] += 1
        if shape_counts[shape] <= _MOST_ALIKE:
            messages.append(message)
    return Kernel("", tuple(reversed(messages)))


def message_of(text: str, ago_s: float) -> Message | None:
    """The line as a message; None for a line of no known kind."""
    for kind, words in _RULES:
        match = words.match(text)
        if match:
            pid = match.groupdict().get("pid") or "0"
            return Message(kind, max(0, int(ago_s)), int(pid[:9]), text[:_TEXT])
    if not text.startswith(_DRIVERS):
        return None
    # The audit's rules for GPUs and their bus.
    from nodeready.subjects.gpus import driver_messages, xids

    rule = driver_messages.find_rule(text)
    if rule is None or not rule.action or rule.action == xids.APPLICATION:
        return None
    return Message("link" if rule.source == "pcie" else "xid", max(0, int(ago_s)), 0, text[:_TEXT])


_DRIVERS = ("NVRM: ", "nvidia-nvswitch", "nvidia ", "amdgpu", "[drm", "kfd kfd: ", "pcieport ")
_HEX = "[0-9a-fA-F]"
_XID = re.compile(
    rf"NVRM: Xid \(PCI:({_HEX}{{4,8}}):({_HEX}{{2}}):({_HEX}{{2}})[^)]*\): (\d{{1,5}})\b"
)


def _xids(lines: Iterable[tuple[float, str]]) -> Iterator[tuple[str, int]]:
    """PCI address (in sysfs' form, as far as the message has it) and code of each Xid."""
    for _, text in _record_lines(list(lines)):
        match = _XID.match(text)
        if match:
            yield f"{match[1][-4:]}:{match[2]}:{match[3]}".lower(), int(match[4])


def _record_lines(lines: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """The lines that begin a record.

    Some messages contain the name of a user's file or mount. A newline in that name starts a line
    of the same moment that could forge any message."""
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


def _log(supervisor: ProcessSupervisor, since_s: float, limit_s: float) -> list[tuple[float, str]]:
    """Age in seconds and text of each line since then, the oldest first. Raises _Unread.

    ``dmesg`` shows the kernel's ring buffer, which drops old lines; journald keeps them.
    """
    until = _deadline(supervisor, limit_s)
    uptime_s = _uptime_s()
    reason, best = "", None
    for argv in (
        ["dmesg"],
        ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-q",
         f"--since=-{int(since_s) + 60}s"],
    ):  # fmt: skip
        path = _tool_path(argv[0])
        if not path or time.monotonic() > until:
            continue
        try:
            ended, text = _run(supervisor, [path, *argv[1:]], until - time.monotonic())
        except OSError as problem:
            reason = reason or f"{argv[0]}: {problem.strerror or problem}"
            continue
        lines = list(_timestamped_lines(text))
        if ended.rc != 0 or not lines:
            first = ended.err.strip().splitlines()[:1]
            reason = reason or (
                f"{argv[0]}: {first[0][:150]}" if first else f"{argv[0]} shows nothing"
            )
            continue
        if best is None or lines[0][0] < best[0][0]:
            best = lines
        if lines[0][0] <= max(5.0, uptime_s - since_s):
            break
    if best is None:
        raise _LogUnreadableError(
            f"the kernel's log cannot be read: {reason or 'there is no dmesg'}"
        )
    begins = uptime_s - since_s - _SLACK_S
    return [(max(0.0, uptime_s - at), text) for at, text in best if at >= begins]


def _timestamped_lines(text: str) -> Iterator[tuple[float, str]]:
    """Seconds since boot and text of each line that has both."""
    for row in text.splitlines():
        match = _STAMPED.fullmatch(row)
        if match:
            words = match[2]
            while before := _BEFORE.match(words):
                words = words[before.end() :]
            yield float(match[1]), words


# --- Ports: counters that only grow, so that two samples show the traffic between them.

#: Seconds for reading all of them.
_COUNTERS_S = 3.0
_MOST_PORTS = 256
_WORD_BYTES = 4  # port_rcv_data and port_xmit_data count words of four bytes (IBTA, PortCounters)

#: Error counters of an interface in /sys/class/net/NAME/statistics: zero on a healthy link.
_NET_ERRORS = (
    "rx_errors",
    "tx_errors",
    "tx_dropped",
    "rx_crc_errors",
    "rx_missed_errors",
    "rx_fifo_errors",
    "tx_carrier_errors",
)
#: Error counters of an RDMA port in counters (Linux' sysfs-class-infiniband) and in its driver's
#: hw_counters.
_PORT_ERRORS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_xmit_discards",
    "port_xmit_constraint_errors",
    "port_rcv_constraint_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "VL15_dropped",
)
_HW_ERRORS = (
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "implied_nak_seq_err",
    "out_of_buffer",
    "rx_icrc_encapsulated",
    "rx_drops",
    "retrans_timeout_events",
)
#: Byte counters in hw_counters of a device that has no others (EFA): received, sent.
_HW_RECEIVED = ("rx_bytes", "rdma_read_bytes", "rdma_write_recv_bytes")
_HW_SENT = ("tx_bytes", "rdma_read_resp_bytes", "rdma_write_bytes")

#: State of a port whose byte counters cannot be read, so that it does not pass for a quiet one.
UNREADABLE = "unreadable"


def counters(root: str = "/sys/class") -> dict[str, Any]:
    """Port -> its kind, its state and its counters, as `network` takes them; ``absent``: why not.

    root: the directory of the kernel's classes of devices
    """
    until = time.monotonic() + _COUNTERS_S

    def work(send: Send) -> None:
        send({"ports": dict(_all_ports(root))})

    worker = ForkedWorker(work, _COUNTERS_S + 1.0)
    try:
        for message in worker.messages(_COUNTERS_S, until):
            if message is None:
                return {"absent": "a counter of a network port hangs in the kernel"}
            return dict(message)
    finally:
        worker.end()
    return {"absent": "the counters of the network ports cannot be read"}


def _all_ports(root: str) -> Iterator[tuple[str, dict[str, Any]]]:
    names = [name for name in _list_directory(f"{root}/net") if name != "lo"][:_MOST_PORTS]
    physical = [name for name in names if os.path.exists(f"{root}/net/{name}/device")]
    # A container may have only the interfaces that its host created.
    for name in physical or names:
        yield name, _interface(f"{root}/net/{name}")
    for device in _list_directory(f"{root}/infiniband")[:_MOST_PORTS]:
        for port in _list_directory(f"{root}/infiniband/{device}/ports"):
            if port.isdecimal():
                yield f"{device}/{port}", _rdma(f"{root}/infiniband/{device}/ports/{port}")


def _values(directory: str, names: Iterable[str]) -> dict[str, int]:
    """The counters that exist and can be read; some drivers refuse to read one (EINVAL)."""
    values = {}
    for name in names:
        text = processes.contents(f"{directory}/{name}", 64).strip()
        if re.fullmatch(r"\d{1,20}", text):
            values[name] = int(text)
    return values


def _interface(path: str) -> dict[str, Any]:
    state = processes.contents(f"{path}/operstate").strip()
    if state not in ("up", "down") and processes.contents(f"{path}/carrier").strip() == "1":
        state = "up"
    values = _values(f"{path}/statistics", ("rx_bytes", "tx_bytes"))
    return {
        # ARPHRD_INFINIBAND of linux/if_arp.h: IP over InfiniBand.
        "kind": "infiniband" if processes.contents(f"{path}/type").strip() == "32" else "ethernet",
        "state": state[:20],
        "rdma": False,
        "received": values.get("rx_bytes"),
        "sent": values.get("tx_bytes"),
        "errors": {
            **_values(f"{path}/statistics", _NET_ERRORS),
            **_values(path, ("carrier_changes",)),
        },
        # Mb/s; -1, or no answer, where the driver does not know.
        "gbps": _values(path, ("speed",)).get("speed", 0) / 1000,
    }


def _rdma(path: str) -> dict[str, Any]:
    layer = processes.contents(f"{path}/link_layer").strip()
    state = processes.contents(f"{path}/state").partition(":")[2].strip().lower()
    rate = re.match(r"(\d{1,5}(?:\.\d{1,3})?) Gb/sec", processes.contents(f"{path}/rate", 64))
    values = _values(f"{path}/counters", ("port_rcv_data", "port_xmit_data"))
    received, sent = values.get("port_rcv_data"), values.get("port_xmit_data")
    words = True
    if received is None and sent is None:
        words = False
        many = _values(f"{path}/hw_counters", (*_HW_RECEIVED, *_HW_SENT))
        if "rx_bytes" in many and "tx_bytes" in many:
            received = sum(many.get(name, 0) for name in _HW_RECEIVED)
            sent = sum(many.get(name, 0) for name in _HW_SENT)
    return {
        "kind": "roce" if layer == "Ethernet" else "infiniband",
        "state": "up" if state == "active" else state[:20] or "unknown",
        "rdma": True,
        "words": words,
        "received": received,
        "sent": sent,
        "errors": {
            **_values(f"{path}/counters", _PORT_ERRORS),
            **_values(f"{path}/hw_counters", _HW_ERRORS),
        },
        # ``400 Gb/sec (4X NDR)``
        "gbps": float(rate[1]) if rate else 0.0,
    }


def network(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> Network:
    """The traffic between two samples (`counters`), without ports that are down both times.

    RDMA ports are listed even when they are down.

    seconds: between the samples
    """
    for sample in (before, after):
        if "ports" not in sample:
            return Network(str(sample.get("absent", "the network ports were not sampled")))
    old, new = before["ports"], after["ports"]
    moved_ports = [_port(name, old[name], new[name]) for name in new if name in old]
    moved_ports += [Port(name, old[name]["kind"], "gone", 0, 0) for name in old if name not in new]
    ports = tuple(port for port in moved_ports if port is not None)
    return Network("" if ports else "no network port is up", round(seconds, 3), ports)


def _port(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Port | None:
    if not new["rdma"] and "up" not in (old["state"], new["state"]):
        return None
    received, sent = (
        _counter_increase(old[direction], new[direction]) for direction in ("received", "sent")
    )
    unit = _WORD_BYTES if new.get("words") else 1
    errors = []
    for counter, value in new["errors"].items():
        risen = _counter_increase(old["errors"].get(counter), value, full=False)
        if risen:
            errors.append((counter, risen))
    state = new["state"]
    if state == "up" and (received is None or sent is None):
        state = UNREADABLE
    return Port(
        name, new["kind"], state, (received or 0) * unit, (sent or 0) * unit, tuple(errors),
        new["gbps"],
    )  # fmt: skip


def _counter_increase(old: int | None, new: int | None, *, full: bool = True) -> int | None:
    """The increase of a counter; None: unknown.

    full: a counter of 32 bits that stays at its maximum no longer counts
    """
    if old is None or new is None:
        return None
    if full and old == new == 0xFFFFFFFF:
        return None
    if new >= old:
        return new - old
    # It restarted: after 32 bits, or because its driver was reloaded.
    wrapped = new + (1 << 32) - old
    return wrapped if old < 1 << 32 and wrapped < 1 << 31 else None

"""GPUs, network ports and the kernel's log: what the node's hardware did since the job began.

A driver in trouble makes whoever asks wait: a tool runs under a limit and is left behind when it
cannot be ended, none is started where an earlier one hangs, and files of /sys are read in a fork.
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

from nodeready.node.runtime import Ended, ForkedWorker, ProcessSupervisor, Send, roots_alone
from nodeready.node.stacks import processes


@dataclass(frozen=True)
class Gpu:
    """One GPU. None: not told.

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
class Gpus:
    """All GPUs of the node. absent: why none is told, one line."""

    absent: str = ""
    devices: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Port:
    """One network or RDMA port between two samples.

    kind:   ``ethernet``, ``infiniband`` or ``roce``
    state:  ``up``, or what it is instead
    received, sent: bytes between the samples
    errors: counters that rose, and by how much: ((``symbol_error``, 3), ...)
    gbps:   the rate of the link, Gb/s; 0: not told
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
    """All ports of the node. seconds: between the two samples. absent: why none is told."""

    absent: str = ""
    seconds: float = 0.0
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True)
class Message:
    """A line of the kernel's log that a job dies or hangs of.

    kind:  ``oom``, ``xid``, ``link``, ``filesystem``, ``hung``, ``memory``, ``segfault``
    ago_s: whole seconds before the look
    pid:   the process that it names; 0: none
    text:  the line, at most 200 characters
    """

    kind: str
    ago_s: int
    pid: int
    text: str


@dataclass(frozen=True)
class Kernel:
    """The kernel's log since the job began. absent: why it is not told, one line."""

    absent: str = ""
    messages: tuple[Message, ...] = ()


# --- A tool of the system: found, run under a limit, and never believed too much.

#: Where tools are looked for; ROCm, and NVIDIA in containers, have a directory of their own.
_PATH = (
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/rocm/bin"
    ":/usr/local/nvidia/bin"
)
#: Bytes of a tool's answer that are kept: of many, the last.
_MOST_BYTES = 8 << 20


def _tool(name: str) -> str:
    """The path of a tool; "": not there, or somebody else than root could change it."""
    path = shutil.which(name, path=_PATH)
    return path if path and roots_alone(path) else ""


@dataclass
class _Kept:
    """The last bytes of a tool's output."""

    data: bytearray = field(default_factory=bytearray)

    def __call__(self, process: object, stream: int, piece: bytes) -> None:
        if stream == 1:
            self.data += piece
            if len(self.data) > 2 * _MOST_BYTES:
                del self.data[:-_MOST_BYTES]


def _run(supervisor: ProcessSupervisor, argv: Sequence[str], limit_s: float) -> tuple[Ended, str]:
    """How a tool ended, and the last of its output. Raises OSError."""
    kept = _Kept()
    ended = supervisor.run(
        argv, max(0.2, limit_s), kept, env={**os.environ, "LC_ALL": "C", "PATH": _PATH}
    )
    return ended, bytes(kept.data[-_MOST_BYTES:]).decode("utf-8", "replace")


#: Seconds of a limit that are kept for ending a tool and reading what it said.
_SPARE_S = 0.5


def _until(supervisor: ProcessSupervisor, limit_s: float) -> float:
    limit_s = max(limit_s / 2, limit_s - _SPARE_S)
    return min(supervisor.deadline, time.monotonic() + limit_s)


# --- GPUs.


def gpus(
    supervisor: ProcessSupervisor, pids: Iterable[int], since_s: float, limit_s: float
) -> Gpus:
    """The node's GPUs, with the Xids since the job began.

    pids:    of the job: where a GPU has many processes, these are told
    since_s: seconds ago that the job began; limit_s: seconds for everything
    """
    until = _until(supervisor, limit_s)
    own = frozenset(pids)
    if _driver("nvidia"):
        found = _nvidia(supervisor, own, until)
    elif _driver("amdgpu"):
        found = _amd(supervisor, own, until)
    else:
        return Gpus("no driver of a GPU is loaded")
    if not found.devices:
        return found
    try:
        seen = list(_xids(_log(supervisor, since_s, max(0.5, until - time.monotonic()))))
    except _Unread:
        seen = []
    return Gpus("", tuple(_with_xids(gpu, seen) for gpu in found.devices))


def _driver(name: str) -> bool:
    """Whether this kernel module is loaded: without it, its tool would have it loaded."""
    return any(
        os.path.exists(path) for path in (f"/sys/module/{name}", f"/proc/driver/{name}/version")
    ) or os.path.isdir(f"/sys/bus/pci/drivers/{name}")


def _with_xids(gpu: Gpu, seen: Iterable[tuple[str, int]]) -> Gpu:
    # A function's number is not in a message.
    card = gpu.bus_id[:10]
    codes = dict.fromkeys(code for address, code in seen if address[:10] == card)
    return replace(gpu, xids=tuple(codes)[:32])


def _stuck(words: re.Pattern[str], until: float) -> int:
    """The process of such a tool that hangs in the kernel; 0: none. Any user can give a process
    that name, and have it wait there: root's and our own count."""
    from nodeready.subjects.gpus.nvidia import STUCK_AFTER_S

    now = _uptime_s()
    waiting = []
    for pid in processes.pids():
        known = processes.stat(processes.contents(f"/proc/{pid}/stat", 4096))
        if known is None or known.state != "D" or now - known.start_s <= STUCK_AFTER_S:
            continue
        # amd-smi is a script of Python's.
        if words.search(known.name) or known.name.startswith("python"):
            waiting.append(pid)
    owners = processes.owners(waiting)
    ours = [pid for pid in waiting if owners.get(pid) in (0, os.geteuid())]

    def look(pid: int) -> str:
        # Its memory may be what it hangs in.
        return " ".join(
            processes.contents(f"/proc/{pid}/{name}", 512) for name in ("comm", "cmdline")
        )

    found = processes.each(look, ours, until)
    return next(
        (pid for pid, text in found.items() if text is processes.HANGS or words.search(text)), 0
    )


def _uptime_s() -> float:
    return float(processes.contents("/proc/uptime").split()[0] or 0)


def _nvidia(supervisor: ProcessSupervisor, own: frozenset[int], until: float) -> Gpus:
    """``nvidia-smi -q -x``, once."""
    from nodeready.subjects.base import Output
    from nodeready.subjects.gpus import nvidia

    path = _tool(nvidia.NAME)
    if not path:
        return Gpus("nvidia-smi is not installed")
    stuck = _stuck(re.compile("nvidia-smi"), until)
    if stuck:
        return Gpus(f"an earlier nvidia-smi (pid {stuck}) hangs in the kernel: not asked")
    limit_s = until - time.monotonic()
    try:
        ended, text = _run(supervisor, [path, "-q", "-x"], limit_s)
    except OSError as problem:
        return Gpus(f"nvidia-smi: {problem.strerror or problem}")
    smi = nvidia.parse(Output(text or ended.err or " ", ended.rc))
    if not smi.gpus:
        why = f"gave no answer in {limit_s:.0f} s" if ended.rc is None else smi.tool.detail
        return Gpus(f"nvidia-smi: {why or smi.tool.state}")
    nodes: dict[str, Any] = {}
    root = nvidia.tree(text)
    for node in () if root is None else root.iterfind("gpu"):
        where = nvidia.address(node.get("id", ""))
        # A process's name can hold a GPU of its own: that one is the shorter.
        if where and (where not in nodes or len(node) > len(nodes[where])):
            nodes[where] = node
    return Gpus(
        "",
        tuple(
            Gpu(
                gpu.index,
                gpu.model or "",
                gpu.pci_address,
                _percent(nodes.get(gpu.pci_address), "utilization/gpu_util"),
                _percent(nodes.get(gpu.pci_address), "utilization/memory_util"),
                _watts(nodes.get(gpu.pci_address)),
                gpu.power_limit_w,
                (),
                _chosen((one.pid for one in gpu.processes if "C" in (one.kind or "C")), own),
                gpu.throttle,
            )
            for gpu in smi.gpus
        ),
    )


#: Processes of one GPU that are told.
_MOST_PIDS = 64


def _chosen(pids: Iterable[int], own: frozenset[int]) -> tuple[int, ...]:
    found = dict.fromkeys(pids)
    return tuple(sorted(sorted(found, key=lambda pid: pid not in own)[:_MOST_PIDS]))


def _percent(node: Any, path: str) -> int | None:
    text = (node.findtext(path) or "") if node is not None else ""
    found = re.fullmatch(r"\s*(\d{1,3}) ?%\s*", text)
    return int(found[1]) if found and int(found[1]) <= 100 else None


#: What a GPU draws, under the names of several schemas.
_DRAWS = (
    "gpu_power_readings/instant_power_draw",
    "gpu_power_readings/average_power_draw",
    "gpu_power_readings/power_draw",
    "power_readings/power_draw",
)


def _watts(node: Any) -> int | None:
    for path in _DRAWS if node is not None else ():
        found = re.fullmatch(r"\s*(\d{1,5})(?:\.\d+)? W\s*", node.findtext(path) or "")
        if found:
            return int(found[1])
    return None


# --- AMD's: amd-smi, or rocm-smi where there is no amd-smi; the processes are the kernel's word.

_KFD = "/sys/class/kfd/kfd"


def _amd(supervisor: ProcessSupervisor, own: frozenset[int], until: float) -> Gpus:

    name = next((one for one in ("amd-smi", "rocm-smi") if _tool(one)), "")
    if not name:
        return Gpus("neither amd-smi nor rocm-smi is installed")
    stuck = _stuck(re.compile("(amd|rocm)[-_]smi"), until)
    if stuck:
        return Gpus(f"an earlier {name} (pid {stuck}) hangs in the kernel: not asked")
    calls = (["metric"], ["static"]) if name == "amd-smi" else (["-a"],)
    printed = []
    for call in calls:
        try:
            ended, text = _run(
                supervisor, [_tool(name), *call, "--json"], until - time.monotonic()
            )
        except OSError as problem:
            return Gpus(f"{name}: {problem.strerror or problem}")
        if ended.rc is None:
            return Gpus(f"{name} {call[0]} gave no answer in time")
        printed.append(text)
    pids = _kfd_processes(until)
    made = _amd_smi(*printed) if name == "amd-smi" else _rocm_smi(*printed)
    found = tuple(replace(gpu, pids=_chosen(pids.get(gpu.bus_id, ()), own)) for gpu in made)
    return Gpus("" if found else f"{name}: {printed[0].strip()[:100] or 'it shows no GPU'}", found)


def _amd_smi(metric: str, static: str) -> Iterator[Gpu]:
    from nodeready.subjects.gpus import amd

    fixed = {amd.whole(entry.get("gpu")): entry for entry in amd.entries(static)}
    for entry in amd.entries(metric):
        index = amd.whole(entry.get("gpu")) or 0
        about = fixed.get(index, {})
        yield Gpu(
            index,
            amd.text(amd.at(about, "asic", "market_name")) or "",
            amd.pci_address(amd.at(about, "bus", "bdf")),
            amd.whole(amd.at(entry, "usage", "gfx_activity")),
            amd.whole(amd.at(entry, "usage", "umc_activity")),
            _rounded(amd.number(amd.at(entry, "power", "socket_power"))),
            _rounded(amd.number(amd.at(about, "limit", "max_power"))),
            (),
            (),
            amd.throttle_of(entry),
        )


def _rounded(value: float | None) -> int | None:
    return None if value is None else int(value)


def _rocm_smi(printed: str) -> Iterator[Gpu]:
    from nodeready.subjects.gpus import amd

    for index, card in sorted(amd.cards(printed).items()):
        # ROCm 5 and 6 name what is drawn differently.
        watts = next((value for key, value in card.items() if _DRAWN.fullmatch(key)), None)
        yield Gpu(
            index,
            amd.text(card.get("card series")) or "",
            amd.pci_address(card.get("pci bus")),
            amd.whole(card.get("gpu use (%)")),
            amd.whole(card.get("gpu memory read/write activity (%)")),
            _rounded(amd.number(watts)),
            _rounded(amd.number(card.get("max graphics package power (w)"))),
            (),
            (),
        )


_DRAWN = re.compile(r"(average|current) (graphics package|socket graphics package) power \(w\)")


def _kfd_processes(until: float) -> dict[str, list[int]]:
    """Address -> the processes with memory on that GPU (amdgpu's part for computing)."""
    from nodeready.subjects.gpus import amd

    rows = []
    for folder, names in (
        (f"{_KFD}/topology/nodes", ("gpu_id", "properties")),
        (f"{_KFD}/proc", ()),
    ):
        for one in _names(folder)[:4096]:
            for name in names or [n for n in _names(f"{folder}/{one}") if n.startswith("vram_")]:
                path = f"{folder}/{one}/{name}"
                rows += [f"{path}:{row}" for row in processes.contents(path, 4096).splitlines()]
            if time.monotonic() > until:
                return {}
    seen = amd.parse_kfd("\n".join(rows)).processes
    return {address: [one.pid for one in found] for address, found in seen.items()}


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


# --- The kernel's log.


class _Unread(Exception):
    """The log cannot be read: why, one line."""


#: Messages that are told, and of these as many of one kind and shape.
_MOST_MESSAGES, _MOST_ALIKE = 50, 5
_TEXT = 200
#: Seconds between two clocks: of the kernel's log, and of a process's start.
_SLACK_S = 2.0
_STAMPED = re.compile(r"(?:<\d+>)?\[ *(\d{1,12}\.\d{1,9})\] ?(.*)")
#: The number of the caller, which some kernels print; the host, which the journal does.
_BEFORE = re.compile(r"\[ *[TC]\d+\] |\S+ kernel: ")

#: Lines of the kernel's that a job dies or hangs of: kind, words, and where its pid is. A line
#: that begins with a process's name (15 bytes of the user's choice) is one of the first two rows,
#: or none. Sources: Linux' arch/x86/mm/fault.c, arch/x86/kernel/traps.c, mm/page_alloc.c,
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
    """What the kernel's log says since the job began that a job dies or hangs of; the oldest
    first, of many the newest.

    since_s: seconds ago that the job began; limit_s: seconds for it
    """
    try:
        lines = _log(supervisor, since_s, limit_s)
    except _Unread as problem:
        return Kernel(str(problem))
    found: list[Message] = []
    alike: Counter[tuple[str, str]] = Counter()
    for ago_s, text in reversed(_own_lines(lines)):
        message = message_of(text, ago_s)
        if message is None or len(found) >= _MOST_MESSAGES:
            continue
        shape = (message.kind, re.sub(r"[0-9a-fx]*\d[0-9a-fx]*", "#", message.text))
        alike[shape] += 1
        if alike[shape] <= _MOST_ALIKE:
            found.append(message)
    return Kernel("", tuple(reversed(found)))


def message_of(text: str, ago_s: float) -> Message | None:
    """The line as a message; None for one that tells nothing of these kinds."""
    for kind, words in _RULES:
        match = words.match(text)
        if match:
            pid = match.groupdict().get("pid") or "0"
            return Message(kind, max(0, int(ago_s)), int(pid[:9]), text[:_TEXT])
    if not text.startswith(_DRIVERS):
        return None
    # What the audit knows of GPUs and of the bus that they are on.
    from nodeready.subjects.gpus import kernel_log

    known = kernel_log.find(text)
    if known is None or not known.action or known.action == kernel_log.APPLICATION:
        return None
    return Message(
        "link" if known.source == "pcie" else "xid", max(0, int(ago_s)), 0, text[:_TEXT]
    )


_DRIVERS = ("NVRM: ", "nvidia-nvswitch", "nvidia ", "amdgpu", "[drm", "kfd kfd: ", "pcieport ")


_HEX = "[0-9a-fA-F]"
_XID = re.compile(
    rf"NVRM: Xid \(PCI:({_HEX}{{4,8}}):({_HEX}{{2}}):({_HEX}{{2}})[^)]*\): (\d{{1,5}})\b"
)


def _xids(lines: Iterable[tuple[float, str]]) -> Iterator[tuple[str, int]]:
    """PCI address (in sysfs' form, as far as the message has it) and code of each Xid."""
    for _, text in _own_lines(list(lines)):
        found = _XID.match(text)
        if found:
            yield f"{found[1][-4:]}:{found[2]}:{found[3]}".lower(), int(found[4])


def _own_lines(lines: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """The lines that begin a record: behind a newline in the name of a user's file or mount,
    which some messages have, a line of the same moment could say anything."""
    found: list[tuple[float, str]] = []
    begun, known = None, False
    for ago_s, text in lines:
        if begun is None or ago_s != begun:
            begun = ago_s
            known = any(words.match(text) for _, words in _RULES) or text.startswith(_DRIVERS)
        elif not known:
            continue
        found.append((ago_s, text))
    return found


def _log(supervisor: ProcessSupervisor, since_s: float, limit_s: float) -> list[tuple[float, str]]:
    """Seconds ago and text of each line since then, the oldest first. Raises _Unread.

    ``dmesg`` shows the kernel's ring, which forgets; journald has what it has forgotten.
    """
    until = _until(supervisor, limit_s)
    now = _uptime_s()
    why, best = "", None
    for argv in (
        ["dmesg"],
        ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-q",
         f"--since=-{int(since_s) + 60}s"],
    ):  # fmt: skip
        path = _tool(argv[0])
        if not path or time.monotonic() > until:
            continue
        try:
            ended, text = _run(supervisor, [path, *argv[1:]], until - time.monotonic())
        except OSError as problem:
            why = why or f"{argv[0]}: {problem.strerror or problem}"
            continue
        lines = list(_stamped(text))
        if ended.rc != 0 or not lines:
            first = ended.err.strip().splitlines()[:1]
            why = why or (f"{argv[0]}: {first[0][:150]}" if first else f"{argv[0]} shows nothing")
            continue
        if best is None or lines[0][0] < best[0][0]:
            best = lines
        if lines[0][0] <= max(5.0, now - since_s):
            break
    if best is None:
        raise _Unread(f"the kernel's log cannot be read: {why or 'there is no dmesg'}")
    begins = now - since_s - _SLACK_S
    return [(max(0.0, now - at), text) for at, text in best if at >= begins]


def _stamped(text: str) -> Iterator[tuple[float, str]]:
    """Seconds since boot and text of each line that has both."""
    for row in text.splitlines():
        found = _STAMPED.fullmatch(row)
        if found:
            words = found[2]
            while before := _BEFORE.match(words):
                words = words[before.end() :]
            yield float(found[1]), words


# --- Ports: counters that only grow, so that two looks tell what has moved.

#: Seconds for reading all of them.
_COUNTERS_S = 3.0
_MOST_PORTS = 256
_WORD_BYTES = 4  # port_rcv_data and port_xmit_data count words of four bytes (IBTA, PortCounters)

#: Of an interface in /sys/class/net/NAME/statistics: what a sound link does not count.
_NET_ERRORS = (
    "rx_errors",
    "tx_errors",
    "tx_dropped",
    "rx_crc_errors",
    "rx_missed_errors",
    "rx_fifo_errors",
    "tx_carrier_errors",
)
#: Of an RDMA port in counters (Linux' sysfs-class-infiniband) and in hw_counters of its driver.
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
#: Bytes in hw_counters, where a device has no others (EFA): received, sent.
_HW_RECEIVED = ("rx_bytes", "rdma_read_bytes", "rdma_write_recv_bytes")
_HW_SENT = ("tx_bytes", "rdma_read_resp_bytes", "rdma_write_bytes")

#: Of a port whose bytes cannot be told: a state of ours, so that nobody takes it for a quiet one.
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
        for said in worker.messages(_COUNTERS_S, until):
            if said is None:
                return {"absent": "a counter of a network port hangs in the kernel"}
            return dict(said)
    finally:
        worker.end()
    return {"absent": "the counters of the network ports cannot be read"}


def _all_ports(root: str) -> Iterator[tuple[str, dict[str, Any]]]:
    names = [name for name in _names(f"{root}/net") if name != "lo"][:_MOST_PORTS]
    physical = [name for name in names if os.path.exists(f"{root}/net/{name}/device")]
    # In a container there may be only what its host has made for it.
    for name in physical or names:
        yield name, _interface(f"{root}/net/{name}")
    for device in _names(f"{root}/infiniband")[:_MOST_PORTS]:
        for port in _names(f"{root}/infiniband/{device}/ports"):
            if port.isdecimal():
                yield f"{device}/{port}", _rdma(f"{root}/infiniband/{device}/ports/{port}")


def _values(directory: str, names: Iterable[str]) -> dict[str, int]:
    """Counters that are there; some drivers refuse to read one (EINVAL), and that one is left
    out."""
    found = {}
    for name in names:
        text = processes.contents(f"{directory}/{name}", 64).strip()
        if re.fullmatch(r"\d{1,20}", text):
            found[name] = int(text)
    return found


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
    """What has moved between two looks (`counters`). Ports that are down both times are left out,
    unless they are RDMA's.

    seconds: between the looks
    """
    for look in (before, after):
        if "ports" not in look:
            return Network(str(look.get("absent", "nobody has looked at the network ports")))
    old, new = before["ports"], after["ports"]
    found = [_port(name, old[name], new[name]) for name in new if name in old]
    found += [Port(name, old[name]["kind"], "gone", 0, 0) for name in old if name not in new]
    ports = tuple(port for port in found if port is not None)
    return Network("" if ports else "no network port is up", round(seconds, 3), ports)


def _port(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Port | None:
    if not new["rdma"] and "up" not in (old["state"], new["state"]):
        return None
    received, sent = (_moved(old[way], new[way]) for way in ("received", "sent"))
    unit = _WORD_BYTES if new.get("words") else 1
    errors = []
    for counter, value in new["errors"].items():
        risen = _moved(old["errors"].get(counter), value, full=False)
        if risen:
            errors.append((counter, risen))
    state = new["state"]
    if state == "up" and (received is None or sent is None):
        state = UNREADABLE
    return Port(
        name, new["kind"], state, (received or 0) * unit, (sent or 0) * unit, tuple(errors),
        new["gbps"],
    )  # fmt: skip


def _moved(old: int | None, new: int | None, *, full: bool = True) -> int | None:
    """By how much a counter has risen; None: not known.

    full: a counter of 32 bits that stays at its end counts no more
    """
    if old is None or new is None:
        return None
    if full and old == new == 0xFFFFFFFF:
        return None
    if new >= old:
        return new - old
    # It has begun again: behind 32 bits, or because its driver was loaded again.
    wrapped = new + (1 << 32) - old
    return wrapped if old < 1 << 32 and wrapped < 1 << 31 else None

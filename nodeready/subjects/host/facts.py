"""The system and the resources of a node: its clock, its software, its kernel, its mounts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from nodeready.core import base, shell, sysctl
from nodeready.core.policy import Policy
from nodeready.core.result import ALONE, FleetFacts
from nodeready.subjects.gpus import kernel_log
from nodeready.subjects.hardware_log import HardwareLog
from nodeready.subjects.host import mounts
from nodeready.subjects.host.mounts import FstabEntry, Mount, Parent, StuckProcess
from nodeready.subjects.iommu.facts import MODELS, VENDOR, count_listed, option

# --- Whether the clock is synchronised, and by which service: sh/clock.sh asks it.

#: Maximum characters of a program's output that are read.
_MAX_OUTPUT = 8192


@dataclass(frozen=True)
class Clock:
    """A node's clock."""

    JSON_KEYS: ClassVar = {"uses_local_clock": "own"}
    synchronised: bool | None  # None: not known, ``detail`` says why
    source: str = "none"  # systemd-timesyncd, chrony, ntpd, none; kernel: another, by its flag
    offset_ms: float | None = None  # from its time server's clock, where the service tells
    detail: str = ""  # the service's message, in short
    error_ms: float | None = None  # maximum by which it may be off, as the service estimates
    uses_local_clock: bool = False  # the service only follows the node's own clock


#: The reference of a service that follows the node's own clock: 7F7F0101 is 127.127.1.1
#: (chronyc(1), tracking), LOCAL and 127.127.1.N are ntpd's (refclock_local).
_OWN_CHRONY = re.compile(r"^Reference ID *: *(7F7F01[0-9A-F]{2}|127\.127\.1\.[0-9]{1,3})\b", re.M)
_OWN_NTPD = re.compile(r"\brefid=(LOCAL|LOCL|127\.127\.1\.[0-9]{1,3})\b|\bsync_local\b")


def _chrony(text: str, rc: int) -> Clock:
    if rc in (124, 137):
        return Clock(None, "chrony", detail="chronyc timed out")
    if "cannot talk to daemon" in text.lower():
        return Clock(False, "chrony", detail="chronyd does not answer")
    leap = re.search(r"^Leap status *:(.*)$", text, re.M)
    if rc != 0 or leap is None:
        return Clock(None, "chrony", detail=f"chronyc: {_first_line(text)}")
    if not (status := leap[1].strip()[:100]):
        return Clock(None, "chrony", detail="chronyc tells no leap status")
    offset = re.search(r"^System time *: ([0-9.]{1,20}) seconds (fast|slow)", text, re.M)
    offset_ms = None
    if offset:
        sign = -1 if offset[2] == "slow" else 1
        offset_ms = sign * _milliseconds(offset[1], 1000.0)
    # "An absolute bound on the computer's clock accuracy" (chronyc(1), tracking).
    parts = [
        re.search(rf"^Root {name} *: *([0-9.]{{1,20}}) seconds", text, re.M)
        for name in ("delay", "dispersion")
    ]
    bounds = [_milliseconds(part[1], 1000.0) if part else 0.0 for part in parts]
    states = {"Normal": True, "Insert": True, "Delete": True, "Not": False}
    synchronised = states.get(status.split()[0])
    error_ms = round(bounds[0] / 2 + bounds[1], 3) if all(parts) else None
    uses_local_clock = _OWN_CHRONY.search(text) is not None
    return Clock(synchronised, "chrony", offset_ms, status, error_ms, uses_local_clock)


def _ntpd(text: str, rc: int) -> Clock:
    if rc in (124, 137):
        return Clock(None, "ntpd", detail="ntpq timed out")
    if "Connection refused" in text or "timed out" in text:
        return Clock(False, "ntpd", detail="ntpd does not answer")
    leap = re.search(r"\bleap_(\w{1,20})", text)
    if rc != 0 or leap is None:
        return Clock(None, "ntpd", detail=f"ntpq: {_first_line(text)}")
    offset = re.search(r"\boffset=([-+]?[0-9.]{1,20})", text)
    offset_ms = _milliseconds(offset[1], 1.0) if offset else None
    synchronised = leap[1] != "alarm" and not re.search(r"\bsync_unspec\b|\bstratum=16\b", text)
    uses_local_clock = _OWN_NTPD.search(text) is not None
    return Clock(synchronised, "ntpd", offset_ms, f"leap_{leap[1]}", None, uses_local_clock)


def _milliseconds(text: str, factor: float) -> float:
    try:
        return round(float(text) * factor, 3)
    except ValueError:
        return 0.0


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[0][:100]


def parse_clock(text: str) -> Clock:
    """The clock in the output of sh/clock.sh; never raises."""
    sections = re.split(r"^clock=(\w+)$", text, flags=re.M)
    answers: dict[str, tuple[str, int]] = {}
    for name, section in zip(sections[1::2], sections[2::2]):
        output, end, rc = section.partition("\nclock_rc=")
        status = re.match(r"\d{1,3}$", rc, re.M)
        if end and status:
            answers.setdefault(name, (output[:_MAX_OUTPUT], int(status[0])))
    if "chronyc" in answers:
        return _chrony(*answers["chronyc"])
    if "ntpq" in answers:
        return _ntpd(*answers["ntpq"])
    waiting = answers.get("timesyncd")
    if waiting and waiting[0].strip() == "synchronized":
        return Clock(True, "systemd-timesyncd")
    source = "systemd-timesyncd" if waiting else "none"
    kernel, kernel_rc = answers.get("timedatectl", ("", 0))
    answer = re.search(r"^NTPSynchronized=(yes|no)$", kernel, re.M)
    if answer and answer[1] == "yes":
        return Clock(True, "systemd-timesyncd" if waiting else "kernel")
    if waiting:
        return Clock(False, source, detail="no answer from a time server since it was started")
    if "none" in answers:
        if kernel_rc in (124, 137):
            return Clock(None, source, detail="timedatectl timed out")
        return Clock(False, source, detail="nothing synchronises it")
    detail = f"{sections[-2]} did not end" if len(sections) > 1 else "could not be looked at"
    return Clock(None, detail=detail)


# --- The versions of the packages that jobs and debuggers use.

#: Software -> the names of its package, in Debian, Red Hat, SUSE and Alpine.
PACKAGES: dict[str, tuple[str, ...]] = {
    "glibc": ("libc6", "glibc", "musl"), "python3": ("python3",),
    "openssh": ("openssh-server", "openssh"), "gdb": ("gdb",), "strace": ("strace",),
    "pdsh": ("pdsh",), "slurm": ("slurmd", "slurm-slurmd", "slurm-smd-slurmd", "slurm-node"),
    "rdma_core": ("rdma-core",), "nccl": ("libnccl2", "libnccl"),
}  # fmt: skip


def _dpkg(text: str) -> dict[str, str]:
    versions: dict[str, str] = {}
    for record in re.split(r"^(?=Package: )|^$", text, flags=re.M):
        fields = dict(re.findall(r"^(Package|Status|Version): (.{1,200})$", record, re.M))
        if fields.get("Status", "").endswith(" installed") and "Version" in fields:
            versions.setdefault(fields.get("Package", ""), fields["Version"])
    return versions


def parse_versions(text: str) -> dict[str, str]:
    """Software -> the version of its package; without missing packages. Never raises."""
    how, _, packages = f"\n{text}".partition("\npackages=")[2].partition("\n")
    return dict(_versions(how, f"\n{packages}".partition("\npackages=end")[0][1:]))


@lru_cache(maxsize=64)
def _versions(how: str, text: str) -> tuple[tuple[str, str], ...]:
    # Thousands of nodes have the same packages.
    if how == "dpkg":
        versions = _dpkg(text)
    elif how == "apk":
        versions = dict(re.findall(r"^P:(\S+)\nV:(\S+)$", text, re.M))
    elif how != "rpm":
        versions = {}
    else:
        # Several versions of one package may be installed: rpm prints the newest last.
        versions = dict(re.findall(r"^(\S+) (\S+)$", text, re.M))
    return tuple(
        (software, next(versions[name] for name in names if name in versions))
        for software, names in PACKAGES.items()
        if any(name in versions for name in names)
    )


# --- The system and its resources.

NUMA_BALANCING = "kernel.numa_balancing"
THP = "/sys/kernel/mm/transparent_hugepage/enabled"
_SYS = "/proc/sys"


def _script(policy: Policy) -> str:
    """The facts in files: one process reads all files except the table of mounts."""
    return shell.script("host", VENDOR=VENDOR, TABLE=mounts.table_script(policy))


def _slow_script(policy: Policy) -> str:
    """The facts from programs that may be slow or hang; the mounts come last."""
    names = [name for names in PACKAGES.values() for name in names]
    versions = shell.script("versions", PATTERN="|".join(names), PACKAGES=" ".join(names))
    parts = (
        versions,
        shell.script("clock"),
        mounts.processes_script(),
        mounts.script(policy),
        ":",
    )
    return "\n".join(parts)


SECTION = base.Section("host", _script)
SLOW = base.Section("host_slow", _slow_script, 14, 1 << 20, parallel=True, quick=True)


@dataclass(frozen=True)
class Host:
    """The system and the resources of a node. None and "": the node does not show it."""

    JSON_KEYS: ClassVar = {"mounts_unknown": "looked"}
    os_id: str  # ID of os-release(5)
    os_version: str  # VERSION_ID of os-release(5)
    os_name: str  # PRETTY_NAME of os-release(5)
    hostname: str  # as `uname -n` prints it
    kernel_release: str  # as `uname -r` prints it
    architecture: str  # as `uname -m` prints it
    cmdline: str  # the running kernel's command line
    boot_id: str  # the kernel's random word for this boot
    uptime_s: int | None  # seconds since the boot
    load: float | None  # processes that ran or waited in the kernel, average of the last minute
    cpus: int | None  # count of those that are online
    cpu_model: str  # the model of the first processor
    numa_nodes: int | None  # count of those that are online
    memory_total_mb: int | None  # MiB that the kernel has for itself and for programs
    memory_available_mb: int | None  # MiB that programs can get without swapping
    swap_total_mb: int | None  # MiB of swap
    hugepages_total: int | None  # huge pages of the default size
    hugepages_free: int | None  # huge pages of the default size that nothing uses
    hugepage_size_kb: int | None  # KiB of a huge page of the default size
    transparent_hugepage: str  # ``always``, ``madvise`` or ``never``
    numa_balancing: int | None  # the live value
    numa_balancing_boot: sysctl.BootSetting  # what sets numa_balancing at the next boot
    instinct: bool  # an AMD Instinct is on the PCI bus
    file_handles: int | None  # open files of all processes
    file_handles_max: int | None  # the most open files that there can be
    pids: int | None  # in use; every thread has one
    pids_max: int | None  # the most pids that there can be
    lsm: str  # ``selinux enforcing``, ``selinux permissive``, ``apparmor`` or ``none``
    timezone: str  # the zone's name; "" when /etc/localtime is a copy that does not tell
    clock: Clock  # whether and by what the clock is set
    mounts: tuple[Mount, ...]  # mounted file systems that matter to jobs or to the policy
    fstab: tuple[FstabEntry, ...]  # lines of /etc/fstab
    mounts_unknown: str  # why the mounts could not be asked; "" when they were
    table_seen: bool  # whether the kernel's table of mounts could be read
    processes_looked: bool  # the probe of the processes was completed
    stuck: tuple[StuckProcess, ...]  # processes that no signal ends
    stuck_unseen: int  # processes in state D that were too many to be read twice
    zombies: int  # ended processes that their parent has not reaped
    zombie_parents: tuple[Parent, ...]  # parents with the most zombies
    versions: Mapping[str, str]  # program or library -> its version
    kernel_log: HardwareLog = HardwareLog()  # faults of memory, processors and disks

    @property
    def os_release(self) -> str:
        """ID and VERSION_ID as the policy spells them: ``ubuntu 22.04``."""
        return f"{self.os_id} {self.os_version}".strip()

    @property
    def shm(self) -> Mount | None:
        """/dev/shm, where it is mounted."""
        return next((mount for mount in self.mounts if mount.path == "/dev/shm"), None)


def _number(text: str) -> int | None:
    """A whole number; None: invalid, which must not hide the values of further files."""
    return int(text) if re.fullmatch(r"-?\d{1,19}", text.strip()) else None


def _zone(link: str, named: str) -> str:
    name = link.partition("zoneinfo/")[2] or ("" if "/" in link and link != "Etc/UTC" else link)
    for prefix in ("posix/", "right/"):
        name = name[len(prefix) :] if name.startswith(prefix) else name
    return name or named.strip()


def same_zone(zone: str) -> str:
    """One name for the zones that are UTC under several names (tz's file etcetera)."""
    names = ("UTC", "UCT", "Zulu", "Universal", "Etc/UCT", "Etc/Zulu", "Etc/Universal")
    return "Etc/UTC" if zone in names else zone


class _FileTexts:
    """Path -> the first line of that file, as the section printed it; "" for a missing file."""

    def __init__(self, text: str) -> None:
        self.lines = defaultdict[str, list[base.Line]](list, base.by_path(base.file_lines(text)))

    def __getitem__(self, path: str) -> str:
        return self.lines[path][0].text.strip() if self.lines[path] else ""

    def words(self, path: str) -> list[str]:
        """The words of the first line, and enough empty words for every index that is used."""
        return [*self[path].split(), *[""] * 6]

    def values(self, path: str, separator: str) -> dict[str, str]:
        """The values of ``NAME=VALUE`` lines, without quotes."""
        rows = (line.text.strip().partition(separator) for line in self.lines[path])
        return {name: value.strip().strip("\"'") for name, _, value in rows}


def parse(outputs: Mapping[str, base.Output], policy: Policy) -> Host:
    """The observation. Raises ProbeError when no file of /proc could be read."""
    output = outputs["host"]
    text = output.require()
    values, files = output.values(), _FileTexts(text)
    if not files[f"{_SYS}/kernel/osrelease"] and not files["/proc/meminfo"]:
        raise base.ProbeError("nothing of /proc could be read", text)
    slow = outputs.get("host_slow", base.Output("", None))
    mount_answers, process_table = mounts.answers(slow.text), mounts.parse_processes(slow.text)
    system = files.values("/etc/os-release", "=") or files.values("/usr/lib/os-release", "=")
    # KiB, or a number of huge pages.
    meminfo = files.values("/proc/meminfo", ":").items()
    memory = {
        name: _number(value.replace("kB", ""))
        for name, value in meminfo
        if name.startswith(("Mem", "Swap", "Huge"))
    }
    mib = {name: None if kib is None else kib // 1024 for name, kib in memory.items()}
    load, up = files.words("/proc/loadavg"), files.words("/proc/uptime")
    handles = files.words(f"{_SYS}/fs/file-nr")
    limits = [_number(files[f"{_SYS}/kernel/{name}"]) for name in ("pid_max", "threads-max")]
    table = files.lines[mounts.TABLE]
    thp = re.search(r"\[(\w+)\]", files[THP])
    lsm = "apparmor" if files["/sys/module/apparmor/parameters/enabled"] == "Y" else "none"
    if enforce := files["/sys/fs/selinux/enforce"]:
        lsm = "selinux enforcing" if enforce == "1" else "selinux permissive"
    mounts_unknown = "" if table else NO_TABLE
    if not mount_answers.ended:
        mounts_unknown = "the look ended before it came to the mounts"
        try:
            slow.require()
        except base.ProbeError as error:
            mounts_unknown = error.reason
    return Host(
        os_id=system.get("ID", ""),
        os_version=system.get("VERSION_ID", ""),
        os_name=system.get("PRETTY_NAME", ""),
        hostname=files[f"{_SYS}/kernel/hostname"],
        kernel_release=files[f"{_SYS}/kernel/osrelease"],
        architecture=files[f"{_SYS}/kernel/arch"] or values.get("architecture", ""),
        cmdline=files["/proc/cmdline"],
        boot_id=files[f"{_SYS}/kernel/random/boot_id"],
        uptime_s=_number(up[0].partition(".")[0]),
        load=float(load[0]) if re.fullmatch(r"\d{1,9}\.\d\d", load[0]) else None,
        cpus=count_listed(files["/sys/devices/system/cpu/online"]),
        cpu_model=values.get("cpu_model", "").strip(),
        numa_nodes=count_listed(files["/sys/devices/system/node/online"]),
        memory_total_mb=mib.get("MemTotal"),
        memory_available_mb=mib.get("MemAvailable"),
        swap_total_mb=mib.get("SwapTotal"),
        hugepages_total=memory.get("HugePages_Total"),
        hugepages_free=memory.get("HugePages_Free"),
        hugepage_size_kb=memory.get("Hugepagesize"),
        transparent_hugepage=thp[1] if thp else "",
        numa_balancing=_number(files[f"{_SYS}/kernel/numa_balancing"]),
        numa_balancing_boot=sysctl.boot_value(sysctl.parse(outputs["sysctl"]), NUMA_BALANCING),
        instinct=any(device.strip() in MODELS for device in output.all("device")),
        file_handles=_number(handles[0]),
        file_handles_max=_number(handles[2]),
        pids=_number(load[3].partition("/")[2]),
        pids_max=None if None in limits else min(limit for limit in limits if limit is not None),
        lsm=lsm,
        timezone=_zone(values.get("localtime", ""), files["/etc/timezone"]),
        clock=parse_clock(slow.text),
        mounts=mounts.fold(table, mount_answers, policy),
        fstab=mounts.parse_fstab(files.lines[mounts.FSTAB], table),
        mounts_unknown=mounts_unknown,
        table_seen=bool(table),
        processes_looked=process_table.is_complete,
        stuck=process_table.stuck,
        stuck_unseen=process_table.unseen,
        zombies=process_table.zombies,
        zombie_parents=process_table.parents,
        versions=parse_versions(slow.text),
        kernel_log=kernel_log.hardware(outputs, "host"),
    )


#: Every node has a mount: /proc, which has the table.
NO_TABLE = f"{mounts.TABLE} could not be read"


PROBE = base.Probe("host", (SECTION, SLOW, sysctl.SECTION, kernel_log.SECTION), parse)


# --- What a host's peers should share with it, and the policy that the host would fit.

#: Kernel options that name one machine's own disk, address or boot.
_MACHINE_OPTIONS = frozenset(
    (
        "BOOT_IMAGE", "BOOTIF", "bootif", "hostname", "ifname", "initrd", "ip", "ostree",
        "rd.luks.uuid", "rd.lvm.lv", "rd.md.uuid", "resume", "root", "systemd.hostname",
        "systemd.machine_id", "ds", "cryptdevice", "nfsroot",
    )
)  # fmt: skip
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-|([0-9a-f]{2}[:-]){5}[0-9a-f]{2}", re.I)


def shared_cmdline(text: str) -> str:
    """The kernel's command line without the options of one machine alone."""
    words = (word for word in base.kernel_arguments(text) if option(word) not in _MACHINE_OPTIONS)
    return " ".join(word for word in words if not _UUID.search(word))


def compared(observed: Host, fleet: FleetFacts = ALONE) -> dict[str, str | int | float]:
    network = sorted(mount.path for mount in observed.mounts if mount.network)
    gib = None if observed.memory_total_mb is None else round(observed.memory_total_mb / 1024)
    swap = None if observed.swap_total_mb is None else "on" if observed.swap_total_mb else "off"
    facts: dict[str, str | int | float | None] = {
        "os": observed.os_release,
        "kernel": observed.kernel_release,
        "architecture": observed.architecture,
        "cmdline": shared_cmdline(observed.cmdline),
        "cpus": observed.cpus,
        "cpu_model": observed.cpu_model,
        "numa_nodes": observed.numa_nodes,
        "memory_gib": gib,
        "swap": swap,
        "hugepages": observed.hugepages_total,
        "transparent_hugepage": observed.transparent_hugepage,
        "numa_balancing": observed.numa_balancing,
        "lsm": observed.lsm,
        "timezone": same_zone(observed.timezone),
        "network_mounts": None if observed.mounts_unknown else " ".join(network) or "none",
        **observed.versions,
    }
    return {name: value for name, value in facts.items() if value is not None and value != ""}


def learned(observed: Host) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "kernel_release": observed.kernel_release,
        "os_release": observed.os_release,
        "timezone": same_zone(observed.timezone),
    }
    if not observed.mounts_unknown:
        # The paths that a policy accepts (nodeready.core.settings, PATHS).
        paths = (m.path for m in observed.mounts if m.network and m.fstype != "autofs")
        settings["mounts"] = [path for path in paths if re.fullmatch(r"/[^:\s'\"]*", path)]
    if observed.shm is not None and observed.shm.size_mb:
        settings["shm_min_mb"] = _round_to_gib(observed.shm.size_mb)
    if observed.memory_total_mb:
        settings["memory_min_mb"] = _round_to_gib(observed.memory_total_mb)
    if observed.hugepages_total is not None:
        settings["hugepages"] = observed.hugepages_total
    if observed.swap_total_mb is not None:
        settings["swap"] = "any" if observed.swap_total_mb else "off"
    return {key: value for key, value in settings.items() if value != ""}


def _round_to_gib(size_mb: int) -> int:
    """Rounded down to whole GiB: nodes of one kind differ by the memory that firmware keeps."""
    return size_mb // 1024 * 1024 if size_mb >= 2048 else size_mb

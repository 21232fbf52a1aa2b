"""Judge a node itself: its system and its kernel's resources."""

from __future__ import annotations

from collections.abc import Callable

from nodeready.core.policy import Policy
from nodeready.core.result import Check, FactKinds, Result, Subject, check, join_first
from nodeready.core.severity import Cost, drifts, hides_cause, loses_job, slows_job
from nodeready.core.shell import quote
from nodeready.subjects.hardware_log import faults_check
from nodeready.subjects.host import facts
from nodeready.subjects.host.facts import NO_TABLE, NUMA_BALANCING, Host
from nodeready.subjects.host.mounts import FSTAB, TABLE, Mount, StuckProcess, is_network

# --- The mounts: whether they are there, answer, can be written and have room.

#: The types that the probe does not ask: nothing is mounted yet, or a tmpfs that is read-only.
_NOT_ASKED = ("autofs", "tmpfs")
_SHM_FIXES = (
    "mount -t tmpfs tmpfs /dev/shm", "mount -o remount,rw /dev/shm, and see who mounted it so",
)  # fmt: skip


@check("host.mounts", loses_job("configure"), settings=("mounts",), fix=(
    "mount QUOTE, and see why it was not",
    "mount QUOTE, or remove the line",
))  # fmt: skip
def mounts(observed: Host, policy: Policy) -> Result:
    """The policy's mounts are mounted (else a failure), and fstab's, too (else a warning).

    An unmounted /scratch is an empty directory on the root disk, which jobs then fill. The check
    dead_mounts judges whether a mount answers.
    """
    if not observed.table_seen:
        return mounts.unknown(NO_TABLE)
    mounted = {mount.path for mount in observed.mounts}
    missing = [path for path in policy.mounts if path not in mounted]
    of_fstab = f"what {FSTAB} mounts at boot"
    check = mounts.expecting(join_first(policy.mounts) or of_fstab)
    if missing:
        actual = f"not mounted: {join_first(missing)}"
        return check.fail(actual, TABLE, f"mount {quote(missing[0])}, and see why it was not")
    absent = [entry for entry in observed.fstab if entry.at_boot and not entry.mounted]
    absent = [entry for entry in absent if entry.path not in policy.mounts]
    if absent:
        actual = f"not mounted: {join_first(entry.path for entry in absent)}"
        fix = f"mount {quote(absent[0].path)}, or remove the line"
        return mounts.warn(actual, absent[0].source, fix, expected=of_fstab)
    return check.ok("all mounted", TABLE)


@check("host.dead_mounts", loses_job("inspect", "reboot"), expects="every mount answers",
       fix="see dmesg for errors of DEVICE")  # fmt: skip
def dead_mounts(observed: Host, policy: Policy) -> Result:
    """Every mount answers: a mount whose server is gone hangs each process that uses it.

    Each network mount has 3 seconds for statfs(2), which a healthy server answers within
    milliseconds. ESTALE and ENOTCONN are the answers of a mount that will not come back.
    """
    if observed.mounts_unknown:
        return dead_mounts.unknown(observed.mounts_unknown)
    if not observed.mounts:
        return dead_mounts.na("nothing is mounted that could be asked")
    dead = [m for m in observed.mounts if m.state in ("hung", "stale", "failed")]
    refused = [m for m in dead if m.detail in ("Permission denied", "Operation not permitted")]
    dead = [mount for mount in dead if mount not in refused]
    if dead:
        actual = join_first(map(_mount_text, dead))
        first = dead[0]
        fix = f"bring back {first.device}, or umount -f -l {quote(first.path)} and mount it again"
        if not first.network:
            fix = f"see dmesg for errors of {first.device}"
        return dead_mounts.fail(actual, first.path, fix)
    waiting = [m for m in observed.mounts if m.state == "not asked" and m.fstype not in _NOT_ASKED]
    if refused or waiting:
        return dead_mounts.unknown(join_first(map(_mount_text, (*refused, *waiting))))
    return dead_mounts.ok(f"{len(observed.mounts)} answer")


def _mount_text(mount: Mount) -> str:
    return f"{mount.path} ({mount.device}, {mount.fstype}): {mount.state}, {mount.detail}"


@check("host.read_only",
       loses_job("inspect", "reboot", "replace", source="ext4(5), errors=remount-ro; smartctl(8)"),
       expects="none",
       fix="see dmesg for errors of NEXT; check or replace the disk")  # fmt: skip
def read_only(observed: Host, policy: Policy) -> Result:
    """No local file system has become read-only: the kernel does that after an error of the disk.

    A read-only file system is a fault if fstab mounts it for writing, or if the kernel marks it
    (emergency_ro or shutdown among the options). An image that is always read-only is no fault.
    """
    if not observed.table_seen:
        return read_only.unknown(NO_TABLE)
    broken = {
        entry.path: entry.device
        for entry in observed.fstab
        if entry.read_only and "ro" not in entry.options and not is_network(entry.fstype)
    }
    for mount in observed.mounts:
        if not mount.network and {"emergency_ro", "shutdown"} & set(mount.options.split(",")):
            broken.setdefault(mount.path, mount.device)
    if not broken:
        return read_only.ok(source=TABLE)
    actual = join_first(f"{path} ({device}) is read-only" for path, device in broken.items())
    fix = f"see dmesg for errors of {next(iter(broken.values()))}; check or replace the disk"
    return read_only.fail(actual, TABLE, fix)


def _free_check(resource: str, field: str, option: str, meaning: str) -> Check:
    """The check of a resource of file systems. option: with which du(1) counts it"""
    fix = "du -xh{} {} | sort -h"

    @check(f"host.{resource}", loses_job("clean_up"), settings=("disk_free_percent",),
           meaning=meaning, fix=fix.format("FIELD", "QUOTE"))  # fmt: skip
    def free(observed: Host, policy: Policy) -> Result:
        if observed.mounts_unknown:
            return free.unknown(observed.mounts_unknown)
        # Those that are mounted for writing.
        local = [m for m in observed.mounts if not (m.read_only or m.network)]
        local = [mount for mount in local if mount.fstype != "autofs"]
        minimum = policy.disk_free_percent
        shares = {mount.path: getattr(mount, field) for mount in local}
        percents = {path: share for path, share in shares.items() if share is not None}
        scarce = sorted(percents, key=lambda path: (percents[path], path))
        full = [path for path in scarce if percents[path] < minimum]
        check = free.expecting(f"at least {minimum} % of {resource} free")
        if full:
            actual = join_first(f"{path}: {percents[path]:g} % free" for path in full)
            return check.fail(actual, full[0], fix.format(option, quote(full[0])))
        if silent := [mount.path for mount in local if mount.state != "ok"]:
            return free.unknown(f"no answer: {join_first(silent)}")
        if not percents:
            return free.na(f"no local file system that counts {resource}")
        return check.ok(f"{percents[scarce[0]]:g} % on {scarce[0]}", scarce[0])

    return free


space = _free_check(
    "space", "free_percent", "",
    "Local file systems, tmpfs included, have room: as much as disk_free_percent says.",
)  # fmt: skip
inodes = _free_check(
    "inodes", "inodes_free_percent", " --inodes",
    "Local file systems have inodes left: without one no file is made, however much is free.",
)  # fmt: skip


@check("host.shm", loses_job("configure"), settings=("shm_min_mb",), fix=(
    *_SHM_FIXES,
    "mount -o remount,size=`shm_min_mb`m /dev/shm, and in /etc/fstab",
))  # fmt: skip
def shm(observed: Host, policy: Policy) -> Result:
    """/dev/shm is a tmpfs, and as large as the policy says.

    PyTorch's data loaders and NCCL pass memory between processes through it; without it, or when
    it is too small, they die with a bus error.
    """
    shm_mount = observed.shm
    if observed.mounts_unknown:
        return shm.unknown(observed.mounts_unknown)
    if shm_mount is None or shm_mount.fstype != "tmpfs":
        actual = "not mounted" if shm_mount is None else f"a {shm_mount.fstype}"
        return shm.fail(actual, "/dev/shm", _SHM_FIXES[0], expected="a tmpfs")
    if shm_mount.read_only:
        return shm.fail("read-only", "/dev/shm", _SHM_FIXES[1], expected="a tmpfs for writing")
    if shm_mount.size_mb is None:
        return shm.unknown(f"/dev/shm: {shm_mount.detail or 'no size'}")
    check = shm.expecting(f"at least {policy.shm_min_mb} MiB" if policy.shm_min_mb else "a tmpfs")
    if shm_mount.size_mb < policy.shm_min_mb:
        fix = f"mount -o remount,size={policy.shm_min_mb}m /dev/shm, and in {FSTAB}"
        return check.fail(f"{shm_mount.size_mb} MiB", "/dev/shm", fix)
    return check.ok(f"{shm_mount.size_mb} MiB", "/dev/shm")


# --- Processes that no signal ends, and zombies.

#: Seconds in state D after which a process counts as hung. Slow disks take seconds; the kernel's
#: own watchdog reports after 120 (kernel.hung_task_timeout_secs).
HUNG_S = 60
#: Seconds that every process of a busy machine may wait for memory, a lock or its disk.
BUSY_S = 2
#: From this number on, zombies come from a parent that does not reap, not from a short delay.
ZOMBIES = 50

_NOT_LOOKED = "the look at the processes did not come to its end"
_LATER_FIX = "look again in a minute"
_HUNG_FIX = "bring back what it waits for (a mount, a device), or reboot the node"
_FROZEN_FIX = "thaw or end what was suspended (scontrol resume, docker unpause)"
_UNSEEN_FIX = "see who starts them: ps -eo user,stat,wchan,pid,args"
_PARENTS_FIX = "end or repair their parents: ps -eo ppid,stat,comm"


def _process_text(process: StuckProcess) -> str:
    owner = ""
    if process.uid is not None:
        owner = f", user {process.user}" if process.user else f", uid {process.uid}"
    words = [f"{process.name} (pid {process.pid}{owner})"]
    if process.frozen:
        words.append("frozen by its cgroup")
    elif process.wchan:
        words.append(f"in {process.wchan}")
    if process.at_will and not process.frozen:
        words.append(f"waits {process.at_will}")
    if process.seconds is not None:
        words.append(f"for {process.seconds} s")
    return " ".join(words)


@check("host.stuck", loses_job("monitor", "clean_up", "reboot"),
       fix=(_LATER_FIX, _HUNG_FIX, _FROZEN_FIX, "ask USER, or kill -KILL PID", _UNSEEN_FIX),
       expects="none")  # fmt: skip
def stuck(observed: Host, policy: Policy) -> Result:
    """No process hangs in the kernel (state D), where not even SIGKILL ends it.

    A job with such a process cannot be ended, its GPUs stay taken, and Slurm drains the node
    ("Kill task failed"). After HUNG_S it is a failure, before that a warning, because a slow disk
    may delay both samples, a second apart. Below BUSY_S, where the kernel tells the time, the
    process is ignored. A process that a cgroup has frozen (a suspended job) is always a warning.
    So is a wait that any user can cause on a healthy node, or one user could keep all others' jobs
    away: a parent that waits for its child (vfork), a file system that the user's own program
    serves (FUSE), page faults that the user handles. A person's process fails this check only
    where the kernel's function (wchan) is of network storage, a disk, a GPU or RDMA.
    """
    if not observed.processes_looked:
        return stuck.unknown(_NOT_LOOKED)
    waiting = [p for p in observed.stuck if p.frozen or p.seconds is None or p.seconds >= BUSY_S]
    hung = [p for p in waiting if not p.frozen and not p.at_will and (p.seconds or 0) >= HUNG_S]
    pending = [process for process in waiting if process not in hung]
    actual = join_first(map(_process_text, (*hung, *pending)))
    if observed.stuck_unseen:
        actual = "; ".join(filter(None, (actual, f"{observed.stuck_unseen} not looked at")))
    if hung:
        source = f"/proc/{hung[0].pid}/stack"
        return stuck.fail(actual, source, _HUNG_FIX, actions=("clean_up", "reboot"))
    if observed.stuck_unseen:
        return stuck.warn(actual, "/proc", _UNSEEN_FIX)
    if not waiting:
        return stuck.ok()
    source = f"/proc/{waiting[0].pid}/stack"
    if all(process.frozen for process in waiting):
        return stuck.warn(actual, source, _FROZEN_FIX)
    if all(process.at_will for process in waiting):
        first = waiting[0]
        user = "its user" if first.uid is None else first.user or f"uid {first.uid}"
        return stuck.warn(actual, source, f"ask {user}, or kill -KILL {first.pid}")
    return stuck.warn(actual, source, _LATER_FIX)


@check("host.zombies", drifts("clean_up"), expects=f"fewer than {ZOMBIES}",
       fix=("end or repair pid PARENT: its children go with it", _PARENTS_FIX))  # fmt: skip
def zombies(observed: Host, policy: Policy) -> Result:
    """No process leaves many ended children behind: each keeps its pid until it is waited for."""
    if not observed.processes_looked:
        return zombies.unknown(_NOT_LOOKED)
    if observed.zombies < ZOMBIES:
        return zombies.ok(str(observed.zombies))
    worst = [f"{p.count} of {p.name or '?'} (pid {p.pid})" for p in observed.zombie_parents]
    if not worst:
        return zombies.warn(f"{observed.zombies}", "/proc", _PARENTS_FIX)
    parent = observed.zombie_parents[0].pid
    fix = f"end or repair pid {parent}: its children go with it"
    return zombies.warn(f"{observed.zombies}: {join_first(worst)}", f"/proc/{parent}", fix)


# --- The system, its clock and its kernel's resources.

#: Per cent of a kernel resource in use: a fork or an open may fail soon; may fail at any moment.
NEARLY_ALL, ALL = 90, 99
#: Milliseconds by which a synchronised clock may be off while it is slewed.
OFFSET_MS = 1000
#: munge(7): a credential lives for 300 s, so that a clock which is off by more ends it at once.
MUNGE_MS = 300_000

_NO_CLOCK_FIX = "install and start chrony or systemd-timesyncd"
_OFFSET_FIX = "wait until it has been corrected, or chronyc makestep while no job runs"


def _equal_check(
    noun: str,
    setting: str,
    cost: Cost,
    meaning: str,
    *,
    source: str,
    fix: str,
    normal: Callable[[str], str] = str,
) -> Check:
    """The check that a value is the policy's; without a policy, any value passes.

    setting: the field of the policy and of `Host`; its value stands for ``{}`` in the fix
    """

    @check(*(f"host.{noun}", cost), settings=(setting,), meaning=meaning,
           fix=fix.format(f"`{setting}`"))  # fmt: skip
    def equal(observed: Host, policy: Policy) -> Result:
        expected, actual = normal(getattr(policy, setting)), normal(getattr(observed, setting))
        if not expected:
            return equal.ok(actual or "not shown", source, expected="any")
        if not actual:
            return equal.unknown(f"{source} does not show it")
        if actual == expected:
            return equal.ok(actual, source, expected=expected)
        return equal.fail(actual, source, fix.format(getattr(policy, setting)), expected=expected)

    return equal


kernel = _equal_check(
    "kernel", "kernel_release", drifts("install", "reboot"),
    "The kernel's release is the policy's: drivers are built for one (kernel_release).",
    source="/proc/sys/kernel/osrelease", fix="install {} and reboot",
)  # fmt: skip
os = _equal_check(
    "os", "os_release", drifts("configure", "install"),
    "Distribution and version are the policy's (os_release): libraries come from there.",
    source="/etc/os-release",
    fix="image the node again, or correct os_release in the policy",
)  # fmt: skip
timezone = _equal_check(
    "timezone", "timezone", hides_cause("configure"),
    "The time zone is the policy's: logs of nodes in different zones do not line up.",
    source="/etc/localtime", fix="timedatectl set-timezone {}",
    normal=facts.same_zone,
)  # fmt: skip


@check("host.clock", loses_job("inspect", "configure", "install"), settings=("clock",),
       expects="synchronised",
       fix=(_NO_CLOCK_FIX, "see why SOURCE reaches no time server", _OFFSET_FIX))  # fmt: skip
def clock(observed: Host, policy: Policy) -> Result:
    """The clock is synchronised: logs, certificates, Kerberos and munge compare times.

    munge refuses credentials that are 5 minutes off, so Slurm loses such a node. A clock that
    nothing synchronises may still be right, by the node's host or by chance: a warning. So may a
    clock whose time service follows the node's own clock (chrony's "local", ntpd's 127.127.1.0),
    or has had no answer for so long that the error may exceed a second. A clock whose time service
    runs and has reached no server is wrong or will be: a failure.
    """
    clock_state = observed.clock
    if policy.clock == "any":
        return clock.ok(_clock_state(observed), expected="any")
    if clock_state.synchronised is None:
        return clock.unknown(f"{clock_state.source}: {clock_state.detail}")
    if not clock_state.synchronised and clock_state.source == "none":
        return clock.warn(clock_state.detail, "", _NO_CLOCK_FIX)
    if not clock_state.synchronised:
        fix = f"see why {clock_state.source} reaches no time server"
        return clock.fail(f"not synchronised: {_clock_state(observed)}", clock_state.source, fix)
    if clock_state.offset_ms is not None and abs(clock_state.offset_ms) > OFFSET_MS:
        actual = f"{clock_state.offset_ms / 1000:+.1f} s off, by {clock_state.source}"
        judge = clock.fail if abs(clock_state.offset_ms) >= MUNGE_MS else clock.warn
        expected = f"at most {OFFSET_MS} ms off"
        return judge(actual, clock_state.source, _OFFSET_FIX, expected=expected)
    if clock_state.uses_local_clock or (clock_state.error_ms or 0.0) > OFFSET_MS:
        actual = f"{clock_state.source} follows the node's own clock"
        if not clock_state.uses_local_clock:
            error_s = (clock_state.error_ms or 0.0) / 1000
            actual = f"{clock_state.source} may be {error_s:.1f} s off: no server answers"
        fix = f"see why {clock_state.source} reaches no time server"
        return clock.warn(actual, clock_state.source, fix)
    return clock.ok(f"synchronised by {clock_state.source}", clock_state.source)


def _clock_state(observed: Host) -> str:
    return ": ".join(filter(None, (observed.clock.source, observed.clock.detail)))


@check(
    "host.memory",
    loses_job("inspect", "reseat", "replace", source="the BMC's event log; dmidecode(8)"),
    settings=("memory_min_mb",),
    fix="look for failed modules: dmidecode -t memory, and the event log of the BMC",
)
def memory(observed: Host, policy: Policy) -> Result:
    """The kernel sees all of the memory: a failed module is only missing (memory_min_mb)."""
    if (total := observed.memory_total_mb) is None:
        return memory.unknown("/proc/meminfo does not show it")
    check = memory.expecting(
        f"at least {policy.memory_min_mb} MiB" if policy.memory_min_mb else "any"
    )
    if total < policy.memory_min_mb:
        return check.fail(f"{total} MiB", "/proc/meminfo")
    return check.ok(f"{total} MiB", "/proc/meminfo")


@check("host.hugepages", slows_job("configure"), settings=("hugepages",), fix=(
    "vm.nr_hugepages=`hugepages` in /etc/sysctl.d, or hugepages= of the kernel",
))  # fmt: skip
def hugepages(observed: Host, policy: Policy) -> Result:
    """There are as many huge pages as the policy says.

    If memory is fragmented, the kernel makes fewer pages than vm.nr_hugepages, without an error
    (Documentation/admin-guide/mm/hugetlbpage.rst). Too many pages leave too little other memory.
    """
    total = observed.hugepages_total
    check = hugepages.expecting("any" if policy.hugepages is None else str(policy.hugepages))
    if total is None:
        if policy.hugepages:
            return check.fail("none: no hugetlbfs in this kernel", fix="")
        return check.ok("0")
    actual = f"{total} of {observed.hugepage_size_kb or '?'} KiB"
    if policy.hugepages is None or total == policy.hugepages:
        return check.ok(actual, "/proc/meminfo")
    fix = f"vm.nr_hugepages={policy.hugepages} in /etc/sysctl.d, or hugepages= of the kernel"
    return check.fail(actual, "/proc/meminfo", fix)


@check("host.swap", slows_job("configure"), settings=("swap",),
       fix="swapoff -a, and remove it from /etc/fstab")  # fmt: skip
def swap(observed: Host, policy: Policy) -> Result:
    """There is no swap where the policy says so: a job that swaps is slow without an error."""
    total = observed.swap_total_mb
    if policy.swap != "off":
        return swap.ok("not shown" if total is None else f"{total} MiB", expected="any")
    if total is None:
        return swap.unknown("/proc/meminfo does not show it")
    if total:
        return swap.fail(f"{total} MiB", "/proc/meminfo", expected="off")
    return swap.ok(source="/proc/meminfo", expected="off")


@check("host.numa_balancing", slows_job("configure"), settings=("numa_balancing",), fix=(
    "kernel.numa_balancing = WANTED at /proc/sys/kernel/numa_balancing, then sysctl --system",
))  # fmt: skip
def numa_balancing(observed: Host, policy: Policy) -> Result:
    """Automatic NUMA balancing is as the policy says, now and at the next boot.

    If the policy has no value, it should be 0 for AMD Instinct GPUs: moved pages cost them page
    faults (ROCm, "Disable NUMA auto-balancing"). That only costs speed: a warning. Where no file
    sets the next boot's value, the kernel or tuned does: not judged.
    """
    live = observed.numa_balancing
    expected_value = policy.numa_balancing
    if expected_value is None and observed.instinct:
        expected_value = 0
    check = numa_balancing.expecting("any" if expected_value is None else str(expected_value))
    if live is None:
        if policy.numa_balancing:
            return check.fail("no NUMA balancing in this kernel", fix="")
        return check.ok("none in this kernel")
    winner = observed.numa_balancing_boot.winner
    source = observed.numa_balancing_boot.source or "/proc/sys/kernel/numa_balancing"
    actual = observed.numa_balancing_boot.text(live)
    if expected_value is None:
        return check.ok(actual, source)
    if live == expected_value and (winner is None or winner.value == str(expected_value)):
        return check.ok(actual, source)
    fix = f"sysctl -w {NUMA_BALANCING}={expected_value}, and the same in /etc/sysctl.d"
    if winner is not None and winner.value != str(expected_value):
        fix = f"{NUMA_BALANCING} = {expected_value} at {source}, then sysctl --system"
    return (check.warn if policy.numa_balancing is None else check.fail)(actual, source, fix)


def _used_check(resource: str, source: str, fix: str, meaning: str) -> Check:
    """The check of a resource of the kernel: the field of `Host`, and ``_max`` for its maximum."""

    @check(*(f"host.{resource}", loses_job("clean_up", "configure")),
           expects=f"below {NEARLY_ALL} %", meaning=meaning, fix=fix)  # fmt: skip
    def in_use(observed: Host, policy: Policy) -> Result:
        used, maximum = getattr(observed, resource), getattr(observed, f"{resource}_max")
        if used is None or not maximum:
            return in_use.unknown(f"{source} does not show it")
        actual = f"{used} of {maximum}"
        if used * 100 > maximum * NEARLY_ALL:
            status = "fail" if used * 100 >= maximum * ALL else "warn"
            return in_use.fail(actual, source, status=status)
        return in_use.ok(actual, source)

    return in_use


file_handles = _used_check(
    "file_handles", "/proc/sys/fs/file-nr", "find who opens them: lsof, or raise fs.file-max",
    "Open files of the whole node are below fs.file-max: beyond it every open fails (proc(5)).",
)  # fmt: skip
pids = _used_check(
    "pids", "/proc/loadavg", "find who starts them: ps -eLf, or raise kernel.pid_max",
    "Threads are below kernel.pid_max and kernel.threads-max: beyond them no fork succeeds.",
)  # fmt: skip

kernel_faults = faults_check("host.kernel_faults", "memory, processors and disks")

#: In the order of the reports.
_CHECKS = (
    kernel, os, clock, timezone, mounts, dead_mounts, read_only, space, inodes, shm, stuck,
    zombies, memory, hugepages, swap, numa_balancing, file_handles, pids, kernel_faults,
)  # fmt: skip
SUBJECT = Subject(
    "host", __doc__, checks=_CHECKS, probe=facts.PROBE, compared=facts.compared,
    learned=facts.learned,
    kinds=FactKinds(
        volatile="""
            where last_name boot_id uptime_s load memory_available_mb hugepages_free file_handles
            pids offset_ms detail error_ms size_mb free_percent inodes_free_percent looked
            table_seen processes_looked stuck stuck_unseen zombies zombie_parents
            kernel_log.source kernel_log.absent kernel_log.begins_s kernel_log.faults.kind
            kernel_log.faults.text kernel_log.faults.last_s
        """,
        counters="kernel_log.faults.count",
        hardware="architecture cpus cpu_model numa_nodes memory_total_mb instinct",
        versions="os_id os_version os_name kernel_release versions",
        unique="hostname",
        elements={
            "mounts": "path", "fstab": "path", "versions": "", "kernel_log.faults": "kind text",
        },
    ),
)  # fmt: skip

"""Judge a node itself: its system and its kernel's resources."""

from __future__ import annotations

from collections.abc import Sequence

from nodeready.policy import Policy
from nodeready.shell import quote
from nodeready.subjects.host.facts import (
    NO_TABLE,
    NUMA_BALANCING,
    PROBE,
    Host,
    compared,
    learned,
    same_zone,
)
from nodeready.subjects.host.mounts import FSTAB, TABLE, Mount, is_network
from nodeready.subjects.host.processes import Stuck
from nodeready.subjects.result import Result, Subject, check, fail, na, ok, unknown, warn

#: At most so many findings of one check are named; the other ones are counted.
_SHOWN = 4


def named(words: Sequence[str]) -> str:
    """The first findings, and how many more there are: ``a; b; c; d; and 3 more``."""
    more = len(words) - _SHOWN
    return "; ".join(words[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


# --- The mounts: whether they are there, answer, can be written and have room.


@check(
    "host.mounts",
    settings=("mounts",),
    fix=("mount QUOTE, and see why it was not", "mount QUOTE, or remove the line"),
)
def mounts(seen: Host, want: Policy) -> Result:
    """What the policy names is mounted (a failure), and what fstab mounts at boot (a warning).

    An unmounted /scratch is an empty directory on the root disk: jobs fill that instead.
    Whether a mount answers is the business of dead_mounts.
    """
    check = "host.mounts"
    if not seen.table_seen:
        return unknown(check, NO_TABLE)
    there = {mount.path for mount in seen.mounts}
    missing = [path for path in want.mounts if path not in there]
    late = [e for e in seen.fstab if e.at_boot and not e.mounted and e.path not in want.mounts]
    expected = named(list(want.mounts)) or f"what {FSTAB} mounts at boot"
    if missing:
        actual = f"not mounted: {named(missing)}"
        return fail(
            check, expected, actual, TABLE, f"mount {quote(missing[0])}, and see why it was not"
        )
    if late:
        actual = f"not mounted: {named([entry.path for entry in late])}"
        fix = f"mount {quote(late[0].path)}, or remove the line"
        return warn(check, f"what {FSTAB} mounts at boot", actual, late[0].where, fix)
    return ok(check, expected, "all mounted", TABLE)


@check("host.dead_mounts", fix=("see dmesg for errors of DEVICE",))
def dead_mounts(seen: Host, want: Policy) -> Result:
    """Every mount answers: one whose server is gone hangs each process that looks into it.

    Each network mount has 3 seconds for statfs(2), which a healthy server answers within
    milliseconds. ESTALE and ENOTCONN are the answers of a mount that will not come back.
    """
    check = "host.dead_mounts"
    if seen.looked:
        return unknown(check, seen.looked)
    if not seen.mounts:
        return na(check, "nothing is mounted that could be asked")
    dead = [m for m in seen.mounts if m.state in ("hung", "stale", "failed")]
    refused = [m for m in dead if m.detail in ("Permission denied", "Operation not permitted")]
    dead = [mount for mount in dead if mount not in refused]
    if dead:
        actual = named([_words(mount) for mount in dead])
        first = dead[0]
        fix = f"bring back {first.device}, or umount -f -l {quote(first.path)} and mount it again"
        if not first.network:
            fix = f"see dmesg for errors of {first.device}"
        return fail(check, "every mount answers", actual, first.path, fix)
    waiting = [m for m in seen.mounts if m.state == "not asked" and m.fstype not in _NOT_ASKED]
    if refused or waiting:
        return unknown(check, named([_words(mount) for mount in (*refused, *waiting)]))
    return ok(check, "every mount answers", f"{len(seen.mounts)} answer")


#: What the look does not ask: nothing is behind it, or a tmpfs that is read-only by design.
_NOT_ASKED = ("autofs", "tmpfs")


def _words(mount: Mount) -> str:
    return f"{mount.path} ({mount.device}, {mount.fstype}): {mount.state}, {mount.detail}"


@check("host.read_only", fix=("see dmesg for errors of NEXT; check or replace the disk",))
def read_only(seen: Host, want: Policy) -> Result:
    """No local file system has become read-only: the kernel does that after an error of the disk.

    Only what fstab mounts for writing can tell that it was not meant, or the kernel's own mark
    (emergency_ro and shutdown among the options). An image that is read-only by design is left
    alone.
    """
    check = "host.read_only"
    if not seen.table_seen:
        return unknown(check, NO_TABLE)
    broken = {
        entry.path: entry.device
        for entry in seen.fstab
        if entry.read_only and "ro" not in entry.options and not is_network(entry.fstype)
    }
    for mount in seen.mounts:
        if not mount.network and {"emergency_ro", "shutdown"} & set(mount.options.split(",")):
            broken.setdefault(mount.path, mount.device)
    if not broken:
        return ok(check, "none", source=TABLE)
    actual = named([f"{path} ({device}) is read-only" for path, device in broken.items()])
    fix = f"see dmesg for errors of {next(iter(broken.values()))}; check or replace the disk"
    return fail(check, "none", actual, TABLE, fix)


def _local(seen: Host) -> list[Mount]:
    """The local file systems that are mounted for writing."""
    others = [mount for mount in seen.mounts if mount.network or mount.fstype == "autofs"]
    return [mount for mount in seen.mounts if not mount.read_only and mount not in others]


def _free(check: str, seen: Host, least: int, what: str, field: str) -> Result:
    if seen.looked:
        return unknown(check, seen.looked)
    shares = {mount.path: getattr(mount, field) for mount in _local(seen)}
    known = {path: share for path, share in shares.items() if share is not None}
    scarce = sorted(known, key=lambda path: (known[path], path))
    full = [f"{path}: {known[path]:g} % free" for path in scarce if known[path] < least]
    expected = f"at least {least} % of {what} free"
    if full:
        path = scarce[0]
        fix = f"du -xh{'' if field == 'free_percent' else ' --inodes'} {quote(path)} | sort -h"
        return fail(check, expected, named(full), path, fix)
    silent = [mount.path for mount in _local(seen) if mount.state != "ok"]
    if silent:
        return unknown(check, f"no answer: {named(silent)}")
    if not known:
        return na(check, f"no local file system that counts {what}")
    return ok(check, expected, f"{known[scarce[0]]:g} % on {scarce[0]}", scarce[0])


@check("host.space", settings=("disk_free_percent",), fix=("du -xhFIELD QUOTE | sort -h",))
def space(seen: Host, want: Policy) -> Result:
    """Local file systems, tmpfs included, have room: as much as disk_free_percent says."""
    return _free("host.space", seen, want.disk_free_percent, "space", "free_percent")


@check("host.inodes", settings=("disk_free_percent",), fix=("du -xhFIELD QUOTE | sort -h",))
def inodes(seen: Host, want: Policy) -> Result:
    """Local file systems have inodes left: without one no file is made, however much is free."""
    least = want.disk_free_percent
    return _free("host.inodes", seen, least, "inodes", "inodes_free_percent")


@check(
    "host.shm",
    settings=("shm_min_mb",),
    fix=(
        "mount -t tmpfs tmpfs /dev/shm",
        "mount -o remount,rw /dev/shm, and see who mounted it so",
        "mount -o remount,size=`shm_min_mb`m /dev/shm, and in /etc/fstab",
    ),
)
def shm(seen: Host, want: Policy) -> Result:
    """/dev/shm is a tmpfs, and as large as the policy says.

    PyTorch's data loaders and NCCL pass memory between processes through it; without it, or when
    it is too small, they die with a bus error.
    """
    check, found = "host.shm", seen.shm
    if seen.looked:
        return unknown(check, seen.looked)
    if found is None or found.fstype != "tmpfs":
        actual = "not mounted" if found is None else f"a {found.fstype}"
        return fail(check, "a tmpfs", actual, "/dev/shm", "mount -t tmpfs tmpfs /dev/shm")
    if found.read_only:
        fix = "mount -o remount,rw /dev/shm, and see who mounted it so"
        return fail(check, "a tmpfs for writing", "read-only", "/dev/shm", fix)
    if found.size_mb is None:
        return unknown(check, f"/dev/shm: {found.detail or 'no size'}")
    if found.size_mb < want.shm_min_mb:
        expected, actual = f"at least {want.shm_min_mb} MiB", f"{found.size_mb} MiB"
        fix = f"mount -o remount,size={want.shm_min_mb}m /dev/shm, and in {FSTAB}"
        return fail(check, expected, actual, "/dev/shm", fix)
    expected = f"at least {want.shm_min_mb} MiB" if want.shm_min_mb else "a tmpfs"
    return ok(check, expected, f"{found.size_mb} MiB", "/dev/shm")


# --- Processes that no signal ends, and zombies.

#: Seconds in state D after which a process is taken for hung. Slow disks take seconds; the
#: kernel's own watchdog speaks after 120 (kernel.hung_task_timeout_secs).
HUNG_S = 60
#: Seconds that every process of a busy machine may wait for memory, a lock or its disk.
BUSY_S = 2
#: So many zombies come of a parent that does not reap, and not of children that just ended.
ZOMBIES = 50


def _shown(process: Stuck) -> str:
    who = ""
    if process.uid is not None:
        who = f", user {process.user}" if process.user else f", uid {process.uid}"
    words = [f"{process.name} (pid {process.pid}{who})"]
    if process.frozen:
        words.append("frozen by its cgroup")
    elif process.wchan:
        words.append(f"in {process.wchan}")
    if process.at_will and not process.frozen:
        words.append(f"waits {process.at_will}")
    if process.seconds is not None:
        words.append(f"for {process.seconds} s")
    return " ".join(words)


@check(
    "host.stuck",
    fix=(
        "look again in a minute",
        "bring back what it waits for (a mount, a device), or reboot the node",
        "thaw or end what was suspended (scontrol resume, docker unpause)",
        "ask USER, or kill -KILL PID",
        "see who starts them: ps -eo user,stat,wchan,pid,args",
    ),
)
def stuck(seen: Host, want: Policy) -> Result:
    """No process hangs in the kernel (state D), where not even SIGKILL ends it.

    A job with such a process cannot be ended, its GPUs stay taken, and Slurm drains the node
    ("Kill task failed"). After HUNG_S it is a failure, before that a warning: two looks a second
    apart may both meet a slow disk. Below BUSY_S, where the kernel tells the time, it is nothing.
    A process that a cgroup has frozen (a suspended job) is a warning for as long as it lasts. So
    is what any user can do on a healthy node, or one user would keep all others' jobs away: a
    parent that waits for its child (vfork), a file system that the user's own program serves
    (FUSE), page faults that the user handles. A person's process fails this check only where the
    kernel's function (wchan) is one of network storage, a disk, a GPU or RDMA.
    """
    check = "host.stuck"
    if not seen.processes_looked:
        return unknown(check, "the look at the processes did not come to its end")
    waiting = [p for p in seen.stuck if p.frozen or p.seconds is None or p.seconds >= BUSY_S]
    hung = [p for p in waiting if not p.frozen and not p.at_will and (p.seconds or 0) >= HUNG_S]
    others = [process for process in waiting if process not in hung]
    actual = named([_shown(process) for process in (*hung, *others)])
    if seen.stuck_unseen:
        actual = "; ".join(filter(None, (actual, f"{seen.stuck_unseen} not looked at")))
    if hung:
        fix = "bring back what it waits for (a mount, a device), or reboot the node"
        return fail(check, "none", actual, f"/proc/{hung[0].pid}/stack", fix)
    if seen.stuck_unseen:
        fix = "see who starts them: ps -eo user,stat,wchan,pid,args"
        return warn(check, "none", actual, "/proc", fix)
    if not waiting:
        return ok(check, "none")
    source = f"/proc/{waiting[0].pid}/stack"
    if all(process.frozen for process in waiting):
        fix = "thaw or end what was suspended (scontrol resume, docker unpause)"
        return warn(check, "none", actual, source, fix)
    if all(process.at_will for process in waiting):
        first = waiting[0]
        who = "its user" if first.uid is None else first.user or f"uid {first.uid}"
        return warn(check, "none", actual, source, f"ask {who}, or kill -KILL {first.pid}")
    return warn(check, "none", actual, source, "look again in a minute")


@check(
    "host.zombies",
    fix=(
        "end or repair pid PARENT: its children go with it",
        "end or repair their parents: ps -eo ppid,stat,comm",
    ),
)
def zombies(seen: Host, want: Policy) -> Result:
    """No process leaves many ended children behind: each keeps its pid until it is waited for."""
    check, few = "host.zombies", f"fewer than {ZOMBIES}"
    if not seen.processes_looked:
        return unknown(check, "the look at the processes did not come to its end")
    if seen.zombies < ZOMBIES:
        return ok(check, few, str(seen.zombies))
    worst = [f"{p.count} of {p.name or '?'} (pid {p.pid})" for p in seen.zombie_parents]
    if not worst:
        fix = "end or repair their parents: ps -eo ppid,stat,comm"
        return warn(check, few, f"{seen.zombies}", "/proc", fix)
    parent = seen.zombie_parents[0].pid
    fix = f"end or repair pid {parent}: its children go with it"
    return warn(check, few, f"{seen.zombies}: {named(worst)}", f"/proc/{parent}", fix)


# --- The system, its clock and its kernel's resources.

#: Per cent of a kernel resource in use from which on a fork or an open may fail soon.
NEARLY_ALL = 90
#: Per cent of it from which on the next fork or open fails at any moment.
ALL = 99
#: Milliseconds by which a synchronised clock may be off while it is slewed.
OFFSET_MS = 1000
#: munge(7): a credential lives for 300 s, so that a clock which is off by more ends it at once.
MUNGE_MS = 300_000


def _exactly(check: str, expected: str, actual: str, source: str, fix: str) -> Result:
    """The value is the one that the policy names, or any where the policy names none."""
    if not expected:
        return ok(check, "any", actual or "not shown", source)
    if not actual:
        return unknown(check, f"{source} does not show it")
    if actual == expected:
        return ok(check, expected, actual, source)
    return fail(check, expected, actual, source, fix)


@check("host.kernel", settings=("kernel_release",), fix=("install `kernel_release` and reboot",))
def kernel(seen: Host, want: Policy) -> Result:
    """The kernel's release is the policy's: drivers are built for one (kernel_release)."""
    fix = f"install {want.kernel_release} and reboot"
    source = "/proc/sys/kernel/osrelease"
    return _exactly("host.kernel", want.kernel_release, seen.kernel_release, source, fix)


@check(
    "host.os",
    settings=("os_release",),
    fix=("image the node again, or correct os_release in the policy",),
)
def os(seen: Host, want: Policy) -> Result:
    """Distribution and version are the policy's (os_release): libraries come from there."""
    fix = "image the node again, or correct os_release in the policy"
    return _exactly("host.os", want.os_release, seen.os_release, "/etc/os-release", fix)


@check("host.timezone", settings=("timezone",), fix=("timedatectl set-timezone `timezone`",))
def timezone(seen: Host, want: Policy) -> Result:
    """The time zone is the policy's: logs of nodes in different zones do not line up."""
    fix = f"timedatectl set-timezone {want.timezone}"
    expected, actual = same_zone(want.timezone), same_zone(seen.timezone)
    return _exactly("host.timezone", expected, actual, "/etc/localtime", fix)


@check(
    "host.clock",
    settings=("clock",),
    fix=(
        "install and start chrony or systemd-timesyncd",
        "see why SOURCE reaches no time server",
        "wait until it has been corrected, or chronyc makestep while no job runs",
    ),
)
def clock(seen: Host, want: Policy) -> Result:
    """The clock is synchronised: logs, certificates, Kerberos and munge compare times.

    munge refuses credentials that are 5 minutes off, so Slurm loses such a node. A node that
    nothing synchronises may still be right, by its host or by luck: that is a warning. So may one
    whose time service follows the node's own clock (chrony's "local", ntpd's 127.127.1.0), or has
    not heard from its servers for so long that the error may exceed a second. One whose time
    service runs and has reached no server is wrong or will be.
    """
    check, found = "host.clock", seen.clock
    if want.clock == "any":
        return ok(check, "any", _kept(seen))
    if found.synchronised is None:
        return unknown(check, f"{found.source}: {found.detail}")
    if not found.synchronised and found.source == "none":
        fix = "install and start chrony or systemd-timesyncd"
        return warn(check, "synchronised", found.detail, "", fix)
    if not found.synchronised:
        fix = f"see why {found.source} reaches no time server"
        return fail(check, "synchronised", f"not synchronised: {_kept(seen)}", found.source, fix)
    if found.offset_ms is not None and abs(found.offset_ms) > OFFSET_MS:
        actual = f"{found.offset_ms / 1000:+.1f} s off, by {found.source}"
        fix = "wait until it has been corrected, or chronyc makestep while no job runs"
        judge = fail if abs(found.offset_ms) >= MUNGE_MS else warn
        return judge(check, f"at most {OFFSET_MS} ms off", actual, found.source, fix)
    if found.own or (found.error_ms or 0.0) > OFFSET_MS:
        actual = "follows the node's own clock"
        if not found.own:
            actual = f"may be {(found.error_ms or 0.0) / 1000:.1f} s off: no server answers"
        fix = f"see why {found.source} reaches no time server"
        return warn(check, "synchronised", f"{found.source} {actual}", found.source, fix)
    return ok(check, "synchronised", f"synchronised by {found.source}", found.source)


def _kept(seen: Host) -> str:
    return ": ".join(filter(None, (seen.clock.source, seen.clock.detail)))


@check(
    "host.memory",
    settings=("memory_min_mb",),
    fix=("look for failed modules: dmidecode -t memory, and the event log of the BMC",),
)
def memory(seen: Host, want: Policy) -> Result:
    """The kernel sees all of the memory: a failed module is only missing (memory_min_mb)."""
    check, total = "host.memory", seen.memory_total_mb
    if total is None:
        return unknown(check, "/proc/meminfo does not show it")
    if total < want.memory_min_mb:
        fix = "look for failed modules: dmidecode -t memory, and the event log of the BMC"
        expected = f"at least {want.memory_min_mb} MiB"
        return fail(check, expected, f"{total} MiB", "/proc/meminfo", fix)
    expected = f"at least {want.memory_min_mb} MiB" if want.memory_min_mb else "any"
    return ok(check, expected, f"{total} MiB", "/proc/meminfo")


@check(
    "host.hugepages",
    settings=("hugepages",),
    fix=("vm.nr_hugepages=`hugepages` in /etc/sysctl.d, or hugepages= of the kernel",),
)
def hugepages(seen: Host, want: Policy) -> Result:
    """There are as many huge pages as the policy says.

    The kernel makes fewer than vm.nr_hugepages asks for when memory is fragmented, and does not
    complain (Documentation/admin-guide/mm/hugetlbpage.rst); too many are memory that no one else
    can use.
    """
    check, total = "host.hugepages", seen.hugepages_total
    if total is None:
        if want.hugepages:
            return fail(check, str(want.hugepages), "none: no hugetlbfs in this kernel")
        return ok(check, "any" if want.hugepages is None else "0", "0")
    actual = f"{total} of {seen.hugepage_size_kb or '?'} KiB"
    if want.hugepages is None or total == want.hugepages:
        expected = "any" if want.hugepages is None else str(want.hugepages)
        return ok(check, expected, actual, "/proc/meminfo")
    fix = f"vm.nr_hugepages={want.hugepages} in /etc/sysctl.d, or hugepages= of the kernel"
    return fail(check, str(want.hugepages), actual, "/proc/meminfo", fix)


@check("host.swap", settings=("swap",), fix=("swapoff -a, and remove it from /etc/fstab",))
def swap(seen: Host, want: Policy) -> Result:
    """There is no swap where the policy says so: a job that swaps is slow without a word."""
    check, total = "host.swap", seen.swap_total_mb
    if want.swap != "off":
        return ok(check, "any", "not shown" if total is None else f"{total} MiB")
    if total is None:
        return unknown(check, "/proc/meminfo does not show it")
    if total:
        fix = "swapoff -a, and remove it from /etc/fstab"
        return fail(check, "off", f"{total} MiB", "/proc/meminfo", fix)
    return ok(check, "off", source="/proc/meminfo")


@check(
    "host.numa_balancing",
    settings=("numa_balancing",),
    fix=(
        "kernel.numa_balancing = WANTED at /proc/sys/kernel/numa_balancing, then sysctl --system",
    ),
)
def numa_balancing(seen: Host, want: Policy) -> Result:
    """Automatic NUMA balancing is as the policy says, now and at the next boot.

    Without a word in the policy it should be 0 where AMD Instinct GPUs are: moving pages costs
    them page faults (ROCm, "Disable NUMA auto-balancing"). That costs speed only, so it is a
    warning. A next boot that no file decides is the kernel's own default or tuned's: not judged.
    """
    check, live = "host.numa_balancing", seen.numa_balancing
    wanted = want.numa_balancing
    if wanted is None and seen.instinct:
        wanted = 0
    if live is None:
        if want.numa_balancing:
            return fail(check, str(wanted), "no NUMA balancing in this kernel")
        return ok(check, "any" if wanted is None else "0", "none in this kernel")
    winner = seen.numa_balancing_boot.winner
    source = winner.where if winner else "/proc/sys/kernel/numa_balancing"
    actual = f"{live}, next boot {winner.shown if winner else 'unset'}"
    if wanted is None:
        return ok(check, "any", actual, source)
    if live == wanted and (winner is None or winner.value == str(wanted)):
        return ok(check, str(wanted), actual, source)
    fix = f"sysctl -w {NUMA_BALANCING}={wanted}, and the same in /etc/sysctl.d"
    if winner is not None and winner.value != str(wanted):
        fix = f"{NUMA_BALANCING} = {wanted} at {source}, then sysctl --system"
    judged = warn if want.numa_balancing is None else fail
    return judged(check, str(wanted), actual, source, fix)


def _used(check: str, used: int | None, most: int | None, source: str, fix: str) -> Result:
    if used is None or not most:
        return unknown(check, f"{source} does not show it")
    expected, actual = f"below {NEARLY_ALL} %", f"{used} of {most}"
    if used * 100 > most * NEARLY_ALL:
        judge = fail if used * 100 >= most * ALL else warn
        return judge(check, expected, actual, source, fix)
    return ok(check, expected, actual, source)


@check("host.file_handles", fix=("find who opens them: lsof, or raise fs.file-max",))
def file_handles(seen: Host, want: Policy) -> Result:
    """Open files of the whole node are below fs.file-max: beyond it every open fails (proc(5))."""
    fix = "find who opens them: lsof, or raise fs.file-max"
    source = "/proc/sys/fs/file-nr"
    return _used("host.file_handles", seen.file_handles, seen.file_handles_max, source, fix)


@check("host.pids", fix=("find who starts them: ps -eLf, or raise kernel.pid_max",))
def pids(seen: Host, want: Policy) -> Result:
    """Threads are below kernel.pid_max and kernel.threads-max: beyond them no fork succeeds."""
    fix = "find who starts them: ps -eLf, or raise kernel.pid_max"
    return _used("host.pids", seen.pids, seen.pids_max, "/proc/loadavg", fix)


SUBJECT = Subject(
    "host",
    __doc__,
    checks=(
        kernel,
        os,
        clock,
        timezone,
        mounts,
        dead_mounts,
        read_only,
        space,
        inodes,
        shm,
        stuck,
        zombies,
        memory,
        hugepages,
        swap,
        numa_balancing,
        file_handles,
        pids,
    ),
    probe=PROBE,
    compared=compared,
    learned=learned,
)

"""Judge a node itself: its system and its kernel's resources."""

from __future__ import annotations

from nodeready.checks import host_mounts, host_processes
from nodeready.checks.declare import Subject, check
from nodeready.policy import Policy
from nodeready.probes.host import NUMA_BALANCING, PROBE, Host, same_zone
from nodeready.probes.host_facts import compared, learned
from nodeready.results import Result, fail, ok, unknown, warn

#: Per cent of a kernel resource in use at which the next fork or open may be the one that fails.
NEARLY_ALL = 90
#: Milliseconds by which a clock may be wrong although somebody keeps it: it is being slewed.
OFFSET_MS = 1000


def _exactly(check: str, expected: str, actual: str, source: str, fix: str) -> Result:
    """What the policy names is there; where it names nothing, anything is."""
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
    nothing synchronises may still be right, by its host or by luck: that is a warning. One whose
    time service runs and has reached no server is wrong or will be.
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
        return warn(check, f"at most {OFFSET_MS} ms off", actual, found.source, fix)
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
    actual = f"{live}, next boot {winner.value if winner else 'unset'}"
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
        return warn(check, expected, actual, source, fix)
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
        *host_mounts.CHECKS,
        *host_processes.CHECKS,
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

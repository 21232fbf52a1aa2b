"""Judge processes that no signal ends, and zombies."""

from __future__ import annotations

from nodeready.checks.declare import check
from nodeready.checks.host_mounts import named
from nodeready.policy import Policy
from nodeready.probes.host import Host
from nodeready.probes.processes import Stuck
from nodeready.results import Result, fail, ok, unknown, warn

#: Seconds in state D after which a process is taken for hung. Slow disks take seconds; the
#: kernel's own watchdog speaks after 120 (kernel.hung_task_timeout_secs).
HUNG_S = 60
#: So many zombies are a parent that does not wait for its children, not children just ended.
ZOMBIES = 50


def _words(process: Stuck) -> str:
    words = [f"{process.name} (pid {process.pid})"]
    if process.frozen:
        words.append("frozen by its cgroup")
    elif process.wchan:
        words.append(f"in {process.wchan}")
    if process.seconds is not None:
        words.append(f"for {process.seconds} s")
    return " ".join(words)


@check(
    "host.stuck",
    fix=(
        "look again in a minute",
        "bring back what it waits for (a mount, a device), or reboot the node",
        "thaw or end what was suspended (scontrol resume, docker unpause)",
    ),
)
def stuck(seen: Host, want: Policy) -> Result:
    """No process hangs in the kernel (state D), where not even SIGKILL ends it.

    A job with such a process cannot be ended, its GPUs stay taken, and Slurm drains the node
    ("Kill task failed"). After HUNG_S it is a failure, before that a warning: two looks a second
    apart may both meet a slow disk. A process that a cgroup has frozen (a suspended job) is a
    warning for as long as it lasts.
    """
    check = "host.stuck"
    if not seen.processes_looked:
        return unknown(check, "the look at the processes did not come to its end")
    if not seen.stuck:
        return ok(check, "none")
    actual = named([_words(process) for process in seen.stuck])
    source = f"/proc/{seen.stuck[0].pid}/stack"
    hung = [p for p in seen.stuck if not p.frozen and (p.seconds or 0) >= HUNG_S]
    if hung:
        others = [process for process in seen.stuck if process not in hung]
        actual = named([_words(process) for process in (*hung, *others)])
        fix = "bring back what it waits for (a mount, a device), or reboot the node"
        return fail(check, "none", actual, f"/proc/{hung[0].pid}/stack", fix)
    if all(process.frozen for process in seen.stuck):
        fix = "thaw or end what was suspended (scontrol resume, docker unpause)"
        return warn(check, "none", actual, source, fix)
    return warn(check, "none", actual, source, "look again in a minute")


@check("host.zombies", fix=("end or repair pid PARENT: its children go with it",))
def zombies(seen: Host, want: Policy) -> Result:
    """No process leaves many ended children behind: each keeps its pid until it is waited for."""
    check, few = "host.zombies", f"fewer than {ZOMBIES}"
    if not seen.processes_looked:
        return unknown(check, "the look at the processes did not come to its end")
    if seen.zombies < ZOMBIES:
        return ok(check, few, str(seen.zombies))
    worst = [f"{p.count} of {p.name or '?'} (pid {p.pid})" for p in seen.zombie_parents]
    parent = seen.zombie_parents[0].pid
    fix = f"end or repair pid {parent}: its children go with it"
    return warn(check, few, f"{seen.zombies}: {named(worst)}", f"/proc/{parent}", fix)


CHECKS = (stuck, zombies)

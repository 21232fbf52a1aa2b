"""Judge whether the job's user can look into a process that hangs: py-spy, gdb, strace."""

from __future__ import annotations

from nodeready.checks.declare import check, deploy
from nodeready.checks.proof_unseen import unseen
from nodeready.policy import Policy
from nodeready.proofs.proved import UNFINISHED, Proved
from nodeready.proofs.seen import NO_START, Attach, Attempt, Control, Guards, Tracers, User
from nodeready.results import Result, fail, fixable, na, ok, unknown

_YAMA = "/proc/sys/kernel/yama/ptrace_scope"
_DEPLOY = "nodeready deploy INVENTORY --only"

_SETTINGS = ("ptrace_scope", "packages", "py_spy_version")
_FIXES = (
    "run TOOL by hand on the node, on a process that may be lost",
    deploy("nodeready deploy INVENTORY --only debug_tools"),
    "look for AppArmor, a seccomp filter, or file capabilities of Python (getcap)",
    "nodeready deploy INVENTORY --only ptrace, then reboot the node",
    deploy("nodeready deploy INVENTORY --only ptrace"),
    "ptrace_scope: 0 in the policy lets the job's user attach",
    "give the container CAP_SYS_PTRACE (--cap-add SYS_PTRACE)",
)


def _root_can(seen: Proved) -> bool | None:
    """Whether root attached to a process of the job's user; None: nobody tried, or it was root."""
    tried = seen.control.attempt if isinstance(seen.control, Control) else None
    user_is_root = isinstance(seen.user, User) and seen.user.uid == 0
    return None if user_is_root or tried is None or not tried.tool else tried.good


def _refused(check: str, expected: str, guards: Guards, seen: Proved, want: Policy) -> Result:
    """The kernel refused to let the tool look: which of the known causes it is.

    Where root passes it is Yama or the target is not dumpable; where root fails too, a capability
    that it lacks, SELinux, or Yama's scope 3.
    """
    root = _root_can(seen)
    also = {True: " (root can)", False: ", to root too", None: ""}[root]
    of_root = seen.control.guards if isinstance(seen.control, Control) else None
    lacks = guards.bounded or (of_root is not None and not of_root.capable)
    yama = guards.yama or 0
    causes = ["SELinux's deny_ptrace is on"] if guards.deny_ptrace and not root else []
    causes += [f"Yama's ptrace_scope is {yama}"] if yama else []
    causes += ["CAP_SYS_PTRACE is missing"] if lacks and not root else []
    actual = f"refused{also if not root else ''}: {' and '.join(causes)}{also if root else ''}"
    if yama == 3:
        fix = f"{_DEPLOY} ptrace, then reboot the node"
        return fail(check, expected, actual, _YAMA, fix)
    if yama > want.ptrace_scope or (guards.deny_ptrace and not root):
        return fixable(check, expected, actual, _YAMA if yama else "", f"{_DEPLOY} ptrace")
    if yama:
        fix = "ptrace_scope: 0 in the policy lets the job's user attach"
        return fail(check, expected, actual, _YAMA, fix)
    if lacks and not root:
        fix = "give the container CAP_SYS_PTRACE (--cap-add SYS_PTRACE)"
        return fail(check, expected, actual, "", fix)
    actual = f"refused{also}: not by Yama, SELinux or a missing capability"
    fix = "look for AppArmor, a seccomp filter, or file capabilities of Python (getcap)"
    return fail(check, expected, actual, "", fix)


def _after(tried: Attempt) -> str:
    """What the tool left of its target; "": it goes on, untraced."""
    if tried.tracer:
        return f"its target is still traced, by process {tried.tracer}"
    if tried.answers or tried.rc == NO_START:
        return ""
    if tried.state in ("", "Z", "X"):
        return "its target ended"
    word = {"T": "stopped", "t": "stopped"}.get(tried.state, "hanging")
    return f"its target stays {word} (state {tried.state})"


def _missing(check: str, expected: str, tool: str, want: Policy) -> Result:
    if tool == "py-spy" and not want.py_spy_version:
        return na(check, "no py-spy, and the policy leaves it alone")
    if tool != "py-spy" and tool not in want.packages:
        return na(check, f"no {tool}, and it is not among the policy's packages")
    return fixable(check, expected, f"{tool} is not installed", "", f"{_DEPLOY} debug_tools")


def _broken(check: str, expected: str, tool: str, tried: Attempt, root: bool | None) -> Result:
    """It was allowed to look, and did not show what it should, or did not leave well."""
    also = {True: " (root can)", False: " (root's too)", None: ""}[root]
    after = _after(tried)
    fix = f"run {tool} by hand on the node, on a process that may be lost"
    if tried.rc == NO_START:
        actual, fix = f"{tried.tool} does not start: {tried.said}", f"{_DEPLOY} debug_tools"
    elif tried.rc is None:
        actual = f"timed out after {tried.limit_s} s{also}"
    elif not tried.good:
        actual = f"{tried.said}{also}"
    else:
        return fail(check, expected, after, tried.tool, fix)
    return fail(check, expected, "; ".join(filter(None, (actual, after))), tried.tool, fix)


def _judge(
    check: str, expected: str, seen: Proved, want: Policy, of: tuple[str, str, str]
) -> Result:
    """of: the tool, and where in `Proved` its attempt is: field and its field."""
    tool, field, mode = of
    nothing = unseen(check, seen, field)
    if nothing is not None:
        return nothing
    found: Attach | Tracers = getattr(seen, field)
    tried: Attempt | None = getattr(found, mode)
    if tried is None:
        return unknown(
            check, f"no process to look at: {found.error}" if found.error else UNFINISHED
        )
    if not tried.tool:
        return _missing(check, expected, tool, want)
    if tried.good and not _after(tried):
        return ok(check, expected)
    if tried.refused:
        return _refused(check, expected, found.guards, seen, want)
    if tried.rc is None and not tried.full:
        return unknown(check, UNFINISHED)
    return _broken(check, expected, tool, tried, _root_can(seen) if tool == "py-spy" else None)


@check("proof.attach", settings=_SETTINGS, fix=_FIXES)
def attach(seen: Proved, want: Policy) -> Result:
    """py-spy shows the stack of a process of the job's user, to that user, without sudo.

    The process is a sibling of py-spy, as a rank is one of the shell of whoever looks: at Yama's
    scope 1 a parent may attach, and proves nothing. It must go on afterwards.
    """
    of = ("py-spy", "attach", "blocking")
    return _judge("proof.attach", "a stack by py-spy dump", seen, want, of)


@check("proof.attach_nonblocking", settings=_SETTINGS, fix=_FIXES)
def attach_nonblocking(seen: Proved, want: Policy) -> Result:
    """py-spy shows a stack without pausing its target, the only way into one in state D."""
    of = ("py-spy", "attach", "nonblocking")
    expected = "a stack by py-spy dump --nonblocking"
    return _judge("proof.attach_nonblocking", expected, seen, want, of)


@check("proof.attach_native", settings=_SETTINGS, fix=_FIXES)
def attach_native(seen: Proved, want: Policy) -> Result:
    """py-spy shows the frames of C libraries too: a collective hangs in NCCL, not in Python."""
    of = ("py-spy", "attach", "native")
    return _judge("proof.attach_native", "a stack by py-spy dump --native", seen, want, of)


@check("proof.gdb", settings=_SETTINGS, fix=_FIXES)
def gdb(seen: Proved, want: Policy) -> Result:
    """gdb attaches to a process of the same user, shows its backtrace, and leaves it running."""
    return _judge("proof.gdb", "a backtrace by gdb -p", seen, want, ("gdb", "tracers", "gdb"))


@check("proof.strace", settings=_SETTINGS, fix=_FIXES)
def strace(seen: Proved, want: Policy) -> Result:
    """strace shows the system calls of a process of the same user, and leaves it running."""
    of = ("strace", "tracers", "strace")
    return _judge("proof.strace", "system calls by strace -p", seen, want, of)

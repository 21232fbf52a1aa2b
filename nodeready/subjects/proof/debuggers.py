"""Judge whether the job's user can look into a process that hangs: py-spy, gdb, strace."""

from __future__ import annotations

from dataclasses import replace

from nodeready.core.policy import Policy
from nodeready.core.result import Result, check, deploy, fail, fixable, na, ok, unknown
from nodeready.core.severity import hides_cause
from nodeready.subjects.access import MAY_EXECUTE, PACKAGED
from nodeready.subjects.proof.debugger_facts import (
    NO_START,
    NOEXEC,
    Attach,
    Control,
    DebuggerAttempt,
    Guards,
    Tracers,
)
from nodeready.subjects.proof.facts import UNFINISHED, Proved
from nodeready.subjects.proof.preconditions import DEPLOY_ONLY, observation, other_sessions
from nodeready.subjects.proof.session_facts import User

_YAMA = "/proc/sys/kernel/yama/ptrace_scope"

_COST = hides_cause("deploy", "configure", "reboot")
_SETTINGS = ("ptrace_scope", "packages", "py_spy_version")
_FIXES = (
    "run TOOL by hand on the node, on a process that may be lost",
    MAY_EXECUTE.format("TOOL"),
    "remove TOOL, or put a program there that runs",
    deploy("nodeready deploy INVENTORY --only debug_tools"),
    "look for AppArmor, a seccomp filter, or file capabilities of Python (getcap)",
    "nodeready deploy INVENTORY --only ptrace, then reboot the node",
    deploy("nodeready deploy INVENTORY --only ptrace"),
    "ptrace_scope: 0 in the policy lets the job's user attach",
    "give the container CAP_SYS_PTRACE (--cap-add SYS_PTRACE)",
)


def _root_can(observed: Proved) -> bool | None:
    """Whether root attached to a process of the job's user; None: untried, or that is root."""
    attempt = observed.control.attempt if isinstance(observed.control, Control) else None
    user_is_root = isinstance(observed.user, User) and observed.user.uid == 0
    return None if user_is_root or attempt is None or not attempt.tool else attempt.good


def _refused(
    check: str, expected: str, guards: Guards, observed: Proved, policy: Policy
) -> Result:
    """The result of a tool that the kernel refused, with the cause (see `Control`)."""
    root = _root_can(observed)
    also = {True: " (root can)", False: ", to root too", None: ""}[root]
    of_root = observed.control.guards if isinstance(observed.control, Control) else None
    lacks = guards.bounded or (of_root is not None and not of_root.capable)
    yama = guards.yama or 0
    causes = ["SELinux's deny_ptrace is on"] if guards.deny_ptrace and not root else []
    causes += [f"Yama's ptrace_scope is {yama}"] if yama else []
    causes += ["CAP_SYS_PTRACE is missing"] if lacks and not root else []
    actual = f"refused{also if not root else ''}: {' and '.join(causes)}{also if root else ''}"
    if yama == 3:
        fix = f"{DEPLOY_ONLY} ptrace, then reboot the node"
        return fail(check, expected, actual, _YAMA, fix)
    if yama > policy.ptrace_scope or (guards.deny_ptrace and not root):
        return fixable(check, expected, actual, _YAMA if yama else "", f"{DEPLOY_ONLY} ptrace")
    if yama:
        fix = "ptrace_scope: 0 in the policy lets the job's user attach"
        return fail(check, expected, actual, _YAMA, fix)
    if lacks and not root:
        fix = "give the container CAP_SYS_PTRACE (--cap-add SYS_PTRACE)"
        return fail(check, expected, actual, "", fix)
    actual = f"refused{also}: not by Yama, SELinux or a missing capability"
    fix = "look for AppArmor, a seccomp filter, or file capabilities of Python (getcap)"
    return fail(check, expected, actual, "", fix)


def _after(attempt: DebuggerAttempt) -> str:
    """What is wrong with the tool's target afterwards; "": the target runs, untraced."""
    if attempt.tracer:
        return f"its target is still traced, by process {attempt.tracer}"
    if attempt.answers or attempt.rc == NO_START:
        return ""
    if attempt.state in ("", "Z", "X"):
        return "its target ended"
    word = {"T": "stopped", "t": "stopped"}.get(attempt.state, "hanging")
    return f"its target stays {word} (state {attempt.state})"


def _missing(check: str, expected: str, tool: str, policy: Policy) -> Result:
    if tool == "py-spy" and not policy.py_spy_version:
        return na(check, "no py-spy, and the policy leaves it alone")
    if tool != "py-spy" and tool not in policy.packages:
        return na(check, f"no {tool}, and it is not among the policy's packages")
    return fixable(check, expected, f"{tool} is not installed", "", f"{DEPLOY_ONLY} debug_tools")


def _broken(
    check: str, expected: str, tool: str, attempt: DebuggerAttempt, root: bool | None
) -> Result:
    """The tool was permitted, and showed too little or left its target in a bad state."""
    also = {True: " (root can)", False: " (root's too)", None: ""}[root]
    after = _after(attempt)
    fix = f"run {tool} by hand on the node, on a process that may be lost"
    if attempt.rc == NO_START:
        actual = f"{attempt.tool} does not start: {attempt.complaint}"
        fix = f"{DEPLOY_ONLY} debug_tools"
        if attempt.complaint == NOEXEC:
            fix = MAY_EXECUTE.format(attempt.tool)
        elif tool != "py-spy" and not attempt.tool.startswith(tuple(f"{d}/" for d in PACKAGED)):
            # No package brings it back.
            fix = f"remove {attempt.tool}, or put a program there that runs"
    elif attempt.rc is None:
        actual = f"timed out after {attempt.limit_s} s{also}"
    elif not attempt.good:
        actual = f"{attempt.complaint}{also}"
    else:
        return fail(check, expected, after, attempt.tool, fix)
    return fail(check, expected, "; ".join(filter(None, (actual, after))), attempt.tool, fix)


def _judge(
    check: str, expected: str, observed: Proved, policy: Policy, selection: tuple[str, str, str]
) -> Result:
    """The result of one tool's attempt.

    selection: the tool, the field of `Proved` with its attempts, and the attempt among them
    """
    tool, field, mode = selection
    kind: type[Attach | Tracers] = Attach if field == "attach" else Tracers
    attempts = observation(check, observed, field, kind)
    if isinstance(attempts, Result):
        return attempts
    attempt: DebuggerAttempt | None = getattr(attempts, mode)
    if attempt is None:
        error = attempts.error
        return unknown(check, f"no process to look at: {error}" if error else UNFINISHED)
    if not attempt.tool:
        return _missing(check, expected, tool, policy)
    if attempt.good and not _after(attempt):
        return ok(check, expected)
    if attempt.refused:
        return _refused(check, expected, attempts.guards, observed, policy)
    if attempt.rc is None and not attempt.full:
        return unknown(check, UNFINISHED)
    root = _root_can(observed) if tool == "py-spy" else None
    return _broken(check, expected, tool, attempt, root)


def _judge_sessions(
    check: str, expected: str, observed: Proved, policy: Policy, selection: tuple[str, str, str]
) -> Result:
    """The result of one tool's attempts: in the first session, then in the further ones."""
    result = _judge(check, expected, observed, policy, selection)
    field = selection[1]
    for name, session in other_sessions(observed) if result.status == "ok" else ():
        attempts = getattr(session, field)
        if attempts is not None:
            there = replace(observed, **{field: attempts})
            further = _judge(check, expected, there, policy, selection)
            if further.status == "fail":
                return replace(further, actual=f"by {name}: {further.actual}")
    return result


@check(
    "proof.attach",
    _COST,
    settings=_SETTINGS,
    fix=_FIXES,
    proof="attach",
)
def attach(observed: Proved, policy: Policy) -> Result:
    """py-spy shows the stack of a process of the job's user, to that user, without sudo.

    The process is a sibling of py-spy, as a rank is a sibling of a person's debugger: at Yama's
    scope 1 a parent may attach, which proves nothing. The process must run on afterwards. py-spy
    is tried in the user's session and, where the user's key opens one, in a session of ssh.
    """
    selection = ("py-spy", "attach", "blocking")
    expected = "a stack by py-spy dump"
    return _judge_sessions("proof.attach", expected, observed, policy, selection)


@check(
    "proof.attach_nonblocking",
    _COST,
    settings=_SETTINGS,
    fix=_FIXES,
    proof="attach",
)
def attach_nonblocking(observed: Proved, policy: Policy) -> Result:
    """py-spy shows a stack without pausing its target, the only way into one in state D."""
    selection = ("py-spy", "attach", "nonblocking")
    expected = "a stack by py-spy dump --nonblocking"
    return _judge("proof.attach_nonblocking", expected, observed, policy, selection)


@check(
    "proof.attach_native",
    _COST,
    settings=_SETTINGS,
    fix=_FIXES,
    proof="attach",
)
def attach_native(observed: Proved, policy: Policy) -> Result:
    """py-spy shows the frames of C libraries too: a collective hangs in NCCL, not in Python."""
    selection = ("py-spy", "attach", "native")
    expected = "a stack by py-spy dump --native"
    return _judge("proof.attach_native", expected, observed, policy, selection)


@check(
    "proof.gdb",
    _COST,
    settings=_SETTINGS,
    fix=_FIXES,
    proof="tracers",
)
def gdb(observed: Proved, policy: Policy) -> Result:
    """gdb attaches to a process of the same user, shows its backtrace, and leaves it running."""
    selection = ("gdb", "tracers", "gdb")
    return _judge_sessions("proof.gdb", "a backtrace by gdb -p", observed, policy, selection)


@check(
    "proof.strace",
    _COST,
    settings=_SETTINGS,
    fix=_FIXES,
    proof="tracers",
)
def strace(observed: Proved, policy: Policy) -> Result:
    """strace shows the system calls of a process of the same user, and leaves it running."""
    selection = ("strace", "tracers", "strace")
    expected = "system calls by strace -p"
    return _judge_sessions("proof.strace", expected, observed, policy, selection)

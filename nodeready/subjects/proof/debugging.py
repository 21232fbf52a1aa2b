"""Judge whether a hang or a crash can be examined in sessions of the job's user.

A process that hangs: by py-spy, gdb and strace. A crash: by a core that gdb can read.
"""

from __future__ import annotations

from typing import Any

from nodeready.core.policy import Policy
from nodeready.core.result import Check, Result, deploy
from nodeready.core.severity import hides_cause
from nodeready.subjects.access import MAY_EXECUTE, PACKAGED
from nodeready.subjects.core_dumps.facts import core_directory
from nodeready.subjects.limits.limit_files import ITEMS
from nodeready.subjects.proof import facts, session
from nodeready.subjects.proof.facts import DebuggerAttempt, Proved, ProvedCore

_YAMA = "/proc/sys/kernel/yama/ptrace_scope"

_COST = hides_cause("deploy", "configure", "reboot")
_SETTINGS = ("ptrace_scope", "packages", "py_spy_version")
_OTHER_FIX = "look for AppArmor, a seccomp filter, or file capabilities of Python (getcap)"
_REBOOT_FIX = f"{session.DEPLOY_ONLY} ptrace, then reboot the node"
_POLICY_FIX = "ptrace_scope: 0 in the policy lets the job's user attach"
_CONTAINER_FIX = "give the container CAP_SYS_PTRACE (--cap-add SYS_PTRACE)"
_FIXES = (
    "run TOOL by hand on the node, on a process that may be lost",
    MAY_EXECUTE.format("TOOL"),
    "remove TOOL, or put a program there that runs",
    deploy(f"{session.DEPLOY_ONLY} debug_tools"),
    _OTHER_FIX,
    _REBOOT_FIX,
    deploy(f"{session.DEPLOY_ONLY} ptrace"),
    _POLICY_FIX,
    _CONTAINER_FIX,
)


def _root_can(observed: Proved) -> bool | None:
    """Whether root attached to a process of the job's user; None: untried, or that is root."""
    attempt = observed.control.attempt if isinstance(observed.control, facts.Control) else None
    user_is_root = isinstance(observed.user, facts.User) and observed.user.uid == 0
    return None if user_is_root or attempt is None or not attempt.tool else attempt.good


def _refused(check: Check, guards: facts.Guards, observed: Proved, policy: Policy) -> Result:
    """The result of a tool that the kernel refused, with the cause (see `Control`)."""
    root = _root_can(observed)
    root_note = {True: " (root can)", False: ", to root too", None: ""}[root]
    root_guards = observed.control.guards if isinstance(observed.control, facts.Control) else None
    lacks_capability = guards.bounded or (root_guards is not None and not root_guards.capable)
    yama = guards.yama or 0
    causes = ["SELinux's deny_ptrace is on"] if guards.deny_ptrace and not root else []
    causes += [f"Yama's ptrace_scope is {yama}"] if yama else []
    causes += ["CAP_SYS_PTRACE is missing"] if lacks_capability and not root else []
    cause = " and ".join(causes)
    actual = f"refused: {cause}{root_note}" if root else f"refused{root_note}: {cause}"
    if yama == 3:
        return check.fail(actual, _YAMA, _REBOOT_FIX)
    if yama > policy.ptrace_scope or (guards.deny_ptrace and not root):
        return check.fixable(actual, _YAMA if yama else "", f"{session.DEPLOY_ONLY} ptrace")
    if yama:
        return check.fail(actual, _YAMA, _POLICY_FIX)
    if lacks_capability and not root:
        return check.fail(actual, "", _CONTAINER_FIX)
    actual = f"refused{root_note}: not by Yama, SELinux or a missing capability"
    return check.fail(actual, "", _OTHER_FIX)


def _after(attempt: DebuggerAttempt) -> str:
    """What is wrong with the tool's target afterwards; "": the target runs, untraced."""
    if attempt.tracer:
        return f"its target is still traced, by process {attempt.tracer}"
    if attempt.answers or attempt.rc == facts.NO_START:
        return ""
    if attempt.state in ("", "Z", "X"):
        return "its target ended"
    word = {"T": "stopped", "t": "stopped"}.get(attempt.state, "hanging")
    return f"its target stays {word} (state {attempt.state})"


def _missing(check: Check, tool: str, policy: Policy) -> Result:
    if tool == "py-spy" and not policy.py_spy_version:
        return check.na("no py-spy, and the policy leaves it alone")
    if tool != "py-spy" and tool not in policy.packages:
        return check.na(f"no {tool}, and it is not among the policy's packages")
    return check.fixable(f"{tool} is not installed", "", f"{session.DEPLOY_ONLY} debug_tools")


def _broken(check: Check, tool: str, attempt: DebuggerAttempt, root: bool | None) -> Result:
    """The tool was permitted, and showed too little or left its target in a bad state."""
    root_note = {True: " (root can)", False: " (root's too)", None: ""}[root]
    after = _after(attempt)
    fix = f"run {tool} by hand on the node, on a process that may be lost"
    if attempt.rc == facts.NO_START:
        actual = f"{attempt.tool} does not start: {attempt.complaint}"
        fix = f"{session.DEPLOY_ONLY} debug_tools"
        if attempt.complaint == facts.NOEXEC:
            fix = MAY_EXECUTE.format(attempt.tool)
        elif tool != "py-spy" and not attempt.tool.startswith(
            tuple(f"{directory}/" for directory in PACKAGED)
        ):
            # No package brings it back.
            fix = f"remove {attempt.tool}, or put a program there that runs"
    elif attempt.rc is None:
        actual = f"timed out after {attempt.limit_s} s{root_note}"
    elif not attempt.good:
        actual = f"{attempt.complaint}{root_note}"
    else:
        return check.fail(after, attempt.tool, fix)
    return check.fail("; ".join(filter(None, (actual, after))), attempt.tool, fix)


def _tool_check(
    noun: str, expected: str, tool: str, place: tuple[str, str], meaning: str
) -> Check:
    """The check of one tool.

    place: the field of `Proved` with the tool's attempts, and the attempt among them
    """
    field, mode = place

    # py-spy's other modes are tried in the first session only.
    in_sessions = bool if mode in ("blocking", "gdb", "strace") else None

    @session.proof_check(f"proof.{noun}", _COST, field, settings=_SETTINGS, expects=expected,
                         meaning=meaning, fix=_FIXES, in_sessions=in_sessions)  # fmt: skip
    def judged(check: Check, attempts: Any, observed: Proved, policy: Policy) -> Result:
        attempt: DebuggerAttempt | None = getattr(attempts, mode)
        if attempt is None:
            error = attempts.error
            return check.unknown(f"no process to look at: {error}" if error else facts.UNFINISHED)
        if not attempt.tool:
            return _missing(check, tool, policy)
        if attempt.good and not _after(attempt):
            return check.ok()
        if attempt.refused:
            return _refused(check, attempts.guards, observed, policy)
        if attempt.rc is None and not attempt.full:
            return check.unknown(facts.UNFINISHED)
        root = _root_can(observed) if tool == "py-spy" else None
        return _broken(check, tool, attempt, root)

    return judged


attach = _tool_check(
    "attach", "a stack by py-spy dump", "py-spy", ("attach", "blocking"),
    """py-spy shows the stack of a process of the job's user, to that user, without sudo.

    The process is a sibling of py-spy, as a rank is a sibling of a person's debugger: at Yama's
    scope 1 a parent may attach, which proves nothing. The process must run on afterwards. py-spy
    is tried in the user's session and, where the user's key opens one, in a session of ssh.
    """,
)  # fmt: skip
attach_nonblocking = _tool_check(
    "attach_nonblocking", "a stack by py-spy dump --nonblocking", "py-spy",
    ("attach", "nonblocking"),
    "py-spy shows a stack without pausing its target, the only way into one in state D.",
)  # fmt: skip
attach_native = _tool_check(
    "attach_native", "a stack by py-spy dump --native", "py-spy", ("attach", "native"),
    "py-spy shows the frames of C libraries too: a collective hangs in NCCL, not in Python.",
)  # fmt: skip
gdb = _tool_check(
    "gdb", "a backtrace by gdb -p", "gdb", ("tracers", "gdb"),
    "gdb attaches to a process of the same user, shows its backtrace, and leaves it running.",
)  # fmt: skip
strace = _tool_check(
    "strace", "system calls by strace -p", "strace", ("tracers", "strace"),
    "strace shows the system calls of a process of the same user, and leaves it running.",
)  # fmt: skip


_LIMIT_FIX = "limit_core: 'unlimited' in the policy"


def _cut_by_limit(check: Check, core: ProvedCore, observed: Proved, policy: Policy) -> Result:
    """The result where the session's limit costs the core: what sets that limit."""
    name, limit, limits = observed.user_name, core.limit_bytes or 0, observed.limits
    actual = f"none: the core limit of {name}'s session is {limit} bytes"
    if core.path:
        total = f" of {core.whole_bytes}" if core.whole_bytes else ""
        of_session = f"the core limit of {name}'s session, {limit}"
        actual = f"cut off at {core.size_bytes}{total} bytes by {of_session}"
    elif core.handler:
        actual = f"none: {core.handler} heeds the session's core limit, {limit} bytes"
    if policy.limit_core.isdigit() and int(policy.limit_core) * ITEMS["core"] <= limit:
        return check.fail(actual, "", _LIMIT_FIX)
    if isinstance(limits, facts.SessionLimits):
        text = {"core": session.limit_text(limits.core, "core")}
        minimum = {"core": max(limit + 1, facts.MIN_CORE_LIMIT)}
        low = session.low_limits(limits.opener, text, limits, minimum, observed)
        if low.fix:
            return check.fail(f"{actual}: {low.cause}", low.source, low.fix)
    return check.fixable(actual, "", f"{session.DEPLOY_ONLY} limits")


def _directory_problem(
    place: facts.CoreDirectory, name: str, missing_bytes: int
) -> tuple[str, str]:
    """What is wrong with the core's directory, and the fix where no deploy repairs it."""
    if place.error:
        return f"{place.path}: {place.error}", ""
    if place.read_only:
        return f"{place.path} is on a read-only file system", f"mount {place.path} read-write"
    if not place.writable:
        return f"{place.path} (mode {place.mode:o}) is not writable for {name}", ""
    if place.free_bytes < missing_bytes or place.free_files == 0:
        return f"no space left on {place.path}", f"remove old cores from {place.path}"
    return "", ""


def _handler_failure(core: ProvedCore) -> str:
    if not core.dumped:
        failure = "does not start" if core.handler_there else "is no program that can be run"
        return f"core_pattern pipes to {core.handler}, which {failure}"
    if core.handler.endswith(f"/{facts.PROGRAM}"):
        complaint = f" ({core.gdb_said})" if core.gdb_said else ""
        return f"{facts.PROGRAM} kept nothing{complaint}: see journalctl -t {facts.PROGRAM}"
    return f"core_pattern pipes to {core.handler}, which took it and left no core to be found"


def _cause(core: ProvedCore, name: str) -> tuple[str, str]:
    """Why there is no whole core in its place, and the fix where no deploy repairs that."""
    place = core.directory
    if core.skipped:
        return core.skipped, ""
    if core.dumped is None:
        target = place.path if place else core.handler
        return f"not written within {core.dump_s} s to {target}", f"look at {target}"
    if not core.dumped and not core.dumpable:
        return f"/bin/sh is not readable for {name}", "chmod 755 the file of /bin/sh"
    on_host = "set kernel.core_pattern on the container's host"
    if core.stray:
        reason = "the kernel's core_pattern differs from the node's"
        return f"in the working directory: {reason}", on_host
    if core.handler and not core.path:
        return f"none: {_handler_failure(core)}", ""
    if core.dumped and not core.path:
        reason = "what is shown here as core_pattern may not be the kernel's"
        return f"none at {core.expected}, and the kernel says that it dumped: {reason}", on_host
    if not core.dumped and core.pattern == "":
        return "none: core_pattern is empty", ""
    outcome, missing_bytes = "none", 1
    if core.path:
        outcome = f"cut off at {core.size_bytes} of {core.whole_bytes or 'unknown'} bytes"
        missing_bytes = max(1, (core.whole_bytes or facts.SHELL_CORE_BYTES) - core.size_bytes)
    reason, fix = _directory_problem(place, name, missing_bytes) if place else ("", "")
    if reason:
        return f"{outcome}: {reason}", fix
    if core.path:
        return f"{outcome}: a quota, or the limit of file sizes (ulimit -f)", "raise it"
    reason = "neither limit nor directory forbids it"
    return f"none: the kernel wrote none, and {reason}", "look into dmesg for `core dump`"


def _counts(crash: ProvedCore) -> bool:
    """Whether the core of a further session is judged: proof.limits reports a limit there."""
    return not crash.skipped and not crash.is_cut_by_limit


@session.proof_check("proof.core", hides_cause("deploy", "configure"), "core",
                     settings=session.CORE_SETTINGS, in_sessions=_counts, fix=(
    f"{session.DEPLOY_ONLY} core_dumps",
    deploy(f"{session.DEPLOY_ONLY} core_dumps"),
    "remove it",
    deploy(f"{session.DEPLOY_ONLY} limits"),
    _LIMIT_FIX,
    "remove the ulimit of core from NAME's profile, or /etc/profile",
))  # fmt: skip
def core(check: Check, crash: ProvedCore, observed: Proved, policy: Policy) -> Result:
    """A crash in the job's user's session leaves a whole core where the policy says.

    A shell of our own crashes there. The kernel's word that it dumped (WCOREDUMP) is not enough:
    the kernel says so of a truncated core, and of a pipe that leads nowhere (core(5)). That core
    is removed again; systemd-coredump's own rule removes a core that it keeps. The crash is tried
    in the user's session and, where the user's key opens one, in a session of ssh.
    """
    is_stored = policy.core_handler == facts.PROGRAM
    place = f"{facts.PROGRAM}'s store" if is_stored else core_directory(policy)
    check = check.expecting(f"a whole core in {place}")
    if crash.is_cut_by_limit:
        return _cut_by_limit(check, crash, observed, policy)
    deploy_fix = f"{session.DEPLOY_ONLY} core_dumps"
    if crash.skipped or crash.stray or not crash.is_complete:
        actual, fix = _cause(crash, observed.user_name)
        return check.fail(actual, "", fix) if fix else check.fixable(actual, "", deploy_fix)
    follows_policy = crash.pattern == policy.core_pattern
    if is_stored:
        follows_policy = crash.handler.endswith(f"/{facts.PROGRAM}")
    if not follows_policy:
        place = f"in {crash.path.rpartition('/')[0]}"
        if crash.handler:
            place = f"with {crash.handler}"
        elif not crash.pattern.startswith("/"):
            place = "in whatever directory the process works in"
        return check.fixable(f"{place}: core_pattern is {crash.pattern}", "", deploy_fix)
    if crash.leftover:
        return check.warn(f"our own is left: {crash.leftover}", "", "remove it")
    return check.ok()


@session.proof_check("proof.backtrace", hides_cause("inspect"), "core", expects="a backtrace",
                     settings=session.CORE_SETTINGS, fix="run GDB by hand on a core")  # fmt: skip
def backtrace(check: Check, crash: ProvedCore, observed: Proved, policy: Policy) -> Result:
    """The debugger gdb reads a backtrace from the core that a crash left."""
    if crash.skipped or not crash.is_complete:
        return check.na("no core: see proof.core")
    if not crash.gdb:
        return check.na("gdb is not installed: see proof.gdb")
    if crash.frames:
        return check.ok()
    complaint = crash.gdb_said or "no frame"
    if " does not start: " in complaint:
        return check.na("gdb does not start: see proof.gdb")
    return check.fail(complaint, crash.gdb, f"run {crash.gdb} by hand on a core")

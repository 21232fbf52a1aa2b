"""Judge whether a crash in a session of the job's user leaves a core that gdb can read."""

from __future__ import annotations

from dataclasses import replace

from nodeready.core.policy import Policy
from nodeready.core.result import Result, check, deploy, fail, fixable, na, ok, warn
from nodeready.core.severity import hides_cause
from nodeready.subjects.core_dumps.facts import core_directory
from nodeready.subjects.limits.limits_conf import ITEMS
from nodeready.subjects.proof.core_facts import (
    MIN_CORE_LIMIT,
    PROGRAM,
    SHELL_CORE_BYTES,
    CoreDirectory,
    ProvedCore,
)
from nodeready.subjects.proof.facts import Proved
from nodeready.subjects.proof.preconditions import DEPLOY_ONLY, observation, other_sessions
from nodeready.subjects.proof.session_facts import SessionLimits
from nodeready.subjects.proof.session_limits import limit_text, low_limits


def _follows_policy(core: ProvedCore, policy: Policy) -> bool:
    """Whether the node's core_pattern sends crashes where the policy does."""
    if policy.core_handler == PROGRAM:
        return core.handler.endswith(f"/{PROGRAM}")
    return core.pattern == policy.core_pattern


def _cut_by_limit(check: str, expected: str, observed: Proved, policy: Policy) -> Result:
    """The result where the session's limit costs the core: what sets that limit."""
    assert isinstance(observed.core, ProvedCore)
    core, name = observed.core, observed.user_name
    limit = core.limit_bytes or 0
    actual = f"none: the core limit of {name}'s session is {limit} bytes"
    if core.path:
        total = f" of {core.whole_bytes}" if core.whole_bytes else ""
        of_session = f"the core limit of {name}'s session, {limit}"
        actual = f"cut off at {core.size_bytes}{total} bytes by {of_session}"
    elif core.handler:
        actual = f"none: {core.handler} heeds the session's core limit, {limit} bytes"
    if policy.limit_core.isdigit() and int(policy.limit_core) * ITEMS["core"] <= limit:
        return fail(check, expected, actual, "", "limit_core: 'unlimited' in the policy")
    if isinstance(observed.limits, SessionLimits):
        limits = observed.limits
        text = {"core": limit_text(limits.core, "core")}
        minimum = {"core": max(limit + 1, MIN_CORE_LIMIT)}
        low = low_limits(limits.opener, text, limits, minimum, observed)
        if low.fix:
            return fail(check, expected, f"{actual}: {low.cause}", low.source, low.fix)
    return fixable(check, expected, actual, "", f"{DEPLOY_ONLY} limits")


def _directory(place: CoreDirectory, name: str, missing_bytes: int) -> tuple[str, str]:
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
    """Why the program in core_pattern got no core, or kept none."""
    if not core.dumped:
        failure = "does not start" if core.handler_there else "is no program that can be run"
        return f"core_pattern pipes to {core.handler}, which {failure}"
    if core.handler.endswith(f"/{PROGRAM}"):
        complaint = f" ({core.gdb_said})" if core.gdb_said else ""
        return f"{PROGRAM} kept nothing{complaint}: see journalctl -t {PROGRAM}"
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
        return (
            "in the working directory: the kernel's core_pattern is not the one shown here",
            on_host,
        )
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
        missing_bytes = max(1, (core.whole_bytes or SHELL_CORE_BYTES) - core.size_bytes)
    reason, fix = _directory(place, name, missing_bytes) if place else ("", "")
    if reason:
        return f"{outcome}: {reason}", fix
    if core.path:
        return f"{outcome}: a quota, or the limit of file sizes (ulimit -f)", "raise it"
    reason = "neither limit nor directory forbids it"
    return f"none: the kernel wrote none, and {reason}", "look into dmesg for `core dump`"


@check(
    "proof.core",
    hides_cause("deploy", "configure"),
    proof="core",
    settings=("core_handler", "core_pattern", "limit_core"),
    fix=(
        "nodeready deploy INVENTORY --only core_dumps",
        deploy("nodeready deploy INVENTORY --only core_dumps"),
        "remove it",
        deploy("nodeready deploy INVENTORY --only limits"),
        "limit_core: 'unlimited' in the policy",
        "remove the ulimit of core from NAME's profile, or /etc/profile",
    ),
)
def core(observed: Proved, policy: Policy) -> Result:
    """A crash in the job's user's session leaves a whole core where the policy says.

    A shell of our own crashes there. The kernel's word that it dumped (WCOREDUMP) is not enough:
    the kernel says so of a truncated core, and of a pipe that leads nowhere (core(5)). That core
    is removed again; systemd-coredump's own rule removes a core that it keeps. The crash is tried
    in the user's session and, where the user's key opens one, in a session of ssh.
    """
    result = _judge_crash(observed, policy)
    for name, session in other_sessions(observed) if result.status == "ok" else ():
        # proof.limits reports a limit of a further session.
        if session.core and not session.core.skipped and not session.core.is_cut_by_limit:
            further = _judge_crash(replace(observed, core=session.core), policy)
            if further.status == "fail":
                return replace(further, actual=f"by {name}: {further.actual}")
    return result


def _judge_crash(observed: Proved, policy: Policy) -> Result:
    """The result of one crash."""
    check = "proof.core"
    expected = f"a whole core in {core_directory(policy)}"
    if policy.core_handler == PROGRAM:
        expected = f"a whole core in {PROGRAM}'s store"
    crash = observation(check, observed, "core", ProvedCore)
    if isinstance(crash, Result):
        return crash
    if crash.is_cut_by_limit:
        return _cut_by_limit(check, expected, observed, policy)
    if crash.skipped or crash.stray or not crash.is_complete:
        actual, fix = _cause(crash, observed.user_name)
        judged = fail if fix else fixable
        return judged(check, expected, actual, "", fix or f"{DEPLOY_ONLY} core_dumps")
    if not _follows_policy(crash, policy):
        lands = f"in {crash.path.rpartition('/')[0]}"
        if crash.handler:
            lands = f"with {crash.handler}"
        elif not crash.pattern.startswith("/"):
            lands = "in whatever directory the process works in"
        actual = f"{lands}: core_pattern is {crash.pattern}"
        return fixable(check, expected, actual, "", f"{DEPLOY_ONLY} core_dumps")
    if crash.leftover:
        return warn(check, expected, f"our own is left: {crash.leftover}", "", "remove it")
    return ok(check, expected)


@check(
    "proof.backtrace",
    hides_cause("inspect"),
    proof="core",
    settings=("core_handler", "core_pattern", "limit_core"),
    fix=("run GDB by hand on a core",),
)
def backtrace(observed: Proved, policy: Policy) -> Result:
    """The debugger gdb reads a backtrace from the core that a crash left."""
    check, expected = "proof.backtrace", "a backtrace"
    crash = observation(check, observed, "core", ProvedCore)
    if isinstance(crash, Result):
        return crash
    if crash.skipped or not crash.is_complete:
        return na(check, "no core: see proof.core")
    if not crash.gdb:
        return na(check, "gdb is not installed: see proof.gdb")
    if crash.frames:
        return ok(check, expected)
    complaint = crash.gdb_said or "no frame"
    if " does not start: " in complaint:
        return na(check, "gdb does not start: see proof.gdb")
    return fail(check, expected, complaint, crash.gdb, f"run {crash.gdb} by hand on a core")

"""Judge what was proved by acting: stacks, cores, limits, the way to the other nodes."""

from __future__ import annotations

from nodeready.policy import Policy
from nodeready.subjects.core_dumps.facts import core_directory
from nodeready.subjects.declare import Subject, check, deploy
from nodeready.subjects.limits.checks import shown, wanted
from nodeready.subjects.limits.facts import ITEMS, UNLIMITED, Limits, PamLimits
from nodeready.subjects.proof.facts import (
    NO_START,
    PROGRAM,
    UNFINISHED,
    Attach,
    Attempt,
    Control,
    Core,
    Directory,
    Guards,
    Limit,
    Proved,
    SessionLimits,
    Tracers,
    User,
)
from nodeready.subjects.proof.reach import mesh, pdsh, ports, ssh, unseen
from nodeready.subjects.result import Result, fail, fixable, na, ok, unknown, warn
from nodeready.subjects.sysctl import Boot

_DEPLOY = "nodeready deploy INVENTORY --only"

# --- The debuggers: whether the job's user can look into a process that hangs.

_YAMA = "/proc/sys/kernel/yama/ptrace_scope"

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
    """The kernel refused the tool: which of the known causes it is.

    Where root passes, it is Yama, or the target is not dumpable. Where root fails too, root lacks
    a capability, or it is SELinux or Yama's scope 3.
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
    """What is wrong with the tool's target afterwards; "": the target goes on, untraced."""
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
    """The tool was allowed to look, and showed too little or left its target in a bad state."""
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
    """The result of one tool's attempt.

    of: the tool, the field of `Proved` in which its attempt stands, and that field's own field
    """
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


@check("proof.attach", settings=_SETTINGS, fix=_FIXES, proof="attach")
def attach(seen: Proved, want: Policy) -> Result:
    """py-spy shows the stack of a process of the job's user, to that user, without sudo.

    The process is a sibling of py-spy, as a rank is one of the shell of whoever looks: at Yama's
    scope 1 a parent may attach, and proves nothing. It must go on afterwards.
    """
    of = ("py-spy", "attach", "blocking")
    return _judge("proof.attach", "a stack by py-spy dump", seen, want, of)


@check("proof.attach_nonblocking", settings=_SETTINGS, fix=_FIXES, proof="attach")
def attach_nonblocking(seen: Proved, want: Policy) -> Result:
    """py-spy shows a stack without pausing its target, the only way into one in state D."""
    of = ("py-spy", "attach", "nonblocking")
    expected = "a stack by py-spy dump --nonblocking"
    return _judge("proof.attach_nonblocking", expected, seen, want, of)


@check("proof.attach_native", settings=_SETTINGS, fix=_FIXES, proof="attach")
def attach_native(seen: Proved, want: Policy) -> Result:
    """py-spy shows the frames of C libraries too: a collective hangs in NCCL, not in Python."""
    of = ("py-spy", "attach", "native")
    return _judge("proof.attach_native", "a stack by py-spy dump --native", seen, want, of)


@check("proof.gdb", settings=_SETTINGS, fix=_FIXES, proof="tracers")
def gdb(seen: Proved, want: Policy) -> Result:
    """gdb attaches to a process of the same user, shows its backtrace, and leaves it running."""
    return _judge("proof.gdb", "a backtrace by gdb -p", seen, want, ("gdb", "tracers", "gdb"))


@check("proof.strace", settings=_SETTINGS, fix=_FIXES, proof="tracers")
def strace(seen: Proved, want: Policy) -> Result:
    """strace shows the system calls of a process of the same user, and leaves it running."""
    of = ("strace", "tracers", "strace")
    return _judge("proof.strace", "system calls by strace -p", seen, want, of)


# --- The core: whether a crash in the job's user's session leaves one that gdb can read.

#: Bytes of a core limit below which the kernel writes no core: most machines' ELF_EXEC_PAGESIZE.
_LEAST_LIMIT = 4096
#: Bytes that a core of /bin/sh needs at least, where the core's headers do not say how many.
_SMALL = 65536


def _whole(core: Core) -> bool:
    """Whether there is a core, and nothing of it is missing as far as its headers tell."""
    if core.whole_bytes is None:
        return bool(core.path) and core.handler != "" and not core.stray
    return bool(core.path) and core.size_bytes >= core.whole_bytes


def limited(core: Core) -> bool:
    """Whether the session's core limit is why there is no whole core.

    The kernel heeds the limit when it writes a file and not when it pipes a core; systemd-coredump
    heeds it as upstream builds the program (RHEL, SLES).
    """
    limit = core.limit_bytes
    if limit is None or core.skipped or core.dumped is None or _whole(core):
        return False
    if core.handler:
        kept_nothing = core.dumped and not core.path
        return kept_nothing and core.handler.endswith(f"/{PROGRAM}") and limit < _LEAST_LIMIT
    if not core.dumped:
        return limit < _LEAST_LIMIT
    return bool(core.path) and limit < (core.whole_bytes or _SMALL)


def _of_policy(core: Core, want: Policy) -> bool:
    """Whether the node's core_pattern sends crashes where the policy does."""
    if want.core_handler == PROGRAM:
        return core.handler.endswith(f"/{PROGRAM}")
    return core.pattern == want.core_pattern


def _limit(check: str, expected: str, seen: Proved, want: Policy) -> Result:
    """The session's limit costs the core: whether policy, profile or login sets the limit."""
    assert isinstance(seen.core, Core)
    core, name = seen.core, seen.user.name if isinstance(seen.user, User) else "the user"
    limit = core.limit_bytes or 0
    actual = f"none: the core limit of {name}'s session is {limit} bytes"
    if core.path:
        whole = f" of {core.whole_bytes}" if core.whole_bytes else ""
        of_session = f"the core limit of {name}'s session, {limit}"
        actual = f"cut off at {core.size_bytes}{whole} bytes by {of_session}"
    elif core.handler:
        actual = f"none: {core.handler} heeds the session's core limit, {limit} bytes"
    if want.limit_core.isdigit() and int(want.limit_core) * ITEMS["core"] <= limit:
        fix = "limit_core: 'unlimited' in the policy"
        return fail(check, expected, actual, "", fix)
    before = seen.limits.before[:1] if isinstance(seen.limits, SessionLimits) else ()
    if before and (before[0].soft == -1 or before[0].soft > limit):
        fix = f"remove the ulimit of core from {name}'s profile, or /etc/profile"
        return fail(check, expected, f"{actual}, as its profile sets it", "", fix)
    return fixable(check, expected, actual, "", f"{_DEPLOY} limits")


def _directory(place: Directory, name: str, missing: int) -> tuple[str, str]:
    """What is wrong with the core's directory, and the fix where no deploy repairs it."""
    if place.error:
        return f"{place.path}: {place.error}", ""
    if place.read_only:
        return f"{place.path} is on a read-only file system", f"mount {place.path} read-write"
    if not place.writable:
        return f"{place.path} (mode {place.mode:o}) is not writable for {name}", ""
    if place.free_bytes < missing or place.free_files == 0:
        return f"no space left on {place.path}", f"remove old cores from {place.path}"
    return "", ""


def _handler(core: Core) -> str:
    """Why the program in core_pattern got no core, or kept none."""
    if not core.dumped:
        what = "does not start" if core.handler_there else "is no program that can be run"
        return f"core_pattern pipes to {core.handler}, which {what}"
    if core.handler.endswith(f"/{PROGRAM}"):
        said = f" ({core.gdb_said})" if core.gdb_said else ""
        return f"{PROGRAM} kept nothing{said}: see journalctl -t {PROGRAM}"
    return f"core_pattern pipes to {core.handler}, which took it and left no core to be found"


def _cause(core: Core, name: str) -> tuple[str, str]:
    """Why there is no whole core in its place, and the fix where no deploy repairs that."""
    place = core.directory
    if core.skipped:
        return core.skipped, ""
    if core.dumped is None:
        where = place.path if place else core.handler
        return f"not written within {core.dump_s} s to {where}", f"look at {where}"
    if not core.dumped and not core.dumpable:
        return f"/bin/sh is not readable for {name}", "chmod 755 the file of /bin/sh"
    if core.stray:
        why = "the kernel's core_pattern is not the one shown here"
        return (
            f"in the working directory: {why}",
            "set kernel.core_pattern on the container's host",
        )
    if core.handler and not core.path:
        return f"none: {_handler(core)}", ""
    if core.dumped and not core.path:
        why = "what is shown here as core_pattern may not be the kernel's"
        fix = "set kernel.core_pattern on the container's host"
        return f"none at {core.expected}, and the kernel says that it dumped: {why}", fix
    if not core.dumped and core.pattern == "":
        return "none: core_pattern is empty", ""
    size = f"cut off at {core.size_bytes} of {core.whole_bytes or 'unknown'} bytes"
    begun = size if core.path else "none"
    missing = max(1, (core.whole_bytes or _SMALL) - core.size_bytes) if core.path else 1
    why, fix = _directory(place, name, missing) if place else ("", "")
    if why:
        return f"{begun}: {why}", fix
    if core.path:
        return f"{begun}: a quota, or the limit of file sizes (ulimit -f)", "raise it"
    why = "neither limit nor directory forbids it"
    return f"none: the kernel wrote none, and {why}", "look into dmesg for `core dump`"


@check(
    "proof.core",
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
def core(seen: Proved, want: Policy) -> Result:
    """A crash in the job's user's session leaves a whole core where the policy says.

    A shell of our own crashes there. The kernel's word that it dumped (WCOREDUMP) is not enough:
    it gives that for a core that is cut off, and for a pipe that leads nowhere (core(5)). Exactly
    that core is removed again; systemd-coredump's own rule removes the one that it keeps.
    """
    check = "proof.core"
    expected = f"a whole core in {core_directory(want)}"
    if want.core_handler == PROGRAM:
        expected = f"a whole core in {PROGRAM}'s store"
    nothing = unseen(check, seen, "core")
    if nothing is not None or not isinstance(seen.core, Core):
        return nothing or na(check, "not proved")
    crash, name = seen.core, seen.user.name if isinstance(seen.user, User) else "the user"
    if limited(crash):
        return _limit(check, expected, seen, want)
    other = "" if _of_policy(crash, want) else f"core_pattern is {crash.pattern}"
    if crash.skipped or crash.stray or not _whole(crash):
        actual, fix = _cause(crash, name)
        judged = fail if fix else fixable
        return judged(check, expected, actual, "", fix or f"{_DEPLOY} core_dumps")
    if other:
        lands = f"in {crash.path.rpartition('/')[0]}"
        if crash.handler:
            lands = f"with {crash.handler}"
        elif not crash.pattern.startswith("/"):
            lands = "in whatever directory the process works in"
        return fixable(check, expected, f"{lands}: {other}", "", f"{_DEPLOY} core_dumps")
    if crash.left:
        return warn(check, expected, f"our own is left: {crash.left}", "", "remove it")
    return ok(check, expected)


@check(
    "proof.backtrace",
    proof="core",
    settings=("core_handler", "core_pattern", "limit_core"),
    fix=("run GDB by hand on a core",),
)
def backtrace(seen: Proved, want: Policy) -> Result:
    """The debugger gdb reads a backtrace from the core that a crash left."""
    check, expected = "proof.backtrace", "a backtrace"
    nothing = unseen(check, seen, "core")
    if nothing is not None or not isinstance(seen.core, Core):
        return nothing or na(check, "not proved")
    crash = seen.core
    if crash.skipped or not _whole(crash):
        return na(check, "no core: see proof.core")
    if not crash.gdb:
        return na(check, "gdb is not installed: see proof.gdb")
    if crash.frames:
        return ok(check, expected)
    said = crash.gdb_said or "no frame"
    return fail(check, expected, said, crash.gdb, f"run {crash.gdb} by hand on a core")


# --- The session in which the proofs ran: whose it is, and its limits.


@check(
    "proof.user",
    settings=("job_user",),
    fix=(
        "create NAME on the node, or name another user",
        "log in as root, or name no user",
        "`su - NAME -c id`, as root on the node, has to work",
        "--user NAME proves it for the job's user",
    ),
)
def user(seen: Proved, want: Policy) -> Result:
    """The proofs ran in a new session of the job's user, opened through PAM as a login is.

    What root can do says nothing about what a job's user can: Yama and file permissions stop
    users only.
    """
    check, found = "proof.user", seen.user
    expected = "a session of " + (want.job_user or "the job's user")
    if not isinstance(found, User):
        evidence = f": {found.evidence}" if found.evidence else ""
        return unknown(check, f"{found.reason}{evidence}")
    if found.uid == -1:
        fix = f"create {found.name} on the node, or name another user"
        return fail(check, expected, found.error, "", fix)
    if found.error:
        other = found.error.startswith("logged in as")
        works = f"`su - {found.name} -c id`, as root on the node, has to work"
        fix = "log in as root, or name no user" if other else works
        return fail(check, expected, found.error, "", fix)
    if found.uid == 0 and not found.named:
        fix = "--user NAME proves it for the job's user"
        return warn(check, expected, "proved as root, whom Yama does not stop", "", fix)
    return ok(check, f"a session of {found.name}")


def _kernel(limit: Limit) -> dict[str, int]:
    """The soft and the hard limit, with UNLIMITED for -1, as the subject limits has it."""
    return {k: UNLIMITED if v == -1 else v for k, v in vars(limit).items()}


def _possible(seen: SessionLimits, want: Policy) -> dict[str, int]:
    """Item -> the policy's limit, without the limits that this node's kernel refuses."""
    ceiling = dict(zip(ITEMS, seen.ceiling))
    most = {item: UNLIMITED if value == -1 else value for item, value in ceiling.items()}
    node = Limits(PamLimits(), {}, (), most, seen.nr_open, Boot(None), systemd=False)
    return wanted(node, want)


@check(
    "proof.limits",
    proof="limits",
    settings=("core_handler", "core_pattern", "limit_core", "limit_memlock", "limit_nofile"),
    fix=(
        deploy("nodeready deploy INVENTORY --only limits"),
        "remove the ulimit of ITEMS from the user's profile, or /etc/profile",
    ),
)
def limits(seen: Proved, want: Policy) -> Result:
    """A new session of the job's user has the policy's limits, after PAM and after its profile.

    limit_core, limit_memlock and limit_nofile of the policy, or more; soft and hard.
    The files may say so and no login may have it: a pam.d file without pam_limits, a ulimit in a
    profile. A limit that this node's kernel refuses is told by the subject limits, a core limit
    that cost a core by proof.core, and neither again here.
    """
    check = "proof.limits"
    nothing = unseen(check, seen, "limits")
    if nothing is not None or not isinstance(seen.limits, SessionLimits):
        return nothing or na(check, "not proved")
    possible = _possible(seen.limits, want)
    if isinstance(seen.core, Core) and limited(seen.core):
        possible.pop("core", None)
    if not possible:
        return na(check, "none of the policy's limits can be had here, or proof.core tells")
    expected = ", ".join(f"{item} {shown(limit, item)}" for item, limit in possible.items())
    before = dict(zip(ITEMS, seen.limits.before))
    low, lowered = [], []
    for item, limit in possible.items():
        has: Limit = getattr(seen.limits, item)
        if min(_kernel(has).values()) >= limit:
            continue
        values = [shown(value, item) for value in _kernel(has).values()]
        low.append(f"{item} {'/'.join(dict.fromkeys(values))}")
        if item in before and min(_kernel(before[item]).values()) >= limit:
            lowered.append(item)
    if not low:
        return ok(check, expected)
    if lowered:
        name = seen.user.name if isinstance(seen.user, User) else "the user"
        items = ", ".join(lowered)
        actual = f"{', '.join(low)}: the profile lowers {items}"
        fix = f"remove the ulimit of {items} from {name}'s profile, or /etc/profile"
        return fail(check, expected, actual, "", fix)
    fix = "nodeready deploy INVENTORY --only limits"
    return fixable(check, expected, ", ".join(low), "", fix)


SUBJECT = Subject(
    "proof",
    "The session in which the proofs ran: whose it is, and its limits.",
    checks=(
        user,
        limits,
        attach,
        attach_nonblocking,
        attach_native,
        gdb,
        strace,
        core,
        backtrace,
        ssh,
        pdsh,
        ports,
        mesh,
    ),
)

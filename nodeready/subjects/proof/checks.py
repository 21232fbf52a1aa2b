"""Judge what was proved by acting: stacks, cores, limits, the way to the other nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from nodeready.policy import Policy
from nodeready.subjects.access import MAY_EXECUTE, PACKAGED
from nodeready.subjects.base import Line
from nodeready.subjects.core_dumps.facts import core_directory
from nodeready.subjects.limits.checks import shown, wanted
from nodeready.subjects.limits.facts import (
    ITEMS,
    UNLIMITED,
    Limits,
    PamLimits,
    parse_pam_limits,
    span,
)
from nodeready.subjects.proof.facts import (
    NO_START,
    NOEXEC,
    OTHER_ITEMS,
    PROGRAM,
    UNFINISHED,
    WAYS,
    Attach,
    Attempt,
    Control,
    Core,
    Directory,
    Guards,
    Limit,
    Logins,
    PamLine,
    Proved,
    Service,
    SessionLimits,
    Tracers,
    User,
    Way,
)
from nodeready.subjects.proof.reach import collective, mesh, pdsh, ports, ssh, unseen
from nodeready.subjects.proof.resources import resources
from nodeready.subjects.result import (
    Result,
    Subject,
    check,
    deploy,
    fail,
    fixable,
    na,
    ok,
    unknown,
    warn,
)
from nodeready.subjects.sysctl import BootSetting

_DEPLOY = "nodeready deploy INVENTORY --only"

# --- The debuggers: whether the job's user can look into a process that hangs.

_YAMA = "/proc/sys/kernel/yama/ptrace_scope"

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
        if tried.said == NOEXEC:
            fix = MAY_EXECUTE.format(tried.tool)
        elif tool != "py-spy" and not tried.tool.startswith(tuple(f"{d}/" for d in PACKAGED)):
            # No package brings it back.
            fix = f"remove {tried.tool}, or put a program there that runs"
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


def _other_ways(seen: Proved) -> Iterator[tuple[str, Way]]:
    """The other ways in to which a shell of the user's belongs, each with its name in a result."""
    for name, way in (("ssh", seen.ssh), ("shell", seen.shell), ("login", seen.login)):
        if isinstance(way, Way):
            yield WAYS[name], way


def _judge_ways(
    check: str, expected: str, seen: Proved, want: Policy, of: tuple[str, str, str]
) -> Result:
    """The result of one tool's attempts: in the first session, then in the other ways in."""
    result = _judge(check, expected, seen, want, of)
    for name, way in _other_ways(seen) if result.status == "ok" else ():
        observed = getattr(way, of[1])
        if observed is not None:
            again = _judge(check, expected, replace(seen, **{of[1]: observed}), want, of)
            if again.status == "fail":
                return replace(again, actual=f"by {name}: {again.actual}")
    return result


@check("proof.attach", settings=_SETTINGS, fix=_FIXES, proof="attach")
def attach(seen: Proved, want: Policy) -> Result:
    """py-spy shows the stack of a process of the job's user, to that user, without sudo.

    The process is a sibling of py-spy, as a rank is one of the shell of whoever looks: at Yama's
    scope 1 a parent may attach, and proves nothing. It must go on afterwards. It is tried in the
    user's session and, where the user's key opens one, in a session of ssh's.
    """
    check, expected = "proof.attach", "a stack by py-spy dump"
    return _judge_ways(check, expected, seen, want, ("py-spy", "attach", "blocking"))


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
    of = ("gdb", "tracers", "gdb")
    return _judge_ways("proof.gdb", "a backtrace by gdb -p", seen, want, of)


@check("proof.strace", settings=_SETTINGS, fix=_FIXES, proof="tracers")
def strace(seen: Proved, want: Policy) -> Result:
    """strace shows the system calls of a process of the same user, and leaves it running."""
    of = ("strace", "tracers", "strace")
    return _judge_ways("proof.strace", "system calls by strace -p", seen, want, of)


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
    if isinstance(seen.limits, SessionLimits):
        has = seen.limits
        least = {"core": max(limit + 1, _LEAST_LIMIT)}
        why = _why(has.way, {"core": _text(has.core, "core")}, has, least, seen)
        if why.fix:
            return fail(check, expected, f"{actual}: {why.cause}", why.source, why.fix)
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
    that core is removed again; systemd-coredump's own rule removes the one that it keeps. It is
    tried in the user's session and, where the user's key opens one, in a session of ssh's.
    """
    found = _crashed(seen, want)
    for name, way in _other_ways(seen) if found.status == "ok" else ():
        # A limit of another way in is for proof.limits to tell.
        if way.core and not way.core.skipped and not limited(way.core):
            again = _crashed(replace(seen, core=way.core), want)
            if again.status == "fail":
                return replace(again, actual=f"by {name}: {again.actual}")
    return found


def _crashed(seen: Proved, want: Policy) -> Result:
    """What one crash left."""
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
    if " does not start: " in said:
        return na(check, "gdb does not start: see proof.gdb")
    return fail(check, expected, said, crash.gdb, f"run {crash.gdb} by hand on a core")


# --- The session in which the proofs ran: whose it is, and its limits.


# What su and PAM say of a refused session -> the fix: shadow's and util-linux's su, pam_unix(8),
# pam_limits(8), pam(3).
_REFUSALS = (
    (r"account (has )?expired|account expiration", "chage -E -1 {name}"),
    (r"required to change your password|password (has )?expired|token is no longer valid|"
     r"Authentication token expired", "give {name} a new password: passwd {name}, or chage -d"),
    (r"failed to execute|[Cc]annot execute", "install that shell, or give {name} another: chsh"),
    (r"[Tt]oo many logins", "raise maxlogins for {name} in limits.conf, or end old sessions"),
    (r"Module is unknown", "install the module that {path} names, or remove its line"),
)  # fmt: skip
_DENYING = ("access", "time", "listfile", "succeed_if")


def _service(seen: Proved, name: str) -> Service | None:
    """What PAM asks on this way in; None: not seen."""
    found = seen.logins.services if isinstance(seen.logins, Logins) else ()
    return next((one for one in found if one.name == name and one.path), None)


def _nologin(logins: Logins) -> tuple[str, str]:
    """The file that closes logins in words, and what opens them again (pam_nologin(8))."""
    says = f" ({logins.says})" if logins.says else ""
    if logins.shutdown:
        return f"{logins.nologin} is there{says}: a shutdown is pending", "shutdown -c, or wait"
    return f"{logins.nologin} is there{says}", f"remove {logins.nologin}"


def _refusal(error: str, name: str, seen: Proved) -> tuple[str, str, str]:
    """Why ``su -`` opened no session: the words, the file that decides, the fix."""
    fix = f"`su - {name} -c id`, as root on the node, has to work"
    service = _service(seen, "su")
    path = service.path if service else "/etc/pam.d/su"
    for pattern, what in _REFUSALS:
        if re.search(pattern, error):
            return error, path if "{path}" in what else "", what.format(name=name, path=path)
    logins, lines = seen.logins, service.lines if service else ()
    if isinstance(logins, Logins) and logins.nologin:
        asked = any(one.module == "nologin" for one in lines)
        if asked or (logins.says and logins.says in error):
            words, fix = _nologin(logins)
            return f"{error}: {words}", logins.nologin, fix
    denying = [one for one in lines if one.module in _DENYING]
    if denying and re.search("denied|[Ff]ailure", error):
        one = denying[0]
        words = f"{error}: pam_{one.module} may refuse {name} ({one.where})"
        where = "/etc/security/access.conf" if one.module == "access" else one.where
        given = re.search(r"\b(?:accessfile|file)=(\S+)", one.words)
        return words, one.where, f"let {name} in: {given[1] if given else where}"
    return error, "", fix


@check(
    "proof.user",
    settings=("job_user",),
    fix=(
        "create NAME on the node, or name another user",
        "log in as root, or name no user",
        "`su - NAME -c id`, as root on the node, has to work",
        "chage -E -1 NAME",
        "give NAME a new password: passwd NAME, or chage -d",
        "install that shell, or give NAME another: chsh",
        "let NAME in: /etc/security/access.conf",
        "remove /run/nologin",
        "shutdown -c, or wait",
        "look at NAME's ~/.bashrc, or at the start-up files of that shell",
        "--user NAME proves it for the job's user",
    ),
)
def user(seen: Proved, want: Policy) -> Result:
    """The proofs ran in a new session of the job's user, opened as a login is.

    PAM opens it, and the user's own shell reads its start-up files: one that ends the shell, or
    breaks what the shell starts, ends every job. The shell is started as a login shell, and as
    sshd starts it for a command.

    What root can do says nothing about what a job's user can: Yama and file permissions stop
    users only. Where /etc/nologin or /run/nologin closes ssh to everybody but root, there is no
    job either, whatever su opens.
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
        if found.error.startswith("logged in as"):
            return fail(check, expected, found.error, "", "log in as root, or name no user")
        actual, source, fix = _refusal(found.error, found.name, seen)
        return fail(check, expected, actual, source, fix)
    if found.uid == 0 and not found.named:
        fix = "--user NAME proves it for the job's user"
        return warn(check, expected, "proved as root, whom Yama does not stop", "", fix)
    if found.uid and isinstance(seen.logins, Logins) and _closed(seen, seen.logins):
        words, fix = _nologin(seen.logins)
        actual = f"ssh is closed to {found.name}: {words}"
        return fail(check, expected, actual, seen.logins.nologin, fix)
    for name, way in _other_ways(seen):
        if way.ended:
            actual = f"no session by {name}: {found.name}'s shell ends at its start: {way.error}"
            fix = f"look at {found.name}'s ~/.bashrc, or at the start-up files of that shell"
            return fail(check, expected, actual, "", fix)
    return ok(check, f"a session of {found.name}")


def _closed(seen: Proved, logins: Logins) -> bool:
    """Whether a file closes sshd to everybody but root, and no login of the user's shows that it
    does not: sshd heeds the file itself where it does not ask PAM (sshd(8), FILES)."""
    refused = isinstance(seen.ssh, Way) and bool(seen.ssh.error)
    closed = isinstance(seen.ssh, Way) and seen.ssh.closed
    if not logins.nologin or not (refused or seen.ssh is None) or not (logins.sshd or closed):
        return False
    if isinstance(seen.limits, SessionLimits) and seen.limits.way == "ssh":
        return False
    service = _service(seen, "ssh")
    asks = service is None or not service.whole or logins.use_pam is False
    return asks or (service is not None and any(one.module == "nologin" for one in service.lines))


def _kernel(limit: Limit) -> dict[str, int]:
    """The soft and the hard limit, with UNLIMITED for -1, as the subject limits has it."""
    return {k: UNLIMITED if v == -1 else v for k, v in vars(limit).items()}


def _possible(seen: SessionLimits, want: Policy) -> dict[str, int]:
    """Item -> the policy's limit, without the limits that this node's kernel refuses."""
    ceiling = dict(zip(ITEMS, seen.ceiling))
    most = {item: UNLIMITED if value == -1 else value for item, value in ceiling.items()}
    node = Limits(PamLimits(), {}, (), most, seen.nr_open, BootSetting(None), systemd=False)
    return wanted(node, want)


@dataclass(frozen=True)
class _Low:
    """What one way in gives too little of.

    items:  item -> its value in words
    cause:  in words; "": not known
    source: the line that decides
    fix:    a person's act; "": a deploy may repair it
    """

    items: Mapping[str, str]
    cause: str = ""
    source: str = ""
    fix: str = ""


def _text(limit: Limit, item: str) -> str:
    return "/".join(dict.fromkeys(shown(value, item) for value in _kernel(limit).values()))


def _items(values: Mapping[str, str]) -> str:
    return ", ".join(f"{item} {value}" for item, value in values.items())


def _by_way(seen: Proved) -> dict[str, SessionLimits]:
    """The limits of each way in that was proved, by its key in WAYS, the first session's first."""
    assert isinstance(seen.limits, SessionLimits)
    found = {seen.limits.way: seen.limits}
    others = (seen.ssh, seen.shell, seen.login, seen.step)
    for name, way in zip(("ssh", "shell", "login", "srun"), others):
        if isinstance(way, Way) and way.limits is not None:
            found.setdefault(name, way.limits)
    if "ssh" not in found and isinstance(seen.logins, Logins) and _without_pam(seen, seen.logins):
        found["ssh"] = _with(seen.limits, seen.logins.sshd, "ssh")
    slurmd = seen.logins.slurmd if isinstance(seen.logins, Logins) else ()
    slurm = _service(seen, "slurm")
    raised = slurm is not None and any(one.module == "limits" for one in slurm.lines)
    if len(slurmd) == len(ITEMS) and "srun" not in found and not raised:
        # A step's hard limits are slurmd's; which soft ones it has, only a step can tell.
        hard = tuple(Limit(one.hard, one.hard) for one in slurmd)
        found["slurmd"] = _with(seen.limits, hard, "slurmd")
    return found


def _with(first: SessionLimits, limits: tuple[Limit, ...], way: str) -> SessionLimits:
    """The limits of another way in on the same node."""
    core, memlock, nofile = limits
    first = replace(first, before=(), way=way, others=())
    return replace(first, core=core, memlock=memlock, nofile=nofile)


def _without_pam(seen: Proved, logins: Logins) -> bool:
    """Whether sessions of ssh have the limits of sshd itself, as everybody can tell who reads its
    files: it does not ask PAM, or PAM sets none there."""
    service = _service(seen, "ssh")
    none = service is not None and service.whole and not _pam_limits(service)
    return len(logins.sshd) == len(ITEMS) and (logins.use_pam is False or none)


def _pam_limits(service: Service | None) -> list[PamLine]:
    return [one for one in service.lines if one.module == "limits"] if service else []


def _other_file(service: Service | None) -> tuple[str, str]:
    """The file that pam_limits reads instead of limits.conf and limits.d, and the line that says
    so (pam_limits(8), conf=); "": it reads those."""
    for one in _pam_limits(service):
        other = re.search(r"\bconf=(\S+)", one.words)
        if other and other[1] != "/etc/security/limits.conf":
            return other[1], one.where
    return "", ""


def _own_lines(logins: Logins) -> Iterator[tuple[str, str, str, int, str]]:
    """The limits that lines give to the user's own names: domain, kind, item, value, where; the
    one that counts last. A user's line beats a group's (limits.conf(5))."""
    lines = (Line(one.path, one.number, one.text) for one in logins.lines)
    pam = parse_pam_limits(lines)
    mine = {*logins.domains}
    numbers = {
        group: {int(one.rpartition(":")[2]) for one in mine if re.fullmatch(rf"{group}:\d+", one)}
        for group in ("@", "")
    }

    def about(domain: str) -> bool:
        ids = span(domain)
        if ids is None:
            return domain in mine
        return any(ids[0] <= number <= ids[1] for number in numbers["@" * domain.startswith("@")])

    for at in ("@", ""):
        for one in pam.entries:
            if one.domain.startswith("@") == bool(at) and about(one.domain):
                yield one.domain, one.kind, one.item, one.value, one.where
    for domain, where in pam.exempt:
        if about(domain):
            yield from ((domain, kind, item, -1, where) for kind in _KINDS for item in ITEMS)


_KINDS = ("soft", "hard")
_RESTART = "systemctl restart slurmd, when idle"
_RAISE = (
    "raise or remove it in limits.conf, limits.d, the start-up files of the user's shell, or the "
    "unit of sshd or slurmd"
)


def _why(
    way: str, low: Mapping[str, str], has: SessionLimits, possible: Mapping[str, int], seen: Proved
) -> _Low:
    """The cause of too low limits on one way in."""
    name = seen.user.name if isinstance(seen.user, User) else "the user"
    if way in ("srun", "slurmd"):
        fix = f"nodeready deploy INVENTORY --only limits, then {_RESTART}"
        slurmd = seen.logins.slurmd if isinstance(seen.logins, Logins) else ()
        own = dict(zip(ITEMS, slurmd))
        if way == "srun" and all(
            min(_kernel(own[item]).values()) >= possible[item] for item in low if item in own
        ):
            fix = "PropagateResourceLimitsExcept in slurm.conf, or the limits of who submits"
            return _Low(low, "slurmd itself has more", "", fix)
        return _Low(low, "slurmd's own limits, which its jobs inherit", "", fix)
    before = dict(zip(ITEMS, has.before))
    lowered = [
        item
        for item in low
        if item in before and min(_kernel(before[item]).values()) >= possible[item]
    ]
    if lowered:
        items = ", ".join(lowered)
        files = f"{name}'s profile, or /etc/profile"
        whose = "the profile"
        if way in ("ssh", "shell"):
            files = f"{name}'s ~/.bashrc or ~/.ssh/rc, or /etc/bash.bashrc"
            whose = "the shell's start-up"
        fix = f"remove the ulimit of {items} from {files}"
        return _Low(low, f"{whose} lowers {items}", "", fix)
    # root starts that shell through su, and a login shell is in ssh's session.
    way = {"shell": "su", "login": "ssh"}.get(way, way)
    logins, service = seen.logins, _service(seen, way)
    if not isinstance(logins, Logins):
        return _Low(low)
    if way == "ssh" and logins.use_pam is False:
        fix = "UsePAM yes in /etc/ssh/sshd_config, then systemctl reload ssh (RHEL, SLES: sshd)"
        return _Low(low, "sshd does not ask PAM: UsePAM no", "/etc/ssh/sshd_config", fix)
    if service and service.whole and not _pam_limits(service):
        fix = f"add `session required pam_limits.so` to {service.path}"
        return _Low(low, f"no pam_limits in {service.path}", service.path, fix)
    other, where = _other_file(service)
    if other:
        fix = f"take conf={other} off {where}, or set these limits in {other}"
        return _Low(low, f"pam_limits reads {other} by {where}", where, fix)
    decides = {
        (kind, item): (value, domain, where)
        for domain, kind, item, value, where in _own_lines(logins)
    }
    for item in low:
        for kind in _KINDS:
            value, domain, where = decides.get((kind, item), (UNLIMITED, "", ""))
            if value == -1 or value < possible[item]:
                words = f"{domain} has limits of its own ({where})"
                if value == -1:
                    words = f"{domain} is exempt from all limits ({where})"
                return _Low(low, words, where, f"raise or remove the line {where}")
    return _Low(low)


def _unlike(way: str, low: _Low, seen: Proved) -> _Low:
    """A way in that gets less than another, for no cause that is known: not the limits' files."""
    if low.fix or low.cause or not isinstance(seen.logins, Logins):
        return low
    if way == "ssh":
        sshd = dict(zip(ITEMS, seen.logins.sshd))
        if sshd and all(_text(sshd[item], item) == low.items[item] for item in low.items):
            fix = "journalctl -t sshd tells why pam_limits sets none; or restart sshd"
            return replace(low, cause="these are sshd's own", fix=fix)
    files = " and ".join(one.path for one in seen.logins.services[:2] if one.path)
    return replace(low, fix=f"compare {files}" if files else "compare the files of pam.d")


@check(
    "proof.limits",
    proof="limits",
    settings=(
        "core_handler",
        "core_pattern",
        "limit_core",
        "limit_memlock",
        "limit_nofile",
        "waivers",
    ),
    fix=(
        deploy("nodeready deploy INVENTORY --only limits"),
        "remove the ulimit of ITEMS from the user's profile, or /etc/profile",
        "remove the ulimit of ITEMS from the user's ~/.bashrc or ~/.ssh/rc, or /etc/bash.bashrc",
        "take conf=FILE off WHERE, or set these limits in FILE",
        "add `session required pam_limits.so` to FILE",
        "UsePAM yes in /etc/ssh/sshd_config, then systemctl reload ssh (RHEL, SLES: sshd)",
        "raise or remove the line WHERE",
        f"nodeready deploy INVENTORY --only limits, then {_RESTART}",
        "PropagateResourceLimitsExcept in slurm.conf, or the limits of who submits",
        "compare FILES",
        _RAISE,
    ),
)
def limits(seen: Proved, want: Policy) -> Result:
    """A new session of the job's user has the policy's limits, after PAM and after its profile.

    limit_core, limit_memlock and limit_nofile of the policy, or more; soft and hard. It is looked
    at in each way in: ``su -``, ssh from the node to itself where the user's key opens that, else
    the user's shell as sshd starts it, and what slurmd gives to its jobs. The files may say so and
    no login may have it: a pam.d file without pam_limits or with another ``conf=``, a ulimit in a
    profile, an sshd that does not ask PAM. Two ways that differ are a warning where both have
    enough. Limits that no policy names fail below what a job needs: as, data, fsize, cpu, stack,
    nproc, rttime. A limit that this node's kernel refuses is told by the subject limits, a core
    limit that cost a core by proof.core unless that is waived, and neither again here.
    """
    check = "proof.limits"
    nothing = unseen(check, seen, "limits")
    if nothing is not None or not isinstance(seen.limits, SessionLimits):
        return nothing or na(check, "not proved")
    possible = _possible(seen.limits, want)
    waived = any(name == "proof.core" for name, _ in want.waivers)
    if isinstance(seen.core, Core) and limited(seen.core) and not waived:
        possible.pop("core", None)
    if not possible:
        return na(check, "none of the policy's limits can be had here, or proof.core tells")
    expected = _items({item: shown(limit, item) for item, limit in possible.items()})
    ways = _by_way(seen)
    found: dict[str, _Low] = {}
    for way, has in ways.items():
        low = {
            item: _text(getattr(has, item), item)
            for item, limit in possible.items()
            if min(_kernel(getattr(has, item)).values()) < limit
        }
        if low:
            found[way] = _why(way, low, has, possible, seen)
    if not found:
        doubt = _others(check, expected, ways)
        doubt = doubt or _differing(check, expected, ways, possible)
        doubt = doubt or _not_seen(check, expected, ways, seen)
        return doubt or ok(check, expected, _not_proved(expected, seen))
    logins = [way for way in ways if way not in ("srun", "slurmd")]
    if len(logins) > 1 and len([way for way in logins if way in found]) == 1:
        found = {way: _unlike(way, low, seen) for way, low in found.items()}
    return _too_low(check, expected, ways, found)


def _too_low(
    check: str, expected: str, ways: Mapping[str, SessionLimits], found: Mapping[str, _Low]
) -> Result:
    """The result of the ways that give too little."""
    kinds = _distinct(found.values())
    # Where every way has the same for the same reason, the way is no part of the finding.
    alike = len(kinds) == 1 and len(found) == len(ways)
    texts = []
    for low in kinds:
        mine = [way for way, other in found.items() if other == low]
        by = "" if alike else f" by {' and '.join(WAYS.get(way, 'this login') for way in mine)}"
        texts.append(f"{_items(low.items)}{by}" + (f": {low.cause}" if low.cause else ""))
    other = next((way for way in ways if way not in found and way in ("su", "ssh")), None)
    if other is not None:
        items = dict.fromkeys(item for low in kinds for item in low.items)
        has = {item: _text(getattr(ways[other], item), item) for item in items}
        texts.append(f"{_items(has)} by {WAYS[other]}")
    actual = "; ".join(texts)
    first = next((low for low in kinds if low.fix), None)
    if first is None:
        return fixable(check, expected, actual, "", "nodeready deploy INVENTORY --only limits")
    return fail(check, expected, actual, first.source, first.fix)


def _distinct(found: Iterable[_Low]) -> list[_Low]:
    kinds: list[_Low] = []
    for low in found:
        if low not in kinds:
            kinds.append(low)
    return kinds


#: The least of the limits that no policy names, in kernel units; -1: none may be set. as, data:
#: CUDA reserves more addresses than the node has memory; fsize: a checkpoint, and a core; cpu:
#: seconds of all threads together, which a long job has at some time; stack: what glibc gives to
#: a thread by itself; nproc: a rank with its loaders and OpenMP has hundreds of threads; rttime:
#: microseconds without a wait, which a real-time thread that polls has at some time (UCX, DPDK).
_LEAST = {
    "as": 1 << 40, "data": 1 << 40, "fsize": 1 << 40, "cpu": -1, "stack": 2 << 20, "nproc": 1024,
    "rttime": -1,
}  # fmt: skip


def _others(check: str, expected: str, ways: Mapping[str, SessionLimits]) -> Result | None:
    """The failure of a limit that no policy names and that ends a job."""
    low: dict[str, list[str]] = {}
    for way, has in ways.items():
        values = dict(zip(OTHER_ITEMS, has.others))
        words = ", ".join(
            f"{item} {value}"
            for item, value in values.items()
            if value != -1 and (_LEAST[item] == -1 or value < _LEAST[item])
        )
        if words:
            low.setdefault(words, []).append(WAYS.get(way, "this login"))
    if not low:
        return None
    actual = "; ".join(f"{words} by {' and '.join(names)}" for words, names in low.items())
    fix = _RAISE
    return fail(check, expected, f"too little for a job: {actual}", "", fix)


def _differing(
    check: str, expected: str, ways: Mapping[str, SessionLimits], possible: Mapping[str, int]
) -> Result | None:
    """The warning where two ways give different limits, and both enough."""
    logins = {way: has for way, has in ways.items() if way not in ("srun", "slurmd")}
    # Where the policy asks for nothing, nobody cares.
    differing = [
        item
        for item, limit in possible.items()
        if limit and len({_text(getattr(has, item), item) for has in logins.values()}) > 1
    ]
    if not differing:
        return None
    actual = "; ".join(
        f"{_items({item: _text(getattr(has, item), item) for item in differing})} by "
        f"{WAYS.get(way, 'this login')}"
        for way, has in logins.items()
    )
    fix = "compare /etc/pam.d/sshd and /etc/pam.d/su, and what the user's shells run"
    return warn(check, expected, actual, "", fix)


def _not_seen(
    check: str, expected: str, ways: Mapping[str, SessionLimits], seen: Proved
) -> Result | None:
    """The warning where ssh gives limits of its own, and no key of the user's shows which."""
    other, where = _other_file(_service(seen, "ssh"))
    if not other or "ssh" in ways or other == _other_file(_service(seen, "su"))[0]:
        return None
    actual = f"not seen by ssh, where pam_limits reads {other}"
    fix = f"take conf={other} off {where}, or set these limits in {other}"
    return warn(check, expected, actual, where, fix)


def _not_proved(expected: str, seen: Proved) -> str:
    """What is wanted, and which way in could not be looked at."""
    texts = [expected]
    for name, way in (("ssh", seen.ssh), ("srun", seen.step)):
        if isinstance(way, Way) and way.error:
            # Without the names of user and host, nodes share one result.
            texts.append(f"not proved by {name}: {re.sub(r'^[^ ]+@[^ ]+: ', '', way.error)}")
    return "; ".join(texts)


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
        resources,
        ssh,
        pdsh,
        ports,
        mesh,
        collective,
    ),
)

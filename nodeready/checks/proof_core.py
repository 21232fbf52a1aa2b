"""Judge whether a crash in the job's user's session leaves a core that gdb can read."""

from __future__ import annotations

from nodeready.checks.declare import check, deploy
from nodeready.checks.proof_unseen import unseen
from nodeready.policy import Policy
from nodeready.probes.core_dumps import core_directory
from nodeready.probes.pam_limits import ITEMS
from nodeready.proofs.proved import Proved
from nodeready.proofs.seen import PROGRAM, Core, Directory, SessionLimits, User
from nodeready.results import Result, fail, fixable, na, ok, warn

_DEPLOY = "nodeready deploy INVENTORY --only"
#: Below it the kernel writes no core at all: ELF_EXEC_PAGESIZE of most machines, in bytes.
_LEAST_LIMIT = 4096
#: Bytes that a core of /bin/sh needs at least; its own headers say how many when they fit.
_SMALL = 65536


def _whole(core: Core) -> bool:
    """Whether there is a core and nothing of it is missing; a compressed one has no size."""
    if core.whole_bytes is None:
        return bool(core.path) and core.handler != "" and not core.stray
    return bool(core.path) and core.size_bytes >= core.whole_bytes


def limited(core: Core) -> bool:
    """Whether the session's core limit is why there is no whole core.

    The kernel heeds it only when it writes a file, and systemd-coredump does, as upstream builds
    it (RHEL, SLES).
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
    """Whether crashes go where the policy sends them."""
    if want.core_handler == PROGRAM:
        return core.handler.endswith(f"/{PROGRAM}")
    return core.pattern == want.core_pattern


def _limit(check: str, expected: str, seen: Proved, want: Policy) -> Result:
    """The limit of the session costs the core: the policy's own, the profile's or the login's."""
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
    """What is wrong with the core's directory, and the fix when it is not our deploy's."""
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
    """Why a program got no core, or kept none."""
    if not core.dumped:
        what = "does not start" if core.handler_there else "is no program that can be run"
        return f"core_pattern pipes to {core.handler}, which {what}"
    if core.handler.endswith(f"/{PROGRAM}"):
        said = f" ({core.gdb_said})" if core.gdb_said else ""
        return f"{PROGRAM} kept nothing{said}: see journalctl -t {PROGRAM}"
    return f"core_pattern pipes to {core.handler}, which took it and left no core to be found"


def _cause(core: Core, name: str) -> tuple[str, str]:
    """Why there is no whole core, or none where it belongs; and the fix when no deploy is one."""
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

"""One tool, tried on one canary: how it ended, and what it left of its target."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Sequence

from nodeready.proofs.own import Ended, Heard, Own, Status, answers, status
from nodeready.proofs.seen import NO_START, Attempt, Guards

#: Bit of CAP_SYS_PTRACE in the sets of /proc/PID/status (capabilities(7)).
_CAP_SYS_PTRACE = 1 << 19
# EPERM and EACCES, as py-spy, gdb and strace put them.
_REFUSED = re.compile(r"permission denied|not permitted|\bEPERM\b|\bEACCES\b|os error 13?\b", re.I)


def first_number(path: str) -> int | None:
    """The number with which a file of the kernel begins; None: there is none."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return int(file.read(100).split()[0])
    except (OSError, ValueError, IndexError):
        return None


def guards() -> Guards:
    """As they are for this process, now."""
    deny = first_number("/sys/fs/selinux/booleans/deny_ptrace")
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        sets = dict(row.split(":", 1) for row in file if row.startswith("Cap"))
    effective, bounding = (int(sets[name], 16) for name in ("CapEff", "CapBnd"))
    return Guards(
        yama=first_number("/proc/sys/kernel/yama/ptrace_scope"),
        deny_ptrace=None
        if deny is None
        else deny == 1 and first_number("/sys/fs/selinux/enforce") == 1,
        capable=bool(effective & _CAP_SYS_PTRACE),
        bounded=not bounding & _CAP_SYS_PTRACE,
    )


def environment() -> dict[str, str]:
    """The session's, in English; gdb downloads nothing and leaves no compiled Python behind."""
    kept = {k: v for k, v in os.environ.items() if k not in ("DEBUGINFOD_URLS", "LANGUAGE")}
    return {**kept, "LC_ALL": "C", "PYTHONDONTWRITEBYTECODE": "1"}


def attempt(
    own: Own,
    canary: subprocess.Popen[bytes],
    argv: Sequence[str],
    limit_s: int,
    *,
    wrong: Callable[[Ended], str],
    heard: Heard | None = None,
) -> Attempt:
    """Try a tool on this canary.

    wrong: what is wrong with how it ended; "": nothing
    heard: gets its output as it comes
    """
    full = own.left_s > limit_s
    try:
        ended = own.run(argv, limit_s, heard, env=environment())
    except OSError as problem:
        return Attempt(argv[0], NO_START, problem.strerror or str(problem))
    said = "" if ended.rc is None else wrong(ended)
    refused = bool(said and _REFUSED.search(ended.err))
    answered = answers(canary)
    if not answered:
        # One that was killed is gone in a moment, and not before.
        with contextlib.suppress(subprocess.TimeoutExpired):
            canary.wait(1)
    after = status(canary.pid) if canary.returncode is None else Status("", 0)
    return Attempt(
        tool=argv[0],
        rc=ended.rc,
        said=said[:300],
        good=ended.rc is not None and not said,
        refused=refused,
        limit_s=limit_s,
        full=full,
        state=after.state,
        tracer=after.tracer,
        answers=answered,
    )


def complaint(ended: Ended) -> str:
    """What a tool said, on one line, or how it ended: py-spy's and gdb's errors have several.

    gdb talks of uids first, and of the error last.
    """
    rows = (ended.err.strip() or ended.out.strip()).splitlines()
    chosen = [row for row in rows if _REFUSED.search(row)] or rows
    said = " ".join(" ".join(chosen)[:2000].split())
    if said or ended.rc is None:
        return said
    return f"exit status {ended.rc}" if ended.rc >= 0 else f"ended by signal {-ended.rc}"

"""Prove that the job's user can see into a process: py-spy in its three modes, gdb and strace.

The target is a sibling of the tool, because a rank is no child of the shell that examines it.
Yama's scope 1 lets a parent attach, so a child would prove nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence

from nodeready.agent.proc import first_number, status_fields
from nodeready.agent.runtime import (
    FRAME,
    Ended,
    OutputHandler,
    ProcessSupervisor,
    Status,
    changeable_by_root_only,
    responds,
    status,
)
from nodeready.agent.users_file import rights_of
from nodeready.subjects.proof.facts import (
    NO_START,
    NOEXEC,
    Attach,
    Control,
    DebuggerAttempt,
    Guards,
    ProofConfig,
    Tracers,
)

# --- One tool on one canary: how the tool ended, and the state in which it left its target.

#: Bit of CAP_SYS_PTRACE in the sets of /proc/PID/status (capabilities(7)).
_CAP_SYS_PTRACE = 1 << 19
# How py-spy, gdb and strace report EPERM and EACCES.
_REFUSED = re.compile(r"permission denied|not permitted|\bEPERM\b|\bEACCES\b|os error 13?\b", re.I)


def guards() -> Guards:
    """The protections against tracing that apply to this process now."""
    deny = first_number("/sys/fs/selinux/booleans/deny_ptrace")
    sets = status_fields("/proc/self/status")
    effective, bounding = (int(sets[name], 16) for name in ("CapEff", "CapBnd"))
    is_enforcing = first_number("/sys/fs/selinux/enforce") == 1
    return Guards(
        yama=first_number("/proc/sys/kernel/yama/ptrace_scope"),
        deny_ptrace=None if deny is None else deny == 1 and is_enforcing,
        capable=bool(effective & _CAP_SYS_PTRACE),
        bounded=not bounding & _CAP_SYS_PTRACE,
    )


def environment() -> dict[str, str]:
    """The environment of a tool: English messages, no downloads by gdb, no bytecode files."""
    environment = {k: v for k, v in os.environ.items() if k not in ("DEBUGINFOD_URLS", "LANGUAGE")}
    return {**environment, "LC_ALL": "C", "PYTHONDONTWRITEBYTECODE": "1"}


def attempt(
    supervisor: ProcessSupervisor,
    canary: subprocess.Popen[bytes],
    argv: Sequence[str],
    limit_s: int,
    *,
    find_error: Callable[[Ended], str],
    on_output: OutputHandler | None = None,
) -> DebuggerAttempt:
    """Try a tool on this canary.

    find_error: finds the error in how the tool ended; "": none
    on_output:  gets the tool's output as it comes
    """
    has_full_time = supervisor.left_s > limit_s
    try:
        ended = supervisor.run(argv, limit_s, on_output, env=environment())
    except OSError as problem:
        return DebuggerAttempt(argv[0], NO_START, _no_start(argv[0], problem))
    complaint = "" if ended.rc is None else find_error(ended)
    refused = bool(complaint and _REFUSED.search(ended.err))
    answered = responds(canary)
    if not answered:
        # A killed canary needs a moment to end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            canary.wait(1)
    after = status(canary.pid) if canary.returncode is None else Status("", 0)
    return DebuggerAttempt(
        tool=argv[0],
        rc=ended.rc,
        complaint=complaint[:300],
        good=ended.rc is not None and not complaint,
        refused=refused,
        limit_s=limit_s,
        full=has_full_time,
        state=after.state,
        tracer=after.tracer,
        answers=answered,
    )


def _no_start(program: str, problem: OSError) -> str:
    """Why a program did not start: a file system that forbids it, or the kernel's error."""
    with contextlib.suppress(OSError):
        if os.statvfs(program).f_flag & os.ST_NOEXEC:
            return NOEXEC
    return problem.strerror or str(problem)


def complaint(ended: Ended) -> str:
    """A tool's error on one line, or how the tool ended. py-spy's and gdb's errors have several
    lines. gdb prints uids first and the error last.
    """
    rows = (ended.err.strip() or ended.out.strip()).splitlines()
    chosen = [row for row in rows if _REFUSED.search(row)] or rows
    complaint = " ".join(" ".join(chosen)[:2000].split())
    if complaint or ended.rc is None:
        return complaint
    return f"exit status {ended.rc}" if ended.rc >= 0 else f"ended by signal {-ended.rc}"


# --- py-spy, as the user and, for comparison, as root.

# The maximum seconds of each mode. Unwinding native frames reads the symbols of all libraries: up
# to 14 s cold on a torch process.
_LIMITS_S = {"blocking": 10, "nonblocking": 10, "native": 25}
_OPTIONS = {"blocking": [], "nonblocking": ["--nonblocking"], "native": ["--native"]}


def _py_spy(config: ProofConfig) -> str:
    spy = config.py_spy or shutil.which("py-spy") or ""
    return spy if os.path.exists(spy) and changeable_by_root_only(spy) else ""


def _stack_error(ended: Ended) -> str:
    """Why the output is no stack of a canary; "": it is a stack."""
    if ended.rc != 0:
        return complaint(ended)
    try:
        threads = json.loads(ended.out)
        frames = [str(frame["name"]) for thread in threads for frame in thread["frames"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return "its output is no JSON of stacks"
    return "" if FRAME in frames else "its stacks lack the target's function"


def _dump(supervisor: ProcessSupervisor, config: ProofConfig, mode: str, pid: int) -> list[str]:
    return [_py_spy(config), "dump", "--json", *_OPTIONS[mode], "--pid", str(pid)]


def prove(supervisor: ProcessSupervisor, config: ProofConfig) -> Attach:
    """Run the three modes in sequence, because two blocking dumps of one process collide."""
    attempts: dict[str, DebuggerAttempt] = {}
    if not _py_spy(config):
        return Attach(guards(), "", *[DebuggerAttempt("")] * 3)
    canary, error = None, ""
    try:
        for mode, limit_s in _LIMITS_S.items():
            if supervisor.left_s < 1 or (config.machine and mode != "blocking"):
                break
            canary = canary or supervisor.canary()
            argv = _dump(supervisor, config, mode, canary.pid)
            attempts[mode] = attempt(supervisor, canary, argv, limit_s, find_error=_stack_error)
            if not attempts[mode].answers or attempts[mode].tracer:
                # The next mode gets a canary that this mode has not touched.
                supervisor.stop(canary)
                canary = None
    except OSError as problem:
        error = str(problem)
    finally:
        if canary is not None:
            supervisor.stop(canary)
    return Attach(guards(), error, *map(attempts.get, _LIMITS_S))


def control(supervisor: ProcessSupervisor, config: ProofConfig, uid: int | None = None) -> Control:
    """Attach as root to a canary of this user; None: to a canary of root."""
    if not _py_spy(config):
        return Control(guards(), "", DebuggerAttempt(""))
    try:
        canary = supervisor.canary(None if uid is None else rights_of(uid))
    except OSError as problem:
        return Control(guards(), str(problem), None)
    try:
        argv = _dump(supervisor, config, "nonblocking", canary.pid)
        limit_s = _LIMITS_S["nonblocking"]
        tried = attempt(supervisor, canary, argv, limit_s, find_error=_stack_error)
    finally:
        supervisor.stop(canary)
    return Control(guards(), "", tried)


# --- gdb and strace. The process continues when they have detached.

# gdb reads the symbols of Python and of all its libraries first.
_GDB_LIMIT_S, _STRACE_LIMIT_S = 20, 10


def _no_backtrace(ended: Ended) -> str:
    # gdb's exit status is 0 also when it could not attach.
    if re.search(r"^#0 ", ended.out, re.MULTILINE):
        return ""
    return complaint(ended)


def _no_calls(ended: Ended) -> str:
    # An interrupted strace ends by the signal, with the signal's number or with 0, by its version.
    if "attached" in ended.err and "read(0," in ended.err:
        return ""
    return complaint(ended)


def _gdb(supervisor: ProcessSupervisor, canary: subprocess.Popen[bytes]) -> DebuggerAttempt | None:
    # A process in state D to which gdb attaches stays stopped forever when gdb is killed.
    if status(canary.pid).state == "D":
        return None
    # gdb reads the system's start-up files, but not the user's.
    argv = [shutil.which("gdb") or "", "-nh", "-batch", "-p", str(canary.pid), "-ex", "bt"]
    return attempt(supervisor, canary, argv, _GDB_LIMIT_S, find_error=_no_backtrace)


def _strace(
    supervisor: ProcessSupervisor, canary: subprocess.Popen[bytes]
) -> DebuggerAttempt | None:
    text = bytearray()
    steps: list[str] = []

    def on_output(process: subprocess.Popen[bytes], stream: int, data: bytes) -> None:
        """Have the canary make system calls once strace has attached, then interrupt strace."""
        text.extend(data[:4096])
        if not steps and b"attached" in text:
            steps.append("system calls")
            responds(canary)
        if len(steps) == 1 and b"read(0," in text:
            steps.append("interrupt")
            process.send_signal(signal.SIGINT)

    argv = [shutil.which("strace") or "", "-p", str(canary.pid)]
    return attempt(
        supervisor, canary, argv, _STRACE_LIMIT_S, find_error=_no_calls, on_output=on_output
    )


def _try(
    supervisor: ProcessSupervisor,
    tool: str,
    run_tool: Callable[[ProcessSupervisor, subprocess.Popen[bytes]], DebuggerAttempt | None],
) -> DebuggerAttempt | None:
    """Try a tool on a new canary. Raises OSError if no canary starts."""
    if not shutil.which(tool):
        return DebuggerAttempt("")
    if supervisor.left_s < 1:
        return None
    canary = supervisor.canary()
    try:
        return run_tool(supervisor, canary)
    finally:
        supervisor.stop(canary)


def prove_tracers(supervisor: ProcessSupervisor, config: ProofConfig) -> Tracers:
    """Run gdb and strace in sequence, each on a new canary that no other tool has touched."""
    gdb = None
    try:
        gdb = _try(supervisor, "gdb", _gdb)
        return Tracers(guards(), "", gdb, _try(supervisor, "strace", _strace))
    except OSError as problem:
        return Tracers(guards(), str(problem), gdb, None)

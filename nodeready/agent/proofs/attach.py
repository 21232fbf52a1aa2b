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
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from nodeready.agent import runtime
from nodeready.agent.proc import first_number, status_fields
from nodeready.agent.runtime import ProcessSupervisor
from nodeready.agent.users_file import rights_of
from nodeready.subjects.proof import facts

# --- One tool on one canary: how the tool ended, and the state in which it left its target.

_CAP_SYS_PTRACE = 1 << 19  # CAP_SYS_PTRACE in the sets of /proc/PID/status (capabilities(7))
# How py-spy, gdb and strace report EPERM and EACCES.
_REFUSED = re.compile(r"permission denied|not permitted|\bEPERM\b|\bEACCES\b|os error 13?\b", re.I)


def guards() -> facts.Guards:
    """The protections against tracing that apply to this process now."""
    deny = first_number("/sys/fs/selinux/booleans/deny_ptrace")
    sets = status_fields("/proc/self/status")
    effective, bounding = (int(sets[name], 16) for name in ("CapEff", "CapBnd"))
    is_enforcing = first_number("/sys/fs/selinux/enforce") == 1
    yama = first_number("/proc/sys/kernel/yama/ptrace_scope")
    denies = None if deny is None else deny == 1 and is_enforcing
    capable, bounded = bool(effective & _CAP_SYS_PTRACE), not bounding & _CAP_SYS_PTRACE
    return facts.Guards(yama, deny_ptrace=denies, capable=capable, bounded=bounded)


def environment() -> dict[str, str]:
    """The environment of a tool: English messages, no downloads by gdb, no bytecode files."""
    environment = {k: v for k, v in os.environ.items() if k not in ("DEBUGINFOD_URLS", "LANGUAGE")}
    return {**environment, "LC_ALL": "C", "PYTHONDONTWRITEBYTECODE": "1"}


class DebuggerTool(NamedTuple):
    """How a debugger is tried."""

    words: str  # its command line without the program
    limit_s: int  # maximum seconds
    # finds the error in how the tool ended, although it may have exited with 0; "": none
    find_error: Callable[[runtime.Ended], str]


def attempt(
    supervisor: ProcessSupervisor,
    canary: subprocess.Popen[bytes],
    argv: Sequence[str],
    tool: DebuggerTool,
    on_output: runtime.OutputHandler | None = None,
) -> facts.DebuggerAttempt:
    """Try a tool on this canary. on_output: gets the tool's output as it comes"""
    has_full_time = supervisor.left_s > tool.limit_s
    try:
        ended = supervisor.run(argv, tool.limit_s, on_output, env=environment())
    except OSError as problem:
        return facts.DebuggerAttempt(argv[0], facts.NO_START, _no_start(argv[0], problem))
    complaint = "" if ended.rc is None else tool.find_error(ended)
    answered = runtime.responds(canary)
    if not answered:
        # A killed canary needs a moment to end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            canary.wait(1)
    after = runtime.status(canary.pid) if canary.returncode is None else runtime.Status("", 0)
    return facts.DebuggerAttempt(
        argv[0], ended.rc, complaint[:300], good=ended.rc is not None and not complaint,
        refused=bool(complaint and _REFUSED.search(ended.err)), limit_s=tool.limit_s,
        full=has_full_time, state=after.state, tracer=after.tracer, answers=answered,
    )  # fmt: skip


def _no_start(program: str, problem: OSError) -> str:
    """Why a program did not start: a file system that forbids it, or the kernel's error."""
    with contextlib.suppress(OSError):
        if os.statvfs(program).f_flag & os.ST_NOEXEC:
            return facts.NOEXEC
    return problem.strerror or str(problem)


# --- The tools: py-spy in its three modes, gdb and strace.


def complaint(ended: runtime.Ended) -> str:
    """A tool's error on one line, or how the tool ended. py-spy's and gdb's errors have several
    lines. gdb prints uids first and the error last.
    """
    rows = (ended.err.strip() or ended.out.strip()).splitlines()
    chosen = [row for row in rows if _REFUSED.search(row)] or rows
    complaint = " ".join(" ".join(chosen)[:2000].split())
    if complaint or ended.rc is None:
        return complaint
    return f"exit status {ended.rc}" if ended.rc >= 0 else f"ended by signal {-ended.rc}"


def _stack_error(ended: runtime.Ended) -> str:
    """Why the output is no stack of a canary; "": it is a stack."""
    if ended.rc != 0:
        return complaint(ended)
    try:
        threads = json.loads(ended.out)
        frames = [str(frame["name"]) for thread in threads for frame in thread["frames"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return "its output is no JSON of stacks"
    return "" if runtime.FRAME in frames else "its stacks lack the target's function"


def _no_backtrace(ended: runtime.Ended) -> str:
    # gdb's exit status is 0 also when it could not attach.
    return "" if re.search(r"^#0 ", ended.out, re.MULTILINE) else complaint(ended)


def _no_calls(ended: runtime.Ended) -> str:
    # An interrupted strace ends by the signal, with the signal's number or with 0, by its version.
    return "" if "attached" in ended.err and "read(0," in ended.err else complaint(ended)


_PY_SPY = {
    "blocking": DebuggerTool("dump --json --pid {pid}", 10, _stack_error),
    "nonblocking": DebuggerTool("dump --json --nonblocking --pid {pid}", 10, _stack_error),
    # Unwinding native frames reads the symbols of all libraries: up to 14 s cold for torch.
    "native": DebuggerTool("dump --json --native --pid {pid}", 25, _stack_error),
}
# gdb reads the symbols of Python and of all its libraries first, and the system's start-up files,
# but not the user's.
_GDB = DebuggerTool("-nh -batch -p {pid} -ex bt", 20, _no_backtrace)
_STRACE = DebuggerTool("-p {pid}", 10, _no_calls)


def _interrupt_when_seen(canary: subprocess.Popen[bytes]) -> runtime.OutputHandler:
    """Has the canary make system calls once strace has attached, then interrupts strace."""
    text = bytearray()
    steps: list[str] = []

    def on_output(process: subprocess.Popen[bytes], stream: int, data: bytes) -> None:
        text.extend(data[:4096])
        if not steps and b"attached" in text:
            steps.append("system calls")
            runtime.responds(canary)
        if len(steps) == 1 and b"read(0," in text:
            steps.append("interrupt")
            process.send_signal(signal.SIGINT)

    return on_output


def _try_all(
    supervisor: ProcessSupervisor,
    tools: Mapping[str, tuple[str, DebuggerTool]],
    uid: int | None = None,
) -> tuple[str, dict[str, facts.DebuggerAttempt | None]]:
    """Try the tools in sequence, because two that stop one process collide, each on a canary that
    no other tool has touched.

    tools: name -> the program's path, "" if it is missing; and the tool
    uid:   of the canaries; None: our own

    Returns why a canary did not start, or "", and name -> the attempt.
    """
    attempts: dict[str, facts.DebuggerAttempt | None] = {}
    for name, (program, tool) in tools.items():
        if not program:
            attempts[name] = facts.DebuggerAttempt("")
        elif supervisor.left_s >= 1:
            try:
                canary = supervisor.canary(None if uid is None else rights_of(uid))
            except OSError as problem:
                return str(problem), attempts
            try:
                # A process in state D stays stopped forever if gdb is killed while it attaches.
                if tool is not _GDB or runtime.status(canary.pid).state != "D":
                    argv = [program, *tool.words.format(pid=canary.pid).split()]
                    on_output = _interrupt_when_seen(canary) if tool is _STRACE else None
                    attempts[name] = attempt(supervisor, canary, argv, tool, on_output)
            finally:
                supervisor.stop(canary)
    return "", attempts


def _py_spy(config: facts.ProofConfig) -> str:
    spy = config.py_spy or shutil.which("py-spy") or ""
    return spy if os.path.exists(spy) and runtime.changeable_by_root_only(spy) else ""


def prove(supervisor: ProcessSupervisor, config: facts.ProofConfig) -> facts.Attach:
    """Run the three modes; only the first one in a further session."""
    spy = _py_spy(config)
    modes = ["blocking"] if spy and config.machine else [*_PY_SPY]
    error, attempts = _try_all(supervisor, {mode: (spy, _PY_SPY[mode]) for mode in modes})
    return facts.Attach(guards(), error, *map(attempts.get, _PY_SPY))


def control(
    supervisor: ProcessSupervisor, config: facts.ProofConfig, uid: int | None = None
) -> facts.Control:
    """Attach as root to a canary of this user; None: to a canary of root."""
    tools = {"nonblocking": (_py_spy(config), _PY_SPY["nonblocking"])}
    error, attempts = _try_all(supervisor, tools, uid)
    return facts.Control(guards(), error, attempts.get("nonblocking"))


def prove_tracers(supervisor: ProcessSupervisor, config: facts.ProofConfig) -> facts.Tracers:
    """Run gdb and strace. The process continues when they have detached."""
    tools = {"gdb": _GDB, "strace": _STRACE}
    places = {name: (shutil.which(name) or "", tool) for name, tool in tools.items()}
    error, attempts = _try_all(supervisor, places)
    return facts.Tracers(guards(), error, attempts.get("gdb"), attempts.get("strace"))

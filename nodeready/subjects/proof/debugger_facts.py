"""The attempts of py-spy, gdb and strace at canaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nodeready.core import wire

#: A shell's exit status for a program that is there and cannot be started.
NO_START = 126
#: Why a program does not start on a file system that is mounted so (mount(8)).
NOEXEC = "its file system is mounted noexec"


@dataclass(frozen=True)
class DebuggerAttempt:
    """A debugger's attempt at a target process."""

    JSON_KEYS: ClassVar = {"complaint": "said"}

    tool: wire.Path  # the tool's path; "": not installed, and no other field means anything
    # the tool's exit status, negative for a signal, NO_START; None: ended by its limit
    rc: int | None = 0
    complaint: wire.Line = ""  # the tool's error message, on one line
    good: bool = False  # the tool's output is as expected
    refused: bool = False  # the tool was not permitted to look at the target
    limit_s: wire.Count = 0  # seconds that the tool had
    # ``limit_s`` was the tool's whole limit, not cut short by the end of the run
    full: bool = True
    # the target's state afterwards, the letter of /proc; "": the target is gone
    state: wire.Name = ""
    tracer: wire.Pid = 0  # the process that traces the target afterwards; 0: none
    answers: bool = True  # the target still answered afterwards


@dataclass(frozen=True)
class Guards:
    """The settings that can forbid a process to attach to another process of the same user."""

    yama: int | None  # kernel.yama.ptrace_scope in force; None: no Yama in this kernel
    deny_ptrace: bool | None  # SELinux enforces and its boolean is on; None: no such boolean
    capable: bool  # CAP_SYS_PTRACE is effective
    bounded: bool  # CAP_SYS_PTRACE is not in the bounding set: not even root can have it here


@dataclass(frozen=True)
class Attach:
    """py-spy's attempts at a canary, a process of the same user."""

    guards: Guards  # the settings that can refuse py-spy
    error: wire.Line  # why the canary did not start; "": it did
    blocking: DebuggerAttempt | None
    nonblocking: DebuggerAttempt | None
    native: DebuggerAttempt | None


@dataclass(frozen=True)
class Control:
    """The attempt of py-spy --nonblocking, as root, at a canary of the job's user.

    Where root passes and the user fails, the cause is Yama, or the target is not dumpable. Where
    both fail, it is a capability that root lacks, SELinux, Yama's scope 3 or py-spy itself.
    """

    guards: Guards
    error: wire.Line
    attempt: DebuggerAttempt | None


@dataclass(frozen=True)
class Tracers:
    """The attempts of gdb and strace, each at a canary of the same user."""

    guards: Guards  # the settings that can refuse them
    error: wire.Line  # why a canary did not start; "": both did
    gdb: DebuggerAttempt | None
    strace: DebuggerAttempt | None

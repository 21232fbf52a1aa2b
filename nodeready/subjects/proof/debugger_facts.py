"""The attempts of py-spy, gdb and strace at canaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nodeready.subjects import wire

#: A shell's exit status for a program that is there and cannot be started.
NO_START = 126
#: Why a program does not start on a file system that is mounted so (mount(8)).
NOEXEC = "its file system is mounted noexec"


@dataclass(frozen=True)
class DebuggerAttempt:
    """A debugger's attempt at a target process.

    tool:    the tool's path; "": not installed, and no other field means anything
    rc:      the tool's exit status, negative for a signal, NO_START; None: ended by its limit
    complaint: the tool's error message, on one line
    good:    the tool's output is as expected
    refused: the tool was not permitted to look at the target
    limit_s: seconds that the tool had
    full:    ``limit_s`` was the tool's whole limit, not cut short by the end of the run
    state:   the target's state afterwards, the letter of /proc; "": the target is gone
    tracer:  the process that traces the target afterwards; 0: none
    answers: the target still answered afterwards
    """

    JSON_KEYS: ClassVar = {"complaint": "said"}

    tool: wire.Path
    rc: int | None = 0
    complaint: wire.Line = ""
    good: bool = False
    refused: bool = False
    limit_s: wire.Count = 0
    full: bool = True
    state: wire.Name = ""
    tracer: wire.Pid = 0
    answers: bool = True


@dataclass(frozen=True)
class Guards:
    """The settings that can forbid a process to attach to another process of the same user.

    yama:        kernel.yama.ptrace_scope in force; None: no Yama in this kernel
    deny_ptrace: SELinux enforces and its boolean is on; None: no such boolean
    capable:     CAP_SYS_PTRACE is effective
    bounded:     CAP_SYS_PTRACE is not in the bounding set: not even root can have it here
    """

    yama: int | None
    deny_ptrace: bool | None
    capable: bool
    bounded: bool


@dataclass(frozen=True)
class Attach:
    """py-spy's attempts at a canary, a process of the same user.

    guards: the settings that can refuse py-spy
    error:  why the canary did not start; "": it did
    """

    guards: Guards
    error: wire.Line
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
    """The attempts of gdb and strace, each at a canary of the same user.

    guards: the settings that can refuse them
    error:  why a canary did not start; "": both did
    """

    guards: Guards
    error: wire.Line
    gdb: DebuggerAttempt | None
    strace: DebuggerAttempt | None

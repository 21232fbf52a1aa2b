"""How the threads of a rank wait, as /proc shows them; no thread is stopped.

Most threads of a rank run no Python, so that py-spy does not see them. Equal waits of threads of
one name are one row: the control machine compares the rows of all ranks. A thread counts as
waiting if it is in the same system call at both looks. A read may hang with the process: the
looks run in `processes.probe_each`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nodeready.agent.stacks import processes, waits
from nodeready.agent.stacks.processes import HANGS, contents, owners, probe_each, stat
from nodeready.core.wire import Count, Line

#: Seconds for one look at all ranks of a node; maximum threads of a rank that are read. A rank
#: with more threads, or with more different rows, is not compared.
_LOOK_S, _MAX_THREADS, MAX_ROWS = 2.0, 8192, 256
_STACK_DEPTH = 12
# A number in a thread's name, also a long hexadecimal one (cuda0000140000a); python3 has none.
_NUMBER = re.compile(r"\d[0-9a-f]{5,}|(?<!python)\d+")
_NAME_BYTES = 15  # maximum of a thread's name (proc(5), /proc/PID/comm)
# The entry into a system call (arch/x86/entry/common.c, arch/arm64/kernel/syscall.c of Linux).
_ENTRY = re.compile(
    r"entry_SYSCALL|do_syscall_64|__(?:x64|arm64|se)_sys_|invoke_syscall|do_el0_svc|el0"
)
# Field of /proc/PID/stat after the name: the CPU on which a thread ran last; when it did, in ms.
_CPU_FIELD, _LAST_RUN = 36, re.compile(r"^se\.exec_start\s*: *([\d.]+)", re.M)
_COMPILER_SUFFIX = re.compile(r"\.(?:constprop|isra|part|cold).*")


@dataclass(frozen=True)
class ThreadWait:
    """How threads of one name wait; one row of the trace for all ranks of the node."""

    VERSIONED: ClassVar = True

    name: Line  # see `group_name`
    state: Line = ""  # as in /proc/PID/stat; "": of threads that run or move
    call: Line = ""  # shown name of the system call; "": not readable, or none
    wait_channel: Line = ""
    number: Count = field(default=0, compare=False)  # of the first such thread
    # of that thread, leaf first; () when not permitted
    kernel_stack: tuple[Line, ...] = field(default=(), compare=False)
    # likewise its native calls, on request
    native: tuple[Line, ...] = field(default=(), compare=False)


#: How threads of one rank wait, and their count.
Row = tuple[ThreadWait, int]


def group_name(name: str) -> str:
    """The name that threads of one sort share.

    >>> [group_name(name) for name in ("pt_autograd_0", "cuda00001400006", "pool-3-thread-7")]
    ['pt_autograd_N', 'cudaN', 'pool-N-thread-N']
    """
    text = _NUMBER.sub("N", name)
    if text != name and len(name.encode("utf-8", "replace")) >= _NAME_BYTES:
        # The kernel has cut off the end, earlier after a longer number.
        text = text[: text.rindex("N") + 1]
    return text


def calls(pid: int) -> dict[str, str]:
    """Thread -> its line in /proc/PID/task/TID/syscall; {}: there are too many threads."""
    task = f"/proc/{pid}/task"
    numbers = os.listdir(task) if os.path.exists(task) else []
    if len(numbers) > _MAX_THREADS:
        return {}
    return {number: contents(f"{task}/{number}/syscall") for number in numbers}


def _rows(pid: int, main: int, earlier: Mapping[str, str]) -> list[list[Any]]:
    """The `Row` of each wait of a rank's further threads. earlier: `calls` at the first look"""
    names = waits.calls(os.uname().machine)
    examples: dict[tuple[str, ...], int] = {}
    counts: dict[tuple[str, ...], int] = {}
    for number, line in calls(pid).items():
        if int(number) == main:
            continue
        task = f"/proc/{pid}/task/{number}"
        parsed = stat(contents(f"{task}/stat"))
        if parsed is None or parsed.state in "ZXx":
            continue
        key: tuple[str, ...] = (group_name(parsed.name), "", "", "")
        word = line.partition(" ")[0]
        channel = _COMPILER_SUFFIX.sub("", contents(f"{task}/wchan").strip()[:100])
        # Of a thread whose call is readable, a channel of 0 means that it has just woken up.
        is_awake = parsed.state == "R" or word == "running" or (word.isdigit() and channel == "0")
        if not is_awake and earlier.get(number) == line:
            call, _ = names.get(int(word), ("", "")) if word.isdigit() else ("", "")
            key = key[0], parsed.state, call, "" if channel == "0" else channel
        examples.setdefault(key, int(number))
        counts[key] = counts.get(key, 0) + 1
    if len(counts) > MAX_ROWS:
        return []
    stacks = {number: _kernel_stack(pid, number) for key, number in examples.items() if key[1]}
    return [[[*key, n, stacks.get(n, ())], counts[key]] for key, n in examples.items()]


def stood_s(pid: int, number: int) -> float:
    """Minimum seconds since a thread last ran; 0: not known. Call it in a fork, which goes to the
    thread's CPU: each CPU has a separate clock for ``se.exec_start``, which stands still while
    the CPU serves interrupts (see `nodeready.subjects.host.mounts`).
    """
    fields = contents(f"/proc/{pid}/task/{number}/stat").rpartition(")")[2].split()
    try:
        os.sched_setaffinity(0, {int(fields[_CPU_FIELD])})
        clock_ms, last_run_ms = (
            float(_LAST_RUN.findall(contents(f"/proc/{task}/sched", 4096))[0])
            for task in ("self", f"{pid}/task/{number}")
        )
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, clock_ms - last_run_ms) / 1000


def state_of(pid: int, number: int) -> str:
    """The state of a thread; "": the process has no such thread, or it has ended."""
    parsed = stat(contents(f"/proc/{pid}/task/{number}/stat"))
    return parsed.state if parsed and parsed.state not in "ZXx" else ""


def _kernel_stack(pid: int, number: int) -> tuple[str, ...]:
    """The functions of the kernel, leaf first, without those that begin every system call."""
    functions = processes.kernel_stack(contents(f"/proc/{pid}/task/{number}/stack"))
    return tuple(function for function in functions if not _ENTRY.match(function))[:_STACK_DEPTH]


def first_look(pids: Iterable[int], deadline: float) -> dict[int, dict[str, str]]:
    """Process -> the calls of all its threads (`calls`); a process that hangs is left out."""
    answers = _look(calls, pids, deadline)
    return {pid: answer for pid, answer in answers.items() if answer is not HANGS}


def observe(
    mains: Mapping[int, int], earlier: Mapping[int, Mapping[str, str]], deadline: float
) -> dict[int, list[Row]]:
    """Process -> the waits of its threads; one that hangs is left out. mains: process -> its main
    thread, which is not counted. earlier: from `first_look`
    """

    def probe(pid: int) -> list[list[Any]]:
        return _rows(pid, mains[pid], earlier.get(pid, {}))

    answers = _look(probe, mains, deadline)
    return {
        pid: [
            (ThreadWait(name, state, call, channel, number, tuple(stack)), count)
            for (name, state, call, channel, number, stack), count in answer
        ]
        for pid, answer in answers.items()
        if answer is not HANGS
    }


def _look(probe: Any, pids: Iterable[int], deadline: float) -> dict[int, Any]:
    numbers = list(pids)
    deadline = min(deadline, time.monotonic() + _LOOK_S)
    return probe_each(probe, numbers, deadline, owners(numbers))

"""How one process stands: the kind, the reason and the verdict of what its trace shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nodeready.places import Places

#: CPU seconds per second below which a process counts as waiting: the heartbeats, watchdogs and
#: loaders of a process that hangs use some; a loop that spins uses all of a core.
IDLE = 0.05
#: The kernel counts CPU time in ticks of 10 ms (USER_HZ): two of them say nothing.
_TICKS_S = 0.025
#: What `capture.py_spy` says of a process that is not there any more.
_GONE = "it has ended"


class Standing(NamedTuple):
    """kind, verdict: as in `nodeready.stacks`. why: for what has no stack to compare.

    stack: number of the main thread's last stack; None: there is none
    """

    kind: str
    verdict: str | None
    why: str
    stack: int | None
    cpu_s: float | None


def standing(
    process: Mapping[str, Any], stacks: Sequence[int], places: Places, interval_s: float
) -> Standing:
    """Judge the samples of one process.

    stacks: the numbers of the trace's stacks. The last sample that has a stack decides where it
    stands, all samples decide whether it moves: another stack is progress; the same one is
    waiting when it used less than 5 % of the time as CPU time, and spinning when it used more.
    """
    cpu = process["cpu_s"]
    used = round(max(0.0, cpu[-1] - cpu[0]), 2) if len(cpu) > 1 else None
    mains = [stacks[one["main"]] for one in process["samples"] if one["main"] is not None]
    stack = mains[-1] if mains else None
    state, note = process["state"][:1], process["note"]
    if state in ("Z", "X", "x") or note.startswith("ended"):
        return Standing("dead", None, _ended(state, note), stack, used)
    if state == "T":
        why = "stopped by a signal (SIGSTOP) or by the scheduler"
        return Standing("stopped", None, why, stack, used)
    if state == "t" or process["tracer"]:
        why = "another process traces it: a debugger, strace"
        return Standing("traced", None, why, stack, used)
    verdict = None
    if len(mains) > 1:
        if not (mains.count(stack) == len(mains) or _stayed(mains, places)):
            verdict = "progressing"
        elif used is not None:
            most = max(_TICKS_S, IDLE * interval_s * (len(cpu) - 1))
            verdict = "blocked" if used < most else "spinning"
    # It was in D for a moment only when it has gone on since.
    if state == "D" and verdict in (None, "blocked"):
        return Standing("uninterruptible", None, _kernel(process), stack, used)
    if stack is None:
        why = _no_stack(process)
        return Standing("dead" if why == _GONE else "no-data", None, why, None, used)
    return Standing("stack", verdict, "", stack, used)


def _stayed(mains: Sequence[int], places: Places) -> bool:
    return all(places.same(mains[0], one) for one in mains[1:])


def _ended(state: str, note: str) -> str:
    if state == "Z":
        return "a zombie: it has ended, and whoever started it has not asked for its status"
    return note or _GONE


def _in_kernel(process: Mapping[str, Any]) -> str:
    """The innermost function in the kernel, or ""."""
    for text in (*process["kernel_stack"][:1], process["wait_channel"]):
        name: str = text.partition("+")[0].strip()
        if name not in ("", "0", "-"):
            return name
    return ""


def _kernel(process: Mapping[str, Any]) -> str:
    name = _in_kernel(process)
    return f"waits in the kernel (state D), in {name}" if name else "waits in the kernel (state D)"


def _no_stack(process: Mapping[str, Any]) -> str:
    """Why there is no stack. Its own pid in a message would make each one a group of its own."""
    errors = [one["error"] for one in process["samples"] if one["error"]]
    why: str = errors[-1] if errors else process["note"] or "no stack was taken"
    if "not python" in why.lower():
        name = _in_kernel(process)
        return (
            "not Python: it runs"
            if process["state"] == "R"
            else (f"not Python: it waits in {name}" if name else "not Python")
        )
    pid = str(process["pid"])
    return " ".join("PID" if word.strip("().,:;") == pid else word for word in why.split())

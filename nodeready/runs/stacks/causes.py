"""What a group of ranks does, in words, and what to look at."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nodeready.agent.stacks.descendants import EXITING
from nodeready.agent.stacks.lock_files import LEFT
from nodeready.agent.stacks.processes import FROZEN
from nodeready.agent.stacks.py_spy import ENDED_INTERPRETER, NO_CALL
from nodeready.core.text import counted
from nodeready.runs.stacks import hints
from nodeready.runs.stacks.classify import THREAD
from nodeready.runs.stacks.document import ChildProcess, Frame, Group, say
from nodeready.runs.stacks.evidence import MAX_LINE, ranks_of
from nodeready.runs.stacks.hints import Cause

#: Maximum characters of a name from a process: only such names are cut, each by itself, so that
#: the line number and the advice behind it remain.
_MAX_NAME = 60
#: State of proc(5) in which a process does nothing, in words.
_HELD_STATES = {
    "T": "a signal has stopped", FROZEN: "its cgroup has frozen", "t": "a tracer holds",
    "Z": "has ended", "X": "has ended",
}  # fmt: skip
#: Waits that add nothing to the state; the number of processes behind a wait of a group.
_TRIVIAL_WAITS, _COUNT_SUFFIX = ("futex", "sleep"), re.compile(r" \(\d+\)$")
#: The path of a lock file that an ended process has left, in a wait; a path in any wait.
_LEFT_LOCK, _PATH = re.compile(rf"lock of (.*?){LEFT}( \(\d+\))?"), re.compile(r"/\S*")


def cut(text: str, limit: int = _MAX_NAME) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def place_text(frame: Frame) -> str:
    function, file = cut(frame.function), cut(frame.file.rpartition("/")[2])
    return f"{function} {file}:{frame.line}" if frame.line else function


def position(group: Group) -> str:
    """The innermost call of the user, else of all, as in ``load data.py:33``; "": no call."""
    frame = group.user_frame or (group.frames[-1] if group.frames else None)
    return place_text(frame) if frame else ""


def call_of(frames: Sequence[Frame]) -> str:
    """The collective that a stack waits in: the outermost call of a library, else its leaf."""
    for frame in frames:
        if frame.file.endswith(hints.COLLECTIVE_FILES) and not frame.function.startswith("_"):
            return cut(frame.function.rpartition(".")[2])
    return cut(frames[-1].function) if frames else ""


def called(group: Group) -> str:
    """A call with the user's line, as in ``all_gather at step train.py:40``."""
    call, frame = call_of(group.frames) or group.kind, group.user_frame
    if frame is None:
        return call
    return place_text(frame) if group.frames[-1] == frame else f"{call} at {place_text(frame)}"


def place_of_call(group: Group) -> tuple[str, tuple[int, ...]]:
    """The call that a group waits in, and of a collective the lines of the user's calls that lead
    to it: one collective at two places is called twice. A send and its receive are at two places,
    and ranks may wait for their GPUs anywhere.
    """
    is_paired = group.activity != "collective" or hints.in_pipeline(group.frames)
    call = call_of(group.frames) or group.kind
    return call, () if is_paired else hints.call_site(group.frames)


def awaited_object(group: Group) -> str:
    """What all ranks of a group wait for in the kernel; "": different objects, or none to name."""
    held = _COUNT_SUFFIX.sub("", group.waits_on[0]) if len(group.waits_on) == 1 else ""
    return "" if held.startswith(_TRIVIAL_WAITS) else cut(held, MAX_LINE)


def left_lock(group: Group) -> str:
    """The lock file of an ended process that all ranks wait for in a library; "": none"""
    is_known = group.activity == "file-lock" and group.frames[-1:] != (group.user_frame,)
    lock = _LEFT_LOCK.fullmatch(group.waits_on[0]) if is_known and group.waits_on else None
    return lock[1] if lock and len(group.waits_on) == 1 else ""


def opens_pipe(group: Group) -> bool:
    """Whether all ranks open a pipe without another end (wait_for_partner of Linux fs/pipe.c)."""
    return bool(group.states) and all("wait_for_partner" in state for state in group.states)


def ends_program(group: Group) -> bool:
    """Whether the ranks of a group are at the ends of their programs."""
    main = group.frames[: group.frames.index(THREAD)] if THREAD in group.frames else group.frames
    return group.no_stack_reason in (ENDED_INTERPRETER, EXITING, NO_CALL) or hints.is_at_exit(main)


def cause_of(group: Group) -> Cause:
    """The action of a group that waits for no rank, and the advice."""
    at, kernel = position(group), _PATH.sub("", " ".join((*group.states, *group.waits_on)))
    cause, held = hints.CAUSES.get(group.kind), ""
    if cause is None and group.kind == "uninterruptible":
        _, separator, place = group.no_stack_reason.rpartition(", in ")
        held = f"{f' in {cut(place)}' if separator else ''}{f' at {at}' if at else ''}"
        cause = Cause("storage", "state D", "look at its mounts, devices and dmesg")
    elif cause is None and (lock := left_lock(group)):
        cause, held = hints.CAUSES["left lock"], f": {lock}"
    elif cause is None and (of_child := child_cause(group, at)):
        return of_child
    elif cause is None and hints.STORAGE_WORDS.search(f"{group.no_stack_reason} {kernel}"):
        cause = hints.CAUSES["file system"]
    elif cause is None:
        cause = hints.CAUSES.get(group.verdict or "")
        awaited = awaited_object(group) if cause is None else ""
        cause = cause or hints.CAUSES.get(group.activity) or hints.CAUSES["other"]
        held = f", waiting for {awaited}" if awaited and cause.kind == "late" else ""
    return cause._replace(action=say(cause.action, max(1, len(group.ranks)), place=at) + held)


def waits_for_held_child(group: Group) -> bool:
    """Whether a group waits for a descendant that has stopped or ended."""
    is_waiting = group.activity in ("child", "data")
    return is_waiting and any(child.state[:1] in _HELD_STATES for child in group.children)


def _awaited_child(group: Group) -> ChildProcess | None:
    """The first process with a stack that a group has started and waits for."""
    children = group.children if group.activity == "child" else ()
    return next((child for child in children if child.frames), None)


def _child_place(child: ChildProcess) -> str:
    return place_text(hints.user_frame(child.frames) or child.frames[-1])


def running_child(group: Group) -> str:
    """The place of the started process that a group waits for, if it computes; "": none"""
    child = _awaited_child(group)
    return _child_place(child) if child and child.state.startswith("R") else ""


def child_cause(group: Group, at: str) -> Cause | None:
    """The cause where a rank waits for a process that it started. at: its innermost call"""
    is_loading = group.activity == "data"
    for child in group.children if waits_for_held_child(group) else ():
        if how := _HELD_STATES.get(child.state[:1]):
            name = child.kind if child.kind == "loader worker" else cut(child.command)
            action = f"waits for its child process that {how}: {name}"
            return Cause("late", action, "find the cause in its last output")
    if inner := _awaited_child(group):
        part = f" ({ranks_of(inner.ranks)})" if {*inner.ranks} < {*group.ranks} else ""
        action = f"waits for its child process in {_child_place(inner)}{part}"
        return Cause("late", action, "look there")
    # Workers that fetch ahead stand still as well while their rank is elsewhere.
    for child in group.children if is_loading or not group.frames else ():
        if child.kind == "loader worker" and not hints.is_idle_worker(child.hint):
            channel = cut(child.wait_channel)
            held = f"state {child.state[:1]} in {channel}" if channel else ""
            words = f"{child.wait_channel} {child.waits_on}"
            fs = child.state.startswith("D") or hints.STORAGE_WORDS.search(words)
            place = place_text(child.frames[-1]) if child.frames and not (fs and held) else held
            workers = counted(child.processes, "loader worker")
            action = f"waits for {workers}{f' ({place})' if place else ''}"
            kind, part = ("storage", "file system") if fs else ("loader", "stacks")
            return Cause(kind, action, f"look at the workers' {part}")
    cause = hints.CAUSES["data"]
    return cause._replace(action=say(cause.action, 1, place=at)) if is_loading else None

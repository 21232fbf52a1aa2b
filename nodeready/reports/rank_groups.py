"""The words for a group of ranks, the same in every report of stacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nodeready.text import counted
from nodeready.triage.stacks.document import Frame, Group, Rank, Stacks, fold_ranks

#: The kinds of groups that a person reads under another word than their own.
_WORDS = {"uninterruptible": "state D", "no-data": "no data"}


def word(group: Group) -> str:
    """The kind of a group, of a stack its verdict, in at most 11 characters."""
    if group.kind == "stack":
        return group.verdict or "stack"
    return _WORDS.get(group.kind, group.kind)


def role(group: Group) -> str:
    """What a group is in the hang, in one word; "": nobody can tell."""
    return group.role or ""


def ranks(numbers: Sequence[int], limit: int = 1_000_000) -> str:
    """``rank 7``, ``ranks 0-6,8-511``; a very long list is cut, with the count; "" for none."""
    if len(numbers) < 2:
        return f"rank {numbers[0]}" if numbers else ""
    text = f"ranks {fold_ranks(numbers)}"
    if len(text) <= limit:
        return text
    more = f"... ({len(numbers)} ranks)"
    return text[: text.rfind(",", 0, max(8, limit - len(more))) + 1 or None] + more


def who(group: Group, limit: int = 1_000_000) -> str:
    """The ranks of a group; how many processes where they have none; "" for a node alone."""
    lone = group.processes - len(group.ranks)
    if not group.ranks:
        return counted(group.processes, "process", "processes") if group.processes else ""
    if lone <= 0:
        return ranks(group.ranks, limit)
    return f"{ranks(group.ranks, limit)} and {counted(lone, 'process', 'processes')}"


def place(frame: Frame) -> str:
    """``loader.py:88``; without the line where there is none."""
    return f"{frame.file}:{frame.line}" if frame.line else frame.file


def largest(stacks: Stacks) -> Group | None:
    """The stack that most processes have: the other groups are compared with this one."""
    found = [group for group in stacks.groups if group.kind == "stack"]
    return max(found, key=lambda group: group.processes, default=None)


def begun(stacks: Stacks) -> set[int]:
    """The indexes of the groups from whose place another group has gone on.

    Its path is the beginning of the other's, from the same lines, and in the last function that
    both are in the other is at a later line. At the same line nobody knows who came first; at an
    earlier one the other has not been here yet, or is in another turn of a loop.
    """
    paths = {
        number: tuple((frame.function, frame.file) for frame in group.frames)
        for number, group in enumerate(stacks.groups)
        if group.kind == "stack" and group.frames
    }
    # In sorted order, the paths that begin with one stand right behind it.
    ordered = sorted(paths, key=lambda number: paths[number])
    found = set()
    for at, number in enumerate(ordered):
        frames = stacks.groups[number].frames
        for other in ordered[at + 1 : at + 1 + _COMPARED]:
            if paths[other][: len(frames)] != paths[number]:
                break
            if len(paths[other]) > len(frames) and _later(frames, stacks.groups[other].frames):
                found.add(number)
                break
    return found


#: Groups behind one in the order of paths that are compared with it.
_COMPARED = 64


def _later(frames: Sequence[Frame], others: Sequence[Frame]) -> bool:
    """Whether a deeper stack has left the function in which the shorter one stands, further on."""
    *above, last = frames
    same = all(own.line == one.line and own.line for own, one in zip(above, others))
    return same and 0 < last.line < others[len(above)].line


def process(one: Rank) -> str:
    """``pid 4711, state S in futex_wait_queue, 0.01 s CPU``."""
    waits = f" in {one.wait_channel[:60]}" if one.wait_channel not in ("", "0") else ""
    parts = [f"pid {one.pid}"]
    if one.state:
        parts.append(f"state {one.state[:20]}{waits}")
    if one.cpu_s is not None:
        parts.append(f"{one.cpu_s:.2f} s CPU")
    if one.note:
        parts.append(one.note)
    return ", ".join(parts)


def headline(stacks: Stacks) -> str:
    """Which job, how many of its ranks were found and where, and in how many places they stand."""
    known = {one.rank for one in stacks.processes if one.rank is not None}
    lone = sum(one.rank is None for one in stacks.processes)
    where = counted(len({one.node for one in stacks.processes}), "node")
    size = stacks.world_size
    shared = stacks.user and any(one.user != stacks.user for one in stacks.others)
    whose = f" of {stacks.user[:60]}" if shared else ""
    job = f"job {stacks.job[:60]}{whose}: " if stacks.job else ""
    groups = stacks.groups
    if not stacks.processes:
        return f"{job}no rank was found" + (f" of {size}" if size else "")
    if len(groups) == 1 and groups[0].kind == "stack" and known and size in (None, len(known)):
        who_ = f"all {len(known)} ranks" if len(known) > 1 else "the only rank"
        found = "" if size else " that were found" if len(known) > 1 else " that was found"
        stands = "stand" if len(known) > 1 else "stands"
        does = f"{stands} in {_one_place(groups[0])}"
        if groups[0].verdict == "progressing":
            does = "move" if len(known) > 1 else "moves"
        return f"{job}{who_}{found} {does}, on {where}"
    found = f"{len(known)} of {size} ranks" if size else counted(len(known), "rank")
    if size == len(known):
        found = f"all {size} ranks"
    if not known and lone:
        found = counted(lone, "process", "processes") + " without a rank"
    elif lone:
        found += f" and {counted(lone, 'process', 'processes')} without a rank"
    return f"{job}{found} found on {where}, in {counted(len(groups), 'group')}"


def _one_place(group: Group) -> str:
    """Where all ranks stand, when they are one group."""
    return "one collective" if group.about == "collective" else "one place"


def silent(stacks: Stacks) -> Iterator[tuple[str, str]]:
    """Nodes without an answer that no group names, each with the reason."""
    named = {node for group in stacks.groups if group.kind == "no-data" for node in group.nodes}
    return ((node, why) for node, why in stacks.errors.items() if node not in named)

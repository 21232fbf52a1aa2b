"""Words for groups of ranks, the same in every report of stacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nodeready import hints
from nodeready.reports.text import counted
from nodeready.stacks import Frame, Group, Rank, Stacks, fold_ranks

#: What the kinds of groups are called where a person reads; a stack is called by its verdict.
_WORDS = {"uninterruptible": "state D", "no-data": "no data"}


def word(group: Group) -> str:
    """What kind of group it is, in one or two words of at most 11 characters."""
    if group.kind == "stack":
        return group.verdict or "stack"
    return _WORDS.get(group.kind, group.kind)


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
    """The stack that most processes have: what the others are compared with."""
    found = [group for group in stacks.groups if group.kind == "stack"]
    return max(found, key=lambda group: group.processes, default=None)


def begun(stacks: Stacks) -> set[int]:
    """The groups (by index) whose path is the beginning of another's: others have gone on."""
    paths = {
        number: tuple((frame.function, frame.file) for frame in group.frames)
        for number, group in enumerate(stacks.groups)
        if group.kind == "stack"
    }
    # What begins with a path stands right after it, when they are in order.
    ordered = sorted(set(paths.values()))
    short = {one for one, after in zip(ordered, ordered[1:]) if after[: len(one)] == one}
    return {number for number, path in paths.items() if path in short}


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
    job = f"job {stacks.job[:60]}: " if stacks.job else ""
    groups = stacks.groups
    if not stacks.processes:
        return f"{job}no rank was found" + (f" of {size}" if size else "")
    if len(groups) == 1 and groups[0].kind == "stack" and known and size in (None, len(known)):
        who_ = f"all {len(known)} ranks" if len(known) > 1 else "the only rank"
        found = "" if size else " that were found" if len(known) > 1 else " that was found"
        stand = "stand" if len(known) > 1 else "stands"
        return f"{job}{who_}{found} {stand} in {_place(groups[0])}, on {where}"
    found = f"{len(known)} of {size} ranks" if size else counted(len(known), "rank")
    if size == len(known):
        found = f"all {size} ranks"
    if not known and lone:
        found = counted(lone, "process", "processes") + " without a rank"
    elif lone:
        found += f" and {counted(lone, 'process', 'processes')} without a rank"
    return f"{job}{found} found on {where}, in {counted(len(groups), 'group')}"


def _place(group: Group) -> str:
    """What all of them are in."""
    known = hints.find(group.frames, group.native)
    return "one collective" if known is hints.COLLECTIVE else "one place"


def silent(stacks: Stacks) -> Iterator[tuple[str, str]]:
    """Nodes without an answer that no group names, each with the reason."""
    named = {node for group in stacks.groups if group.kind == "no-data" for node in group.nodes}
    return ((node, why) for node, why in stacks.errors.items() if node not in named)

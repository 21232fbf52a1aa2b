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
    """The role of a group in the hang, in one word; "": not known."""
    return group.role or ""


def ranks(numbers: Sequence[int], limit: int = 1_000_000) -> str:
    """``rank 7``, ``ranks 0-6,8-511``; a very long list is cut, with the count; "" for none."""
    if len(numbers) < 2:
        return f"rank {numbers[0]}" if numbers else ""
    text = f"ranks {fold_ranks(numbers)}"
    if len(text) <= limit:
        return text
    ending = f"... ({len(numbers)} ranks)"
    return text[: text.rfind(",", 0, max(8, limit - len(ending))) + 1 or None] + ending


def members(group: Group, limit: int = 1_000_000) -> str:
    """The ranks of a group; how many processes where they have none; "" for a node alone."""
    lone = group.processes - len(group.ranks)
    if not group.ranks:
        return counted(group.processes, "process", "processes") if group.processes else ""
    if lone <= 0:
        return ranks(group.ranks, limit)
    return f"{ranks(group.ranks, limit)} and {counted(lone, 'process', 'processes')}"


def place(frame: Frame) -> str:
    """``loader.py:88``; without an unknown line."""
    return f"{frame.file}:{frame.line}" if frame.line else frame.file


def largest(stacks: Stacks) -> Group | None:
    """The group of most processes with a stack, the reference of all groups."""
    groups = [group for group in stacks.groups if group.kind == "stack"]
    return max(groups, key=lambda group: group.processes, default=None)


def overtaken(stacks: Stacks) -> set[int]:
    """The indexes of the groups that another group has overtaken.

    Group B has overtaken group A if the path of A is the beginning of the path of B, from the same
    lines, and B is at a later line of the last shared function. At the same line, the order is not
    known; an earlier line may be another iteration of a loop.
    """
    paths = {
        number: tuple((frame.function, frame.file) for frame in group.frames)
        for number, group in enumerate(stacks.groups)
        if group.kind == "stack" and group.frames
    }
    # In sorted order, a path is followed by those that begin with it.
    ordered = sorted(paths, key=lambda number: paths[number])
    numbers = set()
    for at, number in enumerate(ordered):
        frames = stacks.groups[number].frames
        for other in ordered[at + 1 : at + 1 + _COMPARED]:
            if paths[other][: len(frames)] != paths[number]:
                break
            if len(paths[other]) > len(frames) and _later(frames, stacks.groups[other].frames):
                numbers.add(number)
                break
    return numbers


#: Groups behind one in the order of paths that are compared with it.
_COMPARED = 64


def _later(frames: Sequence[Frame], deeper: Sequence[Frame]) -> bool:
    """Whether a deeper stack has left the function in which the shorter one stands, further on."""
    *callers, last = frames
    same = all(caller.line == call.line and caller.line for caller, call in zip(callers, deeper))
    return same and 0 < last.line < deeper[len(callers)].line


def process(rank: Rank) -> str:
    """``pid 4711, state S in futex_wait_queue, 0.01 s CPU``."""
    waits = f" in {rank.wait_channel[:60]}" if rank.wait_channel not in ("", "0") else ""
    parts = [f"pid {rank.pid}"]
    if rank.state:
        parts.append(f"state {rank.state[:20]}{waits}")
    if rank.cpu_s is not None:
        parts.append(f"{rank.cpu_s:.2f} s CPU")
    if rank.note:
        parts.append(rank.note)
    return ", ".join(parts)


def processes_by_group(stacks: Stacks) -> dict[int, list[Rank]]:
    """The processes of each group, by its index."""
    by_group: dict[int, list[Rank]] = {}
    for process_ in stacks.processes:
        by_group.setdefault(process_.group, []).append(process_)
    return by_group


def headline(stacks: Stacks) -> str:
    """Which job, how many of its ranks were found and where, and in how many places they stand."""
    numbers = {rank.rank for rank in stacks.processes if rank.rank is not None}
    lone = sum(rank.rank is None for rank in stacks.processes)
    nodes_ = counted(len({rank.node for rank in stacks.processes}), "node")
    size = stacks.world_size
    shared = stacks.user and any(other_job.user != stacks.user for other_job in stacks.other_jobs)
    owner = f" of {stacks.user[:60]}" if shared else ""
    job = f"job {stacks.job[:60]}{owner}: " if stacks.job else ""
    groups = stacks.groups
    if not stacks.processes:
        return f"{job}no rank was found" + (f" of {size}" if size else "")
    if len(groups) == 1 and groups[0].kind == "stack" and numbers and size in (None, len(numbers)):
        who_ = f"all {len(numbers)} ranks" if len(numbers) > 1 else "the only rank"
        found_text = "" if size else " that were found" if len(numbers) > 1 else " that was found"
        stands = "stand" if len(numbers) > 1 else "stands"
        does = f"{stands} in {_one_place(groups[0])}"
        if groups[0].verdict == "progressing":
            does = "move" if len(numbers) > 1 else "moves"
        return f"{job}{who_}{found_text} {does}, on {nodes_}"
    found_text = f"{len(numbers)} of {size} ranks" if size else counted(len(numbers), "rank")
    if size == len(numbers):
        found_text = f"all {size} ranks"
    if not numbers and lone:
        found_text = counted(lone, "process", "processes") + " without a rank"
    elif lone:
        found_text += f" and {counted(lone, 'process', 'processes')} without a rank"
    return f"{job}{found_text} found on {nodes_}, in {counted(len(groups), 'group')}"


def _one_place(group: Group) -> str:
    """Where all ranks stand, when they are one group."""
    return "one collective" if group.activity == "collective" else "one place"


def silent(stacks: Stacks) -> Iterator[tuple[str, str]]:
    """Nodes without an answer that no group names, each with the reason."""
    named = {node for group in stacks.groups if group.kind == "no-data" for node in group.nodes}
    return ((node, reason) for node, reason in stacks.errors.items() if node not in named)

"""The words for a group of ranks, and the rows of the merged tree, the same in every report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nodeready.core.outcome import NodeGap
from nodeready.core.text import counted
from nodeready.runs.stacks.document import (
    Frame,
    Group,
    JobTree,
    Rank,
    Stacks,
    fold_ranks,
    tree,
)

#: Kinds of groups -> their words for a person, where these differ.
_WORDS = {"uninterruptible": "state D", "no-data": "no data"}
#: Maximum groups after a group, in the order of paths, that are compared with it.
_MAX_COMPARED = 64
_RANKS = 30  # maximum characters of the ranks of a system call


def word(group: Group) -> str:
    """The verdict of a group of stacks, or the kind of another group: at most 11 characters."""
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
    ending = f"... ({len(numbers)} ranks)"
    return text[: text.rfind(",", 0, max(8, limit - len(ending))) + 1 or None] + ending


def members(group: Group, limit: int = 1_000_000) -> str:
    """The ranks of a group, and the number of its processes without a rank; "": it has none."""
    rankless = group.processes - len(group.ranks)
    further = counted(rankless, "process", "processes") if rankless > 0 else ""
    return " and ".join(filter(None, (ranks(group.ranks, limit), further)))


def place(frame: Frame) -> str:
    """``loader.py:88``; without an unknown line."""
    return f"{frame.file}:{frame.line}" if frame.line else frame.file


def largest(stacks: Stacks) -> Group | None:
    """The group of most processes with a stack, the reference of all groups."""
    groups = [group for group in stacks.groups if group.kind == "stack"]
    return max(groups, key=lambda group: group.processes, default=None)


def overtaken(stacks: Stacks) -> set[int]:
    """The indexes of the groups that another group has overtaken. Group B has overtaken group A if
    the path of A is the beginning of the path of B, from the same lines, and B is at a later line
    of the last shared function. At the same line, the order is not known; an earlier line may be
    another iteration of a loop.
    """
    paths = {
        number: tuple((frame.function, frame.file) for frame in group.frames)
        for number, group in enumerate(stacks.groups)
        if group.kind == "stack" and group.frames
    }
    # In sorted order, a path is followed by those that begin with it.
    ordered = sorted(paths, key=lambda number: paths[number])
    numbers = set()
    for index, number in enumerate(ordered):
        frames = stacks.groups[number].frames
        for other in ordered[index + 1 : index + 1 + _MAX_COMPARED]:
            if paths[other][: len(frames)] != paths[number]:
                break
            if len(paths[other]) > len(frames) and _is_later(frames, stacks.groups[other].frames):
                numbers.add(number)
                break
    return numbers


def _is_later(frames: Sequence[Frame], deeper: Sequence[Frame]) -> bool:
    """Whether a deeper stack is at a later line of the function in which ``frames`` ends."""
    *callers, last = frames
    same = all(caller.line == call.line and caller.line for caller, call in zip(callers, deeper))
    return same and 0 < last.line < deeper[len(callers)].line


def process(rank: Rank) -> str:
    """``pid 4711, state S in futex_wait_queue, 0.01 s CPU``."""
    waits = f" in {rank.wait_channel[:60]}" if rank.wait_channel not in ("", "0") else ""
    state = f"state {rank.state[:20]}{waits}" if rank.state else ""
    cpu = f"{rank.cpu_s:.2f} s CPU" if rank.cpu_s is not None else ""
    return ", ".join(filter(None, (f"pid {rank.pid}", state, cpu, rank.note)))


def call_texts(group: Group) -> list[str]:
    """The system calls of a group, a line each: ``49,210/s  read  pipe of pid 55  rank 3``."""
    texts = []
    for row in group.system_calls:
        owner = ranks(row.ranks, _RANKS) if set(row.ranks) != set(group.ranks) else ""
        rate = row.calls / (row.seconds or 1)
        text = f"{rate:,.0f}/s  {row.call}" if row.call else "none: it computes"
        texts.append("  ".join(filter(None, (text, row.object, owner))))
    return texts


def processes_by_group(stacks: Stacks) -> dict[int, list[Rank]]:
    """The processes of each group, by its index."""
    by_group: dict[int, list[Rank]] = {}
    for rank in stacks.processes:
        by_group.setdefault(rank.group, []).append(rank)
    return by_group


def headline(stacks: Stacks) -> str:
    """The job, how many of its ranks were found and where, and the number of their groups."""
    found_count = len({rank.rank for rank in stacks.processes if rank.rank is not None})
    rankless = sum(rank.rank is None for rank in stacks.processes)
    nodes = counted(len({rank.node for rank in stacks.processes}), "node")
    size = stacks.world_size
    is_shared = stacks.user and any(job.user != stacks.user for job in stacks.other_jobs)
    owner = f" of {stacks.user[:60]}" if is_shared else ""
    job = f"job {stacks.job[:60]}{owner}: " if stacks.job else ""
    groups = stacks.groups
    if not stacks.processes:
        return f"{job}no rank was found" + (f" of {size}" if size else "")
    is_one_group = len(groups) == 1 and groups[0].kind == "stack"
    if is_one_group and found_count and size in (None, found_count):
        return f"{job}{_one_group(groups[0], found_count, is_complete=bool(size))}, on {nodes}"
    texts = []
    if found_count:
        of_size = f"{found_count} of {size} ranks" if size else counted(found_count, "rank")
        all_ranks = "the only rank" if size == 1 else f"all {size} ranks"
        texts.append(all_ranks if size == found_count else of_size)
    if rankless:
        texts.append(f"{counted(rankless, 'process', 'processes')} without a rank")
    return f"{job}{' and '.join(texts)} found on {nodes}, in {counted(len(groups), 'group')}"


def _one_group(group: Group, rank_count: int, *, is_complete: bool) -> str:
    """``all 8 ranks stand in one collective``. is_complete: the job has no other ranks"""
    is_single = rank_count == 1
    ranks_text = "the only rank" if is_single else f"all {rank_count} ranks"
    if not is_complete:
        ranks_text += " that was found" if is_single else " that were found"
    if group.verdict == "progressing":
        return f"{ranks_text} {'moves' if is_single else 'move'}"
    place_text = "one collective" if group.activity == "collective" else "one place"
    return f"{ranks_text} {'stands' if is_single else 'stand'} in {place_text}"


def silent(stacks: Stacks) -> Iterator[NodeGap]:
    """The gaps of nodes that no group names."""
    named = {node for group in stacks.groups if group.kind == "no-data" for node in group.nodes}
    return (gap for gap in stacks.gaps if gap.node not in named)


# --- The merged tree: a row has the calls that the same processes share.


class Branch(NamedTuple):
    """A row of the merged tree: calls without a branch between them."""

    frames: tuple[Frame, ...]  # root to leaf; () for a row that stands for hidden branches
    processes: int
    ranks: tuple[int, ...]
    groups: tuple[int, ...]
    # whether it is the last of its siblings: of each branch above, the outermost first, and of it
    lasts: tuple[bool, ...]
    ends: int  # number of the branch's processes that stand at its last call
    width: int  # digits of the largest number of processes among the siblings
    hidden: int = 0  # number of branches that the row stands for

    @property
    def depth(self) -> int:
        """Number of the branches above it."""
        return len(self.lasts) - 1


def _chain(node: JobTree) -> tuple[tuple[Frame, ...], JobTree]:
    """The calls from ``node`` up to the next branch, and the tree's node at that branch."""
    frames = []
    while True:
        if node.frame is not None:
            frames.append(node.frame)
        if len(node.children) != 1 or node.children[0].processes != node.processes:
            return tuple(frames), node
        node = node.children[0]


def branches(stacks: Stacks, max_branches: int, max_depth: int) -> Iterator[Branch]:
    """The rows of the merged tree, a branch before the branches below it; without recursion,
    because ranks in a recursive function make a tree that is hundreds of branches deep.

    max_branches: maximum number of siblings; one row stands for the hidden ones
    max_depth:    maximum number of nested branches
    """
    root = tree(stacks)
    starts = root.children if root.frame is None else (root,)
    waiting: list[tuple[JobTree | list[JobTree], tuple[bool, ...], int]] = []

    def push(children: tuple[JobTree, ...], lasts: tuple[bool, ...]) -> None:
        shown = 0 if len(lasts) >= max_depth else min(len(children), max_branches)
        width = max((len(str(child.processes)) for child in children), default=0)
        if children[shown:]:
            waiting.append((list(children[shown:]), (*lasts, True), width))
        for child in reversed(children[:shown]):
            waiting.append((child, (*lasts, child is children[-1]), width))

    push(starts, ())
    while waiting:
        node, lasts, width = waiting.pop()
        if isinstance(node, list):
            count = sum(hidden.processes for hidden in node)
            yield Branch((), count, (), (), lasts, 0, width, len(node))
            continue
        frames, end = _chain(node)
        ends = end.processes - sum(child.processes for child in end.children)
        yield Branch(frames, node.processes, node.ranks, node.groups, lasts, ends, width)
        push(end.children, lasts)

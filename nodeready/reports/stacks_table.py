"""Where the ranks stand, on a terminal: the most suspicious group first, the others in short.

The words for a group of ranks, and the merged tree of all stacks, are the same in every report of
stacks. In the tree, calls that the same processes share are one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from nodeready.reports.registry import (
    PLAIN,
    STYLES,
    Line,
    Options,
    Part,
    alike,
    line,
    nodes,
    reasons,
)
from nodeready.text import counted, sanitise
from nodeready.triage import incident as kept
from nodeready.triage.stacks.debuggable import Debuggable
from nodeready.triage.stacks.document import Frame, Group, JobTree, Rank, Stacks, fold_ranks, tree
from nodeready.triage.stacks.hints import user_frame

#: Groups that are shown with their path, and in a line each, without -v.
_FULL, _MOST = 6, 16
#: Frames that are shown without -v: at the end of a path, and where the path leaves the others;
#: of a path that leaves no other, and of the largest group's.
_ENDS, _LEAVES, _SHORT, _SHORTEST = 5, 2, 4, 2
#: Other threads of a group that are shown without -v.
_THREADS = 4
#: A group of at most so many processes shows each of them without -v.
_FEW = 2
#: Branches of the merged tree that are shown without -v at one place, and one below the other.
_BRANCHES, _DEEPEST = 4, 5
#: The witnesses that a person reads under another word than their own.
_NAMES = {"flight_recorder": "flight recorder", "nccl_ras": "NCCL RAS", "gpu": "GPU"}
#: Sorts of processes below a group, its variables and its different texts, without -v.
_CHILDREN, _LOCALS, _TEXTS = 3, 8, 3
#: Columns of the words on the left; at most of the ranks, of the nodes beside them, of a function.
_INDENT, _ROLE, _WHO, _NODES, _NAME = 13, 9, 30, 160, 40
#: Characters of a text that are shown without -v; of a name in any case.
_TEXT, _LONG = 500, 120
_WHOLE = 1_000_000
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


class Branch(NamedTuple):
    """A row of the merged tree: calls without a branch between them.

    frames: root to leaf; () for a row that stands for branches that are not shown
    lasts:  whether a branch is the last one at its place, for every branch above this one and for
            this one, the outermost first
    ends:   how many of the branch's processes stand at its last call
    width:  digits of the largest number of processes at this place
    hidden: how many branches the row stands for
    """

    frames: tuple[Frame, ...]
    processes: int
    ranks: tuple[int, ...]
    groups: tuple[int, ...]
    lasts: tuple[bool, ...]
    ends: int
    width: int
    hidden: int = 0

    @property
    def depth(self) -> int:
        """How many branches are above it."""
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


def branches(stacks: Stacks, most: int, deepest: int) -> Iterator[Branch]:
    """The rows of the merged tree, a branch in front of the branches below it.

    No recursion: ranks that are in a recursive function make a tree that is hundreds of branches
    deep.

    most:    branches that are shown at one place; one row stands for the others
    deepest: branches that are shown one below the other
    """
    root = tree(stacks)
    starts = root.children if root.frame is None else (root,)
    waiting: list[tuple[JobTree | list[JobTree], tuple[bool, ...], int]] = []

    def put(children: tuple[JobTree, ...], lasts: tuple[bool, ...]) -> None:
        shown = len(children) if len(children) <= most else most
        if len(lasts) >= deepest:
            shown = 0
        width = max((len(str(child.processes)) for child in children), default=0)
        if children[shown:]:
            waiting.append((list(children[shown:]), (*lasts, True), width))
        for child in reversed(children[:shown]):
            last = child is children[-1]
            waiting.append((child, (*lasts, last), width))

    put(starts, ())
    while waiting:
        node, lasts, width = waiting.pop()
        if isinstance(node, list):
            count = sum(one.processes for one in node)
            yield Branch((), count, (), (), lasts, 0, width, len(node))
            continue
        frames, end = _chain(node)
        ends = end.processes - sum(child.processes for child in end.children)
        yield Branch(frames, node.processes, node.ranks, node.groups, lasts, ends, width)
        put(end.children, lasts)


def _function(frame: Frame) -> str:
    return sanitise(frame.function, _LONG)


def _place(frame: Frame) -> str:
    return sanitise(place(frame), _LONG)


def _brief(frame: Frame) -> str:
    """A call without the directory of its file."""
    return f"{_function(frame)} {_place(frame._replace(file=frame.file.rpartition('/')[2]))}"


def _few(texts: Sequence[str]) -> str:
    """The first texts on one line."""
    shown = [sanitise(text, _LONG) for text in texts[:_TEXTS]]
    return ", ".join([*shown, *(["..."] if texts[_TEXTS:] else [])])


class _Table:
    """The layout of one table.

    room:    columns for the ranks
    largest: the group that the others are compared with
    """

    def __init__(self, stacks: Stacks, options: Options) -> None:
        self.verbose, self.width = options.verbose, options.width
        self.largest = largest(stacks)
        self.who = [who(group, _WHOLE if self.verbose else _WHO) for group in stacks.groups]
        self.room = min(max(map(len, self.who), default=0), _WHO)
        self.begun = begun(stacks)
        self.roles = any(group.role for group in stacks.groups)
        self.processes: dict[int, list[Rank]] = {}
        for one in stacks.processes:
            self.processes.setdefault(one.group, []).append(one)

    def head(self, group: Group, number: int, more: str = "") -> Line:
        """``blocked      rank 7           gpu001``."""
        kind = word(group)
        style = STYLES[group.role if group.role == "victim" else group.verdict or group.kind]
        played = f"{role(group):<{_ROLE}}" if self.roles else ""
        ranked = f"{self.who[number]:<{self.room}}  " if self.room else ""
        left = self.width - _INDENT - len(played) - len(ranked) - len(more)
        room = max(20, min(left, _NODES))
        names = nodes(group.nodes, _WHOLE if self.verbose else room) if group.nodes else ""
        return line(
            (f"{kind:<{_INDENT}}", style),
            (played, STYLES[group.role] if group.role else ""),
            (ranked, "bold"),
            names,
            more,
        )

    def below(self, *parts: Part) -> Line:
        text = line(" " * _INDENT, *parts)
        return text if self.verbose else text.cut(_TEXT)

    def one(self, text: Line) -> Line:
        """A row, cut to the width of the screen; in a pipe, only a very long row is cut."""
        if self.verbose or len(text.plain) <= min(self.width, _TEXT):
            return text
        return text.cut(min(self.width, _TEXT) - 3)

    def frames(self, group: Group, number: int) -> Iterator[Line]:
        """The path, innermost first; ``>`` marks the calls in which no larger group has been."""
        apart = group is not self.largest and group.fork < len(group.frames)
        fork = group.fork if apart else len(group.frames)
        rows = [
            (">" if at >= fork else " ", _function(frame), _place(frame))
            for at, frame in reversed(list(enumerate(group.frames)))
        ]
        left = 0
        if not self.verbose:
            # The last shared frame is shown as well: there the path leaves the others.
            most = _SHORTEST if group is self.largest else _SHORT
            rows = rows[: len(rows) - fork + 1] if apart else rows[:most]
            left = len(rows) - _ENDS - _LEAVES
        width = min(max((len(name) for _, name, _ in rows), default=0), _NAME)
        for at, (mark, name, place) in enumerate(rows):
            if left > 1 and at >= _ENDS and at < _ENDS + left:
                if at == _ENDS:
                    yield self.below((f"{mark} ... {left} more (-v shows them)", "dim"))
                continue
            style = "bold" if mark == ">" else ""
            yield self.below((f"{mark} ", STYLES["warn"]), (f"{name:<{width}}  ", style), place)
        if number in self.begun:
            yield self.below(("  others have gone on from here", "dim"))

    def beside(self, group: Group) -> Iterator[Line]:
        """What was looked at on request: the frames below Python's, and the other threads."""
        native = group.native[::-1] if self.verbose else group.native[: -_ENDS - 1 : -1]
        if native:
            yield self.below(("native, innermost first:", "dim"))
        width = min(max((len(_function(frame)) for frame in native), default=0), _NAME)
        for frame in native:
            yield self.below(f"  {_function(frame):<{width}}  {_place(frame)}")
        most = len(group.threads) if self.verbose else _THREADS
        for thread in group.threads[:most]:
            frames = thread.frames[::-1] if self.verbose else thread.frames[:-2:-1]
            path = " < ".join(map(_brief, frames))
            yield self.below(
                (f"thread {sanitise(thread.name, _LONG) or 'without a name'}: ", "dim"), path
            )
        if group.threads[most:]:
            more = counted(len(group.threads) - most, "more thread")
            yield self.below((f"{more} (-v shows them)", "dim"))

    def group(self, group: Group, number: int) -> Iterator[Line]:
        """A group in full: its ranks and nodes, the reason, the path, the hint."""
        yield self.head(group, number)
        for text in filter(None, group.reason.split("; ")):
            yield self.below((text, STYLES[group.role] if group.role else "dim"))
        if group.why:
            yield self.below(group.why)
        yield from self.frames(group, number)
        if group.user_frame and group.user_frame != group.frames[-1]:
            yield self.below(("own code: ", "dim"), _brief(group.user_frame))
        yield from self.beside(group)
        found = self.processes.get(number, [])
        if self.verbose or len(found) <= _FEW:
            for one in found:
                yield self.below((self.process(one, len(found) > 1), "dim"))
        elif group.states:
            yield self.one(self.below(("state ", "dim"), (_few(group.states), "dim")))
        # A word alone says no more than the wait channel does.
        named = [text for text in group.waits_on if " " in text.partition(" (")[0]]
        if named:
            yield self.one(self.below(("waits in ", "dim"), (_few(named), "dim")))
        yield from self.started(group)
        if group.hint:
            yield self.below("hint: ", (group.hint, "cyan"))

    def started(self, group: Group) -> Iterator[Line]:
        """The processes below the ranks, a line each; and variables, where they were asked for."""
        most = len(group.below) if self.verbose else _CHILDREN
        if group.role == "victim" and not self.verbose:
            # Others are looked for elsewhere.
            most = 0
        first = next((one for one in group.below if one.hint), None)
        for one in group.below[:most]:
            count = f" ({one.processes})" if one.processes > 1 else ""
            if not one.frames:
                count += f" {sanitise(one.command, _NAME)}"
            where = _brief(one.frames[-1]) if one.frames else sanitise(one.why, _LONG)
            own = user_frame(one.frames)
            if own and own != one.frames[-1]:
                where += f" < {_brief(own)}"
            waits = sanitise(one.waits_on or one.wait_channel, _LONG)
            state = sanitise(one.state, 20)
            parts = [f"state {state}" if state else "", waits, where]
            yield self.one(
                self.below(
                    ("below: ", "dim"),
                    f"{sanitise(one.kind, 40)}{count}",
                    (f", {', '.join(filter(None, parts))}", "dim"),
                )
            )
            if self.verbose:
                yield self.below(("  ", ""), (sanitise(one.command, _TEXT), "dim"))
            if one.hint and (self.verbose or one is first):
                yield self.below("  hint: ", (one.hint, "cyan"))
        if group.below[most:] and most:
            more = counted(len(group.below) - most, "more sort", "more sorts")
            yield self.below((f"{more} below (-v shows them)", "dim"))
        most = len(group.locals) if self.verbose else _LOCALS
        for text in group.locals[:most]:
            yield self.one(self.below(("local ", "dim"), sanitise(text, _TEXT)))
        if group.locals[most:]:
            more = counted(len(group.locals) - most, "more variable")
            yield self.below((f"{more} (-v shows them)", "dim"))

    def process(self, one: Rank, several: bool) -> str:
        if not several:
            return process(one)
        rank = "no rank" if one.rank is None else f"rank {one.rank}"
        return f"{rank} on {one.node}: {process(one)}"

    def short(self, group: Group, number: int) -> Line:
        """A group in one line: its ranks and nodes, and where the path ends."""
        leaf = group.frames[-1:]
        text = _brief(leaf[0]) if leaf else group.why
        return self.one(self.head(group, number, f"  {sanitise(text)}"))

    def groups(self, groups: Sequence[Group]) -> Iterator[Line]:
        """The first groups in full, the next in a line each, and the largest in any case."""
        rows = list(enumerate(groups))
        if self.verbose:
            full, short, left = rows, [], []
        else:
            full, short, left = rows[:_FULL], rows[_FULL:_MOST], rows[_MOST:]
        for number, group in full:
            yield from self.group(group, number)
        if short:
            yield line("")
        for number, group in short:
            yield self.short(group, number)
        shown = [row for row in left if row[1] is self.largest]
        if len(left) > len(shown):
            more = counted(len(left) - len(shown), "more group")
            yield self.below((f"and {more} (-v shows them)", "bold"))
        for number, group in shown:
            yield self.short(group, number)

    def tree(self, stacks: Stacks) -> Iterator[Line]:
        """The merged tree: how many processes and which ranks went where."""
        most, deepest = (_WHOLE, _WHOLE) if self.verbose else (_BRANCHES, _DEEPEST)
        for branch in branches(stacks, most, deepest):
            yield self.one(self.branch(branch))

    def branch(self, branch: Branch) -> Line:
        """One chain of calls: ``|- 511  step trainer.py:61 > all_reduce ...  ranks 0-6``."""
        above = "".join("   " if last else "|  " for last in branch.lasts[1:-1])
        mark = ("`- " if branch.lasts[-1] else "|- ") if branch.depth else ""
        count = f"{branch.processes:>{branch.width}}  "
        if branch.hidden:
            more = counted(branch.hidden, "more branch", "more branches")
            return line(f"{above}{mark}{count}", (f"{more} (-v shows them)", "dim"))
        first, *between, last = [*branch.frames[:1], *branch.frames]
        path = _brief(last)
        if between[1:]:
            path = f"{_function(first)} > ... > {path}"
        elif between:
            path = f"{_function(first)} > {path}"
        there = ranks(branch.ranks, _WHOLE if self.verbose else _WHO)
        beside = (f"  {there}" if there else "", "dim")
        return line(f"{above}{mark}", (count, "bold"), path, beside)


def show(stacks: Stacks, options: Options = PLAIN) -> Iterator[Line]:
    """The headline, the verdict, the groups, the merged tree, and what to look at next.

    With ``verbose`` all groups, all frames and all processes are shown, and no set is cut.
    """
    head = headline(stacks)
    stacks = stacks if options.verbose else _without_data_alike(stacks)
    table = _Table(stacks, options)
    when = f"  {stacks.started}" if stacks.started else ""
    fits = len(head) + len(when) <= options.width
    yield line((head, "bold"), (when if fits else "", "dim"))
    yield from _verdict(stacks, table)
    yield line("")
    yield from table.groups(stacks.groups)
    for why, names in reasons(silent(stacks), options.verbose):
        shown = nodes(
            names, _WHOLE if table.verbose else max(20, min(options.width, 160) - _INDENT)
        )
        yield line((f"{'no data':<{_INDENT}}", STYLES["no-data"]), (shown, "bold"))
        yield table.below(why)
    if not stacks.complete:
        partial = (f"{'partial':<{_INDENT}}", STYLES["warn"])
        yield line(partial, "interrupted: not all nodes were looked at")
    if sum(group.kind == "stack" for group in stacks.groups) > 1:
        yield line("")
        yield from table.tree(stacks)
    yield from _witnesses(stacks, table)
    if stacks.advice:
        yield line("")
    for text in stacks.advice:
        yield line((f"{'next':<{_INDENT}}", STYLES["change"]), text)


def _without_data_alike(stacks: Stacks) -> Stacks:
    """The same with one group for the nodes that gave no answer for nearly the same reason.

    Otherwise 10,000 nodes that tell their own addresses would hide every other group.
    """
    lost = {
        f"\0{at}": group
        for at, group in enumerate(stacks.groups)
        if group.kind == "no-data" and not group.processes and not group.ranks
    }
    if len(lost) < 2:
        return stacks
    rows = alike((((group.why,), name) for name, group in lost.items()), 3, reasons=True)
    made = {
        int(row.names[0][1:]): replace(
            lost[row.names[0]],
            nodes=tuple(dict.fromkeys(node for name in row.names for node in lost[name].nodes)),
            why=(row.said or row.instance)[0],
        )
        for row in rows
    }
    kept = [
        (at, made.get(at, group))
        for at, group in enumerate(stacks.groups)
        if at in made or f"\0{at}" not in lost
    ]
    places = {at: new for new, (at, _) in enumerate(kept)}
    return replace(
        stacks,
        groups=tuple(group for _, group in kept),
        processes=tuple(
            one._replace(group=places.get(one.group, one.group)) for one in stacks.processes
        ),
    )


# --- ``--check``: what a job has for whoever debugs it.


def debuggable(found: Debuggable, options: Options = PLAIN) -> Iterator[Line]:
    """An item per line, with whose it is where that is not everybody, and what to do."""
    everybody = max((one.processes for one in found.findings), default=0)
    places = {node for one in found.findings for node in one.nodes}
    job = f"job {sanitise(found.job)[:60]}: " if found.job else ""
    many = counted(everybody, "process", "processes")
    yield line(f"{job}{many} on {counted(len(places), 'node')}")
    for one in found.findings:
        if options.quiet and one.result == "ok":
            continue
        whose = ""
        if one.processes < everybody:
            whole = options.verbose > 0
            whose = ranks(one.ranks, _WHOLE if whole else _WHO) or counted(
                one.processes, "process", "processes"
            )
            whose += f" on {nodes(one.nodes, _WHOLE if whole else _WHO)}: "
        word_ = (f"{one.result:<9}", STYLES[one.result])
        yield line(word_, f"{one.item:<13}{whose}{sanitise(one.found)[:_TEXT]}")
        if one.fix and one.result != "ok":
            yield line(" " * 22, f"{sanitise(one.fix)[:_TEXT]}")
    for why, names in reasons(found.errors.items(), options.verbose):
        who_ = nodes(names, _WHOLE if options.verbose or not options.lines else _NODES)
        yield line(("unknown  ", STYLES["unknown"]), f"{who_}: {sanitise(why)[:_TEXT]}")


# --- The verdict on top, and what the witnesses beside the stacks say.

#: The styles of a verdict that is no accusation.
_MILD = {"not-stuck": "ok", "moving": "warn", "unclear": "warn"}
#: What speaks for and against the first suspect, and statements of one witness, without -v.
_SAID, _TOLD = 2, 2
#: Columns of a witness's name.
_ROOM = 17


def _verdict(stacks: Stacks, table: _Table) -> Iterator[Line]:
    """What is wrong, where, what to do; what speaks for and against it; what would tell more."""
    verdict = stacks.verdict
    if verdict is None:
        return
    style = STYLES[_MILD.get(verdict.kind, "fail")]
    yield line("")
    yield line((f"{verdict.kind:<{_INDENT}}", style), (verdict.text, "bold"))
    if not table.verbose:
        first = verdict.suspects[0] if verdict.suspects else None
        rows = [
            # A group's own reason stands beside the group.
            ("for: ", [text for text in first.for_ if ": " in text][:_SAID] if first else ()),
            ("against: ", first.against[:1] if first else ()),
            ("missing: ", verdict.missing[:1]),
        ]
        for word, said in rows:
            if said:
                yield table.one(table.below((word, "dim"), "; ".join(said)))
        return
    for one in verdict.suspects:
        who_ = ranks(one.ranks) or nodes(one.nodes)
        for word, texts in (("for", one.for_), ("against", one.against)):
            for text in texts:
                yield table.below((f"{who_}, {word}: ", "dim"), text)
    for text in verdict.missing:
        yield table.below(("missing: ", "dim"), text)


def _witnesses(stacks: Stacks, table: _Table) -> Iterator[Line]:
    """The statements of each witness, the weightiest first; then who says nothing."""
    rows = []
    silent_ = []
    for witness in stacks.witnesses:
        name = _NAMES.get(witness.name, witness.name)
        says = witness.says
        if not table.verbose:
            says = tuple(one for one in says if one.weight)[:_TOLD] or says[:1]
        for one in says:
            who_ = ranks(one.ranks, _WHO) or (nodes(one.nodes, _WHO) if one.nodes else "")
            rows.append((name, f"{who_}: {one.text}" if who_ else one.text, ""))
        if table.verbose:
            rows += [(name, f"nothing: {text}", "dim") for text in witness.absent]
            if not says and not witness.absent:
                rows.append((name, "saw nothing out of the ordinary", "dim"))
        elif not says:
            silent_.append(name)
    if silent_:
        rows.append(("nothing from", f"{', '.join(silent_)} (-v tells why)", "dim"))
    if rows:
        yield line("")
    before = ""
    for name, text, style in rows:
        shown = "" if name == before else name
        before = name
        yield table.one(line((f"{shown:<{_ROOM}}", style or "bold"), (text, style)))


#: The style of a part's status, by that of other reports.
_STYLES = {"kept": "ok", "partial": "warn", "empty": "na", "missing": "fail"}
#: Columns of the words on the left.
_PART = 10
#: Files of a part that are named without -v.
_FILES = 4
#: How each part is read.
_READ = {
    "stacks": "nodeready stacks --from {directory}/stacks, or stacks.html in a browser",
    "logs": "the last lines of the ranks' logs; the newest last",
    "cores": "cores.json, and a backtrace per file",
    "audit": "audit.txt, and audit.json for a program",
}


def incident_index(incident: kept.Incident, options: Options = PLAIN) -> Iterator[Line]:
    """The index."""
    whose = f" of {incident.user}" if incident.user else ""
    yield line((f"job {incident.job}{whose}", "bold"), f", {incident.started}: {incident.reason}")
    if not incident.complete:
        yield line(("PARTIAL: it was interrupted", STYLES["warn"]))
    verdict = incident.verdict
    if verdict is None:
        yield line("no verdict: there are no stacks")
    else:
        yield line((f"{verdict.kind}: ", "bold"), verdict.text)
        for suspect in verdict.suspects[:4]:
            who = ranks(suspect.ranks) or "no rank"
            where = f" on {nodes(suspect.nodes)}" if suspect.nodes else ""
            why = f": {suspect.for_[0]}" if suspect.for_ else ""
            yield line(f"{'':<{_PART}}suspect: {who}{where}{why}")
    for row in incident.advice:
        yield line(f"{'':<{_PART}}{row}")
    yield line("")
    directory = incident.archive.rpartition("/")[2].removesuffix(".tar.gz") or "DIR"
    for part in incident.parts:
        yield from _part(part, directory, options)
    yield line("")
    if incident.archive:
        yield line("all of it: ", (incident.archive, "bold"))
    else:
        yield line(("there is no archive", STYLES["fail"]))


def _part(part: kept.Part, directory: str, options: Options) -> Iterator[Line]:
    said = "; ".join(filter(None, (part.found, part.why)))
    yield line((f"{part.name:<{_PART}}", "bold"), (part.status, STYLES[_STYLES[part.status]]),
               f": {said}" if said else "")  # fmt: skip
    if part.files:
        yield line(f"{'':<{_PART}}{_READ[part.name].format(directory=directory)}")
        few = part.files if options.verbose else part.files[:_FILES]
        more = len(part.files) - len(few)
        yield line(
            " " * _PART,
            ", ".join(name.partition("/")[2] for name in few),
            f" and {counted(more, 'more file')}" if more else "",
        )
    for why, names in reasons(part.errors.items(), options.verbose):
        yield line(" " * _PART, (nodes(names), "bold"), f": {why}")

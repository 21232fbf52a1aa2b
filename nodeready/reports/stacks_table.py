"""Where the ranks stand, on a terminal: the most suspicious group first, the others in short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nodeready.reports import stack_words as words
from nodeready.reports.stack_branches import Branch, branches
from nodeready.reports.text import STYLES, Line, Part, counted, line, nodes
from nodeready.sanitise import sanitise
from nodeready.stacks import Frame, Group, Rank, Stacks

#: Groups that are shown with their path, and in a line each, without -v.
_FULL, _MOST = 6, 16
#: Frames of a path that are shown without -v: where it ends and where it leaves the others; of
#: a group that leaves nobody, and of the largest one.
_ENDS, _LEAVES, _SHORT, _SHORTEST = 5, 2, 4, 2
#: Other threads of a group that are shown without -v.
_THREADS = 4
#: Processes of a group that are shown without -v: these a person can look at one by one.
_FEW = 2
#: Branches of the merged tree that are shown without -v at one place, and one below the other.
_BRANCHES, _DEEPEST = 4, 5
#: Columns of the words on the left; at most of the ranks, of the nodes beside them, of a function.
_INDENT, _WHO, _NODES, _NAME = 13, 30, 160, 40
#: Characters of a text that are shown without -v; of a name in any case.
_TEXT, _LONG = 500, 120
_WHOLE = 1_000_000


def _function(frame: Frame) -> str:
    return sanitise(frame.function, _LONG)


def _place(frame: Frame) -> str:
    return sanitise(words.place(frame), _LONG)


def _brief(frame: Frame) -> str:
    """A call without the directory of its file."""
    return f"{_function(frame)} {_place(frame._replace(file=frame.file.rpartition('/')[2]))}"


class _Table:
    """The layout of one table.

    room:    columns for the ranks
    largest: the group that the others are compared with
    """

    def __init__(self, stacks: Stacks, verbose: int, width: int) -> None:
        self.verbose, self.width = verbose, width
        self.largest = words.largest(stacks)
        self.who = [words.who(group, _WHOLE if verbose else _WHO) for group in stacks.groups]
        self.room = min(max(map(len, self.who), default=0), _WHO)
        self.begun = words.begun(stacks)
        self.processes: dict[int, list[Rank]] = {}
        for process in stacks.processes:
            self.processes.setdefault(process.group, []).append(process)

    def head(self, group: Group, number: int, more: str = "") -> Line:
        """``blocked      rank 7           gpu001``."""
        word = words.word(group)
        style = STYLES[group.verdict or group.kind]
        who = f"{self.who[number]:<{self.room}}  " if self.room else ""
        room = max(20, min(self.width - _INDENT - len(who) - len(more), _NODES))
        names = nodes(group.nodes, _WHOLE if self.verbose else room) if group.nodes else ""
        return line((f"{word:<{_INDENT}}", style), (who, "bold"), names, more)

    def below(self, *parts: Part) -> Line:
        text = line(" " * _INDENT, *parts)
        return text if self.verbose else text.cut(_TEXT)

    def one(self, text: Line) -> Line:
        """A row that is one line on the screen, too; in a pipe, a long one."""
        if self.verbose or len(text.plain) <= min(self.width, _TEXT):
            return text
        return text.cut(min(self.width, _TEXT) - 3)

    def frames(self, group: Group, number: int) -> Iterator[Line]:
        """The path, innermost first; ``>`` stands where no larger group has been."""
        apart = group is not self.largest and group.fork < len(group.frames)
        fork = group.fork if apart else len(group.frames)
        rows = [
            (">" if at >= fork else " ", _function(frame), _place(frame))
            for at, frame in reversed(list(enumerate(group.frames)))
        ]
        left = 0
        if not self.verbose:
            # The last frame that is shared tells where the path leaves the others.
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
        """Who, why, where, and what it means."""
        yield self.head(group, number)
        if group.why:
            yield self.below(group.why)
        yield from self.frames(group, number)
        yield from self.beside(group)
        found = self.processes.get(number, [])
        if self.verbose or len(found) <= _FEW:
            for process in found:
                yield self.below((self.process(process, len(found) > 1), "dim"))
        if group.hint:
            yield self.below("hint: ", (group.hint, "cyan"))

    def process(self, process: Rank, several: bool) -> str:
        if not several:
            return words.process(process)
        rank = "no rank" if process.rank is None else f"rank {process.rank}"
        return f"{rank} on {process.node}: {words.process(process)}"

    def short(self, group: Group, number: int) -> Line:
        """The same in one line: who, and where the path ends."""
        leaf = group.frames[-1:]
        text = _brief(leaf[0]) if leaf else group.why
        return self.one(self.head(group, number, f"  {sanitise(text)}"))

    def groups(self, groups: Sequence[Group]) -> Iterator[Line]:
        """The first ones in full, the next in a line each, and the largest in any case."""
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
        """The stacks merged: how many processes and which ranks went where."""
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
        who = words.ranks(branch.ranks, _WHOLE if self.verbose else _WHO)
        return line(f"{above}{mark}", (count, "bold"), path, (f"  {who}" if who else "", "dim"))


def show(stacks: Stacks, verbose: int = 0, width: int = 80) -> Iterator[Line]:
    """The headline, the groups, the merged tree, and what to look at next.

    verbose: from 1 on all groups, all frames and all processes are shown, and no set is cut
    width:   columns that there are for node sets
    """
    table = _Table(stacks, verbose, width)
    head = words.headline(stacks)
    when = f"  {stacks.started}" if stacks.started else ""
    fits = len(head) + len(when) <= width
    yield line((head, "bold"), (when if fits else "", "dim"))
    yield line("")
    yield from table.groups(stacks.groups)
    for node, why in words.silent(stacks):
        yield line((f"{'no data':<{_INDENT}}", STYLES["no-data"]), (node, "bold"))
        yield table.below(why)
    if not stacks.complete:
        word = (f"{'partial':<{_INDENT}}", STYLES["warn"])
        yield line(word, "interrupted: not all nodes were looked at")
    if sum(group.kind == "stack" for group in stacks.groups) > 1:
        yield line("")
        yield from table.tree(stacks)
    if stacks.advice:
        yield line("")
    for text in stacks.advice:
        yield line((f"{'next':<{_INDENT}}", STYLES["change"]), text)

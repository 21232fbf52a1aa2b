"""The stacks on a terminal: the most suspicious group first, the others in short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nodeready.reports.lines import STYLES, Line, line, nodes
from nodeready.reports.rank_groups import (
    begun,
    headline,
    largest,
    place,
    process,
    ranks,
    role,
    silent,
    who,
    word,
)
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.similar_texts import alike, reasons
from nodeready.reports.stack_branches import Branch, branches
from nodeready.reports.table_layout import MAX_TEXT, NO_LIMIT, TableLayout
from nodeready.text import counted, sanitise
from nodeready.triage.stacks.document import Frame, Group, Rank, Stacks
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

#: Columns of a role; at most of the ranks, of the nodes beside them, of a function.
_ROLE, _WHO, _NODES, _NAME = 9, 30, 160, 40

#: Characters of a name.
_LONG = 120


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


class _StacksTable(TableLayout):
    """The layout of one table.

    room:    columns for the ranks
    largest: the group that the others are compared with
    """

    indent = 13

    def __init__(self, stacks: Stacks, options: Options) -> None:
        super().__init__(options)
        self.is_whole = bool(self.verbose)
        self.largest = largest(stacks)
        self.who = [who(group, NO_LIMIT if self.verbose else _WHO) for group in stacks.groups]
        self.room = min(max(map(len, self.who), default=0), _WHO)
        self.begun = begun(stacks)
        self.roles = any(group.role for group in stacks.groups)
        self.processes: dict[int, list[Rank]] = {}
        for one in stacks.processes:
            self.processes.setdefault(one.group, []).append(one)

    def group_head(self, group: Group, number: int, more: str = "") -> Line:
        """``blocked      rank 7           gpu001``."""
        kind = word(group)
        style = STYLES[group.role if group.role == "victim" else group.verdict or group.kind]
        played = f"{role(group):<{_ROLE}}" if self.roles else ""
        ranked = f"{self.who[number]:<{self.room}}  " if self.room else ""
        left = self.width - self.indent - len(played) - len(ranked) - len(more)
        room = max(20, min(left, _NODES))
        names = nodes(group.nodes, NO_LIMIT if self.verbose else room) if group.nodes else ""
        return line(
            (f"{kind:<{self.indent}}", style),
            (played, STYLES[group.role] if group.role else ""),
            (ranked, "bold"),
            names,
            more,
        )

    def one(self, text: Line) -> Line:
        """A row, cut to the width of the screen; in a pipe, only a very long row is cut."""
        if self.verbose or len(text.plain) <= min(self.width, MAX_TEXT):
            return text
        return text.cut(min(self.width, MAX_TEXT) - 3)

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
        for at, (mark, name, source) in enumerate(rows):
            if left > 1 and at >= _ENDS and at < _ENDS + left:
                if at == _ENDS:
                    yield self.below((f"{mark} ... {left} more (-v shows them)", "dim"))
                continue
            style = "bold" if mark == ">" else ""
            yield self.below((f"{mark} ", STYLES["warn"]), (f"{name:<{width}}  ", style), source)
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
        yield self.group_head(group, number)
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
                yield self.below(("  ", ""), (sanitise(one.command, MAX_TEXT), "dim"))
            if one.hint and (self.verbose or one is first):
                yield self.below("  hint: ", (one.hint, "cyan"))
        if group.below[most:] and most:
            more = counted(len(group.below) - most, "more sort", "more sorts")
            yield self.below((f"{more} below (-v shows them)", "dim"))
        most = len(group.locals) if self.verbose else _LOCALS
        for text in group.locals[:most]:
            yield self.one(self.below(("local ", "dim"), sanitise(text, MAX_TEXT)))
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
        return self.one(self.group_head(group, number, f"  {sanitise(text)}"))

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
        most, deepest = (NO_LIMIT, NO_LIMIT) if self.verbose else (_BRANCHES, _DEEPEST)
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
        there = ranks(branch.ranks, NO_LIMIT if self.verbose else _WHO)
        beside = (f"  {there}" if there else "", "dim")
        return line(f"{above}{mark}", (count, "bold"), path, beside)


def show(stacks: Stacks, options: Options = PLAIN) -> Iterator[Line]:
    """The headline, the verdict, the groups, the merged tree, and what to look at next.

    With ``verbose`` all groups, all frames and all processes are shown, and no set is cut.
    """
    head = headline(stacks)
    stacks = stacks if options.verbose else _without_data_alike(stacks)
    table = _StacksTable(stacks, options)
    when = f"  {stacks.started}" if stacks.started else ""
    fits = len(head) + len(when) <= options.width
    yield line((head, "bold"), (when if fits else "", "dim"))
    yield from _verdict(stacks, table)
    yield line("")
    yield from table.groups(stacks.groups)
    for why, names in reasons(silent(stacks), options.verbose):
        shown = nodes(
            names, NO_LIMIT if table.verbose else max(20, min(options.width, 160) - table.indent)
        )
        yield line((f"{'no data':<{table.indent}}", STYLES["no-data"]), (shown, "bold"))
        yield table.below(why)
    if not stacks.complete:
        partial = (f"{'partial':<{table.indent}}", STYLES["warn"])
        yield line(partial, "interrupted: not all nodes were looked at")
    if sum(group.kind == "stack" for group in stacks.groups) > 1:
        yield line("")
        yield from table.tree(stacks)
    yield from _witnesses(stacks, table)
    if stacks.advice:
        yield line("")
    for text in stacks.advice:
        yield line((f"{'next':<{table.indent}}", STYLES["change"]), text)


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


#: The styles of a verdict that is no accusation.
_MILD = {"not-stuck": "ok", "moving": "warn", "unclear": "warn"}

#: What speaks for and against the first suspect, and statements of one witness, without -v.
_SAID, _TOLD = 2, 2

#: Columns of a witness's name.
_ROOM = 17


def _verdict(stacks: Stacks, table: _StacksTable) -> Iterator[Line]:
    """What is wrong, where, what to do; what speaks for and against it; what would tell more."""
    verdict = stacks.verdict
    if verdict is None:
        return
    style = STYLES[_MILD.get(verdict.kind, "fail")]
    yield line("")
    yield line((f"{verdict.kind:<{table.indent}}", style), (verdict.text, "bold"))
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


def _witnesses(stacks: Stacks, table: _StacksTable) -> Iterator[Line]:
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

"""The stacks on a terminal: the most suspicious group first, further groups in short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nodeready.reports.lines import STYLES, StyledLine, line, nodes
from nodeready.reports.rank_groups import (
    headline,
    largest,
    members,
    overtaken,
    place,
    process,
    processes_by_group,
    ranks,
    role,
    silent,
    word,
)
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.similar_texts import fold_similar, reasons
from nodeready.reports.stack_branches import Branch, branches
from nodeready.reports.table_layout import MAX_TEXT, NO_LIMIT, TableLayout
from nodeready.text import counted, sanitise
from nodeready.triage.stacks.document import Frame, Group, Rank, Stacks
from nodeready.triage.stacks.hints import user_frame

#: Groups that are shown with their path, and in a line each, without -v.
_FULL, _MOST = 6, 16
#: Frames that are shown without -v: at the end of a path, and where it branches off; of a path
#: without a branch, and of the largest group's.
_ENDS, _LEAVES, _SHORT, _SHORTEST = 5, 2, 4, 2
#: Further threads of a group that are shown without -v.
_THREADS = 4
#: Maximum of processes of a group that are all shown without -v.
_FEW = 2
#: Branches of the merged tree that are shown without -v at one place, and nested ones.
_BRANCHES, _DEEPEST = 4, 5
#: Witnesses -> their names for a person, where these differ.
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
    largest: the group that all groups are compared with
    """

    indent = 13

    def __init__(self, stacks: Stacks, options: Options) -> None:
        super().__init__(options)
        self.is_whole = bool(self.verbose)
        self.largest = largest(stacks)
        self.members = [
            members(group, NO_LIMIT if self.verbose else _WHO) for group in stacks.groups
        ]
        self.room = min(max(map(len, self.members), default=0), _WHO)
        self.overtaken = overtaken(stacks)
        self.roles = any(group.role for group in stacks.groups)
        self.processes = processes_by_group(stacks)

    def group_head(self, group: Group, number: int, ending: str = "") -> StyledLine:
        """``blocked      rank 7           gpu001``."""
        kind = word(group)
        style = STYLES[group.role if group.role == "victim" else group.verdict or group.kind]
        played = f"{role(group):<{_ROLE}}" if self.roles else ""
        ranked = f"{self.members[number]:<{self.room}}  " if self.room else ""
        remaining = self.width - self.indent - len(played) - len(ranked) - len(ending)
        room = max(20, min(remaining, _NODES))
        names = nodes(group.nodes, NO_LIMIT if self.verbose else room) if group.nodes else ""
        return line(
            (f"{kind:<{self.indent}}", style),
            (played, STYLES[group.role] if group.role else ""),
            (ranked, "bold"),
            names,
            ending,
        )

    def fit(self, text: StyledLine) -> StyledLine:
        """A row, cut to the width of the screen; in a pipe, only a very long row is cut."""
        if self.verbose or len(text.plain) <= min(self.width, MAX_TEXT):
            return text
        return text.cut(min(self.width, MAX_TEXT) - 3)

    def frames(self, group: Group, number: int) -> Iterator[StyledLine]:
        """The path, innermost first; ``>`` marks the calls that no larger group shares."""
        leaves_others = group is not self.largest and group.fork < len(group.frames)
        fork = group.fork if leaves_others else len(group.frames)
        rows = [
            (">" if at >= fork else " ", _function(frame), _place(frame))
            for at, frame in reversed(list(enumerate(group.frames)))
        ]
        hidden = 0
        if not self.verbose:
            # The last shared frame is shown as well: there the path branches off.
            maximum = _SHORTEST if group is self.largest else _SHORT
            rows = rows[: len(rows) - fork + 1] if leaves_others else rows[:maximum]
            hidden = len(rows) - _ENDS - _LEAVES
        width = min(max((len(name) for _, name, _ in rows), default=0), _NAME)
        for at, (mark, name, source) in enumerate(rows):
            if hidden > 1 and at >= _ENDS and at < _ENDS + hidden:
                if at == _ENDS:
                    yield self.detail((f"{mark} ... {hidden} more (-v shows them)", "dim"))
                continue
            style = "bold" if mark == ">" else ""
            yield self.detail((f"{mark} ", STYLES["warn"]), (f"{name:<{width}}  ", style), source)
        if number in self.overtaken:
            yield self.detail(("  others have gone on from here", "dim"))

    def native_and_threads(self, group: Group) -> Iterator[StyledLine]:
        """The native frames and further threads, which are captured on request."""
        native = group.native[::-1] if self.verbose else group.native[: -_ENDS - 1 : -1]
        if native:
            yield self.detail(("native, innermost first:", "dim"))
        width = min(max((len(_function(frame)) for frame in native), default=0), _NAME)
        for frame in native:
            yield self.detail(f"  {_function(frame):<{width}}  {_place(frame)}")
        maximum = len(group.threads) if self.verbose else _THREADS
        for thread in group.threads[:maximum]:
            frames = thread.frames[::-1] if self.verbose else thread.frames[:-2:-1]
            path = " < ".join(map(_brief, frames))
            yield self.detail(
                (f"thread {sanitise(thread.name, _LONG) or 'without a name'}: ", "dim"), path
            )
        if group.threads[maximum:]:
            hidden = counted(len(group.threads) - maximum, "more thread")
            yield self.detail((f"{hidden} (-v shows them)", "dim"))

    def group(self, group: Group, number: int) -> Iterator[StyledLine]:
        """A group in full: its ranks and nodes, the reason, the path, the hint."""
        yield self.group_head(group, number)
        for text in filter(None, group.reason.split("; ")):
            yield self.detail((text, STYLES[group.role] if group.role else "dim"))
        if group.no_stack_reason:
            yield self.detail(group.no_stack_reason)
        yield from self.frames(group, number)
        if group.user_frame and group.user_frame != group.frames[-1]:
            yield self.detail(("own code: ", "dim"), _brief(group.user_frame))
        yield from self.native_and_threads(group)
        processes = self.processes.get(number, [])
        if self.verbose or len(processes) <= _FEW:
            for member in processes:
                yield self.detail((self.process(member, len(processes) > 1), "dim"))
        elif group.states:
            yield self.fit(self.detail(("state ", "dim"), (_few(group.states), "dim")))
        # A single word adds nothing to the wait channel.
        named = [text for text in group.waits_on if " " in text.partition(" (")[0]]
        if named:
            yield self.fit(self.detail(("waits in ", "dim"), (_few(named), "dim")))
        yield from self.started(group)
        if group.hint:
            yield self.detail("hint: ", (group.hint, "cyan"))

    def started(self, group: Group) -> Iterator[StyledLine]:
        """The child processes of the ranks, a line each; and the variables, on request."""
        maximum = len(group.children) if self.verbose else _CHILDREN
        if group.role == "victim" and not self.verbose:
            # A victim waits for other ranks, not for its children.
            maximum = 0
        first = next((child for child in group.children if child.hint), None)
        for child in group.children[:maximum]:
            count = f" ({child.processes})" if child.processes > 1 else ""
            if not child.frames:
                count += f" {sanitise(child.command, _NAME)}"
            place_text = (
                _brief(child.frames[-1])
                if child.frames
                else sanitise(child.no_stack_reason, _LONG)
            )
            own_frame = user_frame(child.frames)
            if own_frame and own_frame != child.frames[-1]:
                place_text += f" < {_brief(own_frame)}"
            waits = sanitise(child.waits_on or child.wait_channel, _LONG)
            state = sanitise(child.state, 20)
            parts = [f"state {state}" if state else "", waits, place_text]
            yield self.fit(
                self.detail(
                    ("below: ", "dim"),
                    f"{sanitise(child.kind, 40)}{count}",
                    (f", {', '.join(filter(None, parts))}", "dim"),
                )
            )
            if self.verbose:
                yield self.detail(("  ", ""), (sanitise(child.command, MAX_TEXT), "dim"))
            if child.hint and (self.verbose or child is first):
                yield self.detail("  hint: ", (child.hint, "cyan"))
        if group.children[maximum:] and maximum:
            hidden = counted(len(group.children) - maximum, "more sort", "more sorts")
            yield self.detail((f"{hidden} below (-v shows them)", "dim"))
        maximum = len(group.locals) if self.verbose else _LOCALS
        for text in group.locals[:maximum]:
            yield self.fit(self.detail(("local ", "dim"), sanitise(text, MAX_TEXT)))
        if group.locals[maximum:]:
            hidden = counted(len(group.locals) - maximum, "more variable")
            yield self.detail((f"{hidden} (-v shows them)", "dim"))

    def process(self, member: Rank, several: bool) -> str:
        if not several:
            return process(member)
        rank = "no rank" if member.rank is None else f"rank {member.rank}"
        return f"{rank} on {member.node}: {process(member)}"

    def short(self, group: Group, number: int) -> StyledLine:
        """A group in one line: its ranks and nodes, and where the path ends."""
        leaf = group.frames[-1:]
        text = _brief(leaf[0]) if leaf else group.no_stack_reason
        return self.fit(self.group_head(group, number, f"  {sanitise(text)}"))

    def groups(self, groups: Sequence[Group]) -> Iterator[StyledLine]:
        """The first groups in full, the next in a line each, and the largest in any case."""
        rows = list(enumerate(groups))
        if self.verbose:
            full, short, remaining = rows, [], []
        else:
            full, short, remaining = rows[:_FULL], rows[_FULL:_MOST], rows[_MOST:]
        for number, group in full:
            yield from self.group(group, number)
        if short:
            yield line("")
        for number, group in short:
            yield self.short(group, number)
        shown = [row for row in remaining if row[1] is self.largest]
        if len(remaining) > len(shown):
            hidden = counted(len(remaining) - len(shown), "more group")
            yield self.detail((f"and {hidden} (-v shows them)", "bold"))
        for number, group in shown:
            yield self.short(group, number)

    def tree(self, stacks: Stacks) -> Iterator[StyledLine]:
        """The merged tree, with the processes and ranks of each branch."""
        max_branches, max_depth = (NO_LIMIT, NO_LIMIT) if self.verbose else (_BRANCHES, _DEEPEST)
        for branch in branches(stacks, max_branches, max_depth):
            yield self.fit(self.branch(branch))

    def branch(self, branch: Branch) -> StyledLine:
        """One chain of calls: ``|- 511  step trainer.py:61 > all_reduce ...  ranks 0-6``."""
        stems = "".join("   " if last else "|  " for last in branch.lasts[1:-1])
        mark = ("`- " if branch.lasts[-1] else "|- ") if branch.depth else ""
        count = f"{branch.processes:>{branch.width}}  "
        if branch.hidden:
            hidden = counted(branch.hidden, "more branch", "more branches")
            return line(f"{stems}{mark}{count}", (f"{hidden} (-v shows them)", "dim"))
        first, *between, last = [*branch.frames[:1], *branch.frames]
        path = _brief(last)
        if between[1:]:
            path = f"{_function(first)} > ... > {path}"
        elif between:
            path = f"{_function(first)} > {path}"
        rank_text = ranks(branch.ranks, NO_LIMIT if self.verbose else _WHO)
        ending = (f"  {rank_text}" if rank_text else "", "dim")
        return line(f"{stems}{mark}", (count, "bold"), path, ending)


def show(stacks: Stacks, options: Options = PLAIN) -> Iterator[StyledLine]:
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
    for reason, names in reasons(silent(stacks), options.verbose):
        shown = nodes(
            names, NO_LIMIT if table.verbose else max(20, min(options.width, 160) - table.indent)
        )
        yield line((f"{'no data':<{table.indent}}", STYLES["no-data"]), (shown, "bold"))
        yield table.detail(reason)
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
    """The stacks, with one group for the nodes that gave no answer for similar reasons.

    Otherwise 10,000 nodes with 10,000 addresses in their errors would hide every other group.
    """
    lost = {
        f"\0{at}": group
        for at, group in enumerate(stacks.groups)
        if group.kind == "no-data" and not group.processes and not group.ranks
    }
    if len(lost) < 2:
        return stacks
    rows = fold_similar(
        (((group.no_stack_reason,), name) for name, group in lost.items()), 3, reasons=True
    )
    merged = {
        int(row.names[0][1:]): replace(
            lost[row.names[0]],
            nodes=tuple(dict.fromkeys(node for name in row.names for node in lost[name].nodes)),
            no_stack_reason=(row.shared_texts or row.instance)[0],
        )
        for row in rows
    }
    groups = [
        (at, merged.get(at, group))
        for at, group in enumerate(stacks.groups)
        if at in merged or f"\0{at}" not in lost
    ]
    places = {at: new for new, (at, _) in enumerate(groups)}
    return replace(
        stacks,
        groups=tuple(group for _, group in groups),
        processes=tuple(
            process._replace(group=places.get(process.group, process.group))
            for process in stacks.processes
        ),
    )


#: The styles of verdicts without a suspect.
_MILD = {"not-stuck": "ok", "moving": "warn", "unclear": "warn"}

#: Reasons for and against the first suspect, and statements of one witness, without -v.
_SAID, _TOLD = 2, 2

#: Columns of a witness's name.
_ROOM = 17


def _verdict(stacks: Stacks, table: _StacksTable) -> Iterator[StyledLine]:
    """The verdict, the reasons for and against it, and the missing evidence."""
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
        for word, statements in rows:
            if statements:
                yield table.fit(table.detail((word, "dim"), "; ".join(statements)))
        return
    for suspect in verdict.suspects:
        who_ = ranks(suspect.ranks) or nodes(suspect.nodes)
        for word, texts in (("for", suspect.for_), ("against", suspect.against)):
            for text in texts:
                yield table.detail((f"{who_}, {word}: ", "dim"), text)
    for text in verdict.missing:
        yield table.detail(("missing: ", "dim"), text)


def _witnesses(stacks: Stacks, table: _StacksTable) -> Iterator[StyledLine]:
    """The statements of each witness, the strongest first; then the silent witnesses."""
    rows = []
    silent_ = []
    for witness in stacks.witnesses:
        name = _NAMES.get(witness.name, witness.name)
        statements = witness.statements
        if not table.verbose:
            statements = (
                tuple(statement for statement in statements if statement.weight)[:_TOLD]
                or statements[:1]
            )
        for statement in statements:
            who_ = ranks(statement.ranks, _WHO) or (
                nodes(statement.nodes, _WHO) if statement.nodes else ""
            )
            rows.append((name, f"{who_}: {statement.text}" if who_ else statement.text, ""))
        if table.verbose:
            rows += [(name, f"nothing: {text}", "dim") for text in witness.absent]
            if not statements and not witness.absent:
                rows.append((name, "saw nothing out of the ordinary", "dim"))
        elif not statements:
            silent_.append(name)
    if silent_:
        rows.append(("nothing from", f"{', '.join(silent_)} (-v tells why)", "dim"))
    if rows:
        yield line("")
    before = ""
    for name, text, style in rows:
        shown = "" if name == before else name
        before = name
        yield table.fit(line((f"{shown:<{_ROOM}}", style or "bold"), (text, style)))

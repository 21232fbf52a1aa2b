"""The stacks on a terminal: the most suspicious group first, further groups in short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from nodeready.core.text import counted, sanitise
from nodeready.reports.lines import (
    MAX_TEXT,
    NO_LIMIT,
    STYLES,
    StyledLine,
    TableLayout,
    fitted,
    fold_similar,
    line,
    node_set,
    show_gaps,
    with_inventory,
)
from nodeready.reports.rank_groups import (
    Branch,
    branches,
    call_texts,
    headline,
    largest,
    members,
    overtaken,
    place,
    process,
    processes_by_group,
    ranks,
    silent,
    word,
)
from nodeready.reports.registry import PLAIN, Options
from nodeready.runs.stacks.debuggable import Debuggable
from nodeready.runs.stacks.document import Frame, Group, Stacks
from nodeready.runs.stacks.hints import user_frame

# The limits of rows hold without -v.
#: Maximum groups that are shown with their path; maximum groups in all.
_MAX_FULL, _MAX_GROUPS = 6, 16
#: Frames of a long path: its innermost ones, and those where it leaves the larger group's path.
_INNER_FRAMES, _FORK_FRAMES = 5, 2
#: Maximum frames of a path that leaves no other, and of the largest group's path.
_MAX_FRAMES, _MAX_LARGEST_FRAMES = 4, 2
_MAX_THREADS = 4  # maximum further threads of a group
_MAX_PROCESSES = 2  # maximum processes of a group that are all shown
#: Maximum branches of the merged tree at one place, and nested branches.
_MAX_BRANCHES, _MAX_DEPTH = 4, 5
#: Maximum child processes of a group, its variables, and its different texts.
_MAX_CHILDREN, _MAX_LOCALS, _MAX_TEXTS = 3, 8, 3
_MAX_CALLS = 6  # maximum system calls of a group
#: Maximum reasons for and against the first suspect, and statements of one witness.
_MAX_REASONS, _MAX_STATEMENTS = 2, 2
_ROLE, _WITNESS = 9, 17  # columns of a role and of a witness's name
#: Maximum columns of the ranks, of the nodes beside them, and of a function.
_RANKS, _NODES, _NAME = 30, 160, 40
_LONG = 120  # maximum characters of a name
#: Witnesses -> their names for a person, where these differ.
_NAMES = {"flight_recorder": "flight recorder", "nccl_ras": "NCCL RAS", "gpu": "GPU"}
#: The styles of verdicts without a suspect.
_MILD_STYLES = {"not-stuck": "ok", "even": "ok", "moving": "warn", "unclear": "warn"}


def _function(frame: Frame) -> str:
    return sanitise(frame.function, _LONG)


def _place(frame: Frame) -> str:
    return sanitise(place(frame), _LONG)


def _brief(frame: Frame) -> str:
    """A call without the directory of its file."""
    return f"{_function(frame)} {_place(frame._replace(file=frame.file.rpartition('/')[2]))}"


def _few(texts: Sequence[str]) -> str:
    """The first texts on one line."""
    shown = [sanitise(text, _LONG) for text in texts[:_MAX_TEXTS]]
    return ", ".join([*shown, *(["..."] if texts[_MAX_TEXTS:] else [])])


class _StacksTable(TableLayout):
    indent = 13

    def __init__(self, stacks: Stacks, options: Options) -> None:
        super().__init__(options)
        self.is_whole = bool(self.verbose)
        self.inventory = options.inventory
        # All groups are compared with it.
        self.largest = largest(stacks)
        self.max_ranks = NO_LIMIT if self.verbose else _RANKS  # columns of a set of ranks
        self.members = [members(group, self.max_ranks) for group in stacks.groups]
        self.ranks_width = min(max(map(len, self.members), default=0), _RANKS)
        self.overtaken = overtaken(stacks)
        self.has_roles = any(group.role for group in stacks.groups)
        self.processes = processes_by_group(stacks)

    def group_head(self, group: Group, number: int, ending: str = "") -> StyledLine:
        """``blocked      rank 7           gpu001``."""
        style = STYLES[group.role if group.role == "victim" else group.verdict or group.kind]
        role = f"{group.role or '':<{_ROLE}}" if self.has_roles else ""
        ranks_text = f"{self.members[number]:<{self.ranks_width}}  " if self.ranks_width else ""
        remaining = self.width - self.indent - len(role) - len(ranks_text) - len(ending)
        room = max(20, min(remaining, _NODES))
        names = node_set(group.nodes, NO_LIMIT if self.verbose else room) if group.nodes else ""
        head = f"{word(group):<{self.indent}}", style
        role_part = role, STYLES[group.role] if group.role else ""
        return line(head, role_part, (ranks_text, "bold"), names, ending)

    def fit(self, text: StyledLine) -> StyledLine:
        """A row, cut to the width of the screen; in a pipe, only a very long row is cut."""
        if self.verbose or len(text.plain) <= min(self.width, MAX_TEXT):
            return text
        return text.cut(min(self.width, MAX_TEXT) - 3)

    def frames(self, group: Group, number: int) -> Iterator[StyledLine]:
        """The path, innermost first; ``>`` marks the calls that no larger group shares."""
        has_fork = group is not self.largest and group.fork < len(group.frames)
        fork = group.fork if has_fork else len(group.frames)
        rows = [
            (">" if depth >= fork else " ", _function(frame), _place(frame))
            for depth, frame in reversed(list(enumerate(group.frames)))
        ]
        hidden = 0
        if not self.verbose:
            # The last shared frame is shown as well: there the path branches off.
            maximum = _MAX_LARGEST_FRAMES if group is self.largest else _MAX_FRAMES
            rows = rows[: len(rows) - fork + 1] if has_fork else rows[:maximum]
            hidden = len(rows) - _INNER_FRAMES - _FORK_FRAMES
        width = min(max((len(name) for _, name, _ in rows), default=0), _NAME)
        for index, (mark, name, source) in enumerate(rows):
            if hidden > 1 and _INNER_FRAMES <= index < _INNER_FRAMES + hidden:
                if index == _INNER_FRAMES:
                    yield self.detail((f"{mark} ... {hidden} more (-v shows them)", "dim"))
                continue
            style = "bold" if mark == ">" else ""
            yield self.detail((f"{mark} ", STYLES["warn"]), (f"{name:<{width}}  ", style), source)
        if number in self.overtaken:
            yield self.detail(("  others have gone on from here", "dim"))

    def native_and_threads(self, group: Group) -> Iterator[StyledLine]:
        """The native frames and further threads, which are captured on request."""
        native = group.native[::-1] if self.verbose else group.native[::-1][:_INNER_FRAMES]
        if native:
            yield self.detail(("native, innermost first:", "dim"))
        width = min(max((len(_function(frame)) for frame in native), default=0), _NAME)
        for frame in native:
            yield self.detail(f"  {_function(frame):<{width}}  {_place(frame)}")
        maximum = len(group.threads) if self.verbose else _MAX_THREADS
        for thread in group.threads[:maximum]:
            frames = thread.frames[::-1] if self.verbose else thread.frames[-1:]
            name = sanitise(thread.name, _LONG) or "without a name"
            yield self.detail((f"thread {name}: ", "dim"), " < ".join(map(_brief, frames)))
        yield from self.hidden(len(group.threads) - maximum, "more thread")

    def group(self, group: Group, number: int) -> Iterator[StyledLine]:
        """A group in full: its ranks and nodes, the reason, the path, the hint."""
        yield self.group_head(group, number)
        for text in filter(None, group.reason.split("; ")):
            yield self.sentence((text, STYLES[group.role] if group.role else "dim"))
        if group.no_stack_reason:
            yield self.detail(group.no_stack_reason)
        yield from self.frames(group, number)
        if group.user_frame and group.user_frame != group.frames[-1]:
            yield self.detail(("own code: ", "dim"), _brief(group.user_frame))
        yield from self.native_and_threads(group)
        processes = self.processes.get(number, [])
        if self.verbose or len(processes) <= _MAX_PROCESSES:
            for member in processes:
                rank = "no rank" if member.rank is None else f"rank {member.rank}"
                owner = f"{rank} on {member.node}: " if len(processes) > 1 else ""
                yield self.detail((f"{owner}{process(member)}", "dim"))
        elif group.states:
            yield self.fit(self.detail(("state ", "dim"), (_few(group.states), "dim")))
        # A name of one word adds nothing to the wait channel.
        named = [text for text in group.waits_on if " " in text.partition(" (")[0]]
        if named:
            yield self.fit(self.detail(("waits in ", "dim"), (_few(named), "dim")))
        yield from self.children(group)
        yield from self.requested("local", group.locals, _MAX_LOCALS, "more variable")
        yield from self.requested("calls", call_texts(group), _MAX_CALLS, "more system call")
        if group.hint:
            yield self.sentence("hint: ", (with_inventory(group.hint, self.inventory), "cyan"))

    def children(self, group: Group) -> Iterator[StyledLine]:
        """The kinds of child processes of the ranks, a line each."""
        # A victim waits for other ranks, not for its children.
        maximum = 0 if group.role == "victim" else _MAX_CHILDREN
        maximum = len(group.children) if self.verbose else maximum
        first = next((child for child in group.children if child.hint), None)
        for child in group.children[:maximum]:
            count = f" ({child.processes})" if child.processes > 1 else ""
            if child.frames:
                place_text = _brief(child.frames[-1])
            else:
                count += f" {sanitise(child.command, _NAME)}"
                place_text = sanitise(child.no_stack_reason, _LONG)
            own_frame = user_frame(child.frames)
            if own_frame and own_frame != child.frames[-1]:
                place_text += f" < {_brief(own_frame)}"
            waits = sanitise(child.waits_on or child.wait_channel, _LONG)
            state = sanitise(child.state, 20)
            parts = filter(None, (f"state {state}" if state else "", waits, place_text))
            kind = f"{sanitise(child.kind, 40)}{count}"
            yield self.fit(self.detail(("below: ", "dim"), kind, (f", {', '.join(parts)}", "dim")))
            if self.verbose:
                yield self.detail(("  ", ""), (sanitise(child.command, MAX_TEXT), "dim"))
            if child.hint and (self.verbose or child is first):
                hint = with_inventory(child.hint, self.inventory)
                yield self.sentence("  hint: ", (hint, "cyan"))
        if group.children[maximum:] and maximum:
            hidden = counted(len(group.children) - maximum, "more sort", "more sorts")
            yield self.detail((f"{hidden} below (-v shows them)", "dim"))

    def requested(
        self, word: str, texts: Sequence[str], maximum: int, noun: str
    ) -> Iterator[StyledLine]:
        """What is captured on request: variables of the innermost calls, system calls."""
        maximum = len(texts) if self.verbose else maximum
        for text in texts[:maximum]:
            yield self.fit(self.detail((f"{word} ", "dim"), sanitise(text, MAX_TEXT)))
        yield from self.hidden(len(texts) - maximum, noun)

    def short(self, group: Group, number: int) -> StyledLine:
        leaf = group.frames[-1:]
        text = _brief(leaf[0]) if leaf else group.no_stack_reason
        return self.fit(self.group_head(group, number, f"  {sanitise(text)}"))

    def groups(self, groups: Sequence[Group]) -> Iterator[StyledLine]:
        """The first groups in full, the next in a line each, and always the largest."""
        rows = list(enumerate(groups))
        full, last = (len(rows),) * 2 if self.verbose else (_MAX_FULL, _MAX_GROUPS)
        short, remaining = rows[full:last], rows[last:]
        for number, group in rows[:full]:
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
        limits = (NO_LIMIT, NO_LIMIT) if self.verbose else (_MAX_BRANCHES, _MAX_DEPTH)
        for branch in branches(stacks, *limits):
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
        rank_text = ranks(branch.ranks, self.max_ranks)
        ending = (f"  {rank_text}" if rank_text else "", "dim")
        return line(f"{stems}{mark}", (count, "bold"), path, ending)


def show(stacks: Stacks, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The headline, the verdict, the groups, the merged tree, and what to look at next.

    With ``verbose`` all groups, all frames and all processes are shown, and no set is cut.
    """
    head = headline(stacks)
    stacks = stacks if options.verbose else _merge_nodes_without_data(stacks)
    table = _StacksTable(stacks, options)
    when = f"  {stacks.started}" if stacks.started else ""
    has_room = len(head) + len(when) <= options.width
    yield line((head, "bold"), (when if has_room else "", "dim"))
    yield from _verdict(stacks, table)
    yield line("")
    yield from table.groups(stacks.groups)
    yield from fitted(table.gaps(silent(stacks)), 0, options.width)
    if not stacks.complete:
        yield table.partial()
    if sum(group.kind == "stack" for group in stacks.groups) > 1:
        yield line("")
        yield from table.tree(stacks)
    yield from _witnesses(stacks, table)
    if stacks.advice:
        yield line("")
    for text in stacks.advice:
        next_text = with_inventory(text, options.inventory)
        yield line((f"{'next':<{table.indent}}", STYLES["change"]), next_text)


def _merge_nodes_without_data(stacks: Stacks) -> Stacks:
    """The stacks, with one group for all nodes that gave no answer for similar reasons.

    Otherwise 10,000 nodes with 10,000 addresses in their errors would hide every other group.
    """
    # The keys stand in place of node names, and no node has such a name.
    lost = {
        f"\0{index}": group
        for index, group in enumerate(stacks.groups)
        if group.kind == "no-data" and not group.processes and not group.ranks
    }
    if len(lost) < 2:
        return stacks
    rows = fold_similar(
        (((group.no_stack_reason,), name) for name, group in lost.items()), 3, reasons=True
    )
    groups = dict(enumerate(stacks.groups))
    for row in rows:
        first, *further = row.names
        nodes = tuple(dict.fromkeys(node for name in row.names for node in lost[name].nodes))
        merged = replace(lost[first], nodes=nodes, no_stack_reason=row.texts[0])
        groups[int(first[1:])] = merged
        for name in further:
            del groups[int(name[1:])]
    new = {index: number for number, index in enumerate(groups)}
    ranks = (rank._replace(group=new.get(rank.group, rank.group)) for rank in stacks.processes)
    return replace(stacks, groups=tuple(groups.values()), processes=tuple(ranks))


def _verdict(stacks: Stacks, table: _StacksTable) -> Iterator[StyledLine]:
    """The verdict, the reasons for and against it, and the missing evidence."""
    verdict = stacks.verdict
    if verdict is None:
        return
    style = STYLES[_MILD_STYLES.get(verdict.kind, "fail")]
    yield line("")
    yield line((f"{verdict.kind:<{table.indent}}", style), (verdict.text, "bold"))
    if not table.verbose:
        first = verdict.suspects[0] if verdict.suspects else None
        # A group's own reason stands beside the group.
        reasons = [text for text in first.for_ if ": " in text][:_MAX_REASONS] if first else ()
        against = first.against[:1] if first else ()
        rows = ("for", reasons), ("against", against), ("missing", verdict.missing[:1])
        for word, statements in rows:
            if statements:
                yield table.sentence((f"{word}: ", "dim"), "; ".join(statements))
        return
    for suspect in verdict.suspects:
        name = ranks(suspect.ranks) or node_set(suspect.nodes)
        for word, texts in (("for", suspect.for_), ("against", suspect.against)):
            for text in texts:
                yield table.sentence((f"{name}, {word}: ", "dim"), text)
    for text in verdict.missing:
        yield table.sentence(("missing: ", "dim"), text)
    for pace in stacks.paces:
        text = f"waits {pace.waits_percent:.0f}% of the time, in {pace.waiting} of {pace.looks} "
        text += f"looks; {pace.factor:.2f} times its peers' work"
        yield table.sentence((f"rank {pace.rank}: ", "dim"), text)


def _witnesses(stacks: Stacks, table: _StacksTable) -> Iterator[StyledLine]:
    """The statements of each witness, the strongest first; then the silent witnesses."""
    rows: list[tuple[str, str, str]] = []
    silent_names: list[str] = []
    for witness in stacks.witnesses:
        name = _NAMES.get(witness.name, witness.name)
        statements = witness.statements
        if not table.verbose:
            weighty = tuple(statement for statement in statements if statement.weight)
            statements = weighty[:_MAX_STATEMENTS] or statements[:1]
        for statement in statements:
            nodes = node_set(statement.nodes, _RANKS) if statement.nodes else ""
            subject = ranks(statement.ranks, _RANKS) or nodes
            rows.append((name, f"{subject}: {statement.text}" if subject else statement.text, ""))
        if table.verbose:
            rows += [(name, f"nothing: {text}", "dim") for text in witness.absent]
            if not statements and not witness.absent:
                rows.append((name, "saw nothing out of the ordinary", "dim"))
        elif not statements:
            silent_names.append(name)
    if silent_names:
        rows.append(("nothing from", f"{', '.join(silent_names)} (-v tells why)", "dim"))
    if rows:
        yield line("")
    for name, group in groupby(rows, key=itemgetter(0)):
        for index, (_, text, style) in enumerate(group):
            shown = "" if index else name
            yield line((f"{shown:<{_WITNESS}}", style or "bold"), (text, style))


# --- `stacks --check`: an item per line, and what to do for the next run.

_MAX_SET = 30  # columns of the ranks and of the nodes of an item


def debuggable(document: Debuggable, options: Options = PLAIN) -> Iterator[StyledLine]:
    """An item per line, with its ranks where these are not all, and what to do."""
    maximum = max((finding.processes for finding in document.findings), default=0)
    places = {node for finding in document.findings for node in finding.nodes}
    job = f"job {sanitise(document.job)[:60]}: " if document.job else ""
    many = counted(maximum, "process", "processes")
    yield line(f"{job}{many} on {counted(len(places), 'node')}")
    for finding in document.findings:
        if options.quiet and finding.result == "ok":
            continue
        owner = ""
        if finding.processes < maximum:
            limit = NO_LIMIT if options.verbose else _MAX_SET
            count = counted(finding.processes, "process", "processes")
            members = ranks(finding.ranks, limit) or count
            owner = f"{members} on {node_set(finding.nodes, limit)}: "
        result = (f"{finding.result:<9}", STYLES[finding.result])
        yield line(result, f"{finding.item:<13}{owner}{finding.observation}")
        if finding.fix and finding.result != "ok":
            yield line(" " * 22, finding.fix)
    yield from show_gaps(document.gaps, options)

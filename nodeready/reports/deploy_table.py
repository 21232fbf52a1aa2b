"""A deploy on a terminal: its plan and its outcome, nodes with the same plan shown once.

Plans, results and errors that differ by numbers alone are one row, and on a terminal all of it
fits on a screen; the files' differences are shown whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from nodeready.deploy.document import Deploy, Node
from nodeready.reports.lines import STYLES, Line, fits, line, told
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.sections import Section, fitted
from nodeready.reports.similar_texts import Alike, Texts, alike
from nodeready.reports.table_layout import NO_LIMIT, TableLayout
from nodeready.text import counted

#: So many plans, results and errors are shown whole, however long they are.
_FEW = 10


class Missed(Protocol):
    """A node, and why it could not be looked at, if it could not."""

    @property
    def name(self) -> str: ...

    @property
    def error(self) -> str: ...

    @property
    def unreachable(self) -> bool: ...


#: Kinds of lines in a plan: a step, what it repairs, what it does, a difference, no plan.
_STEP, _CHECK, _ACTION, _DIFF, _REFUSED = "step", "check", "action", "diff", "refused"
#: The kinds of a plan's lines, each with the step or the check that it is of.
_Kinds = tuple[tuple[str, str], ...]


def _plan(node: Node, options: Options) -> tuple[_Kinds, Texts]:
    """What a plan says: the kinds of its lines, and their texts."""
    rows: list[tuple[tuple[str, str], str]] = []
    for change in node.changes:
        rows.append(((_STEP, change.step), ""))
        rows += [((_CHECK, one.check), told(one)) for one in change.checks]
        rows += [((_ACTION, ""), action.text) for action in change.actions]
        rows += [((_DIFF, ""), row) for row in (change.diff if options.diff else ())]
    rows += [((_REFUSED, step), why) for step, why in node.refused.items()]
    return tuple(kind for kind, _ in rows), tuple(text for _, text in rows)


class _DeployTable(TableLayout):
    indent = 0

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.options = options

    def alike(self, pairs: Iterable[tuple[Texts, str]], *, reasons: bool = False) -> list[Alike]:
        """Rows of nodes that say the same, under -v, or nearly the same."""
        return alike(pairs, NO_LIMIT if self.options.verbose else 3, reasons=reasons)

    def fitted(self, sections: Sequence[Section]) -> Iterator[Line]:
        # A line is left to the counts. What --diff asks for is the differences, however long.
        room = 0 if self.is_whole or self.options.diff else self.options.lines - 1
        return fitted(sections, room, self.options.width, _FEW)

    # --- Plans.

    def plans(self, found: Iterable[Node]) -> Section:
        """Per group of nodes with the same plan: what would change, why, and the files' diffs."""
        kinds: dict[_Kinds, list[tuple[Texts, str]]] = {}
        for node in found:
            if node.planned:
                kind, texts = _plan(node, self.options)
                kinds.setdefault(kind, []).append((texts, node.name))
        rows = [(kind, row) for kind, pairs in kinds.items() for row in self.alike(pairs)]
        rows.sort(key=lambda pair: -len(pair[1].names))
        return Section(rows, self.plan, self.short_plan, self.more)

    def plan(self, found: tuple[_Kinds, Alike]) -> Iterator[Line]:
        kinds, row = found
        example = f", e.g. of {row.example}" if not row.said else ""
        changes = counted(sum(kind == _STEP for kind, _ in kinds), "change")
        yield line(self.names(row.names), f": {changes}{example}")
        for (kind, name), text in zip(kinds, row.said or row.instance):
            if kind == _CHECK:
                yield line("  ", (f"{name:<26}", STYLES["change"]), f" {text}")
            elif kind == _REFUSED:
                yield line("  ", (f"{name:<26}", STYLES["fail"]), f" cannot be planned: {text}")
            elif kind == _ACTION:
                yield line(("    + ", STYLES["change"]), text)
            elif kind == _DIFF:
                style = {"+": "green", "-": "red", "@": "cyan"}.get(text[:1], "")
                yield line("      ", (text, style))

    def short_plan(self, found: tuple[_Kinds, Alike]) -> Line:
        kinds, row = found
        steps = ", ".join(name for kind, name in kinds if kind == _STEP)
        return line((fits(row.names, 40), "bold"), f": {steps or 'cannot be planned'}")

    # --- What is left, and what went wrong.

    def left(self, found: Iterable[Node]) -> Section:
        """The results that no step of the run repairs: a reboot, a restart, a file of somebody."""
        kinds: dict[tuple[str, str], list[tuple[Texts, str]]] = {}
        for node in found:
            for one in node.for_a_person:
                pairs = kinds.setdefault((one.status, one.check), [])
                pairs.append(((told(one), one.fix), node.name))
        rows = [(*key, row) for key, pairs in kinds.items() for row in self.alike(pairs)]
        rows.sort(key=lambda one: -len(one[2].names))
        title = line(("for a person:", "bold"))
        return Section(rows, self.person, self.short_person, self.more, title=title)

    def person(self, found: tuple[str, str, Alike]) -> Iterator[Line]:
        status, check, row = found
        text, fix = row.said or row.instance
        start = (f"{status:<8}", STYLES[status])
        yield line("  ", start, f"{check}  ", self.names(row.names)[0])
        yield line(f"          {f'e.g. {row.example}: ' if not row.said else ''}{text}")
        if fix:
            yield line("          fix: ", (fix, "bold"))

    def short_person(self, found: tuple[str, str, Alike]) -> Line:
        status, check, row = found
        text = (row.said or row.instance)[0]
        names = fits(row.names, 30)
        return line("  ", (f"{status:<8}", STYLES[status]), f"{check}  {names}  {text}")

    def rows(
        self, word: str, style: str, pairs: Iterable[tuple[Texts, str]], *, reasons: bool = False
    ) -> Section:
        """Rows of one line each: the word, the nodes, and what they say."""

        def one(row: Alike) -> Line:
            example = f"e.g. {row.example}: " if not row.said else ""
            said = ": ".join(row.said or row.instance)
            start = (f"{word:<12}", STYLES[style])
            # Who was cut off is told in full, where it is one.
            lone = word == "partial" and len(row.names) == 1
            who = row.names[0] if lone else self.names(row.names)[0]
            return line(start, who, f": {example}{said}")

        return Section(self.alike(pairs, reasons=reasons), lambda row: [one(row)], one, self.more)

    def errors(self, found: Iterable[Missed]) -> list[Section]:
        """The nodes that could not be looked at, nodes with the same reason on one line."""
        lost = [(one.unreachable, (one.error.removeprefix(f"{one.name}: "),), one.name)
                for one in found if one.error]  # fmt: skip
        kinds = list(dict.fromkeys(gone for gone, *_ in lost))
        return [
            self.rows(
                "unreachable" if kind else "failed",
                "fail",
                ((text, name) for gone, text, name in lost if gone == kind),
                reasons=True,
            )
            for kind in kinds
        ]

    def outcomes(self, found: Iterable[Node]) -> list[Section]:
        """The outcomes, node sets folded: failed steps first, each with its reason."""
        done = [(node, node.outcome) for node in found if node.outcome is not None]
        failed = [((step, why), n.name) for n, one in done for step, why in one.failed.items()]
        cut = [((f"stopped in {one.cut}",), n.name) for n, one in done if one.cut and not n.error]
        left = [
            ((result.check, told(result)), node.name)
            for node, one in done
            if not one.failed
            for result in one.left
        ]
        changed = [((", ".join(one.done),), node.name) for node, one in done if one.done]
        return [
            self.rows("failed", "fail", failed),
            self.rows("partial", "warn", cut),
            self.rows("not fixed", "fail", left),
            self.rows("changed", "changed", changed),
        ]


def show_plan(found: Iterable[Node], options: Options = PLAIN) -> Iterator[Line]:
    """Per group of nodes with the same plan: what would change, why, and the files' diffs."""
    table = _DeployTable(options)
    return table.fitted([table.plans(found)])


def show_errors(found: Iterable[Missed]) -> Iterator[Line]:
    """The nodes that could not be looked at, nodes with the same reason on one line."""
    table = _DeployTable(PLAIN)
    return table.fitted(table.errors(found))


def _word(node: Node) -> str:
    """The word under which a node is counted; "to change" for every node with a plan."""
    if node.planned and not node.error:
        return "to change"
    return node.status.replace("-", " ")


def _planned(deploy: Deploy, options: Options) -> Iterator[Line]:
    table = _DeployTable(options)
    found = deploy.nodes
    yield from table.fitted([table.plans(found), table.left(found), *table.errors(found)])
    counts = Counter(map(_word, deploy.nodes))
    always = ("to change", "ok", "unknown", "unreachable")
    rest = [word for word in ("failed", "for a person") if counts[word]]
    words = [*always, *sorted(rest, key=list(counts).index)]
    yield line(", ".join(f"{counts[word]} {word}" for word in words))


def _result(deploy: Deploy, options: Options) -> Iterator[Line]:
    table = _DeployTable(options)
    sections = table.outcomes(deploy.nodes)
    if deploy.complete:
        sections += [*table.errors(deploy.nodes), table.left(deploy.nodes)]
    yield from table.fitted(sections)
    if not deploy.complete or options.quiet:
        return
    failed = sum(node.failed for node in deploy.nodes)
    lost = sum(node.unreachable for node in deploy.nodes)
    done = [node.outcome.done for node in deploy.nodes if node.outcome]
    words = Counter(map(_word, deploy.nodes))
    rest = (f", {words[word]} {word}" for word in ("unknown", "for a person") if words[word])
    yield line(
        f"{sum(map(bool, done))} changed ({counted(sum(map(len, done)), 'change')}), "
        f"{words['ok']} ok, {failed} failed, {lost} unreachable{''.join(rest)}"
    )


def show(deploy: Deploy, options: Options = PLAIN) -> Iterator[Line]:
    """The plan, after ``--check``; else the outcome, and what is left for a person.

    After an interrupt only the outcome so far is shown. With ``diff`` the plan has the files'
    differences. With ``quiet``, what was changed, what failed and what is left for a person is
    shown, and nothing where all is well.
    """
    only = deploy.check and deploy.complete
    return _planned(deploy, options) if only else _result(deploy, options)

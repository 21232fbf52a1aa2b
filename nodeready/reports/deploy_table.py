"""A deploy on a terminal: its plan and its outcome, once for nodes with the same plan.

Plans, results and errors that differ only by numbers are one row, and on a terminal all of it
fits on a screen; the files' differences are shown whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from nodeready.core.result import fix_text, result_text
from nodeready.core.text import counted
from nodeready.reports.lines import (
    NO_LIMIT,
    STYLES,
    RowSection,
    SimilarTexts,
    StyledLine,
    TableLayout,
    Texts,
    fitted,
    fold_similar,
    line,
    node_set_or_count,
    with_inventory,
)
from nodeready.reports.registry import PLAIN, Options
from nodeready.runs.deploy.document import Deploy, DeployedNode

_FEW = 10  # maximum plans, results and errors that are all shown whole

#: Kinds of lines in a plan: a step, a check, an action, a difference, a refused step.
_STEP, _CHECK, _ACTION, _DIFF, _REFUSED = "step", "check", "action", "diff", "refused"
#: The kinds of a plan's lines, each with its step or check, or "".
_Kinds = tuple[tuple[str, str], ...]


def _plan(node: DeployedNode, options: Options) -> tuple[_Kinds, Texts]:
    """The kinds of a plan's lines, and their texts."""
    rows: list[tuple[tuple[str, str], str]] = []
    for change in node.changes:
        rows.append(((_STEP, change.step), ""))
        rows += [((_CHECK, result.check), result_text(result)) for result in change.checks]
        rows += [((_ACTION, ""), action.text) for action in change.actions]
        rows += [((_DIFF, ""), row) for row in (change.diff if options.diff else ())]
    rows += [((_REFUSED, step), reason) for step, reason in node.refused.items()]
    return tuple(kind for kind, _ in rows), tuple(text for _, text in rows)


class _DeployTable(TableLayout):
    indent = 0

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.options = options

    def similar(self, pairs: Iterable[tuple[Texts, str]]) -> list[SimilarTexts]:
        """Rows of nodes with similar texts; under -v, with equal texts."""
        return fold_similar(pairs, NO_LIMIT if self.options.verbose else 3)

    def lost(self, deploy: Deploy) -> list[RowSection]:
        """The nodes without an answer, in the columns of `rows`."""
        layout = TableLayout(self.options)
        layout.indent = 12
        return layout.gaps(deploy.gaps)

    def fitted(self, sections: Sequence[RowSection]) -> Iterator[StyledLine]:
        # One line is for the counts. With --diff, the differences are shown whole.
        room = 0 if self.is_whole or self.options.diff else self.options.lines - 1
        return fitted(sections, room, self.options.width, _FEW)

    # --- Plans.

    def plans(self, nodes: Iterable[DeployedNode]) -> RowSection:
        """Per group of nodes with the same plan: what would change, why, and the files' diffs."""
        kinds: dict[_Kinds, list[tuple[Texts, str]]] = {}
        for node in nodes:
            if node.planned:
                kind, texts = _plan(node, self.options)
                kinds.setdefault(kind, []).append((texts, node.name))
        rows = [(kind, row) for kind, pairs in kinds.items() for row in self.similar(pairs)]
        rows.sort(key=lambda pair: -len(pair[1].names))
        return RowSection(rows, self.plan, self.short_plan, self.count_line)

    def plan(self, plan: tuple[_Kinds, SimilarTexts]) -> Iterator[StyledLine]:
        kinds, row = plan
        example = "" if row.shared_texts else f", e.g. of {row.example}"
        changes = counted(sum(kind == _STEP for kind, _ in kinds), "change")
        yield line(self.names(row.names), f": {changes}{example}")
        for (kind, name), text in zip(kinds, row.texts):
            if kind == _CHECK:
                yield line("  ", (f"{name:<26}", STYLES["change"]), f" {text}")
            elif kind == _REFUSED:
                yield line("  ", (f"{name:<26}", STYLES["fail"]), f" cannot be planned: {text}")
            elif kind == _ACTION:
                yield line(("    + ", STYLES["change"]), text)
            elif kind == _DIFF:
                style = {"+": "green", "-": "red", "@": "cyan"}.get(text[:1], "")
                yield line("      ", (text, style))

    def short_plan(self, plan: tuple[_Kinds, SimilarTexts]) -> StyledLine:
        kinds, row = plan
        steps = ", ".join(name for kind, name in kinds if kind == _STEP) or "cannot be planned"
        return line((node_set_or_count(row.names, 40), "bold"), f": {steps}")

    # --- Remaining results, and failures.

    def for_a_person(self, nodes: Iterable[DeployedNode]) -> RowSection:
        kinds: dict[tuple[str, str], list[tuple[Texts, str]]] = {}
        ranks: dict[tuple[str, str], tuple[int, int]] = {}
        for node in nodes:
            for result in node.for_a_person:
                key = result.status, result.check
                pairs = kinds.setdefault(key, [])
                pairs.append(((result_text(result), fix_text(result)), node.name))
                ranks.setdefault(key, result.rank)
        rows = [(*key, row) for key, pairs in kinds.items() for row in self.similar(pairs)]
        rows.sort(key=lambda finding: (ranks[finding[:2]], -len(finding[2].names)))
        title = line(("for a person:", "bold"))
        return RowSection(rows, self.person, self.short_person, self.count_line, title=title)

    def person(self, finding: tuple[str, str, SimilarTexts]) -> Iterator[StyledLine]:
        status, check, row = finding
        text, fix = row.texts
        example = "" if row.shared_texts else f"e.g. {row.example}: "
        start = (f"{status:<8}", STYLES[status])
        yield line("  ", start, f"{check}  ", self.names(row.names)[0])
        yield line(f"          {example}{text}")
        if fix:
            fix = with_inventory(fix, self.options.inventory)
            yield line("          fix: ", (fix, "bold"))

    def short_person(self, finding: tuple[str, str, SimilarTexts]) -> StyledLine:
        status, check, row = finding
        names = node_set_or_count(row.names, 30)
        return line("  ", (f"{status:<8}", STYLES[status]), f"{check}  {names}  {row.texts[0]}")

    def rows(self, word: str, style: str, pairs: Iterable[tuple[Texts, str]]) -> RowSection:
        """Rows of one line each: the word, the nodes, and their text."""

        def row_line(row: SimilarTexts) -> StyledLine:
            example = "" if row.shared_texts else f"e.g. {row.example}: "
            # The only interrupted node is named in full.
            is_whole = word == "partial" and len(row.names) == 1
            names = row.names[0] if is_whole else self.names(row.names)[0]
            text = f": {example}{': '.join(row.texts)}"
            return line((f"{word:<12}", STYLES[style]), names, text)

        rows = self.similar(pairs)
        return RowSection(rows, lambda row: [row_line(row)], row_line, self.count_line)

    def outcomes(self, nodes: Iterable[DeployedNode]) -> list[RowSection]:
        """The outcomes, node sets folded: failed steps first, each with its reason."""
        pairs: dict[str, list[tuple[Texts, str]]] = {word: [] for word in _OUTCOME_STYLES}
        for node in nodes:
            if (outcome := node.outcome) is None:
                continue
            texts: dict[str, list[Texts]] = {"failed": [*outcome.failed.items()]}
            if outcome.interrupted_step and not node.gap:
                texts["partial"] = [(f"stopped in {outcome.interrupted_step}",)]
            if not outcome.failed:
                unrepaired = ((result.check, result_text(result)) for result in outcome.unrepaired)
                texts["not fixed"] = [*unrepaired]
            if outcome.done:
                texts["changed"] = [(", ".join(outcome.done),)]
            for word, node_texts in texts.items():
                pairs[word] += ((text, node.name) for text in node_texts)
        return [self.rows(word, style, pairs[word]) for word, style in _OUTCOME_STYLES.items()]


#: Word of an outcome -> its style.
_OUTCOME_STYLES = {
    "failed": "fail", "partial": "warn", "not fixed": "fail", "changed": "changed",
}  # fmt: skip


def show_plan(nodes: Iterable[DeployedNode], options: Options = PLAIN) -> Iterator[StyledLine]:
    table = _DeployTable(options)
    return table.fitted([table.plans(nodes)])


def _word(node: DeployedNode) -> str:
    """The word under which a node is counted; "to change" for every node with a plan."""
    if node.planned and not node.gap:
        return "to change"
    return node.status.replace("-", " ")


def _planned(deploy: Deploy, options: Options) -> Iterator[StyledLine]:
    table = _DeployTable(options)
    nodes = deploy.nodes
    sections = [table.plans(nodes), table.for_a_person(nodes), *table.lost(deploy)]
    yield from table.fitted(sections)
    counts = Counter(map(_word, nodes))
    always = ("to change", "ok", "unknown", "unreachable")
    optional = [word for word in ("failed", "for a person") if counts[word]]
    words = [*always, *sorted(optional, key=list(counts).index)]
    yield line(", ".join(f"{counts[word]} {word}" for word in words))


def _result(deploy: Deploy, options: Options) -> Iterator[StyledLine]:
    table = _DeployTable(options)
    sections = table.outcomes(deploy.nodes)
    if deploy.complete:
        sections += [*table.lost(deploy), table.for_a_person(deploy.nodes)]
    yield from table.fitted(sections)
    if not deploy.complete or options.quiet:
        return
    failed = sum(node.failed for node in deploy.nodes)
    lost = sum(gap.gap.is_unreached for gap in deploy.gaps)
    done = [node.outcome.done for node in deploy.nodes if node.outcome]
    words = Counter(map(_word, deploy.nodes))
    counts = {"unknown": words["unknown"], "for a person": words["for a person"]}
    counts["untouched"] = len(deploy.untouched)
    optional = "".join(f", {count} {word}" for word, count in counts.items() if count)
    yield line(
        f"{sum(map(bool, done))} changed ({counted(sum(map(len, done)), 'change')}), "
        f"{words['ok']} ok, {failed} failed, {lost} unreachable{optional}"
    )


def show(deploy: Deploy, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The plan, after ``--check``; else the outcome, and what is left for a person. After an
    interrupt only the outcome so far is shown. With ``diff`` the plan has the files' differences.
    With ``quiet``, what was changed, what failed and what is left for a person is shown, and
    nothing where all is ok.
    """
    is_only_plan = deploy.check and deploy.complete
    return _planned(deploy, options) if is_only_plan else _result(deploy, options)

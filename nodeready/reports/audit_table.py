"""The tables of `audit` and `ready`: failures first with their fix, then a line for healthy nodes.

On a terminal the table fits on a screen. `ready` shows its go and no-go above the findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nodeready.agent.audit_document import NODE_STATUSES, Audit, NodeReport, Outlier, Recorded
from nodeready.core.result import result_text
from nodeready.core.text import counted, sanitise, span
from nodeready.reports.findings import (
    AuditFinding,
    findings,
    fold_fixes,
    majority,
    nodes_by_value,
    value_text,
)
from nodeready.reports.lines import (
    MAX_WIDTH,
    NO_LIMIT,
    STYLES,
    Part,
    RowSection,
    Safe,
    StyledLine,
    TableLayout,
    fitted,
    grouped,
    line,
    node_set,
    node_set_or_count,
    with_inventory,
)
from nodeready.reports.registry import PLAIN, Options

if TYPE_CHECKING:
    from nodeready.agent.audit_document import Ready

_MAX_VALUES = 4  # maximum values of one outlier without -v
_MAX_WHOLE = 30  # maximum findings of an audit of one node that are shown whole
_MIN_ROWS = 12  # minimum lines for the findings
#: The last line of a table that was cut.
MORE_TEXT = "all of it: -v, | less, or --format json; these nodes again: --limit @last-failed"
#: Columns of the words on the left, and maximum columns of the names of checks.
_INDENT, _MAX_NAME = 9, 26
_MAX_REASONS = 8  # maximum reasons of no-go without -v
_MAX_SUBJECTS = 3  # maximum subjects that the command on the last line names


class _AuditTable(TableLayout):
    def __init__(self, audit: Audit, names: Iterable[str], options: Options) -> None:
        super().__init__(options)
        # Columns for the names of checks and facts.
        self.name_width = min(max(map(len, names), default=0), _MAX_NAME)
        # The audit has one node, which no row names.
        self.has_one_node = len(audit.nodes) == 1
        self.width = min(options.width, MAX_WIDTH)
        # A row of the table does not name all its nodes.
        self.is_cut = False
        self.inventory = options.inventory

    def names(self, names: Iterable[str], room: int = 0) -> tuple[str, str]:
        """As in a `TableLayout`; remembers whether the set was cut."""
        names = [*names]
        text, style = super().names(names, room)
        self.is_cut = self.is_cut or text.endswith(f"({len(names)} nodes)")
        return text, style

    def nodes(self, names: Iterable[str], columns: int) -> str:
        """A node set, cut where it does not fit beside other text of ``columns``."""
        return self.names(names, max(20, self.width - columns))[0]

    def named(
        self, word: str, name: str, names: Sequence[str], style: str = "", note: str = ""
    ) -> StyledLine:
        """``fail     gpus.ecc_errors  gpu[007,019]  loses job``."""
        end = (f"  {note}" if note else "", "dim")
        if self.has_one_node:
            return self.head(word, style or word, name, end)
        name = f"{name:<{self.name_width}}  "
        columns = _INDENT + len(name) + len(end[0])
        return self.head(word, style or word, name, (self.nodes(names, columns), "bold"), end)

    def short(
        self, word: str, name: str, names: Sequence[str], text: str, style: str = ""
    ) -> StyledLine:
        """A row in one line: its nodes in at most half of the line, and their text."""
        self.is_cut = True
        start = (f"{word:<{_INDENT - 2}}  ", STYLES[style or word])
        name = f"{name:<{self.name_width}}  " if name else ""
        room = max(20, (self.width - _INDENT - len(name)) // 2)
        return line(start, name, (node_set_or_count(names, room), "bold"), f"  {text}")

    def finding(self, finding: AuditFinding) -> Iterator[StyledLine]:
        """A finding: its row, what was observed, and the fix or the reason of the waiver."""
        if self.has_one_node and finding.status in ("ok", "na"):
            text = f"{finding.check:<{self.name_width}}  {finding.text}".rstrip()
            yield self.head(finding.status, finding.status, text)
            return
        yield self.named(finding.status, finding.title, finding.names, note=finding.cost)
        if finding.text:
            yield self.detail(finding.text)
        if finding.example:
            yield self.detail("e.g. ", finding.example)
        if finding.status == "waived":
            yield self.sentence((finding.fix, "dim"))
        elif finding.fix:
            yield self.sentence("fix: ", (with_inventory(finding.fix, self.inventory), "cyan"))

    def brief(self, finding: AuditFinding) -> StyledLine:
        text = finding.text or f"e.g. {finding.example}"
        return self.short(finding.status, finding.title, finding.names, text)

    def outlier(self, outlier: Outlier) -> Iterator[StyledLine]:
        """An outlier: the fact with the nodes that differ, then the value of most nodes."""
        yield self.named("differs", outlier.fact, list(outlier.nodes), "warn")
        yield self.detail(self.values(outlier))
        yield self.detail(majority(outlier))

    def values(self, outlier: Outlier) -> str:
        """The values of the nodes that differ; of many, the first ones."""
        rows = list(nodes_by_value(outlier))
        maximum = len(rows) if self.is_whole else _MAX_VALUES
        shown = "; ".join(f"{self.nodes(names, 20)}: {value}" for names, value in rows[:maximum])
        hidden = f"; and {len(rows) - maximum} more values" if rows[maximum:] else ""
        text = rows[0][1] if len(rows) == 1 else f"{shown}{hidden}"
        return Safe(sanitise(text, len(text))) if self.is_whole else text

    def brief_outlier(self, outlier: Outlier) -> StyledLine:
        text = f"not {value_text(outlier.majority)}: {self.values(outlier)}"
        return self.short("differs", outlier.fact, list(outlier.nodes), text, "warn")

    def count_line(self, count: int) -> StyledLine:
        self.is_cut = True
        return super().count_line(count)

    def section(self, rows: Sequence[AuditFinding]) -> RowSection:
        return RowSection(rows, self.finding, self.brief, self.count_line)

    def healthy(self, all_nodes: Sequence[NodeReport]) -> Iterator[StyledLine]:
        """One line for the nodes without a finding, one for those to which nothing applies."""
        healthy = [node for node in all_nodes if node.status in ("ok", "waived")]
        passed = [node.statuses["ok"] for node in healthy]
        minimum, maximum = min(passed, default=0), max(passed, default=0)
        checks = counted(maximum, "check")
        checks = checks if minimum == maximum else f"{minimum} to {maximum} checks"
        na = [node for node in all_nodes if node.status == "na"], "  nothing applies here"
        for word, nodes, text in (("ok", healthy, f"  {checks} passed"), ("na", *na)):
            if nodes:
                names = self.nodes((node.name for node in nodes), _INDENT + len(text))
                yield self.head(word, word, (names, "bold"), text)


def _counts(noun: str, counts: dict[str, int]) -> str:
    shown = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    return f"{counted(sum(counts.values()), noun)}: {shown or 'nothing to show'}"


def show_audit(audit: Audit, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The findings, the worst first, each with its fix; then a line for the healthy nodes.

    With ``verbose`` nothing is folded by example or cut, and the results ok and na are shown, too.
    """
    is_verbose = options.verbose > 0
    bad = findings(audit, ("fail", "unknown", "warn"), is_verbose)
    bad, repaired = fold_fixes(bad)
    waived = findings(audit, ("waived",), is_verbose)
    healthy = findings(audit, ("na", "ok")) if is_verbose else []
    names = [finding.title for finding in (*bad, *waived, *healthy)]
    table = _AuditTable(audit, [*names, *(outlier.fact for outlier in audit.outliers)], options)
    tail = [line("")] if names or audit.gaps or audit.outliers else []
    tail += table.healthy(audit.nodes)
    if not audit.complete:
        tail.append(table.partial())
    if audit.recorded is not None:
        tail += _recorded(audit, audit.recorded, options.verbose)
    tail.append(line(_counts("node", audit.summary["nodes"])))
    tail.append(line(_counts("result", audit.summary["results"])))
    if repaired:
        # A deploy changes only what fails: of many subjects, the choice is a long way to say all.
        only = f" --only {','.join(repaired)}" if len(repaired) <= _MAX_SUBJECTS else ""
        tail.append(line("next: ", (f"nodeready deploy {options.inventory}{only}", "cyan")))
    outliers = RowSection(audit.outliers, table.outlier, table.brief_outlier, table.count_line)
    sections = [*table.gaps(audit.gaps), table.section(bad), outliers]
    sections += [table.section(waived), table.section(healthy)]
    room = 0 if table.is_whole else max(_MIN_ROWS, options.lines - len(tail) - 1)
    # All findings of a single node are worth their lines.
    yield from fitted(sections, room, options.width, _MAX_WHOLE if table.has_one_node else 0)
    yield from tail
    if table.is_cut:
        yield line((MORE_TEXT, "dim"))


def _recorded(audit: Audit, recorded: Recorded, verbose: int) -> Iterator[StyledLine]:
    """The source and the age of the verdicts; with ``verbose`` the age of each."""
    if verbose:
        aged = ((node.age_s, node.name) for node in audit.nodes if node.age_s is not None)
        for age, names in grouped((span(max(0.0, age_s)), name) for age_s, name in aged):
            nodes = node_set(names, NO_LIMIT), "bold"
            yield line((f"{'age':<{_INDENT}}", "bold"), f"{age}  ", nodes)
    share = f"{counted(recorded.believed, 'node')} of {len(audit.nodes)}"
    text = f"recorded: {share} in {recorded.source}"
    if recorded.newest_s is not None and recorded.oldest_s is not None:
        text += f", newest {span(recorded.newest_s)}, oldest {span(recorded.oldest_s)} old"
    untrusted = len(audit.nodes) - recorded.believed - recorded.stale - recorded.missing
    counts = {"stale": recorded.stale, "without a verdict": recorded.missing}
    counts["not believed"] = untrusted
    bad = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    yield line(f"{text}; {bad}" if bad else text)


def show_ready(ready: Ready, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The ready nodes, the rest with their reasons, then the findings of the audit."""
    head = list(_go_lines(ready, options))
    yield from head
    remaining = max(_MIN_ROWS, options.lines - len(head)) if options.lines else 0
    yield from show_audit(ready.audit, replace(options, lines=remaining))


def _go_lines(ready: Ready, options: Options) -> Iterator[StyledLine]:
    is_whole = bool(options.verbose) or not options.lines
    room = NO_LIMIT if is_whole else min(options.width, MAX_WIDTH) - _INDENT
    for word, style, names in (("GO", "ok", ready.go), ("NO-GO", "fail", ready.no_go)):
        if names:
            count = counted(len(names), "node")
            text = node_set(names, max(20, room - len(count) - 2))
            yield line((f"{word:<{_INDENT}}", STYLES[style]), (text, "bold"), f"  {count}")
    if ready.no_go:
        yield from _no_go_reasons(ready, is_whole, room)
    if ready.needed is not None:
        word, style = ("enough", "ok") if ready.enough else ("too few", "fail")
        yield line((f"{word:<{_INDENT}}", STYLES[style]), f"{ready.needed} needed")
    yield line("")


def _no_go_reasons(ready: Ready, is_whole: bool, room: int) -> Iterator[StyledLine]:
    """A line for each set of checks that stops nodes; the findings below have their texts."""
    pairs = (
        (", ".join(dict.fromkeys(reason.partition(":")[0] for reason in reasons)), name)
        for name, reasons in ready.no_go.items()
    )
    rows = grouped(pairs)
    maximum = len(rows) if is_whole else _MAX_REASONS
    for checks, names in rows[:maximum]:
        columns = NO_LIMIT if is_whole else max(20, room // 3)
        shown = node_set_or_count(names, columns)
        names_part: list[Part] = [] if len(rows) == 1 else [(shown, "bold"), "  "]
        text = line(" " * _INDENT, *names_part, checks)
        yield text if is_whole or len(rows) == 1 else text.cut(_INDENT + room - 3)
    if rows[maximum:]:
        yield line(" " * _INDENT, (f"and {len(rows) - maximum} more (-v shows them)", "bold"))


# --- `audit --watch`: what changed from one look to the next, a line each.

#: (node, check) -> its status and text; the check "": the node itself could not be probed.
Findings = Mapping[tuple[str, str], tuple[str, str]]
_GOOD = ("ok", "na", "waived")


def findings_of(audit: Audit, before: Findings) -> Findings:
    """The findings of an audit. A node that could not be probed keeps those of before."""
    findings: dict[tuple[str, str], tuple[str, str]] = {}
    lost = set()
    for node in audit.nodes:
        if node.error:
            lost.add(node.name)
            findings[node.name, ""] = node.status, node.error
        for result in node.results:
            if result.status not in _GOOD:
                findings[node.name, result.check] = result.status, result_text(result)
    findings |= {key: text for key, text in before.items() if key[0] in lost and key[1]}
    return findings


def changes(before: Findings, after: Findings, moment: str) -> Iterator[StyledLine]:
    """A line for each changed status, with its nodes; resolved findings come last.

    A change of the value alone does not count: ages and counts change at every look.
    """
    changed = (key for key in after if before.get(key, ("",))[0] != after[key][0])
    new = [((*after[key], key[1]), key[0]) for key in changed]
    gone = [(("ok", "", key[1]), key[0]) for key in before if key not in after]
    # The worst status first, and of one status the change of most nodes.
    rows = sorted(grouped(new), key=lambda row: NODE_STATUSES.index(row[0][0]))
    for (status, text, check), names in [*rows, *grouped(gone)]:
        subject = check or ("answers again" if status == "ok" else "")
        head = f"{moment}  ", (f"{status:<13}", STYLES.get(status, ""))
        name = f"{subject}  " if subject else ""
        yield line(*head, name, (node_set(names), "bold"), f"  {text}" if text else "")

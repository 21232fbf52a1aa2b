"""An audit as one HTML page: the fleet as a grid, the findings by cause, each node on a click.

Verdict, grid, findings and outliers are elements of the page, so that it can be read without its
script. The nodes themselves are data (`_NodeData`), which the script shows and searches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from markupsafe import Markup

from nodeready.agent import audit_document
from nodeready.agent.audit_document import Audit, NodeReport, Ready
from nodeready.core.result import Result, fix_text
from nodeready.core.text import counted, sanitise, utc_moment
from nodeready.reports.evidence_html import PART_TABLES, observed_facts
from nodeready.reports.findings import (
    AuditFinding,
    differing,
    errors,
    findings,
    majority,
    nodes_by_value,
)
from nodeready.reports.html_page import HtmlPage
from nodeready.reports.lines import cost_text, node_set, with_inventory
from nodeready.reports.registry import PLAIN, Options
from nodeready.runs.memory.look import Look
from nodeready.subjects.registry import SUBJECTS

# --- The trend: the nodes by status over the kept looks, as areas of a picture.

#: The statuses of each area, from the bottom: their name is that of the first one.
_LOST = (audit_document.UNREACHABLE, audit_document.FAILED)
_AREAS = (("fail", *_LOST), ("unknown",), ("warn",))
#: A look with a smaller share of the nodes, or of results per node, is partial, and no trend.
_SHARE = 0.5
#: Maximum looks of the picture, which has some pixels for each, and of the table below it.
_POINTS, _TREND_ROWS = 400, 50
WIDTH, HEIGHT = 800, 80


@dataclass(frozen=True)
class Trend:
    sentence: str  # what the picture shows
    # status -> the path of its area in SVG, in a box of WIDTH and HEIGHT
    areas: tuple[tuple[str, str], ...]
    maximum: int  # the nodes at the top of the picture
    first: str  # moments of the first and the last look
    last: str  # likewise
    rows: tuple[tuple[str, ...], ...]  # moment and count per area, the newest looks first


HEADS = ("look", "fail or no answer", "unknown", "warn")


def trend(looks: Sequence[Look], nodes: int) -> Trend | None:
    """The trend of a fleet of this many nodes; None: fewer than two looks at it were kept."""
    minimum = max(1, nodes * _SHARE)
    looks = [look for look in looks if look.complete]
    looks = [look for look in looks if sum(look.summary.get("nodes", {}).values()) >= minimum]
    maximum_results = max(map(_results_per_node, looks), default=0)
    counts_at = [
        (look.time_s, [sum(look.summary["nodes"][name] for name in area) for area in _AREAS])
        for look in looks
        if not _answered(look) or _results_per_node(look) >= maximum_results * _SHARE
    ]
    if len(counts_at) < 2:
        return None
    step = -(-len(counts_at) // _POINTS)
    # The newest look is always a point.
    points = counts_at[::-step][::-1]
    maximum = max(1, *(sum(counts) for _, counts in points))
    failing = [counts[0] for _, counts in counts_at]
    sentence = (
        f"{counted(len(counts_at), 'look')} since {utc_moment(counts_at[0][0])}: "
        f"at least {min(failing)} and at most {max(failing)} nodes failed or gave no "
        f"answer, {failing[-1]} at last"
    )
    areas = tuple(zip((area[0] for area in _AREAS), _paths(points, maximum)))
    newest = counts_at[: -_TREND_ROWS - 1 : -1]
    rows = tuple((utc_moment(time_s), *map(str, counts)) for time_s, counts in newest)
    first, last = utc_moment(points[0][0]), utc_moment(points[-1][0])
    return Trend(sentence, areas, maximum, first, last, rows)


def _answered(look: Look) -> int:
    return sum(n for status, n in look.summary["nodes"].items() if status not in _LOST)


def _results_per_node(look: Look) -> float:
    return sum(look.summary["results"].values()) / max(1, _answered(look))


def _paths(points: Sequence[tuple[float, Sequence[int]]], maximum: int) -> Iterator[str]:
    """The path of each area, on top of the area before it. A count holds until the next look."""
    first_s, last_s = points[0][0], points[-1][0]
    xs = [round((time_s - first_s) / max(1.0, last_s - first_s) * WIDTH) for time_s, _ in points]
    lower = [0] * len(points)
    for area in range(len(_AREAS)):
        upper = [low + counts[area] for low, (_, counts) in zip(lower, points)]
        top, bottom = (
            [f"{x} {round(HEIGHT - height / maximum * HEIGHT, 1)}"
             for index, height in enumerate(heights) for x in xs[index : index + 2]]
            for heights in (upper, lower)
        )  # fmt: skip
        yield f"M{'L'.join((*top, *reversed(bottom)))}Z"
        lower = upper


# --- The page.

#: Status of a node -> the letter on its square.
_LETTERS = {
    "unreachable": "X", "failed": "E", "fail": "F", "unknown": "?", "warn": "!", "waived": "v",
    "ok": "", "na": "-",
}  # fmt: skip
#: Maximum findings, outliers, and values of an outlier.
_FINDINGS, _OUTLIERS, _VALUES = 500, 200, 20
_DENSE = 2000  # nodes from which on the squares are small, so that 10,000 fit on a screen
#: Maximum characters of a node set in a row, of a whole one, and of a text in the data.
_SET, _WHOLE_SET, _TEXT = 60, 20_000, 1000


@cache
def _meaning(check: str) -> str:
    """The first sentence of the check's page; "" for a check of a policy."""
    subject = SUBJECTS.get(check.partition(".")[0])
    pages = (*subject.checks, subject.observed) if subject else ()
    return next((page.brief for page in pages if page.id == check), "")


@cache
def page() -> HtmlPage:
    return HtmlPage(
        "audit_page",
        DENSE=_DENSE, FINDINGS=_FINDINGS, OUTLIERS=_OUTLIERS, VALUES=_VALUES, SET=_SET,
        WHOLE_SET=_WHOLE_SET, LETTERS=_LETTERS, names=node_set, meaning=_meaning,
        TREND={"WIDTH": WIDTH, "HEIGHT": HEIGHT, "HEADS": HEADS}, majority=majority,
        by_value=lambda outlier: list(nodes_by_value(outlier)),
    )  # fmt: skip


# --- The nodes as data.


class _NodeData:
    """The nodes as JSON: every text once, and each node by the numbers of its texts. nodes: in the
    order of the grid. inventory: of the run, for the commands that repair
    """

    def __init__(self, audit: Audit, nodes: Sequence[NodeReport], inventory: str) -> None:
        self._nodes, self._inventory, self._moment = nodes, inventory, audit.started
        # Texts as the nodes have them -> their numbers, and as the page has them.
        self._numbers: dict[str, int] = {}
        self._texts: list[str] = []
        self._results: dict[Result, int] = {}
        self._passed: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._parts: dict[tuple[int, ...], int] = {}
        self._differences: dict[str, list[int]] = {}
        for outlier in audit.outliers:
            for name in outlier.nodes:
                differences = self._differences.setdefault(name, [])
                differences.append(self._text(differing(outlier, name)))

    def _text(self, text: str) -> int:
        number = self._numbers.setdefault(text, len(self._texts))
        if number == len(self._texts):
            self._texts.append(sanitise(text, _TEXT))
        return number

    def _node(self, node: NodeReport) -> list[Any]:
        """Name, status, group, error; seconds; findings; outliers; passed checks; parts. Of the
        checks that are ok or do not apply, the ids alone are data. A part is the number of its
        table and its texts.
        """
        ids: dict[str, list[int]] = {"ok": [], "na": []}
        numbers = []
        for result in node.results:
            if result.status in ids:
                ids[result.status].append(self._text(result.check))
            else:
                numbers.append(self._results.setdefault(result, len(self._results)))
        passed = tuple(ids["ok"]), tuple(ids["na"])
        facts = observed_facts(node.facts, self._moment)
        return [
            *map(self._text, (node.name, node.status, ", ".join(node.groups), node.error)),
            round(node.seconds, 2), numbers, self._differences.get(node.name, []),
            self._passed.setdefault(passed, len(self._passed)),
            [
                self._parts.setdefault((number, *map(self._text, row)), len(self._parts))
                for number, table in enumerate(PART_TABLES)
                for row in table.rows(facts)
            ],
        ]  # fmt: skip

    def _result(self, result: Result) -> tuple[str, ...]:
        """The texts of a result, in the order of the columns of page.js."""
        cost, fix = cost_text(result.severity, result.status), fix_text(result)
        texts = result.actual, result.expected, result.source
        return result.status, result.check, cost, *texts, with_inventory(fix, self._inventory)

    def json(self, rows: Sequence[AuditFinding]) -> Iterator[Markup]:
        """The data in pieces, with the nodes of these findings; no text ends the element."""
        place = {node.name: index for index, node in enumerate(self._nodes)}
        yield Markup('{"nodes":[')
        for index, node in enumerate(self._nodes):
            yield _safe_json(self._node(node), ",\n" if index else "\n")
        results = [[*map(self._text, self._result(result))] for result in self._results]
        for name, value in (
            ("findings", [_runs(place[name] for name in row.names) for row in rows]),
            ("results", results),
            ("passed", list(self._passed)),
            ("parts", list(self._parts)),
            ("tables", [[table.name, *table.columns] for table in PART_TABLES]),
            ("texts", self._texts),
        ):
            yield _safe_json(value, f'{"]" if name == "findings" else ""},\n"{name}":')
        yield Markup("}")


def _safe_json(value: object, before: str) -> Markup:
    """JSON in a script element: plain ASCII, without a tag, a comment or an entity."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(before + text)


def _runs(numbers: Iterable[int]) -> list[int]:
    """The first number and the count of each sequence.

    >>> _runs([3, 4, 5, 9])
    [3, 3, 9, 1]
    """
    runs: list[int] = []
    for number in sorted(numbers):
        if runs and runs[-2] + runs[-1] == number:
            runs[-1] += 1
        else:
            runs += (number, 1)
    return runs


# --- The page.


def _verdict(audit: Audit) -> tuple[str, str]:
    """The tone of the page, and the verdict in a sentence."""
    counts, total = audit.summary["nodes"], len(audit.nodes)
    bad = {status: counts[status] for status in audit_document.NODE_STATUSES[:4] if counts[status]}
    if bad:
        listed = ", ".join(f"{count} {status}" for status, count in bad.items())
        need = "needs" if sum(bad.values()) == 1 else "need"
        return "bad", f"{sum(bad.values())} of {counted(total, 'node')} {need} attention: {listed}"
    if counts["warn"]:
        return "warn", f"No node fails; {counts['warn']} of {counted(total, 'node')} warn"
    return "fine", f"No node of {total} fails or warns"


def _ready_verdict(ready: Ready) -> tuple[str, str]:
    total, enough = len(ready.audit.nodes), ready.enough
    needed = "" if ready.needed is None else f"; {ready.needed} needed"
    tone = "bad" if not enough else "warn" if ready.no_go else "fine"
    word = "GO" if enough else "NO-GO"
    return tone, f"{word}: {len(ready.go)} of {counted(total, 'node')} ready{needed}"


def render(document: Audit | Ready, options: Options = PLAIN) -> Iterator[str]:
    audit = document.audit if isinstance(document, Ready) else document
    tone, verdict = _ready_verdict(document) if isinstance(document, Ready) else _verdict(audit)
    groups: dict[str, list[NodeReport]] = {}
    for node in audit.nodes:
        groups.setdefault(", ".join(node.groups), []).append(node)
    nodes = [node for group in groups.values() for node in group]
    rows = [*errors(audit), *findings(audit, ("fail", "unknown", "warn", "waived"))]
    yield from page().render(
        title=verdict, tone=tone, audit=audit,
        counts={name: count for name, count in audit.summary["nodes"].items() if count},
        groups=groups, findings=rows, trend=trend(options.looks(), len(audit.nodes)),
        fix=lambda row: with_inventory(row.fix, options.inventory),
        data=_NodeData(audit, nodes, options.inventory).json(rows[:_FINDINGS]),
    )  # fmt: skip

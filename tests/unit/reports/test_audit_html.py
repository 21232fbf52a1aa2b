"""The page of an audit: its elements, and its nodes as data."""

import json
import re

import pytest

from nodeready.agent.audit_document import NODE_STATUSES, Audit, Ready
from nodeready.core.text import sanitise
from nodeready.reports import audit_html
from nodeready.reports.audit_html import trend
from nodeready.reports.registry import Options
from nodeready.runs.memory.look import Look
from tests.builders import fleets
from tests.builders.fleets import DIGEST, HOSTILE, outcomes
from tests.html_elements import Page, assert_known

AUDITS = {**outcomes(), "fleet": fleets.fleet(300)}
TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "section", "h1", "h2",
    "h3", "p", "b", "i", "ul", "li", "div", "span", "label", "input", "output", "details",
    "summary", "table", "thead", "tbody", "tr", "th", "td", "dialog", "script", "figure",
    "figcaption", "svg", "path",
}  # fmt: skip
ATTRIBUTES = {
    "lang", "charset", "http-equiv", "content", "name", "class", "id", "role", "hidden", "for",
    "type", "autocomplete", "spellcheck", "placeholder", "scope", "aria-label", "data-status",
    "viewbox", "preserveaspectratio", "d",
}  # fmt: skip


def look(number: int, complete: bool = True, results: int = 600, **nodes: int) -> Look:
    counts = {**dict.fromkeys(NODE_STATUSES, 0), **nodes}
    summary = {"nodes": counts, "results": {"ok": results}}
    return Look(number, 3600.0 * number, "audit", "prod.py", DIGEST, complete, 0, summary)


#: Some are no looks at the whole fleet: by --limit, interrupted, by --only.
LOOKS = (
    look(0, ok=12), look(1, fail=2, unreachable=1, ok=9), look(2, fail=2), look(3, False, fail=12),
    look(3, results=12, ok=12), look(4, fail=1, warn=3, ok=8),
)  # fmt: skip


def render(document: Audit | Ready) -> str:
    options = Options(inventory="prod.py", looks=lambda: LOOKS)
    return "".join(audit_html.render(document, options))


def data_of(page: Page) -> dict:
    text = "".join(page.texts["script"])
    return json.loads(text[: text.index('\n"use strict"')])


@pytest.mark.parametrize("name", AUDITS)
def test_a_page_has_only_known_elements_and_its_own_script(name):
    page = Page(render(AUDITS[name]))
    assert_known(page, audit_html.page(), TAGS, ATTRIBUTES)
    data, script = page.all("script")
    assert (data, script) == ({"type": "application/json", "id": "data"}, {})


@pytest.mark.parametrize("name", AUDITS)
def test_the_data_has_every_node_in_the_order_of_the_squares(name):
    """Its status, its findings, and the ids of the checks that passed."""
    audit, text = AUDITS[name], render(AUDITS[name])
    data = data_of(Page(text))
    texts = data["texts"]
    by_name = {sanitise(node.name): node for node in audit.nodes}
    read = {}
    for node in data["nodes"]:
        named, status, _, error = (texts[number] for number in node[:4])
        report = by_name[named]
        assert (status, error) == (report.status, sanitise(report.error))
        results = [[texts[number] for number in data["results"][place]] for place in node[5]]
        read[named] = {(row[1], row[0]) for row in results}
        for ids, word in zip(data["passed"][node[7]], ("ok", "na"), strict=True):
            read[named] |= {(texts[number], word) for number in ids}
        assert read[named] == {(result.check, result.status) for result in report.results}
    assert len(read) == len(audit.nodes)
    grid = text[text.index('<section id="grid"') : text.index('<section id="matches"')]
    squares = [status or "ok" for status in re.findall(r'<i(?: class="([a-z]+)")?>', grid)]
    assert squares == [texts[node[1]] for node in data["nodes"]]


def test_a_finding_knows_its_nodes():
    data = data_of(Page(render(AUDITS["mixed"])))
    names = [data["texts"][node[0]] for node in data["nodes"]]
    nodes = [
        [names[number] for first, count in zip(runs[::2], runs[1::2], strict=True)
         for number in range(first, first + count)]
        for runs in data["findings"]
    ]  # fmt: skip
    assert nodes[:2] == [["gpu009", "gpu010"], ["gpu002"]]
    assert ["gpu005", "gpu006"] in nodes


def test_a_hostile_text_is_a_text_in_the_page_and_in_its_data():
    text = render(AUDITS["hostile"])
    page = Page(text)
    shown = sanitise(HOSTILE)
    assert shown in data_of(page)["texts"]
    assert any(shown in part for part in page.texts["span"])
    assert text.count("</script>") == 2
    assert not {"<", ">", "&"} & set(text.partition('id="data">')[2].partition("</script>")[0])


@pytest.mark.parametrize(
    ("needed", "verdict"),
    [(None, "NO-GO: 3 of 5 nodes ready"), (3, "GO: 3 of 5 nodes ready; 3 needed")],
)
def test_a_page_of_ready_says_whether_the_job_can_start(needed, verdict):
    page = Page(render(Ready(AUDITS["fail"], 60, needed)))
    assert page.texts["h1"] == page.texts["title"] == [verdict]


def test_the_trend_has_the_complete_looks_at_the_fleet():
    shown = trend(LOOKS, 12)
    assert shown is not None
    assert shown.sentence == (
        "3 looks since 1970-01-01T00:00:00Z: at least 0 and at most 3 nodes failed or gave no "
        "answer, 1 at last"
    )
    assert shown.rows == (
        ("1970-01-01T04:00:00Z", "1", "0", "3"),
        ("1970-01-01T01:00:00Z", "3", "0", "0"),
        ("1970-01-01T00:00:00Z", "0", "0", "0"),
    )
    # 0 nodes of at most 4 until a quarter of the time, then 3, and 1 at the end.
    assert shown.areas[0] == (
        "fail", "M0 80.0L200 80.0L200 20.0L800 20.0L800 60.0L800 80.0L800 80.0L200 80.0L200 80.0"
        "L0 80.0Z",
    )  # fmt: skip
    assert trend(LOOKS[:1], 12) is None
    outage = trend((*LOOKS, look(5, results=0, unreachable=12)), 12)
    assert outage is not None
    assert outage.rows[0] == ("1970-01-01T05:00:00Z", "12", "0", "0")
    many = [look(number, fail=number % 7, ok=12) for number in range(5000)]
    longest = trend(many, 12)
    assert longest is not None
    assert max(len(path) for _, path in longest.areas) < 25_000
    assert longest.last == "1970-07-28T07:00:00Z"

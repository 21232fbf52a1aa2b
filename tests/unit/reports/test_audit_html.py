"""The page of an audit: its elements, and its nodes as data."""

from __future__ import annotations

import json
import re

import pytest

from nodeready.audit.document import Audit, Ready
from nodeready.reports import audit_html
from nodeready.reports.registry import Options
from nodeready.text import sanitise
from tests.builders import fleets
from tests.builders.fleets import HOSTILE, outcomes
from tests.html_elements import Page, assert_known

AUDITS = {**outcomes(), "fleet": fleets.fleet(300)}
TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "section", "h1", "h2",
    "h3", "p", "b", "i", "ul", "li", "div", "span", "label", "input", "output", "details",
    "summary", "table", "thead", "tbody", "tr", "th", "td", "dialog", "script",
}  # fmt: skip
ATTRIBUTES = {
    "lang", "charset", "http-equiv", "content", "name", "class", "id", "role", "hidden", "for",
    "type", "autocomplete", "spellcheck", "placeholder", "scope", "aria-label", "data-status",
}  # fmt: skip


def render(document: Audit | Ready) -> str:
    return "".join(audit_html.render(document, Options(inventory="prod.py")))


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

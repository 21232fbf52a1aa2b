"""The page of stacks needs no network, and has no element that a node put there."""

import re

import pytest

from nodeready.reports import stacks_html
from nodeready.reports.html_page import shown
from tests.builders import stack_fleets, stack_witnesses
from tests.builders.stack_fleets import stages
from tests.html_elements import Page, assert_known

FLEETS = {
    **stack_fleets.FLEETS,
    **{f"witnesses-{n}": f for n, f in stack_witnesses.FLEETS.items()},
    "witnesses-uneven": lambda: stack_witnesses.uneven(300),
}


def render(stacks) -> str:
    return "".join(stacks_html.render(stacks))


TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "section", "h1", "h2", "p",
    "b", "a", "ul", "ol", "li", "div", "span", "code", "label", "input", "output", "button",
    "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "script",
}  # fmt: skip
ATTRIBUTES = {
    "lang", "charset", "http-equiv", "content", "name", "class", "id", "role", "hidden", "for",
    "type", "autocomplete", "spellcheck", "placeholder", "scope", "open", "href", "data-ranks",
    "data-nodes", "data-groups", "data-group", "data-order", "data-pids", "data-sort",
    "data-states",
}  # fmt: skip


@pytest.mark.parametrize("name", FLEETS)
def test_a_page_has_only_known_elements_and_its_own_script(name):
    page = Page(render(FLEETS[name]()))
    assert_known(page, stacks_html.page(), TAGS, ATTRIBUTES)
    for _, attributes in page.elements:
        assert re.fullmatch(r"#group\d+", attributes.get("href") or "#group1")
    assert len(page.all("script")) == 1


def test_a_value_in_the_template_is_escaped_once():
    assert shown("<b>\x1b[31m\n\u202e&'\"") == "&lt;b&gt;\\x1b[31m\\x0a\\u202e&amp;&#x27;&quot;"
    assert shown(7) == "7"
    assert shown(shown("<b>")) == "&lt;b&gt;"


def test_a_very_large_job_is_a_page_that_opens():
    text = render(stages(16_000))
    assert len(text) < 2_000_000
    assert "and 1000 more: --format json has them" in text

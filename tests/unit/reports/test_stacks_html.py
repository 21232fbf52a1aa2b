"""The page of stacks needs no network, and has no element that a node put there."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from nodeready.reports import stacks_html
from nodeready.reports.html_page import shown
from tests.builders import stack_fleets, stack_witnesses
from tests.builders.stack_fleets import stages

FLEETS = {
    **stack_fleets.FLEETS,
    **{f"witnesses-{n}": f for n, f in stack_witnesses.FLEETS.items()},
    "witnesses-uneven": lambda: stack_witnesses.uneven(300),
}
STYLE, SCRIPT = stacks_html.page().style, stacks_html.page().script


def render(stacks) -> str:
    return "".join(stacks_html.render(stacks))


VOID = {"meta", "input"}
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


class Page(HTMLParser):
    """The elements, the attributes and the texts of a page, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.others: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def handle_comment(self, data):
        self.others.append(data)

    handle_pi = unknown_decl = handle_comment

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.mark.parametrize("name", FLEETS)
def test_a_page_has_only_known_elements_and_its_own_script(name):
    page = Page(render(FLEETS[name]()))
    assert page.open == page.others == []
    assert {tag for tag, _ in page.elements} <= TAGS
    for tag, attributes in page.elements:
        assert set(attributes) <= ATTRIBUTES, tag
        assert re.fullmatch(r"#group\d+", attributes.get("href") or "#group1")
        assert re.fullmatch(r"[a-z -]*", attributes.get("class") or "")
    assert "".join(page.texts["script"]) == SCRIPT
    assert "".join(page.texts["style"]) == STYLE
    assert len(page.all("script")) == len(page.all("style")) == len(page.all("title")) == 1
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_a_hostile_text_is_a_text():
    page = Page(render(FLEETS["hostile"]()))
    said = "".join(text for texts in page.texts.values() for text in texts)
    assert "</script></style><img src=x onerror=alert(1)>" in said
    assert not {"\x1b", "\u202e", "\x9b"} & set(said)


def test_a_value_in_the_template_is_escaped_once():
    assert shown("<b>\x1b[31m\n\u202e&'\"") == "&lt;b&gt;\\x1b[31m\\x0a\\u202e&amp;&#x27;&quot;"
    assert shown(7) == "7"
    assert shown(shown("<b>")) == "&lt;b&gt;"


def test_the_policy_allows_our_style_and_our_script_and_nothing_else():
    page = Page(render(FLEETS["one"]()))
    (policy,) = [m["content"] for m in page.all("meta") if m.get("http-equiv")]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("style-src") == f"'sha256-{digest(STYLE)}'"
    assert rules.pop("script-src") == f"'sha256-{digest(SCRIPT)}'"
    assert rules == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}
    assert not re.search(r"https?://|url\(|@import|src=", render(FLEETS["one"]()))


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_a_very_large_job_is_a_page_that_opens():
    text = render(stages(16_000))
    assert len(text) < 2_000_000
    assert "and 1000 more: --format json has them" in text

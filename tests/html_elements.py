"""The elements of a page, as a browser would see them."""

import base64
import hashlib
import re
from html.parser import HTMLParser

from nodeready.reports.html_page import HtmlPage

VOID = {"meta", "input"}


class Page(HTMLParser):
    """The elements, the attributes and the texts of a page, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.comments: list[str] = []
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
        self.comments.append(data)

    handle_pi = unknown_decl = handle_comment

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def assert_known(page: Page, kind: HtmlPage, tags: set[str], attributes: set[str]) -> None:
    """The page has these elements and attributes alone, its own style, and its own script."""
    assert page.open == page.comments == []
    assert {tag for tag, _ in page.elements} <= tags
    for tag, values in page.elements:
        assert set(values) <= attributes, tag
        assert re.fullmatch(r"[a-z -]*", values.get("class") or "")
    assert "".join(page.texts["style"]) == kind.style
    assert len(page.all("style")) == len(page.all("title")) == 1
    ids = [values["id"] for _, values in page.elements if "id" in values]
    assert len(ids) == len(set(ids))
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv")]
    rules = dict(rule.strip().split(" ", 1) for rule in (policy or "").split(";"))
    assert rules.pop("style-src") == f"'sha256-{_digest(kind.style)}'"
    if kind.script:
        assert "".join(page.texts["script"]).endswith(kind.script)
        assert rules.pop("script-src") == f"'sha256-{_digest(kind.script)}'"
    assert rules == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

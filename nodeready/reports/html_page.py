"""What the HTML pages have in common: each is one file that loads no other file.

A page is FOLDER/page.html.j2 in the frame of page.html.j2, with page.css and FOLDER/page.css
written into it, and page.js and FOLDER/page.js where it has a search. Style and script are
constant, and the page's Content-Security-Policy names their digests: a browser obeys no other
style or script, even if a text of a node became one in spite of the escaping.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Iterator

from jinja2 import Environment, PackageLoader, StrictUndefined, TemplateNotFound
from jinja2.ext import Extension
from markupsafe import Markup

from nodeready.core.text import counted, sanitise
from nodeready.reports.lines import NO_LIMIT

_TEXT = 4000  # maximum characters of a text in a page


class _Tight(Extension):
    """A template whose line breaks and indentation are not part of the page."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return re.sub(r"\n\s*", "", source)


def shown(value: object) -> Markup:
    """A value in a page: no tag, no attribute, no character that hides or reorders text.

    Jinja calls this for every expression of a template. Markup of the template itself stays.
    """
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(sanitise("" if value is None else str(value), NO_LIMIT)))


def _text(text: str, limit: int = _TEXT) -> str:
    """A text of a node, cut after ``limit`` characters."""
    return sanitise(text, limit)


def _prose(text: str, limit: int = _TEXT) -> Markup:
    """A sentence: text between backticks is code."""
    parts = [*map(shown, re.split(r"`([^`]+)`", _text(text, limit)))]
    parts[1::2] = map(Markup("<code>{}</code>").format, parts[1::2])
    return Markup("").join(parts)


def _lines(texts: Iterable[str], limit: int) -> Markup:
    """Texts with line breaks between them; a line break inside a text becomes an escape."""
    return Markup("\n").join(shown(_text(text, limit)) for text in texts)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


class HtmlPage:
    """A kind of page: template, style and script of a folder. names: for the template"""

    def __init__(self, folder: str, **names: object) -> None:
        environment = Environment(
            loader=PackageLoader("nodeready", "reports"), extensions=[_Tight], autoescape=True,
            finalize=shown, undefined=StrictUndefined,
        )  # fmt: skip
        environment.filters.update(text=_text, lines=_lines, prose=_prose)
        environment.globals.update(counted=counted, NEWLINE=Markup("\n"), **names)
        self._environment = environment
        self._template = environment.get_template(f"{folder}/page.html.j2")
        self.style = self._constant("page.css") + self._constant(f"{folder}/page.css")
        try:
            self.script = self._constant("page.js") + self._constant(f"{folder}/page.js")
        except TemplateNotFound:
            self.script = Markup("")

    def _constant(self, file: str) -> Markup:
        loader = self._environment.loader
        assert loader is not None
        return Markup("\n" + loader.get_source(self._environment, file)[0])

    @property
    def policy(self) -> Markup:
        """The Content-Security-Policy: this style and this script, and nothing from anywhere."""
        script = f"script-src 'sha256-{_digest(self.script)}'; " if self.script else ""
        style = f"style-src 'sha256-{_digest(self.style)}'; "
        forms = "base-uri 'none'; form-action 'none'"
        return Markup(f"default-src 'none'; {style}{script}{forms}")

    def render(self, **values: object) -> Iterator[str]:
        constants = {"style": self.style, "script": self.script, "policy": self.policy}
        stream = self._template.stream(**constants, **values)
        stream.enable_buffering(200)
        yield from stream

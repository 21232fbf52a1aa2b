"""The documentation as text: its pages, their code blocks and the commands in them."""

import re
import shlex
from collections.abc import Iterator

from tests.paths import DOCS, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


def without_code(text: str) -> str:
    """A page's prose: no fenced blocks."""
    return _FENCE.sub("", text)


def _shell_lines(text: str) -> Iterator[str]:
    """Every command line in the page: of sh blocks, after a `$` in console blocks, in `code`."""
    for _, language, body in _FENCE.findall(text):
        lines = re.sub(r"\\\n\s*", " ", body).splitlines()
        for line in map(str.strip, lines):
            if language == "sh":
                yield line
            elif language == "console" and line.startswith("$ "):
                yield line[2:]
    yield from re.findall(r"`([^`\n]+)`", without_code(text))


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of every `nodeready …` in the page."""
    for line in _shell_lines(text):
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:
            continue
        while words and (_ASSIGNMENT.fullmatch(words[0]) or words[0] in ("sudo", "&&")):
            words.pop(0)
        if words and words[0].rpartition("/")[2] == "nodeready" and "nodeready" in line:
            end = next((i for i, w in enumerate(words) if set(w) <= set("|&;<>()")), len(words))
            yield words[1:end]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ +(.+)$", without_code(text), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in found}

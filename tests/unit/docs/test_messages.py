"""docs/troubleshooting.md quotes the product's messages; the product names pages that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import PACKAGE
from tests.unit.docs.pages import DOCS, ROOT, anchors

PAGE = (DOCS / "troubleshooting.md").read_text().partition("\n## Exit codes")[0]
#: What stands for another text in a quoted message: words in capitals, numbers, `…`.
_PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]*\d*\b|\d+|…")
#: A page of the documentation, with its anchor, in a text of the product.
_REFERENCE = re.compile(r"docs/([\w-]+\.md)(?:#([\w-]+))?")


def _sources() -> Iterator[Path]:
    for directory in (PACKAGE, ROOT / "operations", ROOT / "templates"):
        for suffix in ("py", "sh", "j2"):
            yield from directory.rglob(f"*.{suffix}")
    yield from (PACKAGE / "knowledge").glob("*.toml")


def product_texts() -> str:
    """Every fixed text of the product, one a line."""
    texts = []
    for path in _sources():
        source = path.read_text()
        if path.suffix != ".py":
            texts.append(source)
            continue
        tree = ast.walk(ast.parse(source))
        texts += [n.value for n in tree if isinstance(n, ast.Constant) and type(n.value) is str]
    return re.sub(r"[ \t]+", " ", "\n".join(texts))


def quoted_messages() -> list[str]:
    """The messages in the first column of the page's tables."""
    cells = re.findall(r"^\| (.*?) \| ", PAGE, re.M)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def fixed_words(message: str) -> str:
    """The longest text of the message without a placeholder.

    >>> fixed_words("PATH: a link of USER: not followed")
    'not followed'
    """
    parts = _PLACEHOLDER.split(message)
    return max((part.strip(" .,;:()'-/$") for part in parts), key=len)


def test_the_page_quotes_many_messages():
    assert len(quoted_messages()) > 80


TEXTS = product_texts()


@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_is_one_of_the_product(message):
    words = fixed_words(message)
    if words not in TEXTS:
        pytest.fail(f"no text of nodeready/ has: {words}")


def test_every_page_and_anchor_that_the_product_names_exists():
    references = [
        (path, page, anchor)
        for path in [*_sources(), *(ROOT / "share").rglob("*"), *(ROOT / "templates").rglob("*")]
        if path.is_file()
        for page, anchor in _REFERENCE.findall(path.read_text(errors="replace"))
    ]
    assert references
    for path, page, anchor in references:
        assert (DOCS / page).is_file(), f"{path.relative_to(ROOT)}: docs/{page}"
        if anchor:
            assert anchor in anchors((DOCS / page).read_text()), f"{path}: {page}#{anchor}"

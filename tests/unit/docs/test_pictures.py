"""The pictures are recorded ones, are shown, and come from nowhere else."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tests.unit.docs.pages import DOCS, PAGES, ROOT

PICTURES = sorted((DOCS / "images").glob("*"))
_SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")


def test_every_picture_is_made_by_a_script_and_shown_with_words_beside_it():
    scenes = re.search(
        r"^SCENES.*?^\}|^SCENES.*", (ROOT / "scripts/pictures.py").read_text(), re.M | re.S
    )
    made = {f"{name}.svg" for name in re.findall(r'"(\w+)": \w+', scenes[0])} | {"house.svg"}
    shown = set()
    for page in PAGES:
        for words, path in _SHOWN.findall(page.read_text()):
            assert len(words) > 20, f"{page.name}: {path}"
            shown.add((page.parent / path).resolve())
    assert shown == set(PICTURES)
    assert {path.name for path in PICTURES} <= made


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_needs_no_other_server(path):
    text = path.read_text()
    ElementTree.fromstring(text)
    assert set(re.findall(r"\w+://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|@font-face|url\((?!#|\"#)|<script|<image", text)

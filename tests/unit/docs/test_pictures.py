"""The pictures are recorded ones, are shown, and come from nowhere else."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.unit.docs.pages import DOCS, PAGES, ROOT

PICTURES = sorted((DOCS / "images").glob("*"))
_DRAWN = [path for path in PICTURES if path.suffix != ".png"]
_SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")


def _name(path: Path) -> str:
    return path.name


def test_every_picture_is_made_by_a_script_and_shown_with_words_beside_it():
    scenes = re.findall(
        r'^    "([\w-]+)": Scene\((.*)\),$', (ROOT / "scripts/pictures.py").read_text(), re.M
    )
    # What a browser shows is a png.
    made = {f"{name}.{'png' if 'script=' in row else 'svg'}" for name, row in scenes}
    made.add("house.svg")
    shown = set()
    for page in PAGES:
        for words, path in _SHOWN.findall(page.read_text()):
            assert len(words) > 20, f"{page.name}: {path}"
            shown.add((page.parent / path).resolve())
    assert shown == set(PICTURES)
    assert {path.name for path in PICTURES} <= made


@pytest.mark.parametrize("path", _DRAWN, ids=_name)
def test_a_picture_needs_no_other_server(path):
    text = path.read_text()
    ElementTree.fromstring(text)
    assert set(re.findall(r"\w+://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|@font-face|url\((?!#|\"#)|<script|<image", text)

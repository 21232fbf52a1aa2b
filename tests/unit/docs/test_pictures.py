"""The pictures are recorded ones, are shown, and come from nowhere else."""

import re
import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.unit.docs.pages import DOCS, PAGES, ROOT

PICTURES = sorted((DOCS / "images").glob("*"))
_DRAWN = [path for path in PICTURES if path.suffix != ".png"]
_TAKEN = [path for path in PICTURES if path.suffix == ".png"]
_SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")


def _name(path: Path) -> str:
    return path.name


def test_every_picture_is_made_by_a_script_and_shown_with_words_beside_it():
    script = (ROOT / "scripts/pictures.py").read_text()
    scenes = re.search(r"^SCENES.*?^\}|^SCENES.*", script, re.M | re.S)
    made = {f"{name}.svg" for name in re.findall(r'"([\w-]+)": \w+', scenes[0])} | {"house.svg"}
    # A scene saves what a browser shows under its own name.
    made |= set(re.findall(r'IMAGES / "([\w-]+\.png)"', script))
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


@pytest.mark.parametrize("path", _TAKEN, ids=_name)
def test_a_picture_of_a_browser_is_whole_and_fits_a_page(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    assert data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    assert 800 <= width <= 2000
    assert 400 <= height <= 3000
    # An empty page is smaller.
    assert 50_000 < len(data) < 500_000

"""The pictures are recorded ones, are shown, and come from nowhere else."""

from __future__ import annotations

import re
import struct
import zlib
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
def test_a_picture_of_a_browser_is_whole_and_can_be_read_on_a_page(path):
    """Chunks by the PNG specification (ISO/IEC 15948), 5: length, type, data, CRC."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks, pixels = 8, [], b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert data[at + 8 + length : at + 12 + length] == struct.pack(
            ">I", zlib.crc32(kind + body)
        )
        chunks.append(kind)
        pixels += body if kind == b"IDAT" else b""
        at += 12 + length
    assert (chunks[0], chunks[-1]) == (b"IHDR", b"IEND")
    width, height = struct.unpack(">II", data[16:24])
    assert 800 <= width <= 2000
    assert 400 <= height <= 3000
    # More than one colour: a browser that has shown nothing takes an empty picture, too.
    assert len(set(zlib.decompress(pixels))) > 16
    assert len(data) < 500_000

"""What a node packed is unpacked within bounds."""

from __future__ import annotations

import base64
import json
import zlib

import pytest

from nodeready.transport.program import MAX_DEPTH, DecodeError, load_json, unpack


def packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw)).decode()


def test_what_is_ours_comes_back():
    assert load_json(unpack(packed(b'{"a": [1, 2.5, "x", null]}'), 100)) == {
        "a": [1, 2.5, "x", None]
    }


@pytest.mark.parametrize(
    "text",
    ["!", "", "eA==", packed(b"x" * 101), packed(b"x" * 50)[:-8]],
    ids=["no base64", "empty", "no zlib", "too large", "cut off"],
)
def test_what_is_packed_wrong_is_refused(text):
    with pytest.raises(DecodeError):
        unpack(text, 100)


@pytest.mark.parametrize(
    "text",
    [
        "{", "NaN", "[Infinity]", "-Infinity", "1e999", str(1 << 70), "[" * 100_000,
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), json.dumps({"a": "x" * (9 << 20)}),
        json.dumps({"x" * (9 << 20): 1}), b"\xff\xfe{",
    ],
    ids=range(11),
)  # fmt: skip
def test_what_makes_no_sense_is_refused(text):
    with pytest.raises(DecodeError):
        load_json(text)

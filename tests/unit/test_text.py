"""The gate for text that came from a node: one line, of which every character is seen."""

from __future__ import annotations

import pytest

from nodeready.text import sanitise


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mb\r\nc\x9b", r"a\x1b[31mb\x0d\x0ac\x9b"),
        ("a\u202eb\u061cc\u2028", r"a\u202eb\u061cc\u2028"),
        # Nobody sees these, and a program that reads the report does.
        ("ok\U000e0041\u3164\xad\ufff9", r"ok\U000e0041\u3164\xad\ufff9"),
        ("\udcff", r"\xff"),
        ("é 漢 \u26a0\ufe0f \t.", "é 漢 \u26a0\ufe0f     ."),
    ],
)
def test_what_is_not_seen_or_moves_the_rest_is_an_escape(text, shown):
    assert sanitise(text) == shown


def test_a_long_text_is_cut():
    assert sanitise(50 * "a", 10) == "aaaaaaaaaa..."

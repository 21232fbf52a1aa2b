"""The gate for text that came from a node: one line, of which every character is seen."""

import pytest

from nodeready.core.text import parse_span, sanitise, span_words
from tests.cases import read_table


@pytest.mark.parametrize(("text", "shown"), read_table(__file__, "shown"))
def test_what_is_not_seen_or_moves_the_rest_is_an_escape(text, shown):
    assert sanitise(text) == shown


@pytest.mark.parametrize(
    ("words", "seconds", "shown"),
    read_table(__file__, "a_span_of_time_has_a_unit_or_is_in_seconds"),
)
def test_a_span_of_time_has_a_unit_or_is_in_seconds(words, seconds, shown):
    assert (parse_span(words), span_words(seconds)) == (seconds, shown)


@pytest.mark.parametrize("words", ["", "s", "-1", "5 m", "5min", "1h30m", "1e3", "nan", "\u0665s"])
def test_another_text_is_no_span(words):
    with pytest.raises(ValueError, match="is no span of time such as 20s"):
        parse_span(words)


def test_a_long_text_is_cut():
    assert sanitise(50 * "a", 10) == "aaaaaaaaaa..."

"""Which of the things that happened decides the exit status: 130 > 2 > 1 > 4 > 3 > 0."""

from __future__ import annotations

import itertools

import pytest

from nodeready.exit_codes import exit_code

#: In the order of precedence.
CODES = {"interrupted": 130, "usage": 2, "failed": 1, "unreachable": 4, "check": 3}


@pytest.mark.parametrize(("what", "code"), [*CODES.items(), (None, 0)])
def test_each_alone(what, code):
    assert exit_code(**({what: True} if what else {})) == code


def test_of_all_that_happened_the_first_decides():
    for happened in itertools.product([False, True], repeat=len(CODES)):
        chosen = dict(zip(CODES, happened, strict=True))
        expected = next((CODES[what] for what in CODES if chosen[what]), 0)
        assert exit_code(**chosen) == expected, chosen

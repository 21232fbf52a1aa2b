"""Which event decides the exit status: 130 > 2 > 1 > 4 > 3 > 0."""

import itertools

from nodeready.core.exit_codes import exit_code

#: In the order of precedence.
CODES = {"interrupted": 130, "usage": 2, "failed": 1, "unreachable": 4, "check": 3}


def test_the_first_event_in_the_order_decides():
    for events in itertools.product([False, True], repeat=len(CODES)):
        happened = dict(zip(CODES, events, strict=True))
        expected = next((CODES[event] for event in CODES if happened[event]), 0)
        assert exit_code(**happened) == expected, happened

"""How ranks are folded."""

from __future__ import annotations

import pytest

from nodeready.triage.stacks.document import fold_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([8, 7], "7-8"),
        ([*range(7), *range(8, 512)], "0-6,8-511"),
        ([3, 3, 3], "3"),
        ([0, 2, 4], "0,2,4"),
        ([0, 2, 4, 6], "0-6/2"),
        (range(1, 131_072, 8), "1-131065/8"),
        ([0, 4, 8, 12, 13, 14], "0-12/4,13-14"),
        ([0, 2, 3, 4, 5, 9, 10], "0,2-5,9-10"),
    ],
)
def test_ranks_are_said_as_shortly_as_possible(ranks, text):
    assert fold_ranks(ranks) == text

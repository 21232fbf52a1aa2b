"""A table's rows as pytest's parameters: `make test-lab` runs some, `make test-all` all."""

from collections.abc import Iterable
from typing import Any

import pytest


def rows(table: Iterable[Any], *usual: Any) -> list[Any]:
    """A parameter for each row. All but the `usual` rows are nightly.

    A row is a name, or a tuple of the test's arguments; then `usual` has their first values, or
    the tuples.
    """
    table = list(table)
    parameters = []
    for row in table:
        values = row if isinstance(row, tuple) else (row,)
        is_usual = row in usual or values[0] in usual
        marks = [] if is_usual else [pytest.mark.nightly]
        parameters.append(pytest.param(*values, marks=marks))
    return parameters

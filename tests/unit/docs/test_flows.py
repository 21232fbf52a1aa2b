"""The flows of docs/architecture.md are the code's: each function calls those below it."""

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import click
import pytest

from tests.rooms import ROOMS
from tests.unit.docs.pages import DOCS

ORDER = list(ROOMS)
_LINE = re.compile(r"( *)([a-z_.]+):([A-Za-z_.]+)(?:  .*)?")


def calls(text: str) -> Iterator[tuple[tuple[str, str] | None, tuple[str, str]]]:
    """Every function of the flows, with the one that it stands under; None: it is the first."""
    section = text.partition("\n## Follow one flow\n")[2].partition("\n## ")[0]
    for block in re.findall(r"^```text\n(.*?)^```", section, re.M | re.S):
        above: list[tuple[str, str]] = []
        for line in block.splitlines():
            found = _LINE.fullmatch(line)
            assert found, line
            del above[len(found[1]) // 2 :]
            one = (found[2], found[3])
            yield above[-1] if above else None, one
            above.append(one)


def of(one: tuple[str, str]) -> Any:
    """The function or class. Raises AttributeError, ImportError when there is none."""
    found: Any = importlib.import_module(f"nodeready.{one[0]}")
    for name in one[1].split("."):
        found = getattr(found, name)
    return found.callback if isinstance(found, click.Command) else found


CALLS = list(calls((DOCS / "architecture.md").read_text()))


def test_there_are_flows():
    assert len([one for above, one in CALLS if above is None]) >= 3


@pytest.mark.parametrize(("above", "one"), CALLS, ids=[":".join(one) for _, one in CALLS])
def test_a_function_calls_what_stands_below_it_and_never_back_up(above, one):
    assert callable(of(one))
    if above is not None:
        assert one[1].rpartition(".")[2] in inspect.getsource(of(above))
        lower, upper = (ORDER.index(module.partition(".")[0]) for module, _ in (above, one))
        assert upper <= lower

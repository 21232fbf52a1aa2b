"""Cases as data: a file beside the test, one case a row.

`data/nics.json` is a list of objects, `data/nics.toml` a `[[case]]` each. Every case has a `name`,
which becomes the test's id, and `nightly: true` where only `make test-all` runs it.

>>> @pytest.mark.parametrize("case", cases(__file__, "data/nics.json"))  # doctest: +SKIP
... def test_verdict(case): ...
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Test = TypeVar("Test", bound=Callable[..., Any])


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of one file. Raises ValueError where two have one name."""
    text = path.read_text()
    rows = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)["case"]
    names = [row["name"] for row in rows]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: two cases have one name")
    return rows


def cases(beside: str, name: str, section: str = "") -> list[Any]:
    """The cases of a file beside the test `beside` (its `__file__`), as pytest's parameters.

    section: where one file has cases of several tests, those whose `section` is this.
    """
    rows = read(Path(beside).parent / name)
    return [
        pytest.param(row, id=row["name"], marks=[pytest.mark.nightly] * row.get("nightly", False))
        for row in rows
        if not section or row["section"] == section
    ]


def read_table(beside: str, name: str) -> Any:
    """A table of the test `beside` (its `__file__`): what `data/TEST.rows.json` has by this name.

    Arrays are tuples. A row that is a text with `# ` before it is a comment on the next ones.

    >>> read_table("tests/attacks/test_policy.py", "BEYOND")  # doctest: +SKIP
    """
    test = Path(beside)
    path = test.parent / "data" / f"{test.stem.removeprefix('test_')}.rows.json"
    rows = json.loads(path.read_text())[name]
    if isinstance(rows, list):
        rows = [row for row in rows if not (isinstance(row, str) and row.startswith("# "))]
    return as_tuples(rows)


def with_table(names: str) -> Callable[[Test], Test]:
    """Runs a test with each row of its table, which `read_table` finds by the test's own name.

    >>> @with_table("name, group")  # doctest: +SKIP
    ... def test_names_that_differ_by_numbers_are_one(name, group): ...
    """

    def parametrize(test: Test) -> Test:
        table = read_table(test.__code__.co_filename, test.__name__.removeprefix("test_"))
        return pytest.mark.parametrize(names, table)(test)

    return parametrize


def as_tuples(value: Any) -> Any:
    """This JSON value with tuples in place of its lists."""
    if isinstance(value, dict):
        return {key: as_tuples(inner) for key, inner in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def read_data(beside: str, name: str) -> str:
    """A text in `data/` beside the test `beside` (its `__file__`)."""
    return (Path(beside).parent / "data" / name).read_text()

"""Cases as data: a file beside the test, one case a row.

`data/nics.json` is a list of objects, `data/nics.toml` a `[[case]]` each. Every case has a `name`,
which becomes the test's id, and `nightly: true` where only `make test-all` runs it.

>>> @pytest.mark.parametrize("case", cases(__file__, "data/nics.json"))  # doctest: +SKIP
... def test_verdict(case): ...
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


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

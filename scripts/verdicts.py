"""The verdicts that the unit tests' recorded inputs get, as data, to compare two states of code.

    python scripts/verdicts.py record before.json      # in the checkout of the older state
    python scripts/verdicts.py record after.json       # in the newer one
    python scripts/verdicts.py compare before.json after.json

A test's verdicts are the results of checks, the causes of dead jobs, the verdicts about hung ones,
and exit codes. `compare` shows those that only one of the two has, for tests that both have, and
exits with 3. A test whose verdicts change from run to run (a time, a number drawn at random) is
left out: `record` runs all tests twice.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: Where a recording worker leaves its part.
_PARTS = "NODEREADY_VERDICTS"
#: What is called, or made, with each verdict: (the modules that may hold it, its name, the fields
#: of its value to keep). A module that moves gets its new name beside the older one.
_SOURCES = (
    # First, because the modules below take it by name.
    (("nodeready.core.exit_codes", "nodeready.exit_codes"), "exit_code", ()),
    (("nodeready.core.result", "nodeready.subjects.result"), "Page.rated", ()),
    (
        ("nodeready.runs.postmortem.document", "nodeready.triage.postmortem.document"),
        "FirstFailure.__init__",
        ("kind", "text", "ranks", "nodes", "frame"),
    ),
    (
        ("nodeready.runs.stacks.document", "nodeready.triage.stacks.document"),
        "Verdict.__init__",
        ("kind", "text", "suspects"),
    ),
)
_TEMPORARY = re.compile(r"/tmp/[\w./-]+")

_verdicts: dict[str, Counter[str]] = {}


def _keep(name: str, value: Any, fields: tuple[str, ...]) -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if not test:
        return
    kept = {field: getattr(value, field, None) for field in fields} if fields else value
    row = _TEMPORARY.sub("TMP", f"{name} {kept}")
    _verdicts.setdefault(test, Counter())[row] += 1


def _observe(modules: tuple[str, ...], name: str, fields: tuple[str, ...]) -> None:
    """Keep each value of this function, or each instance of this class."""
    for module in modules:
        try:
            holder: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            continue
    else:
        raise SystemExit(f"verdicts: no module {' or '.join(modules)} for {name}")
    *path, attribute = name.split(".")
    for part in path:
        holder = getattr(holder, part)
    function = getattr(holder, attribute)

    @functools.wraps(function)
    def observed(*arguments: Any, **options: Any) -> Any:
        value = function(*arguments, **options)
        _keep(name, arguments[0] if attribute == "__init__" else value, fields)
        return value

    setattr(holder, attribute, observed)


if _PARTS in os.environ:
    # As a plugin: before any module of the product takes these functions by name.
    for source in _SOURCES:
        _observe(*source)


def pytest_sessionfinish() -> None:
    part = Path(os.environ[_PARTS]) / f"{os.getpid()}.json"
    part.write_text(json.dumps(_verdicts))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Each process in the same order: what one test keeps in a cache, another does not compute.
    for item in items:
        item.add_marker(pytest.mark.xdist_group(str(item.path)))


def _record() -> dict[str, Counter[str]]:
    verdicts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as parts:
        environ = {**os.environ, _PARTS: parts, "PYTHONPATH": str(Path(__file__).parent)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "verdicts", "-p", "no:randomly"]
        command += ["-n", "2", "--dist", "loadgroup", "tests/unit"]
        subprocess.run(command, env=environ, check=False, stdout=sys.stderr)
        for part in sorted(Path(parts).iterdir()):
            for test, rows in json.loads(part.read_text()).items():
                verdicts.setdefault(test, Counter()).update(rows)
    return verdicts


def _differences(
    before: dict[str, Counter[str]], after: dict[str, Counter[str]]
) -> Iterator[tuple[str, str, str]]:
    """(test, "-" or "+", the verdict) of the tests that both have."""
    for test in sorted(before.keys() & after.keys()):
        # How often a verdict is computed is not what it says.
        for sign, rows in (
            ("-", before[test].keys() - after[test].keys()),
            ("+", after[test].keys() - before[test].keys()),
        ):
            yield from ((test, sign, row) for row in sorted(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record").add_argument("file", type=Path)
    compare = commands.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    words = parser.parse_args()
    if words.command == "record":
        first, second = _record(), _record()
        stable = {test: rows for test, rows in first.items() if second.get(test) == rows}
        words.file.write_text(json.dumps(stable, indent=0, sort_keys=True))
        rows = sum(len(rows) for rows in stable.values())
        print(f"{rows} verdicts of {len(stable)} tests; {len(first) - len(stable)} change by run")
        return 0
    before, after = (
        {test: Counter(rows) for test, rows in json.loads(path.read_text()).items()}
        for path in (words.before, words.after)
    )
    differences = list(_differences(before, after))
    for test, sign, row in differences:
        print(f"{sign} {test}\n    {row}")
    gone = len(before.keys() - after.keys())
    print(f"{len(differences)} differences; {gone} tests with verdicts only before")
    return 3 if differences else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Mutation tests: the share of small faults in the product that the tests notice.

    scripts/mutation.py map MAP [PYTEST ARGUMENTS...]
    scripts/mutation.py run MAP [--seed WORD] [--count N] [--only PATH]... [--missed FILE]
                            [--jobs N] [-o FILE]

`map` runs the tests once and writes to MAP which test executes which line, also in the processes
that a test starts. `run` breaks one place at a time in a copy of the checkout (a comparison, a
constant, a boolean operator, a removed statement, two swapped arguments), runs the tests that
execute that line, the quickest first, and counts the faults that no test notices. WORD draws the
places, which stay the same when lines move. `--missed` takes the places that no test noticed in an
earlier run, for the tests of another tier.

A line that the map does not know (a program sent to a node as text) is tried with the tests whose
folder or file is named as its room or module. Python files of nodeready/ and operations/ only.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import copy
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Imports of the tests, without nodeready: each mutant's tests run in a fork of this process.
import click
import coverage
import hypothesis
import jinja2
import paramiko
import pyinfra.api
import pytest
import rich.console
import rich.table

PRELOADED = (click, hypothesis, jinja2, paramiko, pyinfra.api, rich.console, rich.table)

ROOT = Path(__file__).resolve().parent.parent
#: A mutant's tests may take this many times as long as they took unchanged, and 60 s more.
SLOWER, GRACE_S = 3, 60
LIMIT_S = 90  # tests of one mutant: enough for 90 s, the quickest first
NOTICED = ("noticed", "late")

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip

# --- Places to break -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One fault: this text in place of what stands from `start` to `end` (bytes of the file)."""

    path: str
    line: int
    last_line: int
    kind: str
    start: int
    end: int
    text: str
    before: str
    #: Whether it runs when the module is imported: then the map has it for the first test alone.
    at_import: bool

    def key(self, seed: str) -> str:
        words = (seed, self.path, self.kind, self.before, self.text)
        return hashlib.sha256("\0".join(words).encode()).hexdigest()

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.before!r} -> {self.text!r}"


def mutate_expression(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Each kind of fault that fits an expression, with the broken expression."""
    broken: Any = copy.deepcopy(node)
    match node:
        case ast.Compare(ops=[operator, *_]) if type(operator) in COMPARISONS:
            broken.ops[0] = COMPARISONS[type(operator)]()
            yield "comparison", broken
        case ast.BoolOp():
            broken.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "boolean", broken
        case ast.UnaryOp(op=ast.Not()):
            yield "boolean", broken.operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Constant(value=str(value)) if re.fullmatch(r"\S+", value):
            yield "constant", ast.Constant(value + "_")
        case ast.Call(args=[first, second, *_]) if ast.dump(first) != ast.dump(second):
            broken.args[:2] = broken.args[1::-1]
            yield "arguments", broken


REMOVABLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Continue, ast.Raise, ast.Delete)


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def nodes_of(node: ast.AST, at_import: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Every node that can be broken: no annotation, docstring or part of an f-string.

    With it, whether it runs when the module is imported.
    """
    if is_docstring(node) or isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    yield node, at_import
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params"):
            continue
        is_body = field == "body" and isinstance(node, (ast.FunctionDef, ast.Lambda))
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes_of(child, at_import and not is_body)


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Every fault of one file.

    >>> [str(mutant) for mutant in mutants_of("a.py", "x = y < 3")]
    ["a.py:1: removed: 'x = y < 3' -> 'pass'", "a.py:1: comparison: 'y < 3' -> 'y <= 3'", \
"a.py:1: constant: '3' -> '4'"]
    """
    data = source.encode()
    offsets = [0]
    for row in data.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(row))
    for node, at_import in nodes_of(ast.parse(source)):
        if not hasattr(node, "lineno"):
            continue
        place: Any = node
        start = offsets[place.lineno - 1] + place.col_offset
        end = offsets[place.end_lineno - 1] + place.end_col_offset
        before = data[start:end].decode()
        faults = [(kind, ast.unparse(broken)) for kind, broken in mutate_expression(node)]
        if isinstance(node, REMOVABLE):
            faults.append(("removed", "pass"))
        for kind, text in faults:
            lines = place.lineno, place.end_lineno
            yield Mutant(path, *lines, kind, start, end, text, before, at_import)


def draw(seed: str, count: int, only: list[str]) -> list[Mutant]:
    """`count` faults of the product's files below `only`."""
    mutants: list[Mutant] = []
    for top in ("nodeready", "operations"):
        for file in sorted((ROOT / top).rglob("*.py")):
            path = str(file.relative_to(ROOT))
            is_link = file.parent.is_symlink() or path.startswith("nodeready/operations")
            if not is_link and path.startswith(tuple(only) or ""):
                mutants += mutants_of(path, file.read_text())
    return sorted(mutants, key=lambda mutant: mutant.key(seed))[:count]


# --- The map: line -> tests ----------------------------------------------------------------------


def make_map(output: Path, arguments: list[str]) -> int:
    """Run pytest with these arguments; write which test executes which line."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        rc = Path(directory, "coveragerc")
        rc.write_text(
            "[run]\nbranch = true\nparallel = true\n"
            f"data_file = {directory}/data\nsource = {ROOT}/nodeready,{ROOT}/operations\n"
            "core = ctrace\nconcurrency = thread,gevent\npatch = _exit,fork\n"
            "context = ${PYTEST_CURRENT_TEST-}\ndisable_warnings = no-data-collected\n"
            "  module-not-measured\n  couldnt-parse\n"
        )
        environment = {**os.environ, "COVERAGE_PROCESS_START": str(rc), "NODEREADY_COLD": "1"}
        words = [sys.executable, "-m", "pytest", "-p", "mutation_plugin", *arguments]
        status = subprocess.call(words, cwd=ROOT, env=environment)
        measured = coverage.Coverage(data_file=f"{directory}/data", config_file=False)
        measured.combine([directory], keep=True)
        measured.save()
        data = measured.get_data()
        durations: dict[str, float] = {}
        for part in Path(directory).glob("durations-*.json"):
            durations.update(json.loads(part.read_text()))
        #: A test is its number: its name stands at a hundred thousand lines.
        numbers = {test: number for number, test in enumerate(durations)}
        lines: dict[str, dict[int, list[int]]] = {}
        for path in data.measured_files():
            if not Path(path).is_relative_to(ROOT):
                continue
            by_line = lines.setdefault(str(Path(path).relative_to(ROOT)), {})
            for line, contexts in data.contexts_by_lineno(path).items():
                tests = {re.sub(r" \((setup|call|teardown)\)$", "", word) for word in contexts}
                by_line[line] = sorted(numbers[test] for test in tests & numbers.keys())
        output.write_text(json.dumps({"lines": lines, "seconds": durations}))
        total = measured.report(file=io.StringIO())
        print(f"{len(durations)} tests; {total:.1f} % of lines and branches; {output}")
    return status


def related(mutant: Mutant, tests: dict[str, float]) -> list[str]:
    """Tests whose path names the mutant's module, or its folder."""
    parts = Path(mutant.path).with_suffix("").parts
    for word in (parts[-1].strip("_"), *reversed(parts[1:-1])):
        pattern = re.compile(rf"[/_]{word}(?=[/_.s])")
        if related_tests := [test for test in tests if pattern.search(test.split("::")[0])]:
            return related_tests
    return []


def chosen(mutant: Mutant, test_map: dict[str, Any]) -> list[str]:
    """The tests to run, the quickest first: those of its lines, else related ones.

    Of a line that runs at import, those of all lines of its module.
    """
    seconds = test_map["seconds"]
    names = list(seconds)
    by_line = test_map["lines"].get(mutant.path, {})
    tests = {
        names[number]
        for line in (by_line if mutant.at_import else range(mutant.line, mutant.last_line + 1))
        for number in by_line.get(str(line), ())
    } or set(related(mutant, seconds))
    ordered = sorted(tests, key=lambda test: seconds[test])
    sums = itertools.accumulate(seconds[test] for test in ordered)
    return [test for test, total in zip(ordered, sums, strict=True) if total <= LIMIT_S]


# --- Trying --------------------------------------------------------------------------------------


def copy_of_checkout(target: Path) -> None:
    names = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, names):
        source = ROOT / name
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            (target / name).symlink_to(os.readlink(source))
        elif source.exists():
            shutil.copy2(source, target / name)
    (target / ".venv").symlink_to(ROOT / ".venv")


class MutantRun:
    """One mutant's tests, in a child that is forked from this process with pytest imported."""

    def __init__(
        self, mutant: Mutant, tests: list[str], expected_s: float, checkout: Path
    ) -> None:
        self.mutant, self.checkout = mutant, checkout
        self._file = checkout / mutant.path
        self._original = self._file.read_bytes()
        head, tail = self._original[: mutant.start], self._original[mutant.end :]
        self._file.write_bytes(head + mutant.text.encode() + tail)
        self._deadline = time.monotonic() + SLOWER * expected_s + GRACE_S
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._run(tests)
            finally:
                os._exit(1)

    def _run(self, tests: list[str]) -> None:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.chdir(self.checkout)
        sys.path.insert(0, str(self.checkout))
        os.environ.update(PYTHONPATH=str(self.checkout), PYTHONDONTWRITEBYTECODE="1")
        sys.dont_write_bytecode = True
        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))

    def outcome(self) -> str:
        """`noticed`, `late` (its tests do not end) or `survived`; "": not yet."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            result = "survived" if status == 0 else "noticed"
        elif time.monotonic() > self._deadline:
            result = "late"
        else:
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        if not pid:
            os.waitpid(self._pid, 0)
        self._file.write_bytes(self._original)
        return result


def attempts(
    test_map: dict[str, Any], mutants: list[Mutant], checkouts: list[Path]
) -> Iterator[tuple[Mutant, str]]:
    """Each mutant with its outcome, as they end; one at a time in each checkout."""
    waiting, free = list(mutants), list(checkouts)
    running: list[MutantRun] = []
    while waiting or running:
        while waiting and free:
            mutant = waiting.pop(0)
            tests = chosen(mutant, test_map)
            if not tests:
                yield mutant, "untested"
                continue
            expected_s = sum(test_map["seconds"][test] for test in tests)
            running.append(MutantRun(mutant, tests, expected_s, free.pop()))
        time.sleep(0.02)
        for attempt in list(running):
            if outcome := attempt.outcome():
                running.remove(attempt)
                free.append(attempt.checkout)
                yield attempt.mutant, outcome


def run(test_map: dict[str, Any], mutants: list[Mutant], jobs: int, output: Path | None) -> None:
    """Try each mutant; print those that no test notices, and the counts at the end."""
    counts: collections.Counter[str] = collections.Counter()
    rows = []
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        checkouts = [Path(directory, str(number)) for number in range(jobs)]
        for checkout in checkouts:
            copy_of_checkout(checkout)
        for mutant, outcome in attempts(test_map, mutants, checkouts):
            counts[outcome] += 1
            rows.append({"place": str(mutant), "outcome": outcome})
            if outcome in ("survived", "untested"):
                print(f"{outcome}: {mutant}", flush=True)
            if output:
                output.write_text(json.dumps(rows, indent=0))
    noticed = sum(counts[outcome] for outcome in NOTICED)
    share = 100 * noticed / max(1, len(mutants))
    parts = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    print(f"{noticed} of {len(mutants)} noticed ({share:.0f} %): {parts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    mapping = commands.add_parser("map")
    mapping.add_argument("map", type=Path)
    running = commands.add_parser("run")
    running.add_argument("map", type=Path)
    running.add_argument("--seed", default="1")
    running.add_argument("--count", type=int, default=300)
    running.add_argument("--only", action="append", default=[])
    running.add_argument("--missed", type=Path)
    running.add_argument("--jobs", type=int, default=1)
    running.add_argument("-o", "--output", type=Path)
    arguments, remaining = parser.parse_known_args()
    if arguments.command == "map":
        sys.exit(make_map(arguments.map, remaining))
    if remaining:
        parser.error(f"unknown: {' '.join(remaining)}")
    mutants = draw(arguments.seed, arguments.count, arguments.only)
    if arguments.missed:
        rows = json.loads(arguments.missed.read_text())
        missed = {row["place"] for row in rows if row["outcome"] not in NOTICED}
        mutants = [mutant for mutant in mutants if str(mutant) in missed]
    run(json.loads(arguments.map.read_text()), mutants, arguments.jobs, arguments.output)


if __name__ == "__main__":
    main()

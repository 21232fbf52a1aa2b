"""The tiers of the tests: what `make test`, `make test-lab` and `make test-all` run.

The folder of a test says its tier (`FOLDERS`); `@pytest.mark.nightly` on a test, or on one row of
its cases, leaves it to `make test-all`.

    --tier test|lab|nightly     the tests of this tier only; without it, all tests
    --sample N --seed WORD      of these, one in N: which, WORD decides
"""

import hashlib
from collections import Counter
from typing import Any

import pytest

from tests.paths import ROOT

#: folder below tests/ -> its tier, and the marks of all its tests.
FOLDERS = {
    "unit": ("test", []),
    "lifecycle": ("test", [pytest.mark.lab]),
    "lab": ("lab", [pytest.mark.lab]),
    "attacks": ("lab", [pytest.mark.lab]),
    "vm": ("lab", [pytest.mark.vm]),
    "hang": ("lab", [pytest.mark.lab, pytest.mark.torch, pytest.mark.xdist_group("torch")]),
}
#: tier -> the command that runs it.
COMMANDS = {"test": "make test", "lab": "make test-lab", "nightly": "make test-all"}

_left_out = pytest.StashKey["Counter[str]"]()


def folder_of(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT / "tests").parts[0]


def tier_of(item: pytest.Item) -> str:
    return "nightly" if item.get_closest_marker("nightly") else FOLDERS[folder_of(item)][0]


def is_sampled(name: str, seed: str, share: int) -> bool:
    """Whether the seed draws this test: one in `share` of all."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % share == 0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=list(COMMANDS), help="the tests of this tier only")
    group.addoption("--sample", type=int, default=1, metavar="N", help="one test in N")
    group.addoption("--seed", default="", metavar="WORD", help="which tests --sample draws")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test by its folder, and select. Raises UsageError for a unit test with nodes."""
    for item in items:
        folder = folder_of(item)
        for mark in FOLDERS[folder][1]:
            item.add_marker(mark)
        if folder == "unit" and "lab_machine" in getattr(item, "fixturenames", ()):
            raise pytest.UsageError(f"{item.nodeid} wants nodes of the lab: move it to tests/lab")
    select(config, items)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of the tier, and of those the sample."""
    tier, share, seed = (config.getoption(name) for name in ("tier", "sample", "seed"))
    left_out = config.stash.setdefault(_left_out, Counter())
    selected, deselected = [], []
    for item in items:
        if tier and tier_of(item) != tier:
            left_out[tier_of(item)] += 1
        elif is_sampled(item.nodeid, seed, share):
            selected.append(item)
            continue
        else:
            left_out[tier_of(item)] += 1
        deselected.append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = selected


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells the process that writes the summary."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = dict(session.config.stash.get(_left_out, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # All workers collect the same tests.
    node.config.stash[_left_out] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def not_run(left_out: Counter[str]) -> str:
    """What a run left out, by the command that runs it; "": nothing."""
    return ", ".join(
        f"{left_out[tier]} tests of {command}"
        for tier, command in COMMANDS.items()
        if left_out[tier]
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    left_out = config.stash.get(_left_out, Counter())
    if text := not_run(left_out):
        terminalreporter.write_line(f"not run: {text}")

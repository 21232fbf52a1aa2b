"""Real hangs with the newest torch: the culprit first, nobody accused wrongly, nobody harmed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import Done, Tool, wait_for
from tests.hang.play import Play, Stable, held
from tests.hang.pythons import ALL, Python, found, needed
from tests.hang.scenarios import SCENARIOS, Scenario

Seen = dict[str, Any]


def rows() -> Iterator[Any]:
    """Scenario and Python."""
    pythons, half = found(), 0
    for number, python in enumerate(pythons if ALL else pythons[:1]):
        for scenario in SCENARIOS:
            fits = not (scenario.newest and python.debian)
            if fits and (scenario.core or (ALL and not number)):
                half += 1
                # Beside each other: most of their time they wait.
                group = pytest.mark.xdist_group(f"{python.name}-{half % 2}")
                yield pytest.param(
                    python, scenario, id=f"{python.name}-{scenario.name}", marks=group
                )


@pytest.fixture(scope="module")
def stable() -> Iterator[Callable[[Python], Stable]]:
    """A factory of Pythons that fork ranks, one of each."""
    started: dict[Python, Stable] = {}

    def take(python: Python) -> Stable:
        if python not in started:
            started[python] = Stable(python.path)
        return started[python]

    yield take
    for one in started.values():
        one.end()


@pytest.fixture(scope="module", autouse=True)
def _pythons(lab_machine: None) -> None:
    needed()


class Look:
    """What one run of the command says, in both forms."""

    def __init__(self, done: Done, directory: Path) -> None:
        self.done = done
        self.seen: Seen = json.loads((directory / "stacks.json").read_text())
        self.groups: list[Seen] = self.seen["groups"]

    def __repr__(self) -> str:
        return f"{self.done}\n{json.dumps(self.seen.get('verdict'), indent=1)}"

    def role(self, role: str) -> set[int]:
        return {rank for one in self.groups if one["role"] == role for rank in one["ranks"]}


def tell(play: Play, when: str, seconds: float = 2.0) -> None:
    """Say how many steps a second the job makes: nothing that a busy machine could fail by."""
    (_, _, before), since = play.told(0), time.monotonic()
    time.sleep(seconds)
    steps = (play.told(0)[2] - before) / (time.monotonic() - since)
    print(f"{play.scenario.name}: {steps:.1f} steps a second {when}")


@contextlib.contextmanager
def beside(play: Play) -> Iterator[None]:
    """Say it of the time of the look, too; a healthy job has made steps in it."""
    (_, _, before), since = play.told(0), time.monotonic()
    yield
    if play.scenario.healthy:
        after = play.told(0)[2]
        speed = (after - before) / (time.monotonic() - since)
        print(f"{play.scenario.name}: {speed:.1f} steps a second beside the look")
        wait_for(lambda: play.told(0)[2] > before)


def command(pid: int) -> str:
    """Its command line; "": it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() or "?"
    except OSError:
        return ""


def look(tool: Tool, play: Play, *options: str) -> Look:
    """The job from outside; nobody was touched."""
    directory = tool.home / "kept"
    family = {pid: command(pid) for pid in play.family()}
    before = held(family)
    # py-spy is beside this Python, where nobody has deployed it.
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ("stacks", "--local", "--job", play.job, "-v", "-o", directory, *options)
    done = tool(*words, env=path)
    # Whoever was there is there; children of healthy jobs come and go.
    assert held(family) == before
    if not play.scenario.healthy:
        assert {pid: what for pid, what in family.items() if not command(pid)} == {}
    assert done.status == play.scenario.status, done
    return Look(done, directory)


def check(scenario: Scenario, seen: Look) -> list[str]:
    """What is wrong with what was said; []: all is right."""
    wrong = []
    first = set(seen.groups[0]["ranks"])
    suspects = {tuple(one["ranks"]) for one in seen.groups if one["role"] == "suspect"}
    verdict = seen.seen["verdict"] or {"kind": None, "suspects": [], "text": ""}
    accused = {rank for one in verdict["suspects"] for rank in one["ranks"]}
    culprits = {rank for group in scenario.suspects or scenario.first for rank in group}
    if scenario.suspects:
        if first not in [set(group) for group in scenario.suspects]:
            wrong.append(f"first is {sorted(first)}, not {scenario.suspects}")
        if suspects != set(scenario.suspects):
            wrong.append(f"suspects are {sorted(suspects)}, not {scenario.suspects}")
        if seen.role("victim") != scenario.victims:
            wrong.append(f"victims are {seen.role('victim')}, not {scenario.victims}")
    if scenario.first and first not in [set(group) for group in scenario.first]:
        wrong.append(f"first is {sorted(first)}, not {scenario.first}")
    calm = scenario.healthy and "suspect" in scenario.never
    if calm and suspects:
        wrong.append(f"a healthy job has suspects: {suspects}")
    if (scenario.suspects or calm) and not accused <= culprits:
        wrong.append(f"the verdict accuses {sorted(accused - culprits)}")
    if scenario.suspects and not accused:
        wrong.append("the verdict accuses nobody")
    if verdict["kind"] not in scenario.kinds:
        wrong.append(f"the verdict is {verdict['kind']} ({verdict['text']}), not {scenario.kinds}")
    told = seen.done.out
    wrong += [f"nothing is said of {word!r}" for word in scenario.must if word not in told]
    wrong += [f"{word!r} is said" for word in scenario.never if word in told]
    return wrong


@pytest.mark.parametrize(("python", "scenario"), list(rows()))
def test_the_culprit_is_first(
    python: Python,
    scenario: Scenario,
    stable: Callable[[Python], Stable],
    tool: Tool,
    tmp_path: Path,
) -> None:
    place = tmp_path / "job"
    place.mkdir()
    play = Play(scenario, stable(python), place)
    try:
        play.start()
        play.hangs()
        if scenario.healthy:
            tell(play, "alone")
        with play.fault(), beside(play):
            seen = look(tool, play)
        wrong = check(scenario, seen)
        if scenario.ends:
            play.go_on()
        assert not wrong, f"{wrong}\n{seen}"
    finally:
        play.end()
        shutil.rmtree(place, ignore_errors=True)

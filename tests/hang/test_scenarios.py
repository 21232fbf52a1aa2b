"""Real hangs of torch: the culprit first, nobody accused wrongly, nobody harmed."""

import datetime
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import Done, Tool, wait_for
from tests.hang.generated import generated
from tests.hang.play import PATH, Play, held, playing, stable
from tests.hang.pythons import found, needed
from tests.hang.scenarios import SCENARIOS, Scenario

__all__ = ["stable"]


def rows() -> Iterator[Any]:
    """Scenario and Python: all on the first, some on each, a few in `make test-lab`."""
    # In two halves beside each other: most of their time they wait.
    halves = itertools.cycle(("torch-0", "torch-1"))
    for number, python in enumerate(found() or (None,)):
        for scenario in SCENARIOS:
            fits = python and not (scenario.newest and python.debian)
            if number and not (fits and scenario.core):
                continue
            name = python.name if python and fits else "newest"
            is_nightly = number or not scenario.lab
            group = pytest.mark.xdist_group(next(halves) if is_nightly else "torch-0")
            yield pytest.param(
                python if fits else None,
                scenario,
                id=f"{name}-{scenario.name}",
                marks=[group, pytest.mark.nightly] if is_nightly else [group],
            )


def command(pid: int) -> str:
    """Its command line; "": it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() or "?"
    except OSError:
        return ""


def look(tool: Tool, play: Play) -> tuple[Done, dict[str, Any]]:
    """The job from outside, as table and document. The look pauses and ends nobody."""
    directory = tool.home / "kept"
    family = {pid: command(pid) for pid in play.family()}
    before, step = held(family), play.told(0)[2]
    # What hangs is known to: no longer look is needed.
    how = () if play.scenario.healthy else ("--interval", "2")
    how += ("--native",) if play.scenario.native else ()
    words = ("stacks", "--local", "--job", play.job, "-v", "-o", directory, *how)
    done = tool(*words, env={"PATH": PATH})
    assert held(family) == before
    if play.scenario.healthy:
        # Its children come and go.
        wait_for(lambda: play.told(0)[2] > step)
    else:
        assert {pid: name for pid, name in family.items() if not command(pid)} == {}
    assert done.status == play.scenario.status, done
    return done, json.loads((directory / "stacks.json").read_text())


def mistakes(scenario: Scenario, table: str, document: dict[str, Any]) -> list[str]:
    """What the table and the document say wrongly."""
    groups, verdict = document["groups"], document["verdict"]
    roles = {
        role: {tuple(group["ranks"]) for group in groups if group["role"] == role}
        for role in ("suspect", "victim")
    }
    wrong = []
    accused = {rank for suspect in verdict["suspects"] for rank in suspect["ranks"]}
    culprits = {rank for group in scenario.suspects or scenario.first for rank in group}
    on_top = scenario.suspects or scenario.first
    if on_top and tuple(groups[0]["ranks"]) not in on_top:
        wrong.append(f"first is {groups[0]['ranks']}, not {on_top}")
    if scenario.suspects:
        victims = {rank for group in roles["victim"] for rank in group}
        if roles["suspect"] != set(scenario.suspects):
            wrong.append(f"suspects are {roles['suspect']}, not {scenario.suspects}")
        if victims != scenario.victims:
            wrong.append(f"victims are {victims}, not {scenario.victims}")
        if not accused:
            wrong.append("the verdict accuses nobody")
    if scenario.healthy and accused and "slow" not in verdict["text"]:
        wrong.append(f"a healthy job's {sorted(accused)} are accused: {verdict['text']}")
    is_calm = scenario.healthy and "suspect" in scenario.never
    if is_calm and roles["suspect"]:
        wrong.append(f"a healthy job has suspects: {roles['suspect']}")
    if (scenario.suspects or is_calm) and not accused <= culprits:
        wrong.append(f"the verdict accuses {sorted(accused - culprits)}")
    if verdict["kind"] not in scenario.kinds:
        wrong.append(f"the verdict is {verdict['kind']} ({verdict['text']}), not {scenario.kinds}")
    wrong += [f"{word!r} is missing" for word in scenario.must if word not in table]
    wrong += [f"{word!r} is in the table" for word in scenario.never if word in table]
    return wrong


@pytest.mark.parametrize(("python", "scenario"), list(rows()))
def test_the_culprit_is_first(python, scenario, stable, tool, tmp_path):
    used = needed(python)
    if scenario.module and not used.has(scenario.module):
        pytest.skip(f"no {scenario.module} in {used.path}")
    with playing(scenario, stable(used), tmp_path / "job") as play:
        play.start()
        play.hangs()
        with play.fault():
            done, document = look(tool, play)
        wrong = mistakes(scenario, done.out, document)
        if scenario.ends:
            play.go_on()
        assert not wrong, f"{wrong}\n{done}\n{json.dumps(document['verdict'], indent=1)}"


def drawn() -> Iterator[Any]:
    """The seeds of a night, never the same: SEED or the day, and a number."""
    night = os.environ.get("SEED") or datetime.datetime.now(datetime.UTC).date().isoformat()
    for number in range(300):
        group = pytest.mark.xdist_group(f"torch-{number % 2}")
        yield pytest.param(f"{night}-{number}", id=f"drawn-{number}", marks=[group])


@pytest.mark.nightly
@pytest.mark.parametrize("seed", list(drawn()))
def test_of_a_drawn_hang_nobody_but_the_first_is_accused(seed, stable, tool, tmp_path):
    scenario, plan = generated(seed)
    with playing(scenario, stable(), tmp_path / "job", plan) as play:
        play.start()
        play.hangs()
        with play.fault():
            verdict = look(tool, play)[1]["verdict"]
    accused = {rank for suspect in verdict["suspects"] for rank in suspect["ranks"]}
    assert accused <= set(sum(scenario.suspects, ())), (seed, scenario.what, plan, verdict)
    assert verdict["kind"] in (*scenario.kinds, "unclear"), (seed, scenario.what, plan, verdict)

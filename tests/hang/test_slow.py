"""Real jobs with a slow rank: it is named, and no rank of an even job is."""

import datetime
import json
import os
import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from tests.command import wait_for
from tests.hang.play import PATH, Play, playing, stable
from tests.hang.slow_jobs import prepare, shaped, slow_job, slowed

__all__ = ["stable"]

#: Minimum factor of a rank that must be named: the load of the tests beside it lets a smaller one
#: pass for chance, and `unclear` is right then.
NAMED = 1.5


def drawn() -> Iterator[Any]:
    """The seeds of a night: 12 jobs with a slow rank, 8 even ones, 4 with passing slowness."""
    night = os.environ.get("SEED") or datetime.datetime.now(datetime.UTC).date().isoformat()
    for number in range(24):
        sort = "slow" if number < 12 else "even" if number < 20 else "passing"
        yield pytest.param(sort, f"{night}-{number}", id=f"{sort}-{number}")


def worked(play: Play, slow: int) -> float:
    """How many times as long as its peers this rank works, by their own words."""
    seconds = {r: float(play.file(f"work-{r}").read_text()) for r in play.scenario.parts}
    own = seconds.pop(slow)
    return own / statistics.median(seconds.values())


@pytest.mark.nightly
@pytest.mark.xdist_group("torch-0")
@pytest.mark.parametrize(("sort", "seed"), list(drawn()))
def test_the_slow_rank_is_named_and_no_other(sort, seed, stable, tool, tmp_path):
    scenario, plan = slow_job(seed, sort == "slow", sort == "passing")
    factor = 1.0
    with playing(scenario, stable(), tmp_path / "job", plan) as play, shaped(plan):
        prepare(play.place, plan, scenario.world)
        play.start()
        wait_for(play._there)
        with slowed(play, plan):
            words = ("stacks", "--local", "--job", play.job, "--slow", "60s")
            done = tool(*words, "-o", tool.home / "kept", env={"PATH": PATH})
            if sort == "slow" and plan["kind"] != "network":
                factor = worked(play, plan["slow"])
    verdict = json.loads((tool.home / "kept/stacks.json").read_text())["verdict"]
    named = [rank for suspect in verdict["suspects"] for rank in suspect["ranks"]]
    must = sort == "slow" and (factor >= NAMED or plan["kind"] == "network")
    assert set(named) <= ({plan["slow"]} if sort == "slow" else set()), (scenario.what, verdict)
    assert named or not must, (scenario.what, factor, verdict, done)
    assert sort == "slow" or verdict["kind"] in ("even", "unclear"), (scenario.what, verdict)

"""The search for the culprit, on simulated fleets."""

from __future__ import annotations

import math
import random

import pytest

from nodeready.smoke.search import NODE, plan
from tests.unit.smoke.fleets import Fleet, names, told


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 12, 64, 65, 232])
def test_a_healthy_fleet_takes_what_the_plan_says_and_nobody_is_accused(count):
    fleet = Fleet(names(count), noise=0.4, seed=count)
    fleet_without_noise = Fleet(names(count))
    found = fleet_without_noise.search()
    assert fleet.search().suspects == found.suspects == ()
    assert found.passed == tuple(names(count))
    assert found.untested == ()
    made = sum(len(tests) for tests in fleet_without_noise.rounds)
    assert (made, found.rounds) == plan(count)
    assert found.tests <= math.sqrt(count) + math.log2(count) + 1


@pytest.mark.parametrize(("count", "placements"), [(232, 20), (1024, 4)])
@pytest.mark.parametrize("noise", [0.0])
def test_five_bad_nodes_are_found_in_few_tests(count, placements, noise):
    choose = random.Random(count)
    for seed in range(placements):
        bad = choose.sample(names(count), 5)
        found = Fleet(names(count), bad=tuple(bad), noise=noise, seed=seed).search()
        assert told(found) == {(NODE, (name,)) for name in bad}
        assert found.tests <= 4 * math.sqrt(count) + 20

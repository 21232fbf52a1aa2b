"""Lemons: who fails far more often than the peers, and how often the rule is wrong."""

from __future__ import annotations

import random

import pytest

from nodeready.memory.lemons import DAY_S, MIN_SHARED, Incident, own_incidents, rank

WINDOW_DAYS = 90
#: Failures of one node in a day: 6.5 and 2.34 in 1,000 node days (arXiv 2410.21680, RSC-1, RSC-2),
#: and three times as many.
RATES = (0.0065, 0.00234, 0.02)


def incidents(days_of: dict[str, tuple[int, ...]], kind: str = "gpus.recovery") -> list[Incident]:
    return [
        Incident(day * DAY_S + number, node, "", kind, "")
        for number, (node, days) in enumerate(days_of.items())
        for day in days
    ]


def fleet(size: int, days: int = WINDOW_DAYS) -> dict[str, float]:
    return {f"n{number}": days * DAY_S for number in range(size)}


def simulated(random_: random.Random, size: int, rate: float, bad: int = 0) -> set[str]:
    """The lemons of a fleet of equal nodes, of which ``bad`` fail ten times as often."""
    faults = []
    for number in range(size):
        mean_days = 1 / (rate * (10 if number < bad else 1))
        day = random_.expovariate(1 / mean_days)
        while day < WINDOW_DAYS:
            faults.append(Incident(day * DAY_S, f"n{number}", "", "gpus.recovery", ""))
            day += random_.expovariate(1 / mean_days)
    ranked = rank(own_incidents(faults, size), fleet(size), "node")
    return {lemon.unit for lemon in ranked if lemon.is_lemon}


@pytest.mark.parametrize("rate", RATES)
def test_a_fleet_of_equal_nodes_has_a_lemon_in_one_of_a_hundred_windows(rate: float) -> None:
    random_ = random.Random(1)
    alarms = [bool(simulated(random_, 64, rate)) for _ in range(200)]
    assert sum(alarms) <= 4  # 2 are expected of the rule's 1 %


def test_three_nodes_that_fail_ten_times_as_often_are_the_lemons() -> None:
    random_ = random.Random(1)
    named = [simulated(random_, 63, 0.02, bad=3) for _ in range(20)]
    assert all(units <= {"n0", "n1", "n2"} for units in named)
    assert sum(map(len, named)) >= 57  # of 60


@pytest.mark.parametrize(
    ("days_of", "lemons"),
    [
        pytest.param({"n1": (1, 5)}, set(), id="two days are bad luck"),
        pytest.param({"n1": (1, 5, 9)}, {"n1"}, id="three days where nobody else has one"),
        pytest.param({"n1": (1, 1, 1, 1)}, set(), id="many incidents of one day"),
        pytest.param(
            {f"n{number}": (1, 5, 9) for number in range(20)}, set(), id="all nodes alike"
        ),
        pytest.param(
            {"n1": (1, 5, 9, 20), "n2": (2, 6, 10, 30), "n3": (3, 7, 11)},
            {"n1", "n2", "n3"},
            id="lemons do not hide each other",
        ),
    ],
)
def test_rule(days_of: dict[str, tuple[int, ...]], lemons: set[str]) -> None:
    ranked = rank(incidents(days_of), fleet(20), "node")
    assert {lemon.unit for lemon in ranked if lemon.is_lemon} == lemons
    assert {lemon.unit for lemon in ranked} == set(days_of)


def test_a_node_that_was_observed_for_a_week_is_compared_with_a_week_of_its_peers() -> None:
    days_of = {f"n{number}": tuple(range(number, 90, 20)) for number in range(20)}
    observed = {**fleet(20), "new": 7 * DAY_S}
    ranked = rank(incidents({**days_of, "new": (80, 82, 84, 86, 88)}), observed, "node")
    assert [lemon.unit for lemon in ranked if lemon.is_lemon] == ["new"]


def test_an_incident_of_many_nodes_at_once_is_the_fleets() -> None:
    outage = [Incident(5.0, f"n{number}", "", "host.mounts", "") for number in range(MIN_SHARED)]
    cable = [Incident(5.0, f"n{number}", "", "rdma.errors", "") for number in range(2)]
    assert own_incidents([*outage, *cable], 40) == cable


def test_a_moved_gpu_takes_its_incidents_along() -> None:
    faults = [
        Incident(day * DAY_S, node, "GPU1", "gpus.recovery", f"day {day}")
        for day, node in ((1, "n1"), (5, "n1"), (9, "n2"))
    ]
    (lemon,) = rank(faults, {f"GPU{number}": 90 * DAY_S for number in range(160)}, "gpu")
    assert (lemon.unit, lemon.nodes, lemon.is_lemon) == ("GPU1", ("n1", "n2"), True)
    assert lemon.incidents[0].text == "day 9"

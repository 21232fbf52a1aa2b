"""Lemons: who fails far more often than the peers, and how often the rule is wrong."""

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest

from nodeready.core.result import Result
from nodeready.reports.registry import find_format
from nodeready.runs.memory.lemons import (
    DAY_S,
    MIN_SHARED,
    Lemon,
    Lemons,
    SuspectUnit,
    hardware_checks,
    lemons_code,
    lemons_of_nodes,
    node_incidents,
    own_incidents,
    rank,
)
from nodeready.runs.memory.look import Event, NodeLook, PartSpan
from tests.cases import read_data, with_table

WINDOW_DAYS = 90
#: Failures of one node in a day: 6.5 and 2.34 in 1,000 node days (arXiv 2410.21680, RSC-1, RSC-2),
#: and three times as many.
RATES = (0.0065, 0.00234, 0.02)


def incidents(days_of: dict[str, tuple[int, ...]], kind: str = "gpus.recovery") -> list[Event]:
    return [
        Event(day * DAY_S + number, node, "", kind, "")
        for number, (node, days) in enumerate(days_of.items())
        for day in days
    ]


def rank_nodes(faults: Iterable[Event], observed_s: Mapping[str, float]) -> list[Lemon]:
    by_node = defaultdict(list)
    for fault in faults:
        by_node[SuspectUnit(fault.node, fault.node)].append(fault)
    nodes = {SuspectUnit(name, name): seconds for name, seconds in observed_s.items()}
    return rank(by_node, nodes, "node", nodes)


def fleet(size: int, days: int = WINDOW_DAYS) -> dict[str, float]:
    return {f"n{number}": days * DAY_S for number in range(size)}


def simulated(random_: random.Random, size: int, rate: float, bad: int = 0) -> set[str]:
    """The lemons of a fleet of equal nodes, of which ``bad`` fail ten times as often."""
    faults = []
    for number in range(size):
        mean_days = 1 / (rate * (10 if number < bad else 1))
        day = random_.expovariate(1 / mean_days)
        while day < WINDOW_DAYS:
            faults.append(Event(day * DAY_S, f"n{number}", "", "gpus.recovery", ""))
            day += random_.expovariate(1 / mean_days)
    ranked = rank_nodes(own_incidents(faults, size), fleet(size))
    return {lemon.unit for lemon in ranked if lemon.is_lemon}


@pytest.mark.parametrize("rate", RATES)
def test_a_fleet_of_equal_nodes_has_a_lemon_in_one_of_a_hundred_windows(rate):
    random_ = random.Random(1)
    alarms = [bool(simulated(random_, 64, rate)) for _ in range(200)]
    assert sum(alarms) <= 4  # 2 are expected of the rule's 1 %


def test_three_nodes_that_fail_ten_times_as_often_are_the_lemons():
    random_ = random.Random(1)
    named = [simulated(random_, 63, 0.02, bad=3) for _ in range(20)]
    assert all(units <= {"n0", "n1", "n2"} for units in named)
    assert sum(map(len, named)) >= 57  # of 60


@with_table("days_of, lemons")
def test_rule(days_of, lemons):
    ranked = rank_nodes(incidents(days_of), fleet(20))
    assert {lemon.unit for lemon in ranked if lemon.is_lemon} == {*lemons}
    assert {lemon.unit for lemon in ranked} == set(days_of)


def test_a_node_that_was_observed_for_a_week_is_compared_with_a_week_of_its_peers():
    days_of = {f"n{number}": tuple(range(number, 90, 20)) for number in range(20)}
    observed = {**fleet(20), "new": 7 * DAY_S}
    ranked = rank_nodes(incidents({**days_of, "new": (80, 82, 84, 86, 88)}), observed)
    assert [lemon.unit for lemon in ranked if lemon.is_lemon] == ["new"]


def test_an_incident_of_many_nodes_at_once_is_the_fleets():
    outage = [Event(5.0, f"n{number}", "", "host.mounts", "") for number in range(MIN_SHARED)]
    cable = [Event(5.0, f"n{number}", "", "rdma.errors", "") for number in range(2)]
    assert own_incidents([*outage, *cable], 40) == cable


# --- Incidents of a node.

GPU_A, GPU_B = "0000:1b:00.0", "0000:43:00.0"
PARTS = [
    PartSpan("gpu", serial, "", "gpu1", slot, 0.0, 90 * DAY_S, is_there)
    for serial, slot, is_there in (("A", GPU_A, True), ("B", GPU_B, True))
]
CHECK = "gpus.kernel_faults"


def at(day: int, status: str, actual: str = "", error: str = "") -> NodeLook:
    results = {CHECK: Result(CHECK, status, actual=actual)}
    return NodeLook("gpu1", day * DAY_S, "", day, error, {}, {}, results, bool(error))


@with_table("life, expected")
def test_incidents(life, expected):
    """A look is a row of its day, status, actual value and error."""
    made = node_incidents([at(*row) for row in life], PARTS, (), {CHECK})
    assert tuple((event.time_s / DAY_S, event.serial, event.kind) for event in made) == expected


def test_only_what_hardware_can_fail_is_an_incident():
    checks = hardware_checks()
    assert {"gpus.kernel_faults", "gpus.ecc_errors", "rdma.errors", "nics.flaps"} <= checks
    assert checks.isdisjoint({"ptrace.scope", "gpus.driver", "host.space", "proof.history"})


# --- The document.


def document() -> Lemons:
    faults = [
        Event((18000 + day) * DAY_S, node, "1650923000123", CHECK, f"Xid 79 on {GPU_A}\x1b[2J")
        for day, node in ((1, "gpu017"), (9, "gpu017"), (30, "gpu023"))
    ]
    link = Event(18010 * DAY_S, "gpu002", "", "nics.flaps", "eth0: 3 changes")
    units = {
        SuspectUnit(f"{1650923000000 + n}", f"gpu{n % 100:03d}"): 90 * DAY_S for n in range(512)
    }
    gpus = rank({SuspectUnit("1650923000123", "gpu023"): faults}, units, "gpu", units)
    nodes = rank_nodes([link], {f"gpu{n:03d}": 90 * DAY_S for n in range(64)})
    return Lemons("2026-08-28T00:00:00Z", "2026-11-26T00:00:00Z", 64, 512, (*gpus, *nodes), 12)


TABLE = read_data(__file__, "lemons.txt")


def test_table():
    assert "".join(find_format("lemons", "table").render(document())) == TABLE


def test_a_node_is_told_of_the_bad_gpu_that_is_in_it_now():
    assert lemons_of_nodes(document()) == {
        "gpu023": ("GPU 1650923000123: 3 days with incidents, below 0.1 expected",)
    }
    assert lemons_code(document()) == 3

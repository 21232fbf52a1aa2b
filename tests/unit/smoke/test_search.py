"""The search for the culprit, on simulated fleets."""

import itertools
import math
import random
import re

import pytest

from nodeready.runs.smoke.knowledge import (
    GPU,
    NODE,
    PAIR,
    REPORT_SHARE,
    SCALE,
    SearchResult,
    SmokeOutcome,
    Test,
    Trial,
    slow_reason,
)
from nodeready.runs.smoke.search import search
from tests.cases import with_table
from tests.unit.smoke.fleets import STEADY, Fleet, names, placed, suspects_of

N = names(300)
#: Of more than 64 nodes, not every two nodes meet.
NOT_EVERY_PAIR = tuple(kind for kind in STEADY if kind not in ("paths", "slow_pairs"))


def nodes_named(*nodes: str) -> set[object]:
    return {(NODE, (node,)) for node in nodes}


def assert_evidence(fleet: Fleet, found: SearchResult) -> None:
    """Whoever is not suspected passed, and each reason names the tests that show it."""
    suspected = {n for one in found.suspects if one.kind in (NODE, GPU) for n in one.nodes}
    assert {*found.passed} == {*fleet.nodes} - suspected
    assert found.untested == ()
    for suspect in found.suspects:
        brackets = [part for why in suspect.evidence for part in re.findall(r"\[(.*?)\]", why)]
        tests = {int(number) for part in brackets for number in re.findall(r"\d+", part)}
        assert tests <= fleet.numbers
        assert tests or "its connection ended in test" in suspect.evidence[0]


nightly = pytest.mark.nightly


@pytest.mark.parametrize(("least", "most", "seeds"), [
    (2, 12, range(200)),
    (13, 40, range(12)),
    (13, 40, range(12, 24)),
    (65, 250, range(6)),
    (65, 250, range(6, 12)),
    pytest.param(2, 64, range(1000, 1500), marks=nightly),
    pytest.param(65, 1024, range(1000, 1150), marks=nightly),
])  # fmt: skip
def test_the_planted_faults_are_named_and_nobody_else_in_few_tests(least, most, seeds):
    for seed in seeds:
        count = random.Random(seed).randint(least, most)
        kinds = STEADY if count <= 64 else NOT_EVERY_PAIR
        fleet, expected = placed(seed, count, kinds, 1 + seed % 5)
        found = fleet.search()
        assert suspects_of(found) == expected, (seed, count)
        assert_evidence(fleet, found)
        assert found.tests <= 4 * math.sqrt(count) + 20 + 50 * len(expected), (seed, count)


@pytest.mark.parametrize(
    ("most", "seeds"), [(250, range(40)), pytest.param(1024, range(40, 400), marks=nightly)]
)
def test_five_bad_nodes_are_named_in_few_tests_through_any_noise(most, seeds):
    for seed in seeds:
        choose = random.Random(seed)
        nodes = names(choose.randint(13, most))
        bad = choose.sample(nodes, choose.choice((0, 1, 5, 5)))
        noise = choose.choice((0.0, 0.4))
        fleet = Fleet(nodes, bad=tuple(bad), noise=noise, seed=seed)
        found = fleet.search(until="sweep")
        assert suspects_of(found) == nodes_named(*bad), seed
        assert found.tests == len(fleet.made("group", "half", "confirm", "merge", "control"))
        # What looks slow is tried once more: 32 more of these 400 seeds at most.
        assert found.tests <= 4 * math.sqrt(len(nodes)) + (40 if noise else 20), seed


def test_what_fails_now_and_then_is_named_and_blames_nobody_else():
    for seed in range(24):
        fleet, expected = placed(seed, 12 + seed % 12, ("flaky", "freezes", "lossy", "drops"), 1)
        assert suspects_of(fleet.search()) == expected, seed
    # Collectives show it without the pairs.
    assert suspects_of(Fleet(N[:24], flaky={N[4]: 3}).search(until="sweep")) == nodes_named(N[4])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 12, 64, 65, 232])
@pytest.mark.parametrize("full", [False, True])
def test_a_healthy_fleet_takes_few_tests(count, full):
    nodes = names(70 if full and count > 65 else count)
    fleet = Fleet(nodes)
    found = fleet.search(full=full)
    assert (found.suspects, found.passed, found.untested) == ((), tuple(nodes), ())
    assert found.tests == len(fleet.made("group", "merge")) <= math.sqrt(count) + 2
    sweeps = [tests for tests in fleet.rounds if tests[0].purpose == "sweep"]
    assert found.rounds <= 3 + len(sweeps)
    # All pairs in both directions; of many nodes only those near by, and powers of two away.
    expected = {65: 12, 232: 16}.get(0 if full else len(nodes), len(nodes) - 1)
    assert len(sweeps) == expected


@pytest.mark.parametrize("count", [2, 3, 4, 12])
def test_noise_accuses_nobody(count):
    for seed in range(20):
        assert Fleet(names(count), noise=0.4, seed=seed).search().suspects == ()


@with_table("faults, expected")
def test_a_fault_at_an_awkward_place(faults, expected):
    for count in (5, 12, 40):
        fleet = Fleet(names(count), **faults)
        found = fleet.search()
        assert suspects_of(found) == {*expected}, count
        assert_evidence(fleet, found)


@pytest.mark.parametrize("count", [5, 40, 232])
@pytest.mark.parametrize("number", [2, 3, 7, 14, 15, 16, 39, 231])
def test_where_only_a_number_of_nodes_is_too_many_nobody_is_named(count, number):
    nodes, bad = names(count), (N[3],)
    found = Fleet(nodes, limit=min(number, count - 1)).search(until="sweep")
    assert {suspect.kind for suspect in found.suspects} == {SCALE}
    assert found.untested == ()
    # Beside it, a bad node may be found.
    found = Fleet(nodes, limit=min(number, count - 2), bad=bad).search(until="sweep")
    assert {s.nodes for s in found.suspects if s.kind != SCALE} <= {bad}


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_two_good_nodes_are_enough_to_name_the_others(count):
    nodes = names(count)
    for size in range(count + 1):
        for bad in itertools.combinations(nodes, size):
            found = Fleet(nodes, bad=bad).search()
            if size == 0 or count - size >= 2:
                assert suspects_of(found) == nodes_named(*bad)
            else:
                expected = {(PAIR, tuple(nodes)) if count == 2 else (SCALE, count)}
                assert suspects_of(found) == expected
                assert found.suspects[0].nodes == tuple(nodes)
                assert found.passed == found.untested == ()


def test_what_cannot_be_told_apart_is_said():
    two = Fleet(names(2), bad=(N[1],)).search()
    assert two.suspects[0].evidence[1] == "there is no third node to tell which of them it is"
    # A node of which all pairs fail is at fault itself.
    three = Fleet(names(3), pairs=((N[0], N[1]), (N[0], N[2]))).search()
    assert suspects_of(three) == nodes_named(N[0])
    last = Fleet(names(3), dead=(N[0], N[2])).search()
    assert last.passed == (N[1],)
    assert suspects_of(last) == nodes_named(N[0], N[2])
    # Collectives pass and plain connections do not: no node's fault.
    shut = Fleet(names(8), unreached=tuple(names(8))).search()
    assert [(suspect.kind, suspect.nodes) for suspect in shut.suspects] == [
        (SCALE, tuple(names(8)))
    ]
    with pytest.raises(StopIteration) as end:
        next(search([], {}))
    assert end.value.value.suspects == ()


@pytest.mark.parametrize("says", [{}, {N[3]: "", N[40]: ""}, {N[3]: N[9], N[40]: N[3]}])
def test_a_node_that_calls_another_the_culprit_is_not_believed(says):
    found = Fleet(names(64), bad=(N[3], N[40]), says=says).search(until="sweep")
    assert suspects_of(found) == nodes_named(N[3], N[40])
    # Groups, the base, halves, confirmations with their control, the join, all together.
    assert found.tests <= (8 + 1 + 4 + 3 + 1 + 1 if says.get(N[3]) == "" else 34)


def test_of_two_sides_that_pass_by_themselves_only_the_smaller_is_named_and_all_of_it_or_nothing():
    """Where they are about equal, the groups do not show which one is smaller."""
    kinds = set()
    for count, begin, size in itertools.product(
        (4, 5, 6, 11, 12, 40, 100), (0, 1, 3, 5, 16, 29), (1, 2, 3, 5, 6, 15, 16, 33, 50)
    ):
        nodes = names(count)
        sides = [{*nodes[begin : begin + size]}, {*nodes} - {*nodes[begin : begin + size]}]
        found = Fleet(nodes, sets=(tuple(sides[0]),)).search(until="sweep")
        small, large = sorted(sides, key=len)
        suspected = {name for one in found.suspects if one.kind != SCALE for name in one.nodes}
        assert suspected in ({*()}, small), (count, begin, size)
        assert found.suspects or not small
        if 4 * len(small) < count:
            assert suspected == small, (count, begin, size)
        kinds.add((len(small) == len(large), bool(suspected)))
    assert kinds == {(True, False), (False, False), (False, True)}


def test_a_failure_that_nothing_repeats_is_told_with_all_that_it_was_among():
    fleet = Fleet(names(30), once=31)
    (suspect,) = fleet.search(until="sweep").suspects
    (test,) = [test for test in fleet.made("group") if test.number == 31]
    assert (suspect.kind, suspect.nodes) == (SCALE, test.nodes)
    assert suspect.evidence[0].startswith("what failed [31]: timed out")


def test_a_search_that_is_stopped_names_whom_it_doubts_and_says_so():
    bad = (N[3], N[17], N[90])
    whole = Fleet(names(100), bad=bad).search(until="sweep").rounds
    for rounds in range(1, whole + 1):
        found = Fleet(names(100), bad=bad).search(rounds=rounds)
        for suspect in found.suspects:
            if suspect.kind == NODE and "not conf" not in suspect.evidence[0]:
                assert {*suspect.nodes} <= {*bad}
            else:
                assert {*suspect.nodes} & {*bad}
                doubt = "not confirmed: |what failed .* not searched to the end"
                assert re.match(doubt, suspect.evidence[0])
        assert (len(found.suspects) > 0) == (rounds > 1)


def test_nothing_else_runs_while_a_slow_node_and_good_ones_take_turns():
    fleet = Fleet(names(30), slow={N[7]: 0.5})
    assert suspects_of(fleet.search()) == nodes_named(N[7])
    turns = [tests for tests in fleet.rounds if tests[0].purpose == "confirm" and len(tests) == 1]
    assert len(turns) == 6
    following = [fleet.rounds[fleet.rounds.index(tests) + 1] for tests in turns]
    assert {(len(tests), tests[0].purpose) for tests in following} == {(1, "control")}


def test_a_sweep_leaves_out_accused_nodes_and_tries_both_ways():
    fleet = Fleet(names(70), bad=(N[5],))
    fleet.search()
    swept = {test.nodes for test in fleet.made("sweep")}
    assert not any(N[5] in edge for edge in swept)
    assert {edge[::-1] for edge in swept} == swept
    assert len(fleet.made("alone")) == 70


@with_table("suspect, good, slow")
def test_slow_is_half_of_the_rate_in_each_turn(suspect, good, slow):
    def turns(nodes: tuple[str, str], rates: tuple[float, ...]) -> list[Trial]:
        return [Trial(Test(1, "sweep", nodes), SmokeOutcome(True, gbps=rate)) for rate in rates]

    text = slow_reason(turns(("a", "b"), suspect), turns(("c", "b"), good), REPORT_SHARE)
    assert text.startswith("slow: ") is slow

"""The search for the culprit, on simulated fleets."""

from __future__ import annotations

import itertools
import math
import random
import re

import pytest

from nodeready.smoke.search import (
    _ACCUSE,
    ALONE,
    CONFIRM,
    GPU,
    NODE,
    PAIR,
    SCALE,
    SWEEP,
    Outcome,
    Test,
    _Made,
    _worse,
    plan,
    search,
)
from tests.unit.smoke.fleets import STEADY, Fleet, counted, names, placed, told


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 12, 64, 65, 232])
@pytest.mark.parametrize("full", [False, True])
def test_a_healthy_fleet_takes_what_the_plan_says(count, full):
    if full and count > 65:
        count = 70
    fleet = Fleet(names(count))
    found = fleet.search(full=full)
    assert found.suspects == ()
    assert found.passed == tuple(names(count))
    assert found.untested == ()
    best = plan(count, full=full)
    assert found.rounds == best.rounds + best.sweeps
    assert found.tests == best.tests == len(fleet.made("group", "merge")) <= math.sqrt(count) + 2


@pytest.mark.parametrize("count", [2, 3, 4, 12, 40])
def test_noise_accuses_nobody(count):
    for seed in range(50):
        assert Fleet(names(count), noise=0.4, seed=seed).search().suspects == ()


@pytest.mark.parametrize(("count", "placements"), [(232, 200), (1024, 40)])
def test_five_bad_nodes_are_found_in_few_tests_wherever_they_are(count, placements):
    choose = random.Random(count)
    for seed in range(placements):
        bad = choose.sample(names(count), 5)
        fleet = Fleet(names(count), bad=tuple(bad), seed=seed)
        found = fleet.search(until=SWEEP)
        assert told(found) == {(NODE, (name,)) for name in bad}
        assert found.tests == len(fleet.made("group", "half", "confirm", "merge", "control"))
        assert found.tests <= 4 * math.sqrt(count) + 20


def test_noise_hides_no_bad_node_and_accuses_no_other():
    choose = random.Random(7)
    for seed in range(60):
        bad = choose.sample(names(232), 5)
        found = Fleet(names(232), bad=tuple(bad), noise=0.4, seed=seed).search(until=SWEEP)
        assert told(found) == {(NODE, (name,)) for name in bad}
        assert found.tests <= 4 * math.sqrt(232) + 20


N = names(300)


@pytest.mark.parametrize("count", [5, 12, 40, 232])
@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ({"dead": (N[2],)}, {(NODE, (N[2],))}),
        ({"bad": (N[0],)}, {(NODE, (N[0],))}),
        ({"heads": (N[1],)}, {(NODE, (N[1],))}),
        ({"tails": (N[1],)}, {(NODE, (N[1],))}),
        ({"gpus": 8, "bad_gpus": ((N[3], 5),)}, {(GPU, (N[3],), (5,))}),
        ({"gpus": 8, "gpu_pairs": ((N[3], 2, 7),)}, {(GPU, (N[3],), (2, 7))}),
        # With other nodes only: a GPU's own port, and a node whose GPUs all fail there.
        (
            {"gpus": 8, "rails": ((N[3], 5),), "bad": (N[1],)},
            {(GPU, (N[3],), (5,)), (NODE, (N[1],))},
        ),
        # One GPU of one, or all of them: it is the node.
        ({"gpus": 1, "bad_gpus": ((N[3], 0),)}, {(NODE, (N[3],))}),
        ({"gpus": 2, "bad_gpus": ((N[3], 0), (N[3], 1))}, {(NODE, (N[3],))}),
        (
            {"gpus": 4, "bad_gpus": ((N[3], 0), (N[3], 2))},
            {(GPU, (N[3],), (0,)), (GPU, (N[3],), (2,))},
        ),
        ({"pairs": ((N[0], N[1]),)}, {(PAIR, (N[0], N[1]))}),
        ({"pairs": ((N[0], N[4]),)}, {(PAIR, (N[0], N[4]))}),
        ({"ring_pairs": ((N[1], N[2]),)}, {(PAIR, (N[1], N[2]))}),
        ({"paths": ((N[4], N[2]),)}, {(PAIR, (N[2], N[4]))}),
        ({"unreached": (N[3],)}, {(NODE, (N[3],))}),
        ({"sets": ((N[1], N[2]),)}, {(NODE, (N[1], N[2]))}),
        ({"slow": {N[1]: 0.5}}, {(NODE, (N[1],))}),
        ({"slow": {N[1]: 0.5}, "noise": 0.15}, {(NODE, (N[1],))}),
        ({"slow": {N[1]: 0.01}, "noise": 0.3}, {(NODE, (N[1],))}),
        ({"late": {N[4]: 5.0}}, {(NODE, (N[4],))}),
        ({"slow_pairs": {(N[0], N[4]): 0.2}}, {(PAIR, (N[0], N[4]))}),
        ({"lost": {N[4]: 1}}, {(NODE, (N[4],))}),
        ({"lost": {N[4]: 2}}, {(NODE, (N[4],))}),
        ({"lost": {N[4]: 4}}, {(NODE, (N[4],))}),
        ({"freezes": {N[4]: 2}}, {(NODE, (N[4],))}),
        ({"flaky": {N[4]: 3}}, {(NODE, (N[4],))}),
        ({"lossy": (N[4],)}, {(NODE, (N[4],))}),
    ],
)
def test_one_fault_is_named_and_nothing_else(count, faults, expected):
    fleet = Fleet(names(count), **faults)
    found = fleet.search()
    assert told(found) == expected
    ends = {name for one in found.suspects if one.kind in (NODE, GPU) for name in one.nodes}
    assert {*found.passed} == {*fleet.nodes} - ends
    assert found.untested == ()
    for one in found.suspects:
        tests = {int(n) for why in one.why for part in re.findall(r"\[(.*?)\]", why)
                 for n in re.findall(r"\d+", part)}  # fmt: skip
        assert tests <= fleet.numbers
        assert tests or "its connection ended in test" in one.why[0]


@pytest.mark.parametrize("number", [2, 3, 4, 7, 10, 15, 16, 17, 100, 231])
def test_a_number_that_is_too_many_is_told_once(number):
    fleet = Fleet(names(232), limit=number)
    found = fleet.search(until=SWEEP)
    assert counted(found) == {(SCALE, number)}
    assert found.passed == tuple(names(232))
    assert found.tests < 200


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_small_fleets_whoever_is_bad(count):
    """Two good nodes are enough to name the others; without them nobody is named."""
    nodes = names(count)
    for size in range(count + 1):
        for bad in itertools.combinations(nodes, size):
            found = Fleet(nodes, bad=bad).search()
            if size == 0 or count - size >= 2:
                assert told(found) == {(NODE, (name,)) for name in bad}
            else:
                assert told(found) == {(PAIR if count == 2 else SCALE, tuple(nodes))}
                assert found.passed == found.untested == ()


def test_what_cannot_be_told_apart_is_said():
    two = Fleet(names(2), bad=(N[1],)).search()
    assert told(two) == {(PAIR, (N[0], N[1]))}
    assert two.suspects[0].why[1] == "there is no third node to tell which of them it is"
    # A node that passes with nobody else because all its pairs fail is that node.
    three = Fleet(names(3), pairs=((N[0], N[1]), (N[0], N[2]))).search()
    assert told(three) == {(NODE, (N[0],))}
    # Of two sides that are as large, one is named, and that it may be the other.
    four = Fleet(names(4), sets=((N[0], N[1]),)).search()
    assert [len(one.nodes) for one in four.suspects] == [2]
    assert four.suspects[0].why[-1] == "the others are as many: it may be they"
    # One node is left.
    one = Fleet(names(3), dead=(N[0], N[2])).search()
    assert one.passed == (N[1],)
    assert told(one) == {(NODE, (N[0],)), (NODE, (N[2],))}
    # Collectives pass and plain connections do not: nobody's fault.
    shut = Fleet(names(8), unreached=tuple(names(8))).search()
    assert told(shut) == {(SCALE, tuple(names(8)))}
    with pytest.raises(StopIteration) as end:
        next(search([], {}))
    assert end.value.value.suspects == ()


@pytest.mark.parametrize("most", [1, 3])
def test_random_faults_are_exactly_those_named(most):
    for seed in range(300):
        count = random.Random(seed).randint(2, 40)
        fleet, expected = placed(seed, count, STEADY, most)
        assert counted(fleet.search()) == expected, (seed, count)


def test_what_fails_now_and_then_is_found_and_blames_nobody_else():
    for seed in range(60):
        fleet, expected = placed(seed, 12 + seed % 30, ("flaky", "freezes", "lossy"), 1)
        assert told(fleet.search()) == expected, seed


@pytest.mark.parametrize("says", [{}, {N[3]: "", N[40]: ""}, {N[3]: N[9], N[40]: N[3]}])
def test_who_says_that_it_is_another_is_not_believed(says):
    fleet = Fleet(names(64), bad=(N[3], N[40]), says=says)
    found = fleet.search(until=SWEEP)
    assert told(found) == {(NODE, (N[3],)), (NODE, (N[40],))}
    # Groups, the base, halves, confirmations with their control, the join, all together.
    assert found.tests <= (8 + 1 + 4 + 3 + 1 + 1 if says.get(N[3]) == "" else 34)


def test_a_switch_is_one_suspect_with_all_its_nodes_wherever_the_groups_end():
    for begin, size in itertools.product((0, 5, 16, 29), (1, 2, 15, 16, 33)):
        nodes = names(100)
        cut = tuple(nodes[begin : begin + size])
        found = Fleet(nodes, sets=(cut,)).search(until=SWEEP)
        assert told(found) == {(NODE, cut)}


def test_a_failure_that_nothing_repeats_is_told_with_all_that_it_was_among():
    fleet = Fleet(names(30), once=31)
    found = fleet.search(until=SWEEP)
    (one,) = found.suspects
    (test,) = [test for test in fleet.made("group") if test.number == 31]
    assert (one.kind, one.nodes) == (SCALE, test.nodes)
    assert one.why[0].startswith("what failed [31]: timed out")


def test_a_search_that_is_stopped_names_whom_it_doubts_and_says_so():
    bad = (N[3], N[17], N[90])
    whole = Fleet(names(100), bad=bad).search().rounds
    for rounds in range(1, whole):
        found = Fleet(names(100), bad=bad).search(rounds=rounds)
        sure = {one for one in found.suspects if one.kind == NODE and "not conf" not in one.why[0]}
        assert {one.nodes[0] for one in sure} <= {*bad}
        for one in {*found.suspects} - sure:
            assert {*one.nodes} & {*bad}
            assert re.match("not confirmed: |what failed .* not searched to the end", one.why[0])
        assert (len(found.suspects) > 0) == (rounds > 1)


def test_nothing_else_runs_while_a_slow_node_and_good_ones_take_turns():
    fleet = Fleet(names(30), slow={N[7]: 0.5})
    assert told(fleet.search()) == {(NODE, (N[7],))}
    turns = [tests for tests in fleet.rounds if tests[0].purpose == CONFIRM and len(tests) == 1]
    assert len(turns) == 6
    places = [fleet.rounds.index(tests) for tests in turns]
    assert {len(fleet.rounds[place + 1]) for place in places} == {1}
    assert {fleet.rounds[place + 1][0].purpose for place in places} == {"control"}


def test_a_sweep_leaves_out_who_is_accused_and_tries_both_ways():
    fleet = Fleet(names(70), bad=(N[5],))
    fleet.search()
    swept = {test.nodes for test in fleet.made(SWEEP)}
    assert not any(N[5] in edge for edge in swept)
    assert {edge[::-1] for edge in swept} == swept
    assert len(fleet.made(ALONE)) == 70


@pytest.mark.parametrize(
    ("mine", "theirs", "slow"),
    [
        ((12.0,) * 6, (24.0,) * 6, True),
        ((10.2, 13.8, 12.0, 11.0, 12.4, 13.0), (23.0, 25.0, 20.5, 27.6, 24.0, 22.0), True),
        # Always the slower, and not by half: so were nodes that share one machine's memory.
        ((15.6, 15.2, 15.5, 15.6, 15.1, 15.4), (24.0, 24.6, 24.9, 25.1, 24.2, 24.4), False),
        ((16.1,) * 6, (23.9,) * 6, False),
        # Once as quick as they.
        ((6.0, 6.0, 6.0, 6.0, 6.0, 22.0), (24.0,) * 6, False),
    ],
)
def test_slow_is_half_of_the_rate_in_each_turn(mine, theirs, slow):
    def made(nodes: tuple[str, str], each: tuple[float, ...]) -> list[_Made]:
        test = Test(1, SWEEP, nodes)
        return [_Made(test, Outcome(True, gbps=one)) for one in each]

    said = _worse(made(("a", "b"), mine), made(("c", "b"), theirs), _ACCUSE)
    assert said.startswith("slow: ") is slow

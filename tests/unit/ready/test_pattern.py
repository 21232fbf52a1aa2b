"""Which node tries which."""

from __future__ import annotations

import pytest

from nodeready.ready.mesh import full, peers_of, ring_and_skips, rounds

COUNTS = [0, 1, 2, 3, 4, 5, 8, 9, 1000]


def names(count):
    return [f"node{number}" for number in range(count)]


@pytest.mark.parametrize(
    ("count", "offsets"),
    [
        (0, ()),
        (1, ()),
        (2, (1,)),
        (3, (1, 2)),
        (4, (1, 2)),
        (5, (1, 2, 4)),
        (8, (1, 2, 4)),
        (9, (1, 2, 4, 8)),
        (10_000, tuple(2**power for power in range(14))),
    ],
)
def test_the_skips_double_and_end_before_the_nodes_do(count, offsets):
    assert ring_and_skips(count) == offsets


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("pattern", [ring_and_skips, full])
def test_in_each_round_every_node_goes_to_one_other_and_is_tried_by_one(pattern, count):
    if count == 1000 and pattern is full:
        count = 30
    seen = set()
    for pairs in rounds(names(count), pattern(count)):
        assert sorted(source for source, _ in pairs) == sorted(names(count))
        assert sorted(target for _, target in pairs) == sorted(names(count))
        assert all(source != target for source, target in pairs)
        assert not seen & set(pairs)
        seen |= set(pairs)
    if pattern is full:
        assert len(seen) == count * (count - 1) or count < 2


def test_pairs_lead_around_the_end():
    assert rounds(["a", "b", "c"], [1]) == [[("a", "b"), ("b", "c"), ("c", "a")]]
    assert peers_of(["a", "b", "c"], ring_and_skips(3)) == {
        "a": ("b", "c"),
        "b": ("c", "a"),
        "c": ("a", "b"),
    }


@pytest.mark.parametrize("offsets", [[1, 2, 4], [1, -1], [1, 1], [3, 0]])
def test_no_pair_comes_twice_and_no_node_tries_itself(offsets):
    assert peers_of(["a", "b"], offsets) == {"a": ("b",), "b": ("a",)}


@pytest.mark.parametrize("nodes", [[], ["alone"]])
def test_nobody_to_try(nodes):
    assert rounds(nodes, [1, 2]) == []
    assert peers_of(nodes, [1, 2]) == dict.fromkeys(nodes, ())


def test_a_name_that_is_there_twice():
    with pytest.raises(ValueError, match="twice"):
        rounds(["a", "b", "a"], [1])

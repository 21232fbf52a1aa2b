"""The smallest explanation of what failed between nodes."""

from __future__ import annotations

import random

import pytest

from nodeready.ready.localize import Attempt, Finding, attribute
from nodeready.ready.mesh import full, ring_and_skips, rounds


def tried(count, fails, offsets=full, what="29500", cause="dropped"):
    """The attempts of ``count`` nodes a, b, c, …; ``fails(source, target)`` is what fails."""
    names = [chr(ord("a") + number) for number in range(count)]
    return [
        Attempt(s, t, what, not fails(s, t), cause if fails(s, t) else "")
        for pairs in rounds(names, offsets(count))
        for s, t in pairs
    ]


def told(findings):
    return [(one.kind, one.node, "".join(one.peers), one.tried, one.back) for one in findings]


@pytest.mark.parametrize(
    ("count", "fails", "expected"),
    [
        # All is well, or there is nobody.
        (5, lambda s, t: False, []),
        (0, lambda s, t: True, []),
        # One node, in one direction or both: once, however many fail.
        (5, lambda s, t: t == "c", [("target", "c", "abde", 4, True)]),
        (5, lambda s, t: s == "c", [("source", "c", "abde", 4, True)]),
        (5, lambda s, t: "c" in (s, t), [("both", "c", "abde", 4, None)]),
        # Half of the others is enough; fewer are when these have no other trouble, else pairs.
        (5, lambda s, t: t == "c" and s in "ab", [("target", "c", "ab", 4, True)]),
        (6, lambda s, t: t == "c" and s in "ab", [("target", "c", "ab", 5, True)]),
        (
            6,
            lambda s, t: (s, t) in (("a", "c"), ("a", "d"), ("b", "c")),
            [
                ("pair", "a", "c", 1, True),
                ("pair", "a", "d", 1, True),
                ("pair", "b", "c", 1, True),
            ],
        ),
        # A bad node does not hide another, nor a pair.
        (
            6,
            lambda s, t: t == "c" or s == "d" or (s, t) == ("a", "b"),
            [
                ("target", "c", "abdef", 5, True),
                ("source", "d", "abef", 5, True),
                ("pair", "a", "b", 1, True),
            ],
        ),
        # Two nodes that only fail with each other and a third: nobody else is blamed.
        (4, lambda s, t: {s, t} == {"a", "b"}, [("pair", "a", "b", 1, False)]),
        # Of two, nobody can tell whose fault it is.
        (2, lambda s, t: t == "b", [("pair", "a", "b", 1, True)]),
        (2, lambda s, t: True, [("pair", "a", "b", 1, False)]),
        (3, lambda s, t: t == "b", [("target", "b", "ac", 2, True)]),
        (3, lambda s, t: (s, t) == ("a", "b"), [("pair", "a", "b", 1, True)]),
        # Everything fails: all nodes but the last of a pair are named, each once.
        (
            4,
            lambda s, t: True,
            [
                ("both", "a", "bcd", 3, None),
                ("both", "b", "cd", 3, None),
                ("pair", "c", "d", 1, False),
            ],
        ),
    ],
)
def test_who_is_to_blame(count, fails, expected):
    assert told(attribute(tried(count, fails))) == expected


def test_the_way_back_that_nobody_tried_is_not_said_to_work():
    attempts = [Attempt("a", "b", "ssh", False, "refused")]
    assert attribute(attempts) == [Finding("pair", "a", ("b",), 1, ("ssh",), "refused", None)]


def test_ports_that_show_the_same_are_one_finding_and_others_are_not():
    bad = [tried(5, lambda s, t: t == "c", what=f"{port}") for port in (29500, 29501)]
    other = tried(5, lambda s, t: t == "c", what="29502", cause="refused")
    good = tried(5, lambda s, t: False, what="29503")
    found = attribute([*bad[1], *good, *other, *bad[0]])
    assert [(one.what, one.cause) for one in found] == [
        (("29500", "29501"), "dropped"),
        (("29502",), "refused"),
    ]


def test_the_most_common_cause_is_told():
    attempts = [
        Attempt(source, "d", "x", False, cause)
        for source, cause in (("a", "refused"), ("b", "dropped"), ("c", "dropped"))
    ]
    assert [one.cause for one in attribute(attempts)] == ["dropped"]


def test_of_the_same_attempt_the_last_counts():
    again = [Attempt("a", "b", "x", False, "lost"), Attempt("a", "b", "x", True)]
    assert attribute(again) == []


@pytest.mark.parametrize("offsets", [full, ring_and_skips])
def test_many_bad_nodes_are_all_found_and_nobody_else_in_any_order(offsets):
    count, choose = 200, random.Random(7)
    bad = {chr(ord("a") + number) for number in choose.sample(range(count), 12)}
    attempts = tried(count, lambda s, t: t in bad, offsets)
    found = attribute(attempts)
    assert {(one.kind, one.node) for one in found} == {("target", name) for name in bad}
    choose.shuffle(attempts)
    assert attribute(attempts) == found

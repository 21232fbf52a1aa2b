"""The smallest explanation of what failed between nodes."""

import random

import pytest

from nodeready.runs.ready.mesh import full, ring_and_skips, rounds
from nodeready.runs.ready.reach import ReachAttempt, ReachFinding, attribute
from tests.cases import cases


def attempts_of(names, is_failing, offsets=full, what="29500", cause="dropped"):
    """The attempts of these nodes, of which those with `is_failing(source, target)` fail."""
    return [
        ReachAttempt(s, t, what, not is_failing(s, t), cause if is_failing(s, t) else "")
        for pairs in rounds(names, offsets(len(names)))
        for s, t in pairs
    ]


def failing(*edges):
    """`a>b` is one pair; `*` is any node."""
    return lambda s, t: any(f"{a}>{b}" in edges for a in (s, "*") for b in (t, "*"))


@pytest.mark.parametrize("case", cases(__file__, "data/blame.json"))
def test_who_is_to_blame(case):
    attempts = attempts_of("abcdef"[: case["nodes"]], failing(*case["failing"]))
    findings = [
        [finding.kind, finding.node, "".join(finding.peers), finding.tried, finding.back]
        for finding in attribute(attempts)
    ]
    assert findings == case["findings"]


def test_an_untried_way_back_is_not_reported_as_working():
    attempts = [ReachAttempt("a", "b", "ssh", False, "refused")]
    assert attribute(attempts) == [ReachFinding("pair", "a", ("b",), 1, ("ssh",), "refused", None)]


def test_ports_that_fail_alike_are_one_finding_and_others_are_not():
    bad = [attempts_of("abcde", failing("*>c"), what=f"{port}") for port in (29500, 29501)]
    other = attempts_of("abcde", failing("*>c"), what="29502", cause="refused")
    good = attempts_of("abcde", failing(), what="29503")
    findings = attribute([*bad[1], *good, *other, *bad[0]])
    assert [(finding.channels, finding.cause) for finding in findings] == [
        (("29500", "29501"), "dropped"),
        (("29502",), "refused"),
    ]


def test_the_most_common_cause_is_reported_and_the_last_of_equal_attempts_counts():
    causes = (("a", "refused"), ("b", "dropped"), ("c", "dropped"))
    attempts = [ReachAttempt(source, "d", "x", False, cause) for source, cause in causes]
    assert [finding.cause for finding in attribute(attempts)] == ["dropped"]
    assert (
        attribute([ReachAttempt("a", "b", "x", False, "lost"), ReachAttempt("a", "b", "x", True)])
        == []
    )


@pytest.mark.parametrize("offsets", [full, ring_and_skips])
def test_no_lie_of_one_node_puts_the_blame_on_another(offsets):
    """It says of any peers that it does not reach them, and lets any peers not reach it."""
    for count in (3, 4, 5):
        edges = {(a.source, a.target) for a in attempts_of("abcde"[:count], failing(), offsets)}
        for liar in "ab":
            own = sorted(edge for edge in edges if liar in edge)
            for number in range(2 ** len(own)):
                lies = {edge for place, edge in enumerate(own) if number >> place & 1}
                attempts = [ReachAttempt(s, t, "29500", (s, t) not in lies) for s, t in edges]
                named = {item.node for item in attribute(attempts) if item.kind != "pair"}
                assert named <= {liar}, (lies, named)


@pytest.mark.parametrize("kind", ["target", "source"])
@pytest.mark.parametrize("offsets", [full, ring_and_skips])
def test_planted_bad_nodes_are_named_and_no_others_in_any_order(offsets, kind):
    for seed in range(4):
        draw = random.Random(seed)
        names = [f"n{number}" for number in range(60)]
        bad = {*draw.sample(names, 5)}
        planted = failing(*(f"*>{name}" if kind == "target" else f"{name}>*" for name in bad))
        attempts = attempts_of(names, planted, offsets)
        findings = attribute(attempts)
        assert {(finding.kind, finding.node) for finding in findings} == {
            (kind, name) for name in bad
        }
        draw.shuffle(attempts)
        assert attribute(attempts) == findings

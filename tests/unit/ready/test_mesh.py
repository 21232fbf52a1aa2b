"""The mesh without nodes: which ports, what a node's answers mean, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeready.node.proofs.mesh import Listening, Round, Try, own_addresses
from nodeready.policy import Policy
from nodeready.ready.mesh import Rounds, chosen_ports, name_cause
from nodeready.subjects.base import Unknown
from nodeready.subjects.proof import reach
from nodeready.subjects.proof.facts import Blocked, Busy, Mesh, Proved, User

SPAN = (29500, 29502)
PORTS = (29500, 29501, 29502)


@pytest.mark.parametrize(
    ("first", "last", "count"), [(29500, 29500, 1), (29500, 29531, 32), (1, 65535, 32)]
)
def test_all_ports_of_a_range_or_some_with_both_ends(first, last, count):
    ports = chosen_ports(first, last)
    assert len(ports) == len({*ports}) == count
    assert (ports[0], ports[-1]) == (first, last)
    assert list(ports) == sorted(ports)


FIB_TRIE = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.0.0.0/24 2 0 2
        |-- 10.0.0.0
           /24 link UNICAST
        |-- 10.0.0.3
           /32 host LOCAL
        |-- 10.0.0.255
           /32 link BROADCAST
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.1
           /32 host LOCAL
Local:
        |-- 10.0.0.3
           /32 host LOCAL
        |-- 169.254.3.4
           /32 host LOCAL
"""
IF_INET6 = """fd000000000000000000000000000002 02 40 00 80     eth0
fe80000000000000a8f00dfffe000001 02 40 20 80     eth0
00000000000000000000000000000001 01 80 10 80       lo
"""


@pytest.mark.parametrize(
    ("fib_trie", "if_inet6", "expected"),
    [
        (FIB_TRIE, IF_INET6, ("10.0.0.3", "fd00::2")),
        ("", "", ()),
        ("|-- 10.0.0\n/32 host LOCAL\n/32 host LOCAL", "fd00 02\n\n", ()),
    ],
)
def test_a_node_s_own_addresses(fib_trie, if_inet6, expected):
    assert own_addresses(fib_trie, if_inet6) == expected


def listening(number, *more, ports=PORTS, busy=()):
    return Listening("t" * 16, ports, busy, (f"10.0.0.{number}", *more))


def three(**changes):
    """The nodes a, b and c, at 10.0.0.1, 10.0.0.2 and 10.0.0.3."""
    nodes = {"a": listening(1), "b": listening(2), "c": listening(3), **changes}
    return Rounds(len(nodes), SPAN, nodes)


NUMBER = {"a": 1, "b": 2, "c": 3}


def answer(target, *tries, resolved=None):
    """What a source says: of these (port, outcome), at the target's own address or not."""
    own = f"10.0.0.{NUMBER[target]}"
    found = tuple(
        Try(port, outcome, 0.5 if outcome == "ok" else 0.0, "") for port, outcome in tries
    )
    if resolved is None:
        return Round(0, target, (own,), "", own, found, 0)
    return Round(0, target, resolved, "" if resolved else "unknown name", "", (), 0)


def well(target):
    return answer(target, *((port, "ok") for port in PORTS))


def everywhere(seen, *but):
    """All pairs, each well but for these (source, target, answer)."""
    others = {(source, target): said for source, target, said in but}
    for source in NUMBER:
        for target in NUMBER:
            if source != target:
                said = others.get((source, target)) or well(target)
                seen.add(source, target, PORTS, said)
    return seen.meshes()


def test_a_crowd_at_the_listeners_is_no_fault_of_the_peers():
    silent = answer("b", *((port, "silent") for port in PORTS))
    crowded = replace(well("a"), came=5000), replace(well("c"), came=90_000)
    found = everywhere(three(), ("a", "b", silent), ("b", "a", crowded[0]), ("b", "c", crowded[1]))
    assert not any(one.blocked for one in found.values())
    assert {name: one.crowd for name, one in found.items()} == {"a": 0, "b": 90_000, "c": 0}
    told = reach.mesh(Proved(User("ada", 1000, True, ""), mesh=found["b"]), Policy())
    assert told.status == "warn"
    assert "90000 connections of others" in told.actual
    # As many as the rounds bring anyway, and a peer that came through, are none.
    found = everywhere(three(), ("b", "c", crowded[1]))
    assert not any(one.crowd for one in found.values())
    fine = replace(well("c"), came=900)
    found = everywhere(three(), ("a", "b", silent), ("c", "b", silent), ("b", "c", fine))
    assert [one.kind for one in found["b"].blocked] == ["target"]


def test_all_is_well():
    found = everywhere(three())
    assert found["a"] == Mesh(3, *SPAN, PORTS, (), 2, 2, 2, 2, (), 0.5, 0.5, "c")
    assert not any(one.blocked for one in found.values())


def test_ports_that_fail_alike_are_one_finding():
    bad = answer("b", (29500, "refused"), (29501, "ok"), (29502, "refused"))
    found = everywhere(three(), ("a", "b", bad), ("c", "b", bad))
    assert found["b"].blocked == (
        Blocked("target", (29500, 29502), ("a", "c"), 2, "refused: rejected on the way", True),
    )
    assert not found["a"].blocked
    assert not found["c"].blocked


@pytest.mark.parametrize(
    ("tries", "ports", "cause"),
    [
        ([(29500, "timeout")], (29500,), "timed out: dropped"),
        (
            [(29500, "timeout"), (29501, "timeout"), (29502, "skipped")],
            PORTS,
            "timed out: dropped; the first 3 ports stand for all",
        ),
        ([(29500, "foreign")], (29500,), "another program answers"),
        ([(29500, "unreachable")], (29500,), "unreachable: "),
        # An outcome that we do not know is not ok.
        ([(29500, "splendid")], (29500,), "failed"),
    ],
)
def test_why_a_connection_was_none(tries, ports, cause):
    found = everywhere(three(), ("a", "b", answer("b", *tries)))
    assert found["a"].blocked == (Blocked("pair", ports, ("b",), 1, cause, True),)


@pytest.mark.parametrize(
    ("resolved", "cause"),
    [
        ((), "b does not resolve (unknown name)"),
        (("nonsense",), "b does not resolve (no address)"),
        (("127.0.1.1",), "b resolves to 127.0.1.1, which is loopback"),
        (("10.0.0.3", "10.9.9.9"), "b resolves to 10.0.0.3, which is c's"),
        (("10.0.0.1",), "b resolves to 10.0.0.1, which is a's own"),
        (("172.17.0.1",), "b resolves to 172.17.0.1, which several nodes have (a, b)"),
        (("10.2.3.4",), "b resolves to 10.2.3.4, which is not b's"),
    ],
)
def test_a_name_that_leads_astray(resolved, cause):
    bridge = "172.17.0.1"
    seen = three(a=listening(1, bridge), b=listening(2, bridge), c=listening(3))
    assert seen.addresses["b"] == ("10.0.0.2",)
    found = everywhere(seen, ("a", "b", answer("b", resolved=resolved)))
    assert found["a"].blocked == (Blocked("pair", (), ("b",), 1, cause, True),)
    assert not found["b"].blocked


def test_a_node_that_claims_another_s_address_loses_that_alone():
    nodes = {"a": listening(1), "b": listening(2), "c": listening(3, "10.0.0.2", "10.5.0.1")}
    known = {f"10.0.0.{number}": name for name, number in NUMBER.items()}
    seen = Rounds(3, SPAN, nodes, known)
    assert seen.addresses == {
        "a": ("10.0.0.1",), "b": ("10.0.0.2",), "c": ("10.0.0.3", "10.5.0.1"),
    }  # fmt: skip
    assert not any(one.blocked for one in everywhere(seen).values())
    # Where nobody but the two knows of the address, the words name both.
    (blocked,) = everywhere(three(**nodes))["b"].blocked
    assert blocked.cause == "b resolves to 10.0.0.2, which several nodes have (b, c)"


def test_of_many_nodes_that_claim_an_address_some_are_named():
    nodes = {name: listening(1) for name in "abcdef"}
    seen = Rounds(6, SPAN, nodes)
    cause = name_cause("a", answer("b", resolved=("10.0.0.1",)), seen._owners)
    assert cause == "b resolves to 10.0.0.1, which several nodes have (a, b, c and 3 more)"


def test_what_nobody_asked_for_is_dropped():
    """Ports, times and addresses that a node makes up."""
    made_up = listening(2, "not an address", ports=(*PORTS, 22), busy=(Busy(80, "mine"),))
    seen = three(b=made_up)
    assert seen.to_ask("a", "b") == PORTS
    assert seen.addresses["b"] == ("10.0.0.2",)
    hostile = (Try(22, "refused", 0.0, ""), *(Try(p, "ok", -1.0, "") for p in PORTS[:2]))
    said = Round(0, "b", ("10.0.0.2",), "", "10.0.0.2", (*hostile, Try(29502, "ok", 1e300, "")), 0)
    found = everywhere(seen, ("a", "b", said))
    assert not any(one.blocked for one in found.values())
    assert (found["a"].worst_ms, found["a"].worst_peer) == (0.5, "c")
    assert not found["b"].busy


def test_a_node_that_is_gone_costs_nobody_else():
    seen = three()
    dead = answer("c", *((port, "timeout") for port in PORTS))
    everywhere(seen, ("a", "c", dead), ("b", "c", dead))
    seen.drop("c")
    found = seen.meshes()
    assert set(found) == {"a", "b"}
    assert not any(one.blocked for one in found.values())
    assert (found["a"].to, found["a"].by) == (1, 1)


def test_a_node_that_is_to_blame_is_not_tried_any_more():
    seen = three()
    dead = answer("c", *((port, "timeout") for port in PORTS))
    everywhere(seen, ("a", "c", dead), ("b", "c", dead))
    seen.cut()
    assert seen.to_ask("a", "c") == ()
    # Its own connections pass, and go on.
    assert seen.to_ask("c", "a") == PORTS
    # Of one port, two peers are not enough for that.
    other = three()
    one = answer("c", (29500, "timeout"), (29501, "ok"), (29502, "ok"))
    everywhere(other, ("a", "c", one), ("b", "c", one))
    other.cut()
    assert other.to_ask("a", "c") == PORTS


def test_the_way_back_of_a_pair_is_asked_for_when_nobody_tried():
    seen = three()
    seen.add("a", "b", PORTS, answer("b", (29500, "timeout"), (29501, "ok"), (29502, "ok")))
    seen.add("b", "c", PORTS, well("c"))
    assert seen.ways_back() == {"b": "a"}
    seen.add("b", "a", PORTS, well("a"))
    assert seen.ways_back() == {}
    assert [one.back for one in seen.meshes()["a"].blocked] == [True]


GOOD = Mesh(3, *SPAN, PORTS, (), 2, 2, 2, 2, (), 0.2, 0.5, "b")
TARGET = Blocked("target", (29500, 29501), ("a", "c"), 2, "timed out: dropped", True)


def judged(check, seen):
    found = check(Proved(User("ada", 1000, True, ""), mesh=seen), Policy())
    return found.status, found.actual


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (GOOD, ("ok", "2 of 2 peers reached, reached by 2 of 2")),
        (None, ("na", "not proved")),
        (Unknown("connection lost"), ("unknown", "connection lost")),
        (replace(GOOD, nodes=1, to=0, by=0), ("na", "one node alone")),
        (replace(GOOD, to=0, by=0), ("unknown", "no connection was tried in time")),
        # Another node is to blame for one of them.
        (replace(GOOD, reached=1), ("ok", "1 of 2 peers reached, reached by 2 of 2")),
        (
            replace(GOOD, to=1, by=1, reached=0, reached_by=0),
            ("unknown", "0 of 1 peers reached, reached by 0 of 1: see what the other nodes say"),
        ),
        (
            replace(GOOD, blocked=(TARGET,)),
            (
                "fail",
                "29500-29501 unreachable from all 2 peers (timed out: dropped); "
                "its own connections pass: inbound",
            ),
        ),
        (
            replace(GOOD, blocked=(replace(TARGET, kind="source", tried=4, back=False),)),
            ("fail", "29500-29501 not reached at 2 of 4 peers (a, c) (timed out: dropped)"),
        ),
        (
            replace(GOOD, median_ms=203.4, worst_ms=1210.0),
            (
                "warn",
                "2 of 2 peers reached, reached by 2 of 2, but a handshake takes 203 ms "
                "(median; to b 1210 ms)",
            ),
        ),
    ],
)
def test_how_the_mesh_is_judged(seen, expected):
    assert judged(reach.mesh, seen) == expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (GOOD, ("ok", "29500-29502 can be listened on")),
        (replace(GOOD, last=30000), ("ok", "3 ports of 29500-30000 can be listened on")),
        (
            replace(
                GOOD,
                listening=(29501,),
                busy=(Busy(29500, "in use"), Busy(29502, "Permission denied")),
            ),
            ("fail", "29500: in use; 29502: Permission denied"),
        ),
        (Unknown("no answer in 20 s"), ("unknown", "no answer in 20 s")),
    ],
)
def test_how_the_ports_are_judged(seen, expected):
    assert judged(reach.ports, seen) == expected

"""The mesh without nodes: which pairs and ports, what answers mean, and how they are judged."""

from dataclasses import replace

import pytest

from nodeready.agent.proofs.mesh import Listening, MeshRound, Try, addresses_in
from nodeready.core.base import Unknown
from nodeready.core.policy import Policy
from nodeready.runs.ready.mesh import (
    Rounds,
    chosen_ports,
    full,
    name_cause,
    peers_of,
    ring_and_skips,
    rounds,
)
from nodeready.subjects.proof import checks as mesh_checks
from nodeready.subjects.proof.facts import Blocked, Busy, Mesh, Proved, User
from tests.cases import cases, read_data

SPAN = (29500, 29502)
PORTS = (29500, 29501, 29502)

# --- Which node tries which.


def test_the_skips_double_and_end_before_the_nodes_do():
    for count, offsets in (
        *((0, ()), (1, ()), (2, (1,)), (3, (1, 2)), (4, (1, 2)), (5, (1, 2, 4)), (8, (1, 2, 4))),
        *((9, (1, 2, 4, 8)), (10_000, tuple(2**power for power in range(14)))),
    ):
        assert ring_and_skips(count) == offsets


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 9, 30])
@pytest.mark.parametrize("pattern", [ring_and_skips, full])
def test_in_each_round_every_node_tries_another_and_is_tried_by_another(pattern, count):
    names = [f"node{number:02}" for number in range(count)]
    tried = set()
    for pairs in rounds(names, pattern(count)):
        assert sorted(source for source, _ in pairs) == names
        assert sorted(target for _, target in pairs) == names
        assert all(source != target for source, target in pairs)
        assert not tried & set(pairs)
        tried |= set(pairs)
    if pattern is full:
        assert len(tried) == count * (count - 1)
    peers = {name: tuple(t for s, t in sorted(tried) if s == name) for name in names}
    assert {s: tuple(sorted(t)) for s, t in peers_of(names, pattern(count)).items()} == peers


def test_pairs_lead_around_the_end_and_come_once():
    assert rounds(["a", "b", "c"], [1]) == [[("a", "b"), ("b", "c"), ("c", "a")]]
    for offsets in ([1, 2, 4], [1, -1], [1, 1], [3, 0]):
        assert peers_of(["a", "b"], offsets) == {"a": ("b",), "b": ("a",)}
    for nodes in ([], ["alone"]):
        assert (rounds(nodes, [1, 2]), peers_of(nodes, [1, 2])) == ([], dict.fromkeys(nodes, ()))
    with pytest.raises(ValueError, match="twice"):
        rounds(["a", "b", "a"], [1])


def test_all_ports_of_a_range_or_some_with_both_ends():
    for first, last, count in ((29500, 29500, 1), (29500, 29531, 32), (1, 65535, 32)):
        ports = chosen_ports(first, last)
        assert list(ports) == sorted({*ports})
        assert (ports[0], ports[-1], len(ports)) == (first, last, count)


# --- What a node's answers mean.

FIB_TRIE = read_data(__file__, "fib_trie.txt")
IF_INET6 = read_data(__file__, "if_inet6.txt")


def test_a_nodes_own_addresses():
    assert addresses_in(FIB_TRIE, IF_INET6) == ("10.0.0.3", "fd00::2")
    assert addresses_in("", "") == ()
    assert addresses_in("|-- 10.0.0\n/32 host LOCAL\n/32 host LOCAL", "fd00 02\n\n") == ()


NUMBER = {"a": 1, "b": 2, "c": 3}


def listening(number, *more, ports=PORTS, busy=()):
    return Listening("t" * 16, ports, busy, (f"10.0.0.{number}", *more))


def three(**changes):
    nodes = {name: listening(number) for name, number in NUMBER.items()}
    return Rounds(3, SPAN, {**nodes, **changes})


def answer(target, *outcomes, resolved=None):
    """What a source answers: these outcomes by port, or the addresses that the name led to."""
    own = f"10.0.0.{NUMBER[target]}"
    tries = tuple(
        Try(port, outcome, 0.5 if outcome == "ok" else 0.0, "")
        for port, outcome in zip(PORTS, outcomes, strict=False)
    )
    if resolved is None:
        return MeshRound(0, target, (own,), "", own, tries, 0)
    return MeshRound(0, target, tuple(resolved), "" if resolved else "unknown name", "", (), 0)


def well(target):
    return answer(target, "ok", "ok", "ok")


def silent(target, outcome="timeout"):
    return answer(target, *[outcome] * 3)


def everywhere(mesh, *but):
    """All pairs, each well but for these (source, target, answer)."""
    others = {(source, target): reply for source, target, reply in but}
    for source, target in [(s, t) for s in NUMBER for t in NUMBER if s != t]:
        mesh.add(source, target, PORTS, others.get((source, target)) or well(target))
    return mesh.meshes()


def blocked(meshes):
    return {name: mesh.blocked for name, mesh in meshes.items() if mesh.blocked}


def test_all_is_well():
    assert everywhere(three())["a"] == Mesh(3, *SPAN, PORTS, (), 2, 2, 2, 2, (), 0.5, 0.5, "c")


def test_a_crowd_at_the_listeners_is_no_fault_of_the_peers():
    quiet = "a", "b", silent("b", "silent")
    crowded = replace(well("a"), accepted_count=5000), replace(well("c"), accepted_count=90_000)
    meshes = everywhere(three(), quiet, ("b", "a", crowded[0]), ("b", "c", crowded[1]))
    assert not blocked(meshes)
    assert {name: item.crowd for name, item in meshes.items()} == {"a": 0, "b": 90_000, "c": 0}
    result = mesh_checks.mesh(Proved(User("ada", 1000, True, ""), mesh=meshes["b"]), Policy())
    assert result.status == "warn"
    assert "90000 foreign connections" in result.actual
    # As many as the rounds bring anyway, and a peer that came through, are none.
    meshes = everywhere(three(), ("b", "c", crowded[1]))
    assert not any(item.crowd for item in meshes.values())
    fine = replace(well("c"), accepted_count=900)
    meshes = everywhere(three(), quiet, ("c", "b", silent("b", "silent")), ("b", "c", fine))
    assert [item.kind for item in meshes["b"].blocked] == ["target"]


@pytest.mark.parametrize(("above", "count"), [(0, 0), (1, 1013)])
def test_four_times_what_one_round_brings_and_a_thousand_more_is_no_crowd(above, count):
    """Three ports, one round: ours are 3."""
    came = replace(well("c"), accepted_count=1000 + 4 * 3 + above)
    meshes = everywhere(three(), ("a", "b", silent("b", "silent")), ("b", "c", came))
    assert meshes["b"].crowd == count


@pytest.mark.parametrize("case", cases(__file__, "data/meshes.json"))
def test_why_connections_fail(case):
    bridge = "172.17.0.1"
    mesh = three(a=listening(1, bridge), b=listening(2, bridge))
    assert mesh.addresses["b"] == ("10.0.0.2",)
    bad = [
        (source, target, answer(target, *rows)) for source, target, rows in case.get("answers", ())
    ]
    if "resolved" in case:
        bad.append(("a", "b", answer("b", resolved=case["resolved"])))
    expected = {
        name: (Blocked(kind, tuple(ports), tuple(peers), tried, cause, True),)
        for name, (kind, ports, peers, tried, cause) in case["blocked"].items()
    }
    assert blocked(everywhere(mesh, *bad)) == expected


@pytest.mark.parametrize("case", cases(__file__, "data/host_names.json"))
def test_host_names_that_lead_a_job_astray(case):
    """own: what a's host name leads to on a itself; peers: what b's and c's find for `node-a`."""
    own = case.get("own", ["10.0.0.1"])
    error = "" if own else "unknown name"
    mesh = three(a=replace(listening(1), host="node-a", resolved=tuple(own), error=error))
    peers = case.get("peers", {"b": ["10.0.0.1"], "c": ["10.0.0.1"]})
    replies = [
        (name, "a", replace(well("a"), host_resolved=tuple(found), host_error="unknown name"))
        for name, found in peers.items()
    ]
    meshes = everywhere(mesh, *replies)
    assert not blocked(meshes)
    words = {}
    for name, observed in meshes.items():
        result = mesh_checks.mesh(Proved(User("ada", 1000, True, ""), mesh=observed), Policy())
        assert result.status == ("warn" if name in case["warn"] else "ok")
        words[name] = result.actual
    for name, text in case["warn"].items():
        assert text in words[name]


def test_a_node_that_claims_the_address_of_another_loses_that_alone():
    nodes = {"a": listening(1), "b": listening(2), "c": listening(3, "10.0.0.2", "10.5.0.1")}
    known = {f"10.0.0.{number}": name for name, number in NUMBER.items()}
    mesh = Rounds(3, SPAN, nodes, known)
    own = {"a": ("10.0.0.1",), "b": ("10.0.0.2",), "c": ("10.0.0.3", "10.5.0.1")}
    assert mesh.addresses == own
    assert not blocked(everywhere(mesh))
    # Where only the two know the address, the words name both; of many, some.
    (item,) = everywhere(three(**nodes))["b"].blocked
    assert item.cause == "b resolves to 10.0.0.2, which several nodes have (b, c)"
    owners = Rounds(6, SPAN, {name: listening(1) for name in "abcdef"})._owners
    cause = name_cause(owners, "a", "b", ["10.0.0.1"], "")
    assert cause == "b resolves to 10.0.0.1, which several nodes have (a, b, c and 3 more)"


def test_ports_times_and_addresses_that_a_node_makes_up_are_dropped():
    made_up = listening(2, "not an address", ports=(*PORTS, 22), busy=(Busy(80, "mine"),))
    mesh = three(b=made_up)
    assert mesh.ports_to_try("a", "b") == PORTS
    assert mesh.addresses["b"] == ("10.0.0.2",)
    hostile = (Try(22, "refused", 0.0, ""), *(Try(p, "ok", -1.0, "") for p in PORTS[:2]))
    reply = MeshRound(
        0, "b", ("10.0.0.2",), "", "10.0.0.2", (*hostile, Try(29502, "ok", 1e300, "")), 0
    )
    meshes = everywhere(mesh, ("a", "b", reply))
    assert not blocked(meshes)
    assert (meshes["a"].worst_ms, meshes["a"].worst_peer) == (0.5, "c")
    assert not meshes["b"].busy


def test_a_node_that_is_gone_costs_no_other():
    mesh = three()
    everywhere(mesh, ("a", "c", silent("c")), ("b", "c", silent("c")))
    mesh.drop("c")
    meshes = mesh.meshes()
    assert set(meshes) == {"a", "b"}
    assert not blocked(meshes)
    assert (meshes["a"].to, meshes["a"].by) == (1, 1)


def test_a_node_that_is_to_blame_is_not_tried_any_more():
    mesh = three()
    everywhere(mesh, ("a", "c", silent("c")), ("b", "c", silent("c")))
    mesh.skip_explained()
    assert mesh.ports_to_try("a", "c") == ()
    # Its own connections pass, and go on.
    assert mesh.ports_to_try("c", "a") == PORTS
    # Two peers at a single port are too few for that.
    mesh, item = three(), answer("c", "timeout", "ok", "ok")
    everywhere(mesh, ("a", "c", item), ("b", "c", item))
    mesh.skip_explained()
    assert mesh.ports_to_try("a", "c") == PORTS


def test_an_untried_way_back_of_a_pair_is_asked_for():
    mesh = three()
    mesh.add("a", "b", PORTS, answer("b", "timeout", "ok", "ok"))
    mesh.add("b", "c", PORTS, well("c"))
    assert mesh.opposite_pairs() == {"b": "a"}
    mesh.add("b", "a", PORTS, well("a"))
    assert mesh.opposite_pairs() == {}
    assert [item.back for item in mesh.meshes()["a"].blocked] == [True]


# --- How a mesh is judged.

GOOD = Mesh(3, *SPAN, PORTS, (), 2, 2, 2, 2, (), 0.2, 0.5, "b")
TARGET = Blocked("target", (29500, 29501), ("a", "c"), 2, "timed out: dropped", True)


@pytest.mark.parametrize("case", cases(__file__, "data/mesh.json"))
def test_how_the_mesh_and_its_ports_are_judged(case):
    mesh = GOOD
    changes = dict(case["changes"])
    if "blocked" in changes:
        changes["blocked"] = (replace(TARGET, **changes["blocked"]),)
    if "busy" in changes:
        changes["busy"] = tuple(Busy(*row) for row in changes["busy"])
    if "unknown" in changes:
        mesh = Unknown(changes["unknown"])
    elif "missing" in changes:
        mesh = None
    else:
        mesh = replace(GOOD, **changes)
    check = getattr(mesh_checks, case["check"])
    result = check(Proved(User("ada", 1000, True, ""), mesh=mesh), Policy())
    assert [result.status, result.actual] == case["expected"]

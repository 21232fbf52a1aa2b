"""The fleet's known_hosts lines: who is called what, whose keys are kept, and whose are not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from nodeready.policy import Expected, Policy
from nodeready.subjects import managed_block
from nodeready.subjects.context import expectations
from nodeready.subjects.snapshot import Snapshot, nothing
from nodeready.subjects.ssh_client.checks import expected, host_key, known_hosts, leftover
from nodeready.subjects.ssh_client.facts import (
    Identity,
    KnownHosts,
    SshClient,
    clean_address,
    clean_key,
    clean_name,
    fingerprint,
    parse_known_hosts,
)
from nodeready.subjects.ssh_client.known_hosts import (
    FURTHER,
    MAX_KEPT,
    Endpoint,
    Fleet,
    fleet_lines,
    lines_of_nodes,
    parse_line,
    read_block,
    unsent,
)
from tests.builders.ssh_client import key

A, B, C, D, NEW = key(1), key(2), key(3), key(4), key(99)


def node(
    names: str, keys: Iterable[str], addresses: str = "", block: Iterable[str] | None = None
) -> Snapshot:
    identity = Identity(tuple(names.split()), tuple(addresses.split()), tuple(keys))
    known = KnownHosts()
    if block is not None:
        inner = "".join(f"{line}\n" for line in block).encode()
        known = parse_known_hosts(managed_block.put(b"", inner, "end"))
    return Snapshot({"ssh_client": SshClient(True, None, identity, known, {}, {}, (), ())})


def test_a_line_has_what_the_inventory_calls_a_node_and_where_it_was_found() -> None:
    lines = fleet_lines(
        {
            "gpu1": node("gpu1 gpu1.example", [A, B], "10.0.0.1 10.1.0.1 fd00::1"),
            "10.0.0.2": node("gpu2", [C]),
            "gpu3.example": node("gpu3 gpu3.example", [D], "10.0.0.3"),
            "@local": node("head head.example", [NEW], "10.0.0.9"),
        },
        endpoints={
            "gpu1": Endpoint("10.9.0.1", names=("gpu1-ib", "10.1.0.1"), reached="10.9.0.1"),
            "gpu3.example": Endpoint(reached="10.0.0.3", key=D),
            "@local": Endpoint(local=True),
        },
    )
    assert lines == tuple(
        sorted(
            [
                f"gpu1,gpu1-ib,gpu1.example,10.1.0.1,10.9.0.1 {A}",
                f"gpu1,gpu1-ib,gpu1.example,10.1.0.1,10.9.0.1 {B}",
                f"10.0.0.2 {C}",
                f"gpu3,gpu3.example,10.0.0.3 {D}",
                f"head,head.example,10.0.0.9 {NEW}",
            ]
        )
    )


def test_another_port_stands_with_each_name_and_a_shared_address_only_with_it() -> None:
    lines = fleet_lines(
        {"gpu1": node("gpu1 gpu1.x", [A], "10.0.0.1"), "gpu2": node("gpu2.x", [B], "10.0.0.2")},
        endpoints={
            "gpu1": Endpoint("192.0.2.1", 2201, reached="192.0.2.1"),
            "gpu2": Endpoint("192.0.2.1", 2202),
        },
    )
    names = {line.split()[2]: line.split()[0].split(",") for line in lines}
    assert names[A.split()[1]] == [
        "gpu1",
        "gpu1.x",
        "[gpu1.x]:2201",
        "[gpu1]:2201",
        "[192.0.2.1]:2201",
    ]
    assert "[192.0.2.1]:2202" in names[B.split()[1]]
    assert not any("192.0.2.1" in found for found in names.values())


#: What gpu1 says it is called, its addresses, and what the inventory has -> the names of its line.
CLAIMS = {
    "another node, of this run": ("gpu2", "10.0.0.2", {}, "gpu1"),
    "another node, not of this run": ("gpu3", "10.0.0.3", {"gpu3": Endpoint("10.0.0.3")}, "gpu1"),
    "the short name of another": ("gpu3", "", {"gpu3.example": Endpoint()}, "gpu1"),
    "a further name of another": ("", "10.1.0.3", {"gpu3": Endpoint(names=("10.1.0.3",))}, "gpu1"),
    "a host of nobody here": ("github github.com", "203.0.113.7 10.0.0.254", {}, "gpu1"),
    "a domain in which nobody else is": ("gpu1 gpu1.evil", "", {}, "gpu1"),
    "a domain of the inventory's": (
        "gpu1 gpu1.example",
        "",
        {"head.example": Endpoint()},
        "gpu1,gpu1.example",
    ),
    "another full name than the inventory has": (
        "gpu1 gpu1.evil",
        "",
        {"gpu1": Endpoint("gpu1.example")},
        "gpu1,gpu1.example",
    ),
    "the label of another, too": ("gpu1 gpu1.c", "", {"gpu1.b": Endpoint()}, "gpu1"),
    "where it was found": (
        "",
        "10.0.0.1",
        {"gpu1": Endpoint(reached="10.0.0.1")},
        "gpu1,10.0.0.1",
    ),
    "where it was found, which another has": (
        "",
        "10.0.0.1",
        {"gpu1": Endpoint(reached="10.0.0.1"), "gpu3": Endpoint("10.0.0.1")},
        "gpu1",
    ),
    "not where it was found": ("", "10.0.0.1", {"gpu1": Endpoint(reached="10.0.0.7")}, "gpu1"),
}


def test_a_full_name_counts_in_a_domain_that_nodes_share() -> None:
    """A liar gets no name of a host outside the fleet, and takes none of the others' away."""
    nodes = {
        "gpu1": node("gpu1 gpu1.example", [A]),
        "gpu2": node("gpu2.example", [B]),
        "github": node("github.com github.example.org", [C]),
    }
    assert fleet_lines(nodes) == (
        f"github {C}",
        f"gpu1,gpu1.example {A}",
        f"gpu2,gpu2.example {B}",
    )
    # Alone, it tells nobody but itself.
    alone = {"github": nodes["github"]}
    assert fleet_lines(alone) == (f"github,github.com,github.example.org {C}",)


@pytest.mark.parametrize("case", CLAIMS)
def test_a_node_is_called_what_nobody_else_could_claim(case: str) -> None:
    names, addresses, endpoints, found = CLAIMS[case]
    nodes = {"gpu1": node(names, [A], addresses), "gpu2": node("gpu2", [B], "10.0.0.2")}
    lines = fleet_lines(nodes, endpoints={"gpu2": Endpoint(), **endpoints})
    assert set(lines) == {f"{found} {A}", f"gpu2 {B}"}


def test_two_nodes_at_one_address_and_a_name_given_twice_are_nobodys() -> None:
    nodes = {f"gpu{n}": node("", [key(n)], "10.0.0.1") for n in (1, 2)}
    found = Endpoint(names=("vip",), reached="10.0.0.1")
    lines = fleet_lines(nodes, endpoints=dict.fromkeys(nodes, found))
    assert lines == tuple(sorted(f"gpu{n} {key(n)}" for n in (1, 2)))


def test_nobody_takes_a_name_of_the_policys_lines() -> None:
    extra = (f"gpu1.login {C}", "@cert-authority *.example ssh-rsa AAAA")
    nodes = {"gpu1": node("gpu1 gpu1.login", [A])}
    lines = fleet_lines(nodes, extra)
    assert lines == (
        f"gpu1 {A}",
        FURTHER,
        "@cert-authority *.example ssh-rsa AAAA",
        f"gpu1.login {C}",
    )
    # Completing what is complete already changes nothing.
    assert fleet_lines(nodes, lines) == lines


def test_nothing_of_a_node_is_taken_whose_sshd_has_another_key_than_it_tells() -> None:
    nodes = {"gpu1": node("gpu1", [A, B]), "gpu2": node("gpu2", [C], "", [f"gpu1 {D}"])}
    right = {"gpu1": Endpoint(key=B), "gpu2": Endpoint(key=C)}
    assert set(fleet_lines(nodes, endpoints=right)) == {f"gpu1 {A}", f"gpu1 {B}", f"gpu2 {C}"}
    wrong = {**right, "gpu1": Endpoint(key=D)}
    assert fleet_lines(nodes, endpoints=wrong) == (f"gpu2 {C}",)
    # gpu2 keeps what it knew: the connection may be the one that was led astray.
    block = nodes["gpu2"]["ssh_client"].known_hosts.lines
    assert set(fleet_lines(nodes, (), wrong, block)) == {f"gpu1 {D}", f"gpu2 {C}"}


def test_another_key_than_the_connections_is_a_finding_that_no_deploy_repairs() -> None:
    seen = node("gpu1", [A])["ssh_client"]
    assert host_key(seen, Policy()).status == "na"
    assert host_key(node("gpu1", [])["ssh_client"], Expected(host_key=A)).status == "na"
    assert host_key(seen, Expected(host_key=A, ssh_client_mode="no")).status == "na"
    assert host_key(seen, Expected(host_key=A)).status == "ok"
    result = host_key(seen, Expected(host_key=B))
    assert (result.status, result.fixable) == ("fail", False)
    assert result.actual == f"ssh-ed25519 {fingerprint(A)}"


OLD = (f"gpu1,10.0.0.1 {A}", f"gpu2,gpu2.example,10.0.0.2 {B}", FURTHER, f"old-login {C}")
FLEET = {"gpu1": Endpoint("10.0.0.1"), "gpu2": Endpoint()}

#: The other nodes of the run, and the block of gpu1 -> its lines beside the one about itself.
KEPT = {
    "a node that was not looked at": ({}, OLD, [OLD[1]]),
    "a node that could not be read": ({"gpu2": nothing("timed out")}, OLD, [OLD[1]]),
    "a node whose keys could not be read": ({"gpu2": node("gpu2", [])}, OLD, [OLD[1]]),
    "not the keys of a re-imaged node, under any name": (
        {"gpu2": node("gpu2", [NEW])},
        OLD,
        [f"gpu2 {NEW}"],
    ),
    "not what another node remembers": (
        {"gpu3": node("gpu3", [C], "", [f"gpu2 {NEW}", f"login {C}"])},
        OLD,
        [f"gpu2,gpu2.example,10.0.0.2 {B}", f"gpu3 {C}"],
    ),
    "not another node's memory where it has none": (
        {"gpu3": node("gpu3", [C], "", OLD)},
        (),
        [f"gpu3 {C}"],
    ),
    "not a host of nobody here": (
        {},
        (f"github.com {C}", f"gpu2,github.com,[github.com]:22 {B}", f"gpu7 {C}"),
        [f"gpu2 {B}"],
    ),
    "not an address where another node was found": (
        {"gpu4": node("gpu4", [C], "10.0.0.2")},
        OLD,
        [f"gpu2,gpu2.example {B}", f"gpu4,10.0.0.2 {C}"],
    ),
    "not one key of two nodes": ({}, (f"gpu1,gpu2 {B}",), []),
    "not a line that is none of ours": (
        {},
        [f"* {B}", f"!x,y {B}", f"|1|abc|def {B}", "@revoked * x y", "gpu2 ssh-rsa AAAA"],
        [],
    ),
}


@pytest.mark.parametrize(("others", "block", "kept"), KEPT.values(), ids=KEPT.keys())
def test_of_its_own_block_a_node_keeps(
    others: dict[str, Snapshot], block: Iterable[str], kept: list[str]
) -> None:
    nodes = {"gpu1": node("gpu1", [A], "10.0.0.1", block), **others}
    endpoints = {**FLEET, **{name: Endpoint() for name in others}}
    if "gpu4" in others:
        endpoints["gpu4"] = Endpoint(reached="10.0.0.2")
    fleet = Fleet(nodes, (), endpoints)
    found = lines_of_nodes(fleet, nodes, {})
    assert set(found["gpu1"]) == {f"gpu1,10.0.0.1 {A}", *kept}


def test_nodes_that_keep_the_same_share_one_object_and_odd_blocks_are_bounded() -> None:
    nodes = {f"gpu{n}": node("", [key(n)], "", OLD) for n in range(10, 40)}
    nodes |= {f"gpu{n}": node("", [key(n)], "", [f"gpu2 {key(n)}"]) for n in range(40, 70)}
    fleet = Fleet(nodes, (), FLEET | dict.fromkeys(nodes, Endpoint()))
    found = lines_of_nodes(fleet, nodes, {})
    assert 2 < len({id(lines) for lines in found.values()}) <= MAX_KEPT + 1
    assert all(OLD[1] in found[f"gpu{n}"] for n in range(10, 40))


def test_blocks_that_were_fetched_count_like_those_that_came_along() -> None:
    lines = fleet_lines({"gpu1": node("gpu1", [A])}, (), FLEET, OLD)
    large = replace(node("gpu1", [A], "", OLD)["ssh_client"].known_hosts, lines=None, sent=False)
    seen = replace(node("gpu1", [A])["ssh_client"], known_hosts=large)
    nodes = {"gpu1": Snapshot({"ssh_client": seen}), "gpu4": Snapshot({"ssh_client": seen})}
    fleet = Fleet({"gpu1": nodes["gpu1"]}, (), FLEET)
    assert fleet.lines() == (f"gpu1,10.0.0.1 {A}",)
    assert unsent(nodes, fleet.lines()) == {large.digest: ("gpu1", "gpu4")}
    assert unsent(nodes, OLD) == {}
    text = "\n".join([managed_block.BEGIN.decode(), *OLD, managed_block.END.decode()])
    fetched = {large.digest: read_block(f"Welcome!\n{text}\n", large.digest)}
    assert lines_of_nodes(fleet, nodes, fetched)["gpu1"] == lines
    with pytest.raises(ValueError, match="changed"):
        read_block(text.replace("gpu2", "evil"), large.digest)


def test_a_digest_that_a_node_tells_takes_nothing_from_the_node_that_has_the_block() -> None:
    honest = node("gpu3", [C], "", OLD)
    told = KnownHosts(b"", None, honest["ssh_client"].known_hosts.digest, 10**6, sent=False)
    liar = Snapshot({"ssh_client": replace(node("gpu1", [A])["ssh_client"], known_hosts=told)})
    nodes = {"gpu1": liar, "gpu3": honest}
    found = lines_of_nodes(Fleet(nodes, (), {**FLEET, "gpu3": Endpoint()}), nodes, {})
    assert OLD[1] in found["gpu3"]


def test_the_same_nodes_give_the_same_lines_in_any_order() -> None:
    nodes = {f"gpu{n}": node(f"gpu{n}", [key(n)], f"10.0.0.{n}", OLD) for n in range(3, 30)}
    lines = fleet_lines(nodes, (), FLEET, OLD)
    assert fleet_lines(dict(reversed(nodes.items())), (), FLEET, OLD) == lines
    # And what was written is what the next look gives.
    assert fleet_lines(nodes, (), FLEET, lines) == lines


NO_NAMES = ["*", "gpu*", "!gpu1", "a,b", "a b", "[a]:22", "@revoked", "|1|x|y", "-oProxyCommand=x"]
NO_NAMES += ["a..b", "a-", "1.2.3", "#", "a/b", "ü", "$(id)", "a\nb", "\x1b[31mred", "x" * 64, ""]
NO_NAMES += ["localhost", "localhost.localdomain", "127.0.0.1", "10.0.0.1", "fd00::1"]


@pytest.mark.parametrize("text", NO_NAMES)
def test_what_is_no_host_name_is_dropped(text: str) -> None:
    assert clean_name(text) == ""


@pytest.mark.parametrize("text", ["127.0.0.1", "::1", "fe80::1", "0.0.0.0", "1.2.3", "x", ""])
def test_what_is_no_address_for_others_is_dropped(text: str) -> None:
    assert clean_address(text) == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ssh-ed25519",
        "ssh-ed25519 AAAA",
        "ssh-dss " + A.split()[1],
        "ssh-rsa " + A.split()[1],
        A + "\nevil " + B,
        A.replace("ssh-ed25519 ", "ssh-ed25519 *"),
        f"command=x {A}",
    ],
)
def test_what_is_no_key_is_dropped(text: str) -> None:
    assert clean_key(text) == ""
    assert parse_line(f"gpu1 {text}") is None
    assert clean_key(f"{A} root@gpu1") == A


CHECKED = {
    "no block": (None, "fail"),
    "the fleet's": ((f"gpu1 {A}", f"gpu2 {B}"), "ok"),
    "a line is missing": ((f"gpu1 {A}",), "fail"),
    "another host": ((f"gpu1 {A}", f"gpu2 {B}", f"github.com {C}"), "fail"),
    "mostly other hosts": ((f"gpu1 {A}", f"gpu3 {B}", f"gpu4 {C}"), "warn"),
    "an old key besides the new one": ((f"gpu1 {A}", f"gpu2 {B}", f"gpu2 {C}"), "fail"),
}


@pytest.mark.parametrize(("block", "status"), CHECKED.values(), ids=CHECKED.keys())
def test_a_block_is_judged_by_what_it_knows(block: tuple[str, ...] | None, status: str) -> None:
    want = Policy(ssh_known_hosts=(f"gpu1 {A}", f"gpu2 {B}"))
    assert known_hosts(node("x", [A], "", block)["ssh_client"], want).status == status


def test_nothing_gathered_and_other_modes_do_not_apply() -> None:
    seen = node("x", [A])["ssh_client"]
    assert known_hosts(seen, Policy()).status == "na"
    lines = (f"gpu1 {A}",)
    other = Policy(ssh_known_hosts=lines, ssh_client_mode="accept-new")
    assert known_hosts(seen, other).status == "na"
    # A block that nothing keeps right any more goes.
    assert leftover(node("x", [A], "", lines)["ssh_client"], other).fixable
    assert expected(lines) is expected(lines)


def test_a_large_block_is_asked_of_the_next_node_when_one_gives_another() -> None:
    large = replace(node("", [A], "", OLD)["ssh_client"].known_hosts, lines=None, sent=False)
    nodes = {
        name: Snapshot({"ssh_client": replace(node("", [k])["ssh_client"], known_hosts=large)})
        for name, k in (("gpu1", A), ("gpu3", C))
    }
    text = "\n".join([managed_block.BEGIN.decode(), *OLD, managed_block.END.decode()]) + "\n"
    asked: list[str] = []

    def fetch(name: str) -> str:
        asked.append(name)
        return "nonsense" if name == "gpu1" else text

    endpoints = {**FLEET, "gpu3": Endpoint(key=C)}
    made = expectations(dict.fromkeys(nodes, Policy()), nodes, endpoints, bytes, fetch)
    assert asked == ["gpu1", "gpu3"]
    assert all(OLD[1] in policy.ssh_known_hosts for policy in made.values())
    assert isinstance(made["gpu3"], Expected)
    assert made["gpu3"].host_key == C
    # When all nodes of the inventory were seen, nobody has anything to add.
    asked.clear()
    seen = {name: endpoints[name] for name in nodes}
    expectations(dict.fromkeys(nodes, Policy()), nodes, seen, bytes, fetch)
    assert asked == []

"""The fleet's known_hosts lines: who is called what, whose keys are kept, and whose are not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from nodeready.policy import Policy
from nodeready.subjects import managed_block
from nodeready.subjects.snapshot import Snapshot, nothing
from nodeready.subjects.ssh_client.checks import expected, known_hosts, leftover
from nodeready.subjects.ssh_client.facts import (
    Identity,
    KnownHosts,
    SshClient,
    clean_address,
    clean_key,
    clean_name,
    parse_known_hosts,
)
from nodeready.subjects.ssh_client.known_hosts import (
    FURTHER,
    fleet_lines,
    parse_line,
    read_block,
    unsent,
)
from tests.builders.ssh_client import key

A, B, C, NEW = key(1), key(2), key(3), key(99)


def node(
    names: str, keys: Iterable[str], addresses: str = "", block: Iterable[str] | None = None
) -> Snapshot:
    identity = Identity(tuple(names.split()), tuple(addresses.split()), tuple(keys))
    known = KnownHosts()
    if block is not None:
        inner = "".join(f"{line}\n" for line in block).encode()
        known = parse_known_hosts(managed_block.put(b"", inner, "end"))
    return Snapshot({"ssh_client": SshClient(True, None, identity, known, {}, {}, (), ())})


def test_a_line_has_all_that_a_node_is_called() -> None:
    lines = fleet_lines(
        {
            "gpu1": node("gpu1 gpu1.example", [A, B], "10.0.0.1 fd00::1"),
            "10.0.0.2": node("gpu2", [C]),
            "@local": node("head", [NEW]),
        },
        endpoints={"gpu1": ("10.9.0.1", 22)},
    )
    assert lines == tuple(
        sorted(
            [
                f"gpu1,gpu1.example,10.0.0.1,10.9.0.1,fd00::1 {A}",
                f"gpu1,gpu1.example,10.0.0.1,10.9.0.1,fd00::1 {B}",
                f"gpu2,10.0.0.2 {C}",
                f"head {NEW}",
            ]
        )
    )


def test_another_port_stands_with_each_name_and_a_shared_address_only_with_it() -> None:
    lines = fleet_lines(
        {"gpu1": node("gpu1", [A], "10.0.0.1"), "gpu2": node("gpu2", [B], "10.0.0.2")},
        endpoints={"gpu1": ("192.0.2.1", 2201), "gpu2": ("192.0.2.1", 2202)},
    )
    names = {line.split()[2]: line.split()[0].split(",") for line in lines}
    assert names[A.split()[1]] == [
        "gpu1",
        "[gpu1]:2201",
        "10.0.0.1",
        "[10.0.0.1]:2201",
        "[192.0.2.1]:2201",
    ]
    assert "[192.0.2.1]:2202" in names[B.split()[1]]
    assert not any("192.0.2.1" in found for found in names.values())


def test_a_name_that_several_claim_is_nobodys_unless_the_inventory_decides() -> None:
    lines = fleet_lines(
        {
            "gpu1": node("gpu1", [A], "172.17.0.1"),
            "gpu2": node("gpu1", [B], "172.17.0.1"),
            "gpu3": node("clone", [C]),
            "gpu4": node("clone", [NEW]),
        }
    )
    assert lines == tuple(sorted([f"gpu1 {A}", f"gpu2 {B}", f"gpu3 {C}", f"gpu4 {NEW}"]))


def test_nobody_takes_a_name_of_the_policys_lines() -> None:
    extra = (f"login {C}", "@cert-authority *.example ssh-rsa AAAA")
    lines = fleet_lines({"gpu1": node("gpu1 login", [A])}, extra)
    assert lines == (f"gpu1 {A}", FURTHER, "@cert-authority *.example ssh-rsa AAAA", f"login {C}")
    # Completing what is complete already changes nothing.
    assert fleet_lines({"gpu1": node("gpu1 login", [A])}, lines) == lines


OLD = (f"gpu1,10.0.0.1 {A}", f"gpu2,gpu2.example,10.0.0.2 {B}", FURTHER, f"old-login {C}")

KEPT = {
    "a node that was not looked at": ({"gpu1": node("gpu1", [A], "10.0.0.1", OLD)}, OLD[:2]),
    "a node that could not be read": (
        {
            "gpu1": node("gpu1", [A], "10.0.0.1", OLD),
            "gpu2": nothing("timed out"),
        },
        OLD[:2],
    ),
    "a node whose keys could not be read": (
        {"gpu1": node("gpu1", [A], "10.0.0.1", OLD), "gpu2": node("gpu2", [], "10.0.0.2")},
        OLD[:2],
    ),
    "an address that is away, of the same key": (
        {"gpu1": node("gpu1", [A], "", OLD), "gpu2": node("gpu2", [B])},
        OLD[:2],
    ),
    "not the keys of a re-imaged node, under any name": (
        {"gpu1": node("gpu1", [A], "10.0.0.1", OLD), "gpu2": node("gpu2", [NEW])},
        (OLD[0], f"gpu2 {NEW}"),
    ),
    "not a name that another node has now": (
        {"gpu1": node("gpu1", [A], "10.0.0.9", OLD), "gpu3": node("gpu3", [NEW], "10.0.0.1")},
        (f"gpu1,10.0.0.9 {A}", OLD[1], f"gpu3,10.0.0.1 {NEW}"),
    ),
    "not what one node remembers and most have otherwise": (
        {
            "gpu1": node("gpu1", [A], "10.0.0.1", OLD),
            "gpu3": node("gpu3", [C], "", [f"gpu2 {NEW}"]),
            "gpu4": node("gpu4", [C], "", OLD),
        },
        (*OLD[:2], f"gpu3 {C}", f"gpu4 {C}"),
    ),
    "not a line that is none of ours": (
        {
            "gpu1": node(
                "gpu1",
                [A],
                "",
                [f"* {B}", f"!x,y {B}", f"|1|abc|def {B}", "@revoked * x y", "gpu7 ssh-rsa AAAA"],
            )
        },
        (f"gpu1 {A}",),
    ),
}


@pytest.mark.parametrize(("nodes", "lines"), KEPT.values(), ids=KEPT.keys())
def test_of_the_old_block_is_kept(nodes: dict[str, Snapshot], lines: tuple[str, ...]) -> None:
    assert fleet_lines(nodes) == tuple(sorted(lines))


def test_blocks_that_were_fetched_count_like_those_that_came_along() -> None:
    lines = fleet_lines({"gpu1": node("gpu1", [A], "10.0.0.1", OLD)})
    large = replace(node("gpu1", [A], "", OLD)["ssh_client"].known_hosts, lines=None, sent=False)
    seen = replace(node("gpu1", [A], "10.0.0.1")["ssh_client"], known_hosts=large)
    nodes = {"gpu1": Snapshot({"ssh_client": seen})}
    alone = fleet_lines(nodes)
    assert alone == (f"gpu1,10.0.0.1 {A}",)
    assert unsent(nodes, alone) == {large.digest: "gpu1"}
    assert unsent(nodes, OLD) == {}
    text = "\n".join([managed_block.BEGIN.decode(), *OLD, managed_block.END.decode()])
    fetched = {large.digest: read_block(f"Welcome!\n{text}\n", large.digest)}
    assert fleet_lines(nodes, blocks=fetched) == lines
    with pytest.raises(ValueError, match="changed"):
        read_block(text.replace("gpu2", "evil"), large.digest)


def test_the_same_nodes_give_the_same_lines_in_any_order() -> None:
    nodes = {f"gpu{n}": node(f"gpu{n}", [key(n)], f"10.0.0.{n}", OLD) for n in range(3, 30)}
    lines = fleet_lines(nodes)
    assert fleet_lines(dict(reversed(nodes.items()))) == lines
    # And what was written is what the next look gives.
    after = {name: node(name, [key(n)], f"10.0.0.{n}", lines) for n, name in enumerate(nodes, 3)}
    assert fleet_lines(after) == lines


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
    "more about others": ((f"gpu1 {A}", f"gpu2 {B}", f"gpu3 {C}"), "ok"),
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

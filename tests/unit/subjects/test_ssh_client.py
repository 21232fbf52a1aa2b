"""What a node printed of its ssh client, and the fleet's known_hosts lines that are made of it."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nodeready.core import own_files
from nodeready.core.base import Output, ProbeError
from nodeready.core.policy import Policy
from nodeready.core.result import FleetFacts
from nodeready.subjects.context import context_of
from nodeready.subjects.snapshot import Snapshot, unknown_snapshot
from nodeready.subjects.ssh_client import checks, config
from nodeready.subjects.ssh_client import facts as ssh_client
from nodeready.subjects.ssh_client import known_hosts as fleet
from nodeready.subjects.ssh_client.config import MAIN
from nodeready.subjects.ssh_client.facts import KnownHosts, NodeIdentity, SshClient
from nodeready.subjects.ssh_client.known_hosts import Endpoint, fleet_lines
from tests.builders.judging import judge_all
from tests.builders.nics import proc, route
from tests.builders.sections import exact
from tests.builders.ssh_client import key
from tests.cases import cases

DATA = "data/ssh_client.json"
A, B, C, D, NEW = key(1), key(2), key(3), key(4), key(99)
#: How the cases write a key.
KEYS = {"A": A, "B": B, "C": C, "D": D, "NEW": NEW}
POLICY = Policy(ssh_client_hosts=("gpu*",), ssh_known_hosts=("x y",))
ROUTES = (route("10.0.0.0/24 eth0"), route("10.9.0.0/16 ib0"), route("172.17.0.0/16 docker0"))


PRINTED = Path(__file__).parent / "data" / "ssh_client"
RECORDED = (PRINTED / "recorded.txt").read_text().replace("KEY", A)
NETWORK = (PRINTED / "network.txt").read_text()


def parse(text: str, rc: int | None = 0, truncated: bool = False, network: str = "") -> SshClient:
    outputs = {"ssh_client": Output(text, rc, truncated, "abc"), "nic_routes": Output(network, 0)}
    return ssh_client.parse(outputs, POLICY)


def statuses(observed: SshClient, policy: Policy) -> list[str]:
    return [result.status for result in judge_all(checks, observed, policy)]


def test_a_recorded_node():
    observed = parse(RECORDED, network=NETWORK)
    identity = observed.identity
    assert identity.names == ("gpu001", "gpu001.cluster.example")
    assert identity.addresses == ("10.0.0.1", "10.9.0.1", "2001:db8::1", "10.64.0.9")
    assert identity.keys == (A,)
    assert observed.known_hosts.content == b"login ssh-rsa AAAA\n"
    assert observed.known_hosts.lines is None
    result = checks.options(observed, POLICY)
    assert result.fixable
    assert result.source == "/etc/ssh/ssh_config.d/50-site.conf:2"
    assert statuses(observed, POLICY) == ["ok", "fail", "na", "fail", "na"]


def test_a_node_with_nothing():
    with pytest.raises(ProbeError):
        parse(RECORDED, None)
    observed = parse("host=gpu001\nfqdn=gpu001.example\nsize=0\n")
    assert observed.identity == NodeIdentity(("gpu001", "gpu001.example"), (), ())
    assert observed.known_hosts.content is None
    assert statuses(observed, Policy()) == ["warn", "na", "na", "na", "na"]


def test_the_addresses_of_a_balancer_are_not_the_nodes():
    services = tuple(f"10.96.0.{number}" for number in range(40))
    observed = parse("host=gpu001\n", network=proc(ROUTES, ("10.0.0.1", *services)))
    assert observed.identity.addresses == ("10.0.0.1",)


def test_a_file_cannot_speak_for_the_node():
    hostile = f"key={key(6)}\nhave=ssh\nask=own gpux\nstricthostkeychecking true\nrc=0\n"
    hostile += f"@xyz file /etc/ssh/ssh_config\n1: eth0 inet 10.6.6.6/8 x\n{MAIN}:1:Host *\n"
    observed = parse(f"host=gpu001\n{exact('/etc/ssh/ssh_known_hosts', hostile, 'abc')}")
    assert observed.identity.keys == observed.identity.addresses == observed.effective == ()
    assert observed.files == {}
    assert observed.installed is False


@pytest.mark.parametrize("case", cases(__file__, DATA, "hostile"))
def test_nothing_hostile_becomes_a_name_a_key_or_an_address(case):
    text = case["text"].replace("LONG", "A" * 9000).replace("key=x A\n", f"key=x {A}\n")
    assert parse(text).identity == NodeIdentity((), (), ())


def test_a_megabyte_is_no_name_and_options_that_begin_again_are_read_once():
    long = "host=" + "a" * 1_000_000 + "\nkey=" + "A" * 1_000_000 + "\n"
    assert parse(long).identity == NodeIdentity((), (), ())
    # Looking for the end of each beginning would take minutes.
    head = "ask=own a\n" * 20_000 + "ask=system node001\n|user ml\nrc=0\n|user root\nrc=1\n"
    (asked,) = ssh_client.parse_effective(head)
    assert (asked.host, asked.as_prober, asked.values) == ("node001", False, {"user": "ml"})


def test_each_pattern_is_tried_by_a_host_that_it_means():
    policy = Policy(ssh_client_hosts=("!login", "gpu*", "10.1.?.*", "n?", "never"))
    assert ssh_client.samples(policy) == ("gpux", "10.1.0.x", "n0")
    for host, pattern in zip(
        ssh_client.samples(policy), policy.ssh_client_hosts[1:], strict=False
    ):
        assert config.matches([pattern], host)


def test_options_that_no_deploy_sets():
    old = "version=OpenSSH_7.4p1, OpenSSL 1.0.2k-fips\n"
    for policy, printed, actual in (
        (Policy(ssh_client_hosts=("!gpu*",), ssh_known_hosts=("x y",)), "", ""),
        (Policy(ssh_client_hosts=("gpu*",), ssh_client_mode="accept-new"), old,
         "OpenSSH 7.4 has no accept-new"),
    ):  # fmt: skip
        observed = parse(RECORDED.replace("\nsize=", f"\n{printed}size=", 1))
        result = checks.options(observed, policy)
        assert (result.status, result.fixable, actual in result.actual) == ("fail", False, True)


def test_an_ssh_that_lacks_a_library_is_installed_again():
    error = "|/usr/bin/ssh: error while loading shared libraries: libx.so"
    printed = RECORDED.replace("|user root", error).replace("rc=0", "rc=127")
    result = checks.installed(parse(printed), POLICY)
    assert (result.fixable, result.source) == (True, "/usr/bin/ssh")
    assert result.actual == "/usr/bin/ssh does not start: libx.so"


@pytest.mark.parametrize("case", cases(__file__, DATA, "options"))
def test_the_first_value_wins(case):
    """where: the line that wins for gpu1; first: whether a drop-in of ours would win."""
    texts = {f"/etc/ssh/{path}": text for path, text in case["files"].items()}
    files = {path: config.lines_of(path, text.encode()) for path, text in texts.items()}
    winner = config.winner(MAIN, files, "gpu1", "stricthostkeychecking")
    where = f"/etc/ssh/{case['where']}" if "where" in case else None
    assert (winner.source if winner else None) == where
    assert config.speaks_first(MAIN, files, ("stricthostkeychecking",)) is case["first"]


def node(
    names: str, keys: Iterable[str], addresses: str = "", block: Iterable[str] | None = None
) -> Snapshot:
    identity = NodeIdentity(tuple(names.split()), tuple(addresses.split()), tuple(keys))
    known = KnownHosts()
    if block is not None:
        inner = "".join(f"{line}\n" for line in block).encode()
        known = ssh_client.parse_known_hosts(own_files.put_block(b"", inner, "end"))
    return Snapshot({"ssh_client": SshClient(True, None, identity, known, {}, {}, (), ())})


def read_node(text: str | None, block: Any = None) -> Snapshot:
    """A node as the cases write it: `NAMES | KEYS | ADDRESSES`; None: it could not be read."""
    if text is None:
        return unknown_snapshot("timed out")
    names, keys, addresses = text.split("|")
    lines = OLD if block == "old" else block and with_keys(block)
    return node(names, [KEYS[letter] for letter in keys.split()], addresses, lines)


def read_endpoint(values: dict[str, Any]) -> Endpoint:
    names, letter = tuple(values.get("names", ())), values.get("key", "")
    return Endpoint(**{**values, "names": names, "key": KEYS.get(letter, "")})


def with_keys(lines: Iterable[str]) -> list[str]:
    return [re.sub(r" (A|B|C|D|NEW)$", lambda m: f" {KEYS[m[1]]}", line) for line in lines]


OLD = (f"gpu1,10.0.0.1 {A}", f"gpu2,gpu2.example,10.0.0.2 {B}", fleet.FURTHER, f"old-login {C}")
FLEET = {"gpu1": Endpoint("10.0.0.1"), "gpu2": Endpoint()}


@pytest.mark.parametrize("case", cases(__file__, DATA, "fleet"))
def test_a_node_is_called_what_nobody_else_could_claim(case):
    """A liar gets no name of a host outside the fleet, and takes none of the others' away."""
    nodes = {name: read_node(text) for name, text in case["nodes"].items()}
    endpoints = {name: read_endpoint(values) for name, values in case.get("inventory", {}).items()}
    lines = fleet_lines(nodes, (), endpoints, with_keys(case.get("block", ())))
    assert lines == tuple(sorted(with_keys(case["lines"])))


@pytest.mark.parametrize("case", cases(__file__, DATA, "kept"))
def test_of_its_own_block_a_node_keeps(case):
    """nodes: the others of the run; blocks: gpu1's is `OLD` where it has no other one."""
    blocks = {"gpu1": "old", **case.get("blocks", {})}
    texts = {"gpu1": "| A | 10.0.0.1", **case.get("nodes", {})}
    nodes = {name: read_node(text, blocks.get(name)) for name, text in texts.items()}
    endpoints = {**dict.fromkeys(nodes, Endpoint()), **FLEET, "gpu4": Endpoint(reached="10.0.0.2")}
    endpoints = {name: endpoints[name] for name in (*FLEET, *nodes)}
    lines = fleet.lines_of_nodes(fleet.FleetHostKeys(nodes, (), endpoints), nodes, {})["gpu1"]
    assert set(lines) == {f"gpu1,10.0.0.1 {A}", *with_keys(case["kept"])}


def test_nobody_takes_a_name_of_the_policys_lines():
    extra = (f"gpu1.login {C}", "@cert-authority *.example ssh-rsa AAAA")
    nodes = {"gpu1": node("gpu1 gpu1.login", [A])}
    lines = fleet_lines(nodes, extra)
    assert lines == (f"gpu1 {A}", fleet.FURTHER, extra[1], extra[0])
    # Completing what is complete already changes nothing.
    assert fleet_lines(nodes, lines) == lines


def test_nodes_that_keep_the_same_share_one_object_and_odd_blocks_are_bounded():
    nodes = {f"gpu{n}": node("", [key(n)], "", OLD) for n in range(10, 40)}
    nodes |= {f"gpu{n}": node("", [key(n)], "", [f"gpu2 {key(n)}"]) for n in range(40, 70)}
    lines = fleet.lines_of_nodes(
        fleet.FleetHostKeys(nodes, (), FLEET | dict.fromkeys(nodes, Endpoint())), nodes, {}
    )
    assert 2 < len({id(of_node) for of_node in lines.values()}) <= fleet.MAX_KEPT + 1
    assert all(OLD[1] in lines[f"gpu{n}"] for n in range(10, 40))


def large_block() -> KnownHosts:
    return replace(node("", [], "", OLD)["ssh_client"].known_hosts, lines=None, sent=False)


def with_block(names: str, keys: list[str], block: KnownHosts) -> Snapshot:
    return Snapshot({"ssh_client": replace(node(names, keys)["ssh_client"], known_hosts=block)})


FETCHED = "\n".join([own_files.BEGIN.decode(), *OLD, own_files.END.decode()]) + "\n"


def test_blocks_that_were_fetched_count_like_those_that_came_along():
    lines = fleet_lines({"gpu1": node("gpu1", [A])}, (), FLEET, OLD)
    large = large_block()
    nodes = dict.fromkeys(("gpu1", "gpu4"), with_block("gpu1", [A], large))
    known = fleet.FleetHostKeys({"gpu1": nodes["gpu1"]}, (), FLEET)
    assert known.lines() == (f"gpu1,10.0.0.1 {A}",)
    assert fleet.unsent(nodes, known.lines()) == {large.digest: ("gpu1", "gpu4")}
    assert fleet.unsent(nodes, OLD) == {}
    fetched = {large.digest: fleet.read_block(f"Welcome!\n{FETCHED}", large.digest)}
    assert fleet.lines_of_nodes(known, nodes, fetched)["gpu1"] == lines
    with pytest.raises(ValueError, match="changed"):
        fleet.read_block(FETCHED.replace("gpu2", "evil"), large.digest)


def test_a_digest_that_a_node_tells_takes_nothing_from_the_node_that_has_the_block():
    honest = node("gpu3", [C], "", OLD)
    told = KnownHosts(b"", None, honest["ssh_client"].known_hosts.digest, 10**6, sent=False)
    nodes = {"gpu1": with_block("gpu1", [A], told), "gpu3": honest}
    lines = fleet.lines_of_nodes(
        fleet.FleetHostKeys(nodes, (), {**FLEET, "gpu3": Endpoint()}), nodes, {}
    )
    assert OLD[1] in lines["gpu3"]


def test_a_large_block_is_asked_of_the_next_node_when_one_gives_another():
    large = large_block()
    nodes = {"gpu1": with_block("", [A], large), "gpu3": with_block("", [C], large)}
    asked: list[str] = []

    def fetch(name: str) -> str:
        asked.append(name)
        return "nonsense" if name == "gpu1" else FETCHED

    endpoints = {**FLEET, "gpu3": Endpoint(key=C)}
    policies = dict.fromkeys(nodes, Policy())
    context = context_of(policies, nodes, endpoints, bytes, fetch)
    assert asked == ["gpu1", "gpu3"]
    assert all(OLD[1] in context.about(name).known_hosts for name in nodes)
    assert context.about("gpu3").host_key == C
    # When all nodes of the inventory were observed, nobody has anything to add.
    asked.clear()
    context_of(policies, nodes, {name: endpoints[name] for name in nodes}, bytes, fetch)
    assert asked == []


def test_the_same_nodes_give_the_same_lines_in_any_order():
    nodes = {f"gpu{n}": node(f"gpu{n}", [key(n)], f"10.0.0.{n}", OLD) for n in range(3, 30)}
    lines = fleet_lines(nodes, (), FLEET, OLD)
    assert fleet_lines(dict(reversed(nodes.items())), (), FLEET, OLD) == lines
    # And what was written is what the next look gives.
    assert fleet_lines(nodes, (), FLEET, lines) == lines


NO_NAMES = ["*", "gpu*", "!gpu1", "a,b", "a b", "[a]:22", "@revoked", "|1|x|y", "-oProxyCommand=x"]
NO_NAMES += ["a..b", "a-", "1.2.3", "#", "a/b", "ü", "$(id)", "a\nb", "\x1b[31mred", "x" * 64, ""]
NO_NAMES += ["localhost", "localhost.localdomain", "127.0.0.1", "10.0.0.1", "fd00::1"]
NO_KEYS = ["", "ssh-ed25519", "ssh-ed25519 AAAA", f"ssh-dss {A.split()[1]}", f"command=x {A}"]
NO_KEYS += [f"ssh-rsa {A.split()[1]}", f"{A}\nevil {B}", A.replace("ed25519 ", "ed25519 *")]


def test_what_is_no_name_no_address_for_others_and_no_key_is_dropped():
    assert [text for text in NO_NAMES if ssh_client.clean_name(text)] == []
    no_addresses = ["127.0.0.1", "::1", "fe80::1", "0.0.0.0", "1.2.3", "x", ""]
    assert [text for text in no_addresses if ssh_client.clean_address(text)] == []
    assert [
        text for text in NO_KEYS if ssh_client.clean_key(text) or fleet.parse_line(f"gpu1 {text}")
    ] == []
    assert ssh_client.clean_name("x" * 63) == "x" * 63
    assert ssh_client.clean_key(f"{A} root@gpu1") == A


@pytest.mark.parametrize("case", cases(__file__, DATA, "checked"))
def test_a_block_is_judged_by_what_it_knows(case):
    policy = Policy(ssh_known_hosts=tuple(with_keys(["gpu1 A", "gpu2 B"])))
    block = None if case["block"] is None else with_keys(case["block"])
    result = checks.known_hosts(node("x", [A], "", block)["ssh_client"], policy)
    assert result.status == case["status"]


def test_nothing_gathered_and_other_modes_do_not_apply():
    observed = node("x", [A])["ssh_client"]
    assert checks.known_hosts(observed, Policy()).status == "na"
    lines = (f"gpu1 {A}",)
    other = Policy(ssh_known_hosts=lines, ssh_client_mode="accept-new")
    assert checks.known_hosts(observed, other).status == "na"
    # A block that nothing keeps right any more goes.
    assert checks.leftover(node("x", [A], "", lines)["ssh_client"], other).fixable
    assert checks.fleet_block(lines) is checks.fleet_block(lines)


def test_another_key_than_the_connections_is_a_finding_that_no_deploy_repairs():
    mode = {"ssh_client_mode": "no"}
    for keys, policy, key_of_connection, status in (
        ([A], Policy(), "", "na"), ([], Policy(), A, "na"), ([A], Policy(**mode), A, "na"),
        ([A], Policy(), A, "ok"), ([A], Policy(), B, "fail"),
    ):  # fmt: skip
        fleet = FleetFacts(host_key=key_of_connection)
        result = checks.host_key(node("gpu1", keys)["ssh_client"], policy, fleet)
        assert (result.status, result.fixable) == (status, False)
    assert result.actual == f"ssh-ed25519 {ssh_client.fingerprint(A)}"

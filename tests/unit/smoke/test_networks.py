"""The network that NCCL chose on each node: which nodes are named, and in which words."""

from nodeready.agent.smoke.orders import RankNetwork
from nodeready.core.policy import Policy
from nodeready.runs.smoke.document import describe, network_of_nodes, of_node, unexpected, warnings
from nodeready.runs.smoke.knowledge import SmokeOutcome, Test
from tests.cases import read_table, with_table

NETWORKS = {name: RankNetwork(*row) for name, row in read_table(__file__, "NETWORKS").items()}
IB, SOCKET, GLOO, DIRECT, STAGED, OTHER, LO, LO_ADDRESS = NETWORKS.values()


@with_table("networks, has_port, warned")
def test_nodes_that_are_slower_than_most_or_than_their_ports(networks, has_port, warned):
    """has_port: the first node has a port of InfiniBand"""
    nodes = {number: NETWORKS[name] for number, name in enumerate(networks)}
    sentences = warnings(nodes, {0: ("mlx5_0",)} if has_port else {})
    assert sentences.keys() == dict(warned).keys()
    for name, words in warned:
        (sentence,) = sentences[name]
        assert words in sentence
        assert sentence.startswith("NCCL uses ")


def test_loopback_leads_to_no_other_node():
    socket = RankNetwork("Socket", "lo")
    found = warnings({"a": LO, "b": LO_ADDRESS, "c": GLOO, "d": socket}, {})
    assert found == {
        "a": ("gloo uses lo: no other node reaches that",),
        "b": ("gloo uses 127.0.1.1: no other node reaches that",),
        "d": ("NCCL uses lo: no other node reaches that",),
    }


def test_the_policys_network_is_compared_without_regard_to_case():
    found = {"a": IB, "b": SOCKET, "c": GLOO, "d": OTHER}
    wanted = {"a": "ib", "b": "IB", "c": "IB", "d": ""}
    policies = {name: Policy(nccl_network=network) for name, network in wanted.items()}
    against = unexpected(found, policies)
    assert against == {
        "b": (
            "NCCL uses Socket over eth0, the policy wants IB (nccl_network): "
            "NCCL sees no InfiniBand or RoCE device",
        )
    }


def test_a_nodes_ranks_count_as_their_slowest():
    assert of_node([IB, None, SOCKET]).name == "Socket"
    assert of_node([DIRECT, STAGED]).gdr is False
    assert of_node([None]) is None
    dirty = of_node([RankNetwork("\x1b[31mIB" + "x" * 999, "eth\n0", ("y" * 999,) * 99)])
    assert "\x1b" not in dirty.name
    assert "\n" not in dirty.interface
    assert (len(dirty.name) < 100, len(dirty.hcas), len(dirty.hcas[0]) < 100) == (True, 32, True)


def test_the_test_between_nodes_tells_about_gpudirect_and_another_engine_nothing():
    results = [
        (
            Test(1, "group", ("a", "b")),
            SmokeOutcome(True, networks=(("a", DIRECT), ("b", STAGED))),
        ),
        (Test(2, "alone", ("a",)), SmokeOutcome(True, networks=(("a", IB),))),
        (Test(3, "control", ("b",)), SmokeOutcome(True, networks=(("b", GLOO),))),
    ]
    assert network_of_nodes(results) == {"a": DIRECT, "b": STAGED}


@with_table("network, words")
def test_a_network_in_words(network, words):
    network = RankNetwork(*network)
    assert describe(network.name, network.interface, network.hcas, network.gdr) == words

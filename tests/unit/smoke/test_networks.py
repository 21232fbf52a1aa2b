"""The network that NCCL chose on each node: which nodes are named, and in which words."""

import pytest

from nodeready.agent.smoke.orders import RankNetwork
from nodeready.core.policy import Policy
from nodeready.runs.smoke.document import describe, network_of_nodes, of_node, unexpected, warnings
from nodeready.runs.smoke.knowledge import ALONE, CONTROL, GROUP, SmokeOutcome, Test

IB = RankNetwork("IB", "eth0", ("mlx5_0:1/IB", "mlx5_1:1/IB"))
SOCKET = RankNetwork("Socket", "eth0", note="NCCL sees no InfiniBand or RoCE device")
GLOO = RankNetwork("gloo", "eth0")
DIRECT, STAGED = (RankNetwork("IB", "eth0", IB.hcas, gdr) for gdr in (True, False))
OTHER = RankNetwork("FastSocket", "eth0")
LO, LO_ADDRESS = RankNetwork("gloo", "lo"), RankNetwork("gloo", "127.0.1.1")


@pytest.mark.parametrize(("found", "hcas", "warned"), [
    ([IB, IB, SOCKET], {}, {2: "most nodes IB: NCCL sees no InfiniBand or RoCE device"}),
    ([IB, SOCKET], {}, {1: "most nodes IB"}),
    ([SOCKET, SOCKET, IB], {}, {2: "most nodes Socket"}),
    ([SOCKET, SOCKET], {}, {}),
    ([SOCKET, SOCKET], {0: ("mlx5_0",)}, {0: "Socket over eth0, and not mlx5_0"}),
    ([IB, IB], {0: ("mlx5_0",)}, {}),
    ([IB, OTHER], {}, {}),
    ([DIRECT, DIRECT, STAGED], {}, {2: "no GPUDirect RDMA, which most nodes use"}),
    ([DIRECT, STAGED, IB], {}, {}),
    ([GLOO, GLOO, SOCKET], {}, {}),
    ([GLOO, GLOO], {0: ("mlx5_0",)}, {}),
    ([LO], {}, {}),
])  # fmt: skip
def test_nodes_that_are_slower_than_most_or_than_their_ports(found, hcas, warned):
    sentences = warnings(dict(enumerate(found)), hcas)
    assert sentences.keys() == warned.keys()
    for name, words in warned.items():
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
        (Test(1, GROUP, ("a", "b")), SmokeOutcome(True, networks=(("a", DIRECT), ("b", STAGED)))),
        (Test(2, ALONE, ("a",)), SmokeOutcome(True, networks=(("a", IB),))),
        (Test(3, CONTROL, ("b",)), SmokeOutcome(True, networks=(("b", GLOO),))),
    ]
    assert network_of_nodes(results) == {"a": DIRECT, "b": STAGED}


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (IB, "IB, 2 ports"),
        (DIRECT, "IB, 2 ports, GPUDirect RDMA"),
        (RankNetwork("IB", "eth0", ("mlx5_0:1/RoCE",), gdr=False), "IB, 1 port of RoCE, no "
                                                                    "GPUDirect RDMA"),
        (RankNetwork("OFI"), "OFI"),
        (GLOO, "gloo over eth0"),
    ],
)  # fmt: skip
def test_a_network_in_words(network, words):
    assert describe(network.name, network.interface, network.hcas, network.gdr) == words

"""What NCCL says, compared over ranks."""

from dataclasses import replace

from nodeready.agent.witnesses.nccl_log import NcclError, NcclRank, read_log
from nodeready.runs.stacks.evidence import ranks_of
from nodeready.runs.stacks.witness_reader import PlacedRank, differences, fold_errors

RANK = NcclRank(network="IB", gdr=True, version="NCCL 2.21.5", state="ready",
                hcas=("mlx5_0:1/IB", "mlx5_1:1/IB"))  # fmt: skip


def job(*changes):
    """Ranks of a job, two on each node."""
    return [
        PlacedRank(f"gpu{number // 2 + 1}", number, replace(RANK, **change))
        for number, change in enumerate(changes)
    ]


def test_the_rank_that_fell_back_to_sockets_is_named_with_its_node():
    ranks = job({}, {}, {}, {"network": "Socket", "gdr": False, "hcas": ()})
    network, gdr = differences(ranks)
    assert (network.line, ranks_of(network.ranks, network.nodes)) == (
        "network Socket, its peers IB",
        "rank 3 (gpu2)",
    )
    assert gdr.line == "GPUDirect RDMA off, its peers on"


def test_hcas_of_one_kind_and_number_are_equal_whatever_their_names():
    assert not differences(job({}, {"hcas": ("mlx5_2:1/IB", "mlx5_3:1/IB")}, {}))
    (difference,) = differences(job({}, {"hcas": ("mlx5_2:1/RoCE",)}, {}))
    assert difference.line == "HCAs: 1 RoCE, its peers 2 IB"


def test_no_majority_is_no_difference():
    assert not differences(job({}, {"network": "Socket"}, {}, {"network": "Socket"}))


def test_a_fact_that_a_log_does_not_say_is_no_difference():
    assert not differences(job({}, {"version": "", "state": "", "gdr": None}, {}))


def test_errors_are_folded_causes_first():
    retry = NcclError("ib-retry", "Got completion ...", "10.0.0.7")
    port = NcclError("ib-port-down", "Got async event : port error")
    ranks = job({"errors": (retry,)}, {"errors": (retry,)}, {}, {"errors": (port, retry)})
    first, second = fold_errors(ranks)
    assert (first.meaning.key, first.ranks, first.nodes) == ("ib-port-down", (3,), ("gpu2",))
    assert (second.ranks, second.peers) == ((0, 1, 3), ("10.0.0.7",))


def test_lines_to_differences():
    """The whole way, from the lines of two ranks' logs and a third's."""
    line = "h{0}:{0}:{0} [0] NCCL INFO comm 0x1 rank {0} nranks 3 cudaDev 0 - Init COMPLETE\n"
    net = "h{0}:{0}:{0} [0] NCCL INFO Using network {1}\n"
    text = "".join(
        line.format(n) + net.format(n, "Socket" if n == 1 else "IBext_v8") for n in range(3)
    )
    ranks = [PlacedRank(rank.host, rank.rank, rank) for rank in read_log(text.splitlines()).ranks]
    (difference,) = differences(ranks)
    assert (difference.line, difference.ranks) == ("network Socket, its peers IB", (1,))

"""What NCCL says, compared over ranks."""

from dataclasses import replace

from nodeready.agent.witnesses.nccl_log import NcclError, NcclRank, read_log
from nodeready.runs.stacks.evidence import ranks_of
from nodeready.runs.stacks.witness_reader import PlacedRank, differences, diverging, fold_errors
from tests.cases import with_table

RANK = NcclRank(network="IB", gdr=True, version="NCCL 2.21.5", state="ready",
                hcas=("mlx5_0:1/IB", "mlx5_1:1/IB"))  # fmt: skip


def job(*changes):
    """Ranks of a job, two on each node."""
    return [
        PlacedRank(f"gpu{number // 2 + 1}", number, replace(RANK, **change))
        for number, change in enumerate(changes)
    ]


@with_table("changes, says")
def test_differences_between_ranks(changes, says):
    """changes: what differs in each rank, two on each node"""
    rows = differences(job(*changes))
    assert [f"{ranks_of(row.ranks, row.nodes)}: {row.line}" for row in rows] == [*says]


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


#: As NCCL 2.27 prints it with NCCL_DEBUG_SUBSYS=COLL,TUNING; the rank, opCount, call, count, type.
COLL = (
    "gpu{0}:1{0}:1{0} [0] NCCL INFO {2}: opCount {1:x} sendbuff 0x7f59a1a8fa00 recvbuff "
    "0x7f59a1a8fa00 count {3} datatype {4} op 0 root 0 comm 0x18076b9{0} [nranks=4] "
    "stream 0xb617630"
)


def called(*odd: tuple[int, int, tuple[str, int, int]], missing: tuple[int, ...] = ()):
    """What `diverging` says about four ranks with 20 calls. odd: rank, opCount, call"""
    rows = {(rank, at): ("AllReduce", 1024, 7) for rank in range(4) for at in range(20)}
    rows |= {(rank, at): row for rank, at, row in odd}
    lines = [COLL.format(*key, *row) for key, row in sorted(rows.items()) if key[1] not in missing
             or key[0] != 2]  # fmt: skip
    ranks = {int(rank.host[3:]): rank for rank in read_log(lines).ranks}
    assert {rank.calls_size for rank in ranks.values()} == {4}
    return [*diverging({number: rank.calls for number, rank in ranks.items()})]


@with_table("odd, missing, says")
def test_the_rank_whose_calls_differ_is_named_with_the_first_of_them(odd, missing, says):
    """odd: rank, opCount, call; missing: opCounts that rank 2 has not"""
    assert called(*odd, missing=missing) == [(words, [*ranks]) for words, ranks in says]


def test_two_communicators_of_the_same_size_are_not_compared():
    lines = [COLL.format(0, at, "AllReduce", 8, 7) for at in range(3)]
    (rank,) = read_log([*lines, lines[0].replace("comm 0x1", "comm 0x2")]).ranks
    assert rank.calls == ()

"""proof.rdma_bandwidth: what ib_write_bw prints, who writes to whom, and which node is the cause.

The files data/active/ib_write_bw-*.txt are shortened recordings of public reports: a Broadcom
adapter of 400 Gbit/s, a ConnectX with warnings about the processor, and a switch's test at 100
Gbit/s.
"""

from collections import Counter
from pathlib import Path

import pytest

from nodeready.agent.proofs.rdma import active_links, read_rate
from nodeready.core.policy import Policy
from nodeready.runs.ready.rdma import MAX_RING, PairRate, bandwidths, ring_rounds, split_rings
from nodeready.subjects.proof import checks
from nodeready.subjects.proof.facts import Proved, RdmaBandwidth, RdmaRate, User
from tests.builders.judging import by_name

DATA = Path(__file__).parents[1] / "subjects" / "data" / "active"
RTR = "Failed to modify QP 118 to RTR"

# --- What ib_write_bw prints, and which ports a node has.


@pytest.mark.parametrize(("name", "gbps"), [
    ("ib_write_bw-bnxt.txt", 363.47), ("ib_write_bw-cx5.txt", 97.66),
    # Without --report_gbits it prints MiB/s, which are no Gbit/s.
    ("ib_write_bw-cpufreq.txt", None),
])  # fmt: skip
def test_the_average_of_each_recorded_table(name, gbps):
    assert read_rate((DATA / name).read_text()) == gbps


def test_a_warning_within_the_table_is_no_row_and_an_error_is_no_rate():
    text = (DATA / "ib_write_bw-cpufreq.txt").read_text().replace("MB/sec", "Gb/sec")
    assert read_rate(text.replace("11024.71", "92.48")) == 92.48
    for text in (
        "",
        "BW average[Gb/sec]",
        f"BW average[Gb/sec]\n {'9' * 9999}",
        " 1 2 3.0 4.0 5.0",
    ):
        assert read_rate(text) is None


def put(directory: Path, **files: str) -> None:
    for name, text in files.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def test_active_ports_of_channel_adapters_are_tested(tmp_path):
    def device(name: str, kind: str, state: str = "4: ACTIVE") -> None:
        put(tmp_path / name, node_type=kind, ports__1__state=state,
            ports__1__rate="400 Gb/sec (4X NDR)")  # fmt: skip

    assert active_links(str(tmp_path / "none")) == ()
    device("mlx5_0", "1: CA")
    device("mlx5_1", "1: CA", "1: DOWN")
    device("irdma0", "4: RNIC")
    device("efa_0", "7: <unknown>")
    put(tmp_path / "mlx5_0", ports__2__state="4: ACTIVE", ports__2__rate="2.5 Gb/sec (1X SDR)")
    assert active_links(str(tmp_path)) == (
        RdmaRate("mlx5_0/1", 400.0), RdmaRate("mlx5_0/2", 2.5),
    )  # fmt: skip


# --- Who writes to whom.


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 9])
def test_in_a_round_a_node_is_in_one_pair_and_in_all_rounds_it_writes_and_is_written_to_once(
    count,
):
    names = [f"n{number}" for number in range(count)]
    rounds = ring_rounds(names)
    for pairs in rounds:
        assert max(Counter(name for pair in pairs for name in pair).values()) == 1
    edges = [pair for pairs in rounds for pair in pairs]
    expected = names if count > 1 else []
    assert sorted(source for source, _ in edges) == expected
    assert sorted(target for _, target in edges) == expected
    assert len(rounds) == (0 if count < 2 else 2 + count % 2)


@pytest.mark.parametrize(("count", "sizes"), [
    (0, []), (1, [1]), (128, [128]), (129, [64, 65]), (300, [100, 100, 100]), (10_000, None),
])  # fmt: skip
def test_rings_are_bounded_and_none_is_a_single_node(count, sizes):
    names = [str(number) for number in range(count)]
    rings = split_rings(names)
    assert [name for ring in rings for name in ring] == names
    assert sizes is None or [len(ring) for ring in rings] == sizes
    assert all(len(ring) <= MAX_RING for ring in rings)


# --- Which node is the cause.


def ring(
    low: dict[str, float | None], count: int = 6, port: str = "mlx5_0/1", link: float = 400.0
) -> list[PairRate]:
    """The rates of a ring: 392 Gbit/s, but those with these nodes or ``a-b`` pairs."""
    names = [chr(ord("a") + number) for number in range(count)]
    pairs = []
    for source, target in (pair for pairs in ring_rounds(names) for pair in pairs):
        gbps: float | None = 392.0
        for key in (source, target, f"{source}-{target}"):
            gbps = low.get(key, gbps)
        rate = RdmaRate(port, gbps, "" if gbps is not None else RTR)
        pairs.append(PairRate(source, target, link, rate))
    return pairs


def judged(observed: RdmaBandwidth) -> str:
    proved = Proved(User("root", 0, True, ""), rdma_bandwidth=observed)
    result = by_name(checks, proved, Policy())["rdma_bandwidth"]
    return f"{result.status}: {result.actual}"


def judged_nodes(pairs: list[PairRate]) -> dict[str, str]:
    texts = {node: judged(observed) for node, observed in bandwidths(pairs).items()}
    return {node: text for node, text in sorted(texts.items()) if not text.startswith("ok")}


def test_a_slow_node_is_named_and_its_neighbours_are_not():
    text = "mlx5_0/1 to b, d: 190.0 Gbit/s, the median of 6 nodes is 392.0"
    assert judged_nodes(ring({"c": 190.0})) == {"c": f"fail: {text}"}
    # Of two ports the good one says nothing against it.
    pairs = [*ring({"c": 190.0}), *ring({}, port="mlx5_1/1")]
    assert judged_nodes(pairs) == {"c": f"fail: {text}"}
    assert judged(bandwidths(pairs)["b"]) == "ok: 2 ports, 392.0 Gbit/s or more"


@pytest.mark.parametrize("count", [3, 4, 5])
def test_of_a_few_nodes_the_slow_one_does_not_make_the_median(count):
    (node,) = judged_nodes(ring({"b": 190.0}, count))
    assert node == "b"


def test_a_node_without_a_rate_is_unknown_and_a_slow_pair_a_warning_for_both():
    text = f"no rate ({RTR}), the median of 5 nodes is 392.0"
    assert judged_nodes(ring({"c": None})) == {"c": f"unknown: mlx5_0/1 to b, d: {text}"}
    text = "alone: 190.0 Gbit/s, the median of 6 nodes is 392.0"
    assert judged_nodes(ring({"c-d": 190.0})) == {
        "c": f"warn: mlx5_0/1 to d {text}", "d": f"warn: mlx5_0/1 to c {text}",
    }  # fmt: skip
    # Slow with one neighbour, without a rate with the other.
    found = judged_nodes(ring({"b-c": None, "c-d": 190.0}))
    assert found == {
        "c": f"unknown: mlx5_0/1 to b, d: no rate ({RTR}), the median of 6 nodes is 392.0"
    }


def test_healthy_ports_differ_by_a_tenth_and_links_of_other_rates_are_compared_apart():
    assert judged_nodes(ring({"a-b": 363.5, "c-d": 389.5, "e": 397.1})) == {}
    slower = [
        PairRate(f"x{pair.source}", f"x{pair.target}", 200.0, RdmaRate("mlx5_0/1", 195.0))
        for pair in ring({})
    ]
    assert judged_nodes([*ring({}), *slower]) == {}


def test_a_port_without_three_rates_has_no_median():
    lonely = "not measured on three nodes: mlx5_0/1"
    assert judged_nodes(ring({}, 2)) == dict.fromkeys("ab", f"na: {lonely}")
    all_fail = dict.fromkeys("abcdef")
    text = f"unknown: {lonely} ({RTR})"
    assert judged_nodes(ring(all_fail)) == dict.fromkeys("abcdef", text)
    # Beside a port that is measured: it is in another network.
    pairs = [*ring({}), *ring(all_fail, port="mlx5_8/1", link=25.0)]
    assert judged_nodes(pairs) == {}
    text = f"ok: 1 port, 392.0 Gbit/s or more; not compared: mlx5_8/1 ({RTR})"
    assert judged(bandwidths(pairs)["a"]) == text


def test_what_a_node_says_of_the_median_does_not_count():
    lying = RdmaRate("mlx5_0/1", 392.0, peers=("b",), median_gbps=900.0, compared=9)
    pairs = [PairRate("a", "b", 400.0, lying)]
    text = "na: not measured on three nodes: mlx5_0/1"
    assert judged_nodes(pairs) == {"a": text, "b": text}


def test_what_stays_unknown_and_what_does_not_apply():
    missing = RdmaBandwidth(error="ib_write_bw is not installed")
    assert judged(missing) == "unknown: ib_write_bw is not installed"
    assert judged(RdmaBandwidth("one node alone")) == "na: one node alone"

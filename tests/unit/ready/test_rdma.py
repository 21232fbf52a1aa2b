"""proof.rdma_bandwidth: what ib_write_bw prints, who writes to whom, and which node is the cause.

The files data/active/ib_write_bw-*.txt are shortened recordings of public reports: a Broadcom
adapter of 400 Gbit/s, a ConnectX with warnings about the processor, and a switch's test at 100
Gbit/s.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nodeready.agent.proofs.rdma import active_links, read_rate
from nodeready.core.policy import Policy
from nodeready.runs.ready.rdma import MAX_RING, PairRate, bandwidths, ring_rounds, split_rings
from nodeready.subjects.proof import checks
from nodeready.subjects.proof.facts import Proved, RdmaBandwidth, RdmaRate, User
from tests.builders.judging import by_name
from tests.cases import cases

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
    low: dict[str, float | None],
    count: int = 6,
    *,
    port: str = "mlx5_0/1",
    link: float = 400.0,
    usual: float = 392.0,
    prefix: str = "",
) -> list[PairRate]:
    """The rates of a ring: the usual one, but those with these nodes or ``a-b`` pairs."""
    names = [chr(ord("a") + number) for number in range(count)]
    pairs = []
    for source, target in (pair for pairs in ring_rounds(names) for pair in pairs):
        gbps: float | None = usual
        for key in (source, target, f"{source}-{target}"):
            gbps = low.get(key, gbps)
        rate = RdmaRate(port, gbps, "" if gbps is not None else RTR)
        pairs.append(PairRate(prefix + source, prefix + target, link, rate))
    return pairs


def judged(observed: RdmaBandwidth) -> str:
    proved = Proved(User("root", 0, True, ""), rdma_bandwidth=observed)
    result = by_name(checks, proved, Policy())["rdma_bandwidth"]
    return f"{result.status}: {result.actual}"


def judged_nodes(pairs: list[PairRate], *shown: str) -> dict[str, str]:
    """The nodes that are not well, and these."""
    texts = {node: judged(observed) for node, observed in bandwidths(pairs).items()}
    return {node: t for node, t in texts.items() if node in shown or not t.startswith("ok")}


@pytest.mark.parametrize("case", cases(__file__, "data/rdma_rings.toml"))
def test_which_node_of_a_ring_is_the_cause(case):
    pairs = [pair for row in case["rings"] for pair in ring(**{**row, "low": low(row)})]
    judged_texts = case.get("judged", {})
    assert judged_nodes(pairs, *judged_texts) == judged_texts


def low(row: dict[str, Any]) -> dict[str, float | None]:
    """TOML has no None."""
    return {key: None if rate == "none" else rate for key, rate in row.get("low", {}).items()}


def test_what_a_node_says_of_the_median_does_not_count():
    lying = RdmaRate("mlx5_0/1", 392.0, peers=("b",), median_gbps=900.0, compared=9)
    pairs = [PairRate("a", "b", 400.0, lying)]
    text = "na: not measured on three nodes: mlx5_0/1"
    assert judged_nodes(pairs) == {"a": text, "b": text}


def test_what_stays_unknown_and_what_does_not_apply():
    missing = RdmaBandwidth(error="ib_write_bw is not installed")
    assert judged(missing) == "unknown: ib_write_bw is not installed"
    assert judged(RdmaBandwidth("one node alone")) == "na: one node alone"

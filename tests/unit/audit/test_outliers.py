"""Who differs from its peers: a majority, who has what else, nothing told twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeready.audit import peers as outliers
from nodeready.audit.document import NodeReport, Outlier
from nodeready.subjects import registry
from nodeready.subjects.base import Unknown
from nodeready.subjects.snapshot import Snapshot


@pytest.fixture(autouse=True)
def facts(monkeypatch):
    """Two subjects whose facts are what was observed of them, as it is."""
    for name in ("ptrace", "limits"):
        subject = replace(registry.SUBJECTS[name], compared=dict)
        monkeypatch.setitem(registry.SUBJECTS, name, subject)


def node(name: str, seen: object, group: str = "h100", subject: str = "ptrace") -> NodeReport:
    return NodeReport.of(name, snapshot=Snapshot({subject: seen}), groups=(group,))


def find(*nodes: NodeReport) -> list[Outlier]:
    return list(outliers.find(nodes, ("ptrace", "limits")))


def test_who_differs_from_the_majority_of_its_group():
    nodes = [node(f"gpu{n}", {"driver": "535", "mtu": 9000}) for n in range(8)]
    nodes += [node("gpu8", {"driver": "550", "mtu": 9000}), node("gpu9", {"mtu": 1500})]
    # Peers are those of the same group: these are all alike.
    nodes += [node(f"cpu{n}", {"driver": "", "mtu": 1500}, "cpu") for n in range(3)]
    assert find(*nodes) == [
        Outlier("ptrace.driver", "h100", "535", 8, {"gpu8": "550"}),
        Outlier("ptrace.mtu", "h100", 9000, 9, {"gpu9": 1500}),
    ]


@pytest.mark.parametrize(
    "values",
    [
        ["535"],
        ["535", "550"],
        ["535", "550", "560"],
        ["535", "535", "550", "550"],
        ["535", "535", "535"],
    ],
    ids=["one node", "two that differ", "all differ", "half and half", "all alike"],
)
def test_without_a_majority_nobody_differs(values):
    assert find(*(node(f"gpu{n}", {"driver": v}) for n, v in enumerate(values))) == []


def test_a_missing_device_is_told_once():
    seen = {"devices": "mlx5_0 mlx5_1", "mlx5_1.rate_gbps": 400}
    nodes = [node(f"gpu{n}", seen) for n in range(3)]
    found = find(*nodes, node("gpu3", {"devices": "mlx5_0"}))
    assert [(outlier.fact, outlier.nodes) for outlier in found] == [
        ("ptrace.devices", {"gpu3": "mlx5_0"})
    ]


def test_what_was_not_observed_differs_from_nobody():
    nodes = [node(f"gpu{n}", {"driver": "535"}) for n in range(3)]
    assert find(*nodes, node("gpu3", Unknown("timed out")), NodeReport.of("gpu4")) == []


def test_an_observation_that_makes_no_sense_costs_only_itself():
    nodes = [node(f"gpu{n}", {"driver": "535"}) for n in range(3)]
    assert find(*nodes, node("gpu3", 17)) == []

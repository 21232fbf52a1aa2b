"""A policy learnt from a fleet: its majority, who differs, and a file that is valid as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeready.audit import peers as learning
from nodeready.policy.policy import make_policy
from nodeready.subjects import registry
from nodeready.subjects.base import Unknown
from nodeready.subjects.snapshot import Snapshot

WHEN = "2026-01-01T00:00:00Z"


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """A subject that learns what was observed of it, as it is; no other learns anything."""
    for name, subject in list(registry.SUBJECTS.items()):
        learned = dict if name == "ptrace" else lambda seen: {}
        monkeypatch.setitem(registry.SUBJECTS, name, replace(subject, learned=learned))


def file(**nodes: object) -> str:
    seen = {name: Snapshot({"ptrace": settings}) for name, settings in nodes.items()}
    return learning.render(learning.majority(seen), list(nodes), WHEN)


def read(text: str) -> dict[str, object]:
    found: dict[str, object] = {}
    exec(text, {"__builtins__": {}}, found)  # as pyinfra does with a group_data file
    make_policy(found)
    return found


def test_the_majority_and_who_differs():
    most = {
        "gpu_count": 8,
        "gpu_vbios": ("96.00",),
        "nics": {"eth0": {"mtu": 9000, "driver": "mlx5_core"}, "eth1": {"mtu": 9000}},
    }
    odd = {"gpu_count": 7, "gpu_vbios": ("96.00",), "nics": {"eth0": {"mtu": 1500}}}
    text = file(gpu1=most, gpu2=most, gpu3=most, gpu4=odd)
    assert read(text) == most
    assert "# 3 of 4 nodes; gpu4: 7\ngpu_count = 8\n" in text
    assert "# 4 of 4 nodes\ngpu_vbios = ('96.00',)\n" in text
    assert "# eth0 mtu: 3 of 4 nodes; gpu4: 1500\n" in text
    assert "# eth1 is missing on gpu4\n" in text
    assert text.startswith("# What most of gpu[1-4] (4 nodes) had in common on 2026-")
    assert max(map(len, text.splitlines())) <= 88


def test_no_majority_sets_nothing_and_says_who_has_what():
    text = file(gpu1={"gpu_driver": "535"}, gpu2={"gpu_driver": "550"})
    assert read(text) == {}
    assert "# no majority among 2 nodes: gpu1: '535'; gpu2: '550'\n" in text
    assert "# gpu_driver is not set.\n" in text


def test_a_device_of_few_nodes_is_left_out():
    row = {"mtu": 1500}
    both, one = {"eth0": row, "eth1": row}, {"eth0": row}
    text = file(gpu1={"nics": both}, gpu2={"nics": one}, gpu3={"nics": one})
    assert read(text) == {"nics": one}
    assert "# eth1 is left out: only on gpu1\n" in text


def test_a_subject_that_was_not_observed_teaches_nothing():
    text = file(gpu1=Unknown("timed out"), gpu2={"gpu_count": 8})
    assert read(text) == {"gpu_count": 8}


@pytest.mark.parametrize(
    "settings",
    [
        {"gpu_model": "x'\nimport os  # \x1b[2J"},
        {"gpu_model": "\udcff\u202e"},
        {"gpu_count": 10**9},
        {"nics": {"eth0\n": {"mtu": 1}}},
        {"nics": {"eth0": {"driver": "a\nb"}}},
        {"timezone": "'''\\"},
    ],
)
def test_a_hostile_node_writes_no_line_of_the_file(settings):
    text = file(gpu1=settings)
    assert set(read(text)) <= set(settings)
    assert all(
        line.startswith(("#", f"{next(iter(settings))} = ")) for line in text.splitlines() if line
    )
    assert text.isprintable() or set(text) - {"\n"} == {c for c in text if c.isprintable()}


def test_a_node_with_any_number_of_names_does_not_fill_the_file():
    flood = {"nics": {f"eth{number}": {"mtu": 9000} for number in range(5000)}}
    most = {"nics": {"ib0": {"mtu": 4092}}}
    text = file(gpu1=most, gpu2=most, gpu3=most, gpu4=flood)
    assert read(text) == most
    assert "# and 4980 more that few nodes have are left out\n" in text
    assert len(text) < 5000

"""Each fault of the lab shows in exactly the checks that it should, and in no other.

A healthy node of each profile has nothing to complain of: a check that fails there is a false
alarm, and one that stays ok on a broken node a false pass.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from nodeready.lab import Node
from nodeready.lab.faults import FAULTS
from nodeready.lab.profiles import PROFILES
from nodeready.policy import Policy
from nodeready.subjects import snapshot
from nodeready.subjects.registry import CHANGED, LOOKED_AT
from nodeready.subjects.result import Result
from tests.helpers import observe, on

Fresh = Callable[..., list[Node]]

#: What is only looked at: what a machine has, and not what a deploy makes of it.
HARDWARE = tuple(name for name in LOOKED_AT if name not in CHANGED)

#: What only a GPU's tool can tell: of a device that it does not show, nobody knows.
TOLD = (
    "model", "vbios", "recovery", "ecc_mode", "ecc_errors", "remapped_rows", "retired_pages",
    "pcie", "throttle", "temperature", "persistence", "nvlink",
)  # fmt: skip
UNTOLD = {f"gpus.{name}": "unknown" for name in (*TOLD, "fabric_manager")}


@dataclass(frozen=True)
class Row:
    """What a fault changes: check -> its status. `says` is in what the first of them found."""

    changes: dict[str, str]
    says: str
    policy: dict[str, Any] = field(default_factory=dict)


TABLE = {
    "gpu-gone": Row({"gpus.present": "fail"}, "0000:"),
    "gpu-ecc": Row({"gpus.ecc_errors": "fail"}, "gpu 3"),
    "ecc-off": Row({"gpus.ecc_mode": "fail"}, "gpu 3"),
    "remap-pending": Row({"gpus.remapped_rows": "fail"}, "gpu 3"),
    "pcie-half-width": Row({"gpus.pcie": "fail"}, "x8 of x16"),
    "gpu-hot": Row({"gpus.temperature": "fail", "gpus.throttle": "fail"}, "92 C"),
    "no-persistence": Row({"gpus.persistence": "fail"}, "gpus 0-7"),
    "xid": Row({"gpus.kernel_faults": "fail"}, "Xid 79"),
    "nvidia-smi-hangs": Row(
        {"gpus.tool": "fail", "gpus.present": "unknown", **UNTOLD},
        "timed out",
    ),
    "nvidia-smi-fails": Row(
        {"gpus.tool": "fail", "gpus.present": "unknown", **UNTOLD},
        "Driver/library version mismatch",
    ),
    "nvlink-down": Row({"gpus.nvlink": "fail"}, "gpu 3"),
    "no-fabric-manager": Row({"gpus.fabric_manager": "fail"}, "nv-fabricmanager"),
    "amd-gpu-gone": Row({"gpus.present": "fail"}, "0000:65"),
    "amd-ecc": Row({"gpus.ecc_errors": "fail"}, "gpu 3"),
    "amd-xgmi-down": Row({"gpus.nvlink": "fail"}, "gpus 3,5"),
    "amd-half-width": Row({"gpus.pcie": "fail"}, "x8 of x16"),
    "amd-hang": Row({"gpus.kernel_faults": "fail"}, "ring sdma0 timeout"),
    "numa-balancing": Row({"host.numa_balancing": "warn"}, "1"),
    "ib-down": Row({"rdma.state": "fail"}, "mlx5_3/1: DOWN, Polling"),
    "ib-half-rate": Row({"rdma.rate": "fail"}, "200 Gb/sec (2X NDR) on mlx5_3/1"),
    "ib-firmware": Row({"rdma.firmware": "warn"}, "28.36.1010 on mlx5_3"),
    "roce-down": Row({"rdma.state": "fail"}, "mlx5_3/1: DOWN, Disabled"),
    "bond-half": Row({"nics.link": "fail"}, "ens1f1np1: no link"),
    "wrong-mtu": Row({"nics.mtu": "fail"}, "1400", {"nics": (("eth0", (("mtu", 1500),)),)}),
    "port-taken": Row({"ports.range": "fail"}, "29500 by tensorboard"),
    "ephemeral": Row({"ports.ephemeral": "fail"}, "15000-61000"),
    "firewall": Row({"ports.firewall": "fail"}, "29500-29510 dropped"),
    "clock": Row({"host.clock": "fail"}, "not synchronised"),
    "disk-full": Row({"host.space": "fail"}, "/scratch: 0 % free"),
    "read-only": Row({"host.read_only": "fail"}, "is read-only"),
    "dead-mount": Row({"host.dead_mounts": "fail"}, "/nas"),
    "other-kernel": Row(
        {"host.kernel": "fail"}, "5.4.0-1-generic", {"kernel_release": os.uname().release}
    ),
    # Whoever hangs for a minute is a failure; it has just begun.
    "stuck-process": Row({"host.stuck": "warn"}, "train"),
}

#: Where a fault is tried: in each of its profiles, or in one where the kind does not matter. A
#: tool that hangs takes its whole time limit, so one profile is enough.
CASES = [
    (profile, name)
    for name, fault in FAULTS.items()
    for profile in (
        ("cpu",)
        if "cpu" in fault.profiles
        else fault.profiles[:1]
        if name == "nvidia-smi-hangs"
        else fault.profiles
    )
]


def look(node: Node, policy: Policy) -> dict[str, Result]:
    """What all checks of the hardware say of a node."""
    seen = observe(on(node), policy, HARDWARE)
    return {result.check: result for result in snapshot.judge(seen, policy, HARDWARE)}


@pytest.fixture(scope="module")
def healthy() -> dict[tuple[str, Policy], dict[str, str]]:
    """The statuses on a healthy node, by profile and policy, as they were found."""
    return {}


def test_every_fault_is_in_the_table() -> None:
    assert set(TABLE) == set(FAULTS)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_healthy_node_has_nothing_to_complain_of(fresh_nodes: Fresh, profile: str) -> None:
    results = look(fresh_nodes(1, profile=profile)[0], Policy())
    wrong = {one.check: one for one in results.values() if one.status not in ("ok", "na")}
    assert not wrong
    subjects = {check.partition(".")[0] for check in results}
    assert subjects == set(HARDWARE)


@pytest.mark.parametrize(("profile", "fault"), CASES)
def test_a_fault_shows_where_it_should_and_nowhere_else(
    fresh_nodes: Fresh,
    healthy: dict[tuple[str, Policy], dict[str, str]],
    profile: str,
    fault: str,
) -> None:
    for program in FAULTS[fault].needs:
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed here")
    row = TABLE[fault]
    policy = Policy(**row.policy)
    node = fresh_nodes(1, profile=profile)[0]
    if (profile, policy) not in healthy:
        found = look(node, policy)
        healthy[profile, policy] = {check: one.status for check, one in found.items()}
    before = healthy[profile, policy]
    assert set(before.values()) <= {"ok", "na"}

    node.reset(fault=fault)
    results = look(node, policy)

    changed = {c: one.status for c, one in results.items() if one.status != before.get(c)}
    assert changed == row.changes
    first = results[next(iter(row.changes))]
    assert row.says in first.actual
    assert first.fix
    assert profile != "mi300x" or "nvidia" not in f"{first.source} {first.fix}".lower()

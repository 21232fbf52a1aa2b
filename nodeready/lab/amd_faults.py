"""What can be wrong with AMD's GPUs and what they stand on. It is GPU 3 wherever one is."""

from __future__ import annotations

from nodeready.lab.fault import Fault

AMD = ("mi300x",)

FAULTS = (
    Fault(
        "amd-gpu-gone",
        "PCI shows 8 GPUs, amd-smi 7",
        AMD,
        hardware={"missing": (3,)},
    ),
    Fault(
        "amd-ecc",
        "GPU 3 has had 2 uncorrectable memory errors",
        AMD,
        hardware={"gpus": {3: {"uncorrectable": 2}}},
    ),
    Fault(
        "amd-xgmi-down",
        "the link between GPU 3 and GPU 5 is down",
        AMD,
        hardware={"gpus": {3: {"down": (5,)}, 5: {"down": (3,)}}},
    ),
    Fault(
        "amd-half-width",
        "GPU 3 uses 8 of its 16 PCIe lanes",
        AMD,
        hardware={"gpus": {3: {"pcie_width": 8}}},
    ),
    Fault(
        "amd-hang",
        "GPU 3 hangs: the kernel's log has a ring that timed out",
        AMD,
        hardware={"log": {3: "ring sdma0 timeout, signaled seq=1183, emitted seq=1185"}},
    ),
    Fault(
        "numa-balancing",
        "the kernel moves memory between NUMA nodes under running jobs",
        AMD,
        hardware={"numa_balancing": 1},
    ),
)

"""What can be wrong with NVIDIA's GPUs and what they stand on. It is GPU 3 wherever one is."""

from __future__ import annotations

from nodeready.lab.fault import Fault

BOTH = ("h100", "a100")

FAULTS = (
    Fault(
        "gpu-gone",
        "PCI shows 8 GPUs, nvidia-smi 7",
        BOTH,
        hardware={"gpus": {3: None}},
    ),
    Fault(
        "gpu-ecc",
        "GPU 3 has had 2 uncorrectable memory errors",
        BOTH,
        hardware={"gpus": {3: {"ecc_uncorrectable": 2, "ecc_uncorrectable_aggregate": 2}}},
    ),
    Fault(
        "ecc-off",
        "GPU 3 runs without ECC: a flipped bit is a wrong result",
        BOTH,
        hardware={"gpus": {3: {"ecc": "off"}}},
    ),
    Fault(
        "remap-pending",
        "GPU 3 waits for a reset to replace a row of its memory",
        BOTH,
        hardware={"gpus": {3: {"remap_pending": True}}},
    ),
    Fault(
        "pcie-half-width",
        "GPU 3 uses 8 of its 16 PCIe lanes",
        BOTH,
        hardware={"gpus": {3: {"pcie_width": 8}}},
    ),
    Fault(
        "gpu-hot",
        "GPU 3 has 92 degrees and slows down",
        BOTH,
        hardware={"gpus": {3: {"temperature_c": 92, "throttle": ("hw_thermal_slowdown",)}}},
    ),
    Fault(
        "no-persistence",
        "the driver unloads after each job: persistence is off",
        BOTH,
        hardware={"gpus": {at: {"persistence": "off"} for at in range(8)}},
    ),
    Fault(
        "xid",
        "the kernel's log has Xid 79 of GPU 3: it fell off the bus",
        BOTH,
        hardware={
            "xids": {3: (79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")}
        },
    ),
    Fault(
        "nvidia-smi-hangs",
        "nvidia-smi never ends, whoever asks it to",
        BOTH,
        hardware={"tool": "hangs"},
    ),
    Fault(
        "nvidia-smi-fails",
        "the driver was updated under the running one: nvidia-smi fails",
        BOTH,
        hardware={"tool": "fails"},
    ),
    Fault(
        "nvlink-down",
        "2 NVLinks of GPU 3 are down",
        BOTH,
        hardware={"inactive": ((3, 4), (3, 5))},
    ),
    Fault(
        "no-fabric-manager",
        "nv-fabricmanager does not run: the NVSwitches were never set up",
        BOTH,
        hardware={"fabric_manager": False},
    ),
)

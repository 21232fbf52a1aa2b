"""A node with GPUs as its probe prints it: what is good stands here, a test says what differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nodeready.lab import nvidia
from nodeready.policy import Policy
from nodeready.subjects.base import Output
from nodeready.subjects.gpus import checks
from nodeready.subjects.gpus import facts as gpus
from nodeready.subjects.gpus.gpu import Gpus
from nodeready.subjects.result import Result
from tests.builders.judging import by_name

ADDRESSES = tuple(f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df"))
POLICY = Policy()
SWITCHES = tuple(f"0000:{bus:02x}:00.0" for bus in (7, 8, 9, 10))
PREFIX = "nr_scanned=1\nnr_fabric_manager=4711\n"
DEVICES = "\n".join(
    f"crw-rw-rw- 1 0 0 195, {minor} Jan  6 09:00 /dev/nvidia{name}"
    for minor, name in ((0, "0"), (1, "1"), (255, "ctl"))
)
VERSION = (
    "/proc/driver/nvidia/version:NVRM version: NVIDIA UNIX x86_64 Kernel Module  "
    "535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
    "/proc/driver/nvidia/version:GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
)


def pci(
    address: str,
    vendor: str = "0x10de",
    device: str = "0x2330",
    kind: str = "0x030200",
    *,
    driver: str = "nvidia",
    width: int = 16,
) -> str:
    """What the section prints of one device."""
    uevent = [f"DRIVER={driver}"] if driver else []
    uevent += [f"PCI_CLASS={kind[2:].upper()}", f"PCI_SLOT_NAME={address}"]
    files = {
        "vendor": [vendor],
        "class": [kind],
        "device": [device],
        "uevent": uevent,
        "numa_node": ["0"],
        "current_link_width": [str(width)],
        "max_link_width": ["16"],
        "current_link_speed": ["32.0 GT/s PCIe"],
    }
    return "".join(
        f"/sys/bus/pci/devices/{address}/{name}:{line}\n"
        for name, lines in files.items()
        for line in lines
    )


def switch(address: str) -> str:
    return pci(address, device="0x22a3", kind="0x068000", width=2)


BUS = "".join(map(pci, ADDRESSES))
SERVER = pci("0000:03:00.0", "0x1a03", "0x2000", "0x030000", driver="ast")


@dataclass(frozen=True)
class Node:
    """The answers of the sections; the default is a healthy HGX with eight H100."""

    bus: str = VERSION + "".join(map(pci, ADDRESSES)) + "".join(map(switch, SWITCHES)) + DEVICES
    smi: Output = Output(PREFIX + nvidia.query({"address": address} for address in ADDRESSES), 0)
    links: Output = Output(PREFIX + nvidia.nvlink_status(8), 0)
    amd: Output = Output("", 0)
    kernel_log: Output = Output("", 0)

    def seen(self, policy: Policy = POLICY) -> Gpus:
        """The observation."""
        outputs = {
            "pci_gpus": Output(self.bus, 0),
            "nvidia_smi": self.smi,
            "nvlink": self.links,
            "amd": self.amd,
            "kernel_log": self.kernel_log,
        }
        seen: Gpus = gpus.PROBE.parse(outputs, policy)
        return seen

    def judged(self, **settings: Any) -> dict[str, Result]:
        """The results by the names of the checks."""
        policy = Policy(**settings)
        return by_name(checks, self.seen(policy), policy)


def h100(changes: Mapping[int, Mapping[str, Any]] | None = None, **more: Any) -> Node:
    """An HGX of which the GPUs of ``changes`` differ; ``more``: other answers of it."""
    return replace(Node(), **{"smi": smi(ADDRESSES, changes or {}), **more})


def a100(changes: Mapping[int, Mapping[str, Any]] | None = None) -> Node:
    """The same with A100: Ampere has no fabric state and prints thresholds of temperature."""
    links = Output(PREFIX + nvidia.nvlink_status(8, "a100"), 0)
    return replace(Node(), smi=smi(ADDRESSES, changes or {}, "a100"), links=links)


def smi(
    addresses: Iterable[str], changes: Mapping[int, Mapping[str, Any]], model: str = "h100"
) -> Output:
    shown = [{"address": a, **changes.get(n, {})} for n, a in enumerate(addresses)]
    return Output(PREFIX + nvidia.query(shown, model), 0)


def statuses(results: Mapping[str, Result], status: str) -> set[str]:
    return {name for name, result in results.items() if result.status == status}


def one(results: Mapping[str, Result], name: str) -> tuple[str, str]:
    return results[name].status, results[name].actual


def judged(seen: Gpus, **settings: Any) -> dict[str, Result]:
    """The results for an observation, by the names of the checks."""
    return by_name(checks, seen, Policy(**settings))


def bad(results: Mapping[str, Result]) -> dict[str, str]:
    return {name: result.actual for name, result in results.items() if result.bad}

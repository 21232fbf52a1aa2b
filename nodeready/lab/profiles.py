"""The kinds of node that a lab can have.

To add a profile, write a function that returns its `Hardware` and add a `Profile` to `PROFILES`.
A node of a profile is healthy; its faults are in nodeready.lab.faults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from nodeready.lab import amd, nvidia
from nodeready.lab.hardware import DEFAULT_CMDLINE, SERVER, Hardware, pci_trees


@dataclass(frozen=True)
class Profile:
    name: str
    about: str
    # returns its hardware; arguments are the differences from a healthy node
    make: Callable[..., Hardware]
    cmdline: str = DEFAULT_CMDLINE  # /proc/cmdline, without the newline

    @cached_property
    def hardware(self) -> Hardware:
        """The hardware of a healthy node."""
        return self.make()


def _cpu() -> Hardware:
    return Hardware(trees=pci_trees(*SERVER))


def _nvidia(model: str, about: str) -> Profile:
    return Profile(model, about, partial(nvidia.make, model))


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("cpu", "no accelerator, no InfiniBand", _cpu),
        _nvidia("h100", "8 NVIDIA H100, 4 NVSwitches, 8 InfiniBand NDR ports"),
        _nvidia("a100", "8 NVIDIA A100, 6 NVSwitches, 8 InfiniBand HDR ports"),
        _nvidia("h200", "8 NVIDIA H200, 4 NVSwitches, 8 InfiniBand NDR ports"),
        _nvidia("b200", "8 NVIDIA B200, NVSwitches that it does not show, 8 InfiniBand NDR ports"),
        _nvidia("l40s", "4 NVIDIA L40S cards, 1 InfiniBand HDR100 port"),
        Profile(
            "mi300x",
            "8 AMD Instinct MI300X, 8 RoCE ports",
            amd.make,
            cmdline=f"{DEFAULT_CMDLINE} intel_iommu=on iommu=pt",
        ),
    )
}

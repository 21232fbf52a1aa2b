"""The kinds of node that a lab can have.

To add a profile, write a function that returns its `Hardware` and add a `Profile` to `PROFILES`.
A node of a profile is healthy: what can be wrong with it is in nodeready.lab.faults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

from nodeready.lab import amd, nvidia
from nodeready.lab.hardware import DEFAULT_CMDLINE, SERVER, Hardware, pci_trees


@dataclass(frozen=True)
class Profile:
    """A kind of node.

    make:        its hardware, which is made when a lab with it is started; its arguments are what
                 differs from a healthy node
    environment: lines of /etc/environment, which PAM gives to every session
    cmdline:     /proc/cmdline, without the newline
    """

    name: str
    about: str
    make: Callable[..., Hardware]
    environment: Mapping[str, str] = field(default_factory=dict)
    cmdline: str = DEFAULT_CMDLINE

    @cached_property
    def hardware(self) -> Hardware:
        """What its nodes show."""
        return self.make()


def _cpu() -> Hardware:
    return Hardware(trees=pci_trees(*SERVER))


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("cpu", "no accelerator, no InfiniBand", _cpu),
        Profile(
            "h100",
            "8 NVIDIA H100, 4 NVSwitches, 8 InfiniBand NDR ports",
            partial(nvidia.make, "h100"),
        ),
        Profile(
            "a100",
            "8 NVIDIA A100, 6 NVSwitches, 8 InfiniBand HDR ports",
            partial(nvidia.make, "a100"),
        ),
        Profile(
            "h200",
            "8 NVIDIA H200, 4 NVSwitches, 8 InfiniBand NDR ports",
            partial(nvidia.make, "h200"),
        ),
        Profile(
            "b200",
            "8 NVIDIA B200, NVSwitches that it does not show, 8 InfiniBand NDR ports",
            partial(nvidia.make, "b200"),
        ),
        Profile(
            "l40s",
            "4 NVIDIA L40S cards, 1 InfiniBand HDR100 port",
            partial(nvidia.make, "l40s"),
        ),
        Profile(
            "mi300x",
            "8 AMD Instinct MI300X, 8 RoCE ports",
            amd.make,
            cmdline=f"{DEFAULT_CMDLINE} intel_iommu=on iommu=pt",
        ),
    )
}

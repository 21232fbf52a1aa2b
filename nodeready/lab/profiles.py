"""What hardware a lab node shows: data, laid over /sys and the files of the node.

To add a profile, add a `Profile` to `PROFILES`. `trees` replaces whole directories of /sys;
a stand-in for a vendor's tool is an entry of `files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT_CMDLINE = "BOOT_IMAGE=/boot/vmlinuz root=/dev/sda1 ro quiet"
PCI = "/sys/bus/pci/devices"


@dataclass(frozen=True)
class File:
    """The content of a file of the node, and its mode."""

    content: str
    mode: int = 0o644


@dataclass(frozen=True)
class PciDevice:
    """A PCI function as `/sys/bus/pci/devices/ADDRESS` shows it; numbers as sysfs prints them."""

    address: str
    vendor: str
    device: str
    pci_class: str
    numa_node: int = 0

    def files(self) -> dict[str, str]:
        """Its attribute files."""
        values = {
            "vendor": self.vendor,
            "device": self.device,
            "class": self.pci_class,
            "numa_node": str(self.numa_node),
        }
        return {f"{self.address}/{name}": f"{value}\n" for name, value in values.items()}


@dataclass(frozen=True)
class Profile:
    """The hardware of a node.

    `trees`: directory of /sys -> {relative path: content}; it hides what the machine has there.
    `files`: absolute path -> file, laid over the node's root.
    `environment`: lines of /etc/environment, which PAM gives to every session.
    `cmdline`: /proc/cmdline, without the newline.
    """

    name: str
    about: str
    trees: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    files: Mapping[str, File] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    cmdline: str = DEFAULT_CMDLINE


def pci_tree(*devices: PciDevice) -> dict[str, Mapping[str, str]]:
    """The `trees` of a profile with these PCI devices."""
    attributes: dict[str, str] = {}
    for device in devices:
        attributes |= device.files()
    return {PCI: attributes}


# What any server has: a host bridge, a network card, an NVMe disk.
_SERVER = (
    PciDevice("0000:00:00.0", "0x1022", "0x14a4", "0x060000"),
    PciDevice("0000:01:00.0", "0x14e4", "0x16d7", "0x020000"),
    PciDevice("0000:02:00.0", "0x144d", "0xa80a", "0x010802"),
)

# Bus numbers of the eight accelerators of an 8-way MI300X (OAM) platform, four per socket.
_MI300X_BUSES = ("05", "29", "49", "65", "85", "a5", "c5", "e5")

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("cpu", "no accelerator, no InfiniBand", pci_tree(*_SERVER)),
        Profile(
            "mi300x",
            "8 AMD Instinct MI300X",
            pci_tree(
                *_SERVER,
                *(
                    # Class 0x1200: processing accelerator, the one that Instinct boards bear.
                    PciDevice(f"0000:{bus}:00.0", "0x1002", "0x74a1", "0x120000", at // 4)
                    for at, bus in enumerate(_MI300X_BUSES)
                ),
            ),
        ),
    )
}

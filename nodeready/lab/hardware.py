"""A node's hardware as data: trees of /sys, files, device files, the kernel's log.

Hardware(
    trees={"/sys/class/infiniband": {"mlx5_0/fw_ver": "28.39.1002\\n"}},
    files={"/usr/bin/tool": File("#!/bin/sh\\n…", 0o755)},
    devices={"/dev/kfd": 0o666},
)
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_CMDLINE = "BOOT_IMAGE=/boot/vmlinuz root=/dev/sda1 ro quiet"
PCI = "/sys/bus/pci/devices"
DRIVERS = "/sys/bus/pci/drivers"


def read_toml(name: str) -> dict[str, Any]:
    """The data of a file NAME.toml of this package."""
    path = Path(__file__).with_name(f"{name}.toml")
    data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return data


@dataclass(frozen=True)
class File:
    """The content of a file of the node, and its mode."""

    content: str
    mode: int = 0o644


@dataclass(frozen=True)
class Link:
    """A symbolic link. Tools also read the name that it leads to (`driver`)."""

    target: str


#: The content of a directory: relative path -> text or link. A path that ends with "/" is an
#: empty directory.
Tree = Mapping[str, "str | Link"]


@dataclass(frozen=True)
class Hardware:
    """The hardware of a kind of node."""

    # directory of /sys or /proc -> its content, which hides this machine's
    trees: Mapping[str, Tree] = field(default_factory=dict)
    # absolute path -> file, laid over the node's root
    files: Mapping[str, File] = field(default_factory=dict)
    # device files, all of them as harmless as /dev/null; path -> mode
    devices: Mapping[str, int] = field(default_factory=dict)
    # path below /proc/sys -> value that differs from the distribution's default
    sysctls: Mapping[str, str] = field(default_factory=dict)
    kernel_log: tuple[tuple[float, str], ...] = ()  # seconds since boot and message, for dmesg
    start: str = ""  # shell text that root runs at every start of the node, before its sshd


PCIE = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")


@dataclass(frozen=True)
class PciDevice:
    """A PCI function as `/sys/bus/pci/devices/ADDRESS` shows it; numbers as sysfs prints them."""

    address: str
    vendor: str
    device: str
    pci_class: str
    numa_node: int = 0
    driver: str = ""  # its kernel driver, or ""
    # (current speed, current width, maximum speed, maximum width); None: no PCIe link
    link: tuple[str, int | str, str, int] | None = None
    extra_files: Tree = field(default_factory=dict)  # further files of its directory

    def content(self) -> dict[str, str | Link]:
        """The files of its directory: path -> text or link."""
        bound = f"DRIVER={self.driver}\n" if self.driver else ""
        values: dict[str, str | Link] = {
            "vendor": f"{self.vendor}\n",
            "device": f"{self.device}\n",
            "class": f"{self.pci_class}\n",
            "numa_node": f"{self.numa_node}\n",
            "uevent": f"{bound}PCI_SLOT_NAME={self.address}\n",
            **self.extra_files,
        }
        if self.driver:
            values["driver"] = Link(f"../../drivers/{self.driver}")
        if self.link:
            values |= {name: f"{value}\n" for name, value in zip(PCIE, self.link, strict=True)}
        return {f"{self.address}/{name}": value for name, value in values.items()}


def pci_trees(*devices: PciDevice) -> dict[str, Tree]:
    """The `trees` of these PCI devices and of their drivers."""
    content: dict[str, str | Link] = {}
    drivers: dict[str, str | Link] = {}
    for device in devices:
        content |= device.content()
        if device.driver:
            drivers[f"{device.driver}/{device.address}"] = Link(f"../../devices/{device.address}")
    return {PCI: content, **({DRIVERS: drivers} if drivers else {})}


# The PCI functions of any server: a host bridge, a network card, an NVMe disk.
SERVER = (
    PciDevice("0000:00:00.0", "0x1022", "0x14a4", "0x060000"),
    PciDevice("0000:01:00.0", "0x14e4", "0x16d7", "0x020000"),
    PciDevice("0000:02:00.0", "0x144d", "0xa80a", "0x010802"),
)


def accelerators(
    buses: Sequence[str],
    *,
    vendor: str,
    device: str,
    pci_class: str,
    driver: str,
    speed: str,
    widths: Mapping[int, int],
    unbound: Collection[int],
    unplugged: Collection[int],
) -> list[PciDevice]:
    """The PCI functions of a server's accelerators, four per socket.

    widths: PCIe lanes in use, of 16, by index
    """
    return [
        PciDevice(
            f"0000:{bus}:00.0",
            vendor,
            device,
            pci_class,
            index // 4,
            "" if index in unbound else driver,
            (speed, widths.get(index, 16), speed, 16),
        )
        for index, bus in enumerate(buses)
        if index not in unplugged
    ]


def log_lines(lines: Iterable[str], buses: Sequence[str]) -> list[tuple[float, str]]:
    """Lines of the kernel's log, an hour after the boot; `{gpu[3]}` is the address of GPU 3."""
    addresses = [f"0000:{bus}:00" for bus in buses]
    return [
        (4711.083342 + index, text.format(gpu=addresses) if "{gpu[" in text else text)
        for index, text in enumerate(lines)
    ]

"""Interfaces that only /sys/class/net shows: the ports of a node's adapters.

A node's eth0 and lo are real. The others are the netdevs of its RDMA devices, as sysfs shows
them; `ip` does not know them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nodeready.lab.hardware import Link, Tree
from nodeready.lab.infiniband import Device

CLASS = "/sys/class/net"

_STATISTICS = {
    "rx_bytes": 8129044213,
    "tx_bytes": 7925521180,
    "rx_packets": 6122310,
    "tx_packets": 5931287,
    "rx_errors": 0,
    "tx_errors": 0,
    "rx_dropped": 0,
    "tx_dropped": 0,
    "rx_crc_errors": 0,
}


@dataclass(frozen=True)
class NetDevice:
    """An interface; numbers and words as sysfs prints them.

    kind: ARPHRD of <linux/if_arp.h>: 1 is Ethernet, 32 InfiniBand
    up:   whether it has a link
    more: further files of its directory
    """

    name: str
    pci_address: str
    address: str
    kind: int = 1
    mtu: int = 9000
    speed_mbps: int = 400000
    up: bool = True
    index: int = 10
    carrier_changes: int = 2
    uevent: str = ""
    more: Tree = field(default_factory=dict)

    def content(self) -> dict[str, str | Link]:
        """Its directory."""
        lines: dict[str, object] = {
            "type": self.kind,
            "flags": "0x1003",
            "operstate": "up" if self.up else "down",
            "carrier": int(self.up),
            "carrier_changes": self.carrier_changes,
            "speed": self.speed_mbps if self.up else -1,
            "duplex": "full" if self.up else "unknown",
            "mtu": self.mtu,
            "address": self.address,
            "ifindex": self.index,
            "iflink": self.index,
            "dev_id": "0x0",
            "dev_port": "0",
            "tx_queue_len": 1000,
            "uevent": f"{self.uevent}INTERFACE={self.name}\nIFINDEX={self.index}",
            **{f"statistics/{name}": value for name, value in _STATISTICS.items()},
        }
        content: dict[str, str | Link] = {name: f"{value}\n" for name, value in lines.items()}
        if self.pci_address:
            content["device"] = Link(f"../../../bus/pci/devices/{self.pci_address}")
        content |= self.more
        return {f"{self.name}/{name}": value for name, value in content.items()}


def of_device(device: Device, index: int) -> NetDevice:
    """The interface of an RDMA device, as its port is."""
    infiniband = device.link_layer == "InfiniBand"
    mac = device.guid.replace(":", "")
    pairs = [mac[at : at + 2] for at in range(0, 16, 2)]
    if infiniband:
        address = ":".join(["00:00:10:29:fe:80:00:00:00:00:00:00", *pairs])
    else:
        address = ":".join([*pairs[:3], *pairs[5:]])
    return NetDevice(
        device.netdev,
        device.pci_address,
        address,
        kind=32 if infiniband else 1,
        mtu=4092 if infiniband else 9000,
        speed_mbps=int(device.rate.split()[0]) * 1000,
        up=device.state == "4: ACTIVE",
        index=index,
    )


def bond(
    name: str, address: str, slaves: tuple[str, str], pci: tuple[str, str]
) -> list[NetDevice]:
    """A bond of two ports, and the ports."""
    more: dict[str, str | Link] = {
        "bonding/mode": "802.3ad 4\n",
        "bonding/mii_status": "up\n",
        "bonding/slaves": f"{' '.join(slaves)}\n",
        **{f"lower_{slave}": Link(f"../{slave}") for slave in slaves},
    }
    made = [
        NetDevice(
            name, "", address, speed_mbps=200000, index=30, uevent="DEVTYPE=bond\n", more=more
        )
    ]
    for at, slave in enumerate(slaves):
        under: dict[str, str | Link] = {
            "master": Link(f"../{name}"),
            f"upper_{name}": Link(f"../{name}"),
            "bonding_slave/mii_status": "up\n",
            "bonding_slave/state": "active\n",
        }
        made.append(
            NetDevice(slave, pci[at], address, speed_mbps=100000, index=31 + at, more=under)
        )
    return made


def tree(devices: Iterable[NetDevice]) -> dict[str, str | Link]:
    """The content of /sys/class/net, with the node's real interfaces."""
    content: dict[str, str | Link] = {
        name: Link(f"../../devices/virtual/net/{name}") for name in ("eth0", "lo")
    }
    for device in devices:
        content |= device.content()
    return content

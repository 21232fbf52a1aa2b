"""RDMA devices of lab nodes: healthy trees of /sys/class/infiniband, and what to change in them.

    tree(h100())
    tree(h100(), mlx5_3={"state": "1: DOWN", "phys_state": "2: Polling"})
    tree(a100(), mlx5_0={"rate": "100 Gb/sec (2X HDR)", "counters": {"link_downed": "3"}})

Modelled on a recorded tree of an 8-way H100 node (leptonai/gpud, Apache-2.0,
components/accelerator/nvidia/infiniband/class/testdata) and on what the kernel prints
(drivers/infiniband/core/sysfs.c). In a real tree ``device`` is a link to the PCI function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

#: The directory of /sys that a tree is the content of.
CLASS = "/sys/class/infiniband"

NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"

# Counters of a healthy port; the names are those of the recorded node.
_COUNTERS = {
    "symbol_error": "0",
    "link_error_recovery": "0",
    "link_downed": "0",
    "port_rcv_errors": "0",
    "local_link_integrity_errors": "0",
    "excessive_buffer_overrun_errors": "0",
    "VL15_dropped": "0",
    "port_xmit_discards": "0",
    "port_xmit_wait": "2489603687",
    "port_xmit_data": "230442669431839",
    "port_rcv_data": "230539874932483",
}
_HW_COUNTERS = {
    "rnr_nak_retry_err": "0",
    "local_ack_timeout_err": "0",
    "out_of_sequence": "0",
    "lifespan": "12",
}


@dataclass(frozen=True)
class Device:
    """An RDMA device with one port; every text is as sysfs prints it.

    gids:     (GID, type) by index; what follows is empty
    counters: counter -> text, over those of a healthy port
    """

    name: str
    pci_address: str
    guid: str
    numa_node: int = 0
    hca_type: str = "MT4129"
    board_id: str = "MT_0000000838"
    firmware: str = "28.41.1000"
    driver: str = "mlx5_core"
    link_layer: str = "InfiniBand"
    rate: str = "400 Gb/sec (4X NDR)"
    state: str = "4: ACTIVE"
    phys_state: str = "5: LinkUp"
    lid: str = "0x0"
    sm_lid: str = "0x0"
    netdev: str = ""
    gids: tuple[tuple[str, str], ...] = ()
    counters: Mapping[str, str] = field(default_factory=dict)
    uverbs: str = ""

    def files(self) -> dict[str, str]:
        """Its directory: relative path -> line."""
        port = {
            "state": self.state,
            "phys_state": self.phys_state,
            "rate": self.rate,
            "link_layer": self.link_layer,
            "lid": self.lid,
            "sm_lid": self.sm_lid,
        }
        for index, (gid, kind) in enumerate(self.gids):
            port[f"gids/{index}"] = gid
            port[f"gid_attrs/types/{index}"] = kind
            if self.netdev:
                port[f"gid_attrs/ndevs/{index}"] = self.netdev
        for index in range(len(self.gids), 6):
            port[f"gids/{index}"] = NO_GID
        for names, folder in ((_COUNTERS, "counters"), (_HW_COUNTERS, "hw_counters")):
            port |= {f"{folder}/{name}": self.counters.get(name, names[name]) for name in names}
        files = {
            "fw_ver": self.firmware,
            "hca_type": self.hca_type,
            "board_id": self.board_id,
            "node_guid": self.guid,
            "node_type": "1: CA",
            "node_desc": f"node {self.name}",
            "device/numa_node": str(self.numa_node),
            "device/uevent": f"DRIVER={self.driver}\nPCI_SLOT_NAME={self.pci_address}",
            **{f"ports/1/{name}": value for name, value in port.items()},
        }
        if self.netdev:
            up = self.state == "4: ACTIVE"
            files[f"device/net/{self.netdev}/operstate"] = "up" if up else "down"
            files[f"device/net/{self.netdev}/carrier"] = "1" if up else "0"
        if self.uverbs:
            files[f"device/infiniband_verbs/{self.uverbs}/ibdev"] = self.name
        return files


def tree(devices: Iterable[Device], **changes: Mapping[str, Any]) -> dict[str, str]:
    """The content of /sys/class/infiniband: relative path -> text.

    changes: name of a device -> fields of Device that it has instead. Raises KeyError when there
    is no such device.
    """
    by_name = {device.name: device for device in devices}
    for name, fields in changes.items():
        by_name[name] = replace(by_name[name], **fields)
    return {
        f"{name}/{path}": f"{text}\n"
        for name, device in by_name.items()
        for path, text in device.files().items()
    }


def _guid(at: int) -> str:
    return f"946d:ae03:00f4:{at:02x}a6"


def _infiniband(at: int, bus: str, **fields: Any) -> Device:
    """The compute port number `at` of a node, in an InfiniBand fabric with a subnet manager."""
    return Device(
        name=f"mlx5_{at}",
        pci_address=f"0000:{bus}:00.0",
        guid=_guid(at),
        numa_node=at // 4,
        lid=f"{0x2A0 + at:#x}",
        sm_lid="0x1",
        netdev=f"ib{at}",
        gids=((f"fe80:0000:0000:0000:{_guid(at)}", "IB/RoCE v1"),),
        uverbs=f"uverbs{at}",
        **fields,
    )


def _roce_gids(at: int, subnet: int) -> tuple[tuple[str, str], ...]:
    """The four GIDs of a port with one IPv4 address."""
    local = f"fe80:0000:0000:0000:966d:aeff:fef4:{at:02x}a6"
    ipv4 = f"0000:0000:0000:0000:0000:ffff:0a{subnet:02x}:{at:02x}0b"
    return tuple((gid, kind) for gid in (local, ipv4) for kind in ("IB/RoCE v1", "RoCE v2"))


def bond() -> Device:
    """The management interface of a GPU node: two ports of a BlueField as one Ethernet device."""
    return Device(
        name="mlx5_bond_0",
        pci_address="0000:29:00.0",
        guid="b8e9:2403:00c1:5e10",
        hca_type="MT41692",
        board_id="MT_0000000884",
        firmware="32.38.3056",
        link_layer="Ethernet",
        rate="200 Gb/sec (2X NDR)",
        netdev="bond0",
        gids=_roce_gids(0, 0),
        uverbs="uverbs8",
    )


def h100() -> tuple[Device, ...]:
    """Eight ConnectX-7 with InfiniBand NDR, and the management bond."""
    buses = ("18", "40", "4f", "5e", "9a", "c0", "ce", "dc")
    return (*(_infiniband(at, bus) for at, bus in enumerate(buses)), bond())


def a100() -> tuple[Device, ...]:
    """Eight ConnectX-6 with InfiniBand HDR."""
    buses = ("0c", "12", "4b", "54", "8d", "94", "ba", "cc")
    return tuple(
        _infiniband(
            at,
            bus,
            hca_type="MT4123",
            board_id="MT_0000000222",
            firmware="20.35.1012",
            rate="200 Gb/sec (4X HDR)",
        )
        for at, bus in enumerate(buses)
    )


def mi300x() -> tuple[Device, ...]:
    """Eight ConnectX-7 with 400G Ethernet (RoCE), each in a subnet of its own."""
    buses = ("09", "2d", "4d", "69", "89", "a9", "c9", "e9")
    return tuple(
        Device(
            name=f"mlx5_{at}",
            pci_address=f"0000:{bus}:00.0",
            guid=_guid(at),
            numa_node=at // 4,
            link_layer="Ethernet",
            netdev=f"eth{at + 1}",
            gids=_roce_gids(at, at + 1),
            uverbs=f"uverbs{at}",
        )
        for at, bus in enumerate(buses)
    )

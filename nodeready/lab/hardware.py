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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_CMDLINE = "BOOT_IMAGE=/boot/vmlinuz root=/dev/sda1 ro quiet"
PCI = "/sys/bus/pci/devices"
DRIVERS = "/sys/bus/pci/drivers"


def read_text(name: str) -> str:
    """A file of this package."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def read_toml(name: str) -> dict[str, Any]:
    """The data of a file NAME.toml of this package."""
    data: dict[str, Any] = tomllib.loads(read_text(f"{name}.toml"))
    return data


@dataclass(frozen=True)
class File:
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
    card: PciDevice,
    gpus: Mapping[int, Mapping[str, Any]],
    unbound: Collection[int],
    unplugged: Collection[int],
) -> list[PciDevice]:
    """The PCI functions of a server's accelerators, four per socket, each like the card.

    gpus: by index, some with the PCIe lanes in use, of 16 (``pcie_width``)
    """
    assert card.link is not None
    return [
        replace(
            card, address=f"0000:{bus}:00.0", numa_node=index // 4,
            driver="" if index in unbound else card.driver,
            link=(card.link[0], gpus.get(index, {}).get("pcie_width", 16), *card.link[2:]),
        )
        for index, bus in enumerate(buses)
        if index not in unplugged
    ]  # fmt: skip


def log_lines(lines: Iterable[str], buses: Sequence[str]) -> list[tuple[float, str]]:
    """Lines of the kernel's log, an hour after the boot; `{gpu[3]}` is the address of GPU 3."""
    addresses = [f"0000:{bus}:00" for bus in buses]
    return [
        (4711.083342 + index, text.format(gpu=addresses) if "{gpu[" in text else text)
        for index, text in enumerate(lines)
    ]


# --- RDMA devices: healthy trees of /sys/class/infiniband, and what to change in them.
#
#     ib_tree(ports_of("h100"))
#     ib_tree(ports_of("h100"), mlx5_3={"state": "1: DOWN", "phys_state": "2: Polling"})
#     ib_tree(ports_of("a100"), mlx5_0={"counters": {"link_downed": "3"}})
#
# Modelled on a recorded tree of an 8-way H100 node (leptonai/gpud, Apache-2.0,
# components/accelerator/nvidia/infiniband/class/testdata) and on what the kernel prints
# (drivers/infiniband/core/sysfs.c). In a real tree ``device`` is a link to the PCI function.

IB_CLASS = "/sys/class/infiniband"  # the directory of /sys that a tree is the content of

NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"

# Counters of a healthy port; the names are those of the recorded node.
_ERRORS = (
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors", "VL15_dropped",
    "port_xmit_discards",
)  # fmt: skip
_COUNTERS = {
    **dict.fromkeys(_ERRORS, "0"), "port_xmit_wait": "2489603687",
    "port_xmit_data": "230442669431839", "port_rcv_data": "230539874932483",
}  # fmt: skip
_HW_ERRORS = ("rnr_nak_retry_err", "local_ack_timeout_err", "out_of_sequence")
_HW_COUNTERS = {**dict.fromkeys(_HW_ERRORS, "0"), "lifespan": "12"}

# PCI device id and link, by hca_type: ConnectX-7, ConnectX-6, BlueField-3.
_MODELS = {
    "MT4129": ("0x1021", "32.0 GT/s PCIe"),
    "MT4123": ("0x101b", "16.0 GT/s PCIe"),
    "MT41692": ("0xa2dc", "32.0 GT/s PCIe"),
}


@dataclass(frozen=True)
class Device:
    """An RDMA device with one port; every text is as sysfs prints it."""

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
    gids: tuple[tuple[str, str], ...] = ()  # (GID, type) by index; further indexes are empty
    # counter -> text, over those of a healthy port
    counters: Mapping[str, str] = field(default_factory=dict)
    uverbs: str = ""
    lanes: int | str = 16  # in use, of 16
    speed: str = ""  # of each lane; "" is the maximum of the model

    @property
    def pcie(self) -> tuple[str, int | str, str, int]:
        """The PCIe link, as `PciDevice` has it."""
        fastest = _MODELS[self.hca_type][1] if self.hca_type in _MODELS else "16.0 GT/s PCIe"
        return self.speed or fastest, self.lanes, fastest, 16

    def files(self) -> dict[str, str]:
        """The files of its directory: relative path -> line."""
        names = ("state", "phys_state", "rate", "link_layer", "lid", "sm_lid")
        port: dict[str, str] = {name: getattr(self, name) for name in names}
        for index, (gid, kind) in enumerate(self.gids):
            port[f"gids/{index}"] = gid
            port[f"gid_attrs/types/{index}"] = kind
            if self.netdev:
                port[f"gid_attrs/ndevs/{index}"] = self.netdev
        for index in range(len(self.gids), 6):
            port[f"gids/{index}"] = NO_GID
        for values, folder in ((_COUNTERS, "counters"), (_HW_COUNTERS, "hw_counters")):
            port |= {f"{folder}/{name}": self.counters.get(name, values[name]) for name in values}
        files = {
            "fw_ver": self.firmware, "hca_type": self.hca_type, "board_id": self.board_id,
            "node_guid": self.guid, "node_type": "1: CA", "node_desc": f"node {self.name}",
            "device/numa_node": str(self.numa_node),
            "device/uevent": f"DRIVER={self.driver}\nPCI_SLOT_NAME={self.pci_address}",
            **{f"ports/1/{name}": value for name, value in port.items()},
            **{f"device/{name}": f"{value}" for name, value in zip(PCIE, self.pcie, strict=True)},
        }  # fmt: skip
        if self.netdev:
            up = self.state == "4: ACTIVE"
            files[f"device/net/{self.netdev}/operstate"] = "up" if up else "down"
            files[f"device/net/{self.netdev}/carrier"] = "1" if up else "0"
        if self.uverbs:
            files[f"device/infiniband_verbs/{self.uverbs}/ibdev"] = self.name
        return files


def ib_tree(devices: Iterable[Device], **changes: Mapping[str, Any]) -> dict[str, str]:
    """The content of /sys/class/infiniband: relative path -> text.

    changes: name of a device -> fields of Device. Raises KeyError for another name.
    """
    by_name = {device.name: device for device in devices}
    for name, fields in changes.items():
        by_name[name] = replace(by_name[name], **fields)
    return {
        f"{name}/{path}": f"{text}\n"
        for name, device in by_name.items()
        for path, text in device.files().items()
    }


def _guid(index: int) -> str:
    return f"946d:ae03:00f4:{index:02x}a6"


def _port(index: int, bus: str, netdev: str, **fields: Any) -> Device:
    """The compute port `index` of a node."""
    guid, address = _guid(index), f"0000:{bus}:00.0"
    named = {"numa_node": index // 4, "netdev": netdev, "uverbs": f"uverbs{index}", **fields}
    return Device(f"mlx5_{index}", address, guid, **named)


def _infiniband(index: int, bus: str, **fields: Any) -> Device:
    """The compute port `index` of a node, in an InfiniBand fabric with a subnet manager."""
    gids = ((f"fe80:0000:0000:0000:{_guid(index)}", "IB/RoCE v1"),)
    lid = f"{0x2A0 + index:#x}"
    return _port(index, bus, f"ib{index}", lid=lid, sm_lid="0x1", gids=gids, **fields)


def _roce_gids(index: int, subnet: int) -> tuple[tuple[str, str], ...]:
    """The four GIDs of a port with one IPv4 address."""
    local = f"fe80:0000:0000:0000:966d:aeff:fef4:{index:02x}a6"
    ipv4 = f"0000:0000:0000:0000:0000:ffff:0a{subnet:02x}:{index:02x}0b"
    return tuple((gid, kind) for gid in (local, ipv4) for kind in ("IB/RoCE v1", "RoCE v2"))


def ib_bond() -> Device:
    """The management interface of a GPU node: two ports of a BlueField as one Ethernet device."""
    return Device(
        "mlx5_bond_0", "0000:29:00.0", "b8e9:2403:00c1:5e10", hca_type="MT41692",
        board_id="MT_0000000884", firmware="32.38.3056", link_layer="Ethernet",
        rate="200 Gb/sec (2X NDR)", netdev="bond0", gids=_roce_gids(0, 0), uverbs="uverbs8",
    )  # fmt: skip


def _roce(index: int, bus: str, **fields: Any) -> Device:
    """The compute port `index` of a node, on Ethernet in its own subnet."""
    return _port(index, bus, f"eth{index + 1}", gids=_roce_gids(index, index + 1), **fields)


#: Board of GPUs -> the buses of its server's ports, `bond` with the management bond, and fields of
#: `Device` that differ.
_SERVERS = read_toml("adapters")


def ports_of(board: str) -> tuple[Device, ...]:
    """The RDMA devices of a server with these GPUs."""
    fields = dict(_SERVERS[board])
    buses, has_bond = fields.pop("buses"), fields.pop("bond", False)
    make = _roce if fields.get("link_layer") == "Ethernet" else _infiniband
    devices = [make(index, bus, **fields) for index, bus in enumerate(buses)]
    return (*devices, *([ib_bond()] if has_bond else ()))


# --- Network interfaces of the RDMA devices: /sys/class/net shows them, and `ip` does not.

CLASS = "/sys/class/net"

_STATISTICS = {
    "rx_bytes": 8129044213, "tx_bytes": 7925521180, "rx_packets": 6122310, "tx_packets": 5931287,
    **dict.fromkeys(("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_crc_errors"), 0),
}  # fmt: skip


@dataclass(frozen=True)
class NetDevice:
    """An interface; numbers and words as sysfs prints them."""

    name: str
    pci_address: str
    address: str
    kind: int = 1  # ARPHRD of <linux/if_arp.h>: 1 is Ethernet, 32 InfiniBand
    mtu: int = 9000
    speed_mbps: int = 400000
    up: bool = True  # whether it has a link
    index: int = 10
    carrier_changes: int = 2
    uevent: str = ""
    extra_files: Tree = field(default_factory=dict)  # further files of its directory

    def content(self) -> dict[str, str | Link]:
        """The files of its directory in /sys/class/net: path -> text or link."""
        lines: dict[str, object] = {
            "type": self.kind, "flags": "0x1003", "operstate": "up" if self.up else "down",
            "carrier": int(self.up), "carrier_changes": self.carrier_changes,
            "speed": self.speed_mbps if self.up else -1,
            "duplex": "full" if self.up else "unknown",
            "mtu": self.mtu, "address": self.address, "ifindex": self.index, "iflink": self.index,
            "dev_id": "0x0", "dev_port": "0", "tx_queue_len": 1000,
            "uevent": f"{self.uevent}INTERFACE={self.name}\nIFINDEX={self.index}",
            **{f"statistics/{name}": value for name, value in _STATISTICS.items()},
        }  # fmt: skip
        content: dict[str, str | Link] = {name: f"{value}\n" for name, value in lines.items()}
        if self.pci_address:
            content["device"] = Link(f"../../../bus/pci/devices/{self.pci_address}")
        content |= self.extra_files
        return {f"{self.name}/{name}": value for name, value in content.items()}


def of_device(device: Device, index: int) -> NetDevice:
    """The interface of an RDMA device, in the state of its port."""
    mac = device.guid.replace(":", "")
    pairs = [mac[start : start + 2] for start in range(0, 16, 2)]
    address, kind, mtu = ":".join([*pairs[:3], *pairs[5:]]), 1, 9000
    if device.link_layer == "InfiniBand":
        address = ":".join(["00:00:10:29:fe:80:00:00:00:00:00:00", *pairs])
        kind, mtu = 32, 4092
    speed_mbps, up = int(device.rate.split()[0]) * 1000, device.state == "4: ACTIVE"
    return NetDevice(device.netdev, device.pci_address, address, kind, mtu, speed_mbps, up, index)


def bond(
    name: str, address: str, slaves: tuple[str, str], pci: tuple[str, str]
) -> list[NetDevice]:
    """A bond, and its two ports."""
    bond_files: dict[str, str | Link] = {
        "bonding/mode": "802.3ad 4\n",
        "bonding/mii_status": "up\n",
        "bonding/slaves": f"{' '.join(slaves)}\n",
        **{f"lower_{slave}": Link(f"../{slave}") for slave in slaves},
    }
    fields: dict[str, Any] = {"uevent": "DEVTYPE=bond\n", "extra_files": bond_files}
    interfaces = [NetDevice(name, "", address, speed_mbps=200000, index=30, **fields)]
    for index, slave in enumerate(slaves):
        files: dict[str, str | Link] = {
            "master": Link(f"../{name}"), f"upper_{name}": Link(f"../{name}"),
            "bonding_slave/mii_status": "up\n", "bonding_slave/state": "active\n",
        }  # fmt: skip
        fields = {"speed_mbps": 100000, "index": 31 + index, "extra_files": files}
        interfaces.append(NetDevice(slave, pci[index], address, **fields))
    return interfaces


def tree(devices: Iterable[NetDevice]) -> dict[str, str | Link]:
    """The content of /sys/class/net, with the node's real interfaces."""
    content: dict[str, str | Link] = {
        name: Link(f"../../devices/virtual/net/{name}") for name in ("eth0", "lo")
    }
    for device in devices:
        content |= device.content()
    return content


# --- RDMA adapters in every class of /sys where they show: PCI, RDMA, network.

VERBS = "/sys/class/infiniband_verbs"
_VENDOR = "0x15b3"

_BOND_PORTS = ("ens1f0np0", "ens1f1np1")


def adapters(
    devices: Iterable[Device],
    ports: Mapping[str, Mapping[str, Any]],
    nics: Mapping[str, Mapping[str, Any]],
) -> tuple[list[Device], list[NetDevice]]:
    """The RDMA devices and the interfaces of a node, with the fields that differ.

    A device with an empty PCI address is missing. One without a driver is on the bus only, and has
    no interface.
    """
    changed = [replace(device, **ports.get(device.name, {})) for device in devices]
    present = [device for device in changed if device.pci_address]
    changed_nics = []
    for nic in interfaces([device for device in present if device.driver]):
        fields = dict(nics.get(nic.name, {}))
        fields["extra_files"] = {**nic.extra_files, **fields.get("extra_files", {})}
        changed_nics.append(replace(nic, **fields))
    return present, changed_nics


def interfaces(devices: Iterable[Device]) -> list[NetDevice]:
    """Their netdevs: one for each port, and for a bond its two ports as well."""
    nics: list[NetDevice] = []
    for index, device in enumerate(devices):
        if device.netdev.startswith("bond"):
            second = f"{device.pci_address[:-1]}1"
            mac = of_device(device, 0).address
            nics += bond(device.netdev, mac, _BOND_PORTS, (device.pci_address, second))
        elif device.netdev:
            nics.append(of_device(device, 10 + index))
    return nics


def pci(devices: Sequence[Device], nics: Sequence[NetDevice]) -> list[PciDevice]:
    """The PCI functions; the second port of a bond has a separate function."""
    functions = [_function(d, d.pci_address, nics, _pci_files(d)) for d in devices]
    addresses = {device.pci_address for device in devices}
    for address in sorted({nic.pci_address for nic in nics} - addresses - {""}):
        first = next(device for device in devices if device.pci_address[:-1] == address[:-1])
        functions.append(_function(first, address, nics, {}))
    return functions


def _pci_files(device: Device) -> Tree:
    """The files of the RDMA device in the directory of its PCI function."""
    if not device.driver:
        return {}
    start = f"{device.name}/device/"
    files: dict[str, str | Link] = {
        path.removeprefix(start): text
        for path, text in ib_tree([device]).items()
        if path.startswith(start) and not path.startswith(f"{start}net/")
    }
    files[f"infiniband/{device.name}"] = Link(f"../../../../../class/infiniband/{device.name}")
    return files


def _function(device: Device, address: str, nics: Sequence[NetDevice], files: Tree) -> PciDevice:
    model, _ = _MODELS[device.hca_type]
    pci_class = "0x020700" if device.link_layer == "InfiniBand" else "0x020000"
    links = {
        f"net/{nic.name}": Link(f"../../../../../class/net/{nic.name}")
        for nic in nics
        if nic.pci_address == address
    }
    place = device.numa_node, device.driver, device.pcie
    return PciDevice(address, _VENDOR, model, pci_class, *place, {**files, **links})


def trees(devices: Sequence[Device], nics: Sequence[NetDevice]) -> dict[str, Tree]:
    """The classes of /sys that show them."""
    devices = [device for device in devices if device.driver]
    ports: dict[str, str | Link] = {
        path: text for path, text in ib_tree(devices).items() if path.split("/")[1] != "device"
    }
    verbs: dict[str, str | Link] = {}
    for device in devices:
        ports[f"{device.name}/device"] = Link(f"../../../bus/pci/devices/{device.pci_address}")
        if device.uverbs:
            target = f"../../bus/pci/devices/{device.pci_address}/infiniband_verbs/{device.uverbs}"
            verbs[device.uverbs] = Link(target)
    return {IB_CLASS: ports, VERBS: verbs, CLASS: tree(nics)}


def device_files(devices: Iterable[Device]) -> dict[str, int]:
    """The device files for user space: path -> mode."""
    uverbs = [device.uverbs for device in devices if device.uverbs and device.driver]
    names = ["rdma_cm", *uverbs]
    return {f"/dev/infiniband/{name}": 0o666 for name in names}

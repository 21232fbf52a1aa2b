"""One RDMA device and its ports, from /sys/class/infiniband or /sys/class/cxi.

Sources: drivers/infiniband/core/sysfs.c and Documentation/ABI/stable/sysfs-class-infiniband of
Linux; for Slingshot, cxi_stat(1) of HPE's driver, which reads the same files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

#: Error counter of a link -> its maximum: the counters have 16, 8 or 4 bits and stay at their
#: maximum (sysfs.c, PORT_PMA_ATTR).
PMA_COUNTERS = {
    "symbol_error": 65535,
    "link_downed": 255,
    "local_link_integrity_errors": 15,
    "excessive_buffer_overrun_errors": 15,
}

#: Error counters in hw_counters, where a driver has them: 64 bits, never full.
HW_COUNTERS = ("rnr_nak_retry_err",)
# Driver of the PCI function -> kind of the RDMA device: the name of the RDMA driver, where the
# RDMA driver uses the adapter's Ethernet driver.
_KINDS = {
    "mlx5_core": "mlx5", "mlx4_core": "mlx4", "bnxt_en": "bnxt_re", "ice": "irdma",
    "i40e": "irdma", "idpf": "irdma", "hns3": "hns", "qede": "qedr", "cxgb4": "iw_cxgb4",
    "cxi_ss1": "cxi",
}  # fmt: skip

#: Directory below a device's own (which is "") -> file -> its first line.
Files = Mapping[str, Mapping[str, str]]
EMPTY_GID = re.compile(r"[0:]*$")
_NET = "device/net/"
_PORT_LINE = re.compile(r"ports/([0-9]{1,3})(?:/|$)")
_NUMBER = re.compile(r"(?:[0-9]{1,20}|0x[0-9a-fA-F]{1,16})")
_RATE = re.compile(r"(?<![0-9.])([0-9]{1,5}(?:\.[0-9]{1,2})?) ?G")


@dataclass(frozen=True)
class Gid:
    """An address of a port."""

    index: int  # in the port's table
    gid: str  # the address
    type: str  # ``IB/RoCE v1`` or ``RoCE v2``; "": not readable


@dataclass(frozen=True)
class Netdev:
    """A network interface of a device's PCI function."""

    name: str  # of the interface
    operstate: str  # as in `nics`
    carrier: bool | None  # whether it has a link; None: it is administratively down


@dataclass(frozen=True)
class RdmaPort:
    """A port; "" and None: the kernel has no value."""

    device: str  # name of the device
    port: int  # number of the port, from 1
    # "ACTIVE", the only state that carries traffic; "DOWN"; "INIT" and "ARMED": the port has a
    # link, and waits for the subnet manager
    state: str = ""
    phys_state: str = ""  # "LinkUp", "Polling" (no light from the far end), "Disabled", "Sleep", …
    rate_gbps: float | None = None  # of the current link, lanes times speed, in Gbit/s
    rate_text: str = ""  # as the kernel prints it, ``400 Gb/sec (4X NDR)``
    link_layer: str = ""  # "InfiniBand", "Ethernet" (RoCE, iWARP), "Slingshot", "Unknown" (EFA)
    lid: int | None = None  # the port's local identifier, given by the subnet manager
    sm_lid: int | None = None  # the local identifier of the subnet manager
    netdev: str | None = None  # the port's network interface, where its GIDs name one
    gids: tuple[Gid, ...] = ()  # of an Ethernet port, at most the first 16
    # those of PMA_COUNTERS and HW_COUNTERS that the port has; None: unreadable
    counters: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The port's name in a policy: "mlx5_0/1"."""
        return f"{self.device}/{self.port}"

    @property
    def active(self) -> bool:
        """Whether the port can carry traffic."""
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class PcieLink:
    """The PCIe link of a device; None: the kernel has no value."""

    width: int | None = None  # the current lanes, and GT/s of each
    width_max: int | None = None  # the card's maximum
    speed: float | None = None  # the current lanes, and GT/s of each
    speed_max: float | None = None  # the card's maximum
    slot_width_max: int | None = None  # the slot's maximum, where sysfs shows it
    slot_speed_max: float | None = None  # likewise
    unread: str = ""  # the text in the place of a value that every link has

    @property
    def is_readable(self) -> bool:
        """Whether the link can be judged: a virtual function has no values."""
        return self.width is not None and not self.unread

    @property
    def lanes(self) -> int:
        """The lanes that card and slot have."""
        return min(self.width_max or 0, self.slot_width_max or self.width_max or 0)

    @property
    def possible(self) -> float:
        """The speed in GT/s that card and slot support; 0: unknown."""
        return min(self.speed_max or 0.0, self.slot_speed_max or self.speed_max or 0.0)

    @property
    def text(self) -> str:
        """``16 lanes at 32 GT/s``."""
        lanes = f"{self.width} lanes" if self.width != 1 else "1 lane"
        return f"{lanes} at {self.speed:g} GT/s" if self.speed else lanes


@dataclass(frozen=True)
class RdmaDevice:
    """An RDMA device."""

    name: str  # of the device, ``mlx5_0``
    # "mlx5", "efa", "hfi1" (Omni-Path), "cxi" (Slingshot), "bnxt_re", "irdma", …; "software" (rxe,
    # siw): without an adapter
    kind: str
    hca_type: str = ""  # the adapter's model, "MT4129"
    firmware: str = ""  # version of its firmware
    board_id: str = ""  # the board, by its maker's id
    node_type: str = ""  # "CA", or "RNIC" for iWARP
    node_guid: str = ""  # of the device
    # the text that the device gives the subnet manager, often with the host name
    node_desc: str = ""
    driver: str = ""  # of the PCI function
    pci_address: str = ""  # "0000:5e:00.0"
    numa_node: int | None = None  # to which the adapter is attached
    # a virtual function on the host of its physical function, for a virtual machine
    virtual: bool = False
    uverbs: bool = False  # programs can open the device
    netdevs: tuple[Netdev, ...] = ()  # network interfaces of its PCI function
    ports: tuple[RdmaPort, ...] = ()  # of the device
    image_guid: str = ""  # of the whole adapter, which may use several slots; "": not readable
    pcie: PcieLink | None = None  # the link of the PCI function; None: sysfs shows none

    @property
    def board(self) -> tuple[str, str]:
        """The product: model and board, equal for equal adapters; "": not readable."""
        return self.hca_type, self.board_id

    @property
    def slot(self) -> str:
        """The PCI slot, "0000:5e:00": the functions of one card share it."""
        return self.pci_address.rpartition(".")[0] or self.name


def number(text: str | None) -> int | None:
    """A whole number, decimal or with 0x; None for any other text."""
    if text is None or not _NUMBER.fullmatch(text):
        return None
    return int(text, 16 if text.startswith("0x") else 10)


def gbps(text: str) -> float | None:
    """The number of "400 Gb/sec (4X NDR)", "200 Gbps", "BS_200G"; None without a number."""
    match = _RATE.search(text)
    return float(match[1]) if match else None


#: Lanes that a link can have, and GT/s of the generations of PCI Express (PCI Express Base
#: Specification, Link Status Register; Linux' drivers/pci/probe.c, pcie_link_speed).
_LANES = {str(lanes): lanes for lanes in (1, 2, 4, 8, 12, 16, 32)}
_SPEEDS = (2.5, 5.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9])?) GT/s(?: PCIe)?")
#: The kernel's words for a link without a description: of a virtual function (registers of zeros),
#: or of a hypervisor's device. 255: PCIE_LNK_WIDTH_UNKNOWN of include/linux/pci.h.
_NO_LANES = {"current_link_width": ("0",), "max_link_width": ("0", "255")}
_NO_SPEED = ("Unknown", "Unknown speed")
_LINK = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed")


def _pcie(files: Files) -> PcieLink | None:
    """The link of the device's PCI function; thousands of nodes have equal links."""
    values, slot_values = files.get("device", {}), files.get("device/..", {})
    if not any(name in values for name in _LINK):
        return None
    return _link(
        tuple((name, values[name]) for name in _LINK if name in values),
        tuple((name, slot_values[name]) for name in _LINK if name in slot_values),
    )


@lru_cache(maxsize=256)
def _link(function: tuple[tuple[str, str], ...], port: tuple[tuple[str, str], ...]) -> PcieLink:
    """The link from the attributes of the PCI function and of the port above it.

    A function that fell off the bus shows all ones, 63 lanes. A kernel older than the card's speed
    shows neither speed. A link that shows only one of two values is broken.
    """
    values, slot_values = dict(function), dict(port)
    unread: list[str] = []

    def lanes(attributes: Mapping[str, str], name: str) -> int | None:
        text = attributes.get(name, "")
        if text not in _LANES and text not in _NO_LANES[name]:
            unread.append(f"{name} {text[:40] or 'cannot be read'}")
        return _LANES.get(text)

    def speed(attributes: Mapping[str, str], name: str) -> float | None:
        text = attributes.get(name, "")
        match = _SPEED.fullmatch(text)
        gigatransfers = float(match[1]) if match and float(match[1]) in _SPEEDS else None
        if gigatransfers is None and text not in _NO_SPEED:
            unread.append(f"{name} {text[:40] or 'cannot be read'}")
        return gigatransfers

    width, widest = (lanes(values, name) for name in _LINK[:2])
    current, fastest = (speed(values, name) for name in _LINK[2:])
    slot_width = lanes(slot_values, "max_link_width") if "max_link_width" in slot_values else None
    slot_speed = speed(slot_values, "max_link_speed") if "max_link_speed" in slot_values else None
    if not unread and (width is not None or current is not None):
        if width is None or widest is None or width > widest:
            unread.append(f"{width or 0} lanes of {widest or 0}")
        if (current is None) != (fastest is None) or (current or 0.0) > (fastest or 0.0):
            unread.append(f"{current or 0:g} GT/s of {fastest or 0:g}")
    # A hypervisor may show a port with less than the current link above the device.
    if slot_width is not None and slot_width < (width or 0):
        slot_width = None
    if slot_speed is not None and slot_speed < (current or 0.0):
        slot_speed = None
    return PcieLink(width, widest, current, fastest, slot_width, slot_speed, "; ".join(unread))


def _word(text: str) -> str:
    """ "ACTIVE" of "4: ACTIVE"."""
    word = text.partition(":")[2] if re.match(r"[0-9]+:", text) else text
    return sys.intern(word.strip())


def _counters(files: Files, directory: str) -> dict[str, int | None]:
    """The counters for the checks. The kernel shows all PMA_COUNTERS or none of them."""
    counters: dict[str, int | None] = {}
    values = files.get(f"{directory}/counters", {})
    if any(name in values for name in PMA_COUNTERS):
        counters = {name: number(values.get(name)) for name in PMA_COUNTERS}
    hw_values = files.get(f"{directory}/hw_counters", {})
    counters.update({name: number(hw_values[name]) for name in HW_COUNTERS if name in hw_values})
    return counters


def _gids(files: Files, directory: str) -> tuple[Gid, ...]:
    types = files.get(f"{directory}/gid_attrs/types", {})
    gids = []
    for name, text in files.get(f"{directory}/gids", {}).items():
        index = number(name)
        if index is not None and not EMPTY_GID.match(text):
            gids.append(Gid(index, text, types.get(name, "")))
    return tuple(sorted(gids, key=lambda gid: gid.index))


def _port(device: str, index: int, files: Files) -> RdmaPort:
    directory = f"ports/{index}"
    values = files.get(directory, {})
    rate = values.get("rate", "")
    return RdmaPort(
        device=device,
        port=index,
        state=_word(values.get("state", "")),
        phys_state=_word(values.get("phys_state", "")),
        rate_gbps=gbps(rate),
        rate_text=rate,
        link_layer=values.get("link_layer", ""),
        lid=number(values.get("lid")),
        sm_lid=number(values.get("sm_lid")),
        netdev=files.get(f"{directory}/gid_attrs/ndevs", {}).get("0"),
        gids=_gids(files, directory),
        counters=_counters(files, directory),
    )


def _slingshot(device: str, netdevs: tuple[Netdev, ...], files: Files) -> RdmaPort:
    """The only port of a cxi device; its state is the driver's, else that of its interface."""
    values = files.get("device/port", {})
    link = values.get("link") or next((netdev.operstate for netdev in netdevs), "")
    speed = values.get("speed", "")
    return RdmaPort(
        device=device,
        port=1,
        state={"up": "ACTIVE", "down": "DOWN"}.get(link, link),
        rate_gbps=gbps(speed),
        rate_text=speed,
        link_layer="Slingshot",
        netdev=next((netdev.name for netdev in netdevs), None),
    )


def parse_device(name: str, files: Files, cxi: bool, virtual: bool, uverbs: bool) -> RdmaDevice:
    """The device with these files.

    A value that is missing or makes no sense is "" or None: the kernel refuses to read some files
    of a faulty port, and no driver has all files.
    """
    values, function = files.get("", {}), files.get("device", {})
    driver = function.get("DRIVER=", "")
    netdevs = tuple(
        Netdev(
            directory[len(_NET) :],
            attributes.get("operstate", ""),
            {"0": False, "1": True}.get(attributes.get("carrier", "")),
        )
        for directory, attributes in files.items()
        if directory.startswith(_NET)
    )
    indexes = {int(match[1]) for directory in files if (match := _PORT_LINE.match(directory))}
    ports = tuple(_port(name, index, files) for index in sorted(indexes))
    software = not driver and re.match(r"rxe|siw", name)
    kind = "cxi" if cxi else "software" if software else _KINDS.get(driver, driver)
    firmware = values.get("fw_ver", "")
    model, board = values.get("hca_type", ""), values.get("board_id", "")
    if cxi:
        ports = (_slingshot(name, netdevs, files),)
        firmware = files.get("device/uc", {}).get("qspi_blob_version", "")
        board = files.get("device/fru", {}).get("part_number", "")
    # Every model and board id has a digit, and no word for "unknown" has one.
    model, board = (text if re.search("[0-9]", text) else "" for text in (model, board))
    return RdmaDevice(
        name=name,
        kind=kind or re.split(r"_?[0-9]", name)[0],
        hca_type=model,
        firmware=firmware,
        board_id=board,
        node_type=_word(values.get("node_type", "")),
        node_guid=values.get("node_guid", ""),
        node_desc=values.get("node_desc", ""),
        driver=driver,
        pci_address=function.get("PCI_SLOT_NAME=", ""),
        numa_node=number(function.get("numa_node")),
        virtual=virtual,
        uverbs=uverbs,
        netdevs=netdevs,
        ports=ports,
        image_guid=values.get("sys_image_guid", ""),
        pcie=_pcie(files),
    )

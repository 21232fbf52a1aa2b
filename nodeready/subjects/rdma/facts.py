"""A node's RDMA devices: InfiniBand, RoCE, EFA, Omni-Path, Slingshot.

One grep reads everything from /sys; a node without RDMA starts no program.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypedDict

from nodeready.core import shell
from nodeready.core.base import Output, Probe, ProbeError, Section, frozen
from nodeready.core.parsed_template import ParsedTemplate, TemplateCache, fast_replace
from nodeready.core.policy import Policy
from nodeready.core.result import ALONE, Counters, FleetFacts

# --- One RDMA device and its ports, from /sys/class/infiniband or /sys/class/cxi.
#
# Sources: drivers/infiniband/core/sysfs.c and Documentation/ABI/stable/sysfs-class-infiniband of
# Linux; for Slingshot, cxi_stat(1) of HPE's driver, which reads the same files.

#: Error counter of a link -> its maximum: the counters have 16, 8 or 4 bits and stay at their
#: maximum (sysfs.c, PORT_PMA_ATTR).
PMA_COUNTERS = {
    "symbol_error": 65535, "link_downed": 255, "local_link_integrity_errors": 15,
    "excessive_buffer_overrun_errors": 15,
}  # fmt: skip

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
_PKEY = re.compile(r"0x(?!0000)[0-9a-f]{4}")
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
    pkeys: tuple[str, ...] = ()  # of InfiniBand: the first eight of its table, without empty ones

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
    kind: str  # "mlx5", "efa", "hfi1", "cxi" (Slingshot), "bnxt_re", …; "software" (rxe, siw)
    hca_type: str = ""  # the adapter's model, "MT4129"
    firmware: str = ""  # version of its firmware
    board_id: str = ""  # the board, by its maker's id
    node_type: str = ""  # "CA", or "RNIC" for iWARP
    node_guid: str = ""  # of the device
    node_desc: str = ""  # the text that it gives the subnet manager, often with the host name
    driver: str = ""  # of the PCI function
    pci_address: str = ""  # "0000:5e:00.0"
    numa_node: int | None = None  # to which the adapter is attached
    virtual: bool = False  # a virtual function on its host, for a virtual machine
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
    """The link from the attributes of the PCI function and of the port above it.

    A function that fell off the bus shows all ones, 63 lanes. A kernel older than the card's speed
    shows neither speed. A link that shows only one of two values is broken.
    """
    values, slot_values = files.get("device", {}), files.get("device/..", {})
    if not any(name in values for name in _LINK):
        return None
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
    is_infiniband = values.get("link_layer") == "InfiniBand"
    pkeys = sorted(files.get(f"{directory}/pkeys", {}).items()) if is_infiniband else ()
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
        pkeys=tuple(text for _, text in pkeys if _PKEY.fullmatch(text)),
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
    carriers = {"0": False, "1": True}
    netdevs = tuple(
        Netdev(path[len(_NET) :], net.get("operstate", ""), carriers.get(net.get("carrier", "")))
        for path, net in files.items()
        if path.startswith(_NET)
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


# --- The probe of all devices.

_IB, _CXI, _VERBS = "/sys/class/infiniband", "/sys/class/cxi", "/sys/class/infiniband_verbs"

_DEV = "/dev/infiniband"

_DEVICE = "fw_ver hca_type board_id node_type node_guid node_desc sys_image_guid"
# The directory above that of a PCI function is the port of the slot.
_FUNCTION = (
    "device/uevent device/numa_node device/net/*/operstate device/net/*/carrier"
    " device/current_link_* device/max_link_* device/../max_link_*"
)
_PORT = (
    *["state", "phys_state", "rate", "link_layer", "lid", "sm_lid", "pkeys/[0-7]"],
    *(f"counters/{name}" for name in PMA_COUNTERS),
    *(f"hw_counters/{name}" for name in HW_COUNTERS),
)
_SLINGSHOT = (
    "device/port/link device/port/speed device/uc/qspi_blob_version device/fru/part_number"
)

#: Maximum number of devices: no node has more adapters.
MAX_DEVICES = 512


def _script(policy: Policy) -> str:
    def globs(start: str, names: str) -> str:
        return " ".join(f"{start}/{name}" for name in names.split())

    devices = globs(f"{_IB}/*", f"{_DEVICE} {_FUNCTION} device/infiniband_verbs/*/ibdev")
    return shell.script(
        "rdma", IB=_IB, VERBS=_VERBS, CXI=_CXI, DEV=_DEV, DEVICE_FILES=devices,
        PORT_FILES=globs(f"{_IB}/*/ports/[0-9]*", " ".join(_PORT)),
        CXI_FILES=globs(f"{_CXI}/*", f"{_FUNCTION} {_SLINGSHOT}"),
    )  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """A PCI function that only RDMA uses."""

    pci_address: str  # "0000:5e:00.0"
    bound: bool  # it has a driver


@dataclass(frozen=True)
class Rdma:
    """The RDMA of a node."""

    devices: Mapping[str, RdmaDevice]  # name -> device
    without: tuple[Adapter, ...] = ()  # adapters on the PCI bus that have no RDMA device
    closed: tuple[str, ...] = ()  # files that neither all users nor a group can open
    nccl_ib_hca: tuple[str, ...] = ()  # for NCCL_IB_HCA, without regard to the node's routes

    @property
    def ports(self) -> dict[str, RdmaPort]:
        """Every port by its name, "mlx5_0/1"."""
        return {port.name: port for device in self.devices.values() for port in device.ports}


def _place(path: str) -> tuple[str, str, str, str] | None:
    """Root, device, directory below the device's directory, and file; None for another path."""
    for root in (_IB, _CXI, _VERBS):
        if path.startswith(f"{root}/"):
            name, _, relative = path[len(root) + 1 :].partition("/")
            directory, _, file = relative.rpartition("/")
            return root, name, directory, file
    return None


def _devices(lines: Iterable[str]) -> dict[str, dict[str, dict[str, dict[str, str]]]]:
    """Root -> device -> directory below it -> file -> first line; a key of uevent: "DRIVER="."""
    files_by_root: dict[str, dict[str, dict[str, dict[str, str]]]]
    files_by_root = {_IB: {}, _CXI: {}, _VERBS: {}}
    for line in lines:
        # No path here contains a colon: only links lead to a PCI address.
        path, _, value = line.partition(":")
        if (place := _place(path)) is None:
            continue
        root, name, directory, file = place
        if file == "uevent":
            key, _, value = value.partition("=")
            file = f"{key}="
        devices = files_by_root[root]
        if name in devices or len(devices) < MAX_DEVICES:
            files = devices.setdefault(name, {}).setdefault(directory, {})
            # Ports of thousands of nodes have the same words: equal words are one object.
            files.setdefault(file, sys.intern(value.strip()))
    return files_by_root


_TEMPLATES: TemplateCache[Rdma] = TemplateCache()
_GUID_FIELDS = {"node_guid": "node_guid", "sys_image_guid": "image_guid"}


def _varies(path: str) -> bool:
    """Whether the file's value belongs to a single node, and sets only the field of its name."""
    place = _place(path)
    if place is None or place[0] != _IB:
        return False
    _, _, directory, file = place
    port, _, relative = directory.removeprefix("ports/").partition("/")
    if not directory:
        return file in _GUID_FIELDS
    if not directory.startswith("ports/") or not port.isdecimal():
        return False
    names = {"": ("lid", "sm_lid"), "counters": PMA_COUNTERS, "hw_counters": HW_COUNTERS}
    return relative == "gids" or file in names.get(relative, ())


def _with_values(rdma: Rdma, differing: Mapping[str, str]) -> Rdma | None:
    """The observation with these values; None where a value changes more than its own field."""
    devices = dict(rdma.devices)
    for path, text in differing.items():
        place, value = _place(path), sys.intern(text.strip())
        assert place is not None
        _, name, directory, file = place
        if (device := devices.get(name)) is None:
            return None
        if not directory:
            devices[name] = fast_replace(device, **{_GUID_FIELDS[file]: value})
            continue
        words = directory.split("/")
        changed_ports = [
            _port_with_value(port, words[2:], file, value) if str(port.port) == words[1] else port
            for port in device.ports
        ]
        ports = [port for port in changed_ports if port is not None]
        if len(ports) < len(changed_ports) or ports == list(device.ports):
            return None
        devices[name] = fast_replace(device, ports=tuple(ports))
    return fast_replace(rdma, devices=devices)


def _port_with_value(
    port: RdmaPort, relative: list[str], file: str, value: str
) -> RdmaPort | None:
    if not relative:
        return fast_replace(port, **{file: number(value)})
    if relative == ["gids"]:
        index = number(file)
        gids = tuple(replace(gid, gid=value) if gid.index == index else gid for gid in port.gids)
        same = gids == port.gids or EMPTY_GID.match(value)
        return None if same else fast_replace(port, gids=gids)
    if file not in port.counters:
        return None
    return fast_replace(port, counters={**port.counters, file: number(value)})


def parse(outputs: Mapping[str, Output], policy: Policy) -> Rdma:
    """The observation; missing values are empty. Raises ProbeError when it was cut off."""
    output = outputs["rdma"]
    lines = output.require().split("\n")
    if adapted := _TEMPLATES.adapted(_with_values, lines):
        return adapted
    files_by_root = _devices(lines)
    infiniband, cxi = files_by_root[_IB], files_by_root[_CXI]
    # The devices that programs can open name themselves in ibdev.
    verbs = {
        files["ibdev"]
        for directories in (*files_by_root[_VERBS].values(), *infiniband.values())
        for files in directories.values()
        if "ibdev" in files
    }
    virtual = set(output.all("virtual"))
    devices = {
        name: parse_device(name, files, files_by_name is cxi, name in virtual, name in verbs)
        for files_by_name in (infiniband, cxi)
        for name, files in files_by_name.items()
    }
    addresses = {device.pci_address for device in devices.values()}
    without = []
    for text in output.all("adapter"):
        address, _, state = text.partition(" ")
        if state not in ("bound", "unbound"):
            raise ProbeError("an adapter that makes no sense", text)
        if address not in addresses:
            without.append(Adapter(address, state == "bound"))
    closed = tuple(sorted(line for line in lines if line.startswith(f"{_DEV}/uverbs")))
    bare_rdma = Rdma(devices, tuple(without), closed[:MAX_DEVICES])
    observed: Rdma = frozen(replace(bare_rdma, nccl_ib_hca=hcas(bare_rdma)[0]))
    _TEMPLATES.keep(ParsedTemplate.of(lines, observed, _varies))
    return observed


PROBE = Probe("rdma", (Section("rdma", _script, cap_bytes=1 << 20),), parse)

# --- The devices for NCCL.

#: Kinds of device that NCCL uses by separate plugins, or not at all.
NOT_VERBS = ("efa", "hfi1", "cxi", "software")


def hcas(observed: Rdma, avoid: Iterable[str] = ()) -> tuple[tuple[str, ...], str]:
    """The devices for NCCL_IB_HCA, and the reason; a port of a device with several is "mlx5_0:2".

    NCCL's verbs transport uses InfiniBand and RoCE; EFA, Omni-Path and Slingshot have separate
    plugins, and iWARP does not work. Where other active ports remain, these are left out: bonds,
    and ports whose interface is among ``avoid`` (the interface of ssh, of the default route),
    which carry the management; RoCE beside InfiniBand; and ports below the highest rate, since the
    slowest port limits NCCL.
    """
    avoid = frozenset(avoid)
    usable = [
        (device, port)
        for device in observed.devices.values()
        if device.kind not in NOT_VERBS and device.node_type != "RNIC"
        for port in device.ports
        if port.active
    ]
    if not usable:
        return (), "no active InfiniBand or RoCE port"
    preferred = [
        (device, port)
        for device, port in usable
        if "bond" not in device.name
        and not (port.netdev or "").startswith("bond")
        and not (
            port.link_layer != "InfiniBand"
            and avoid & {port.netdev, *(netdev.name for netdev in device.netdevs)}
        )
    ]
    chosen = preferred or usable
    layers = {port.link_layer for _, port in chosen}
    if len(layers) > 1 and "InfiniBand" in layers:
        chosen = [(device, port) for device, port in chosen if port.link_layer == "InfiniBand"]
    best = max(port.rate_gbps or 0.0 for _, port in chosen)
    chosen = [(device, port) for device, port in chosen if (port.rate_gbps or 0.0) == best]
    names = [d.name if len(d.ports) == 1 else f"{d.name}:{p.port}" for d, p in chosen]
    kind = "InfiniBand" if chosen[0][1].link_layer == "InfiniBand" else "RoCE"
    return tuple(names), f"active {kind} ports at {best:g} Gb/s"


# --- The values for documents, the next audit, the comparison with peers, and a learnt policy.


class RdmaInFleet(TypedDict):
    """The result of `derived`."""

    before: Counters | None  # the counters of an earlier audit; None: there was none


def derived(observed: Rdma, fleet: FleetFacts) -> RdmaInFleet:
    return {"before": fleet.counters.get("rdma")}


def counters(observed: Rdma, fleet: FleetFacts = ALONE) -> dict[str, int]:
    """The counters for the next audit: "mlx5_0/1.link_downed" -> value."""
    return {
        f"{name}.{counter}": value
        for name, port in observed.ports.items()
        for counter, value in port.counters.items()
        if value is not None
    }


def compared(observed: Rdma, fleet: FleetFacts = ALONE) -> dict[str, str | int | float]:
    """The values that a group's nodes should share: devices, firmware, and ports' rates."""
    facts: dict[str, str | int | float] = {}
    cards = {n: d for n, d in observed.devices.items() if d.kind != "software" and not d.virtual}
    if not cards:
        return {}
    facts["devices"] = ",".join(sorted(cards))
    for name, device in cards.items():
        for fact in ("firmware", "hca_type"):
            if getattr(device, fact):
                facts[f"{name}.{fact}"] = getattr(device, fact)
        if device.pcie is not None and device.pcie.is_readable:
            facts[f"{name}.pcie"] = device.pcie.text
        for port in device.ports:
            if port.link_layer:
                facts[f"{port.name}.link_layer"] = port.link_layer
            if port.active and port.pkeys:
                facts[f"{port.name}.pkeys"] = " ".join(port.pkeys)
            # A port without a link shows the rate of its lowest speed.
            if port.active and port.rate_gbps is not None:
                facts[f"{port.name}.rate_gbps"] = port.rate_gbps
    return facts


def learned(observed: Rdma) -> dict[str, dict[str, dict[str, str | int]]]:
    """The policy that this node would fit: its active ports, as they are now."""
    columns_by_port: dict[str, dict[str, str | int]] = {}
    for device in observed.devices.values():
        for port in device.ports:
            if not port.active or device.kind == "software" or device.virtual:
                continue
            columns: dict[str, str | int] = {}
            if port.rate_gbps is not None and port.rate_gbps == int(port.rate_gbps):
                columns["rate_gbps"] = int(port.rate_gbps)
            if port.link_layer:
                columns["link_layer"] = port.link_layer
            if device.firmware:
                columns["firmware"] = device.firmware
            columns_by_port[port.name] = columns
    return {"rdma_ports": columns_by_port} if columns_by_port else {}

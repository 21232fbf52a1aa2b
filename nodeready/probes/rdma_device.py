"""One RDMA device and its ports: what /sys/class/infiniband or /sys/class/cxi says about it.

Sources: drivers/infiniband/core/sysfs.c and Documentation/ABI/stable/sysfs-class-infiniband of
Linux; for Slingshot, cxi_stat(1) of HPE's driver, which reads the same files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Counters of which any change is an error on the link, or that are judged by their rate, with the
#: value at which they are full: they have 16, 8 or 4 bits and stay there (sysfs.c, PORT_PMA_ATTR).
PMA_COUNTERS = {
    "symbol_error": 65535,
    "link_downed": 255,
    "local_link_integrity_errors": 15,
    "excessive_buffer_overrun_errors": 15,
}
#: The like in hw_counters, where a driver has them: 64 bits, never full.
HW_COUNTERS = ("rnr_nak_retry_err",)

# The driver of the PCI function -> the kind of RDMA device. Where the adapter's Ethernet driver
# carries the RDMA one, the name of the latter.
_KINDS = {
    "mlx5_core": "mlx5",
    "mlx4_core": "mlx4",
    "bnxt_en": "bnxt_re",
    "ice": "irdma",
    "i40e": "irdma",
    "idpf": "irdma",
    "hns3": "hns",
    "qede": "qedr",
    "cxgb4": "iw_cxgb4",
    "cxi_ss1": "cxi",
}

#: Directory below that of a device ("" is its own) -> file -> its first line.
Files = Mapping[str, Mapping[str, str]]

_EMPTY_GID = re.compile(r"[0:]*$")
_NET = "device/net/"
_PORT = re.compile(r"ports/([0-9]{1,3})(?:/|$)")
_NUMBER = re.compile(r"(?:[0-9]{1,20}|0x[0-9a-fA-F]{1,16})")
_RATE = re.compile(r"(?<![0-9.])([0-9]{1,5}(?:\.[0-9]{1,2})?) ?G")


@dataclass(frozen=True)
class Gid:
    """An address of a port. ``type`` is "IB/RoCE v1" or "RoCE v2"; "": not readable."""

    index: int
    gid: str
    type: str


@dataclass(frozen=True)
class Netdev:
    """A network interface of the same PCI function. carrier: None while it is switched off."""

    name: str
    operstate: str
    carrier: bool | None


@dataclass(frozen=True)
class RdmaPort:
    """A port; "" and None: the kernel does not say.

    state:      "ACTIVE" is the only one that carries traffic; "DOWN"; "INIT" and "ARMED" have a
                link and wait for the subnet manager
    phys_state: "LinkUp", "Polling" (no light from the other side), "Disabled", "Sleep", …
    rate_gbps:  of the link as it is, lanes times speed, from ``rate_text`` ("4X NDR" included)
    link_layer: "InfiniBand", "Ethernet" (RoCE, iWARP), "Slingshot", "Unknown" (EFA)
    lid:        its local identifier, given by the subnet manager; sm_lid: that one's own
    netdev:     the interface that stands for it, where its GIDs name one
    gids:       of an Ethernet port, among its first 16
    counters:   PMA_COUNTERS and HW_COUNTERS that it has; None: that one cannot be read
    """

    device: str
    port: int
    state: str = ""
    phys_state: str = ""
    rate_gbps: float | None = None
    rate_text: str = ""
    link_layer: str = ""
    lid: int | None = None
    sm_lid: int | None = None
    netdev: str | None = None
    gids: tuple[Gid, ...] = ()
    counters: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As the policy writes it: "mlx5_0/1"."""
        return f"{self.device}/{self.port}"

    @property
    def active(self) -> bool:
        """Whether it can carry traffic."""
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class RdmaDevice:
    """An RDMA device.

    kind:        "mlx5", "efa", "hfi1" (Omni-Path), "cxi" (Slingshot), "bnxt_re", "irdma", …;
                 "software" (rxe, siw): no adapter of its own
    hca_type:    the adapter's model, "MT4129"; board_id: the board's maker's id
    node_type:   "CA", or "RNIC" for iWARP
    driver:      that of its PCI function
    virtual:     a virtual function beside its physical one: it waits for a virtual machine
    uverbs:      programs can open it
    """

    name: str
    kind: str
    hca_type: str = ""
    firmware: str = ""
    board_id: str = ""
    node_type: str = ""
    node_guid: str = ""
    node_desc: str = ""
    driver: str = ""
    pci_address: str = ""
    numa_node: int | None = None
    virtual: bool = False
    uverbs: bool = False
    netdevs: tuple[Netdev, ...] = ()
    ports: tuple[RdmaPort, ...] = ()

    @property
    def slot(self) -> str:
        """The PCI slot, "0000:5e:00": the functions of one card share it."""
        return self.pci_address.rpartition(".")[0] or self.name


def number(text: str | None) -> int | None:
    """A whole number that is none below zero, decimal or with 0x; None for everything else."""
    if text is None or not _NUMBER.fullmatch(text):
        return None
    return int(text, 16 if text.startswith("0x") else 10)


def gbps(text: str) -> float | None:
    """The number of "400 Gb/sec (4X NDR)", "200 Gbps", "BS_200G"; None where there is none."""
    match = _RATE.search(text)
    return float(match[1]) if match else None


def _word(text: str) -> str:
    """ "ACTIVE" of "4: ACTIVE"."""
    word = text.partition(":")[2] if re.match(r"[0-9]+:", text) else text
    return sys.intern(word.strip())


def _counters(files: Files, directory: str) -> dict[str, int | None]:
    """The counters that we judge. The kernel shows the first group whole or not at all."""
    found: dict[str, int | None] = {}
    given = files.get(f"{directory}/counters", {})
    if any(name in given for name in PMA_COUNTERS):
        found = {name: number(given.get(name)) for name in PMA_COUNTERS}
    more = files.get(f"{directory}/hw_counters", {})
    found.update({name: number(more[name]) for name in HW_COUNTERS if name in more})
    return found


def _gids(files: Files, directory: str) -> tuple[Gid, ...]:
    types = files.get(f"{directory}/gid_attrs/types", {})
    found = []
    for name, text in files.get(f"{directory}/gids", {}).items():
        index = number(name)
        if index is not None and not _EMPTY_GID.match(text):
            found.append(Gid(index, text, types.get(name, "")))
    return tuple(sorted(found, key=lambda gid: gid.index))


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
    """The one port of a cxi device; the driver says "up" or "down", else its interface does."""
    values = files.get("device/port", {})
    link = values.get("link") or next((one.operstate for one in netdevs), "")
    speed = values.get("speed", "")
    return RdmaPort(
        device=device,
        port=1,
        state={"up": "ACTIVE", "down": "DOWN"}.get(link, link),
        rate_gbps=gbps(speed),
        rate_text=speed,
        link_layer="Slingshot",
        netdev=next((one.name for one in netdevs), None),
    )


def parse(name: str, files: Files, cxi: bool, virtual: bool, uverbs: bool) -> RdmaDevice:
    """The device with these files.

    What is missing or makes no sense is "" or None: the kernel refuses to read some files of a
    port in trouble, and no driver has all of them.
    """
    values, function = files.get("", {}), files.get("device", {})
    driver = function.get("DRIVER=", "")
    netdevs = tuple(
        Netdev(
            directory[len(_NET) :],
            given.get("operstate", ""),
            {"0": False, "1": True}.get(given.get("carrier", "")),
        )
        for directory, given in files.items()
        if directory.startswith(_NET)
    )
    ports = {int(match[1]) for directory in files if (match := _PORT.match(directory))}
    software = not driver and re.match(r"rxe|siw", name)
    kind = "cxi" if cxi else "software" if software else _KINDS.get(driver, driver)
    firmware, board = values.get("fw_ver", ""), values.get("board_id", "")
    if cxi:
        firmware = files.get("device/uc", {}).get("qspi_blob_version", "")
        board = files.get("device/fru", {}).get("part_number", "")
    return RdmaDevice(
        name=name,
        kind=kind or re.split(r"_?[0-9]", name)[0],
        hca_type=values.get("hca_type", ""),
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
        ports=(_slingshot(name, netdevs, files),)
        if cxi
        else tuple(_port(name, index, files) for index in sorted(ports)),
    )

"""How GPUs and fast RDMA adapters reach each other: the switches above them, IOMMU, modules.

One process reads the configuration of all switch ports above them; without root, 64 bytes of each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: The lowest rate in Gbit/s of an adapter for jobs: slower ones are for management or storage.
FAST_GBPS = 100.0

_IB = "/sys/class/infiniband"


@dataclass(frozen=True)
class PeerDevice:
    """A GPU, or a function of an RDMA adapter, and its place on the PCI bus."""

    address: str  # on the PCI bus, ``0000:5e:00.0``
    kind: str  # ``gpu``, ``rdma``, or ``direct``: the path of an adapter to its own GPU
    name: str  # of the RDMA device, ``mlx5_0``; else the address
    bridges: tuple[str, ...]  # addresses of the ports above it, from the root port on
    driver: str = ""  # of an RDMA adapter
    # what the IOMMU does with an RDMA adapter's addresses: ``identity``, ``DMA``, ``DMA-FQ``;
    # "": it is off, or the kernel does not tell
    iommu: str = ""


@dataclass(frozen=True)
class SwitchPort:
    """A downstream port of a PCIe switch."""

    address: str  # on the PCI bus
    model: str  # vendor and device id, ``1000:c030``
    acs: int | None  # its ACS Control register, lower byte; None: the port has no ACS


@dataclass(frozen=True)
class PeerAccess:
    """How GPUs and fast RDMA adapters reach each other. The default: a node without GPUs."""

    devices: tuple[PeerDevice, ...] = ()  # GPUs, and adapters of at least FAST_GBPS
    ports: tuple[SwitchPort, ...] = ()  # the switches' ports above them
    unread: str = ""  # why the ports' configuration could not be read
    modules: tuple[str, ...] = ()  # loaded ones: nvidia_peermem, nv_peer_mem, gdrdrv
    driver: str = ""  # NVIDIA's kernel modules, ``Open Kernel Module for x86_64``; "": not loaded
    kernel: str = ""  # as ``uname -r`` prints it

    def of_kind(self, kind: str) -> list[PeerDevice]:
        return [device for device in self.devices if device.kind == kind]

    def count_beside_adapter(self) -> int | None:
        """How many GPUs have a fast adapter below the same root port; None: no adapter."""
        roots = {device.bridges[:1] for device in self.devices if device.kind != "gpu"}
        return (
            sum(gpu.bridges[:1] in roots - {()} for gpu in self.of_kind("gpu")) if roots else None
        )


# --- The configuration space (PCI Express Base Specification, 7.5.1 to 7.5.3, 7.6.3, 7.7.11).

_SIZE, _WITHOUT_ROOT = 4096, 64
_PCIE, _ACS, _DOWNSTREAM_PORT = 0x10, 0x000D, 6


def _capability(config: bytes, number: int, first: int) -> int | None:
    """The offset of a capability by its number; None: the list has none. A list that loops
    or leaves the space ends.

    first: where the list begins: 0x100 for the extended ones
    """
    offset, offsets = first, set[int]()
    while 0x40 <= offset <= _SIZE - 8 and offset not in offsets:
        offsets.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & (0xFFFF if first == 0x100 else 0xFF) == number:
            return offset
        offset = (header >> 20 if first == 0x100 else header >> 8 & 0xFF) & 0xFFC
    return None


def switch_port(address: str, config: bytes) -> SwitchPort | None:
    """The port by its configuration of 4096 bytes; None: not a downstream port of a switch."""
    pcie, acs = _capability(config, _PCIE, config[0x34] & 0xFC), _capability(config, _ACS, 0x100)
    if pcie is None or config[pcie + 2] >> 4 != _DOWNSTREAM_PORT:
        return None
    model = f"{config[1]:02x}{config[0]:02x}:{config[3]:02x}{config[2]:02x}"
    return SwitchPort(address, model, None if acs is None else config[acs + 6])


_DUMP = re.compile(r"^(\*\n)?([0-9a-f]{6,8})((?: [0-9a-f]{2}){0,16})$", re.M)


def _dumped(text: str, maximum: int) -> bytes:
    """The bytes that od printed; b"": a line is missing. ``*``: the line above is repeated."""
    data = bytearray()
    for star, digits, row in _DUMP.findall(text):
        offset = int(digits, 16)
        if star:
            data += data[-16:] * ((min(offset, maximum) - len(data)) // 16)
        if offset != len(data):
            return b""
        data += bytes.fromhex(row)
    return bytes(data)


# --- The parser.

_ADDRESS = re.compile(r"(?<=/)[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?=/|$)")
_PEER = re.compile(r"^peer=(gpu|direct|rdma) ([\w.:-]{1,64}) (/\S{1,400})$", re.M)
_FILE = re.compile(
    rf"^{_IB}/([\w.:-]{{1,64}})/(?:ports/[0-9]{{1,3}}/rate:([0-9]{{1,5}}(?:\.[0-9])?) Gb/sec|"
    r"device/uevent:DRIVER=(\w{1,40})$|device/iommu_group/type:([\w-]{1,20})$)", re.M,
)  # fmt: skip
_PORT = re.compile(r"^port=(\S{1,20})$", re.M)
_MODULE = re.compile(r"^/sys/module/(nvidia_peermem|nv_peer_mem|gdrdrv)/initstate:live$", re.M)
_DRIVER = re.compile(r"^/proc/driver/nvidia/version:NVRM version: NVIDIA UNIX (.{1,40}?)  ", re.M)
_KERNEL = re.compile(r"^/proc/sys/kernel/osrelease:(\S{1,80})", re.M)


def parse(text: str) -> PeerAccess:
    """How GPUs and adapters reach each other. Never raises."""
    rates, drivers, modes = dict[str, float](), dict[str, str](), dict[str, str]()
    for name, rate, driver, mode in _FILE.findall(text):
        rates[name] = max(float(rate or 0), rates.get(name, 0.0))
        drivers[name] = driver or drivers.get(name, "")
        modes[name] = mode or modes.get(name, "")
    devices = []
    for kind, name, path in _PEER.findall(text):
        *bridges, address = _ADDRESS.findall(path) or [""]
        if address and (kind != "rdma" or rates.get(name, 0.0) >= FAST_GBPS):
            words = (drivers.get(name, ""), modes.get(name, ""))
            devices.append(PeerDevice(address, kind, name, tuple(bridges), *words))
    addresses, ports, unread = _PORT.findall(text), list[SwitchPort](), ""
    data = _dumped(text, _SIZE * len(addresses))
    if len(data) == _SIZE * len(addresses):
        for index, address in enumerate(addresses):
            port = switch_port(address, data[_SIZE * index : _SIZE * (index + 1)])
            ports += [] if port is None else [port]
    elif len(data) == _WITHOUT_ROOT * len(addresses):
        unread = "only root may read the configuration of PCIe switches"
    else:
        unread = "the configuration of the PCIe switches could not be read"
    modules, driver, kernel = (pattern.findall(text) for pattern in (_MODULE, _DRIVER, _KERNEL))
    return PeerAccess(
        *(tuple(devices), tuple(ports), unread, tuple(modules[:3])),
        *("".join(driver[:1]), "".join(kernel[:1])),
    )

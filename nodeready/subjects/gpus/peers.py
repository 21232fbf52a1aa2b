"""How GPUs and fast RDMA adapters reach each other: the switches above them, IOMMU, modules.

One process reads the configuration of all switch ports above them. Only root reads more than its
first 64 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

#: The function of a ConnectX through which it reads a GPU behind its own switch, without the
#: processor (rdma-core's rdma_topo: "CX DMA function", mlx5 Data Direct).
MELLANOX, DATA_DIRECT = "0x15b3", "0x2100"
#: The lowest rate in Gbit/s of an adapter for jobs: a slower one is for management or storage.
FAST_GBPS = 100.0

_KINDS = ("gpu", "direct", "rdma")
_MODULES = ("nvidia_peermem", "nv_peer_mem", "gdrdrv")
_IB = "/sys/class/infiniband"
_RELEASE = "/proc/sys/kernel/osrelease"
_VERSION = "/proc/driver/nvidia/version"
FILES = f"{_RELEASE} {_IB}/*/ports/*/rate {_IB}/*/device/iommu_group/type {_IB}/*/device/uevent"

# Below a root port, each second bridge of a path is the downstream port of a switch.
SCRIPT = rf"""
    if [ -n "$nr_gpus" ]; then (
        for nr_module in {" ".join(_MODULES)}; do
            if [ -d /sys/module/$nr_module ]; then printf 'module=%s\n' $nr_module; fi
        done
        nr_ports=''
        for nr_device in gpu $nr_gpus direct $nr_direct rdma {_IB}/*/device; do
            case $nr_device in /*) ;; *) nr_kind=$nr_device; continue ;; esac
            cd -P "$nr_device" 2>/dev/null || continue
            nr_device=${{nr_device%/device}}
            printf 'peer=%s %s %s\n' $nr_kind "${{nr_device##*/}}" "$PWD"
            nr_at=${{PWD%/*}}
            while case $nr_at in */pci*/*/*/*) ;; *) false ;; esac; do
                case "$nr_ports " in
                *" $nr_at/config "*) ;;
                *)
                    nr_ports="$nr_ports $nr_at/config"
                    printf 'port=%s\n' "${{nr_at##*/}}"
                    ;;
                esac
                nr_at=${{nr_at%/*/*}}
            done
        done
        # shellcheck disable=SC2086 # one word per file
        if [ -n "$nr_ports" ]; then exec od -Ax -tx1 $nr_ports 2>/dev/null; fi
    ); fi
    :
"""


@dataclass(frozen=True)
class PeerDevice:
    """A GPU, or a function of an RDMA adapter, and its place on the PCI bus."""

    address: str  # on the PCI bus, ``0000:5e:00.0``
    kind: str  # ``gpu``, ``rdma``, or ``direct``: the path of an adapter to its own GPU
    name: str  # of the RDMA device, ``mlx5_0``; else the address
    bridges: tuple[str, ...]  # addresses of the ports above it, from the root port on
    driver: str = ""  # of an RDMA adapter
    rate_gbps: float | None = None  # of an RDMA adapter's fastest port
    # how the IOMMU treats an RDMA adapter's addresses: ``identity``, ``DMA``, ``DMA-FQ``; "":
    # it is off, or the kernel does not tell
    iommu: str = ""


@dataclass(frozen=True)
class SwitchPort:
    """A downstream port of a PCIe switch."""

    address: str  # on the PCI bus
    model: str  # vendor and device id, ``1000:c030``
    acs: int | None  # its ACS Control register; None: the port has no ACS


@dataclass(frozen=True)
class PeerAccess:
    """How GPUs and fast RDMA adapters reach each other. The default: a node without GPUs."""

    devices: tuple[PeerDevice, ...] = ()  # GPUs, and adapters of at least FAST_GBPS
    ports: tuple[SwitchPort, ...] = ()  # the switches' ports above them
    unread: str = ""  # why the ports' configuration could not be read
    modules: tuple[str, ...] = ()  # loaded ones: nvidia_peermem, nv_peer_mem, gdrdrv
    open_driver: bool | None = None  # NVIDIA's open kernel modules; None: not loaded
    kernel: str = ""  # as ``uname -r`` prints it
    x86: bool = False  # NVIDIA's driver is one for x86

    def of_kind(self, kind: str) -> list[PeerDevice]:
        """The devices of a kind."""
        return [device for device in self.devices if device.kind == kind]

    def count_beside_adapter(self) -> str | None:
        """``8 of 8``: GPUs with a fast adapter below the same root port; None: no adapter."""
        gpus, adapters = self.of_kind("gpu"), self.of_kind("rdma")
        roots = {adapter.bridges[:1] for adapter in self.devices if adapter.kind != "gpu"} - {()}
        beside = sum(gpu.bridges[:1] in roots for gpu in gpus)
        return f"{beside} of {len(gpus)}" if adapters else None


# --- The configuration space (PCI Express Base Specification, 7.5.1 to 7.5.3, 7.6.3, 7.7.11).

_SIZE, _WITHOUT_ROOT = 4096, 64
_PCIE, _ACS = 0x10, 0x000D
_DOWNSTREAM = 6  # the port type of a switch's downstream port


def _word(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 2], "little")


def _capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    """Id and offset of each capability; a list that loops or leaves the space ends."""
    offset, seen = config[0x34] & 0xFC, set[int]()
    while 0x40 <= offset < 0x100 and offset not in seen:
        seen.add(offset)
        yield config[offset], offset
        offset = config[offset + 1] & 0xFC


def _extended_capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    """Likewise of the extended ones."""
    offset, seen = 0x100, set[int]()
    while 0x100 <= offset <= _SIZE - 8 and offset not in seen:
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header in (0, 0xFFFFFFFF):
            return
        yield header & 0xFFFF, offset
        offset = header >> 20 & 0xFFC


def switch_port(address: str, config: bytes) -> SwitchPort | None:
    """The port by its configuration of 4096 bytes; None where it is none of a switch."""
    pcie = next((at for name, at in _capabilities(config) if name == _PCIE), None)
    if pcie is None or _word(config, pcie + 2) >> 4 & 0xF != _DOWNSTREAM:
        return None
    acs = next((at for name, at in _extended_capabilities(config) if name == _ACS), None)
    model = f"{_word(config, 0):04x}:{_word(config, 2):04x}"
    return SwitchPort(address, model, None if acs is None else _word(config, acs + 6))


_DUMP = re.compile(r"([0-9a-f]{6,8})((?: [0-9a-f]{2}){1,16})?")


def _dumped(lines: Iterable[str], maximum: int) -> bytes:
    """The bytes that od printed; b"" where a line is missing. ``*``: as the line above."""
    data, last, repeated = bytearray(), b"", False
    for line in lines:
        match = _DUMP.fullmatch(line.rstrip())
        if match is None:
            repeated = repeated or line == "*"
            continue
        offset = int(match[1], 16)
        if repeated and last and offset <= maximum:
            data += last * ((offset - len(data)) // len(last))
        if offset != len(data):
            return b""
        last, repeated = bytes.fromhex(match[2] or ""), False
        data += last
    return bytes(data)


# --- The parser.

_ADDRESS = re.compile(r"(?<=/)[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?=/|$)")
_FILE = re.compile(rf"{_IB}/([\w.:-]{{1,64}})/(ports/[0-9]{{1,3}}/rate|device/[\w/]{{1,20}}):(.*)")
_RATE = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,2})?) Gb/sec")
#: More than a node has of each, and more bridges than any device has above it.
_MAXIMUM, _DEEPEST = 512, 16


def _adapters(lines: Iterable[str]) -> dict[str, dict[str, str]]:
    """RDMA device -> ``rate``, ``driver``, ``iommu``."""
    adapters: dict[str, dict[str, str]] = {}
    for line in lines:
        match = _FILE.match(line)
        if match is None or (match[1] not in adapters and len(adapters) >= _MAXIMUM):
            continue
        values, (file, text) = adapters.setdefault(match[1], {}), match.groups()[1:]
        rate = _RATE.match(text)
        if rate and file.endswith("rate"):
            values["rate"] = str(max(float(rate[1]), float(values.get("rate", 0))))
        elif text.startswith("DRIVER="):
            values["driver"] = text[len("DRIVER=") :][:40]
        elif file == "device/iommu_group/type":
            values["iommu"] = text.strip()[:20]
    return adapters


def _device(text: str, adapters: Mapping[str, Mapping[str, str]]) -> PeerDevice | None:
    """The device of a ``peer=`` line; None for a slow adapter, and for one without the PCI bus."""
    kind, name, place = [*text.split(" ", 2), "", ""][:3]
    *bridges, address = _ADDRESS.findall(place) or [""]
    values = adapters.get(name, {}) if kind == "rdma" else {}
    rate = float(values["rate"]) if "rate" in values else None
    if not address or kind not in _KINDS or (kind == "rdma" and (rate or 0.0) < FAST_GBPS):
        return None
    more = (values.get("driver", ""), rate, values.get("iommu", ""))
    return PeerDevice(address, kind, name[:64], tuple(bridges[:_DEEPEST]), *more)


def _ports(addresses: Sequence[str], lines: Iterable[str]) -> tuple[tuple[SwitchPort, ...], str]:
    """The ports of switches among the bridges, and why they could not be read."""
    data = _dumped(lines, _SIZE * len(addresses))
    if len(data) == _WITHOUT_ROOT * len(addresses) != 0:
        return (), "only root may read the configuration of PCIe switches"
    if len(data) != _SIZE * len(addresses):
        return (), "the configuration of the PCIe switches could not be read"
    ports = (
        switch_port(address, data[_SIZE * index : _SIZE * (index + 1)])
        for index, address in enumerate(addresses)
    )
    return tuple(port for port in ports if port is not None), ""


def parse(lines: Sequence[str]) -> PeerAccess:
    """How GPUs and adapters reach each other. Never raises."""

    def values(name: str) -> list[str]:
        return [line[len(name) + 1 :] for line in lines if line.startswith(f"{name}=")][:_MAXIMUM]

    adapters = _adapters(lines)
    devices = (_device(text, adapters) for text in values("peer"))
    ports, unread = _ports(values("port"), lines)
    driver = next((line for line in lines if line.startswith(f"{_VERSION}:NVRM version:")), "")
    release = next((line for line in lines if line.startswith(f"{_RELEASE}:")), "")
    return PeerAccess(
        tuple(device for device in devices if device is not None),
        ports,
        unread,
        tuple(name for name in _MODULES if name in values("module")),
        " Open Kernel Module " in driver if driver else None,
        release.partition(":")[2].strip()[:80],
        " x86_64 " in driver,
    )

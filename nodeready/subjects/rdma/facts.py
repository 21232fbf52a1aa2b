"""A node's RDMA devices: InfiniBand, RoCE, EFA, Omni-Path, Slingshot.

One grep reads everything from /sys; a node without RDMA starts no program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypedDict

from nodeready.core.base import Output, Probe, ProbeError, Section, frozen
from nodeready.core.fleet import ALONE, Counters, FleetFacts
from nodeready.core.parsed_template import ParsedTemplate, TemplateCache, fast_replace
from nodeready.core.policy import Policy
from nodeready.subjects.rdma.device import (
    EMPTY_GID,
    HW_COUNTERS,
    PMA_COUNTERS,
    RdmaDevice,
    RdmaPort,
    number,
    parse_device,
)

# --- The probe of all devices.

_IB, _CXI, _VERBS = "/sys/class/infiniband", "/sys/class/cxi", "/sys/class/infiniband_verbs"

_DEVICE = "fw_ver hca_type board_id node_type node_guid node_desc sys_image_guid"
# The directory above that of a PCI function is the port of the slot.
_FUNCTION = (
    "device/uevent device/numa_node device/net/*/operstate device/net/*/carrier"
    " device/current_link_* device/max_link_* device/../max_link_*"
)
_PORT = (
    *["state", "phys_state", "rate", "link_layer", "lid", "sm_lid"],
    *(f"counters/{name}" for name in PMA_COUNTERS),
    *(f"hw_counters/{name}" for name in HW_COUNTERS),
)
_SLINGSHOT = (
    "device/port/link device/port/speed device/uc/qspi_blob_version device/fru/part_number"
)

#: Maximum number of devices: no node has more adapters.
MAX_DEVICES = 512

# A RoCE port has 256 GIDs, two for each address, and the filled GIDs come first: 16 hold the
# link-local and seven further addresses. No check needs the GIDs of an InfiniBand port.
_FIRST = "[0-9] 1[0-5]"


def _globs(start: str, names: str) -> str:
    return " ".join(f"{start}/{name}" for name in names.split())


# PCI functions of adapters for RDMA alone: classes 0x0207 (InfiniBand) and 0x0208 (fabric),
# Amazon's EFA (0xefa0 and up), HPE's Cassini (0x0501). Such a function without an RDMA device has
# lost its driver, unless a virtual machine uses it (vfio-pci).
_SCRIPT = rf"""
    for nr_dir in /sys/bus/pci/devices/*; do
        nr_class= nr_vendor= nr_device=
        {{ read -r nr_class <"$nr_dir/class"; }} 2>/dev/null
        case $nr_class in
        0x020[78]*) ;;
        0x0200*)
            {{ read -r nr_vendor <"$nr_dir/vendor" && read -r nr_device <"$nr_dir/device"; }} \
                2>/dev/null
            case $nr_vendor:$nr_device in 0x1d0f:0xefa*|0x17db:0x0501) ;; *) continue ;; esac
            ;;
        *) continue ;;
        esac
        nr_name=${{nr_dir##*/}}
        if [ -e "$nr_dir/physfn" ] || [ -e "/sys/bus/pci/drivers/vfio-pci/$nr_name" ]; then
            continue
        fi
        if [ -e "$nr_dir/driver" ]; then nr_device=bound; else nr_device=unbound; fi
        printf 'adapter=%s %s\n' "$nr_name" "$nr_device"
    done
    set --
    if [ -d {_IB} ]; then
        set -- {_globs(f"{_IB}/*", f"{_DEVICE} {_FUNCTION} device/infiniband_verbs/*/ibdev")} \
            {_globs(f"{_IB}/*/ports/[0-9]*", " ".join(_PORT))} {_VERBS}/*/ibdev
        for nr_dir in {_IB}/*; do
            if [ -e "$nr_dir/device/physfn" ]; then printf 'virtual=%s\n' "${{nr_dir##*/}}"; fi
        done
        for nr_dir in {_IB}/*/ports/[0-9]*; do
            nr_line=
            {{ read -r nr_line <"$nr_dir/link_layer"; }} 2>/dev/null
            if [ "$nr_line" = Ethernet ]; then
                set -- "$@" {_globs('"$nr_dir"/gids', _FIRST)} \
                    {_globs('"$nr_dir"/gid_attrs/types', _FIRST)} "$nr_dir"/gid_attrs/ndevs/0
            fi
        done
    fi
    if [ -d {_CXI} ]; then
        set -- "$@" {_globs(f"{_CXI}/*", f"{_FUNCTION} {_SLINGSHOT}")}
    fi
    if [ $# != 0 ]; then nr_lines raw "$@"; fi
"""


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
    # the devices for NCCL_IB_HCA, without regard to the node's routes
    nccl_ib_hca: tuple[str, ...] = ()

    @property
    def ports(self) -> dict[str, RdmaPort]:
        """Every port by its name, "mlx5_0/1"."""
        return {port.name: port for device in self.devices.values() for port in device.ports}


@lru_cache(maxsize=16384)
def _place(path: str) -> tuple[str, str, str, str] | None:
    """Root, device, directory below the device's directory, and file; None for another path."""
    for root in (_IB, _CXI, _VERBS):
        if path.startswith(f"{root}/"):
            name, _, relative = path[len(root) + 1 :].partition("/")
            directory, _, file = relative.rpartition("/")
            return root, name, directory, file
    return None


def _devices(lines: Iterable[str]) -> dict[str, dict[str, dict[str, dict[str, str]]]]:
    """Root -> device -> directory below the device's -> file -> first line. A key of uevent is
    "DRIVER=".
    """
    files_by_root: dict[str, dict[str, dict[str, dict[str, str]]]]
    files_by_root = {_IB: {}, _CXI: {}, _VERBS: {}}
    for line in lines:
        # No path here contains a colon: only links lead to a PCI address.
        path, _, value = line.partition(":")
        # Thousands of nodes have the same paths; a long path is not cached.
        place = _place(path) if len(path) < 200 else _place.__wrapped__(path)
        if place is None:
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
        device = devices.get(name)
        if device is None:
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
    """The observation; values that a device does not show are empty. Raises ProbeError when the
    output was cut off.
    """
    output = outputs["rdma"]
    lines = output.require().split("\n")
    for template in _TEMPLATES.of(lines):
        differing = template.differing(lines)
        parsed = None if differing is None else _with_values(template.read, differing)
        if parsed is not None:
            _TEMPLATES.mark_used(template)
            return parsed
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
    bare_rdma = Rdma(devices, tuple(without))
    observed: Rdma = frozen(replace(bare_rdma, nccl_ib_hca=hcas(bare_rdma)[0]))
    _TEMPLATES.keep(
        ParsedTemplate.of(lines, observed, lambda path: len(path) < 200 and _varies(path))
    )
    return observed


PROBE = Probe("rdma", (Section("rdma", lambda policy: _SCRIPT, cap_bytes=1 << 20),), parse)

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
    """The facts that need the fleet."""
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
    hardware = {
        n: d for n, d in observed.devices.items() if d.kind != "software" and not d.virtual
    }
    if not hardware:
        return {}
    facts["devices"] = ",".join(sorted(hardware))
    for name, device in hardware.items():
        for fact in ("firmware", "hca_type"):
            if getattr(device, fact):
                facts[f"{name}.{fact}"] = getattr(device, fact)
        if device.pcie is not None and device.pcie.is_readable:
            facts[f"{name}.pcie"] = device.pcie.text
        for port in device.ports:
            if port.link_layer:
                facts[f"{port.name}.link_layer"] = port.link_layer
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

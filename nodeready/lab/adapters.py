"""A node's RDMA adapters in all the places of /sys where they show: PCI, RDMA, network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nodeready.lab import infiniband, netdevs
from nodeready.lab.hardware import Link, PciDevice, Tree
from nodeready.lab.infiniband import Device
from nodeready.lab.netdevs import NetDevice

VERBS = "/sys/class/infiniband_verbs"
_VENDOR = "0x15b3"

# PCI device id and link, by hca_type: ConnectX-7, ConnectX-6, BlueField-3.
_MODELS = {
    "MT4129": ("0x1021", "32.0 GT/s PCIe"),
    "MT4123": ("0x101b", "16.0 GT/s PCIe"),
    "MT41692": ("0xa2dc", "32.0 GT/s PCIe"),
}
_BOND_PORTS = ("ens1f0np0", "ens1f1np1")


def interfaces(devices: Iterable[Device]) -> list[NetDevice]:
    """Their netdevs: one for each port, and for a bond its two ports as well."""
    found: list[NetDevice] = []
    for at, device in enumerate(devices):
        if device.netdev.startswith("bond"):
            second = f"{device.pci_address[:-1]}1"
            mac = netdevs.of_device(device, 0).address
            found += netdevs.bond(device.netdev, mac, _BOND_PORTS, (device.pci_address, second))
        elif device.netdev:
            found.append(netdevs.of_device(device, 10 + at))
    return found


def pci(devices: Sequence[Device], nics: Sequence[NetDevice]) -> list[PciDevice]:
    """Their PCI functions; the second port of a bond is one of its own."""
    made = [_function(device, device.pci_address, nics, _own(device)) for device in devices]
    have = {device.pci_address for device in devices}
    for address in sorted({nic.pci_address for nic in nics} - have - {""}):
        first = next(one for one in devices if one.pci_address[:-1] == address[:-1])
        made.append(_function(first, address, nics, {}))
    return made


def _own(device: Device) -> Tree:
    """What the RDMA device has in the directory of its PCI function."""
    start = f"{device.name}/device/"
    under: dict[str, str | Link] = {
        path.removeprefix(start): text
        for path, text in infiniband.tree([device]).items()
        if path.startswith(start) and not path.startswith(f"{start}net/")
    }
    under[f"infiniband/{device.name}"] = Link(f"../../../../../class/infiniband/{device.name}")
    return under


def _function(device: Device, address: str, nics: Sequence[NetDevice], more: Tree) -> PciDevice:
    model, speed = _MODELS[device.hca_type]
    pci_class = "0x020700" if device.link_layer == "InfiniBand" else "0x020000"
    links = {
        f"net/{nic.name}": Link(f"../../../../../class/net/{nic.name}")
        for nic in nics
        if nic.pci_address == address
    }
    return PciDevice(
        address,
        _VENDOR,
        model,
        pci_class,
        device.numa_node,
        device.driver,
        (speed, 16, speed, 16),
        {**more, **links},
    )


def trees(devices: Sequence[Device], nics: Sequence[NetDevice]) -> dict[str, Tree]:
    """The classes of /sys that show them."""
    ports: dict[str, str | Link] = {
        path: text
        for path, text in infiniband.tree(devices).items()
        if path.split("/")[1] != "device"
    }
    verbs: dict[str, str | Link] = {}
    for device in devices:
        ports[f"{device.name}/device"] = Link(f"../../../bus/pci/devices/{device.pci_address}")
        if device.uverbs:
            where = f"../../bus/pci/devices/{device.pci_address}/infiniband_verbs/{device.uverbs}"
            verbs[device.uverbs] = Link(where)
    return {infiniband.CLASS: ports, VERBS: verbs, netdevs.CLASS: netdevs.tree(nics)}


def device_files(devices: Iterable[Device]) -> dict[str, int]:
    """What user space opens: path -> mode."""
    names = ["rdma_cm", *(device.uverbs for device in devices if device.uverbs)]
    return {f"/dev/infiniband/{name}": 0o666 for name in names}

"""One network interface, as /sys/class/net shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

#: Where the kernel shows the interfaces.
NET = "/sys/class/net"
#: The interface types of include/uapi/linux/if_arp.h that are kinds here.
_INFINIBAND, _LOOPBACK = "32", "772"
#: DEVTYPE in the uevent file -> the kind.
_NAMED = {"bond": "bond", "bridge": "bridge", "vlan": "vlan", "wlan": "wifi"}


@dataclass(frozen=True)
class Nic:
    """One network interface. None: the kernel does not say, or cannot while the interface is down.

    kind:            "ethernet" and "infiniband" are ports of adapters; "wifi", "usb" (often the
                     BMC's own), "bond", "bridge", "vlan", "loopback"; all else is "virtual", as is
                     the switch's end of a virtual function (a representor)
    operstate:       RFC 2863's: "up", "down", "lowerlayerdown", "dormant", "testing", "unknown"
                     where none is kept
    carrier:         whether the interface has a link; None: it is administratively down
    admin_up:        whether the interface is administratively up
    speed_mbps:      of the link
    duplex:          "full" or "half"
    mac:             the hardware address
    firmware:        of the adapter, where its RDMA device tells
    carrier_changes: how often the link came or went since the interface was made
    pci_address:     "0000:5e:00.0"
    numa_node:       the NUMA node to which the adapter is attached
    master:          the bond or bridge to which the interface belongs
    upper:           the interfaces on top of this one: its master, its VLANs
    addresses:       "10.0.0.1/24"; None: not known, for it shares a network with another interface
    routed:          whether a route leads through the interface
    rx_errors and so on: lifetime counters, Documentation/networking/statistics.rst
    """

    name: str
    kind: str
    operstate: str | None = None
    carrier: bool | None = None
    admin_up: bool | None = None
    speed_mbps: int | None = None
    duplex: str | None = None
    mtu: int | None = None
    mac: str | None = None
    driver: str | None = None
    firmware: str | None = None
    carrier_changes: int | None = None
    pci_address: str | None = None
    numa_node: int | None = None
    master: str | None = None
    upper: tuple[str, ...] = ()
    addresses: tuple[str, ...] | None = ()
    routed: bool = False
    rx_errors: int | None = None
    tx_errors: int | None = None
    rx_dropped: int | None = None
    tx_dropped: int | None = None
    rx_crc_errors: int | None = None

    @property
    def physical(self) -> bool:
        """Whether the interface is a port of an adapter of this node."""
        return self.kind in ("ethernet", "infiniband")

    @property
    def addressed(self) -> bool:
        """Whether the interface has an address or a route that is not link-local."""
        if self.addresses is None or self.routed:
            return True
        return not all(map(link_local, self.addresses))


def link_local(network: str) -> bool:
    """Whether an address or network is IPv4's link-local: an interface gives itself such a one."""
    return network.startswith("169.254.")


def by_path(text: str, start: str) -> dict[str, list[str]]:
    """Path behind ``start`` -> its lines, as ``grep -H`` printed the files of that directory."""
    found: dict[str, list[str]] = {}
    for line in text.split("\n"):
        path, colon, rest = line.partition(":")
        if colon and path.startswith(start):
            found.setdefault(path[len(start) :], []).append(rest.rstrip("\r"))
    return found


def attributes(text: str) -> dict[str, dict[str, str]]:
    """Interface -> attribute -> value. Every line of a uevent file is an attribute: "DEVTYPE"."""
    found: dict[str, dict[str, str]] = {}
    # No path here contains a PCI address, and so none contains a colon.
    for path, lines in by_path(text, f"{NET}/").items():
        name, _, attribute = path.partition("/")
        values = found.setdefault(name, {})
        if attribute.startswith("device/infiniband/"):
            values["firmware"] = lines[0]
        elif attribute.endswith("uevent"):
            prefix = "device." if attribute.startswith("device/") else ""
            values.setdefault(f"{prefix}uevent", "")
            for line in lines:
                key, equals, value = line.partition("=")
                if equals:
                    values.setdefault(prefix + key, value)
        else:
            key = attribute.rpartition("/")[2]
            if attribute.startswith("bonding"):
                key = attribute
            values["device.numa_node" if key == "numa_node" else key] = lines[0]
    return found


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"-?[0-9]{1,20}", text) else None


def _above(number: int | None, least: int) -> int | None:
    """The number; None for a smaller one than ``least``: the kernel's -1 is "unknown"."""
    return number if number is not None and number >= least else None


#: phys_port_name of a representor: the virtual function or subfunction at its other end
#: (Documentation/networking/representors.rst); a port of the adapter is "p0", "p0s1" or has none.
_REPRESENTOR = re.compile(r"(c[0-9]+)?pf[0-9]+(hpf|(vf|sf)[0-9]+)?")
#: SPEED_UNKNOWN is -1 (include/uapi/linux/ethtool.h), which old drivers print without its sign, in
#: 16 bits or 32.
_NO_SPEED = 0xFFFF


def _kind(values: Mapping[str, str], hardware: bool) -> str:
    named = _NAMED.get(values.get("DEVTYPE", ""))
    if values.get("type") == _LOOPBACK:
        return "loopback"
    if named is not None:
        return named
    if not hardware or _REPRESENTOR.fullmatch(values.get("phys_port_name", "")):
        return "virtual"
    if values.get("type") == _INFINIBAND:
        return "infiniband"
    return "usb" if values.get("device.DEVTYPE") == "usb_interface" else "ethernet"


def parse(
    name: str,
    values: Mapping[str, str],
    *,
    master: str | None,
    upper: tuple[str, ...],
    addresses: tuple[str, ...] | None,
    routed: bool,
) -> Nic:
    """The interface of these attributes: "mtu", "DEVTYPE" of uevent, "device.DRIVER" and so on.

    An attribute that is missing or makes no sense is None: the kernel refuses some attributes
    while the interface is down (EINVAL), and has -1 for a speed that it does not know.
    """
    hardware = any(key.startswith("device.") for key in values)
    flags, carrier, duplex = values.get("flags", ""), values.get("carrier"), values.get("duplex")
    speed = _above(_number(values.get("speed")), 1)
    return Nic(
        name=name,
        kind=_kind(values, hardware),
        operstate=values.get("operstate"),
        carrier={"0": False, "1": True}.get(carrier or ""),
        admin_up=bool(int(flags, 16) & 1) if re.fullmatch(r"0x[0-9a-f]{1,8}", flags) else None,
        speed_mbps=speed if speed != _NO_SPEED and (speed or 0) < 0x7FFFFFFF else None,
        duplex=duplex if duplex in ("full", "half") else None,
        mtu=_above(_number(values.get("mtu")), 1),
        mac=values.get("address"),
        driver=values.get("device.DRIVER"),
        firmware=values.get("firmware"),
        carrier_changes=_above(_number(values.get("carrier_changes")), 0),
        pci_address=values.get("device.PCI_SLOT_NAME"),
        numa_node=_above(_number(values.get("device.numa_node")), 0),
        master=master,
        upper=upper,
        addresses=addresses,
        routed=routed,
        rx_errors=_above(_number(values.get("rx_errors")), 0),
        tx_errors=_above(_number(values.get("tx_errors")), 0),
        rx_dropped=_above(_number(values.get("rx_dropped")), 0),
        tx_dropped=_above(_number(values.get("tx_dropped")), 0),
        rx_crc_errors=_above(_number(values.get("rx_crc_errors")), 0),
    )

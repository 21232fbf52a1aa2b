"""A node's routes and addresses, its network interfaces and its bonds."""

from __future__ import annotations

import ipaddress
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nodeready.core.base import Output, Section, cached_last
from nodeready.core.parsed_template import fast_replace

# --- A node's routes and addresses.
#
# /proc shows the routes of the kernel's main tables, and the addresses, without a lock. A netlink
# dump (``ip route``) waits for the kernel's network lock, which a driver in trouble may hold for
# ever. Rules (``ip rule``), tables that only rules use, and all next hops but the first of a
# multipath route are not visible there.


def link_local(network: str) -> bool:
    """Whether an address or network is IPv4's link-local, which an interface gives itself."""
    return network.startswith("169.254.")


def by_path(text: str, start: str) -> dict[str, list[str]]:
    """Path below ``start`` -> its lines, from the output of ``grep -H``."""
    lines_by_path: dict[str, list[str]] = {}
    for line in text.split("\n"):
        path, colon, content = line.partition(":")
        if colon and path.startswith(start):
            lines_by_path.setdefault(path[len(start) :], []).append(content.rstrip("\r"))
    return lines_by_path


#: Maximum number of routes, the widest first: wide routes lead to nodes, and a network for
#: containers makes thousands of narrow routes.
MOST_ROUTES = 256
#: Flags of a route (include/uapi/linux/route.h and ipv6_route.h).
_UP, _REJECT = 0x1, 0x200
_LOCAL_V6, _ANYCAST_V6 = 0x80000000, 0x100000
#: Flags of an address (include/uapi/linux/if_addr.h): temporary (RFC 8981: it changes every day),
#: and tentative (another node may have it).
_TEMPORARY, _TENTATIVE = 0x01, 0x40
# The long files, which may be cut off, come last.
_SCRIPT = r"""
    nr_lines routes /proc/net/if_inet6 /proc/net/route /proc/net/ipv6_route /proc/net/fib_trie
"""
SECTION = Section("nic_routes", lambda policy: _SCRIPT)


@dataclass(frozen=True)
class Route:
    """One route."""

    destination: str  # a network ("10.0.0.0/8"); "0.0.0.0/0" and "::/0" are the default
    interface: str  # through which it leads
    gateway: str | None  # the next hop; None: the interface is connected to the network
    metric: int  # of routes to the same network, the lowest metric counts

    @property
    def default(self) -> bool:
        """Whether this is a default route: for every address without another route."""
        return self.destination.endswith("/0")


@lru_cache(maxsize=4096)
def _bounds(network: str) -> tuple[int, int, int]:
    parsed = ipaddress.ip_network(network)
    return parsed.version, int(parsed.network_address), int(parsed.broadcast_address)


def _prefix(route: Route) -> int:
    return int(route.destination.rpartition("/")[2])


def _address_v4(text: str) -> str:
    """An address of /proc/net/route: a number in the byte order of little-endian machines."""
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(text)))


def _v4(line: str) -> Route | None:
    """The route in a line of /proc/net/route; None for a reject route, and for another line."""
    words = line.split()
    if len(words) < 8 or not all(re.fullmatch(r"[0-9A-F]{8}", words[i]) for i in (1, 2, 7)):
        return None
    if not re.fullmatch(r"[0-9A-F]{1,8}", words[3]) or not re.fullmatch(r"[0-9]{1,10}", words[6]):
        return None
    flags, bits = int(words[3], 16), f"{int.from_bytes(bytes.fromhex(words[7]), 'little'):032b}"
    if not flags & _UP or flags & _REJECT or "01" in bits:
        return None
    gateway = None if int(words[2], 16) == 0 else _address_v4(words[2])
    destination = f"{_address_v4(words[1])}/{bits.count('1')}"
    return Route(destination, words[0], gateway, int(words[6]))


def _v6(line: str) -> Route | None:
    """The route in a line of /proc/net/ipv6_route; None as for `_v4`."""
    match = re.fullmatch(
        r"([0-9a-f]{32}) ([0-9a-f]{2}) [0-9a-f]{32} [0-9a-f]{2} ([0-9a-f]{32}) "
        r"([0-9a-f]{8}) [0-9a-f]{8} [0-9a-f]{8} ([0-9a-f]{8}) +(\S+)",
        line,
    )
    if match is None:
        return None
    flags, prefix = int(match[5], 16), int(match[2], 16)
    if not flags & _UP or flags & (_REJECT | _LOCAL_V6 | _ANYCAST_V6) or prefix > 128:
        return None
    hop = int(match[3], 16)
    return Route(
        f"{ipaddress.IPv6Address(int(match[1], 16))}/{prefix}",
        match[6],
        str(ipaddress.IPv6Address(hop)) if hop else None,
        int(match[4], 16),
    )


def parse_routes(v4: Iterable[str], v6: Iterable[str]) -> tuple[Route, ...]:
    """The routes of /proc/net/route and /proc/net/ipv6_route, the widest first."""
    routes = []
    for route in (*map(_v4, v4), *map(_v6, v6)):
        try:
            if route is not None and route.interface != "lo":
                _bounds(route.destination)
                routes.append(route)
        except ValueError:  # bits beyond the prefix: no kernel has such a route
            continue
    routes.sort(key=lambda route: (_prefix(route), route.metric))
    return tuple(routes[:MOST_ROUTES])


def default_interface(routes: Iterable[Route]) -> str | None:
    """The interface of the default route: IPv4's if there is one, else IPv6's."""
    defaults = [route for route in routes if route.default]
    defaults.sort(key=lambda route: (":" in route.destination, route.metric))
    return defaults[0].interface if defaults else None


def _sorted(addresses: tuple[str, ...]) -> dict[int, list[int]]:
    """IP version -> the addresses as sorted numbers, without loopback, link-local and names."""
    numbers_by_version: dict[int, list[int]] = {4: [], 6: []}
    for text in set(addresses):
        try:
            address = ipaddress.ip_address(text.partition("/")[0])
        except ValueError:
            continue
        if not (address.is_loopback or address.is_link_local or address.is_unspecified):
            numbers_by_version[address.version].append(int(address))
    return {version: sorted(numbers) for version, numbers in numbers_by_version.items()}


address_set: Callable[[tuple[str, ...]], frozenset[str]] = cached_last(frozenset)
_sorted_fleet = cached_last(_sorted)


def count_reached(
    routes: Iterable[Route], addresses: tuple[str, ...], *, is_own: bool = False
) -> dict[str, int]:
    """Interface -> count of the addresses that it reaches, each by its narrowest route.

    Pass the same tuple for every node: it is sorted once, and each route is a slice of it.

    is_own: the addresses are this node's
    """
    by_version = _sorted(addresses) if is_own else _sorted_fleet(addresses)
    counts: dict[str, int] = {}
    taken: dict[int, list[tuple[int, int]]] = {4: [], 6: []}
    for route in sorted(routes, key=lambda route: (-_prefix(route), route.metric)):
        version, first, last = _bounds(route.destination)
        numbers = by_version[version]
        low, high = bisect_left(numbers, first), bisect_right(numbers, last)
        # Networks are nested or disjoint: the slice of a narrower route is inside or outside.
        inside = [
            interval for interval in taken[version] if low <= interval[0] and interval[1] <= high
        ]
        count = high - low - sum(end - start for start, end in inside)
        if count > 0:
            counts[route.interface] = counts.get(route.interface, 0) + count
            outside = [interval for interval in taken[version] if interval not in inside]
            taken[version] = [*outside, (low, high)]
    return counts


@dataclass(frozen=True)
class Address:
    """One address of this node."""

    text: str
    prefix: int  # length of the network's prefix
    interfaces: tuple[str, ...]  # the interfaces of the address's network; () without a route
    lasting: bool = True  # False for a temporary or tentative address


def _own_v4(routes: Iterable[Route], fib_trie: Iterable[str]) -> Iterator[Address]:
    """This node's IPv4 addresses in /proc/net/fib_trie: a leaf that has ``/32 host LOCAL``.

    /proc does not name the interface of such an address: it is that of the narrowest route to the
    address, without default routes.
    """
    candidates = [
        (*_bounds(route.destination)[1:], route)
        for route in routes
        if not route.default and ":" not in route.destination
    ]
    leaf, leaves = "", set[str]()
    for line in fib_trie:
        words = line.split()
        if len(words) == 2 and words[0] == "|--":
            leaf = words[1]
        elif words == ["/32", "host", "LOCAL"] and leaf not in leaves:
            leaves.add(leaf)
            try:
                number = int(ipaddress.IPv4Address(leaf))
            except ValueError:
                continue
            if number >> 24 == 127:
                continue
            hits = [route for first, last, route in candidates if first <= number <= last]
            best = max(map(_prefix, hits), default=32)
            narrowest = [route for route in hits if _prefix(route) == best]
            names = tuple(dict.fromkeys(route.interface for route in narrowest))
            direct = bool(narrowest) and narrowest[-1].gateway is None
            yield Address(leaf, best if direct else 32, names)


def _own_v6(if_inet6: Iterable[str]) -> Iterator[Address]:
    """This node's IPv6 addresses in /proc/net/if_inet6, without link-local ones."""
    for line in if_inet6:
        match = re.fullmatch(
            r"([0-9a-f]{32}) [0-9a-f]+ ([0-9a-f]{2}) [0-9a-f]+ ([0-9a-f]+) +(\S+)", line
        )
        if match is None or match[4] == "lo":
            continue
        address = ipaddress.IPv6Address(int(match[1], 16))
        if not address.is_link_local:
            lasting = not int(match[3], 16) & (_TEMPORARY | _TENTATIVE)
            yield Address(str(address), int(match[2], 16), (match[4],), lasting)


@lru_cache(maxsize=2)
def parse_section(output: Output) -> tuple[tuple[Route, ...], tuple[Address, ...]]:
    """The routes and this node's addresses, as far as the section was read. Never raises."""
    proc = by_path(output.text, "/proc/net/")
    all_routes = parse_routes(proc.get("route", ()), proc.get("ipv6_route", ()))
    own_addresses = (
        *_own_v6(proc.get("if_inet6", ())),
        *_own_v4(all_routes, proc.get("fib_trie", ())),
    )
    return all_routes, own_addresses


def addresses(own_addresses: Iterable[Address]) -> dict[str, list[str] | None]:
    """Interface -> its addresses ("10.0.0.1/24"); an interface without an address is missing.

    None for interfaces that share a subnet: their addresses cannot be assigned.
    """
    by_interface: dict[str, list[str] | None] = {}
    for address in own_addresses:
        for interface in address.interfaces:
            listed = by_interface.setdefault(interface, [])
            if len(address.interfaces) > 1:
                by_interface[interface] = None
            elif listed is not None:
                listed.append(f"{address.text}/{address.prefix}")
    return by_interface


# --- Interfaces, as /sys/class/net shows them.

NET = "/sys/class/net"
#: The interface types of include/uapi/linux/if_arp.h that are kinds here.
_INFINIBAND, _LOOPBACK = "32", "772"
#: DEVTYPE in the uevent file -> the kind.
_KIND_BY_DEVTYPE = {"bond": "bond", "bridge": "bridge", "vlan": "vlan", "wlan": "wifi"}


@dataclass(frozen=True)
class Nic:
    """One network interface. None: the kernel has no value, or none while it is down."""

    name: str  # of the interface
    # "ethernet" and "infiniband" are ports of adapters; "wifi", "usb" (often the BMC's), "bond",
    # "bridge", "vlan", "loopback"; all else is "virtual", also the switch's end of a virtual
    # function (a representor)
    kind: str
    # RFC 2863: "up", "down", "lowerlayerdown", "dormant", "testing", "unknown"
    operstate: str | None = None
    carrier: bool | None = None  # whether it has a link; None: it is administratively down
    admin_up: bool | None = None  # whether the interface is administratively up
    speed_mbps: int | None = None  # of the link
    duplex: str | None = None  # "full" or "half"
    mtu: int | None = None  # bytes of the largest packet
    mac: str | None = None  # the hardware address
    driver: str | None = None  # of the adapter
    firmware: str | None = None  # of the adapter, where its RDMA device shows it
    carrier_changes: int | None = None  # count of lost and regained links since it was made
    pci_address: str | None = None  # "0000:5e:00.0"
    numa_node: int | None = None  # the NUMA node to which the adapter is attached
    master: str | None = None  # the bond or bridge to which the interface belongs
    upper: tuple[str, ...] = ()  # the interfaces on top of this one: its master, its VLANs
    addresses: tuple[str, ...] | None = ()  # "10.0.0.1/24"; None: another shares its network
    routed: bool = False  # whether a route leads through the interface
    rx_errors: int | None = None  # packets, in its lifetime (kernel's networking/statistics.rst)
    tx_errors: int | None = None  # likewise
    rx_dropped: int | None = None  # likewise
    tx_dropped: int | None = None  # likewise
    rx_crc_errors: int | None = None  # likewise

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


def _attribute_of(path: str) -> tuple[str, str]:
    """The interface and the attribute of a path below `NET`; "uevent": one per line."""
    name, _, attribute = path.partition("/")
    if attribute.startswith("device/infiniband/"):
        return name, "firmware"
    if attribute.endswith("uevent"):
        return name, "device.uevent" if attribute.startswith("device/") else "uevent"
    if attribute == "device/numa_node":
        return name, "device.numa_node"
    return name, attribute if attribute.startswith("bonding") else attribute.rpartition("/")[2]


def attributes(text: str) -> dict[str, dict[str, str]]:
    """Interface -> attribute -> value. Every line of a uevent file is an attribute: "DEVTYPE"."""
    attributes_by_name: dict[str, dict[str, str]] = {}
    start = f"{NET}/"
    visited = set[str]()
    for line in text.split("\n"):
        # No path here contains a PCI address, and so none contains a colon.
        path, colon, value = line.partition(":")
        if not colon or not path.startswith(start):
            continue
        name, key = _attribute_of(path[len(start) :])
        values = attributes_by_name.setdefault(name, {})
        if key in _EVENTS:
            values.setdefault(key, "")
            word, equals, value = value.rstrip("\r").partition("=")
            if equals:
                values.setdefault(_EVENTS[key] + word, value)
        elif path not in visited:
            # The first line of a file, and the last file of an attribute.
            visited.add(path)
            values[key] = value.rstrip("\r")
    return attributes_by_name


#: A file with an attribute per line -> the prefix of their names.
_EVENTS = {"uevent": "", "device.uevent": "device."}
_NUMBER = re.compile(r"-?[0-9]{1,20}")
#: Counts of packets, which are fields of `Nic`.
_STATISTICS = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_crc_errors")


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def _at_least(number: int | None, least: int) -> int | None:
    """The number; None below ``least``: the kernel's -1 means "unknown"."""
    return number if number is not None and number >= least else None


def parse_count(text: str | None) -> int | None:
    return _at_least(_number(text), 0)


#: phys_port_name of a representor: the virtual function or subfunction at its other end
#: (Documentation/networking/representors.rst); a port of the adapter is "p0", "p0s1" or has none.
_REPRESENTOR = re.compile(r"(c[0-9]+)?pf[0-9]+(hpf|(vf|sf)[0-9]+)?")
#: SPEED_UNKNOWN is -1 (linux/ethtool.h). Old drivers print it without a sign, in 16 or 32 bits.
_NO_SPEED = 0xFFFF


def _kind(values: Mapping[str, str], hardware: bool) -> str:
    if values.get("type") == _LOOPBACK:
        return "loopback"
    if named := _KIND_BY_DEVTYPE.get(values.get("DEVTYPE", "")):
        return named
    if not hardware or _REPRESENTOR.fullmatch(values.get("phys_port_name", "")):
        return "virtual"
    if values.get("type") == _INFINIBAND:
        return "infiniband"
    return "usb" if values.get("device.DEVTYPE") == "usb_interface" else "ethernet"


def parse(
    name: str, values: Mapping[str, str], masters: Sequence[str], uppers: Sequence[str]
) -> Nic:
    """The interface of these attributes: "mtu", "DEVTYPE" of uevent, "device.DRIVER" and so on.
    Its addresses come from `routes`.

    A missing or invalid attribute becomes None: the kernel refuses some attributes while the
    interface is down (EINVAL), and shows -1 for an unknown speed.
    """
    hardware = "device.uevent" in values or any(key.startswith("device.") for key in values)
    flags, carrier, duplex = values.get("flags", ""), values.get("carrier"), values.get("duplex")
    speed = _at_least(_number(values.get("speed")), 1)
    names = ("carrier_changes", *_STATISTICS)
    counts: dict[str, Any] = {name: parse_count(values.get(name)) for name in names}
    return Nic(
        name=name,
        kind=_kind(values, hardware),
        operstate=values.get("operstate"),
        carrier={"0": False, "1": True}.get(carrier or ""),
        admin_up=bool(int(flags, 16) & 1) if re.fullmatch(r"0x[0-9a-f]{1,8}", flags) else None,
        speed_mbps=speed if speed != _NO_SPEED and (speed or 0) < 0x7FFFFFFF else None,
        duplex=duplex if duplex in ("full", "half") else None,
        mtu=_at_least(_number(values.get("mtu")), 1),
        mac=values.get("address"),
        driver=values.get("device.DRIVER"),
        firmware=values.get("firmware"),
        pci_address=values.get("device.PCI_SLOT_NAME"),
        numa_node=_at_least(_number(values.get("device.numa_node")), 0),
        master=masters[0] if masters else None,
        upper=tuple(uppers),
        **counts,
    )


#: The files with values of a single interface -> the only field that depends on the value.
_VARIES = {
    "address": "mac", "carrier_changes": "carrier_changes",
    **{f"statistics/{name}": name for name in _STATISTICS},
}  # fmt: skip


def find_varying(lines: Iterable[str]) -> Callable[[str], bool]:
    """Whether a path's value may differ between otherwise equal interfaces, as a function of the
    path: no other file sets its attribute.
    """
    start = f"{NET}/"
    paths = {line.partition(":")[0] for line in lines if line.startswith(start)}
    places = Counter(_attribute_of(path[len(start) :]) for path in paths)

    def varies(path: str) -> bool:
        relative = path.removeprefix(start)
        name, slash, file = relative.partition("/")
        varies_alone = path != relative and bool(name and slash) and file in _VARIES
        return varies_alone and places[_attribute_of(relative)] == 1

    return varies


def with_values(interfaces: Mapping[str, Nic], differing: Mapping[str, str]) -> dict[str, Nic]:
    fields: dict[str, dict[str, object]] = {}
    for path, text in differing.items():
        name, _, file = path[len(NET) + 1 :].partition("/")
        value, field = text.rstrip("\r"), _VARIES[file]
        fields.setdefault(name, {})[field] = value if field == "mac" else parse_count(value)
    return {
        name: fast_replace(nic, **fields[name]) if name in fields else nic
        for name, nic in interfaces.items()
    }


# --- Bonds: /sys/class/net/BOND/bonding, and the bonding_slave of each slave.
#
# Rules: Documentation/networking/bonding.rst, drivers/net/bonding/bond_sysfs{,_slave}.c.

#: The mode of a bond in which the switch takes part.
LACP = "802.3ad"


@dataclass(frozen=True)
class Slave:
    """One interface of a bond."""

    name: str  # of the interface
    mii: str | None = None  # "up", "down", "going down", "going back" for the bond; None: unknown
    # the LACP aggregator of the slave; 0: none ("N/A" of the kernel); None: no LACP, or unknown
    aggregator: int | None = None
    link_failures: int | None = None  # count of lost links since the slave joined the bond


@dataclass(frozen=True)
class Bond:
    """One bond."""

    name: str  # of the interface
    mode: str | None  # "802.3ad", "active-backup", "balance-rr" and so on
    mii: str | None  # the bond's link, with the same words as a slave's
    slaves: tuple[Slave, ...] = ()  # its interfaces
    active_slave: str | None = None  # the slave in use, in the modes that use one at a time
    # the LACP aggregator in use: a slave of another aggregator carries no packets
    aggregator: int | None = None
    partner_mac: str | None = None  # LACP's switch; zeros: none answers; None: no LACP, or hidden

    @property
    def lacp(self) -> bool:
        """Whether the bond uses LACP, so that the switch takes part."""
        return self.mode == LACP

    @property
    def one_at_a_time(self) -> bool:
        """Whether the bond has an active slave, without which it sends nothing."""
        return self.mode in ("active-backup", "balance-tlb", "balance-alb")


def _slave(name: str, values: Mapping[str, str], lacp: bool) -> Slave:
    aggregator, mii = values.get("bonding_slave/ad_aggregator_id"), "bonding_slave/mii_status"
    return Slave(
        name,
        None if values.get(mii) in ("", "unknown") else values.get(mii),
        0 if lacp and aggregator == "N/A" else parse_count(aggregator),
        parse_count(values.get("bonding_slave/link_failure_count")),
    )


def parse_bonding(attributes: Mapping[str, Mapping[str, str]]) -> dict[str, Bond]:
    """Name -> bond, from the attributes of all interfaces; an empty attribute is missing."""
    bonds = {}
    for name, values in attributes.items():
        if not any(key[:8] == "bonding/" for key in values):
            continue
        slaves = values.get("bonding/slaves", "").split()
        mode = values.get("bonding/mode", "").partition(" ")[0] or None
        lacp = mode == LACP
        bonds[name] = Bond(
            name,
            mode,
            values.get("bonding/mii_status") or None,
            tuple(_slave(slave, attributes.get(slave, {}), lacp) for slave in slaves),
            values.get("bonding/active_slave") or None,
            parse_count(values.get("bonding/ad_aggregator")),
            values.get("bonding/ad_partner_mac") or None,
        )
    return bonds

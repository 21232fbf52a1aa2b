"""One network interface, as /sys/class/net shows it, and where the routes of a node lead.

Routes are those of the kernel's main tables. /proc shows them, and the own addresses, without a
lock; a netlink dump (``ip route``) waits for the kernel's network lock, which a network driver in
trouble may hold for ever. Not seen are rules (``ip rule``), the tables that only rules use, and
all next hops but the first of a multipath route.
"""

from __future__ import annotations

import ipaddress
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from nodeready.subjects.base import Output, Section, changed, of_all_nodes

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
    length = len(start)
    for line in text.split("\n"):
        if line.startswith(start):
            path, colon, rest = line.partition(":")
            if colon:
                found.setdefault(path[length:], []).append(rest.rstrip("\r"))
    return found


@lru_cache(maxsize=16384)
def _named_by(path: str) -> tuple[str, str]:
    """The interface and the attribute of a path below `NET`; "uevent": each line is one."""
    name, _, attribute = path.partition("/")
    if attribute.startswith("device/infiniband/"):
        return name, "firmware"
    if attribute.endswith("uevent"):
        return name, "device.uevent" if attribute.startswith("device/") else "uevent"
    key = attribute.rpartition("/")[2]
    if attribute.startswith("bonding"):
        key = attribute
    return name, "device.numa_node" if key == "numa_node" else key


def attributes(text: str) -> dict[str, dict[str, str]]:
    """Interface -> attribute -> value. Every line of a uevent file is an attribute: "DEVTYPE"."""
    found: dict[str, dict[str, str]] = {}
    start = f"{NET}/"
    length, met = len(start), set[str]()
    for line in text.split("\n"):
        # No path here contains a PCI address, and so none contains a colon.
        path, colon, value = line.partition(":")
        if not colon or not path.startswith(start):
            continue
        # The same paths on thousands of nodes; a long one is none of these.
        read = _named_by if len(path) < 200 else _named_by.__wrapped__
        name, key = read(path[length:])
        values = found.setdefault(name, {})
        if key in _EVENTS:
            values.setdefault(key, "")
            word, equals, value = value.rstrip("\r").partition("=")
            if equals:
                values.setdefault(_EVENTS[key] + word, value)
        elif path not in met:
            # The first line of a file, and the last file of an attribute.
            met.add(path)
            values[key] = value.rstrip("\r")
    return found


#: An attribute of which each line is one -> what stands before that one's name.
_EVENTS = {"uevent": "", "device.uevent": "device."}
_NUMBER = re.compile(r"-?[0-9]{1,20}")


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def _above(number: int | None, least: int) -> int | None:
    """The number; None for a smaller one than ``least``: the kernel's -1 is "unknown"."""
    return number if number is not None and number >= least else None


def _count(text: str | None) -> int | None:
    return _above(_number(text), 0)


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
) -> Nic:
    """The interface of these attributes: "mtu", "DEVTYPE" of uevent, "device.DRIVER" and so on.
    Its addresses are told elsewhere.

    An attribute that is missing or makes no sense is None: the kernel refuses some attributes
    while the interface is down (EINVAL), and has -1 for a speed that it does not know.
    """
    hardware = "device.uevent" in values or any(key.startswith("device.") for key in values)
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
        carrier_changes=_count(values.get("carrier_changes")),
        pci_address=values.get("device.PCI_SLOT_NAME"),
        numa_node=_above(_number(values.get("device.numa_node")), 0),
        master=master,
        upper=upper,
        rx_errors=_count(values.get("rx_errors")),
        tx_errors=_count(values.get("tx_errors")),
        rx_dropped=_count(values.get("rx_dropped")),
        tx_dropped=_count(values.get("tx_dropped")),
        rx_crc_errors=_count(values.get("rx_crc_errors")),
    )


#: The files whose values are each interface's own, and no more than a field is made of them.
_VARIES = {
    "address": "mac",
    "carrier_changes": "carrier_changes",
    **{
        f"statistics/{name}": name
        for name in ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_crc_errors")
    },
}


def varying(lines: Iterable[str]) -> Callable[[str], bool]:
    """Whether the value of a file in this section is one that differs between interfaces that are
    alike, and no other file is taken for it.
    """
    start = f"{NET}/"
    paths = {line.partition(":")[0] for line in lines if line.startswith(start)}
    places = Counter(_named_by.__wrapped__(path[len(start) :]) for path in paths)

    def varies(path: str) -> bool:
        below = path.removeprefix(start)
        name, slash, file = below.partition("/")
        known = path != below and bool(name and slash) and file in _VARIES
        return known and places[_named_by.__wrapped__(below)] == 1

    return varies


def like(interfaces: Mapping[str, Nic], differing: Mapping[str, str]) -> dict[str, Nic]:
    """The interfaces with other values in these files."""
    made: dict[str, dict[str, object]] = {}
    for path, text in differing.items():
        name, _, file = path[len(NET) + 1 :].partition("/")
        value, field = text.rstrip("\r"), _VARIES[file]
        made.setdefault(name, {})[field] = value if field == "mac" else _count(value)
    return {
        name: changed(one, **made[name]) if name in made else one
        for name, one in interfaces.items()
    }


#: At most so many routes are kept, the widest first: wide routes lead to nodes. The narrow ones,
#: of which a network for containers makes thousands, lead to containers.
MOST_ROUTES = 256

_UP, _REJECT = 0x1, 0x200
_LOCAL_V6, _ANYCAST_V6 = 0x80000000, 0x100000
#: Flags of an address (include/uapi/linux/if_addr.h): temporary (RFC 8981), which changes every
#: day, and tentative, which is not proven to be this node's alone.
_TEMPORARY, _TENTATIVE = 0x01, 0x40

# The files that may be long and cut off come last.
_SCRIPT = r"""
    nr_lines routes /proc/net/if_inet6 /proc/net/route /proc/net/ipv6_route /proc/net/fib_trie
"""

SECTION = Section("nic_routes", lambda policy: _SCRIPT)


@dataclass(frozen=True)
class Route:
    """One route.

    destination: a network ("10.0.0.0/8"); "0.0.0.0/0" and "::/0" are the default
    gateway:     the next hop; None: the interface is connected to the network
    metric:      of routes to the same network, the one with the lowest metric counts
    """

    destination: str
    interface: str
    gateway: str | None
    metric: int

    @property
    def default(self) -> bool:
        """Whether this is a default route: it takes every address that no other route takes."""
        return self.destination.endswith("/0")


@lru_cache(maxsize=4096)
def _bounds(network: str) -> tuple[int, int, int]:
    """IP version, first and last address of a network, as numbers."""
    parsed = ipaddress.ip_network(network)
    return parsed.version, int(parsed.network_address), int(parsed.broadcast_address)


def _prefix(route: Route) -> int:
    return int(route.destination.rpartition("/")[2])


def _address_v4(text: str) -> str:
    """An address of /proc/net/route: a number in the byte order of little-endian machines."""
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(text)))


def _v4(line: str) -> Route | None:
    """The route of a line of /proc/net/route; None for a reject route, and for another line."""
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
    """The route of a line of /proc/net/ipv6_route; None as for `_v4`."""
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
    found = []
    for route in (*map(_v4, v4), *map(_v6, v6)):
        try:
            if route is not None and route.interface != "lo":
                _bounds(route.destination)
                found.append(route)
        except ValueError:  # bits beyond the prefix: no kernel has such a route
            continue
    found.sort(key=lambda route: (_prefix(route), route.metric))
    return tuple(found[:MOST_ROUTES])


def default_interface(routes: Iterable[Route]) -> str | None:
    """The interface of the default route: IPv4's if there is one, else IPv6's."""
    defaults = [route for route in routes if route.default]
    defaults.sort(key=lambda route: (":" in route.destination, route.metric))
    return defaults[0].interface if defaults else None


def _sorted(addresses: tuple[str, ...]) -> dict[int, list[int]]:
    """IP version -> the addresses as sorted numbers, without loopback, link-local and names."""
    found: dict[int, list[int]] = {4: [], 6: []}
    for text in set(addresses):
        try:
            address = ipaddress.ip_address(text.partition("/")[0])
        except ValueError:
            continue
        if not (address.is_loopback or address.is_link_local or address.is_unspecified):
            found[address.version].append(int(address))
    return {version: sorted(numbers) for version, numbers in found.items()}


known = of_all_nodes(frozenset)
_sorted_fleet = of_all_nodes(_sorted)


def reached(
    routes: Iterable[Route], addresses: tuple[str, ...], *, own: bool = False
) -> dict[str, int]:
    """Interface -> how many of the addresses it reaches; the narrowest route takes an address.

    Give the same tuple for every node: it is sorted once, and each route is a slice of it.

    own: they are this node's, and no other one's
    """
    by_version = _sorted(addresses) if own else _sorted_fleet(addresses)
    counts: dict[str, int] = {}
    taken: dict[int, list[tuple[int, int]]] = {4: [], 6: []}
    for route in sorted(routes, key=lambda route: (-_prefix(route), route.metric)):
        version, first, last = _bounds(route.destination)
        numbers = by_version[version]
        low, high = bisect_left(numbers, first), bisect_right(numbers, last)
        # Networks are nested or apart: a slice that a narrower route took is inside or outside.
        inside = [piece for piece in taken[version] if low <= piece[0] and piece[1] <= high]
        count = high - low - sum(end - start for start, end in inside)
        if count > 0:
            counts[route.interface] = counts.get(route.interface, 0) + count
            outside = [piece for piece in taken[version] if piece not in inside]
            taken[version] = [*outside, (low, high)]
    return counts


@dataclass(frozen=True)
class Address:
    """One address of this node.

    prefix:     length of the network's prefix
    interfaces: the interfaces of the address's network; () when no route tells
    lasting:    False for a temporary address, and for a tentative one
    """

    text: str
    prefix: int
    interfaces: tuple[str, ...]
    lasting: bool = True


def _own_v4(routes: Iterable[Route], fib_trie: Iterable[str]) -> Iterator[Address]:
    """This node's IPv4 addresses in /proc/net/fib_trie: a leaf that has ``/32 host LOCAL``.

    /proc does not say to which interface such an address belongs: it is the interface of the
    narrowest route to the address that is no default.
    """
    candidates = [
        (*_bounds(route.destination)[1:], route)
        for route in routes
        if not route.default and ":" not in route.destination
    ]
    seen = set()
    leaf = ""
    for line in fib_trie:
        words = line.split()
        if len(words) == 2 and words[0] == "|--":
            leaf = words[1]
        elif words == ["/32", "host", "LOCAL"] and leaf not in seen:
            seen.add(leaf)
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
    """The routes and this node's addresses, as far as the section came. Never raises."""
    proc = by_path(output.text, "/proc/net/")
    known = parse_routes(proc.get("route", ()), proc.get("ipv6_route", ()))
    own = (*_own_v6(proc.get("if_inet6", ())), *_own_v4(known, proc.get("fib_trie", ())))
    return known, own


def addresses(own: Iterable[Address]) -> dict[str, list[str] | None]:
    """Interface -> its addresses ("10.0.0.1/24"); an interface that has none is missing.

    Interfaces that share a subnet cannot be told apart: None.
    """
    found: dict[str, list[str] | None] = {}
    for one in own:
        for interface in one.interfaces:
            listed = found.setdefault(interface, [])
            if len(one.interfaces) > 1:
                found[interface] = None
            elif listed is not None:
                listed.append(f"{one.text}/{one.prefix}")
    return found

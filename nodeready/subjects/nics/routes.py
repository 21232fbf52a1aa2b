"""A node's routes and addresses.

/proc shows the routes of the kernel's main tables, and the addresses, without a lock. A netlink
dump (``ip route``) waits for the kernel's network lock, which a network driver in trouble may hold
for ever. Rules (``ip rule``), tables that only rules use, and all next hops but the first of a
multipath route are not visible there.
"""

from __future__ import annotations

import ipaddress
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from nodeready.core.base import Output, Section, cached_last


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
    """IP version, first and last address of a network, as numbers."""
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

"""The first packet of a connection from another node, and what can be said about it.

Certain are: TCP, the SYN flag, the destination port, that it is new to connection tracking, that
it comes for one of this node's addresses and through no loopback device. The moment is not, nor
are its source and interface, unless it is taken to come from one of the node's own networks.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Union

#: Whether a packet meets a condition; in this order, so that min is "and", max is "or".
NO, MAYBE, YES = 0, 1, 2

_Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]

#: Conditions on a header that the packet does not have are never met, negated or not.
_OTHER_PROTOCOLS = re.compile(
    r"(udp|udplite|icmp|icmpv6|sctp|dccp|esp|ah|comp|igmp|arp|vlan|gre|vxlan|hbh|frag|mh) |"
    r"rt (type|nexthdr|hdrlength|seg-left)$"
)
_INTERFACES = ("iif", "iifname")
# Bridges and ends of containers and virtual machines: jobs of several nodes do not meet there.
_VIRTUAL = re.compile(
    r"(docker\d+|docker_gwbridge|br-[0-9a-f]{12}|virbr\d+|(cni-)?podman\d+|cni\d+|lxcbr\d+|"
    r"lxdbr\d+|flannel\.\d+|cali.*|veth.*|kube-ipvs0|nodelocaldns)"
)
_FLAGS = {"fin": 1, "syn": 2, "rst": 4, "psh": 8, "ack": 16, "urg": 32, "ecn": 64, "cwr": 128}
_SYN = _FLAGS["syn"]

#: Conditions with a fixed set of values: those that are met, and those that may be.
_FIXED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "l4proto": (("tcp", "6", "all"), ()),
    "ip protocol": (("tcp", "6"), ()),
    "ip6 nexthdr": (("tcp", "6"), ()),
    "ct state": (("new",), ()),
    "ct status": ((), ("confirmed", "seen-reply", "assured", "expected", "dying")),
    "ct direction": (("original",), ()),
    "pkttype": (("host", "unicast"), ()),
    "fib daddr type": (("local",), ()),
    # A route back to the peer exists: reverse path filters are for forged sources.
    "reverse path": (("exists", "1", "true"), ()),
}


@dataclass(frozen=True)
class Packet:
    """Such a packet, to any port from first to last.

    family:    4 or 6
    addresses: the node's own addresses, as text; () when unknown
    marked:    some rule may have set a mark on it
    interface: where it comes in; "" when unknown
    network:   the network of its source, ``10.1.0.0/16``; "" when unknown
    """

    family: int
    first: int
    last: int
    addresses: tuple[str, ...] = ()
    marked: bool = False
    interface: str = ""
    network: str = ""

    def lacks(self, selector: str) -> bool:
        """Whether it has nothing of the kind: another protocol's field, an output interface."""
        other = "ip6 " if self.family == 4 else "ip "
        return selector.startswith(other) or _OTHER_PROTOCOLS.match(selector) is not None


def ports_of(value: str) -> tuple[int, int] | None:
    """``22`` or ``1024-65535`` as first and last; None for anything else (a service's name)."""
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", value)
    return (int(match[1]), int(match[2] or match[1])) if match else None


@lru_cache(maxsize=4096)
def _network(value: str) -> _Network | None:
    try:
        return ipaddress.ip_network(value, strict=False)
    except ValueError:
        return None


def is_virtual(interface: str) -> bool:
    """Whether it belongs to containers or virtual machines of this node."""
    return _VIRTUAL.fullmatch(interface) is not None


def _interface(value: str, packet: Packet) -> int:
    """``eth0``, or a beginning of names: ``eth*`` of nft, ``eth+`` of iptables."""
    if value == "lo" or is_virtual(value):
        return NO
    if not packet.interface:
        return MAYBE
    if value.endswith(("*", "+")):
        return YES if packet.interface.startswith(value[:-1]) else NO
    return YES if packet.interface == value else NO


def _source(value: str, packet: Packet) -> int:
    net = _network(value)
    if net is None:
        return MAYBE
    if net.prefixlen == 0:
        return YES
    one = net.network_address
    odd = one.is_loopback or one.is_multicast or one.is_unspecified or str(one) in _BROADCAST
    if odd or (net.num_addresses == 1 and str(one) in packet.addresses):
        return NO
    peers = _network(packet.network) if packet.network else None
    if isinstance(net, ipaddress.IPv4Network) and isinstance(peers, ipaddress.IPv4Network):
        return YES if peers.subnet_of(net) else MAYBE if peers.overlaps(net) else NO
    return MAYBE


_BROADCAST = ("255.255.255.255",)


def _destination(value: str, packet: Packet) -> int:
    net = _network(value)
    if net is None:
        return MAYBE
    if net.prefixlen == 0:
        return YES
    one = net.network_address
    if one.is_loopback or one.is_multicast or str(one) in _BROADCAST:
        return NO
    own = [ipaddress.ip_address(text) for text in packet.addresses]
    inside = [address in net for address in own if address.version == packet.family]
    if not inside:
        return MAYBE
    return YES if all(inside) else MAYBE if any(inside) else NO


def _flags(value: str) -> int:
    """``syn`` alone: the flag is set. ``syn/fin,syn,rst,ack``: of these, only that one is."""
    wanted, slash, mask = value.partition("/")
    try:
        bits = sum(_FLAGS[name] for name in wanted.lower().split(",") if name not in ("", "none"))
        if mask.upper() == "ALL":
            mask = ",".join(_FLAGS)
        of = sum(_FLAGS[name] for name in mask.lower().split(",") if name)
    except KeyError:
        return MAYBE
    met = (_SYN & of) == bits if slash else bool(_SYN & bits)
    return YES if met else NO


def _mark(value: str, packet: Packet) -> int:
    """``0x8000/0x8000``, value and mask: a packet has mark 0 until a rule sets one."""
    match = re.fullmatch(r"(0x[0-9a-f]{1,8}|\d{1,10})(?:/(0x[0-9a-f]{1,8}|\d{1,10}))?", value)
    if match is None or packet.marked:
        return MAYBE
    return YES if int(match[1], 0) == 0 else NO


def _ports(value: str, first: int, last: int) -> int:
    ports = ports_of(value)
    if ports is None:
        return MAYBE
    if ports[0] <= first and last <= ports[1]:
        return YES
    return NO if last < ports[0] or ports[1] < first else MAYBE


def holds(selector: str, value: str, packet: Packet) -> int:
    """Whether the packet's ``selector`` is ``value``: YES, NO or MAYBE."""
    if selector in _FIXED:
        always, perhaps = _FIXED[selector]
        value = value.lower()
        return YES if value in always else MAYBE if value in perhaps else NO
    if selector in ("tcp dport", "th dport"):
        return _ports(value, packet.first, packet.last)
    if selector in ("tcp sport", "th sport"):
        return _ports(value, 1024, 65535)
    if selector == "tcp flags":
        return _flags(value)
    if selector in _INTERFACES:
        return _interface(value, packet)
    if selector in ("ip saddr", "ip6 saddr"):
        return _source(value, packet)
    if selector in ("ip daddr", "ip6 daddr"):
        return _destination(value, packet)
    if selector == "nfproto":
        return YES if value == f"ipv{packet.family}" else NO
    if selector == "protocol":
        return YES if value == ("ip" if packet.family == 4 else "ip6") else NO
    if selector == "mark":
        return _mark(value, packet)
    return MAYBE

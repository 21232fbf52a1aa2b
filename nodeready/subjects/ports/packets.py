"""The packets of a job's connections, and whether a packet has a value in a field.

The connections are those of a job's rendezvous: from a peer to a port of a range on this node, and
from this node to such a port of a peer. Each has a first packet, the answer to it, and later
packets (`PACKETS`).

Known are: TCP and its flags, the ports, the result of connection tracking, that the packet is no
fragment, has no IPsec and no mark, and Linux's default options. Sender and receiver are one pair
of addresses; the caller tries a pair for each group of addresses that the rules distinguish.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache

from nodeready.subjects.ports.port_ranges import KERNEL_EPHEMERAL, Range

#: All bits of a mark.
ALL_BITS = 0xFFFFFFFF
#: Whether a packet meets a condition; in this order min is "and", max is "or".
NO, MAYBE, YES = 0, 1, 2

#: Selectors of a header that the packet does not have: such a condition is never met.
_OTHER_PROTOCOLS = re.compile(
    r"(udp|udplite|icmp|icmpv6|sctp|dccp|esp|ah|comp|igmp|arp|vlan|gre|gretap|vxlan|geneve|hbh|"
    r"frag|mh|dst) |rt (type|nexthdr|hdrlength|seg-left)$"
)
# Bridges, tunnels and ends of containers and virtual machines, and the host's link to its BMC:
# they carry no packet of a peer's job.
_VIRTUAL = re.compile(
    r"(docker\d+|docker_gwbridge|br-[0-9a-f]{12}|virbr\d+(-nic)?|(cni-)?podman\d+|cni\d+|lxcbr\d+|"
    r"lxdbr\d+|incusbr\d+|nerdctl\d+|cbr\d+|mpqemubr\d+|vboxnet\d+|vmnet\d+|vnet\d+|tap.*|"
    r"flannel[.-].*|cali.*|veth.*|kube-ipvs0|kube-bridge|nodelocaldns|cilium_.*|lxc.*|weave|"
    r"antrea-gw\d+|ovn-k8s-mp\d+|ovs-system|genev_sys_.*|vxlan[.].*|vxlan-.*|tunl\d+|ip6tnl\d+|"
    r"dummy\d+|eni[0-9a-f]{11}|gke[0-9a-f]{11}|azv[0-9a-f]{11}|tailscale\d+|zt[a-z0-9]{8,}|"
    r"usb\d+|enx[0-9a-f]{12}|idrac|bmc\d*)"
)
_FLAGS = {
    "fin": 1, "syn": 2, "rst": 4, "psh": 8, "ack": 16, "urg": 32, "ecn": 64, "ece": 64, "cwr": 128,
}  # fmt: skip
_ALL_FLAGS = "fin,syn,rst,psh,ack,urg"


@dataclass(frozen=True)
class PacketKind:
    """A packet of a connection.

    outgoing: this node opens the connection
    inbound:  the packet comes in
    first:    it is the connection's first packet
    syn:      it has the SYN flag; a packet without SYN carries data
    words:    the packet in words; {} is replaced by the ports
    """

    outgoing: bool
    inbound: bool
    first: bool
    syn: bool
    words: str

    @property
    def reply(self) -> bool:
        """Whether the accepting side sends it."""
        return self.outgoing == self.inbound

    @property
    def flags(self) -> int:
        return (_FLAGS["syn"] if self.syn else 0) | (0 if self.first else _FLAGS["ack"])


#: The packets that a job needs, the most informative first.
PACKETS = tuple(
    PacketKind(*values)
    for values in (
        # outgoing, inbound, first, syn, words
        (False, True, True, True, "{}"),
        (False, False, False, True, "the answers from {}"),
        (False, True, False, False, "later packets to {}"),
        (False, False, False, False, "later packets from {}"),
        (True, False, True, True, "connections to other nodes' {}"),
        (True, True, False, True, "the answers of other nodes' {}"),
        (True, False, False, False, "later packets to other nodes' {}"),
        (True, True, False, False, "later packets from other nodes' {}"),
    )
)


@dataclass(frozen=True)
class State:
    """The changes of the rules to the packet so far.

    mark, ct_mark: (value, its known bits)
    untracked:     connection tracking ignores the packet
    """

    mark: Range = (0, ALL_BITS)
    ct_mark: Range = (0, ALL_BITS)
    untracked: bool = False


@dataclass(frozen=True)
class Packet:
    """A packet of a connection to any port from first to last.

    family:    4 or 6
    addresses: the node's own addresses, as text; () when unknown
    interface: by which the packet comes in or goes out; "" when unknown
    own_address, peer_address: this node's address and the peer's; None when unknown
    is_near:   the peer is in a network of this node
    sources:   the ports from which programs connect, in their order
    other_interfaces: the node's other interfaces with networks
    tracked:   connection tracking comes before the chain
    lost:      connection tracking has not seen the connection's first packet
    """

    family: int
    first: int
    last: int
    addresses: tuple[str, ...] = ()
    interface: str = ""
    own_address: int | None = None
    peer_address: int | None = None
    is_near: bool = True
    sources: tuple[Range, ...] = (KERNEL_EPHEMERAL,)
    other_interfaces: tuple[str, ...] = ()
    kind: PacketKind = PACKETS[0]
    state: State = State()
    tracked: bool = True
    lost: bool = False

    def lacks(self, selector: str) -> bool:
        """Whether the packet has no such field: it is of another protocol or IP version."""
        if selector.startswith("ip6 " if self.family == 4 else "ip "):
            return True
        if selector.startswith("ct ") and selector != "ct state":
            return self.ct_state in ("untracked", "invalid")
        if selector.startswith("ether ") and not self.kind.inbound:
            return True
        if selector == "tcp option maxseg size" and not self.kind.syn:
            return True
        if selector in ("skuid", "skgid", "oifgroup", "oiftype") and self.kind.inbound:
            return True
        if selector in ("iifgroup", "iiftype") and not self.kind.inbound:
            return True
        return _OTHER_PROTOCOLS.match(selector) is not None

    @property
    def ct_state(self) -> str:
        if self.state.untracked:
            return "untracked"
        if not self.tracked or (self.lost and self.kind.syn):
            return "invalid"
        if self.lost:
            # net.netfilter.nf_conntrack_tcp_loose: a connection is picked up in its middle.
            return "new"
        return "new" if self.kind.first else "established"


def number(text: str) -> int | None:
    """A number, decimal or hexadecimal."""
    match = re.fullmatch(r"0x[0-9a-fA-F]{1,16}|\d{1,19}", text)
    return int(text, 0 if text[:2] == "0x" else 10) if match else None


def ports_of(value: str) -> Range | None:
    """``22`` or ``1024-65535`` as first and last; None for anything else."""
    match = re.fullmatch(r"(\d{1,19})(?:-(\d{1,19}))?", value)
    return (int(match[1]), int(match[2] or match[1])) if match else None


@lru_cache(maxsize=65536)
def span_of(value: str) -> tuple[int, int, int] | None:
    """(family, first, last) of an address, a network, or a range of addresses."""
    try:
        if "-" in value:
            low, high = (ipaddress.ip_address(part) for part in value.split("-", 1))
            return (low.version, int(low), int(high)) if low.version == high.version else None
        net = ipaddress.ip_network(value, strict=False)
    except ValueError:
        return None
    return net.version, int(net.network_address), int(net.broadcast_address)


def is_virtual(interface: str) -> bool:
    """Whether an interface belongs to containers or virtual machines of this node."""
    return _VIRTUAL.fullmatch(interface) is not None


def _range_matches(actual: Range, expected: Range) -> int:
    if expected[0] <= actual[0] and actual[1] <= expected[1]:
        return YES
    return NO if actual[1] < expected[0] or expected[1] < actual[0] else MAYBE


def _interface_matches(value: str, packet: Packet) -> int:
    """``eth0``, or a beginning of names: ``eth*`` of nft, ``eth+`` of iptables."""
    if value == "lo" or is_virtual(value):
        return NO
    if value in ("*", "+"):
        return YES
    if not packet.interface:
        return MAYBE
    if value.endswith(("*", "+")):
        return YES if packet.interface.startswith(value[:-1]) else NO
    return YES if packet.interface == value else NO


def is_own_side(selector: str, packet: Packet) -> bool:
    """Whether an address's selector is this node's address, and not the peer's."""
    kind = packet.kind
    words = selector.split()
    if words[0] == "ct":
        # The side that opened the connection is the source of the original direction.
        opener = (words[1] == "original") == words[-1].startswith(("saddr", "proto-src"))
        return opener == kind.outgoing
    return (words[-1] == "saddr") != kind.inbound


def _address_matches(selector: str, value: str, packet: Packet) -> int:
    span = span_of(value)
    if span is None:
        return MAYBE
    family, first, last = span
    if family != packet.family:
        return NO
    maximum = 2 ** (32 if family == 4 else 128) - 1
    if (first, last) == (0, maximum):
        return YES
    is_own = is_own_side(selector, packet)
    address_number = packet.own_address if is_own else packet.peer_address
    if address_number is not None:
        return YES if first <= address_number <= last else NO
    low = (ipaddress.IPv4Address if family == 4 else ipaddress.IPv6Address)(first)
    if low.is_loopback or low.is_multicast or low.is_unspecified or first == maximum:
        return NO
    own_addresses = map(ipaddress.ip_address, packet.addresses)
    own_numbers = [int(address) for address in own_addresses if address.version == family]
    if not is_own:
        return NO if first == last and first in own_numbers else MAYBE
    inside = [first <= address <= last for address in own_numbers]
    return MAYBE if not inside else YES if all(inside) else MAYBE if any(inside) else NO


def _flags_match(value: str, packet: Packet) -> int:
    """``syn``: the flag is set. ``syn/fin,syn,rst,ack``: of the latter, only syn is set."""
    flag_names, slash, mask = value.lower().partition("/")
    flag_names, mask = (_ALL_FLAGS if text == "all" else text for text in (flag_names, mask))
    try:
        bits = mask_bits = 0
        for name in flag_names.split(","):
            bits |= 0 if name in ("", "none") else _FLAGS[name]
        for name in mask.split(","):
            mask_bits |= _FLAGS[name] if name else 0
    except KeyError:
        return MAYBE
    have = packet.kind.flags
    is_met = (have & mask_bits) == bits if slash else bool(have & bits)
    return YES if is_met else NO


def _mark_matches(value: str, mark: Range) -> int:
    """``0x8000/0x8000``: value and mask; ``0x1-0xff``: a range."""
    have, known_bits = mark
    if "-" in value:
        low, high = (number(part) for part in value.split("-", 1))
        if low is None or high is None or known_bits != ALL_BITS:
            return MAYBE
        return YES if low <= have <= high else NO
    text, _, mask_text = value.partition("/")
    expected, mask = number(text), number(mask_text) if mask_text else ALL_BITS
    if expected is None or mask is None:
        return MAYBE
    if (have ^ expected) & known_bits & mask:
        return NO
    if expected & ~mask:
        return NO
    return YES if mask & ~known_bits & ALL_BITS == 0 else MAYBE


_DSCP = {"cs0": 0, "be": 0, "ef": 46, "lephb": 1, "df": 0, "va": 44} | {
    **{f"cs{number}": number * 8 for number in range(1, 8)},
    **{f"af{x}{y}": x * 8 + y * 2 for x in range(1, 5) for y in range(1, 4)},
}


def _length_range(packet: Packet) -> Range:
    """The bytes of the packet with its IP header; a frame is the maximum."""
    header = 0 if packet.family == 4 else 20
    return (44 + header, 60 + header) if packet.kind.syn else (40 + header, 1500)


def _field_range(selector: str, packet: Packet) -> Range | None:
    """The numbers that the field may have; None when unknown."""
    kind = packet.kind
    service, chosen = (packet.first, packet.last), (packet.sources[0][0], packet.sources[-1][1])
    if selector in ("tcp dport", "th dport"):
        return chosen if kind.reply else service
    if selector in ("tcp sport", "th sport"):
        return service if kind.reply else chosen
    if selector in ("ct original proto-dst", "ct reply proto-src"):
        return service
    if selector in ("ct original proto-src", "ct reply proto-dst"):
        return chosen
    if selector in ("ip ttl", "ip6 hoplimit"):
        # Linux sends 64 (net.ipv4.ip_default_ttl), and every router subtracts 1.
        return (64, 64) if packet.is_near or not kind.inbound else (40, 64)
    if selector in ("length", "ip length"):
        return _length_range(packet)
    if selector == "ip6 length":
        low, high = _length_range(packet)
        return low - 40, high - 40
    if selector == "tcp option maxseg size":
        return (1220, 9180)
    if selector == "tcp window":
        return (1024, 65535)
    if selector == "tcp doff":
        return (5, 15)
    if selector in ("ip version", "ip6 version"):
        return (packet.family,) * 2
    if selector == "ip hdrlength":
        return (5, 5)
    if selector in _ZERO or (selector == "tcp ackseq" and kind.first):
        return (0, 0)
    return None


#: Fields that are 0 in a packet unless a rule or a program sets them.
_ZERO = {
    "ip dscp", "ip6 dscp", "ip ecn", "ip6 ecn", "tcp urgptr", "priority", "rtclassid", "iifgroup",
    "oifgroup", "ct zone", "rt classid", "secmark", "socket transparent", "socket mark",
}  # fmt: skip
_NAMES = {"not-ect": 0, "default": 0, "none": 0, "cosmos": 0}


def _number_matches(selector: str, value: str, packet: Packet) -> int:
    actual = _field_range(selector, packet)
    if actual is None:
        return MAYBE
    if value in _DSCP and selector.endswith("dscp"):
        expected: Range | None = (_DSCP[value],) * 2
    elif value in _NAMES:
        expected = (_NAMES[value],) * 2
    else:
        low, dash, high = value.partition("-")
        first, last = number(low), number(high if dash else low)
        expected = (first, last) if first is not None and last is not None else None
    if expected is None:
        # The name of a value other than the default, such as a class of packets. Old versions of
        # nft print the names of services, too: their ports stand in a file of the node.
        return NO if selector in _ZERO and re.fullmatch(r"[a-z][\w:-]*", value) else MAYBE
    return _range_matches(actual, expected)


# Accounts of services, which run no jobs, as Debian and RHEL name them.
_SERVICE_ACCOUNTS = re.compile(
    r"root|daemon|bin|sys|adm|lp|mail|news|www-data|apache|nginx|nobody|nogroup|sshd|ntp|chrony|"
    r"postfix|systemd-.*|_.*|dnsmasq|bind|named|unbound|polkitd|dbus|messagebus|debian-tor|tor|"
    r"squid|proxy|clamav|munge|slurm|avahi|rpc|rpcuser|statd|tss|uuidd|syslog|redis|postgres|mysql"
)


def _account_matches(value: str) -> int:
    """Users below 1000 (login.defs(5)) run no jobs; a higher user may run jobs."""
    low, dash, high = value.partition("-")
    first, last = number(low), number(high if dash else low)
    if first is None or last is None:
        return NO if _SERVICE_ACCOUNTS.fullmatch(value) else MAYBE
    if last < 1000:
        return NO
    return YES if first <= 1000 and last >= 60000 else MAYBE


#: TCP options that Linux sends by default -> True: in every packet; False: in SYN packets.
_OPTIONS = {
    "tcp option maxseg": False,
    "tcp option window": False,
    "tcp option sack-perm": False,
    "tcp option sack-permitted": False,
    "tcp option timestamp": True,
}

#: Selector -> the packet's values, and its possible values.
_FIXED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "l4proto": (("tcp", "6", "all"), ()),
    "ip protocol": (("tcp", "6"), ()),
    "ip6 nexthdr": (("tcp", "6"), ()),
    "ct protocol": (("tcp", "6"), ()),
    "ct status": ((), ("confirmed", "seen-reply", "assured", "dying")),
    # A route back to the peer exists: reverse path filters drop forged sources only.
    "reverse path": (("exists", "1", "true"), ()),
    "ipsec": (("missing", "0", "false", "none"), ()),
    "extension": (("missing", "0", "false"), ()),
    "socket wildcard": ((), ("0", "1")),
    "ct helper": ((), ()),
    "ct label": ((), ()),
    "geography": ((), ()),
}


def field_matches(selector: str, value: str, packet: Packet) -> int:
    """Whether the packet's ``selector`` is ``value``: YES, NO or MAYBE."""
    kind = packet.kind
    if selector in _FIXED:
        always, perhaps = _FIXED[selector]
        value = value.lower()
        return YES if value in always else MAYBE if value in perhaps else NO
    if selector == "ct state":
        return YES if value.lower() == packet.ct_state else NO
    if selector == "ct direction":
        return YES if value.lower() == ("reply" if kind.reply else "original") else NO
    if selector == "tcp flags":
        return _flags_match(value, packet)
    if selector in ("iifname", "oifname"):
        if (selector == "iifname") == kind.inbound:
            return _interface_matches(value, packet)
        return NO
    if selector.endswith(("saddr", "daddr")) and not selector.startswith("ether"):
        return _address_matches(selector, value, packet)
    if selector == "ether daddr":
        return NO if value.lower() == "ff:ff:ff:ff:ff:ff" else MAYBE
    if selector == "ether saddr":
        return NO if value.lower() == "00:00:00:00:00:00" else MAYBE
    if selector in ("nfproto", "ct l3proto"):
        return YES if value == f"ipv{packet.family}" else NO
    if selector in ("protocol", "ether type"):
        return YES if value == ("ip" if packet.family == 4 else "ip6") else NO
    if selector in ("fib daddr type", "fib saddr type"):
        is_own = (selector == "fib daddr type") == kind.inbound
        return YES if value.lower() == ("local" if is_own else "unicast") else NO
    if selector == "pkttype":
        return YES if value.lower() in ("host", "unicast") else NO
    if selector in _OPTIONS:
        is_present = _OPTIONS[selector] or kind.syn
        return YES if (value in ("exists", "1")) == is_present else NO
    if selector == "mark":
        return _mark_matches(value, packet.state.mark)
    if selector == "ct mark":
        return _mark_matches(value, packet.state.ct_mark)
    if selector in ("skuid", "skgid"):
        return _account_matches(value)
    if selector == "mss":
        return _number_matches("tcp option maxseg size", value, packet) if kind.syn else NO
    if selector == "either port":
        return max(_number_matches(f"tcp {port}", value, packet) for port in ("dport", "sport"))
    return _number_matches(selector, value, packet)

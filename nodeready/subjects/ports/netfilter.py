"""What a packet filter does with a job's connections: chains, rules, and their evaluation.

The connections are those that a job's rendezvous needs: from another node to a port of a range on
this node, and from this node to such a port of another node. Each has a first packet, the answer
to it, and packets that follow (`PACKETS`). A packet meets a rule's condition for certain (YES, NO)
or not (MAYBE: the moment, another program's answer). From that follows what can happen to it, by
nft(8) and iptables(8): a dropped packet is gone, an accepted one goes on to the next base chain
(in the order of hooks and priorities), and one that reaches the end of a base chain gets that
chain's policy. Marks and notrack are followed on the packet's way. Not seen here: XDP and other
eBPF programs, filters of bridges and of ARP, and filters outside the node.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Union

from nodeready.subjects.parsed_template import fast_replace
from nodeready.subjects.ports.port_ranges import KERNEL_EPHEMERAL, Range, join_ranges

# --- The packets of a connection, and the conditions that they meet.
#
# Certain are: TCP and its flags, the ports, what connection tracking makes of the packet, that it
# is no fragment, has no IPsec, no mark, and Linux's default options. Sender and receiver are one
# pair of addresses, of which the caller takes as many as the rules tell apart.

#: Whether a packet meets a condition; in this order min is "and", max is "or".
NO, MAYBE, YES = 0, 1, 2

_Known = Union[int, None]

#: Selectors of a header that the packet does not have: such a condition is never met.
_OTHER_PROTOCOLS = re.compile(
    r"(udp|udplite|icmp|icmpv6|sctp|dccp|esp|ah|comp|igmp|arp|vlan|gre|gretap|vxlan|geneve|hbh|"
    r"frag|mh|dst) |rt (type|nexthdr|hdrlength|seg-left)$"
)
# Bridges, tunnels and ends of containers and virtual machines, and the host's link to its BMC: no
# packet of another node's job comes that way.
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

    own:     this node opens the connection
    inbound: the packet comes in
    first:   it is the connection's first packet
    syn:     it has the SYN flag; without, it carries data
    words:   what is lost when it is dropped; {} stands for the ports
    """

    own: bool
    inbound: bool
    first: bool
    syn: bool
    words: str = "{}"

    @property
    def reply(self) -> bool:
        """Whether it goes from the side that was connected to."""
        return self.own == self.inbound

    @property
    def flags(self) -> int:
        return (_FLAGS["syn"] if self.syn else 0) | (0 if self.first else _FLAGS["ack"])


#: The packets that a job needs, the most telling first.
PACKETS = (
    PacketKind(own=False, inbound=True, first=True, syn=True),
    PacketKind(own=False, inbound=False, first=False, syn=True, words="the answers from {}"),
    PacketKind(own=False, inbound=True, first=False, syn=False, words="what follows to {}"),
    PacketKind(own=False, inbound=False, first=False, syn=False, words="what follows from {}"),
    PacketKind(own=True, inbound=False, first=True, syn=True, words="the way to other nodes' {}"),
    PacketKind(
        own=True, inbound=True, first=False, syn=True, words="the answers of other nodes' {}"
    ),
    PacketKind(
        own=True, inbound=False, first=False, syn=False, words="what follows to other nodes' {}"
    ),
    PacketKind(own=True, inbound=True, first=False, syn=False, words="what other nodes' {} send"),
)


@dataclass(frozen=True)
class State:
    """What rules have made of the packet so far.

    mark, ct_mark: (value, the bits of it that are known)
    untracked: connection tracking passes it over
    """

    mark: Range = (0, 0xFFFFFFFF)
    ct_mark: Range = (0, 0xFFFFFFFF)
    untracked: bool = False


@dataclass(frozen=True)
class Packet:
    """A packet of a connection to any port from first to last.

    family:    4 or 6
    addresses: the node's own addresses, as text; () when unknown
    interface: by which the packet comes in or goes out; "" when unknown
    own, peer: this node's address and the other node's; None when unknown
    near:      the other node is in a network of this node
    sources:   the ports from which programs connect, in their order
    others:    the node's other interfaces that have networks
    tracked:   the chain is behind connection tracking
    lost:      connection tracking has not seen the connection's first packet
    """

    family: int
    first: int
    last: int
    addresses: tuple[str, ...] = ()
    interface: str = ""
    own: _Known = None
    peer: _Known = None
    near: bool = True
    sources: tuple[Range, ...] = (KERNEL_EPHEMERAL,)
    others: tuple[str, ...] = ()
    kind: PacketKind = PACKETS[0]
    state: State = State()
    tracked: bool = True
    lost: bool = False

    def lacks(self, selector: str) -> bool:
        """Whether the packet has no such field: another protocol's, or of the other family."""
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


# What a selector of the packet is: a range of numbers, or None when unknown.


def number(text: str) -> int | None:
    """A number, decimal or hexadecimal."""
    match = re.fullmatch(r"0x[0-9a-fA-F]{1,16}|\d{1,19}", text)
    return int(text, 0 if text[:2] == "0x" else 10) if match else None


def ports_of(value: str) -> Range | None:
    """``22`` or ``1024-65535`` as first and last; None for anything else."""
    match = re.fullmatch(r"(\d{1,19})(?:-(\d{1,19}))?", value)
    return (int(match[1]), int(match[2] or match[1])) if match else None


@lru_cache(maxsize=256)
def _service(name: str) -> Range | None:
    """The port of a service: old versions of nft print names."""
    try:
        return (socket.getservbyname(name, "tcp"),) * 2
    except (OSError, UnicodeError, ValueError):
        return None


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


def _within(actual: Range, expected: Range) -> int:
    if expected[0] <= actual[0] and actual[1] <= expected[1]:
        return YES
    return NO if actual[1] < expected[0] or expected[1] < actual[0] else MAYBE


def _interface(value: str, packet: Packet) -> int:
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


def _sits(selector: str, packet: Packet) -> bool:
    """Whether an address's selector means this node's address, and not the peer's."""
    kind = packet.kind
    words = selector.split()
    if words[0] == "ct":
        # The source of the original direction is who opened the connection.
        opener = (words[1] == "original") == words[-1].startswith(("saddr", "proto-src"))
        return opener == kind.own
    return (words[-1] == "saddr") != kind.inbound


def _address(selector: str, value: str, packet: Packet) -> int:
    span = span_of(value)
    if span is None:
        return MAYBE
    family, first, last = span
    if family != packet.family:
        return NO
    maximum = 2 ** (32 if family == 4 else 128) - 1
    if (first, last) == (0, maximum):
        return YES
    is_own = _sits(selector, packet)
    address_number = packet.own if is_own else packet.peer
    if address_number is not None:
        return YES if first <= address_number <= last else NO
    low = (ipaddress.IPv4Address if family == 4 else ipaddress.IPv6Address)(first)
    if low.is_loopback or low.is_multicast or low.is_unspecified or first == maximum:
        return NO
    own_numbers = [int(address) for address in map(ipaddress.ip_address, packet.addresses)
           if address.version == family]  # fmt: skip
    if not is_own:
        return NO if first == last and first in own_numbers else MAYBE
    inside = [first <= address <= last for address in own_numbers]
    return MAYBE if not inside else YES if all(inside) else MAYBE if any(inside) else NO


def _flags(value: str, packet: Packet) -> int:
    """``syn``: the flag is set. ``syn/fin,syn,rst,ack``: of the latter, only syn is set."""
    flag_names, slash, mask = value.lower().partition("/")
    flag_names, mask = (_ALL_FLAGS if text == "all" else text for text in (flag_names, mask))
    try:
        bits = of = 0
        for name in flag_names.split(","):
            bits |= 0 if name in ("", "none") else _FLAGS[name]
        for name in mask.split(","):
            of |= _FLAGS[name] if name else 0
    except KeyError:
        return MAYBE
    have = packet.kind.flags
    is_met = (have & of) == bits if slash else bool(have & bits)
    return YES if is_met else NO


def _mark(value: str, mark: Range) -> int:
    """``0x8000/0x8000``: value and mask; ``0x1-0xff``: a range."""
    have, known_bits = mark
    if "-" in value:
        low, high = (number(part) for part in value.split("-", 1))
        if low is None or high is None or known_bits != 0xFFFFFFFF:
            return MAYBE
        return YES if low <= have <= high else NO
    text, _, of = value.partition("/")
    expected, mask = number(text), number(of) if of else 0xFFFFFFFF
    if expected is None or mask is None:
        return MAYBE
    if (have ^ expected) & known_bits & mask:
        return NO
    if expected & ~mask:
        return NO
    return YES if mask & ~known_bits & 0xFFFFFFFF == 0 else MAYBE


_DSCP = {"cs0": 0, "be": 0, "ef": 46, "lephb": 1, "df": 0, "va": 44} | {
    **{f"cs{number}": number * 8 for number in range(1, 8)},
    **{f"af{x}{y}": x * 8 + y * 2 for x in range(1, 5) for y in range(1, 4)},
}


def _length(packet: Packet) -> Range:
    """The bytes of the packet with its IP header. Larger than a frame no packet is on the wire."""
    header = 0 if packet.family == 4 else 20
    return (44 + header, 60 + header) if packet.kind.syn else (40 + header, 1500)


def _numbers(selector: str, packet: Packet) -> Range | None:
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
        # Linux sends 64 (net.ipv4.ip_default_ttl), and every router takes one.
        return (64, 64) if packet.near or not kind.inbound else (40, 64)
    if selector in ("length", "ip length"):
        return _length(packet)
    if selector == "ip6 length":
        low, high = _length(packet)
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


def _number(selector: str, value: str, packet: Packet) -> int:
    actual = _numbers(selector, packet)
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
        if expected is None and selector.endswith("port"):
            expected = _service(value)
    if expected is None:
        # A name of a value that is no default, such as a class of packets.
        return NO if selector in _ZERO and re.fullmatch(r"[a-z][\w:-]*", value) else MAYBE
    return _within(actual, expected)


# Accounts of services, which run no jobs, as Debian and RHEL name them.
_SERVICES = re.compile(
    r"root|daemon|bin|sys|adm|lp|mail|news|www-data|apache|nginx|nobody|nogroup|sshd|ntp|chrony|"
    r"postfix|systemd-.*|_.*|dnsmasq|bind|named|unbound|polkitd|dbus|messagebus|debian-tor|tor|"
    r"squid|proxy|clamav|munge|slurm|avahi|rpc|rpcuser|statd|tss|uuidd|syslog|redis|postgres|mysql"
)


def _account(value: str) -> int:
    """Users below 1000 (login.defs(5)) run no jobs; which higher ones do is unknown."""
    low, dash, high = value.partition("-")
    first, last = number(low), number(high if dash else low)
    if first is None or last is None:
        return NO if _SERVICES.fullmatch(value) else MAYBE
    if last < 1000:
        return NO
    return YES if first <= 1000 and last >= 60000 else MAYBE


#: TCP options that Linux sends by default -> whether with every packet, or with SYN alone.
_OPTIONS = {
    "tcp option maxseg": False,
    "tcp option window": False,
    "tcp option sack-perm": False,
    "tcp option sack-permitted": False,
    "tcp option timestamp": True,
}

#: Selector -> the values that the packet has, and the values that it may have.
_FIXED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "l4proto": (("tcp", "6", "all"), ()),
    "ip protocol": (("tcp", "6"), ()),
    "ip6 nexthdr": (("tcp", "6"), ()),
    "ct protocol": (("tcp", "6"), ()),
    "ct status": ((), ("confirmed", "seen-reply", "assured", "dying")),
    # A route back to the peer exists: reverse path filters are for forged sources.
    "reverse path": (("exists", "1", "true"), ()),
    "ipsec": (("missing", "0", "false", "none"), ()),
    "extension": (("missing", "0", "false"), ()),
    "socket wildcard": ((), ("0", "1")),
    "ct helper": ((), ()),
    "ct label": ((), ()),
    "geography": ((), ()),
}


def holds(selector: str, value: str, packet: Packet) -> int:
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
        return _flags(value, packet)
    if selector in ("iifname", "oifname"):
        if (selector == "iifname") == kind.inbound:
            return _interface(value, packet)
        return NO
    if selector.endswith(("saddr", "daddr")) and not selector.startswith("ether"):
        return _address(selector, value, packet)
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
        return _mark(value, packet.state.mark)
    if selector == "ct mark":
        return _mark(value, packet.state.ct_mark)
    if selector in ("skuid", "skgid"):
        return _account(value)
    if selector == "mss":
        return _number("tcp option maxseg size", value, packet) if kind.syn else NO
    if selector == "either port":
        return max(
            _number(f"tcp {port_field}", value, packet) for port_field in ("dport", "sport")
        )
    return _number(selector, value, packet)


# --- Rules, chains and rulesets.

#: The hooks that a packet for this node passes, in their order, and those of a packet from it.
HOOKS = ("ingress", "prerouting", "input")
HOOKS_OUT = ("output", "postrouting", "egress")
#: Behind this priority of prerouting and of output, packets are tracked (NF_IP_PRI_CONNTRACK).
_CONNTRACK = -200


@dataclass(frozen=True)
class RuleMatch:
    """One condition: the packet has one of the values, each with a part for every selector.

    selectors: (): a condition that is always ``fixed``
    varies:    it is met by how many packets come, how fast, when, or by chance, so that a few
               connections do not show what becomes of others
    """

    selectors: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    negated: bool = False
    fixed: int = MAYBE
    varies: bool = False

    @cached_property
    def spans(self) -> tuple[list[Range], list[Range]] | None:
        """Of a condition on one address alone, its ranges (IPv4, IPv6), in their order and apart
        from each other; None where a value is no address.
        """
        if len(self.selectors) != 1 or len(self.values) < 4:
            return None
        if not self.selectors[0].startswith(("ip saddr", "ip daddr", "ip6 saddr", "ip6 daddr")):
            return None
        ranges: tuple[list[Range], list[Range]] = ([], [])
        for value in self.values:
            span = span_of(value[0]) if len(value) == 1 else None
            if span is None:
                return None
            ranges[span[0] == 6].append(span[1:])
        return join_ranges(ranges[0]), join_ranges(ranges[1])

    def of(self, packet: Packet) -> int:
        """Whether the packet meets it: YES, NO or MAYBE."""
        if not self.selectors:
            return YES - self.fixed if self.negated else self.fixed
        if any(packet.lacks(selector) for selector in self.selectors):
            return NO
        answer = self._listed(packet)
        if answer is None:
            answer = NO
            for value in self.values:
                parts = [holds(s, v, packet) for s, v in zip(self.selectors, value)]
                fits = min(parts) if len(value) == len(self.selectors) else MAYBE
                answer = max(answer, fits)
                if answer == YES:
                    break
        return YES - answer if self.negated else answer

    def _listed(self, packet: Packet) -> int | None:
        """The answer by `spans`, where the packet's address is known."""
        if self.spans is None:
            return None
        address = packet.own if _sits(self.selectors[0], packet) else packet.peer
        if address is None:
            # A peer may be in a long list.
            return MAYBE if len(self.values) > _LONG else None
        ranges = self.spans[packet.family == 6]
        at = bisect_right(ranges, (address, 1 << 130)) - 1
        return YES if at >= 0 and ranges[at][0] <= address <= ranges[at][1] else NO


#: A list with more addresses than this is a blocklist: single entries are of no interest.
_LONG = 256

#: A condition that cannot be evaluated here; one that varies; one that is always met; one that
#: never is.
UNCERTAIN = RuleMatch()
VARYING = RuleMatch(varies=True)
ALWAYS = RuleMatch(fixed=YES)
NEVER = RuleMatch(fixed=NO)

#: Selectors that vary, by their last word; and modules of iptables whose condition does.
_VARYING = {"random", "hour", "day", "time", "bytes", "packets", "avgpkt"}
VARYING_MODULES = {"connbytes", "connlimit", "hashlimit", "limit", "quota", "rateest", "recent",
                   "statistic", "time"}  # fmt: skip

#: Connections that jobs open at one node: new ones per second, and at a time from one peer.
#: Of 8 ranks on a node each connects to the store, and all nodes of a job connect at once.
FAST_ENOUGH = 20
MANY_ENOUGH = 16


def rate_limit(per_second: float, over: bool) -> RuleMatch:
    """A rate limit: one so high that jobs stay below it does not concern them."""
    if per_second < FAST_ENOUGH:
        return VARYING
    return NEVER if over else ALWAYS


def connection_limit(maximum: int, over: bool) -> RuleMatch:
    """A limit of connections at a time: the same."""
    if maximum < MANY_ENOUGH:
        return VARYING
    return NEVER if over else ALWAYS


@dataclass(frozen=True)
class Rule:
    """A rule with an effect on a packet's way.

    verdict: accept, drop (reject too), return, jump, goto, elsewhere (queue, tproxy: another
             program decides), divert (to another address or port: NAT), mark, ct_mark, restore,
             save (marks), notrack
    target:  the chain of a jump or goto; of divert ``ADDRESS:PORT``, each may be missing, "?" when
             unknown; of a mark ``AND/XOR``, both hexadecimal, or "?"
    text:    as the tool prints it
    """

    matches: tuple[RuleMatch, ...]
    verdict: str
    target: str = ""
    text: str = ""

    def of(self, packet: Packet) -> int:
        answer = YES
        for match in self.matches:
            answer = min(answer, match.of(packet))
            if answer == NO:
                break
        return answer

    @property
    def varies(self) -> bool:
        """Whether a condition of it does."""
        return any(
            match.varies
            or any(selector.rpartition(" ")[2] in _VARYING for selector in match.selectors)
            for match in self.matches
        )


def nat_target(text: str) -> str:
    """The target of a ``divert`` rule for the text of a NAT rule.

    One colon alone stands before a port: an address of IPv6 goes without.

    >>> nat_target("10.0.0.1:80"), nat_target("[fd00::1]"), nat_target("[fd00::1]:80")
    ('10.0.0.1:80', 'fd00::1', '?')
    """
    bare = re.fullmatch(r"\[([0-9a-f:]+)\](:[\d-]+)?", text)
    if bare is None:
        return text
    return "?" if bare[2] else bare[1]


#: Verdicts that change the packet's state, and let the packet go on.
_CHANGES = ("mark", "ct_mark", "restore", "save", "notrack")


@dataclass(frozen=True)
class Chain:
    """A chain; a base chain has a hook and a policy.

    table:    family and name, ``inet filter``
    nat:      it sees first packets alone
    devices:  whose packets it sees; (): of all
    """

    table: str
    name: str
    rules: tuple[Rule, ...]
    hook: str = ""
    policy: str = ""
    priority: int = 0
    nat: bool = False
    devices: tuple[str, ...] = ()

    @property
    def families(self) -> tuple[int, ...]:
        """The versions of IP whose packets come by."""
        return {"ip": (4,), "ip6": (6,), "inet": (4, 6), "netdev": (4, 6)}.get(
            self.table.partition(" ")[0], ()
        )

    def sees(self, packet: Packet) -> int:
        """Whether the packet comes by, as far as its kind and its device tell."""
        if self.nat and not packet.kind.first:
            return NO
        if not self.devices:
            return YES
        if not packet.interface:
            return MAYBE if not all(map(is_virtual, self.devices)) else NO
        if packet.interface in self.devices:
            return YES
        # The port of a bond or a bridge has no network of its own.
        other_interfaces = (*packet.others, "lo")
        return NO if all(d in other_interfaces or is_virtual(d) for d in self.devices) else MAYBE


@dataclass(frozen=True)
class Ruleset:
    """All chains of one or more tables, by (table, name)."""

    chains: Mapping[tuple[str, str], Chain] = field(default_factory=dict)

    def merged(self, other: Ruleset) -> Ruleset:
        """Both rulesets; ``other`` replaces a table that both have."""
        tables = {table for table, _ in other.chains}
        remaining = {key: chain for key, chain in self.chains.items() if key[0] not in tables}
        return Ruleset({**remaining, **other.chains})

    def base_chains(self, packet: Packet) -> list[Chain]:
        """The base chains that such a packet passes, in the order of hooks and priorities."""
        hooks = HOOKS if packet.kind.inbound else HOOKS_OUT
        return [c for c in self._ordered if c.hook in hooks and packet.family in c.families]

    @cached_property
    def _ordered(self) -> list[Chain]:
        hooks = (*HOOKS, *HOOKS_OUT)
        base_chains = [c for c in self.chains.values() if c.hook in hooks]
        return sorted(base_chains, key=lambda chain: (hooks.index(chain.hook), chain.priority))

    @cached_property
    def addresses(self) -> tuple[list[int], list[int]]:
        """Where the rules begin to treat addresses (IPv4, IPv6) in another way."""
        starts: tuple[set[int], set[int]] = (set(), set())
        for chain in self.chains.values():
            for rule in chain.rules:
                for match in rule.matches:
                    for index, selector in enumerate(match.selectors):
                        if selector.endswith(("saddr", "daddr")):
                            _note_spans(match, index, starts)
        return sorted(starts[0]), sorted(starts[1])

    @cached_property
    def ports(self) -> tuple[int, ...]:
        """Where the rules begin to treat ports in another way."""
        starts: set[int] = set()
        for chain in self.chains.values():
            for rule in chain.rules:
                for match in rule.matches:
                    starts.update(_starts(match))
                port = ports_of(rule.target.rpartition(":")[2])
                if rule.verdict == "divert" and port:
                    starts.update((port[0], port[1] + 1))
        return tuple(sorted(starts))


def _note_spans(match: RuleMatch, index: int, into: tuple[set[int], set[int]]) -> None:
    for value in match.values:
        span = span_of(value[index]) if index < len(value) else None
        if span:
            into[span[0] == 6].update((span[1], span[2] + 1))


def _starts(match: RuleMatch) -> Iterator[int]:
    for index, selector in enumerate(match.selectors):
        if not selector.endswith(("port", "proto-dst", "proto-src")):
            continue
        for value in match.values:
            text = value[index] if index < len(value) else ""
            ports = ports_of(text) or _service(text)
            if ports:
                yield from (ports[0], ports[1] + 1)


# --- The evaluation.

#: A range of ports in more pieces than this is not evaluated piece by piece.
MOST_PIECES = 64
#: Maximum of a packet's states that are distinguished; beyond it, the marks are unknown.
_MOST_STATES = 16


@dataclass(frozen=True)
class RuleCause:
    """A rule, or a policy, that decides.

    sure: every packet that comes so far meets it
    how:  what it does to the packet
    varies: as of a `Match`
    """

    chain: str
    text: str
    sure: bool
    how: str = "dropped by"
    varies: bool = False


# What may happen: ("accept", "drop", "elsewhere" or "end": it left the chain alive), and the
# packet's state then -> the first cause of it.
_Fates = dict[tuple[str, State], RuleCause]


def _note(fates: _Fates, fate: tuple[str, State], cause: RuleCause) -> None:
    """Keep the first cause of a fate, or the first that is sure."""
    earlier = fates.get(fate)
    if earlier is None or (cause.sure and not earlier.sure):
        fates[fate] = cause


def _changed(verdict: str, target: str, state: State) -> State:
    if verdict == "notrack":
        return replace(state, untracked=True)
    if verdict in ("restore", "save"):
        mask = int(target, 16) if target else 0xFFFFFFFF
        new, old = state.ct_mark, state.mark
        if verdict == "save":
            new, old = old, new
        mixed = ((old[0] & ~mask) | (new[0] & mask), (old[1] & ~mask) | (new[1] & mask))
        return (
            replace(state, mark=mixed) if verdict == "restore" else replace(state, ct_mark=mixed)
        )
    old = state.mark if verdict == "mark" else state.ct_mark
    keep_text, _, flip_text = target.partition("/")
    if not flip_text:
        new = (0, 0)
    else:
        keep, flip = int(keep_text, 16), int(flip_text, 16)
        known_bits = (old[1] | ~keep) & 0xFFFFFFFF
        new = (((old[0] & keep) ^ flip) & known_bits, known_bits)
    return replace(state, mark=new) if verdict == "mark" else replace(state, ct_mark=new)


def _bounded(states: Collection[State]) -> list[State]:
    """The states; without their marks, where there are too many."""
    if len(states) <= _MOST_STATES:
        return list(states)
    return [State((0, 0), (0, 0), untracked) for untracked in {s.untracked for s in states}]


class _PacketWalk:
    """One packet's possible ways through the chains of a ruleset."""

    def __init__(self, rules: Ruleset, packet: Packet) -> None:
        self.rules, self.packet = rules, packet
        self.known: dict[tuple[str, str, State, bool], _Fates] = {}
        self.packets: dict[tuple[State, bool], Packet] = {}
        self.depth = 0
        self.doubt: RuleCause | None = None

    def chain(self, chain: Chain, state: State, tracked: bool) -> _Fates:
        """What may happen to the packet in the chain."""
        key = (chain.table, chain.name, state, tracked)
        # The kernel refuses loops and more than 16 levels: no ruleset in force has them.
        if key not in self.known:
            lost = RuleCause(chain.name, "jumps without end", False)
            if self.depth > 16:
                return {("elsewhere", state): lost}
            self.known[key] = {("elsewhere", state): lost, ("end", state): lost}
            self.depth += 1
            self.known[key] = self._rules(chain, state, tracked)
            self.depth -= 1
        return self.known[key]

    def _rules(self, chain: Chain, start: State, tracked: bool) -> _Fates:
        fates: _Fates = {}
        name = f"{chain.table} {chain.name}"
        alive = [start]
        end = RuleCause(name, "end", True)
        for rule in chain.rules:
            going: dict[State, None] = {}
            for state in alive:
                packet = self._packet(state, tracked)
                answer = rule.of(packet)
                if answer != YES:
                    going[state] = None
                if answer == NO:
                    continue
                sure = answer == YES
                if rule.verdict in _CHANGES:
                    going[_changed(rule.verdict, rule.target, state)] = None
                elif rule.verdict == "return":
                    _note(fates, ("end", state), end)
                    self._doubt(rule, name, sure)
                elif rule.verdict in ("jump", "goto"):
                    target = self.rules.chains.get((chain.table, rule.target))
                    if target:
                        self._doubt(rule, name, sure)
                    inner = self.chain(target, state, tracked) if target else {("end", state): end}
                    for (fate, after), cause in inner.items():
                        if fate == "end" and rule.verdict == "jump":
                            going[after] = None
                        else:
                            _note(fates, (fate, after), replace(cause, sure=cause.sure and sure))
                else:
                    fate, how = rule.verdict, "dropped by"
                    if fate == "divert":
                        fate, how = self._diverted(rule.target, packet), "led elsewhere by"
                    _note(fates, (fate, state), RuleCause(name, rule.text, sure, how))
                    self._doubt(rule, name, sure)
            alive = _bounded(going)
            if not alive:
                return fates
        for state in alive:
            _note(fates, ("end", state), end)
        return fates

    def _doubt(self, rule: Rule, chain: str, sure: bool) -> None:
        """Keep the first rule that cannot be evaluated, or the first that varies."""
        if sure or (self.doubt is not None and (self.doubt.varies or not rule.varies)):
            return
        self.doubt = RuleCause(chain, rule.text, sure, varies=rule.varies)

    def _packet(self, state: State, tracked: bool) -> Packet:
        key = (state, tracked)
        if key not in self.packets:
            self.packets[key] = replace(self.packet, state=state, tracked=tracked)
        return self.packets[key]

    def _diverted(self, target: str, packet: Packet) -> str:
        """What NAT does: the same port of one of the node's addresses is where it went anyway."""
        address, port = target, ""
        if target.count(":") == 1:
            address, port = target.split(":")
        if "?" in target:
            return "elsewhere"
        if port and ports_of(port) != (packet.first, packet.last):
            return "drop"
        return "accept" if not address or address in packet.addresses else "drop"

    def base(self, chain: Chain, state: State) -> _Fates:
        """All that may happen to the packet in a base chain."""
        packet = self._packet(state, True)
        passage = chain.sees(packet)
        name = f"{chain.table} {chain.name}"
        passed = RuleCause(name, "policy accept", True)
        if passage == NO or (chain.nat and state.untracked):
            return {("accept", state): passed}
        tracked = chain.hook not in ("ingress", "egress") and not (
            chain.hook in ("prerouting", "output") and chain.priority < _CONNTRACK
        )
        fates: _Fates = {}
        end = RuleCause(name, f"policy {chain.policy}", True)
        for (fate, after), cause in self.chain(chain, state, tracked).items():
            fate_name, fate_cause = (chain.policy, end) if fate == "end" else (fate, cause)
            _note(
                fates,
                (fate_name, after),
                replace(fate_cause, sure=fate_cause.sure and passage == YES),
            )
        if passage == MAYBE:
            _note(fates, ("accept", state), passed)
        return fates


@dataclass(frozen=True)
class Fate:
    """What happens to connections on some ports.

    verdict: open, dropped, or cannot tell
    cause:   the rule that drops, or the rule that cannot be evaluated; None when open
    kind:    the packet to which it happens
    varies:  the cause does
    """

    first: int
    last: int
    verdict: str
    cause: RuleCause | None = None
    kind: PacketKind = PACKETS[0]

    @property
    def varies(self) -> bool:
        return self.cause is not None and self.cause.varies


def _fate(rules: Ruleset, packet: Packet) -> tuple[Fate, list[State]]:
    """The packet's fate, and what the rules may have made of it in the end."""
    walk = _PacketWalk(rules, packet)
    doubt: RuleCause | None = None
    states = [packet.state]
    for chain in rules.base_chains(packet):
        chain_fates: _Fates = {}
        for state in states:
            for fate, cause in walk.base(chain, state).items():
                _note(chain_fates, fate, cause)
        drops = [cause for (fate, _), cause in chain_fates.items() if fate == "drop"]
        accepts = [cause for (fate, _), cause in chain_fates.items() if fate == "accept"]
        away = [cause for (fate, _), cause in chain_fates.items() if fate == "elsewhere"]
        if drops and not accepts and not away:
            return Fate(packet.first, packet.last, "dropped", drops[0], packet.kind), []
        if drops or away:
            # A sure drop takes all packets that are left: then the accepting rule is in doubt.
            unsure = [cause for cause in (*drops, *accepts) if not cause.sure]
            doubt = doubt or (away or unsure or [walk.doubt or drops[0]])[0]
        states = _bounded(dict.fromkeys(state for fate, state in chain_fates if fate == "accept"))
        if not states:
            break
    verdict = "cannot tell" if doubt else "open"
    if doubt and walk.doubt and walk.doubt.varies:
        doubt = walk.doubt
    return Fate(packet.first, packet.last, verdict, doubt, packet.kind), states


def alike_ranges(rules: Ruleset, first: int, last: int) -> list[Range]:
    """The pieces of the range within which every rule treats all ports alike."""
    starts: Sequence[int] = [first, *(port for port in rules.ports if first < port <= last)]
    return [(start, end - 1) for start, end in zip(starts, [*starts[1:], last + 1])]


def fates(rules: Ruleset, packet: Packet) -> Iterable[Fate]:
    """What happens to such connections, for each piece of the packet's ports: the first packet
    that is not sure to pass.
    """
    ranges = alike_ranges(rules, packet.first, packet.last)
    if len(ranges) > MOST_PIECES:
        many = RuleCause("", f"{len(ranges)} pieces of it", False)
        return (Fate(packet.first, packet.last, "cannot tell", many),)
    return [_range_fate(rules, fast_replace(packet, first=a, last=b)) for a, b in ranges]


def _range_fate(rules: Ruleset, packet: Packet) -> Fate:
    """The fate that connections from all source ports have, or a doubt."""
    fate = _worst_fate(rules, packet)
    if fate.verdict != "cannot tell":
        return fate
    sources = _source_pieces(rules, packet)
    if len(sources) > MOST_PIECES:
        return fate
    piece_fates = []
    for source in sources:
        piece_fate = _worst_fate(rules, fast_replace(packet, sources=(source,)))
        if piece_fate.verdict == "cannot tell":
            return fate if fate.varies else piece_fate
        piece_fates.append(piece_fate)
    dropped = [piece_fate for piece_fate in piece_fates if piece_fate.verdict == "dropped"]
    if dropped and len(dropped) < len(piece_fates):
        return replace(dropped[0], verdict="cannot tell")
    return piece_fates[0]


def _source_pieces(rules: Ruleset, packet: Packet) -> list[Range]:
    """A range of source ports for each way in which the rules treat source ports."""
    pieces: dict[int, Range] = {}
    for first, last in packet.sources:
        for piece in alike_ranges(rules, first, last):
            pieces.setdefault(bisect_right(rules.ports, piece[0]), piece)
    return list(pieces.values())


def _worst_fate(rules: Ruleset, packet: Packet) -> Fate:
    """The worst fate of a connection's packets."""
    worst = Fate(packet.first, packet.last, "open")
    lost, mark = False, State().ct_mark
    for kind in PACKETS:
        if kind.first:
            lost, mark = False, State().ct_mark
        kind_packet = fast_replace(packet, kind=kind, lost=lost, state=State(ct_mark=mark))
        fate, states = _fate(rules, kind_packet)
        if fate.verdict == "dropped":
            return fate
        if fate.verdict == "cannot tell" and (worst.verdict == "open" or fate.varies):
            worst = fate
        if kind.first:
            # Connection tracking does not know a connection whose first packet was untracked.
            lost = bool(states) and all(state.untracked for state in states)
        marks = {state.ct_mark for state in states}
        mark = marks.pop() if len(marks) == 1 else (0, 0)
    return worst

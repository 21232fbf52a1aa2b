"""What a packet filter does with a new connection: chains, rules, and their evaluation.

The connection is the one that a job's rendezvous needs: the first TCP packet from another node,
to one of this node's addresses, on a port of a range. The packet meets a rule's condition for
certain (YES, NO) or not (MAYBE: its source address, its interface, a rate). From that follows what
can happen to the packet, by nft(8) and iptables(8): a dropped packet is gone, an accepted one goes
on to the next base chain, and one that reaches the end of a base chain gets that chain's policy.
Not seen here: NAT, XDP and other eBPF programs, and filters outside the node.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Union

# --- The first packet of a connection from another node, and the conditions that it meets.
#
# Certain are: TCP, the SYN flag, the destination port, that the packet is new to connection
# tracking, that it is for one of this node's addresses and comes through no loopback device. The
# moment is uncertain, and so are source and interface, unless the packet is taken to come from one
# of the node's own networks.

#: Whether a packet meets a condition; in this order min is "and", max is "or".
NO, MAYBE, YES = 0, 1, 2

_Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]

#: Selectors of a header that the packet does not have: such a condition is never met.
_OTHER_PROTOCOLS = re.compile(
    r"(udp|udplite|icmp|icmpv6|sctp|dccp|esp|ah|comp|igmp|arp|vlan|gre|vxlan|hbh|frag|mh) |"
    r"rt (type|nexthdr|hdrlength|seg-left)$"
)
_INTERFACES = ("iif", "iifname")
# Bridges and ends of containers and virtual machines: no packet of another node comes that way.
_VIRTUAL = re.compile(
    r"(docker\d+|docker_gwbridge|br-[0-9a-f]{12}|virbr\d+|(cni-)?podman\d+|cni\d+|lxcbr\d+|"
    r"lxdbr\d+|flannel\.\d+|cali.*|veth.*|kube-ipvs0|nodelocaldns)"
)
_FLAGS = {"fin": 1, "syn": 2, "rst": 4, "psh": 8, "ack": 16, "urg": 32, "ecn": 64, "cwr": 128}
_SYN = _FLAGS["syn"]

#: Selector -> the values that the packet has, and the values that it may have.
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
    """The first packet of a connection to any port from first to last.

    family:    4 or 6
    addresses: the node's own addresses, as text; () when unknown
    marked:    some rule may have set a mark on the packet
    interface: by which the packet comes in; "" when unknown
    network:   of the packet's source, ``10.1.0.0/16``; "" when unknown
    """

    family: int
    first: int
    last: int
    addresses: tuple[str, ...] = ()
    marked: bool = False
    interface: str = ""
    network: str = ""

    def lacks(self, selector: str) -> bool:
        """Whether the packet has no such field: another protocol's, or of the other family."""
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
    """Whether an interface belongs to containers or virtual machines of this node."""
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
    """``syn``: the flag is set. ``syn/fin,syn,rst,ack``: of the latter, only syn is set."""
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
    """``0x8000/0x8000``: value and mask. A packet has mark 0 until a rule sets another one."""
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


# --- Rules, chains and rulesets.

#: The hooks that a packet for this node passes, in their order.
HOOKS = ("ingress", "prerouting", "input")


@dataclass(frozen=True)
class Match:
    """One condition: the packet has one of the values, each with a part for every selector.

    selectors: (): a condition that cannot be evaluated here
    """

    selectors: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    negated: bool = False

    def of(self, packet: Packet) -> int:
        """Whether the packet meets it: YES, NO or MAYBE."""
        if not self.selectors:
            return MAYBE
        if any(packet.lacks(selector) for selector in self.selectors):
            return NO
        answer = NO
        for value in self.values:
            parts = [holds(s, v, packet) for s, v in zip(self.selectors, value)]
            fits = min(parts) if len(value) == len(self.selectors) else MAYBE
            answer = max(answer, fits)
        return YES - answer if self.negated else answer


#: A condition that cannot be evaluated here.
UNCERTAIN = Match()


@dataclass(frozen=True)
class Rule:
    """A rule with an effect on a packet's way.

    verdict: accept, drop (reject too), return, jump, goto, or elsewhere (queue, tproxy: another
             program decides)
    target:  the chain of a jump or goto
    text:    as the tool prints it
    """

    matches: tuple[Match, ...]
    verdict: str
    target: str = ""
    text: str = ""

    def of(self, packet: Packet) -> int:
        return min((match.of(packet) for match in self.matches), default=YES)


@dataclass(frozen=True)
class Chain:
    """A chain; a base chain has a hook and a policy.

    table: family and name, ``inet filter``
    """

    table: str
    name: str
    rules: tuple[Rule, ...]
    hook: str = ""
    policy: str = ""

    @property
    def families(self) -> tuple[int, ...]:
        """The versions of IP whose packets come by."""
        return {"ip": (4,), "ip6": (6,), "inet": (4, 6), "netdev": (4, 6)}.get(
            self.table.partition(" ")[0], ()
        )


@dataclass(frozen=True)
class Ruleset:
    """All chains of one or more tables, by (table, name). ``marks``: some rule sets a mark."""

    chains: Mapping[tuple[str, str], Chain] = field(default_factory=dict)
    marks: bool = False

    def merged(self, other: Ruleset) -> Ruleset:
        """Both rulesets; of a table that both have, the other's chains."""
        tables = {table for table, _ in other.chains}
        kept = {key: chain for key, chain in self.chains.items() if key[0] not in tables}
        return Ruleset({**kept, **other.chains}, self.marks or other.marks)

    def base_chains(self, family: int) -> list[Chain]:
        """The base chains that such a packet passes, in the order of the hooks."""
        found = [c for c in self.chains.values() if c.hook in HOOKS and family in c.families]
        return sorted(found, key=lambda chain: HOOKS.index(chain.hook))


# --- The evaluation.

#: A range of ports in more pieces than this is not evaluated piece by piece.
MOST_PIECES = 64


@dataclass(frozen=True)
class Cause:
    """A rule, or a policy, that decides; ``sure``: every such packet reaches and meets it."""

    chain: str
    text: str
    sure: bool


_Fates = dict[str, Cause]  # "accept", "drop", "elsewhere" -> the first cause of it


def _note(fates: _Fates, fate: str, cause: Cause) -> None:
    """Keep the first cause of a fate, or the first that is sure."""
    known = fates.get(fate)
    if known is None or (cause.sure and not known.sure):
        fates[fate] = cause


class _Walk:
    """One packet's possible ways through the chains of a ruleset."""

    def __init__(self, rules: Ruleset, packet: Packet) -> None:
        self.rules, self.packet = rules, packet
        self.known: dict[tuple[str, str], tuple[_Fates, bool]] = {}
        self.depth = 0

    def chain(self, chain: Chain) -> tuple[_Fates, bool]:
        """The fates that the packet may meet in the chain, and whether it may leave it alive."""
        key = (chain.table, chain.name)
        # The kernel refuses loops and more than 16 levels: no ruleset in force has them.
        if key not in self.known:
            lost: _Fates = {"elsewhere": Cause(chain.name, "jumps without end", False)}
            if self.depth > 16:
                return lost, True
            self.known[key] = lost, True
            self.depth += 1
            self.known[key] = self._rules(chain)
            self.depth -= 1
        return self.known[key]

    def _rules(self, chain: Chain) -> tuple[_Fates, bool]:
        fates: _Fates = {}
        leaves = False
        name = f"{chain.table} {chain.name}"
        for rule in chain.rules:
            met = rule.of(self.packet)
            if met == NO:
                continue
            sure = met == YES
            if rule.verdict == "return":
                ends, may_leave = sure, True
            elif rule.verdict in ("jump", "goto"):
                target = self.rules.chains.get((chain.table, rule.target))
                inner, alive = self.chain(target) if target else ({}, True)
                for fate, cause in inner.items():
                    _note(fates, fate, Cause(cause.chain, cause.text, cause.sure and sure))
                ends = sure and (rule.verdict == "goto" or not alive)
                may_leave = rule.verdict == "goto" and alive
            else:
                _note(fates, rule.verdict, Cause(name, rule.text, sure))
                ends, may_leave = sure, False
            leaves = leaves or may_leave
            if ends:
                return fates, leaves
        return fates, True

    def base(self, chain: Chain) -> _Fates:
        """All that may happen to the packet in a base chain."""
        fates, alive = self.chain(chain)
        fates = dict(fates)
        if alive:
            name = f"{chain.table} {chain.name}"
            _note(fates, chain.policy, Cause(name, f"policy {chain.policy}", True))
        return fates


@dataclass(frozen=True)
class Fate:
    """What happens to new connections on some ports.

    verdict: open, dropped, or cannot tell
    cause:   the rule that drops, or the rule that cannot be evaluated; None when open
    """

    first: int
    last: int
    verdict: str
    cause: Cause | None = None


def _fate(rules: Ruleset, packet: Packet) -> Fate:
    walk = _Walk(rules, packet)
    doubt: Cause | None = None
    for chain in rules.base_chains(packet.family):
        fates = walk.base(chain)
        drop, accept = fates.get("drop"), fates.get("accept")
        if drop and len(fates) == 1:
            return Fate(packet.first, packet.last, "dropped", drop)
        if drop or "elsewhere" in fates:
            # A sure drop takes all packets that are left: then the accepting rule is in doubt.
            unsure = accept if drop and drop.sure and accept else drop
            doubt = doubt or fates.get("elsewhere") or unsure
    return Fate(packet.first, packet.last, "cannot tell" if doubt else "open", doubt)


def _pieces(rules: Ruleset, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The pieces of the range within which every rule treats all ports alike."""
    starts = {first}
    for chain in rules.chains.values():
        for rule in chain.rules:
            for match in rule.matches:
                starts.update(_starts(match, first, last))
    ordered: Sequence[int] = sorted(starts)
    for start, following in zip(ordered, [*ordered[1:], last + 1]):
        yield start, following - 1


def _starts(match: Match, first: int, last: int) -> Iterable[int]:
    for index, selector in enumerate(match.selectors):
        if selector not in ("tcp dport", "th dport"):
            continue
        for value in match.values:
            ports = ports_of(value[index]) if index < len(value) else None
            for start in (ports[0], ports[1] + 1) if ports else ():
                if first < start <= last:
                    yield start


def fates(rules: Ruleset, packet: Packet) -> tuple[Fate, ...]:
    """What happens to such new connections, for each piece of the packet's ports."""
    pieces = list(_pieces(rules, packet.first, packet.last))
    if len(pieces) > MOST_PIECES:
        many = Cause("", f"{len(pieces)} pieces of it", False)
        return (Fate(packet.first, packet.last, "cannot tell", many),)
    marked = replace(packet, marked=rules.marks)
    return tuple(_fate(rules, replace(marked, first=first, last=last)) for first, last in pieces)

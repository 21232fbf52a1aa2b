"""Rules, chains and rulesets of a packet filter, and whether a packet meets their conditions."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from nodeready.subjects.ports.packets import (
    MAYBE,
    NO,
    YES,
    Packet,
    field_matches,
    is_own_side,
    is_virtual,
    ports_of,
    span_of,
)
from nodeready.subjects.ports.port_ranges import Range, join_ranges

#: The hooks for incoming packets, in their order, and those for outgoing packets.
HOOKS_IN = ("ingress", "prerouting", "input")
HOOKS_OUT = ("output", "postrouting", "egress")
#: Above this priority of prerouting and of output, packets are tracked (NF_IP_PRI_CONNTRACK).
CONNTRACK_PRIORITY = -200


@dataclass(frozen=True)
class RuleMatch:
    """One condition: the packet has one of the values, each with a part for every selector.

    selectors: (): the answer is always ``fixed``
    varies:    the answer depends on the number or rate of packets, on the time, or on chance, so
               that a few connections do not show the fate of others
    """

    selectors: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    negated: bool = False
    fixed: int = MAYBE
    varies: bool = False

    @cached_property
    def spans(self) -> tuple[list[Range], list[Range]] | None:
        """The ranges (IPv4, IPv6) of a condition on a single address, sorted and disjoint.

        None where a value is no address.
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

    def answer(self, packet: Packet) -> int:
        """Whether the packet meets it: YES, NO or MAYBE."""
        if not self.selectors:
            return YES - self.fixed if self.negated else self.fixed
        if any(packet.lacks(selector) for selector in self.selectors):
            return NO
        answer = self._answer_by_spans(packet)
        if answer is None:
            answer = NO
            for value in self.values:
                parts = [field_matches(s, v, packet) for s, v in zip(self.selectors, value)]
                fits = min(parts) if len(value) == len(self.selectors) else MAYBE
                answer = max(answer, fits)
                if answer == YES:
                    break
        return YES - answer if self.negated else answer

    def _answer_by_spans(self, packet: Packet) -> int | None:
        """The answer by `spans`, where the packet's address is known."""
        if self.spans is None:
            return None
        is_own = is_own_side(self.selectors[0], packet)
        address = packet.own_address if is_own else packet.peer_address
        if address is None:
            # A long list may contain a peer.
            return MAYBE if len(self.values) > _LONG_LIST else None
        ranges = self.spans[packet.family == 6]
        index = bisect_right(ranges, (address, 1 << 130)) - 1
        return YES if index >= 0 and ranges[index][0] <= address <= ranges[index][1] else NO


#: A list with more addresses than this is a blocklist: its entries are not compared one by one.
_LONG_LIST = 256

#: Conditions: not evaluable here; varying; always met; never met.
UNCERTAIN = RuleMatch()
VARYING = RuleMatch(varies=True)
ALWAYS = RuleMatch(fixed=YES)
NEVER = RuleMatch(fixed=NO)

#: Selectors that vary, by their last word; modules of iptables with a varying condition.
_VARYING = {"random", "hour", "day", "time", "bytes", "packets", "avgpkt"}
VARYING_MODULES = {"connbytes", "connlimit", "hashlimit", "limit", "quota", "rateest", "recent",
                   "statistic", "time"}  # fmt: skip

#: Connections of jobs to one node: new connections per second, and connections at a time from a
#: peer. Each of 8 ranks on a node connects to the store, and all nodes of a job connect at once.
FAST_ENOUGH = 20
MANY_ENOUGH = 16


def rate_limit(per_second: float | None, over: bool) -> RuleMatch:
    """A rate limit, None: unknown; a limit above the rate of jobs has no effect on them."""
    if per_second is None or per_second < FAST_ENOUGH:
        return VARYING
    return NEVER if over else ALWAYS


def connection_limit(maximum: str, over: bool) -> RuleMatch:
    """A limit of connections at a time; a limit above the count of jobs has no effect on them."""
    if not maximum.isdigit() or int(maximum) < MANY_ENOUGH:
        return VARYING
    return NEVER if over else ALWAYS


@dataclass(frozen=True)
class Rule:
    """A rule with an effect on a packet.

    verdict: accept, drop (reject too), return, jump, goto, elsewhere (queue, tproxy: another
             program decides), divert (to another address or port: NAT), mark, ct_mark, restore,
             save (marks), notrack
    target:  the chain of a jump or goto; of divert ``ADDRESS:PORT``, each of which may be missing,
             or "?" when unknown; of a mark ``AND/XOR``, both hexadecimal, or "?"
    text:    as the tool prints it
    """

    matches: tuple[RuleMatch, ...]
    verdict: str
    target: str = ""
    text: str = ""

    def answer(self, packet: Packet) -> int:
        answer = YES
        for match in self.matches:
            answer = min(answer, match.answer(packet))
            if answer == NO:
                break
        return answer

    @property
    def varies(self) -> bool:
        """Whether a condition of the rule varies."""
        return any(
            match.varies
            or any(selector.rpartition(" ")[2] in _VARYING for selector in match.selectors)
            for match in self.matches
        )


def nat_target(text: str) -> str:
    """The target of a ``divert`` rule for the text of a NAT rule.

    A single colon precedes a port: an address of IPv6 has no port.

    >>> nat_target("10.0.0.1:80"), nat_target("[fd00::1]"), nat_target("[fd00::1]:80")
    ('10.0.0.1:80', 'fd00::1', '?')
    """
    bare = re.fullmatch(r"\[([0-9a-f:]+)\](:[\d-]+)?", text)
    if bare is None:
        return text
    return "?" if bare[2] else bare[1]


#: Verdicts that change the packet's state, after which the next rule follows.
CHANGES = ("mark", "ct_mark", "restore", "save", "notrack")


@dataclass(frozen=True)
class Chain:
    """A chain; a base chain has a hook and a policy.

    table:    family and name, ``inet filter``
    is_nat:   only first packets pass it
    devices:  the interfaces whose packets pass it; (): all
    """

    table: str
    name: str
    rules: tuple[Rule, ...]
    hook: str = ""
    policy: str = ""
    priority: int = 0
    is_nat: bool = False
    devices: tuple[str, ...] = ()

    @property
    def families(self) -> tuple[int, ...]:
        """The versions of IP whose packets pass the chain."""
        return {"ip": (4,), "ip6": (6,), "inet": (4, 6), "netdev": (4, 6)}.get(
            self.table.partition(" ")[0], ()
        )

    def passage(self, packet: Packet) -> int:
        """Whether the packet passes the chain, by its kind and its device."""
        if self.is_nat and not packet.kind.first:
            return NO
        if not self.devices:
            return YES
        if not packet.interface:
            return MAYBE if not all(map(is_virtual, self.devices)) else NO
        if packet.interface in self.devices:
            return YES
        # The port of a bond or a bridge has no network itself.
        other_interfaces = (*packet.other_interfaces, "lo")
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
        """The base chains of such a packet, in the order of hooks and priorities."""
        hooks = HOOKS_IN if packet.kind.inbound else HOOKS_OUT
        return [c for c in self._ordered if c.hook in hooks and packet.family in c.families]

    @cached_property
    def _ordered(self) -> list[Chain]:
        hooks = (*HOOKS_IN, *HOOKS_OUT)
        base_chains = [c for c in self.chains.values() if c.hook in hooks]
        return sorted(base_chains, key=lambda chain: (hooks.index(chain.hook), chain.priority))

    @cached_property
    def addresses(self) -> tuple[list[int], list[int]]:
        """The addresses (IPv4, IPv6) at which the rules may begin to decide differently."""
        starts: tuple[set[int], set[int]] = (set(), set())
        for chain in self.chains.values():
            for rule in chain.rules:
                for match in rule.matches:
                    for index, selector in enumerate(match.selectors):
                        if selector.endswith(("saddr", "daddr")):
                            _add_spans(match, index, starts)
        return sorted(starts[0]), sorted(starts[1])

    @cached_property
    def ports(self) -> tuple[int, ...]:
        """The ports at which the rules may begin to decide differently."""
        starts: set[int] = set()
        for chain in self.chains.values():
            for rule in chain.rules:
                for match in rule.matches:
                    starts.update(_port_starts(match))
                port = ports_of(rule.target.rpartition(":")[2])
                if rule.verdict == "divert" and port:
                    starts.update((port[0], port[1] + 1))
        return tuple(sorted(starts))


def _add_spans(match: RuleMatch, index: int, into: tuple[set[int], set[int]]) -> None:
    for value in match.values:
        span = span_of(value[index]) if index < len(value) else None
        if span:
            into[span[0] == 6].update((span[1], span[2] + 1))


def _port_starts(match: RuleMatch) -> Iterator[int]:
    for index, selector in enumerate(match.selectors):
        if not selector.endswith(("port", "proto-dst", "proto-src")):
            continue
        for value in match.values:
            text = value[index] if index < len(value) else ""
            if ports := ports_of(text):
                yield from (ports[0], ports[1] + 1)

"""What a node's packet filters do with new connections to the policy's ports.

The rules in force are judged: firewalld and ufw are not asked for their own
configuration. `rule_listing` lists the rules, `iptables` and `nft` read them, `netfilter`
evaluates them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache

from nodeready.policy import Policy
from nodeready.subjects.base import Output, cached_per_fleet
from nodeready.subjects.parsed_template import fast_replace
from nodeready.subjects.ports import nft
from nodeready.subjects.ports.iptables import CUT, parse_ipsets, parse_iptables_rules
from nodeready.subjects.ports.netfilter import (
    Fate,
    Packet,
    Ruleset,
    fates,
    span_of,
)
from nodeready.subjects.ports.port_ranges import (
    KERNEL_EPHEMERAL,
    Range,
    join_ranges,
    parse_ranges,
    range_text,
)
from nodeready.subjects.ports.rule_listing import ENOUGH, ListingTool, split


@dataclass(frozen=True)
class Firewall:
    """What happens to jobs' TCP connections, to the policy's ports of this node and of others.

    verdict: "open", "dropped", "cannot tell" (it depends on ``rule``) or "unknown" (``reason``)
    ports:   the ports of the verdict, ``29500-29510``
    what:    what is dropped, in words; {} stands for the ports
    how:     "dropped by" the rule, or "led elsewhere by" it
    chain:   family, table and chain of the rule
    rule:    the rule that drops, or on which the verdict depends, as the tool prints it
    beside:  the rule that would let it pass, were it for the node's own networks
    manager: what made the rules: firewalld, ufw, nftables, iptables; "" without rules
    tools:   the programs that were asked
    networks: the node's own networks from which peers get in, where the verdict depends on that
    peers:   how many of the other nodes that are known it is, ``2 of 14``; "" for all
    varies:  ``rule`` counts, measures, or draws lots: a few connections do not show what it does
    tried:   what depended on ``rule`` was tried between the nodes, and they all connected
    filter:  the rules, and the node's addresses, by which the connections with other nodes are
             judged once these are known; None: nothing to judge
    """

    verdict: str
    ports: str = ""
    chain: str = ""
    rule: str = ""
    manager: str = ""
    reason: str = ""
    tools: tuple[ListingTool, ...] = ()
    networks: tuple[str, ...] = ()
    what: str = "{}"
    how: str = "dropped by"
    beside: str = ""
    peers: str = ""
    varies: bool = False
    tried: bool = False
    filter: Filter | None = field(default=None, compare=False, repr=False)


_NEEDS_ROOT = "the rules can be seen by root alone (CAP_NET_ADMIN)"


def _unread(tool: ListingTool) -> str:
    """Why the rules of this program are not known."""
    if tool.state == "needs root":
        return _NEEDS_ROOT
    if tool.state == "missing":
        return f"{tool.name} is not installed, and {tool.detail or 'the kernel may have rules'}"
    return f"{tool.name} {tool.state} {tool.detail}".strip()


# The nodes of a fleet mostly have the same rules, which take longer to read than to judge.
@lru_cache(maxsize=64)
def _ruleset(texts: tuple[tuple[str, str], ...]) -> Ruleset:
    """All rules. Of a table that nft and iptables-nft-save print, the latter's text counts.

    Raises ValueError for text that makes no sense.
    """
    merged_rules = Ruleset()
    sets = parse_ipsets("".join(text for name, text in texts if name == "ipset"))
    for name, text in texts:
        if name == "ipset":
            continue
        if name in ("nft", "nft-nat"):
            merged_rules = merged_rules.merged(nft.parse(_CUT_NAT.sub("", text)))
            continue
        # What nft alone can show, nft shows.
        saved = _INCOMPATIBLE.sub("", text) if name.endswith("-nft") else text
        rules = parse_iptables_rules(saved, 6 if name.startswith("ip6") else 4, sets)
        if not name.endswith("-nft"):
            # Legacy tables stand beside those of nft that have the same names.
            rules = _renamed(rules)
        merged_rules = merged_rules.merged(rules)
    return merged_rules


#: A table of NAT whose rest was left out on the node.
_CUT_NAT = re.compile(rf"^table ip6? nat {{\n(?:(?!^table |^{CUT}$).*\n)*{CUT}$", re.M)
#: A table that iptables-nft-save says it cannot show, and what it may print of it.
_INCOMPATIBLE = re.compile(
    r"^# Table `([^']*)' .*incompatible.*\n(\*\1\n(?:(?!COMMIT$).*\n)*COMMIT$)?", re.M
)


def _renamed(rules: Ruleset) -> Ruleset:
    chains = {}
    for (table, name), chain in rules.chains.items():
        chains[f"{table} (legacy)", name] = replace(chain, table=f"{table} (legacy)")
    return Ruleset(chains)


def _manager(rules: Ruleset) -> str:
    """What made the rules, by the names that firewalld and ufw give to their chains."""
    for table, name in rules.chains:
        if table.endswith(" firewalld") or name == "INPUT_ZONES":
            return "firewalld"
        if name.startswith("ufw-"):
            return "ufw"
    if not rules.chains:
        return ""
    iptables = all(name == name.upper() for (_, name), chain in rules.chains.items() if chain.hook)
    return "iptables" if iptables else "nftables"


def _worst(port_fates: tuple[Fate, ...]) -> tuple[str, str, Fate | None]:
    """The worst verdict of all ports, the ports that have it, and one of the pieces."""
    for verdict in ("dropped", "cannot tell"):
        bad = [fate for fate in port_fates if fate.verdict == verdict]
        if bad:
            joined = join_ranges((fate.first, fate.last) for fate in bad)
            worst = next((fate for fate in bad if fate.varies), bad[0])
            return verdict, ", ".join(range_text(*ports) for ports in joined[:4]), worst
    return "open", "", None


def _unknown(reason: str, tools: tuple[ListingTool, ...] = ()) -> Firewall:
    return Firewall("unknown", reason=reason, tools=tools)


def parse(
    output: Output,
    policy: Policy,
    addresses: tuple[str, ...],
    networks: tuple[tuple[str, str], ...] = (),
    *,
    peers: tuple[str, ...] = (),
    sources: tuple[Range, ...] = (KERNEL_EPHEMERAL,),
) -> Firewall:
    """What the node's rules do; never raises.

    addresses: the node's own; with an IPv6 address among them, IPv6 is judged as well
    networks:  (interface, ``10.1.0.0/16``) of the networks to which the node is connected
    peers:     addresses of hosts that the node knows by name
    sources:   the ports from which the node's programs connect; its peers' mostly are the same
    """
    tools, texts = split(output)
    if output.truncated:
        return _unknown("the ruleset is too large", tools)
    if output.rc is None:
        return _unknown("listing the rules timed out", tools)
    if output.rc != 0:
        return _unknown(f"listing the rules failed with exit status {output.rc}", tools)
    # Where nft is not there, iptables-nft-save may still show all that iptables has made.
    replaced = any(tool.name.endswith("-nft") and tool.state == "ok" for tool in tools)
    for tool in tools:
        if tool.state not in ENOUGH and not (tool.state == "missing" and replaced):
            return _unknown(_unread(tool), tools)
    try:
        rules = _ruleset(tuple(texts))
    except ValueError as error:
        return _unknown(str(error), tools)
    packet_filter = Filter(rules, policy.port_range, addresses, networks, sources)
    return replace(packet_filter.judge(peers), tools=tools, filter=packet_filter)


def among(observed: Firewall, nodes: tuple[str, ...]) -> Firewall:
    """The same, with the addresses of the fleet's nodes known, and no others."""
    if observed.filter is None:
        return observed
    return replace(
        observed.filter.judge(nodes, sure=True), tools=observed.tools, filter=observed.filter
    )


#: Maximum of other nodes tried per network: rules treat few nodes differently.
_MOST_PEERS = 64


@dataclass(frozen=True)
class _NetworkFate:
    """The fate of connections with the peers in one network.

    verdict: as `Firewall` has it, and the ports of that
    few:     how many of the known peers it is; "" for all
    """

    verdict: str
    ports: str = ""
    fate: Fate | None = None
    few: str = ""


def _port_count(fate: _NetworkFate) -> int:
    """How many ports ``29500, 29502-29510`` are."""
    return sum(last - first + 1 for first, last in parse_ranges(fate.ports) or ())


def _spans_of(peers: tuple[str, ...]) -> list[tuple[int, int, int]]:
    return [span for peer in peers if (span := span_of(peer))]


_spans = cached_per_fleet(_spans_of)


@dataclass(frozen=True)
class Filter:
    """A node's rules, the policy's ports, the node's addresses and networks.

    named:   (interface, ``10.1.0.0/16``)
    sources: the ports from which the node's programs connect; (): all are reserved, and any
             port is possible
    """

    rules: Ruleset
    ports: Range
    addresses: tuple[str, ...]
    named: tuple[tuple[str, str], ...]
    sources: tuple[Range, ...]

    @cached_property
    def networks(self) -> list[tuple[str, str, tuple[int, int, int]]]:
        """Interface, network, and the network's version of IP, first and last address."""
        return [(name, text, span) for name, text in self.named if (span := span_of(text))]

    @cached_property
    def own_spans(self) -> list[tuple[int, int, int] | None]:
        return [span_of(address) for address in self.addresses]

    def judge(self, peers: tuple[str, ...], *, sure: bool = False) -> Firewall:
        """What happens to the connections with these hosts, or with any of the node's networks.

        sure: these are the fleet's nodes, and no others
        """
        manager = _manager(self.rules)
        spans = _spans(peers) if sure else _spans_of(peers)

        @cache
        def other_hosts() -> list[tuple[int, int, int]]:
            # Rarely needed: most rules are open to all.
            return [span for span in spans if span not in self.own_spans]

        families = [
            family
            for family in (4, 6)
            if any(span and span[0] == family for span in self.own_spans)
        ]
        result = self._family(families[0] if families else 4, other_hosts, sure)
        if result.verdict == "open" and families == [4, 6]:
            by_name = {family for family, first, _ in other_hosts()
                       if self._near(family, first) is not None}  # fmt: skip
            over_ipv6 = self._family(6, other_hosts, sure)
            if over_ipv6.verdict == "dropped" and by_name != {4}:
                result = replace(over_ipv6, verdict="cannot tell",
                                ports=f"{over_ipv6.ports} over IPv6", networks=())  # fmt: skip
        return replace(result, manager=manager)

    def _packet(self, family: int) -> Packet:
        packet = Packet(family, *self.ports, self.addresses)
        return fast_replace(packet, sources=self.sources or ((1, 65535),))

    def _near(self, family: int, address: int) -> int | None:
        """The network, by its number, that an address is in: the smallest."""
        inside = [
            (last - first, index)
            for index, (_, _, (version, first, last)) in enumerate(self.networks)
            if version == family and first <= address <= last
        ]
        return min(inside)[1] if inside else None

    def _family(
        self, family: int, other_hosts: Callable[[], list[tuple[int, int, int]]], sure: bool
    ) -> Firewall:
        """The verdict for one version of IP."""
        generic_packet = self._packet(family)
        generic = self._packet_fate(generic_packet)
        if generic.verdict == "open":
            return self._firewall(generic)
        peers = [first for version, first, _ in other_hosts() if version == family]
        indexes = [index for index, network in enumerate(self.networks) if network[2][0] == family]
        near: dict[int, list[int]] = {}
        for peer in peers:
            index = self._near(family, peer)
            if index is not None:
                near.setdefault(index, []).append(peer)
        fates_by_network: dict[str, _NetworkFate] = {}
        for index in near or indexes:
            name, text, _ = self.networks[index]
            fates_by_network[f"{text} on {name}"] = self._network(
                index, generic_packet, near.get(index, []), sure
            )
        if not fates_by_network and peers:
            name = self.networks[indexes[0]][0] if len(indexes) == 1 else ""
            packet = fast_replace(generic_packet, interface=name, near=False)
            fates_by_network["other networks"] = self._hosts(
                packet, self._host_groups(family, peers), sure
            )
        if not fates_by_network:
            return self._firewall(generic)
        let_in = tuple(
            network
            for network, network_fate in fates_by_network.items()
            if network_fate.verdict == "open"
        )
        if len(let_in) == len(fates_by_network):
            # Only of another version of IP, or of nobody's traffic, is anything dropped.
            return Firewall("open", range_text(*self.ports), networks=let_in)
        shut = [fate for fate in fates_by_network.values() if fate.verdict == "dropped"]
        if len(shut) == len(fates_by_network):
            # The ports that are shut everywhere, where that is so of some.
            result = self._firewall(min(shut, key=_port_count))
            general = generic.fate.cause if generic.fate else None
            text = general.text if general and general.text != result.rule else ""
            return replace(result, beside=text)
        doubts = [fate for fate in fates_by_network.values() if fate.verdict == "cannot tell"]
        doubted = doubts[0] if doubts else generic
        return replace(self._firewall(doubted), verdict="cannot tell", networks=let_in)

    def _network(
        self, index: int, generic_packet: Packet, peers: list[int], sure: bool
    ) -> _NetworkFate:
        name, _, (family, first, last) = self.networks[index]
        own_addresses = [span[1] for span in self.own_spans if span and span[0] == family]
        inside = [address for address in own_addresses if first <= address <= last]
        other_interfaces = tuple(
            interface for interface, _, _ in self.networks if interface != name
        )
        packet = fast_replace(
            generic_packet,
            interface=name,
            own=inside[0] if inside else None,
            others=other_interfaces,
        )
        if peers:
            return self._hosts(packet, self._host_groups(family, peers), sure)
        hosts = self._any_hosts(family, first, last, own_addresses)
        return self._hosts(packet, [(1, host) for host in hosts], False)

    def _any_hosts(
        self, family: int, first: int, last: int, own_addresses: list[int]
    ) -> list[int]:
        """An address of the network for each way in which the rules treat its addresses."""
        if last - first > 1:
            # Without the network's own address, and the broadcast.
            first, last = first + 1, last - (family == 4)
        starts = [first, *(s for s in self.rules.addresses[family == 6] if first < s <= last)]
        hosts = []
        for start, end in zip(starts, [*starts[1:], last + 1]):
            host = next(
                (a for a in range(start, min(end, start + 8)) if a not in own_addresses), None
            )
            if host is not None:
                hosts.append(host)
        return hosts[:_MOST_PEERS]

    def _host_groups(self, family: int, peers: list[int]) -> list[tuple[int, int]]:
        """How many of the hosts the rules treat alike, and one of them."""
        starts = self.rules.addresses[family == 6]
        groups: dict[int, list[int]] = {}
        for peer in peers:
            groups.setdefault(bisect_right(starts, peer), []).append(peer)
        return [(len(group), group[0]) for group in groups.values()][:_MOST_PEERS]

    def _hosts(self, packet: Packet, hosts: list[tuple[int, int]], sure: bool) -> _NetworkFate:
        """The verdict of some hosts together."""
        host_fates = [
            (count, self._packet_fate(replace(packet, peer=host))) for count, host in hosts
        ]
        verdicts = {host_fate.verdict for _, host_fate in host_fates}
        if not host_fates:
            return self._packet_fate(packet)
        if len(verdicts) == 1:
            # The ports that are shut for each of them, where that is so of some.
            return min((host_fate for _, host_fate in host_fates), key=_port_count)
        worst = next(
            host_fate for verdict in ("dropped", "cannot tell") for _, host_fate in host_fates
            if host_fate.verdict == verdict
        )  # fmt: skip
        if worst.verdict == "dropped" and not sure:
            # Which hosts of the network are nodes of the fleet is unknown here.
            doubt = self._packet_fate(packet)
            return doubt if doubt.verdict != "open" else replace(worst, verdict="cannot tell")
        affected_count = sum(
            count for count, host_fate in host_fates if host_fate.verdict == worst.verdict
        )
        return replace(worst, few=f"{affected_count} of {sum(count for count, _ in host_fates)}")

    def _packet_fate(self, packet: Packet) -> _NetworkFate:
        return _NetworkFate(*_worst(tuple(fates(self.rules, packet))))

    def _firewall(self, network_fate: _NetworkFate) -> Firewall:
        cause = network_fate.fate.cause if network_fate.fate else None
        if network_fate.fate is None or cause is None:
            return Firewall(network_fate.verdict, range_text(*self.ports))
        return Firewall(
            network_fate.verdict,
            network_fate.ports,
            cause.chain,
            cause.text,
            what=network_fate.fate.kind.words,
            how=cause.how,
            peers=network_fate.few,
            varies=cause.varies,
        )

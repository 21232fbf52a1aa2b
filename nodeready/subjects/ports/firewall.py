"""The effect of a node's packet filters on new connections to the policy's ports.

Only the rules in force count, not the configuration of firewalld and ufw. `rule_listing` lists the
rules, `iptables` and `nft` read them, `rule_walk` evaluates them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import ClassVar

from nodeready.policy import Policy
from nodeready.subjects.base import Output, cached_last
from nodeready.subjects.parsed_template import fast_replace
from nodeready.subjects.ports import nft
from nodeready.subjects.ports.iptables import CUT, parse_ipsets, parse_iptables_rules
from nodeready.subjects.ports.packets import Packet, span_of
from nodeready.subjects.ports.port_ranges import (
    KERNEL_EPHEMERAL,
    Range,
    join_ranges,
    parse_ranges,
    range_text,
)
from nodeready.subjects.ports.rule_listing import COMPLETE_STATES, ListingTool, split_listing
from nodeready.subjects.ports.rule_walk import Fate, fates
from nodeready.subjects.ports.rules import Ruleset


@dataclass(frozen=True)
class Firewall:
    """The fate of jobs' TCP connections, to the policy's ports of this node and of peers.

    verdict: "open", "dropped", "cannot tell" (it depends on ``rule``) or "unknown" (``reason``)
    ports:   the ports of the verdict, ``29500-29510``
    packets_text: the dropped packets in words; {} is replaced by the ports
    how:     "dropped by" the rule, or "led elsewhere by" it
    chain:   family, table and chain of the rule
    rule:    the rule that drops, or on which the verdict depends, as the tool prints it
    other_rule: a rule that accepts such packets, but not from the node's own networks
    manager: the program that made the rules: firewalld, ufw, nftables, iptables; "" without rules
    tools:   the programs that listed the rules
    networks: the node's networks whose peers can connect, where the verdict depends on that
    peers:   the part of the known peers that is affected, ``2 of 14``; "": all
    varies:  ``rule`` counts, measures, or draws lots: a few connections do not show its effect
    tried:   all nodes connected in a trial of the connections that depend on ``rule``
    filter:  the rules and the node's addresses, for the connections with peers that become known
             later; None: nothing to judge
    reason: why the verdict is unknown
    """

    JSON_KEYS: ClassVar = {"packets_text": "what", "other_rule": "beside"}

    verdict: str
    ports: str = ""
    chain: str = ""
    rule: str = ""
    manager: str = ""
    reason: str = ""
    tools: tuple[ListingTool, ...] = ()
    networks: tuple[str, ...] = ()
    packets_text: str = "{}"
    how: str = "dropped by"
    other_rule: str = ""
    peers: str = ""
    varies: bool = False
    tried: bool = False
    filter: Filter | None = field(default=None, compare=False, repr=False)


_NEEDS_ROOT = "the rules can be seen by root alone (CAP_NET_ADMIN)"


def _unread_reason(tool: ListingTool) -> str:
    """Why the rules of this program are unknown."""
    if tool.state == "needs root":
        return _NEEDS_ROOT
    if tool.state == "missing":
        return f"{tool.name} is not installed, and {tool.detail or 'the kernel may have rules'}"
    return f"{tool.name} {tool.state} {tool.detail}".strip()


# The nodes of a fleet mostly have the same rules, which take longer to read than to judge.
@lru_cache(maxsize=64)
def _ruleset(texts: tuple[tuple[str, str], ...]) -> Ruleset:
    """All rules. Where nft and iptables-nft-save both print a table, the latter's text counts.

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
        # nft has printed the tables that iptables-nft-save cannot show.
        saved = _INCOMPATIBLE.sub("", text) if name.endswith("-nft") else text
        rules = parse_iptables_rules(saved, 6 if name.startswith("ip6") else 4, sets)
        if not name.endswith("-nft"):
            # Legacy tables apply in addition to nft's tables of the same names.
            rules = _mark_legacy(rules)
        merged_rules = merged_rules.merged(rules)
    return merged_rules


#: A table of NAT whose rest was left out on the node.
_CUT_NAT = re.compile(rf"^table ip6? nat {{\n(?:(?!^table |^{CUT}$).*\n)*{CUT}$", re.M)
#: A table that iptables-nft-save cannot show, by its own message, and a partial listing of it.
_INCOMPATIBLE = re.compile(
    r"^# Table `([^']*)' .*incompatible.*\n(\*\1\n(?:(?!COMMIT$).*\n)*COMMIT$)?", re.M
)


def _mark_legacy(rules: Ruleset) -> Ruleset:
    chains = {}
    for (table, name), chain in rules.chains.items():
        chains[f"{table} (legacy)", name] = replace(chain, table=f"{table} (legacy)")
    return Ruleset(chains)


def _manager(rules: Ruleset) -> str:
    """The program that made the rules, by the chain names of firewalld and ufw."""
    for table, name in rules.chains:
        if table.endswith(" firewalld") or name == "INPUT_ZONES":
            return "firewalld"
        if name.startswith("ufw-"):
            return "ufw"
    if not rules.chains:
        return ""
    iptables = all(name == name.upper() for (_, name), chain in rules.chains.items() if chain.hook)
    return "iptables" if iptables else "nftables"


def _worst_verdict(port_fates: tuple[Fate, ...]) -> tuple[str, str, Fate | None]:
    """The worst verdict of all ports, its ports, and the fate of one of them."""
    for verdict in ("dropped", "cannot tell"):
        bad = [fate for fate in port_fates if fate.verdict == verdict]
        if bad:
            joined = join_ranges((fate.first, fate.last) for fate in bad)
            worst = next((fate for fate in bad if fate.varies), bad[0])
            return verdict, ", ".join(range_text(*ports) for ports in joined[:4]), worst
    return "open", "", None


def _unknown(reason: str, tools: tuple[ListingTool, ...]) -> Firewall:
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
    """The effect of the node's rules; never raises.

    addresses: the node's own; with an IPv6 address among them, IPv6 is judged as well
    networks:  (interface, ``10.1.0.0/16``) of the networks to which the node is connected
    peers:     addresses of hosts that the node knows by name
    sources:   the ports from which the node's programs connect, and most probably its peers', too
    """
    tools, texts = split_listing(output)
    if output.truncated:
        return _unknown("the ruleset is too large", tools)
    if output.rc is None:
        return _unknown("listing the rules timed out", tools)
    if output.rc != 0:
        return _unknown(f"listing the rules failed with exit status {output.rc}", tools)
    # Without nft, iptables-nft-save may still show all rules of iptables.
    replaced = any(tool.name.endswith("-nft") and tool.state == "ok" for tool in tools)
    for tool in tools:
        if tool.state not in COMPLETE_STATES and not (tool.state == "missing" and replaced):
            return _unknown(_unread_reason(tool), tools)
    try:
        rules = _ruleset(tuple(texts))
    except ValueError as error:
        return _unknown(str(error), tools)
    packet_filter = Filter(rules, policy.port_range, addresses, networks, sources)
    return replace(packet_filter.judge(peers), tools=tools, filter=packet_filter)


def judge_nodes(observed: Firewall, nodes: tuple[str, ...]) -> Firewall:
    """The verdict for the fleet's nodes alone, by their addresses."""
    if observed.filter is None:
        return observed
    return replace(
        observed.filter.judge(nodes, is_complete=True),
        tools=observed.tools,
        filter=observed.filter,
    )


#: Maximum of peers that are judged per network: rules distinguish few peers.
_MOST_PEERS = 64


@dataclass(frozen=True)
class _NetworkFate:
    """The fate of connections with the peers in one network.

    verdict:    as in `Firewall`, with its ports
    peer_share: the part of the known peers that is affected; "": all
    """

    verdict: str
    ports: str = ""
    fate: Fate | None = None
    peer_share: str = ""


def _port_count(fate: _NetworkFate) -> int:
    """How many ports ``29500, 29502-29510`` are."""
    return sum(last - first + 1 for first, last in parse_ranges(fate.ports) or ())


def _spans_of(peers: tuple[str, ...]) -> list[tuple[int, int, int]]:
    return [span for peer in peers if (span := span_of(peer))]


_spans = cached_last(_spans_of)


@dataclass(frozen=True)
class Filter:
    """A node's rules, the policy's ports, the node's addresses and networks.

    named_networks: (interface, ``10.1.0.0/16``)
    sources: the ports from which the node's programs connect; (): all are reserved, and any
             port is possible
    """

    rules: Ruleset
    ports: Range
    addresses: tuple[str, ...]
    named_networks: tuple[tuple[str, str], ...]
    sources: tuple[Range, ...]

    @cached_property
    def networks(self) -> list[tuple[str, str, tuple[int, int, int]]]:
        """Interface, network, and the network's version of IP, first and last address."""
        return [
            (name, text, span) for name, text in self.named_networks if (span := span_of(text))
        ]

    @cached_property
    def own_spans(self) -> list[tuple[int, int, int] | None]:
        return [span_of(address) for address in self.addresses]

    def judge(self, peers: tuple[str, ...], *, is_complete: bool = False) -> Firewall:
        """The fate of the connections with these hosts, or with any of the node's networks.

        is_complete: the hosts are exactly the fleet's nodes
        """
        spans = _spans(peers) if is_complete else _spans_of(peers)

        @cache
        def other_hosts() -> list[tuple[int, int, int]]:
            # Rarely needed: most rules accept all hosts.
            return [span for span in spans if span not in self.own_spans]

        families = sorted({span[0] for span in self.own_spans if span})
        result = self._judge_family(families[0] if families else 4, other_hosts, is_complete)
        if result.verdict == "open" and families == [4, 6]:
            peer_families = {
                family
                for family, first, _ in other_hosts()
                if self._smallest_network(family, first) is not None
            }
            over_ipv6 = self._judge_family(6, other_hosts, is_complete)
            if over_ipv6.verdict == "dropped" and peer_families != {4}:
                ports = f"{over_ipv6.ports} over IPv6"
                result = replace(over_ipv6, verdict="cannot tell", ports=ports, networks=())
        return replace(result, manager=_manager(self.rules))

    def _packet(self, family: int) -> Packet:
        packet = Packet(family, *self.ports, self.addresses)
        return fast_replace(packet, sources=self.sources or ((1, 65535),))

    def _smallest_network(self, family: int, address: int) -> int | None:
        """The index of the smallest network with the address; None: in no network."""
        inside = [
            (last - first, index)
            for index, (_, _, (version, first, last)) in enumerate(self.networks)
            if version == family and first <= address <= last
        ]
        return min(inside)[1] if inside else None

    def _judge_family(
        self, family: int, other_hosts: Callable[[], list[tuple[int, int, int]]], is_complete: bool
    ) -> Firewall:
        """The verdict for one version of IP."""
        generic_packet = self._packet(family)
        generic = self._judge_packet(generic_packet)
        if generic.verdict == "open":
            return self._firewall(generic)
        peers = [first for version, first, _ in other_hosts() if version == family]
        indexes = [index for index, network in enumerate(self.networks) if network[2][0] == family]
        peers_by_network: dict[int, list[int]] = {}
        for peer in peers:
            index = self._smallest_network(family, peer)
            if index is not None:
                peers_by_network.setdefault(index, []).append(peer)
        fates_by_network: dict[str, _NetworkFate] = {}
        for index in peers_by_network or indexes:
            name, text, _ = self.networks[index]
            fates_by_network[f"{text} on {name}"] = self._judge_network(
                index, generic_packet, peers_by_network.get(index, []), is_complete
            )
        if not fates_by_network and peers:
            name = self.networks[indexes[0]][0] if len(indexes) == 1 else ""
            packet = fast_replace(generic_packet, interface=name, is_near=False)
            fates_by_network["other networks"] = self._judge_hosts(
                packet, self._host_groups(family, peers), is_complete
            )
        if not fates_by_network:
            return self._firewall(generic)
        open_networks = tuple(
            network for network, fate in fates_by_network.items() if fate.verdict == "open"
        )
        if len(open_networks) == len(fates_by_network):
            # The rules only drop packets of the other version of IP, or of no known host.
            return Firewall("open", range_text(*self.ports), networks=open_networks)
        dropped_fates = [fate for fate in fates_by_network.values() if fate.verdict == "dropped"]
        if len(dropped_fates) == len(fates_by_network):
            # The ports that are shut for all networks, where there are such ports.
            result = self._firewall(min(dropped_fates, key=_port_count))
            general = generic.fate.cause if generic.fate else None
            text = general.text if general and general.text != result.rule else ""
            return replace(result, other_rule=text)
        doubtful = next(
            (fate for fate in fates_by_network.values() if fate.verdict == "cannot tell"), generic
        )
        return replace(self._firewall(doubtful), verdict="cannot tell", networks=open_networks)

    def _judge_network(
        self, index: int, generic_packet: Packet, peers: list[int], is_complete: bool
    ) -> _NetworkFate:
        name, _, (family, first, last) = self.networks[index]
        own_addresses = [span[1] for span in self.own_spans if span and span[0] == family]
        inside = [address for address in own_addresses if first <= address <= last]
        packet = fast_replace(
            generic_packet,
            interface=name,
            own_address=inside[0] if inside else None,
            other_interfaces=tuple(other for other, _, _ in self.networks if other != name),
        )
        if peers:
            return self._judge_hosts(packet, self._host_groups(family, peers), is_complete)
        hosts = self._sample_hosts(family, first, last, own_addresses)
        return self._judge_hosts(packet, [(1, host) for host in hosts], False)

    def _sample_hosts(
        self, family: int, first: int, last: int, own_addresses: list[int]
    ) -> list[int]:
        """One address of the network for each group of addresses that the rules treat alike."""
        if last - first > 1:
            # Without the network address and the broadcast address.
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
        """For each group of hosts that the rules treat alike: their count, and one of them."""
        starts = self.rules.addresses[family == 6]
        groups: dict[int, list[int]] = {}
        for peer in peers:
            groups.setdefault(bisect_right(starts, peer), []).append(peer)
        return [(len(group), group[0]) for group in groups.values()][:_MOST_PEERS]

    def _judge_hosts(
        self, packet: Packet, hosts: list[tuple[int, int]], is_complete: bool
    ) -> _NetworkFate:
        """The verdict of some hosts together."""
        host_fates = [
            (count, self._judge_packet(replace(packet, peer_address=host)))
            for count, host in hosts
        ]
        if not host_fates:
            return self._judge_packet(packet)
        verdicts = {fate.verdict for _, fate in host_fates}
        if len(verdicts) == 1:
            # The ports that are shut for each host, where there are such ports.
            return min((fate for _, fate in host_fates), key=_port_count)
        worst_verdict = "dropped" if "dropped" in verdicts else "cannot tell"
        worst = next(fate for _, fate in host_fates if fate.verdict == worst_verdict)
        if worst.verdict == "dropped" and not is_complete:
            # It is unknown which hosts of the network are nodes of the fleet.
            doubt = self._judge_packet(packet)
            return doubt if doubt.verdict != "open" else replace(worst, verdict="cannot tell")
        affected = sum(count for count, fate in host_fates if fate.verdict == worst.verdict)
        total = sum(count for count, _ in host_fates)
        return replace(worst, peer_share=f"{affected} of {total}")

    def _judge_packet(self, packet: Packet) -> _NetworkFate:
        return _NetworkFate(*_worst_verdict(tuple(fates(self.rules, packet))))

    def _firewall(self, network_fate: _NetworkFate) -> Firewall:
        cause = network_fate.fate.cause if network_fate.fate else None
        if network_fate.fate is None or cause is None:
            return Firewall(network_fate.verdict, range_text(*self.ports))
        return Firewall(
            network_fate.verdict,
            network_fate.ports,
            cause.chain,
            cause.text,
            packets_text=network_fate.fate.kind.words,
            how=cause.how,
            peers=network_fate.peer_share,
            varies=cause.varies,
        )

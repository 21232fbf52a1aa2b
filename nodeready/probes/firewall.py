"""What a node's packet filters do with new connections to the policy's ports.

firewalld and ufw are seen by the rules that they make, whatever they believe to have made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from nodeready.policy import Policy
from nodeready.probes import iptables_rules, nft_rules, rule_tools
from nodeready.probes.base import Output
from nodeready.probes.netfilter import Fate, Ruleset, fates
from nodeready.probes.packet import Packet
from nodeready.probes.rule_tools import ENOUGH, Tool


@dataclass(frozen=True)
class Firewall:
    """What happens to a new TCP connection from another node to the policy's ports.

    verdict: "open", "dropped", "cannot tell" (it depends on ``rule``) or "unknown" (``reason``)
    ports:   those that the verdict is about, ``29500-29510``
    chain:   family, table and chain of the rule
    rule:    the rule that drops, or on which it depends, as the tool prints it
    manager: what made the rules: firewalld, ufw, nftables, iptables; "" when there are none
    tools:   the programs that were asked
    networks: the node's own networks from which peers get in, where others do not or may not
    """

    verdict: str
    ports: str = ""
    chain: str = ""
    rule: str = ""
    manager: str = ""
    reason: str = ""
    tools: tuple[Tool, ...] = ()
    networks: tuple[str, ...] = ()


_NEEDS_ROOT = "the rules can be seen by root alone (CAP_NET_ADMIN)"


def _unread(tool: Tool) -> str:
    """Why the rules that this program would list are not known."""
    if tool.state == "needs root":
        return _NEEDS_ROOT
    if tool.state == "missing":
        return f"{tool.name} is not installed, and {tool.detail or 'the kernel may have rules'}"
    return f"{tool.name} {tool.state} {tool.detail}".strip()


# The rules of a fleet's nodes are mostly the same, and take longer to read than to judge.
@lru_cache(maxsize=64)
def _ruleset(texts: tuple[tuple[str, str], ...]) -> Ruleset:
    """All rules. What iptables-nft-save says of a table is taken instead of what nft says.

    Raises ValueError for text that makes no sense.
    """
    found = Ruleset()
    for name, text in texts:
        if name == "nft":
            found = found.merged(nft_rules.parse(text))
        elif not re.search("^# Table .* incompatible", text, re.M):
            rules = iptables_rules.parse(text, 6 if name.startswith("ip6") else 4)
            if not name.endswith("-nft"):
                # Legacy tables stand beside those of nft that have the same names.
                rules = _renamed(rules)
            found = found.merged(rules)
    return found


def _renamed(rules: Ruleset) -> Ruleset:
    chains = {}
    for (table, name), chain in rules.chains.items():
        chains[f"{table} (legacy)", name] = replace(chain, table=f"{table} (legacy)")
    return Ruleset(chains, rules.marks)


def _manager(rules: Ruleset) -> str:
    """Who made the rules, by the names that firewalld and ufw give to their chains."""
    for table, name in rules.chains:
        if table.endswith(" firewalld") or name == "INPUT_ZONES":
            return "firewalld"
        if name.startswith("ufw-"):
            return "ufw"
    if not rules.chains:
        return ""
    iptables = all(name == name.upper() for (_, name), chain in rules.chains.items() if chain.hook)
    return "iptables" if iptables else "nftables"


def _worst(pieces: tuple[Fate, ...]) -> tuple[str, str, Fate | None]:
    """The worst verdict of all ports, the ports that have it, and one of the pieces."""
    for verdict in ("dropped", "cannot tell"):
        bad = [piece for piece in pieces if piece.verdict == verdict]
        if bad:
            joined: list[tuple[int, int]] = []
            for piece in bad:
                if joined and joined[-1][1] + 1 == piece.first:
                    joined[-1] = (joined[-1][0], piece.last)
                else:
                    joined.append((piece.first, piece.last))
            return verdict, ", ".join(shown(*ports) for ports in joined[:4]), bad[0]
    return "open", "", None


def shown(first: int, last: int) -> str:
    """A range of ports as text."""
    return str(first) if first == last else f"{first}-{last}"


def _unknown(reason: str, tools: tuple[Tool, ...] = ()) -> Firewall:
    return Firewall("unknown", reason=reason, tools=tools)


def parse(
    output: Output,
    policy: Policy,
    addresses: tuple[str, ...],
    networks: tuple[tuple[str, str], ...] = (),
) -> Firewall:
    """What the node's rules do; never raises.

    addresses: those of the node. IPv6 counts where it has an address to be reached at
    networks:  those that it is connected to, as (interface, ``10.1.0.0/16``)
    """
    tools, texts = rule_tools.split(output)
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
    return replace(_judge(rules, policy.port_range, addresses, networks), tools=tools)


def _judge(
    rules: Ruleset,
    ports: tuple[int, int],
    addresses: tuple[str, ...],
    networks: tuple[tuple[str, str], ...],
) -> Firewall:
    manager = _manager(rules)
    packet = Packet(4, *ports, addresses)
    verdict, some, piece = _worst(fates(rules, packet))
    let_in: tuple[str, ...] = ()
    if verdict == "cannot tell":
        # From anywhere, it depends. The other nodes mostly are in this node's own networks.
        let_in = tuple(
            f"{network} on {interface}"
            for interface, network in networks
            if _worst(fates(rules, replace(packet, interface=interface, network=network)))[0]
            == "open"
        )
        if let_in and len(let_in) == len(networks):
            verdict, piece = "open", None
    if verdict == "open" and any(":" in address for address in addresses):
        over_ipv6, some, piece = _worst(fates(rules, replace(packet, family=6)))
        if over_ipv6 != "dropped":
            piece = None
        else:
            verdict, some = "cannot tell", f"{some} over IPv6"
    cause = piece.cause if piece else None
    if cause is None:
        return Firewall(verdict, shown(*ports), manager=manager, networks=let_in)
    return Firewall(verdict, some, cause.chain, cause.text, manager, networks=let_in)

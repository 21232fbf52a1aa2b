"""Rules as ``iptables-save`` prints them (iptables(8)), read into the rules of `rules`.

The elements of sets come from ``ipset save``. An unknown condition is uncertain.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace

from nodeready.subjects.ports import nft
from nodeready.subjects.ports.packets import ALL_BITS, number
from nodeready.subjects.ports.rules import (
    ALWAYS,
    NEVER,
    UNCERTAIN,
    VARYING,
    VARYING_MODULES,
    Chain,
    Rule,
    RuleMatch,
    Ruleset,
    connection_limit,
    nat_target,
    rate_limit,
)

#: The hook of each built-in chain that a packet for this node, or from it, passes (iptables(8)).
_HOOKS = {
    "PREROUTING": "prerouting",
    "INPUT": "input",
    "OUTPUT": "output",
    "POSTROUTING": "postrouting",
}
#: Table -> priority of its chains (NF_IP_PRI_*, include/uapi/linux/netfilter_ipv4.h).
_PRIORITIES = {"raw": -300, "mangle": -150, "nat": -100, "filter": 0, "security": 50}
_TARGETS = {
    "ACCEPT": "accept",
    "DROP": "drop",
    "REJECT": "drop",
    "TARPIT": "drop",
    "DELUDE": "drop",
    "CHAOS": "drop",
    "STEAL": "drop",
    "RETURN": "return",
    "QUEUE": "elsewhere",
    "NFQUEUE": "elsewhere",
    "TPROXY": "elsewhere",
    "SYNPROXY": "elsewhere",
    "DNAT": "divert",
    "REDIRECT": "divert",
    "NETMAP": "divert",
    "SNAT": "accept",
    "MASQUERADE": "accept",
    "NOTRACK": "notrack",
    "HMARK": "mark",
}
#: Option with one value -> the selector of `packets`; {} stands for ip or ip6.
_SELECTORS = {
    "-p": "l4proto",
    "-i": "iifname",
    "-o": "oifname",
    "-s": "{} saddr",
    "-d": "{} daddr",
    "--src-range": "{} saddr",
    "--dst-range": "{} daddr",
    "--dport": "tcp dport",
    "--dports": "tcp dport",
    "--sport": "tcp sport",
    "--sports": "tcp sport",
    "--ports": "either port",
    "--ctstate": "ct state",
    "--state": "ct state",
    "--ctstatus": "ct status",
    "--ctproto": "ct protocol",
    "--ctorigsrc": "ct original saddr",
    "--ctorigdst": "ct original daddr",
    "--ctreplsrc": "ct reply saddr",
    "--ctrepldst": "ct reply daddr",
    "--ctorigsrcport": "ct original proto-src",
    "--ctorigdstport": "ct original proto-dst",
    "--ctreplsrcport": "ct reply proto-src",
    "--ctrepldstport": "ct reply proto-dst",
    "--ctdir": "ct direction",
    "--dst-type": "fib daddr type",
    "--src-type": "fib saddr type",
    "--pkt-type": "pkttype",
    "--mac-source": "ether saddr",
    "--ttl-eq": "ip ttl",
    "--hl-eq": "ip6 hoplimit",
    "--length": "length",
    "--mss": "mss",
    "--uid-owner": "skuid",
    "--gid-owner": "skgid",
    "--realm": "rtclassid",
    "--helper": "ct helper",
    "--label": "ct label",
    "--src-cc": "geography",
    "--source-country": "geography",
    "--dst-cc": "geography",
    "--destination-country": "geography",
    "--src-group": "iifgroup",
    "--dst-group": "oifgroup",
    "--vproto": "ct helper",
    "--ecn-ip-ect": "ip ecn",
}
#: Option with one number -> selector and comparison.
_COMPARISONS = {
    "--ttl-lt": ("ip ttl", "0-{}", -1),
    "--ttl-gt": ("ip ttl", "{}-255", 1),
    "--hl-lt": ("ip6 hoplimit", "0-{}", -1),
    "--hl-gt": ("ip6 hoplimit", "{}-255", 1),
}
#: Options without a value -> the answer. Conditions on forwarded and bridged packets, and on IPVS,
#: are false for packets of this node.
_ANSWERS = {
    "-f": NEVER,
    "--physdev-is-bridged": NEVER,
    "--physdev-is-out": NEVER,
    "--ecn-tcp-cwr": NEVER,
    "--ecn-tcp-ece": NEVER,
    "--transparent": RuleMatch(("socket transparent",), (("1",),)),
    "--ipvs": NEVER,
    "--vmethod": NEVER,
    "--socket-exists": ALWAYS,
}
#: Modules whose only conditions are their options.
_PLAIN_MODULES = {
    "tcp", "udp", "conntrack", "state", "multiport", "addrtype", "pkttype", "mark", "comment",
    "set", "limit", "icmp", "icmp6", "ipv6-icmp", "iprange", "connmark", "owner", "mac", "ttl",
    "hl", "length", "dscp", "tos", "ecn", "tcpmss", "hashlimit", "connlimit", "recent", "string",
    "geoip", "physdev", "policy", "realm", "helper", "connlabel", "devgroup", "ipvs", "nfacct",
}  # fmt: skip
#: Modules for headers that the packet does not have, and for traffic that no job makes.
_FOREIGN_MODULES = {
    "rt", "frag", "hbh", "dst", "mh", "ah", "esp", "sctp", "dccp", "srh", "ipcomp", "psd",
    "lscan", "l2tp",
}  # fmt: skip
#: Options that only modify another option -> how many values they take.
_MODIFIERS = {
    "--hashlimit-mode": 1, "--hashlimit-name": 1, "--hashlimit-srcmask": 1, "--name": 1,
    "--hashlimit-dstmask": 1, "--hashlimit-htable-size": 1, "--hashlimit-htable-max": 1,
    "--hashlimit-htable-expire": 1, "--hashlimit-htable-gcinterval": 1, "--mask": 1,
    "--connlimit-mask": 1, "--rsource": 0, "--rdest": 0, "--rttl": 0, "--reap": 0, "--algo": 1,
    "--from": 1, "--to": 1, "--dir": 1, "--mode": 1, "--return-nomatch": 0, "--set-name": 1,
    "--nfacct-name": 1, "--limit-burst": 1, "--hashlimit-burst": 1, "--seconds": 1,
    "--hitcount": 1, "--loose": 0, "--validmark": 0, "--accept-local": 0, "--dst-pfx": 1,
    "--hashlimit-rate-match": 0, "--hashlimit-rate-interval": 1, "--limit-iface-in": 0,
    "--limit-iface-out": 0, "--nowildcard": 0, "--restore-skmark": 0, "--connlimit-saddr": 0,
    "--connlimit-daddr": 0, "--strict": 0, "--icase": 0,
}  # fmt: skip
_ONLY_SYN = "syn/fin,syn,rst,ack"
_SET_TYPES = re.compile(r"(hash:(ip|net)|bitmap:ip|bitmap:port|hash:(ip|net),(port|iface))$")

#: The line in the place of the rest of a table that was cut off on the node.
CUT = "# cut"

#: An ipset: its type and its elements; None where its content is unknown.
Sets = Mapping[str, "tuple[str, tuple[str, ...]] | None"]


def parse_ipsets(text: str) -> Sets:
    """The sets that ``ipset save`` printed (ipset(8))."""
    kinds: dict[str, str] = {}
    members: dict[str, list[str] | None] = {}
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["create"] and len(words) > 2:
            kinds[words[1]], members[words[1]] = words[2], []
        elif words[:1] == ["add"] and len(words) > 2:
            elements = members.get(words[1])
            if "nomatch" in words[3:]:
                members[words[1]] = None
            elif elements is not None:
                elements.append(words[2])
    return {
        name: (kinds[name], tuple(elements)) if elements is not None else None
        for name, elements in members.items()
    }


def _in_set(name: str, sides: str, ip: str, sets: Sets, depth: int = 0) -> RuleMatch:
    """``--match-set NAME src,dst``."""
    ipset = sets.get(name)
    if ipset is None or depth > 2:
        return UNCERTAIN
    kind, elements = ipset
    parts = kind.partition(":")[2].split(",")
    directions = sides.split(",")
    if kind == "list:set":
        inner = [_in_set(member_set, sides, ip, sets, depth + 1) for member_set in elements]
        if any(not match.selectors for match in inner) or len({m.selectors for m in inner}) > 1:
            return UNCERTAIN if inner else NEVER
        together = tuple(value for match in inner for value in match.values)
        return RuleMatch(inner[0].selectors, together) if inner else NEVER
    if not _SET_TYPES.match(kind) or len(directions) < len(parts):
        return UNCERTAIN
    selectors = []
    for part, direction in zip(parts, directions):
        source = direction == "src"
        selectors.append({
            "port": "tcp sport" if source else "tcp dport",
            "iface": "iifname" if source else "oifname",
        }.get(part, f"{ip} {'saddr' if source else 'daddr'}"))  # fmt: skip
    values = []
    for member in elements:
        value = member.split(",")
        ports = value[-1].partition(":") if parts[-1] == "port" else ("", "", "")
        if ports[1] and ports[0] != "tcp":
            continue
        if ports[1]:
            value[-1] = ports[2]
        values.append(tuple(value))
    return RuleMatch(tuple(selectors), tuple(values))


def _values(text: str, selector: str) -> tuple[tuple[str, ...], ...]:
    if selector in ("iifname", "oifname", "ether saddr") or selector.endswith(("saddr", "daddr")):
        return ((text,),)
    parts = (part.replace(":", "-") for part in text.split(","))
    return tuple((part,) for part in parts)


def _option_value(words: list[str], option: str) -> str:
    """The value of an option; "" without it."""
    index = words.index(option) + 1 if option in words else len(words)
    return words[index] if index < len(words) else ""


def _rate(words: list[str], value: str, burst_option: str, over: bool) -> RuleMatch:
    """A limit of iptables, ``5/sec``; a limit of bytes, ``512kb/s``, varies."""
    return rate_limit(nft.rate(value, _option_value(words, burst_option)), over)


def _recent(words: list[str]) -> RuleMatch:
    """``--rcheck`` and ``--update``: a number of recent packets is a rate limit.

    Without a number, the condition is about hosts that another rule has listed for an attack. A
    fleet's nodes are not among them.
    """
    hits, seconds = _option_value(words, "--hitcount"), _option_value(words, "--seconds")
    if not hits:
        return NEVER
    return rate_limit(int(hits) / int(seconds) if seconds not in ("", "0") else None, True)


def _option(word: str, following: str, words: list[str], ip: str) -> tuple[RuleMatch | None, int]:
    """The condition of one option, and how many values the option has."""
    if word in _SELECTORS:
        selector = _SELECTORS[word].format(ip)
        return RuleMatch((selector,), _values(following, selector)), 1
    if word in _COMPARISONS:
        selector, shape, step = _COMPARISONS[word]
        bound = str(int(following) + step) if following.isdigit() else "?"
        return RuleMatch((selector,), ((shape.format(bound),),)), 1
    if word in _ANSWERS:
        return _ANSWERS[word], 0
    if word in _MODIFIERS:
        return None, _MODIFIERS[word]
    if word in ("--dscp", "--tos"):
        text, _, mask = following.partition("/")
        value = number(text)
        if value is None:
            return UNCERTAIN, 1
        bits = number(mask) if mask else 0xFF
        # The field is 0 in packets of jobs.
        return (NEVER if value & (bits or 0) else ALWAYS), 1
    if word == "--limit":
        return _rate(words, following, "--limit-burst", False), 1
    if word in ("--hashlimit", "--hashlimit-upto", "--hashlimit-above"):
        return _rate(words, following, "--hashlimit-burst", word.endswith("above")), 1
    if word in ("--connlimit-above", "--connlimit-upto"):
        return connection_limit(following, word.endswith("above")), 1
    if word in ("--rcheck", "--update"):
        return _recent(words), 0
    if word in ("--set", "--remove"):
        return (ALWAYS if word == "--set" else NEVER), 0
    if word in ("--string", "--hex-string"):
        # A handshake has no payload, and filters do not search the payload of jobs.
        return NEVER, 1
    if word == "--pol":
        return (ALWAYS if following == "none" else NEVER), 1
    return UNCERTAIN, 0


def _parse_matches(words: list[str], ip: str, sets: Sets) -> Iterator[RuleMatch]:
    """The conditions among a rule's words, which come without the rule's target."""
    index, negated, module = 0, False, ""
    while index < len(words):
        word = words[index]
        following = words[index + 1] if index + 1 < len(words) else ""
        third = words[index + 2] if index + 2 < len(words) else ""
        index += 1
        if word == "!":
            negated = True
            continue
        condition: RuleMatch | None = None
        if word == "-m":
            module = following
            index += 1
            if following == "rpfilter":
                inverted = "--invert" in words[index:]
                condition = RuleMatch(("reverse path",), (("missing" if inverted else "exists",),))
                words = [w for w in words if w not in ("--invert", "--loose", "--validmark")]
            elif following in _FOREIGN_MODULES:
                condition = NEVER
            elif following not in _PLAIN_MODULES and not (
                following == "socket" and "--transparent" in words
            ):
                condition = VARYING if following in VARYING_MODULES else UNCERTAIN
        elif word == "--tcp-flags":
            condition = RuleMatch(("tcp flags",), ((f"{third}/{following}",),))
            index += 2
        elif word == "--syn":
            condition = RuleMatch(("tcp flags",), ((_ONLY_SYN,),))
        elif word == "--match-set":
            condition = _in_set(following, third, ip, sets)
            index += 2
        elif word == "--mark":
            selector = "ct mark" if module == "connmark" else "mark"
            condition = RuleMatch((selector,), ((following,),))
            index += 1
        else:
            if word == "-p" and not negated and following not in ("tcp", "6", "all"):
                # Ports of another protocol are not TCP ports.
                yield NEVER
            condition, values = _option(word, following, words, ip)
            index += values
        if condition is not None:
            yield replace(condition, negated=not condition.negated) if negated else condition
        negated = False


def _value_and_mask(text: str) -> tuple[int, int]:
    """``0x1/0xff`` as value and mask."""
    value, _, mask = text.partition("/")
    return number(value) or 0, (number(mask) or 0) if mask else ALL_BITS


def _change_state(target: str, words: list[str]) -> tuple[str, str] | None:
    """Verdict and target of a rule that changes a mark or the tracking; None for other rules."""
    if target == "CT":
        return ("notrack", "") if "--notrack" in words else None
    if target not in ("MARK", "CONNMARK"):
        return None
    verdict = "mark" if target == "MARK" else "ct_mark"
    for option, keep, flip in (
        ("--set-xmark", lambda v, m: ~m, lambda v, m: v),
        ("--set-mark", lambda v, m: ~(v | m), lambda v, m: v),
        ("--and-mark", lambda v, m: v, lambda v, m: 0),
        ("--or-mark", lambda v, m: ~v, lambda v, m: v),
        ("--xor-mark", lambda v, m: ALL_BITS, lambda v, m: v),
    ):
        if option in words:
            value, mask = _value_and_mask(_option_value(words, option))
            return verdict, f"{keep(value, mask) & ALL_BITS:x}/{flip(value, mask) & ALL_BITS:x}"
    for option, word in (("--restore-mark", "restore"), ("--save-mark", "save")):
        if option in words:
            masks = {
                _option_value(words, mask_option) or "0xffffffff"
                for mask_option in ("--nfmask", "--ctmask")
            }
            common_mask = _option_value(words, "--mask")
            bits = number(common_mask or masks.pop()) if common_mask or len(masks) == 1 else None
            other = "mark" if word == "restore" else "ct_mark"
            return (word, f"{bits:x}") if bits is not None else (other, "?")
    return verdict, "?"


def _divert_target(target: str, words: list[str]) -> str:
    """The target of NAT, in the form of `rules.Rule`."""
    if target == "REDIRECT":
        port = _option_value(words, "--to-ports")
        return f":{port}" if port else ""
    return nat_target(_option_value(words, "--to-destination") or "?")


def _parse_rule(words: list[str], ip: str, sets: Sets, text: str) -> Rule | None:
    """The rule in the words after ``-A CHAIN``; None for a rule without an effect."""
    while "--comment" in words:
        index = words.index("--comment")
        words = words[:index] + words[index + 2 :]
    for option in ("-j", "-g"):
        if option in words:
            index = words.index(option)
            target = words[index + 1] if index + 1 < len(words) else ""
            break
    else:
        return None
    matches = tuple(_parse_matches(words[:index], ip, sets))
    if option == "-g":
        return Rule(matches, "goto", target, text)
    change = _change_state(target, words[index:])
    if change:
        return Rule(matches, *change, text)
    verdict = _TARGETS.get(target, "jump")
    if verdict == "divert":
        return Rule(matches, verdict, _divert_target(target, words[index:]), text)
    if verdict == "mark":
        return Rule(matches, verdict, "?", text)
    return Rule(matches, verdict, target if verdict == "jump" else "", text)


def parse_iptables_rules(text: str, family: int, sets: Sets | None = None) -> Ruleset:
    """The rules of one family (4, 6). Targets that are no chain (LOG) have no effect.

    sets: the ipsets; a missing set may contain any element

    A table that was cut off on the node, for its size, is skipped. Raises ValueError for a text
    without a complete table.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    ip = "ip" if family == 4 else "ip6"
    is_complete = "COMMIT" in lines or CUT in lines
    if not is_complete and any(not line.startswith("#") for line in lines):
        raise ValueError("no whole table in what iptables-save printed")
    chains: dict[tuple[str, str], Chain] = {}
    table_lines: list[str] = []
    for line in lines:
        if line.startswith("*"):
            table_lines = [line]
        elif line == "COMMIT":
            chains.update(_parse_table(table_lines, ip, sets or {}))
            table_lines = []
        elif not line.startswith("#"):
            table_lines.append(line)
    if table_lines and CUT not in lines and table_lines[0].startswith("*"):
        raise ValueError("no whole table in what iptables-save printed")
    return Ruleset(chains)


def _parse_table(lines: list[str], ip: str, sets: Sets) -> Iterator[tuple[tuple[str, str], Chain]]:
    """The chains of one table."""
    if not lines or not lines[0].startswith("*"):
        return
    name = lines[0][1:].strip()
    table = f"{ip} {name}"
    policies: dict[str, str] = {}
    rules: dict[str, list[Rule]] = {}
    for line in lines[1:]:
        if line.startswith(":"):
            chain, _, policy_text = line[1:].partition(" ")
            rules[chain] = []
            policies[chain] = policy_text.partition(" ")[0].lower()
        elif line.startswith("-A "):
            try:
                words = shlex.split(line)[1:]
            except ValueError:
                # A quote without its end: only the target is known.
                words = line.split()[1:]
                words[1:1] = ["--unreadable"]
            if not words:
                continue
            rule = _parse_rule(words[1:], ip, sets, " ".join(words[1:])[:160])
            if rule is not None:
                rules.setdefault(words[0], []).append(rule)
    for chain, chain_rules in rules.items():
        hook = _HOOKS.get(chain, "") if chain in policies else ""
        policy = "drop" if hook and policies[chain] == "drop" else "accept"
        is_nat = name == "nat"
        priority = 100 if is_nat and hook == "postrouting" else _PRIORITIES.get(name, 0)
        yield (
            (table, chain),
            Chain(table, chain, tuple(chain_rules), hook, policy, priority, is_nat),
        )

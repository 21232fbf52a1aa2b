"""Ranges of ports, and a node's packet filter: its drops, and its rules about the policy's ports.

What the rules together do to a connection is not evaluated: `nodeready ready` proves it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from nodeready.core.base import Output, ProbeError, Section
from nodeready.core.policy import Policy
from nodeready.core.text import join_ranges, range_text

# --- Ranges of ports: how they are written, and how they are joined and cut.

#: The first and the last port.
Range = tuple[int, int]

#: The kernel's own value of ip_local_port_range (Documentation/networking/ip-sysctl.rst).
KERNEL_EPHEMERAL = (32768, 60999)


def parse_ranges(text: str) -> tuple[Range, ...] | None:
    """``8080,29500-29510`` as ranges; () for none, None when it makes no sense."""
    ranges = []
    for part in filter(None, re.split(r"[,\s]+", text)):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if match is None:
            return None
        ranges.append((int(match[1]), int(match[2] or match[1])))
    return tuple(ranges)


def overlap(ranges: Iterable[Range], first: int, last: int) -> tuple[Range, ...]:
    """The parts of the ranges from ``first`` to ``last``.

    >>> overlap([(1, 4), (6, 6), (8, 9)], 3, 8)
    ((3, 4), (6, 6), (8, 8))
    """
    parts = ((max(first, low), min(last, high)) for low, high in ranges)
    return tuple(part for part in parts if part[0] <= part[1])


def without(ports: Range, removed: Iterable[Range]) -> tuple[Range, ...]:
    """The parts of a range that are in none of the removed ranges.

    >>> without((1, 9), [(3, 4), (9, 12)])
    ((1, 2), (5, 8))
    """
    start, parts = ports[0], []
    for first, last in join_ranges(removed):
        parts.append((start, first - 1))
        start = max(start, last + 1)
    return overlap((*parts, (start, ports[1])), *ports)


#: Maximum of rules that are printed, and of their characters: a rule that people write has fewer.
_MOST_RULES = 20
_MOST_CHARACTERS = 400

# This program reads the listings of nft and of iptables-save. It prints the first drop or reject,
# and the rules with a verdict in which a number or a range is a port of the policy. Rules of the
# forward hook, of ARP and of bridges do not concern a job, and a job's packets need more than an
# accept on the way out. Text in quotes is a log's prefix or a comment.
_AWK = rf"""
mark == "" {{ mark = $1; next }}
$1 == mark && $2 == "list" {{
    program = $3
    family = program ~ /^ip6/ ? "ip6 " : "ip "
    message = ""
    next
}}
$1 == mark {{
    if ($3 == 127) print "missing=" program
    else if ($3) print "failed=" program ": " substr(message, 1, 160)
    next
}}
message == "" {{ message = $0 }}
{{ sub(/^[ \t]+/, "") }}
/^table / {{ table = $2 " " $3; other = $2 == "arp" || $2 == "bridge"; next }}
/^\*/ {{ table = family substr($0, 2); other = 0; next }}
other {{ next }}
/^(chain|map) / {{ chain = $2; hook = "" }}
/^:/ {{ chain = substr($1, 2); hook = tolower(chain) }}
/^-A / {{ chain = $2; hook = tolower(chain); sub(/^-A [^ ]+ /, "") }}
/^type [a-z]+ hook / {{ hook = $4 }}
chain ~ /^ufw-/ || chain == "INPUT_ZONES" || table ~ / firewalld$/ {{
    if (!manager) print "manager=" (manager = chain ~ /^ufw-/ ? "ufw" : "firewalld")
}}
hook == "forward" {{ next }}
/^:/ {{ $0 = "policy " tolower($2) ";" }}
{{
    bare = $0
    gsub(/"[^"]*"/, "", bare)
    drops = bare ~ /(^| )(drop|reject)([ ;]|$)/ || bare ~ /(^| )-j (DROP|REJECT)( |$)/
    accepts = hook != "output" && bare ~ / (accept|-j ACCEPT)( |$)/
    if (!drops && !accepts) next
    text = /^(type|policy) / ? "policy drop" : substr($0, 1, {_MOST_CHARACTERS})
    rule = table " " chain ": " text
    if (drops && !dropped++) print "drop=" rule
    if (bare !~ /ports? /) next
    gsub(/[^0-9:-]+/, " ", bare)
    count = split(bare, words, " ")
    for (number = 1; number <= count; number++) {{
        high = split(words[number], ends, /[-:]/) > 1 ? ends[2] : ends[1]
        if (ends[1] + 0 > last || high + 0 < first) continue
        if (rules++ < {_MOST_RULES}) print "rule=" rule
        break
    }}
}}
"""

# Rules are listed only where the kernel can have some: the probe loads no module. nf_tables is a
# loaded module, or built into the kernel: then there is no module file. /proc has the names of
# legacy tables.
_SCRIPT = rf"""
    nr_status CapEff
    nr_caps=$nr_field
    nr_nft=1
    if [ ! -d /sys/module/nf_tables ]; then
        nr_release=
        {{ read -r nr_release </proc/sys/kernel/osrelease; }} 2>/dev/null
        for nr_file in "/lib/modules/$nr_release/kernel/net/netfilter/nf_tables.ko"*; do
            if [ -e "$nr_file" ]; then nr_nft=; fi
        done
    fi
    nr_legacy=''
    for nr_ip in ip ip6; do
        nr_file=/proc/net/${{nr_ip}}_tables_names
        if [ -r "$nr_file" ]; then
            if read -r nr_table <"$nr_file"; then nr_legacy="$nr_legacy $nr_ip"; fi
        elif [ -e "$nr_file" ]; then
            nr_legacy="$nr_legacy $nr_ip"
        fi
    done
    nr_listed() {{
        printf '@%s list %s\n' "$NR" "$1"
        nr_answer "$@"
        printf '\n@%s status %s\n' "$NR" "$?"
    }}
    case $nr_caps in
    ????????????[13579bdf]???) ;;
    *)
        if [ -n "$nr_nft$nr_legacy" ]; then echo root=1; fi
        exit 0
        ;;
    esac
    # The mark is the run's nonce: every user of the node can read a command line.
    {{
        printf '@%s\n' "$NR"
        if [ -n "$nr_nft" ]; then nr_listed nft -s list ruleset; fi
        for nr_ip in $nr_legacy; do
            nr_save=${{nr_ip}}tables-legacy-save
            command -v "$nr_save" >/dev/null || nr_save=${{nr_ip}}tables-save
            nr_listed "$nr_save"
        done
    }} | awk -v first=%FIRST% -v last=%LAST% '{_AWK}'
"""


def script(policy: Policy) -> str:
    """The shell text that lists the rules, where the kernel can have some and shows them."""
    first, last = policy.port_range
    return _SCRIPT.replace("%FIRST%", str(first)).replace("%LAST%", str(last))


#: This section runs in parallel: nft waits for its lock, and a node can have many rules.
SECTION = Section("firewall", script, timeout_s=5, cap_bytes=1 << 16, parallel=True, quick=True)


@dataclass(frozen=True)
class Firewall:
    """What the text of a node's packet filter says of the policy's ports."""

    # "no drop": no rule drops or rejects; "accept" and "drop": ``rules`` accept all ports, or drop
    # ``ports``, without another condition; "not known"; "unknown": ``reason``
    verdict: str
    drop: str = ""  # the first rule or policy that drops or rejects, with its table and chain
    # the rules that name a port, with their tables and chains, as the tool prints them
    rules: tuple[str, ...] = ()
    ports: str = ""  # the ports that the rules of the verdict name, ``29500-29510``
    manager: str = ""  # the program that made the rules: firewalld or ufw; "": another one
    reason: str = ""  # why the rules are not known


@dataclass(frozen=True)
class _PortRule:
    accepts: bool  # otherwise it drops or rejects
    is_plain: bool  # it has no other condition than TCP, the ports and a new connection
    is_to: bool  # the ports are those to which a peer connects
    ports: tuple[Range, ...]


#: The ports of a rule; not in a set with a name, and not of other ports ("!=", ">=").
_NAMED_PORTS = re.compile(
    r" (?:(?:tcp|th) ([sd])port|--([sd]?)ports?) (\{[\d, -]+\}|[\d:,-]+)(?= )"
)
#: What adds no condition to a rule about ports of TCP.
_NEUTRAL = re.compile(
    r" (?:-p tcp|-m (?:tcp|multiport|conntrack|state|comment)|--comment \S*|-j \S+"
    r"|--(?:ct)?state NEW(?:,UNTRACKED)?|--reject-with \S+|(?:meta l4proto|ip protocol) tcp"
    r"|ct state (?:\{ )?new(?:, ?untracked)?(?: \})?|counter|log(?: prefix)?|comment"
    r"|accept|drop|reject(?: with [a-z0-9 -]+)?)(?= )"
)


def _port_rule(rule: str, ports: Range) -> _PortRule | None:
    """``inet filter input: tcp dport 29500 drop``; None: it names no port of the policy."""
    text = re.sub(r'"[^"]*"', "", f" {rule.partition(': ')[2]} ")
    if " -p " in text and " -p tcp " not in text:
        return None
    clauses = [*_NAMED_PORTS.finditer(text)]
    spans = [
        (int(first), int(last or first))
        for clause in clauses
        for first, last in re.findall(r"(\d{1,5})(?:[-:](\d{1,5}))?", clause[3])
    ]
    named = overlap(spans, *ports)
    if not named:
        return None
    bare = _NEUTRAL.sub("", _NAMED_PORTS.sub("", text))
    return _PortRule(
        accepts=bool(re.search(r" (?:accept|-j ACCEPT) ", text)),
        is_plain=len(clauses) == 1 and not bare.strip(),
        is_to="d" in (clauses[0][1], clauses[0][2]),
        ports=named,
    )


def _judge(drop: str, rules: tuple[str, ...], ports: Range) -> tuple[str, str]:
    if not drop:
        return "no drop", ""
    port_rules = [port_rule for rule in rules if (port_rule := _port_rule(rule, ports))]
    accepting = [rule for rule in port_rules if rule.accepts]
    dropping = [rule for rule in port_rules if not rule.accepts]
    plain = [rule for rule in dropping if rule.is_plain]
    if plain and not accepting:
        named = join_ranges(span for rule in plain for span in rule.ports)
        return "drop", ", ".join(range_text(*span) for span in named)
    plain = [rule for rule in accepting if rule.is_plain and rule.is_to]
    if join_ranges(span for rule in plain for span in rule.ports) == [ports] and not dropping:
        return "accept", range_text(*ports)
    return "not known", ""


def parse(output: Output, policy: Policy) -> Firewall:
    """The node's rules; never raises."""
    try:
        values = output.values()
    except ProbeError as error:
        return Firewall("unknown", reason=f"listing the rules {error.reason}")
    if "root" in values:
        reason = "the rules can be seen by root alone (CAP_NET_ADMIN)"
        return Firewall("unknown", reason=reason)
    for failure in output.all("failed"):
        # A kernel without nf_tables has no rules in it.
        if not re.match(r"nft: .*(Protocol|Operation) not supported", failure):
            return Firewall("unknown", reason=f"listing the rules failed: {failure}")
    rules = tuple(output.all("rule"))
    drop, manager = values.get("drop", ""), values.get("manager", "")
    verdict, ports = _judge(drop, rules, policy.port_range)
    if "missing" in values and verdict != "drop":
        reason = f"{values['missing']} is not installed"
        return Firewall("not known", drop, rules, "", manager, reason)
    return Firewall(verdict, drop, rules, ports, manager)

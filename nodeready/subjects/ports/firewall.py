"""What a node's packet filters do with new connections to the policy's ports.

The rules in force are judged, whoever made them: firewalld and ufw are not asked for their own
configuration. First the reader of iptables' rules (nft's stands in `nft`, the evaluation in
`netfilter`), then the look, at last the judgement.
"""

from __future__ import annotations

import re
import shlex
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache

from nodeready.policy import Policy
from nodeready.subjects.base import Output, Section, changed, of_all_nodes
from nodeready.subjects.ports import nft
from nodeready.subjects.ports.netfilter import (
    ALWAYS,
    NEVER,
    UNCERTAIN,
    VARYING,
    VARYING_MODULES,
    Chain,
    Fate,
    Match,
    Packet,
    Range,
    Rule,
    Ruleset,
    counted,
    fates,
    limited,
    number,
    span_of,
)

# --- Rules as ``iptables-save`` prints them, read into the rules of `netfilter`.

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
#: Option with one value -> the selector of `netfilter`; {} stands for ip or ip6.
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
_COMPARED = {
    "--ttl-lt": ("ip ttl", "0-{}", -1),
    "--ttl-gt": ("ip ttl", "{}-255", 1),
    "--hl-lt": ("ip6 hoplimit", "0-{}", -1),
    "--hl-gt": ("ip6 hoplimit", "{}-255", 1),
}
#: Options without a value -> the answer. What is said of forwarded and bridged packets, and of
#: IPVS, is not so for packets of this node.
_ALONE = {
    "-f": NEVER,
    "--physdev-is-bridged": NEVER,
    "--physdev-is-out": NEVER,
    "--physdev-is-in": UNCERTAIN,
    "--ecn-tcp-cwr": NEVER,
    "--ecn-tcp-ece": NEVER,
    "--transparent": Match(("socket transparent",), (("1",),)),
    "--ipvs": NEVER,
    "--vmethod": NEVER,
    "--socket-exists": ALWAYS,
    "--limit-iface-in": ALWAYS,
    "--limit-iface-out": ALWAYS,
    "--nowildcard": ALWAYS,
    "--restore-skmark": ALWAYS,
    "--connlimit-saddr": ALWAYS,
    "--connlimit-daddr": ALWAYS,
    "--strict": ALWAYS,
    "--icase": ALWAYS,
    "--genre": UNCERTAIN,
}
#: Modules without a condition of their own: their options are the conditions.
_PLAIN = {
    "tcp", "udp", "conntrack", "state", "multiport", "addrtype", "pkttype", "mark", "comment",
    "set", "limit", "icmp", "icmp6", "ipv6-icmp", "iprange", "connmark", "owner", "mac", "ttl",
    "hl", "length", "dscp", "tos", "ecn", "tcpmss", "hashlimit", "connlimit", "recent", "string",
    "geoip", "physdev", "policy", "realm", "helper", "connlabel", "devgroup", "ipvs",
    "nfacct",
}  # fmt: skip
#: Modules for headers that the packet does not have, and for what no job does.
_LACKED = {"rt", "frag", "hbh", "dst", "mh", "ah", "esp", "sctp", "dccp", "srh", "ipcomp", "psd",
           "lscan", "l2tp"}  # fmt: skip
#: Options that only say how another option is meant, with so many values.
_HOW = {
    "--hashlimit-mode": 1, "--hashlimit-name": 1, "--hashlimit-srcmask": 1, "--name": 1,
    "--hashlimit-dstmask": 1, "--hashlimit-htable-size": 1, "--hashlimit-htable-max": 1,
    "--hashlimit-htable-expire": 1, "--hashlimit-htable-gcinterval": 1, "--mask": 1,
    "--connlimit-mask": 1, "--rsource": 0, "--rdest": 0, "--rttl": 0, "--reap": 0, "--algo": 1,
    "--from": 1, "--to": 1, "--dir": 1, "--mode": 1, "--return-nomatch": 0, "--set-name": 1,
    "--nfacct-name": 1, "--limit-burst": 1, "--hashlimit-burst": 1, "--seconds": 1,
    "--hitcount": 1, "--loose": 0, "--validmark": 0, "--accept-local": 0, "--dst-pfx": 1,
    "--hashlimit-rate-match": 0, "--hashlimit-rate-interval": 1,
}  # fmt: skip
_ONLY_SYN = "syn/fin,syn,rst,ack"
_SET_TYPES = re.compile(r"(hash:(ip|net)|bitmap:ip|bitmap:port|hash:(ip|net),(port|iface))$")

#: What stands where the rest of a table was left out on the node.
_CUT = "# cut"

#: An ipset: its type and its elements; None where it is not known what it holds.
Sets = Mapping[str, "tuple[str, tuple[str, ...]] | None"]


def parse_ipsets(text: str) -> Sets:
    """The sets that ``ipset save`` printed (ipset(8))."""
    kinds: dict[str, str] = {}
    found: dict[str, list[str] | None] = {}
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["create"] and len(words) > 2:
            kinds[words[1]], found[words[1]] = words[2], []
        elif words[:1] == ["add"] and len(words) > 2:
            held = found.get(words[1])
            if "nomatch" in words[3:]:
                found[words[1]] = None
            elif held is not None:
                held.append(words[2])
    return {
        name: (kinds[name], tuple(held)) if held is not None else None
        for name, held in found.items()
    }


def _in_set(name: str, sides: str, ip: str, sets: Sets, depth: int = 0) -> Match:
    """``--match-set NAME src,dst``."""
    found = sets.get(name)
    if found is None or depth > 2:
        return UNCERTAIN
    kind, held = found
    parts = kind.partition(":")[2].split(",")
    ways = sides.split(",")
    if kind == "list:set":
        inner = [_in_set(one, sides, ip, sets, depth + 1) for one in held]
        if any(not match.selectors for match in inner) or len({m.selectors for m in inner}) > 1:
            return UNCERTAIN if inner else NEVER
        together = tuple(value for match in inner for value in match.values)
        return Match(inner[0].selectors, together) if inner else NEVER
    if not _SET_TYPES.match(kind) or len(ways) < len(parts):
        return UNCERTAIN
    selectors = []
    for part, way in zip(parts, ways):
        source = way == "src"
        selectors.append({
            "port": "tcp sport" if source else "tcp dport",
            "iface": "iifname" if source else "oifname",
        }.get(part, f"{ip} {'saddr' if source else 'daddr'}"))  # fmt: skip
    values = []
    for one in held:
        value = one.split(",")
        ports = value[-1].partition(":") if parts[-1] == "port" else ("", "", "")
        if ports[1] and ports[0] != "tcp":
            continue
        if ports[1]:
            value[-1] = ports[2]
        values.append(tuple(value))
    return Match(tuple(selectors), tuple(values))


def _values(text: str, selector: str) -> tuple[tuple[str, ...], ...]:
    if selector in ("iifname", "oifname", "ether saddr") or selector.endswith(("saddr", "daddr")):
        return ((text,),)
    parts = (part.replace(":", "-") for part in text.split(","))
    return tuple((part,) for part in parts)


def _behind(words: list[str], option: str) -> str:
    """The value of an option; "" without it."""
    at = words.index(option) + 1 if option in words else len(words)
    return words[at] if at < len(words) else ""


def _rate(words: list[str], value: str, burst: str, over: bool) -> Match:
    """A limit of iptables, ``5/sec``; of bytes, ``512kb/s``, is a rate for other traffic."""
    found = nft.rate(value, _behind(words, burst))
    return limited(found, over) if found is not None else VARYING


def _recent(words: list[str]) -> Match:
    """``--rcheck`` and ``--update``: how many packets of late is a rate; whether there was any,
    is so of hosts that some other rule lists for what they did, and not of a fleet's nodes.
    """
    hits, seconds = _behind(words, "--hitcount"), _behind(words, "--seconds")
    if not hits:
        return NEVER
    return limited(int(hits) / int(seconds), True) if seconds not in ("", "0") else VARYING


def _option(word: str, following: str, words: list[str], ip: str) -> tuple[Match | None, int]:
    """The condition of one option, and how many values the option has."""
    if word in _SELECTORS:
        selector = _SELECTORS[word].format(ip)
        return Match((selector,), _values(following, selector)), 1
    if word in _COMPARED:
        selector, shape, more = _COMPARED[word]
        bound = str(int(following) + more) if following.isdigit() else "?"
        return Match((selector,), ((shape.format(bound),),)), 1
    if word in _ALONE:
        return _ALONE[word], 0
    if word in _HOW:
        return None, _HOW[word]
    if word in ("--dscp", "--tos"):
        text, _, mask = following.partition("/")
        value = number(text)
        if value is None:
            return UNCERTAIN, 1
        bits = number(mask) if mask else 0xFF
        # The field is 0 in what jobs send.
        return (NEVER if value & (bits or 0) else ALWAYS), 1
    if word == "--limit":
        return _rate(words, following, "--limit-burst", False), 1
    if word in ("--hashlimit", "--hashlimit-upto", "--hashlimit-above"):
        return _rate(words, following, "--hashlimit-burst", word.endswith("above")), 1
    if word in ("--connlimit-above", "--connlimit-upto"):
        over = word.endswith("above")
        return (counted(int(following), over) if following.isdigit() else VARYING), 1
    if word in ("--rcheck", "--update"):
        return _recent(words), 0
    if word in ("--set", "--remove"):
        return (ALWAYS if word == "--set" else NEVER), 0
    if word in ("--string", "--hex-string"):
        # Of a handshake no packet has text; what jobs send is not looked for by anybody.
        return NEVER, 1
    if word == "--pol":
        return (ALWAYS if following == "none" else NEVER), 1
    if word in ("--physdev-in", "--physdev-out"):
        return UNCERTAIN, 1
    return UNCERTAIN, 0


def _matches(words: list[str], ip: str, sets: Sets) -> Iterator[Match]:
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
        found: Match | None = None
        if word == "-m":
            module = following
            index += 1
            if following == "rpfilter":
                inverted = "--invert" in words[index:]
                found = Match(("reverse path",), (("missing" if inverted else "exists",),))
                words = [w for w in words if w not in ("--invert", "--loose", "--validmark")]
            elif following in _LACKED:
                found = NEVER
            elif following not in _PLAIN and not (
                following == "socket" and "--transparent" in words
            ):
                found = VARYING if following in VARYING_MODULES else UNCERTAIN
        elif word == "--tcp-flags":
            found = Match(("tcp flags",), ((f"{third}/{following}",),))
            index += 2
        elif word == "--syn":
            found = Match(("tcp flags",), ((_ONLY_SYN,),))
        elif word == "--match-set":
            found = _in_set(following, third, ip, sets)
            index += 2
        elif word == "--mark":
            found = Match(("ct mark" if module == "connmark" else "mark",), ((following,),))
            index += 1
        else:
            if word == "-p" and not negated and following not in ("tcp", "6", "all"):
                # Another protocol's ports must not be taken for ours.
                yield NEVER
            found, values = _option(word, following, words, ip)
            index += values
        if found is not None:
            yield replace(found, negated=not found.negated) if negated else found
        negated = False


def _bits(text: str) -> tuple[int, int]:
    """``0x1/0xff`` as value and mask."""
    value, _, mask = text.partition("/")
    return number(value) or 0, (number(mask) or 0) if mask else _ALL


_ALL = 0xFFFFFFFF


def _changed(target: str, words: list[str]) -> tuple[str, str] | None:
    """Verdict and target of a rule that changes a mark or the tracking; None for another one."""
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
        ("--xor-mark", lambda v, m: _ALL, lambda v, m: v),
    ):
        if option in words:
            value, mask = _bits(_behind(words, option))
            return verdict, f"{keep(value, mask) & _ALL:x}/{flip(value, mask) & _ALL:x}"
    for option, word in (("--restore-mark", "restore"), ("--save-mark", "save")):
        if option in words:
            masks = {_behind(words, one) or "0xffffffff" for one in ("--nfmask", "--ctmask")}
            both = _behind(words, "--mask")
            bits = number(both or masks.pop()) if both or len(masks) == 1 else None
            other = "mark" if word == "restore" else "ct_mark"
            return (word, f"{bits:x}") if bits is not None else (other, "?")
    return verdict, "?"


def _diverted(target: str, words: list[str]) -> str:
    """Where NAT leads to, as `netfilter.Rule` has it."""
    if target == "REDIRECT":
        port = _behind(words, "--to-ports")
        return f":{port}" if port else ""
    to = _behind(words, "--to-destination")
    bare = re.fullmatch(r"\[([0-9a-f:]+)\](:[\d-]+)?", to)
    if bare:
        return "?" if bare[2] else bare[1]
    return to or "?"


def _rule(words: list[str], ip: str, sets: Sets, text: str) -> Rule | None:
    """The rule of the words behind ``-A CHAIN``; None for one that decides nothing."""
    while "--comment" in words:
        at = words.index("--comment")
        words = words[:at] + words[at + 2 :]
    for option in ("-j", "-g"):
        if option in words:
            at = words.index(option)
            target = words[at + 1] if at + 1 < len(words) else ""
            break
    else:
        return None
    matches = tuple(_matches(words[:at], ip, sets))
    if option == "-g":
        return Rule(matches, "goto", target, text)
    change = _changed(target, words[at:])
    if change:
        return Rule(matches, *change, text)
    verdict = _TARGETS.get(target, "jump")
    if verdict == "divert":
        return Rule(matches, verdict, _diverted(target, words[at:]), text)
    if verdict == "mark":
        return Rule(matches, verdict, "?", text)
    return Rule(matches, verdict, target if verdict == "jump" else "", text)


def parse_iptables_rules(text: str, family: int, sets: Sets | None = None) -> Ruleset:
    """The rules of one family (4, 6). Targets that are no chain (LOG) decide nothing.

    sets: the ipsets; what is not there may hold anything

    A table that was cut off on the node, for its size, is passed over. Raises ValueError when
    there is text, and no whole table in it.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    ip = "ip" if family == 4 else "ip6"
    whole = "COMMIT" in lines or _CUT in lines
    if not whole and any(not line.startswith("#") for line in lines):
        raise ValueError("no whole table in what iptables-save printed")
    found: dict[tuple[str, str], Chain] = {}
    rest: list[str] = []
    for line in lines:
        if line.startswith("*"):
            rest = [line]
        elif line == "COMMIT":
            found.update(_table(rest, ip, sets or {}))
            rest = []
        elif not line.startswith("#"):
            rest.append(line)
    if rest and _CUT not in lines and rest[0].startswith("*"):
        raise ValueError("no whole table in what iptables-save printed")
    return Ruleset(found)


def _table(lines: list[str], ip: str, sets: Sets) -> Iterator[tuple[tuple[str, str], Chain]]:
    """The chains of one table."""
    if not lines or not lines[0].startswith("*"):
        return
    name = lines[0][1:].strip()
    table = f"{ip} {name}"
    policies: dict[str, str] = {}
    rules: dict[str, list[Rule]] = {}
    for line in lines[1:]:
        if line.startswith(":"):
            chain, _, rest = line[1:].partition(" ")
            rules[chain] = []
            policies[chain] = rest.partition(" ")[0].lower()
        elif line.startswith("-A "):
            try:
                words = shlex.split(line)[1:]
            except ValueError:
                # A quote without its end: the conditions are unknown, the target is known.
                words = line.split()[1:]
                words[1:1] = ["--unreadable"]
            if not words:
                continue
            rule = _rule(words[1:], ip, sets, " ".join(words[1:])[:160])
            if rule is not None:
                rules.setdefault(words[0], []).append(rule)
    for chain, found in rules.items():
        hook = _HOOKS.get(chain, "") if chain in policies else ""
        policy = "drop" if hook and policies[chain] == "drop" else "accept"
        nat = name == "nat"
        priority = 100 if nat and hook == "postrouting" else _PRIORITIES.get(name, 0)
        key = (table, chain)
        yield key, Chain(table, chain, tuple(found), hook, policy, priority, nat)


# --- The look: the programs that list rules, and what they print.
#
# Rules are listed only where the kernel can have some: nothing here loads a module.
#
# A node that has no nft is mostly one that has no rules. There the kernel itself is asked for its
# tables, by Python over netlink (<linux/netfilter/nf_tables.h>, NFT_MSG_GETTABLE), as
# ``nft list tables`` asks. Where Python is not there either, each of these is a sign of rules that
# nobody can read:
#
# - the module nf_tables is loaded: the kernel loads it when a program first asks for it
#   (net/netfilter/nfnetlink.c, nfnetlink_rcv_msg), and only those that make rules do so. An
#   nf_tables that is built into the kernel says nothing;
# - connections are tracked (net.netfilter.nf_conntrack_count, of the network namespace): since
#   Linux 4.10 the kernel tracks them only where a rule needs it
#   (net/netfilter/nf_conntrack_proto.c, nf_ct_netns_get);
# - a service that loads rules is enabled, or ufw is (ENABLED in /etc/ufw/ufw.conf, ufw(8)).
#
# Legacy tables need no such guess: /proc/net/ip_tables_names has those of the network namespace.

# This program prints the tables as ``nft list tables`` does. It ends with 1 where the kernel does
# not answer: an error, or an end (NLMSG_DONE) with an error. Python 3.6, RHEL 8's own, is enough.
_ASK = r"""
import socket, struct
kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)  # NETLINK_NETFILTER
kernel.settimeout(2)
kernel.send(struct.pack("=IHHIIBBH", 20, 0xa01, 0x301, 1, 0, 0, 0, 0))
families = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
more = True
while more:
    data = kernel.recv(1 << 20)
    while len(data) >= 20:
        size, kind = struct.unpack_from("=IH", data)
        if kind == 2 or kind == 3 and struct.unpack_from("=i", data, 16)[0]:
            raise SystemExit(1)
        more = kind != 3
        at = 20
        while kind == 0xa00 and at + 4 <= size:
            length, key = struct.unpack_from("=HH", data, at)
            if key == 1:
                name = data[at + 4 : at + length - 1].decode("ascii", "replace")
                print("table", families.get(data[16], data[16]), name)
            at += max(4, length + 3 & ~3)
        data = data[max(16, size + 3 & ~3) :]
"""

# nf_tables is a loaded module, or built into the kernel: then there is no module file. /proc has
# the names of legacy tables. Tables of NAT are left out where they are large, as on a Kubernetes
# node: such NAT is not judged. iptables-nft-save prints the whole of iptables-nft's tables, of
# which nft cannot show everything; ipset prints the sets that they name. A table's name becomes
# part of a command: a table whose name is
# not made of plain characters is not listed.
_SCRIPT = r"""
    nr_caps='' nr_odd=''
    while read -r nr_key nr_bits; do
        if [ "$nr_key" = CapEff: ]; then nr_caps=$nr_bits; break; fi
    done </proc/self/status
    nr_nft=1
    if [ ! -d /sys/module/nf_tables ]; then
        nr_release=
        { read -r nr_release </proc/sys/kernel/osrelease; } 2>/dev/null
        for nr_file in "/lib/modules/$nr_release/kernel/net/netfilter/nf_tables.ko"*; do
            if [ -e "$nr_file" ]; then nr_nft=; fi
        done
    fi
    nr_legacy='' nr_spare=''
    for nr_ip in ip ip6; do
        nr_more='' nr_nat=''
        nr_file=/proc/net/${nr_ip}_tables_names
        if [ -r "$nr_file" ]; then
            while read -r nr_table; do
                case $nr_table in
                filter|mangle|raw|security) nr_more="$nr_more $nr_table" ;;
                nat) nr_nat=1 ;;
                esac
            done <"$nr_file"
        elif [ -e "$nr_file" ]; then
            nr_more=?
        fi
        if [ -n "$nr_more" ]; then
            nr_legacy="$nr_legacy $nr_ip"
        elif [ -n "$nr_nat" ]; then
            nr_spare="$nr_spare $nr_ip"
        fi
    done
    nr_tool() {
        printf '\n@%s tool %s\n' "$NR" "$1"
        shift
        nr_told "$@"
        printf '\n@%s status %s\n' "$NR" "$?"
    }
    # Lines of a table of NAT beyond 64 KiB are left out.
    nr_saved() {
        printf '\n@%s tool %s\n' "$NR" "$1"
        shift
        { nr_told "$@"; printf '\n@%s status %s\n' "$NR" "$?"; } | awk -v most=65536 '
            /^(\*|table )/ { nat = /^\*nat/ || /^table ip6? nat / ; size = 0 }
            /^@/ { nat = 0 }
            nat && (size += length($0) + 1) > most { if (!cut++) print "# cut"; next }
            { print }'
    }
    nr_state() { printf '\n@%s tool %s\n%s\n@%s status %s\n' "$NR" "$1" "${3:-}" "$NR" "$2"; }
    nr_asked() {
        for nr_file in /usr/bin/python3 /usr/libexec/platform-python; do
            if [ -x "$nr_file" ]; then
                "$nr_file" -I -S -c %ASK% 2>/dev/null
                return
            fi
        done
        return 1
    }
    nr_sign() {
        if [ -d /sys/module/nf_tables ]; then
            echo 'the kernel module nf_tables was loaded'
            return
        fi
        nr_count=0
        { read -r nr_count </proc/sys/net/netfilter/nf_conntrack_count; } 2>/dev/null
        if [ "$nr_count" != 0 ]; then
            echo 'the kernel tracks connections'
            return
        fi
        for nr_word in nftables firewalld iptables ip6tables netfilter-persistent \
            shorewall ferm; do
            for nr_file in /etc/systemd/system/*.wants/$nr_word.service \
                /etc/runlevels/*/$nr_word; do
                if [ -L "$nr_file" ]; then
                    echo "$nr_word is enabled"
                    return
                fi
            done
        done
        while read -r nr_word; do
            case $nr_word in
            ENABLED=[Yy]*) echo 'ufw is enabled'; return ;;
            esac
        done 2>/dev/null </etc/ufw/ufw.conf
    }
    case $nr_caps in
    ????????????[13579bdf]???) ;;
    *)
        if [ -n "$nr_nft" ]; then nr_state nft root; fi
        if [ -n "$nr_legacy" ]; then nr_state iptables root; fi
        exit 0
        ;;
    esac
    if [ -n "$nr_nft" ] && command -v nft >/dev/null; then
        nr_rc=0
        nr_tables=$(nr_told nft list tables) || nr_rc=$?
        if [ "${#nr_tables}" -gt 65536 ]; then nr_rc=1 nr_tables='too many tables'; fi
        nr_compat='' nr_nats=''
        set --
        while read -r nr_word nr_ip nr_table; do
            case "$nr_word $nr_ip $nr_table" in
            'table arp '*|'table bridge '*) continue ;;
            *[!A-Za-z0-9_.\ -]*) nr_odd=1; continue ;;
            'table ip nat'|'table ip6 nat') nr_nats="$nr_nats $nr_ip"; continue ;;
            'table ip filter'|'table ip mangle'|'table ip raw'|'table ip security')
                case $nr_compat in *' ip '*) ;; *) nr_compat="$nr_compat ip " ;; esac ;;
            'table ip6 filter'|'table ip6 mangle'|'table ip6 raw'|'table ip6 security')
                case $nr_compat in *' ip6 '*) ;; *) nr_compat="$nr_compat ip6 " ;; esac ;;
            'table '*) ;;
            *) continue ;;
            esac
            set -- "$@" "$nr_ip $nr_table"
        done <<NR_TABLES
$nr_tables
NR_TABLES
        if [ "$nr_rc" != 0 ]; then
            printf '\n@%s tool nft\n%s\n@%s status %s\n' "$NR" "$nr_tables" "$NR" "$nr_rc"
            nr_compat='ip ip6'
        elif [ -n "$nr_odd" ]; then
            nr_state nft odd
        elif [ $# = 0 ]; then
            nr_state nft 0
        elif [ $# -gt 12 ]; then
            nr_saved nft nft -s list ruleset
        else
            for nr_table in "$@"; do
                nr_tool nft nft -s "list table $nr_table"
            done
        fi
        for nr_ip in $nr_nats; do
            nr_saved nft-nat nft -s "list table $nr_ip nat"
        done
    elif [ -n "$nr_nft" ]; then
        nr_compat='ip ip6'
        nr_found=''
        if nr_tables=$(nr_asked); then
            while read -r nr_word nr_ip nr_table; do
                case "$nr_word $nr_ip $nr_table" in
                'table ip nat'|'table ip6 nat'|'table arp '*|'table bridge '*) ;;
                'table '*) nr_found="$nr_found, $nr_ip $nr_table" ;;
                esac
            done <<NR_TABLES
$nr_tables
NR_TABLES
            if [ -n "$nr_found" ]; then
                nr_state nft missing "the kernel has the tables ${nr_found#, }"
            else
                nr_state nft none
                nr_compat=''
            fi
        else
            nr_found=$(nr_sign)
            if [ -n "$nr_found" ]; then
                nr_state nft missing "$nr_found"
            else
                nr_state nft unseen
            fi
        fi
    else
        nr_compat=
    fi
    nr_saves=''
    for nr_ip in $nr_compat; do
        if command -v "${nr_ip}tables-nft-save" >/dev/null; then
            nr_saved "${nr_ip}tables-nft" "${nr_ip}tables-nft-save"
            nr_saves=1
        fi
    done
    for nr_ip in $nr_legacy $nr_spare; do
        nr_save=${nr_ip}tables-legacy-save
        command -v "$nr_save" >/dev/null || nr_save=${nr_ip}tables-save
        if command -v "$nr_save" >/dev/null; then
            nr_saved "${nr_ip}tables" "$nr_save"
            nr_saves=1
        else
            case " $nr_legacy " in
            *" $nr_ip "*) nr_state "${nr_ip}tables" missing "the kernel has legacy tables" ;;
            esac
        fi
    done
    if [ -n "$nr_saves" ] && [ -d /sys/module/ip_set ] && command -v ipset >/dev/null; then
        nr_tool ipset ipset save
    fi
    :
"""

# A script loses its indentation on the way to a node: the Python program travels as a literal.
_LOOK = _SCRIPT.replace("%ASK%", shlex.quote(f"exec({_ASK!r})"))


def script(policy: Policy) -> str:
    """The shell text that lists the rules, where the kernel can have some and shows them."""
    return _LOOK


#: A section that runs beside the others: nft waits for its lock, and a node can have many rules.
SECTION = Section("firewall", script, timeout_s=5, cap_bytes=1 << 20, beside=True, quick=True)


@dataclass(frozen=True)
class Tool:
    """A program that lists rules.

    state:  ok, missing, needs root, failed or timed out; "no rules": it is missing and the kernel
            has no rules; "no sign of rules": it is missing, and nothing tells of rules
    detail: the message of a program that failed; why a missing program is needed
    """

    name: str
    state: str
    detail: str = ""


#: The dates and the counters of chains, by which equal rulesets differ.
_DATES = re.compile(r"^# (Generated|Completed) .*$| \[\d+:\d+\]$", re.M)
_STATES = {
    "0": "ok",
    "root": "needs root",
    "missing": "missing",
    "none": "no rules",
    "unseen": "no sign of rules",
}
#: The states in which no rule of the program is overlooked.
ENOUGH = ("ok", "no rules", "no sign of rules")


def _failed(said: str) -> str:
    """The state of a tool that failed, by its message."""
    if re.search("(Protocol|Operation) not supported", said):
        # Such a kernel has no nf_tables, and so no rules in it.
        return "ok"
    return "needs root" if "Operation not permitted" in said else "failed"


#: What is good to know, and not missed.
_BESIDE = ("nft-nat", "ipset")


def split(output: Output) -> tuple[tuple[Tool, ...], list[tuple[str, str]]]:
    """The tools, and (name, text) of each tool that ended well."""
    mark = re.escape(f"@{output.nonce}")
    tools, texts = [], []
    for piece in re.split(rf"^{mark} tool ", output.text, flags=re.M)[1:]:
        name, _, rest = piece.partition("\n")
        body, ended, status = rest.rpartition(f"\n@{output.nonce} status ")
        if not ended and rest.startswith(f"@{output.nonce} status "):
            body, status = "", rest[len(f"@{output.nonce} status ") :]
            ended = "yes"
        word = status.strip().partition("\n")[0] if ended else ""
        said = next((line for line in body.splitlines() if line.strip()), "")[:160]
        if not ended:
            tools.append(Tool(name[:40], "timed out"))
        elif name in _BESIDE:
            pass
        elif word == "odd":
            tools.append(Tool(name[:40], "failed", "a table with an odd name"))
        else:
            state = _STATES.get(word) or _failed(said)
            tools.append(Tool(name[:40], state, "" if state == "ok" else said))
        if ended and word == "0":
            texts.append((name, _DATES.sub("", body)))
    return tuple(dict.fromkeys(tools)), texts


# --- The judgement: what all rules together do.


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
    tools: tuple[Tool, ...] = ()
    networks: tuple[str, ...] = ()
    what: str = "{}"
    how: str = "dropped by"
    beside: str = ""
    peers: str = ""
    varies: bool = False
    tried: bool = False
    filter: Filter | None = field(default=None, compare=False, repr=False)


_NEEDS_ROOT = "the rules can be seen by root alone (CAP_NET_ADMIN)"


def _unread(tool: Tool) -> str:
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
    found = Ruleset()
    sets = parse_ipsets("".join(text for name, text in texts if name == "ipset"))
    for name, text in texts:
        if name == "ipset":
            continue
        if name in ("nft", "nft-nat"):
            found = found.merged(nft.parse(_CUT_NAT.sub("", text)))
            continue
        # What nft alone can show, nft shows.
        saved = _INCOMPATIBLE.sub("", text) if name.endswith("-nft") else text
        rules = parse_iptables_rules(saved, 6 if name.startswith("ip6") else 4, sets)
        if not name.endswith("-nft"):
            # Legacy tables stand beside those of nft that have the same names.
            rules = _renamed(rules)
        found = found.merged(rules)
    return found


#: A table of NAT whose rest was left out on the node.
_CUT_NAT = re.compile(rf"^table ip6? nat {{\n(?:(?!^table |^{_CUT}$).*\n)*{_CUT}$", re.M)
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
            worst = next((piece for piece in bad if piece.varies), bad[0])
            return verdict, ", ".join(shown(*ports) for ports in joined[:4]), worst
    return "open", "", None


def _held(ports: str) -> set[int]:
    """The ports of ``29500, 29502-29510``."""
    found: set[int] = set()
    for part in filter(None, ports.split(", ")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


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
    *,
    peers: tuple[str, ...] = (),
    ephemeral: Range | None = None,
) -> Firewall:
    """What the node's rules do; never raises.

    addresses: the node's own; with an IPv6 address among them, IPv6 is judged as well
    networks:  (interface, ``10.1.0.0/16``) of the networks to which the node is connected
    peers:     addresses of hosts that the node knows by name
    ephemeral: the ports from which the node's programs connect; its peers' mostly are the same
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
    seen = Filter(rules, policy.port_range, addresses, networks, ephemeral)
    return replace(seen.judged(peers), tools=tools, filter=seen)


def among(seen: Firewall, nodes: tuple[str, ...]) -> Firewall:
    """The same, with the addresses of the fleet's nodes known, and no others."""
    if seen.filter is None:
        return seen
    return replace(seen.filter.judged(nodes, sure=True), tools=seen.tools, filter=seen.filter)


#: So many other nodes are tried of each network: the rules treat few of them in ways of their own.
_MOST_PEERS = 64


@dataclass(frozen=True)
class _Seen:
    """What happens to connections with the other nodes of one network.

    verdict: as `Firewall` has it, and the ports of that
    few:     how many of the known peers it is; "" for all
    """

    verdict: str
    ports: str = ""
    fate: Fate | None = None
    few: str = ""


def _spans_of(peers: tuple[str, ...]) -> list[tuple[int, int, int]]:
    return [span for peer in peers if (span := span_of(peer))]


_spans = of_all_nodes(_spans_of)


@dataclass(frozen=True)
class Filter:
    """A node's rules, the policy's ports, the node's addresses and networks.

    named:     (interface, ``10.1.0.0/16``)
    ephemeral: the ports from which the node's programs connect; None: Linux's default
    """

    rules: Ruleset
    ports: Range
    addresses: tuple[str, ...]
    named: tuple[tuple[str, str], ...]
    ephemeral: Range | None

    @cached_property
    def networks(self) -> list[tuple[str, str, tuple[int, int, int]]]:
        """Interface, network, and the network's version of IP, first and last address."""
        return [(name, text, span) for name, text in self.named if (span := span_of(text))]

    @cached_property
    def own(self) -> list[tuple[int, int, int] | None]:
        return [span_of(address) for address in self.addresses]

    def judged(self, peers: tuple[str, ...], *, sure: bool = False) -> Firewall:
        """What happens to the connections with these hosts, or with any of the node's networks.

        sure: these are the fleet's nodes, and no others
        """
        manager = _manager(self.rules)
        spans = _spans(peers) if sure else _spans_of(peers)

        @cache
        def known() -> list[tuple[int, int, int]]:
            # Mostly nobody asks: the rules let everybody in.
            return [span for span in spans if span not in self.own]

        families = [one for one in (4, 6) if any(span and span[0] == one for span in self.own)]
        found = self._family(families[0] if families else 4, known, sure)
        if found.verdict == "open" and families == [4, 6]:
            by_name = {family for family, first, _ in known() if self._near(family, first)}
            over_ipv6 = self._family(6, known, sure)
            if over_ipv6.verdict == "dropped" and by_name != {4}:
                found = replace(over_ipv6, verdict="cannot tell",
                                ports=f"{over_ipv6.ports} over IPv6", networks=())  # fmt: skip
        return replace(found, manager=manager)

    def _packet(self, family: int) -> Packet:
        packet = Packet(family, *self.ports, self.addresses)
        return changed(packet, ephemeral=self.ephemeral) if self.ephemeral else packet

    def _near(self, family: int, address: int) -> int | None:
        """The network, by its number, that an address is in: the smallest."""
        inside = [
            (last - first, index)
            for index, (_, _, (version, first, last)) in enumerate(self.networks)
            if version == family and first <= address <= last
        ]
        return min(inside)[1] if inside else None

    def _family(
        self, family: int, known: Callable[[], list[tuple[int, int, int]]], sure: bool
    ) -> Firewall:
        """The verdict for one version of IP."""
        anybody = self._packet(family)
        generic = self._one(anybody)
        if generic.verdict == "open":
            return self._firewall(generic)
        peers = [first for version, first, _ in known() if version == family]
        mine = [index for index, one in enumerate(self.networks) if one[2][0] == family]
        near: dict[int, list[int]] = {}
        for peer in peers:
            index = self._near(family, peer)
            if index is not None:
                near.setdefault(index, []).append(peer)
        seen: dict[str, _Seen] = {}
        for index in near or mine:
            name, text, _ = self.networks[index]
            seen[f"{text} on {name}"] = self._network(index, anybody, near.get(index, []), sure)
        if not seen and peers:
            name = self.networks[mine[0]][0] if len(mine) == 1 else ""
            packet = changed(anybody, interface=name, near=False)
            seen["other networks"] = self._hosts(packet, self._apart(family, peers), sure)
        if not seen:
            return self._firewall(generic)
        let_in = tuple(where for where, one in seen.items() if one.verdict == "open")
        if len(let_in) == len(seen):
            # Only of another version of IP, or of nobody's traffic, is anything dropped.
            return Firewall("open", shown(*self.ports), networks=let_in)
        worst = next(
            one for verdict in ("cannot tell", "dropped") for one in seen.values()
            if one.verdict == verdict
        )  # fmt: skip
        if all(one.verdict == "dropped" for one in seen.values()):
            # The ports that are shut everywhere, where that is so of some.
            worst = min(seen.values(), key=lambda one: len(_held(one.ports)))
            beside = generic.fate.cause if generic.fate else None
            found = self._firewall(worst)
            text = beside.text if beside and beside.text != found.rule else ""
            return replace(found, beside=text)
        doubted = worst if worst.verdict == "cannot tell" else generic
        return replace(self._firewall(doubted), verdict="cannot tell", networks=let_in)

    def _network(self, index: int, anybody: Packet, peers: list[int], sure: bool) -> _Seen:
        name, _, (family, first, last) = self.networks[index]
        own = [span[1] for span in self.own if span and span[0] == family]
        inside = [address for address in own if first <= address <= last]
        others = tuple(one for one, _, _ in self.networks if one != name)
        packet = changed(anybody, interface=name, own=inside[0] if inside else None, others=others)
        if peers:
            return self._hosts(packet, self._apart(family, peers), sure)
        hosts = self._any_hosts(family, first, last, own)
        return self._hosts(packet, [(1, host) for host in hosts], False)

    def _any_hosts(self, family: int, first: int, last: int, own: list[int]) -> list[int]:
        """An address of the network for each way in which the rules treat its addresses."""
        if last - first > 1:
            # Without the network's own address, and the broadcast.
            first, last = first + 1, last - (family == 4)
        starts = [first, *(s for s in self.rules.addresses[family == 6] if first < s <= last)]
        found = []
        for start, end in zip(starts, [*starts[1:], last + 1]):
            host = next((a for a in range(start, min(end, start + 8)) if a not in own), None)
            if host is not None:
                found.append(host)
        return found[:_MOST_PEERS]

    def _apart(self, family: int, peers: list[int]) -> list[tuple[int, int]]:
        """How many of the hosts the rules treat alike, and one of them."""
        starts = self.rules.addresses[family == 6]
        alike: dict[int, list[int]] = {}
        for peer in peers:
            alike.setdefault(bisect_right(starts, peer), []).append(peer)
        return [(len(some), some[0]) for some in alike.values()][:_MOST_PEERS]

    def _hosts(self, packet: Packet, hosts: list[tuple[int, int]], sure: bool) -> _Seen:
        """The verdict of some hosts together."""
        found = [(count, self._one(replace(packet, peer=host))) for count, host in hosts]
        verdicts = {one.verdict for _, one in found}
        if not found:
            return self._one(packet)
        if len(verdicts) == 1:
            # The ports that are shut for each of them, where that is so of some.
            return min((one for _, one in found), key=lambda one: len(_held(one.ports)))
        worst = next(
            one for verdict in ("dropped", "cannot tell") for _, one in found
            if one.verdict == verdict
        )  # fmt: skip
        if worst.verdict == "dropped" and not sure:
            # Who of the network is a node of the fleet, nobody knows here.
            doubt = self._one(packet)
            return doubt if doubt.verdict != "open" else replace(worst, verdict="cannot tell")
        some = sum(count for count, one in found if one.verdict == worst.verdict)
        return replace(worst, few=f"{some} of {sum(count for count, _ in found)}")

    def _one(self, packet: Packet) -> _Seen:
        return _Seen(*_worst(tuple(fates(self.rules, packet))))

    def _firewall(self, seen: _Seen) -> Firewall:
        cause = seen.fate.cause if seen.fate else None
        if seen.fate is None or cause is None:
            return Firewall(seen.verdict, shown(*self.ports))
        return Firewall(
            seen.verdict,
            seen.ports,
            cause.chain,
            cause.text,
            what=seen.fate.kind.words,
            how=cause.how,
            peers=seen.few,
            varies=cause.varies,
        )

"""What a node's packet filters do with new connections to the policy's ports.

The rules in force are judged, whoever made them: firewalld and ufw are not asked for their own
configuration. First the reader of iptables' rules (nft's stands in `nft`, the evaluation in
`netfilter`), then the look, at last the judgement.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from nodeready.policy import Policy
from nodeready.subjects.base import Output, Section
from nodeready.subjects.ports import nft
from nodeready.subjects.ports.netfilter import (
    UNCERTAIN,
    Chain,
    Fate,
    Match,
    Packet,
    Rule,
    Ruleset,
    fates,
)

# --- Rules as ``iptables-save`` prints them, read into the rules of `netfilter`.

#: The hook of each built-in chain that a packet for this node passes (iptables(8)).
_HOOKS = {"PREROUTING": "prerouting", "INPUT": "input"}
_TARGETS = {
    "ACCEPT": "accept",
    "DROP": "drop",
    "REJECT": "drop",
    "TARPIT": "drop",
    "RETURN": "return",
    "QUEUE": "elsewhere",
    "NFQUEUE": "elsewhere",
    "TPROXY": "elsewhere",
}
#: Option with one value -> the selector of `netfilter`.
_SELECTORS = {
    "-p": "l4proto",
    "-i": "iifname",
    "--dport": "tcp dport",
    "--dports": "tcp dport",
    "--sport": "tcp sport",
    "--sports": "tcp sport",
    "--ctstate": "ct state",
    "--state": "ct state",
    "--dst-type": "fib daddr type",
    "--pkt-type": "pkttype",
    "--mark": "mark",
    "--ctdir": "ct direction",
}
#: Modules without a condition of their own: their options are the conditions.
_PLAIN = {
    "tcp", "udp", "conntrack", "state", "multiport", "addrtype", "pkttype", "mark", "comment",
    "set", "limit", "icmp", "icmp6", "iprange", "connmark", "owner",
}  # fmt: skip
#: Modules for headers that the packet does not have.
_LACKED = {"rt", "frag", "hbh", "dst", "mh", "ah", "esp", "sctp", "dccp"}
_NEVER = Match(("udp ",))
_ONLY_SYN = "syn/fin,syn,rst,ack"


def _values(text: str, selector: str) -> tuple[tuple[str, ...], ...]:
    if selector == "iifname":
        return ((text,),)
    parts = (part.replace(":", "-") for part in text.split(","))
    return tuple((part,) for part in parts)


def _matches(words: list[str], ip: str) -> Iterator[Match]:
    """The conditions among a rule's words, which come without the rule's target."""
    index, negated = 0, False
    while index < len(words):
        word = words[index]
        following = words[index + 1] if index + 1 < len(words) else ""
        index += 2
        if word == "!":
            negated, index = True, index - 1
            continue
        if word in _SELECTORS:
            selector = _SELECTORS[word]
            if word == "-p" and not negated and following not in ("tcp", "6", "all"):
                # Another protocol's ports must not be taken for ours.
                yield _NEVER
            yield Match((selector,), _values(following, selector), negated)
        elif word in ("-s", "-d"):
            yield Match(
                (f"{ip} {'saddr' if word == '-s' else 'daddr'}",), ((following,),), negated
            )
        elif word == "--tcp-flags":
            flags = words[index] if index < len(words) else ""
            yield Match(("tcp flags",), ((f"{flags}/{following}",),), negated)
            index += 1
        elif word == "--syn":
            yield Match(("tcp flags",), ((_ONLY_SYN,),), negated)
            index -= 1
        elif word == "-m" and following == "rpfilter":
            inverted = "--invert" in words[index:]
            yield Match(("reverse path",), (("missing" if inverted else "exists",),))
            words = [w for w in words if w not in ("--invert", "--loose", "--validmark")]
        elif word == "-m":
            if following in _LACKED:
                yield _NEVER
            elif following not in _PLAIN:
                yield UNCERTAIN
        else:
            yield UNCERTAIN
            index -= 1
        negated = False


def _rule(words: list[str], ip: str, text: str) -> Rule | None:
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
    matches = tuple(_matches(words[:at], ip))
    if option == "-g":
        return Rule(matches, "goto", target, text)
    verdict = _TARGETS.get(target, "jump")
    return Rule(matches, verdict, target if verdict == "jump" else "", text)


def parse_iptables_rules(text: str, family: int) -> Ruleset:
    """The rules of one family (4, 6). Targets that are no chain (LOG, MARK) decide nothing.

    Raises ValueError when there is text, and no whole table in it.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if lines and "COMMIT" not in lines:
        raise ValueError("no whole table in what iptables-save printed")
    ip = "ip" if family == 4 else "ip6"
    table = ""
    bases: dict[tuple[str, str], str] = {}
    rules: dict[tuple[str, str], list[Rule]] = {}
    marks = False
    for line in lines:
        if line.startswith("*"):
            table = f"{ip} {line[1:].strip()}"
        elif line.startswith(":") and table:
            name, _, rest = line[1:].partition(" ")
            rules[table, name] = []
            if name in _HOOKS and table != f"{ip} nat":
                bases[table, name] = rest.partition(" ")[0].lower()
        elif line.startswith("-A ") and table:
            try:
                words = shlex.split(line)[1:]
            except ValueError:
                # A quote without its end: the conditions are unknown, the target is known.
                words = line.split()[1:]
                words[1:1] = ["--unreadable"]
            rule = _rule(words[1:], ip, " ".join(words[1:])[:160]) if words else None
            marks = marks or "MARK" in words or "CONNMARK" in words
            if rule is not None:
                rules.setdefault((table, words[0]), []).append(rule)
    chains = {}
    for key, found in rules.items():
        hook, policy = ("", "")
        if key in bases:
            hook, policy = _HOOKS[key[1]], bases[key]
        chains[key] = Chain(*key, tuple(found), hook, policy if policy == "drop" else "accept")
    return Ruleset(chains, marks)


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
# the names of legacy tables. Tables of NAT are left out: NAT is not judged, and on a Kubernetes
# node they are the large ones. iptables-nft-save prints the whole of iptables-nft's `filter`, of
# which nft cannot show everything. A table's name becomes part of a command: a table whose name is
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
    nr_legacy=
    for nr_ip in ip ip6; do
        nr_file=/proc/net/${nr_ip}_tables_names
        if [ -r "$nr_file" ]; then
            while read -r nr_table; do
                case $nr_table in
                filter|mangle|raw|security) nr_legacy="$nr_legacy $nr_ip:$nr_table" ;;
                esac
            done <"$nr_file"
        elif [ -e "$nr_file" ]; then
            nr_legacy="$nr_legacy $nr_ip:?"
        fi
    done
    nr_tool() {
        printf '\n@%s tool %s\n' "$NR" "$1"
        shift
        "$@" 2>&1
        printf '\n@%s status %s\n' "$NR" "$?"
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
        nr_tables=$(nft list tables 2>&1)
        nr_rc=$?
        nr_compat=
        set --
        while read -r nr_word nr_ip nr_table; do
            case "$nr_word $nr_ip $nr_table" in
            'table ip nat'|'table ip6 nat'|'table arp '*|'table bridge '*) continue ;;
            *[!A-Za-z0-9_.\ -]*) nr_odd=1; continue ;;
            'table ip filter'|'table ip6 filter') nr_compat="$nr_compat $nr_ip" ;;
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
            nr_tool nft nft -s list ruleset
        else
            for nr_table in "$@"; do
                nr_tool nft nft -s "list table $nr_table"
            done
        fi
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
    for nr_ip in $nr_compat; do
        if command -v "${nr_ip}tables-nft-save" >/dev/null; then
            nr_tool "${nr_ip}tables-nft" "${nr_ip}tables-nft-save" -t filter
        fi
    done
    for nr_ip in $nr_legacy; do
        nr_table=${nr_ip#*:}
        nr_ip=${nr_ip%%:*}
        nr_save=${nr_ip}tables-legacy-save
        command -v "$nr_save" >/dev/null || nr_save=${nr_ip}tables-save
        if command -v "$nr_save" >/dev/null; then
            nr_tool "${nr_ip}tables" "$nr_save" -t "$nr_table"
        else
            nr_state "${nr_ip}tables" missing "the kernel has the tables $nr_table"
        fi
    done
    :
"""

# A script loses its indentation on the way to a node: the Python program travels as a literal.
_LOOK = _SCRIPT.replace("%ASK%", shlex.quote(f"exec({_ASK!r})"))


def script(policy: Policy) -> str:
    """The shell text that lists the rules, where the kernel can have some and shows them."""
    return _LOOK


#: A section that runs beside the others: nft waits for its lock, and a node can have many rules.
SECTION = Section("firewall", script, timeout_s=5, beside=True)


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
    """What happens to a new TCP connection from another node to the policy's ports.

    verdict: "open", "dropped", "cannot tell" (it depends on ``rule``) or "unknown" (``reason``)
    ports:   the ports of the verdict, ``29500-29510``
    chain:   family, table and chain of the rule
    rule:    the rule that drops, or on which the verdict depends, as the tool prints it
    manager: what made the rules: firewalld, ufw, nftables, iptables; "" without rules
    tools:   the programs that were asked
    networks: the node's own networks from which peers get in, where the verdict depends on that
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
    for name, text in texts:
        if name == "nft":
            found = found.merged(nft.parse(text))
        elif not re.search("^# Table .* incompatible", text, re.M):
            rules = parse_iptables_rules(text, 6 if name.startswith("ip6") else 4)
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

    addresses: the node's own; with an IPv6 address among them, IPv6 is judged as well
    networks:  (interface, ``10.1.0.0/16``) of the networks to which the node is connected
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
        # It depends on the peer, and the other nodes mostly are in this node's own networks.
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

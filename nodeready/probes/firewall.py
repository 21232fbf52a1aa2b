"""Which packet filters a node has, and what they do with new connections to the policy's ports.

Rules are listed only where the kernel can have some: nothing here loads a module. firewalld and
ufw are seen by the rules that they make, whatever they believe to have made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from nodeready.policy import Policy
from nodeready.probes import iptables_rules, nft_rules
from nodeready.probes.base import Output, Section
from nodeready.probes.netfilter import Fate, Ruleset, fates

# nf_tables is there as a loaded module, or in the kernel itself: then no module file is around.
# Legacy tables name themselves in /proc. Tables of NAT are left out: on a Kubernetes node they
# are the large ones, and NAT is not judged. What iptables-nft keeps in `filter` its own save
# prints in full, while nft cannot show all of it. A table's name becomes part of a command: one
# that is not made of plain characters is not asked for.
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
    nr_state() { printf '\n@%s tool %s\n@%s status %s\n' "$NR" "$1" "$NR" "$2"; }
    case $nr_caps in
    ????????????[13579bdf]???) ;;
    *)
        if [ -n "$nr_nft" ]; then nr_state nft root; fi
        if [ -n "$nr_legacy" ]; then nr_state iptables root; fi
        exit 0
        ;;
    esac
    if [ -n "$nr_nft" ] && command -v nft >/dev/null; then
        nr_tables=$({ nft list tables 2>&1; echo "status $?"; } | head -c 65536)
        nr_compat='' nr_rc=''
        set --
        while read -r nr_word nr_ip nr_table; do
            case "$nr_word $nr_ip $nr_table" in
            status*) nr_rc=$nr_ip; continue ;;
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
            printf '\n@%s tool nft\n%s\n@%s status %s\n' "$NR" "$nr_tables" "$NR" "${nr_rc:-1}"
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
        nr_state nft missing
        nr_compat='ip ip6'
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
            nr_state "${nr_ip}tables" missing
        fi
    done
    :
"""


def script(policy: Policy) -> str:
    """List the rules, where there can be any and we may see them."""
    return _SCRIPT


#: It runs beside the others: nft waits for its lock, and a node can have very many rules.
SECTION = Section("firewall", script, timeout_s=5, beside=True)


@dataclass(frozen=True)
class Tool:
    """A program that lists rules. ``state``: ok, missing, needs root, failed or timed out."""

    name: str
    state: str
    detail: str = ""


@dataclass(frozen=True)
class Firewall:
    """What happens to a new TCP connection from another node to the policy's ports.

    verdict: "open", "dropped", "cannot tell" (it depends on ``rule``) or "unknown" (``reason``)
    ports:   those that the verdict is about, ``29500-29510``
    chain:   family, table and chain of the rule
    rule:    the rule that drops, or on which it depends, as the tool prints it
    manager: what made the rules: firewalld, ufw, nftables, iptables; "" when there are none
    tools:   the programs that were asked
    """

    verdict: str
    ports: str = ""
    chain: str = ""
    rule: str = ""
    manager: str = ""
    reason: str = ""
    tools: tuple[Tool, ...] = ()


#: What differs between equal rulesets: dates, and the counters of chains.
_DATES = re.compile(r"^# (Generated|Completed) .*$| \[\d+:\d+\]$", re.M)
_STATES = {"0": "ok", "root": "needs root", "missing": "missing"}
_REASONS = {
    "needs root": "the rules can be seen by root alone (CAP_NET_ADMIN)",
    "missing": "is not installed, and the kernel may have rules",
}


def _failed(said: str) -> str:
    """The state of a tool that failed, by what it said."""
    if re.search("(Protocol|Operation) not supported", said):
        # Such a kernel has no nf_tables, and so no rules in it.
        return "ok"
    return "needs root" if "Operation not permitted" in said else "failed"


def _split(output: Output) -> tuple[tuple[Tool, ...], list[tuple[str, str]]]:
    """The tools, and the text of those that ended well."""
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
        elif "incompatible" not in text:
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


def parse(output: Output, policy: Policy, addresses: tuple[str, ...]) -> Firewall:
    """What the node's rules do; never raises.

    addresses: those of the node. IPv6 counts where it has an address to be reached at.
    """
    tools, texts = _split(output)
    if output.truncated:
        return _unknown("the ruleset is too large", tools)
    if output.rc is None:
        return _unknown("listing the rules timed out", tools)
    if output.rc != 0:
        return _unknown(f"listing the rules failed with exit status {output.rc}", tools)
    # Where nft is not there, iptables-nft-save may still show all that iptables has made.
    replaced = any(tool.name.endswith("-nft") and tool.state == "ok" for tool in tools)
    for tool in tools:
        if tool.state != "ok" and not (tool.state == "missing" and replaced):
            reason = _REASONS.get(tool.state, f"{tool.state} {tool.detail}".strip())
            named = reason if tool.state == "needs root" else f"{tool.name} {reason}"
            return _unknown(named, tools)
    try:
        rules = _ruleset(tuple(texts))
    except ValueError as error:
        return _unknown(str(error), tools)
    manager = _manager(rules)
    verdict, ports, piece = _worst(fates(rules, 4, policy.port_range, addresses))
    if verdict == "open" and any(":" in address for address in addresses):
        verdict, ports, piece = _worst(fates(rules, 6, policy.port_range, addresses))
        if piece is not None:
            verdict, ports = "cannot tell", f"{ports} over IPv6"
    cause = piece.cause if piece else None
    if cause is None:
        return Firewall(verdict, shown(*policy.port_range), manager=manager, tools=tools)
    return Firewall(verdict, ports, cause.chain, cause.text, manager, tools=tools)

"""The probe of a node's packet filters: the programs that list rules, and their output."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from nodeready.policy import Policy
from nodeready.subjects.base import Output, Section

# Rules are listed only where the kernel can have some: the probe loads no module.
#
# A node without nft usually has no rules. There Python asks the kernel for its tables over netlink
# (<linux/netfilter/nf_tables.h>, NFT_MSG_GETTABLE), like ``nft list tables``. Without Python, each
# of these is a sign of rules that the probe cannot read:
#
# - the module nf_tables is loaded: the kernel loads it when a program first needs it
#   (net/netfilter/nfnetlink.c, nfnetlink_rcv_msg), and only programs that make rules need it. An
#   nf_tables that is built into the kernel is no sign;
# - connections are tracked (net.netfilter.nf_conntrack_count, of the network namespace): since
#   Linux 4.10 the kernel tracks them only where a rule needs it
#   (net/netfilter/nf_conntrack_proto.c, nf_ct_netns_get);
# - a service that loads rules is enabled, or ufw is (ENABLED in /etc/ufw/ufw.conf, ufw(8)).
#
# Legacy tables need no sign: /proc/net/ip_tables_names lists those of the network namespace.

# This program prints the tables like ``nft list tables``. Its exit status is 1 where the kernel
# does not answer: an error, or an end (NLMSG_DONE) with an error. Python 3.6 of RHEL 8 suffices.
_LIST_TABLES = r"""
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
# the names of legacy tables. Large tables of NAT, as on a Kubernetes node, are left out and not
# judged. nft cannot show all of iptables-nft's tables: iptables-nft-save prints them completely.
# ipset prints their sets. A table's name becomes part of a command: a table with other than plain
# characters in its name is not listed.
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
        nr_answer "$@"
        printf '\n@%s status %s\n' "$NR" "$?"
    }
    # Lines of a table of NAT beyond 64 KiB are left out.
    nr_saved() {
        printf '\n@%s tool %s\n' "$NR" "$1"
        shift
        { nr_answer "$@"; printf '\n@%s status %s\n' "$NR" "$?"; } | awk -v most=65536 '
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
        nr_tables=$(nr_answer nft list tables) || nr_rc=$?
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
_SCRIPT = _SCRIPT.replace("%ASK%", shlex.quote(f"exec({_LIST_TABLES!r})"))


def script(policy: Policy) -> str:
    """The shell text that lists the rules, where the kernel can have some and shows them."""
    return _SCRIPT


#: This section runs in parallel: nft waits for its lock, and a node can have many rules.
SECTION = Section("firewall", script, timeout_s=5, cap_bytes=1 << 20, parallel=True, quick=True)


@dataclass(frozen=True)
class ListingTool:
    """A program that lists rules.

    state:  ok, missing, needs root, failed or timed out; "no rules": it is missing and the kernel
            has no rules; "no sign of rules": it is missing, and nothing indicates rules
    detail: the message of a program that failed; why a missing program is needed
    name: of the program
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
#: The states in which all rules of the program are known.
COMPLETE_STATES = ("ok", "no rules", "no sign of rules")


def _failure_state(message: str) -> str:
    """The state of a tool that failed, by its message."""
    if re.search("(Protocol|Operation) not supported", message):
        # Such a kernel has no nf_tables, and so no rules in it.
        return "ok"
    return "needs root" if "Operation not permitted" in message else "failed"


#: The programs whose failure does not matter.
_OPTIONAL = ("nft-nat", "ipset")


def split_listing(output: Output) -> tuple[tuple[ListingTool, ...], list[tuple[str, str]]]:
    """The tools, and (name, text) of each tool that ended well."""
    tools, texts = [], []
    for section in f"\n{output.text}".split(f"\n@{output.nonce} tool ")[1:]:
        name, newline, listing = section.partition("\n")
        listing, ended, status = (newline + listing).rpartition(f"\n@{output.nonce} status ")
        body = listing.removeprefix("\n")
        word = status.strip().partition("\n")[0] if ended else ""
        message = next((line for line in body.splitlines() if line.strip()), "")[:160]
        if not ended:
            tools.append(ListingTool(name[:40], "timed out"))
        elif name in _OPTIONAL:
            pass
        elif word == "odd":
            tools.append(ListingTool(name[:40], "failed", "a table with an odd name"))
        else:
            state = _STATES.get(word) or _failure_state(message)
            tools.append(ListingTool(name[:40], state, "" if state == "ok" else message))
        if ended and word == "0":
            texts.append((name, _DATES.sub("", body)))
    return tuple(dict.fromkeys(tools)), texts

"""Rule sets made at random, of what rules of nft and iptables may say of a connection.

All conditions are certain ones for a connection of the lab, or name the port, the peer or the
interface: what they let through can be told beforehand.
"""

from __future__ import annotations

import random

CONDITIONS = (
    "tcp dport 29500-29510", "tcp dport { 22, 29500-29505 }", "tcp dport 29505", "tcp dport != 22",
    "tcp dport >= 29503", "tcp dport < 29504", "tcp sport 29500-29510", "tcp sport 1024-65535",
    "tcp dport 32768-60999", "tcp dport @ports", "th dport 29500-29510", "udp dport 53",
    "ct state new", "ct state established,related", "ct state { established, new }",
    "ct state invalid", "ct state != new", "ct state new,untracked", "ct direction reply",
    "ct direction original", "ct state & (established | related) != 0", "ct status dnat",
    "ip saddr 10.1.0.0/16", "ip saddr 192.168.7.0/24", "ip saddr 203.0.113.0/24",
    "ip saddr { 10.1.0.9, 10.1.3.9, 192.168.7.9 }", "ip saddr 10.1.3.0/24", "ip daddr 10.1.0.5",
    "ip daddr 10.1.0.0/16", "ip saddr != 10.0.0.0/8", "ip saddr @banned", "ip saddr @lately",
    "ip saddr != @banned", "ip saddr 10.1.0.9-10.1.0.20", "ip daddr & 255.255.0.0 == 10.1.0.0",
    "ip saddr . tcp dport { 10.1.0.9 . 29500-29510, 192.168.7.0/24 . 29505 }",
    "iifname . tcp dport { \"eth0\" . 29500-29510 }", 'iifname "eth0"', 'iifname "eth*"',
    'iif "lo"', 'iifname != "lo"', 'oifname "eth0"', 'oifname "ib0"', 'oifname != "eth0"',
    'iifname { "docker0", "ib0" }', "meta l4proto tcp", "meta l4proto udp", "meta nfproto ipv4",
    "ip protocol tcp", "ip protocol { icmp, udp }", "tcp flags syn",
    "tcp flags & (fin | syn | rst | ack) == syn", "tcp flags & (syn | ack) == syn | ack",
    "tcp flags != syn", "tcp flags ! syn", "tcp flags == syn", "tcp flags & (fin | syn) == 0x0",
    "tcp flags { syn, syn | ack }", "ip ttl < 5", "ip ttl 64", "ip ttl != 64",
    "meta length > 1500", "meta length 0-39", "ip dscp cs1", "ip dscp cs0", "ip dscp != cs0",
    "tcp option maxseg size 1-500", "tcp option maxseg exists", "tcp option timestamp missing",
    "limit rate over 1000/second burst 900 packets", "ct count over 100", "ct count 200",
    "fib daddr type local", "fib daddr type { broadcast, multicast }", "fib saddr type local",
    "fib saddr . iif oif missing", "fib saddr . iif oif exists", "meta mark 0x1",
    "meta mark & 0x3 == 0x2", "meta mark != 0x0", "ct mark 0x1", "meta pkttype broadcast",
    "ip frag-off & 0x1fff != 0", "ip version 4", "meta iifgroup 0", "ct helper \"ftp\"",
    "ct original ip daddr 10.1.0.5", "ct original ip saddr 10.1.0.0/16",
    "meta l4proto tcp ct original proto-dst 29500-29510", "socket transparent 1",
    "rt ipsec exists", "ip hdrlength 5", "ip ecn not-ect", "meta protocol ip", "tcp urgptr 0",
    "add @lately2 { ip saddr limit rate over 1000/second burst 900 packets }",
    "update @seen { ip saddr }", "meter m1 { ip saddr ct count over 100 }",
)  # fmt: skip
CHANGES = (
    "meta mark set 0x1", "meta mark set mark or 0x2", "meta mark set mark and 0xfffffffe",
    "ct mark set 0x1", "meta mark set ct mark", "ct mark set meta mark", "counter",
    'log prefix "in: " level debug flags tcp options', "ip dscp set cs0", "meta nftrace set 0",
    "meta priority set 1:2", "tcp option maxseg size set 1400",
)  # fmt: skip
ENDS = ("accept", "drop", "reject", "reject with tcp reset", "return", "jump one", "goto two")
_WEIGHTS = (8, 5, 1, 1, 1, 3, 1)
SETS = """
    set ports { type inet_service; flags interval; elements = { 22, 29500-29510 }; }
    set banned { type ipv4_addr; flags interval; auto-merge;
        elements = { 203.0.113.7, 198.51.100.0/24, 192.0.2.1-192.0.2.9 }; }
    set lately { type ipv4_addr; flags dynamic,timeout; timeout 1h; elements = { 10.1.3.9 }; }
    set lately2 { type ipv4_addr; flags dynamic,timeout; timeout 1h; size 1024; }
    set seen { type ipv4_addr; flags dynamic,timeout; timeout 1h; size 1024; }
"""
_HOOKS = ("input",) * 5 + ("output",) * 3 + ("prerouting", "postrouting")
USUAL = ("ct state established,related accept", 'iifname "lo" accept', "ct state invalid drop")


def _rule(draw: random.Random, chain: str) -> str:
    words = draw.sample(CONDITIONS, draw.choice((0, 1, 1, 1, 2, 2, 3)))
    if draw.random() < 0.12:
        words.append(draw.choice(CHANGES))
        return " ".join(words)
    end = draw.choices(ENDS, _WEIGHTS)[0]
    if end == "reject with tcp reset":
        words.insert(0, "meta l4proto tcp")
    if chain in ("one", "two") and end in ("jump one", "goto two"):
        end = "accept"
    if end.startswith("reject") and chain not in ("input", "output"):
        end = "drop"
    if not words and end in ("drop", "reject"):
        words.append(draw.choice(CONDITIONS))
    return " ".join([*words, end])


def nft(seed: int) -> str:
    """A table with chains of this seed, as `nft -f` reads it."""
    draw = random.Random(seed)
    lines = ["table inet t {", SETS]
    for name in ("two", "one"):
        rules = [_rule(draw, name) for _ in range(draw.choice((1, 2, 3)))]
        lines += [f"chain {name} {{", *rules, "}"]
    for number in range(draw.choice((1, 1, 2, 3))):
        hook = draw.choice(_HOOKS)
        policy = draw.choice(("accept", "accept", "drop"))
        priority = draw.choice((-150, -10, 0, 0, 10))
        rules = [_rule(draw, hook) for _ in range(draw.choice((1, 2, 3, 4, 6)))]
        if policy == "drop" or draw.random() < 0.5:
            rules = [*draw.sample(USUAL, draw.choice((1, 2, 3))), *rules]
        if policy == "drop" and draw.random() < 0.7:
            rules.append(draw.choice((
                "tcp dport 29500-29510 accept", "ip saddr { 10.0.0.0/8, 192.168.0.0/16 } accept",
                'iifname { "eth0", "ib0" } accept', "tcp dport { 22, 29000-30000 } accept",
                "ip saddr 192.168.7.0/24 tcp dport 29500-29510 accept",
            )))  # fmt: skip
            if hook in ("output", "postrouting"):
                rules.append("accept")
        head = f"type filter hook {hook} priority {priority}; policy {policy};"
        lines += [f"chain c{number} {{", head, *rules, "}"]
    return "\n".join([*lines, "}"]) + "\n"


XT_CONDITIONS = (
    "-p tcp -m tcp --dport 29500:29510", "-p tcp -m multiport --dports 22,29500:29510",
    "-p tcp -m multiport --ports 29500:29510", "-p tcp -m tcp --sport 29500:29510",
    "-p tcp -m tcp ! --dport 22", "-p udp", "-p tcp", "! -p tcp", "-i eth0", "-i eth+", "! -i lo",
    "-i docker0", "-s 10.1.0.0/16", "-s 192.168.7.0/24", "! -s 10.0.0.0/8", "-s 10.1.3.9",
    "-s 203.0.113.0/24", "-d 10.1.0.5", "-m conntrack --ctstate NEW",
    "-m conntrack --ctstate RELATED,ESTABLISHED", "-m state --state INVALID",
    "-m conntrack ! --ctstate NEW", "-m conntrack --ctdir REPLY", "-p tcp -m tcp --syn",
    "-p tcp -m tcp ! --syn", "-p tcp -m tcp --tcp-flags SYN,ACK SYN,ACK",
    "-p tcp -m tcp --tcp-flags ALL NONE", "-m ttl --ttl-lt 5", "-m ttl --ttl-eq 64",
    "-m length --length 0:39", "-m length --length 40:1500", "-m dscp --dscp 0x08",
    "-m dscp --dscp 0x00", "-m tos --tos 0x10/0x3f", "-m mark --mark 0x1",
    "-m connmark --mark 0x1", "-m mark ! --mark 0x1/0x1", "-m addrtype --dst-type LOCAL",
    "-m addrtype --src-type LOCAL", "-m addrtype --dst-type BROADCAST",
    "-p tcp -m connlimit --connlimit-above 100 --connlimit-mask 32",
    "-p tcp -m connlimit --connlimit-upto 100",
    "-m hashlimit --hashlimit-above 1000/sec --hashlimit-burst 900 --hashlimit-mode srcip "
        "--hashlimit-name a", "-m recent --rcheck --seconds 60 --name bad",
    "-m recent --set --name new", "-m recent --update --seconds 1 --hitcount 20 --name new2",
    "-m iprange --src-range 10.1.0.1-10.1.0.99", "-m set --match-set banned src",
    "-m set --match-set fleet src", "-m set ! --match-set fleet src",
    "-m set --match-set where src,dst", "-p tcp -m tcpmss --mss 1:500",
    "-p tcp -m tcp --syn -m tcpmss ! --mss 536:65535", "-m string --string BitTorrent --algo bm",
    "-m pkttype --pkt-type broadcast", "-f", "! -f", "-m comment --comment \"a -j DROP\"",
    "-m policy --dir in --pol none", "-m helper --helper ftp", "-m realm --realm 0",
    "-p tcp -m ecn --ecn-tcp-ece",
)  # fmt: skip
IPSETS = """create banned hash:net family inet
add banned 203.0.113.0/24
create fleet hash:ip family inet
add fleet 10.1.0.9
add fleet 192.168.7.9
create where hash:ip,port family inet
add where 10.1.0.9,tcp:29505
"""

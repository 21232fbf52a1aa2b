"""The packet filter's verdict beside real connections, for usual rules and random ones.

A verdict is wrong when a connection contradicts it. A warning is needless when the traffic of the
known nodes has one answer, unless the rules depend on what nobody can know (`DEPENDS`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cases import read
from tests.lab import filter_grammar
from tests.lab.filter_traffic import Pair, agrees, have_one_answer
from tests.paths import ROOT

DATA = ROOT / "tests/unit/subjects/data/ports"
PORTS = "tcp dport 29500-29510"
USUAL = "ct state established,related accept; iif lo accept; ct state invalid drop; "
IPT = "-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n-A INPUT -i lo -j ACCEPT\n"


def chain(rules: str, policy: str = "accept", hook: str = "input", priority: str = "0") -> str:
    """A table with one base chain; rules are parted by semicolons."""
    head = f"type filter hook {hook} priority {priority}; policy {policy};"
    name = f"{hook[:3]}{abs(hash((rules, policy, hook, priority))) % 10**8}"
    lines = rules.replace("; ", "\n")
    sets, _, rest = lines.rpartition("@@")
    return f"table inet t_{name} {{\n{sets}\nchain c {{\n{head}\n{rest}\n}}\n}}\n"


def drop(rules: str) -> str:
    """A chain that drops what these rules, behind the usual ones, do not accept."""
    return chain(USUAL + rules, "drop")


#: Rules as people write them; what they do, the connections say. Conditions that stand alone are
#: those of filter_grammar, and what lets others in is in the rows of tests/unit.
NFT = (
    # What goes out: answers, and the node's own connections.
    chain("ct state { established, related } tcp sport 29500-29510 reject", hook="output"),
    chain("tcp dport { 22, 53, 443 } accept; ct state established accept", "drop", "output"),
    chain(f"ct state established,related accept; {PORTS} accept", "drop", "output"),
    chain('oifname != "lo" drop', hook="postrouting"),
    chain('oifname { "docker0", "virbr0" } drop', hook="postrouting"),
    # Some of the peers, and what packets of jobs have no part in.
    drop('iifname "docker0" accept; ip saddr 10.2.0.0/16 tcp dport 29500-29510 accept'),
    drop("ip saddr { 10.1.0.9, 10.1.3.9, 192.168.7.9 } accept"),
    drop("ip saddr { 10.1.0.9, 192.168.7.9 } accept"),
    drop("ip saddr 10.1.0.1-10.1.3.200 accept; ip saddr 192.168.7.0/28 accept"),
    chain("ip saddr != 10.0.0.0/8 ip saddr != 192.168.0.0/16 drop"),
    drop("meta length 44-60 accept"),
    chain("tcp flags & (fin | syn | rst | psh | ack | urg) == fin | psh | urg drop; "
        "tcp flags & (fin | syn) == fin | syn drop; tcp flags & (syn | rst) == syn | rst drop"),
    drop(f"{PORTS} ct state new limit rate 999/second burst 999 packets accept"),
    # Ways through several chains.
    chain(f"{PORTS} accept", priority="-10") + drop("tcp dport 22 accept"),
    chain(f"{PORTS} drop", hook="prerouting", priority="raw"),
    chain("ct state invalid drop", hook="prerouting", priority="raw"),
    chain("ct state invalid drop", hook="prerouting", priority="mangle"),
    chain("ct state new drop", hook="prerouting", priority="raw"),
    chain(f"{PORTS} notrack", hook="prerouting", priority="raw") + drop(f"{PORTS} accept"),
    chain(f"{PORTS} notrack", hook="prerouting", priority="raw") + drop("ct state new accept"),
    chain(f"{PORTS} notrack", hook="prerouting", priority="raw")
        + chain("ct state invalid drop", hook="output"),
    chain(f"{PORTS} notrack; tcp sport 29500-29510 notrack", hook="prerouting", priority="raw")
        + chain("tcp sport 29500-29510 notrack; tcp dport 29500-29510 notrack", hook="output",
                priority="raw")
        + chain("ct state untracked accept; ct state established accept", "drop"),
    chain("meta mark set 0x1", hook="prerouting") + drop("meta mark 0x1 accept"),
    chain("ip saddr 10.1.0.0/16 meta mark set 0x10", hook="prerouting")
        + drop("meta mark & 0x10 == 0x10 accept; iifname ib0 accept"),
    chain("ct mark set 0x7", hook="prerouting") + chain("ct mark != 0x7 drop"),
    drop("ip saddr . tcp dport vmap @m").replace("chain c {", "map m {\ntype ipv4_addr . "
        "inet_service : "
        "verdict\nflags interval\nelements = { 10.1.0.0/16 . 29500-29510 : accept, "
        "192.168.7.9 . 29500-29505 : accept }\n}\nchain c {"),
    'table netdev t { chain c { type filter hook ingress device "eth0" priority -500; policy '
        "accept; tcp dport 29505 drop; }\n}\n",
    "table netdev t { chain c { type filter hook ingress device \"lo\" priority -500; policy "
        "drop; }\n}\n",
    "table inet t { chain c { type filter hook ingress device \"ib0\" priority 0; policy drop; "
        "ip saddr 192.168.7.9 tcp dport { 29500, 29510 } accept; }\n}\n",
    # NAT.
    "table ip nat { chain c { type nat hook prerouting priority dstnat; tcp dport 29505 "
        "redirect to :8080; }\n}\n",
    "table ip nat { chain c { type nat hook prerouting priority dstnat; tcp dport 8080 redirect "
        "to :29505; }\n}\n",
    "table ip n { chain c { type nat hook prerouting priority dstnat; ip daddr 10.1.0.5 "
        "tcp dport 29500-29510 dnat to 10.77.0.1; }\n}\n",
    "table ip n { chain c { type nat hook output priority -100; tcp dport 29500-29510 redirect "
        "to :1; }\n}\n",
    "table ip n { chain c { type nat hook postrouting priority srcnat; oifname \"eth0\" "
        "masquerade; }\n}\n",
)  # fmt: skip

NFT6 = (
    drop(f"meta nfproto ipv4 {PORTS} accept; icmpv6 type {{ nd-neighbor-solicit, "
        f"nd-neighbor-advert }} " "accept"),
    drop(f"{PORTS} accept; meta l4proto ipv6-icmp accept"),
    drop(f"ip6 saddr 2001:db8:1::/64 {PORTS} accept; ip saddr 0.0.0.0/0 {PORTS} accept; "
        "meta l4proto ipv6-icmp accept"),
    chain("ip6 saddr 2001:db8:bad::/48 drop; ip6 hoplimit < 5 drop; ip6 nexthdr udp drop"),
    chain(f"ip6 daddr 2001:db8:1::5 {PORTS} drop"),
    "table ip6 t { chain c { type filter hook input priority 0; policy drop; meta l4proto "
        "ipv6-icmp accept; }\n}\n",
    "table ip6 t { chain c { type filter hook output priority 0; tcp sport 29500-29510 drop; "
        "}\n}\n",
)  # fmt: skip


def judged_by_a_unit() -> Iterator[str]:
    """The rules of nftables of which tests/unit says the verdict."""
    named = (DATA / "named.nft").read_text().partition("\tchain loop")[0].replace("\n", "; ")
    for case in read(DATA / "rules.json"):
        section, rules = case["section"], case["name"]
        if section in ("drop", "networks", "peers"):
            yield chain(f"{named}@@{USUAL}{rules}", "drop")
        elif section == "accept":
            yield chain(rules)
        elif section == "lost":
            hook, _, rule = rules.partition(" ")
            yield chain(rule, hook=hook)


def filter_table(rules: str, policy: str = "DROP") -> str:
    return f"*filter\n:INPUT {policy} [0:0]\n:OUTPUT ACCEPT [0:0]\n:one - [0:0]\n{rules}\nCOMMIT\n"


def accepts(condition: str) -> str:
    """Only this is let in."""
    return filter_table(f"{IPT}-A INPUT {condition} -j ACCEPT")


def drops(condition: str) -> str:
    """Only this is not let in."""
    return filter_table(f"-A INPUT {condition} -j DROP", "ACCEPT")


DPORTS = "-p tcp -m tcp --dport 29500:29510"
#: Each condition alone, and what only a table of its own can say.
XTABLES = (
    *map(accepts, filter_grammar.XT_CONDITIONS), *map(drops, filter_grammar.XT_CONDITIONS),
    drops("-m mac --mac-source 02:00:00:00:00:77 -s 203.0.113.4"),
    filter_table("-A OUTPUT -p tcp -m tcp --sport 29500:29510 -j DROP", "ACCEPT"),
    filter_table("-A OUTPUT -m conntrack --ctstate ESTABLISHED -j REJECT", "ACCEPT"),
    filter_table(f"-A INPUT -g one\n-A one {DPORTS} -j RETURN\n-A one -j ACCEPT"),
    "*raw\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n"
    f"-A PREROUTING {DPORTS} -j CT --notrack\nCOMMIT\n" + accepts("-m conntrack --ctstate NEW"),
    "*mangle\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -j MARK --set-xmark 0x10/0xff\nCOMMIT\n"
    + accepts("-m mark --mark 0x10/0xf0"),
    "*mangle\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -p tcp -m tcp --dport 29505 -j "
    "DROP\nCOMMIT\n",
    "*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:DOCKER - [0:0]\n"
    "-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER\n"
    "-A DOCKER ! -i docker0 -p tcp -m tcp --dport 29510 -j DNAT --to-destination 172.17.0.2:80\n"
    "COMMIT\n",
)  # fmt: skip

#: What depends on the moment, on chance, on another program: a warning is right.
DEPENDS = (
    drop(f"{PORTS} limit rate 3/minute accept"),
    chain("numgen random mod 2 == 0 drop"),
    chain('ct state new meta hour "00:00"-"23:00" drop'),
    chain("quota over 100 mbytes drop"),
    chain(f"{PORTS} ct count over 2 reject"),
    chain("ether saddr 02:00:00:00:00:99 drop"),
)


#: A connection that is dropped takes its time: so many nodes are tried at once.
_AT_ONCE = 4


@pytest.fixture
def pairs(lab_machine: None, request: pytest.FixtureRequest) -> Iterator[list[Pair]]:
    many = [Pair(ipv6=getattr(request, "param", False)) for _ in range(_AT_ONCE)]
    try:
        yield many
    finally:
        for one in many:
            one.end()


def with_nft(pair: Pair, rules: str) -> None:
    pair.node.run("nft", "-f", "-", text=rules)


def judged(pair: Pair, apply: Callable[[Pair, str], None], rules: str) -> tuple[str, str]:
    """ "wrong", "needless", "right" or "refused", and what is the matter."""
    pair.clear()
    try:
        apply(pair, rules)
    except RuntimeError as error:
        return "refused", str(error)
    # Whoever knows the nodes says it of them, else of the node's networks.
    unknown, known, tried = pair.looked(False), pair.looked(True), pair.tried()
    if not agrees(known, tried) or known.verdict == "cannot tell":
        # A machine with much to do is slow, and no filter.
        tried = pair.tried(1)
    shut = [way for way, worked in tried.items() if not worked]
    told = f"{rules}\nsaid {unknown}\nof known nodes {known}\ndid not connect: {shut}"
    if not agrees(unknown, tried) or not agrees(known, tried):
        return "wrong", told
    if known.verdict == "cannot tell" and have_one_answer(tried):
        return "needless", told
    return "right", told


def nothing_wrong(
    pairs: list[Pair],
    apply: Callable[[Pair, str], None],
    many: Iterable[str],
    refused: int = 0,
    bad: Container[str] = ("wrong", "needless"),
) -> None:
    def one(rules: str) -> tuple[str, str]:
        pair = pairs.pop()
        try:
            return judged(pair, apply, rules)
        finally:
            pairs.append(pair)

    with ThreadPoolExecutor(len(pairs)) as pool:
        found = [*pool.map(one, many)]
    wrong = [told for kind, told in found if kind in bad]
    assert not wrong, "\n\n".join(wrong)
    # Not every kernel has every match.
    left = [told for kind, told in found if kind == "refused"]
    assert len(left) <= refused, "\n\n".join(left)


def test_rules_that_people_write(pairs: list[Pair]) -> None:
    nothing_wrong(pairs, with_nft, NFT)


def test_rules_that_units_judge(pairs: list[Pair]) -> None:
    """Where a unit says that nobody can tell, a warning is wanted. Some are no rules of nft's."""
    nothing_wrong(pairs, with_nft, judged_by_a_unit(), refused=12, bad=("wrong",))


@pytest.mark.nightly
def test_each_condition_alone(pairs: list[Pair]) -> None:
    many = [
        chain(f"{filter_grammar.SETS}@@{condition} {end}", policy, hook)
        for condition in filter_grammar.CONDITIONS
        for hook in ("input", "output")
        for end, policy in (("accept", "drop"), ("drop", "accept"))
    ]
    nothing_wrong(pairs, with_nft, many, refused=40)


@pytest.mark.nightly
@pytest.mark.parametrize("pairs", [True], indirect=True)
def test_rules_for_ipv6(pairs: list[Pair]) -> None:
    nothing_wrong(pairs, with_nft, NFT6)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["legacy", "nft"])
def test_rules_of_iptables(pairs: list[Pair], kind: str) -> None:
    if not all(map(shutil.which, (f"iptables-{kind}-restore", "ipset"))):
        pytest.skip("iptables or ipset is not installed")

    def apply(pair: Pair, rules: str) -> None:
        pair.node.run(f"iptables-{kind}-restore", text=rules)

    try:
        for one in pairs:
            one.node.run("ipset", "restore", text=filter_grammar.IPSETS)
        apply(pairs[0], XTABLES[0])
    except RuntimeError as error:
        pytest.skip(f"this kernel has no such tables: {error}")
    nothing_wrong(pairs, apply, XTABLES, len(XTABLES) // 4)


@pytest.mark.nightly
def test_random_rules(pairs: list[Pair]) -> None:
    many = [filter_grammar.nft(seed) for seed in range(80)]
    nothing_wrong(pairs, with_nft, many, refused=20)


def test_what_depends_on_more_is_left_to_the_mesh(pairs: list[Pair]) -> None:
    for rules in DEPENDS:
        with_nft(pairs[0], rules)
        assert pairs[0].looked(True).verdict == "cannot tell", rules
        pairs[0].clear()

"""What rules do with a new connection from another node, as their tools print them.

data/ports/firewalld.nft is what firewalld 1.3.3 made, ufw.save what ufw 0.36.2 made, both with
their defaults on Debian 12, recorded by the tools of the same system; chains for forwarded and
outgoing packets left out. The others have the form of what these make: fail2ban's action.d/
nftables.conf, cs-firewall-bouncer, firewalld 2.x (policies and zones as nft lists them), Docker,
kube-proxy, Felix (projectcalico), cilium's iptables.go, csf, libvirt's networks, amazon-vpc-cni.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nodeready.policy import Policy
from nodeready.subjects.base import Output, Unknown
from nodeready.subjects.context import mesh_passed
from nodeready.subjects.fleet import ALONE, FleetFacts
from nodeready.subjects.ports import checks, firewall
from nodeready.subjects.ports.firewall import Firewall
from nodeready.subjects.proof.facts import Proved
from nodeready.subjects.proof.mesh_facts import Blocked, Mesh
from nodeready.subjects.snapshot import Snapshot
from tests.builders.job_env import ports
from tests.builders.judging import by_id
from tests.cases import cases

DATA = Path(__file__).parent / "data" / "ports"
POLICY = Policy()
OWN = ("10.1.0.5", "192.168.7.5")
V6 = (*OWN, "2001:db8::5")
NETS = (("eth0", "10.1.0.0/16"), ("ib0", "192.168.7.0/24"))
BASE = "type filter hook input priority filter; policy"
Case = dict[str, Any]


def tool(name: str, text: str, status: str = "0") -> str:
    return f"\n@ tool {name}\n{text}\n@ status {status}\n"


def evaluated(
    *pieces: str,
    own: tuple[str, ...] = OWN,
    networks: tuple[tuple[str, str], ...] = (),
    rc: int | None = 0,
    policy: Policy = POLICY,
    peers: tuple[str, ...] = (),
) -> Firewall:
    return firewall.parse(Output("".join(pieces), rc), policy, own, networks, peers=peers)


def nft(*rules: str, policy: str = "drop", more: str = "") -> str:
    """A table with one base chain of these rules."""
    body = "\n".join(f"\t\t{rule}" for rule in rules)
    table = (
        f"table inet filter {{\n{more}\tchain input {{\n\t\t{BASE} {policy};\n{body}\n\t}}\n}}\n"
    )
    return tool("nft", table)


def iptables(*rules: str, policy: str = "DROP", name: str = "iptables-nft") -> str:
    lines = "\n".join(rules)
    return tool(name, f"*filter\n:INPUT {policy} [3:180]\n{lines}\nCOMMIT")


STATEFUL = ("ct state established,related accept", 'iifname "lo" accept', "ct state invalid drop")
#: Sets, maps and chains that the rules of the rows name.
NAMED = (DATA / "named.nft").read_text()


def rules_of(section: str) -> Any:
    """The rows of a section; the name of a row is its rules."""
    rows = cases(__file__, "data/ports/rules.json", section)
    return pytest.mark.parametrize("case", rows)


def dropping(case: Case) -> str:
    """A chain that drops what its rules do not accept."""
    return nft(*STATEFUL, *case["name"].split("; "), more=NAMED)


@pytest.mark.parametrize("case", cases(__file__, "data/ports/managers.json"))
def test_what_the_managers_of_rules_make(case):
    """As they leave the ports, and changed."""
    text = (DATA / case["file"]).read_text()
    for old, new in case.get("replace", ()):
        assert old in text
        text = text.replace(old, new)
    rules = tool("nft" if case["file"].endswith(".nft") else "iptables-nft", text)
    rules += tool("ipset", case["ipset"]) if "ipset" in case else ""
    if "manager" in case:
        observed = evaluated(rules)
        assert (observed.rule, observed.manager) == (case.get("rule", ""), case["manager"])
    else:
        observed = evaluated(rules, networks=NETS)
        assert case.get("rule", "") in f"{observed.rule} {observed.chain}"
    assert observed.verdict == case["verdict"]


INCOMPATIBLE = "# Table `filter' contains incompatible base-chains, use 'nft' tool.\n"


@pytest.mark.parametrize(
    ("rules", "verdict", "manager"),
    [
        (tool("nft", ""), "open", ""),
        (iptables(), "dropped", "iptables"),
        (iptables(name="iptables"), "dropped", "iptables"),
        (tool("nft", "") + iptables(name="iptables"), "dropped", "iptables"),
        (iptables("-A INPUT -j ACCEPT") + nft(), "dropped", "nftables"),
        (nft("ct state established accept", "tcp dport 29000-31000 accept")
         + tool("iptables-nft", f"{INCOMPATIBLE}*filter\n:INPUT DROP [0:0]\nCOMMIT"),
         "open", "nftables"),
    ],
    ids=["none", "iptables", "legacy", "legacy beside nft", "both", "iptables cannot show it"],
)  # fmt: skip
def test_rules_of_two_tools(rules, verdict, manager):
    observed = evaluated(rules)
    assert (observed.verdict, observed.manager) == (verdict, manager)
    assert observed.rule == ("policy drop" if verdict == "dropped" else "")


@rules_of("drop")
def test_only_what_surely_lets_everybody_in_opens(case):
    assert evaluated(dropping(case)).verdict == case["verdict"]


@rules_of("accept")
def test_a_drop_of_some_ports_is_found(case):
    observed = evaluated(nft(*case["name"].split("; "), policy="accept"))
    assert (observed.verdict, observed.ports) == (
        case["verdict"],
        case.get("ports", "29500-29510"),
    )


@rules_of("iptables")
def test_rules_of_iptables(case):
    rules = [
        rule if rule.startswith("-A") else f"-A INPUT {rule}" for rule in case["name"].split("; ")
    ]
    answers = "-A INPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT"
    allow = (":allow - [0:0]", "-A allow -j ACCEPT")
    assert evaluated(iptables(*allow, answers, *rules)).verdict == case["verdict"]


@rules_of("networks")
def test_peers_are_looked_for_in_the_nodes_own_networks(case):
    observed, networks = evaluated(dropping(case), networks=NETS), case["networks"]
    assert observed.verdict == case["verdict"]
    if isinstance(networks, int):
        assert len(observed.networks) == networks
    else:
        assert [text.partition(" ")[0] for text in observed.networks] == networks
    assert evaluated(dropping(case)).verdict == "cannot tell"


#: Peers of the node, by /etc/hosts.
HOSTS = ("10.1.0.11", "10.1.0.12", "192.168.7.11", "192.168.7.12", "203.0.113.80")


@rules_of("peers")
def test_peers_that_are_known_decide(case):
    assert evaluated(dropping(case), networks=NETS).verdict == case["unknown"]
    assert evaluated(dropping(case), networks=NETS, peers=HOSTS).verdict == case["known"]


@rules_of("lost")
def test_the_packets_that_are_lost_are_named(case):
    hook, _, rule = case["name"].partition(" ")
    base = f"type filter hook {hook} priority 0; policy accept;"
    text = f"table inet t {{\n\tchain c {{\n\t\t{base}\n\t\t{rule}\n\t}}\n}}\n"
    observed = evaluated(tool("nft", text))
    assert (observed.verdict, observed.packets_text) == ("dropped", case["what"])


def test_every_base_chain_on_the_way_counts():
    def table(name: str, hook: str, verdict: str, kind: str = "filter") -> str:
        base = f"type {kind} hook {hook} priority 0; policy accept;"
        return f"table ip {name} {{\n\tchain c {{\n\t\t{base}\n\t\t{verdict}\n\t}}\n}}\n"

    for hook, verdict in (("prerouting", "dropped"), ("forward", "open"), ("output", "dropped")):
        assert evaluated(tool("nft", table("a", hook, "drop"))).verdict == verdict
    both = table("a", "input", "accept") + table("b", "input", "drop")
    assert evaluated(tool("nft", both)).chain == "ip b c"
    assert evaluated(tool("nft", table("a", "prerouting", "drop", "nat"))).verdict == "dropped"
    dormant = table("a", "input", "drop").replace("{\n", "{\n\tflags dormant\n", 1)
    assert evaluated(tool("nft", dormant)).verdict == "open"


ONLY_IPV6 = tool("nft", f"table ip6 f {{\n\tchain c {{\n\t\t{BASE} drop;\n\t}}\n}}\n")


def test_ipv6_counts_where_the_node_has_an_address_also_beside_networks_that_get_in():
    assert evaluated(ONLY_IPV6).verdict == "open"
    observed = evaluated(ONLY_IPV6, own=V6)
    assert (observed.verdict, observed.ports) == ("cannot tell", "29500-29510 over IPv6")
    assert evaluated(nft(), own=V6).verdict == "dropped"
    rules = nft("meta nfproto ipv6 accept", "ip saddr 10.0.0.0/8 accept") + ONLY_IPV6
    assert evaluated(rules, networks=NETS[:1]).verdict == "open"
    seen = evaluated(rules, networks=NETS[:1], own=V6)
    assert (seen.verdict, seen.ports) == (observed.verdict, observed.ports)
    # Peers that are known by IPv4 alone: in each network of the node, the first one too.
    for peers in (("10.1.0.11",), ("192.168.7.11",)):
        seen = evaluated(ONLY_IPV6, networks=NETS, own=V6, peers=peers)
        assert seen.verdict == "open", peers


@pytest.mark.parametrize("case", cases(__file__, "data/ports/unseen.json"))
def test_rules_that_cannot_be_seen_are_unknown(case):
    observed = evaluated(case["rules"], rc=case["rc"])
    assert observed.verdict == "unknown"
    assert case["reason"] in observed.reason


def test_a_node_without_nft_and_without_a_sign_of_rules_is_open():
    printed = "nft: Unable to initialize Netlink socket: Protocol not supported"
    assert evaluated(tool("nft", printed, "3")).verdict == "open"
    seen = evaluated(tool("nft", "", "missing"), iptables("-A INPUT -j ACCEPT"))
    assert (seen.verdict, [t.state for t in seen.tools]) == ("open", ["missing", "ok"])
    legacy = tool("iptables", "the kernel has the tables filter", "missing")
    for status, state in (("none", "no rules"), ("unseen", "no sign of rules")):
        none = tool("nft", "", status)
        observed = evaluated(none)
        assert (observed.verdict, [t.state for t in observed.tools]) == ("open", [state])
        # What another program shows still counts.
        assert evaluated(none, iptables()).verdict == "dropped"
        assert evaluated(none, legacy).verdict == "unknown"


@pytest.mark.parametrize("text", [
    "table", "table inet", "table inet x {", "}" * 5000, "{" * 5000,
    "table inet x { chain c {\n" + BASE + " drop;\n" + "tcp dport { " * 500,
    "table inet x {\n chain c {\n" + BASE + " accept;\n" + "tcp dport\nvmap\n& (\n.\nct\nfib\n"
    "jump\nlog\ncounter packets\nip saddr {\n} }\nset s { elements = { : } }\n}\n}",
    "\x1b[2J[/red] table inet \udcff { chain \udcfe {\n type filter hook input\n '\"\n}\n}",
    '"' * 9999, "table ip filter {\n chain c {\n type filter hook\n policy\n}\n}",
    "tabla de filtro {\n}\n", "*filter\n:INPUT\n:\n-A\n-A INPUT -j\n",
])  # fmt: skip
def test_hostile_text_is_never_an_error(text):
    for name in ("nft", "iptables-nft", "ip6tables", "\x1b[31m"):
        assert evaluated(tool(name, text)).verdict in ("dropped", "cannot tell", "unknown")


def test_many_rules_cost_no_more_than_a_doubt():
    wide = Policy(port_range=(1024, 65535))
    rules = nft(*(f"tcp dport {port} accept" for port in range(1100, 3000, 2)))
    observed = evaluated(rules, policy=wide)
    assert (observed.verdict, observed.rule) == ("cannot tell", "1901 pieces of it")
    cut = firewall.parse(Output("\n@ tool nft\n" + "x" * 99, None, truncated=True), POLICY, OWN)
    assert (cut.verdict, cut.reason) == ("unknown", "the ruleset is too large")


def test_a_node_of_the_fleet_that_is_shut_out_is_no_doubt():
    rule = "ip saddr 10.1.0.11 drop"
    observed = evaluated(nft(rule, policy="accept"), networks=NETS)
    assert observed.verdict == "cannot tell"
    shut = firewall.judge_nodes(observed, ("10.1.0.5", "10.1.0.11", "10.1.0.12"))
    assert (shut.verdict, shut.peers, shut.rule) == ("dropped", "1 of 2", rule)
    assert firewall.judge_nodes(observed, ("10.1.0.5", "10.1.0.13")).verdict == "open"
    # The rule that lets others in is named beside the drop.
    accept = "ip saddr 172.20.0.0/16 accept"
    observed = evaluated(nft(*STATEFUL, accept), networks=NETS)
    assert (observed.rule, observed.other_rule) == ("policy drop", accept)


def test_nat_that_was_cut_off_is_not_judged():
    nat = "table ip nat {\n\tchain PREROUTING {\n\t\ttcp dport 29500 dnat to 10.9.9.9\n# cut\n"
    assert evaluated(tool("nft", ""), tool("nft-nat", nat)).verdict == "open"
    saved = "*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -j DNAT --to-destination 10.9.9.9\n"
    both = f"*filter\n:INPUT DROP [0:0]\nCOMMIT\n{saved}# cut"
    assert evaluated(tool("iptables-nft", f"{saved}# cut")).verdict == "open"
    assert evaluated(tool("iptables-nft", both)).rule == "policy drop"
    assert evaluated(tool("iptables-nft", f"{saved}COMMIT")).verdict == "dropped"
    # A set that nobody could list, and NAT that could not be, cost nothing else.
    assert evaluated(tool("nft", ""), tool("nft-nat", "Error", "1")).verdict == "open"


@pytest.mark.parametrize(("rule", "reached", "blocked", "status"), [
    ("queue to 0", 3, (), "ok"),
    ("queue to 0", 2, (), "warn"),
    ("queue to 0", 3, (Blocked("target", (29500,), ("b",), 3, "c", None),), "warn"),
    # A few connections do not show what becomes of those that are counted, measured or drawn.
    *((rule, 3, (), "varies") for rule in (
        "limit rate 3/minute accept",
        "ct count 4 accept",
        "ip saddr 10.1.0.0/16 ct count 4 accept",
        "quota until 10 mbytes accept",
        'meta hour "08:00"-"17:00" accept',
        "numgen random mod 10 < 9 accept",
        "add @seen { ip saddr limit rate 2/second } accept",
        'xt match "cluster" accept; xt match "connlimit" accept',
    )),
])  # fmt: skip
def test_the_mesh_decides_what_the_rules_leave_open(rule, reached, blocked, status):
    rules = evaluated(nft(*rule.split("; ")), networks=NETS)
    held = ports(firewall=rules)
    mesh = Mesh(4, 29500, 29510, (29500,), (), 3, 3, 3, reached, blocked, 1.0, 1.0, "b")
    passed = mesh_passed(Snapshot({"proof": Proved(Unknown("x"), mesh=mesh)}))
    before, result = (
        by_id(checks, held, fleet=fleet)["ports.firewall"]
        for fleet in (ALONE, FleetFacts(mesh_passed=passed))
    )
    assert before.status == "warn"
    assert ("nodeready ready" in before.fix) == (status != "varies")
    if status == "varies":
        assert result.status == "warn"
        assert "passed, but they do not show what it does to a job's" in result.actual
        return
    assert result.status == status, result
    assert rule in result.actual
    assert ("proof.mesh" in result.actual) == (status == "ok")

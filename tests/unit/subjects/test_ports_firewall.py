"""What rules do with a new connection from another node, as their tools print them.

data/firewalld.nft is what firewalld 1.3.3 made, data/ufw.save what ufw 0.36.2 made, both with
their defaults on Debian 12, recorded by the tools of the same system; chains for forwarded and
outgoing packets left out. The others have the form of what Docker and kube-proxy make.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeready.policy import Policy
from nodeready.subjects.base import Output, Unknown
from nodeready.subjects.context import FleetContext
from nodeready.subjects.ports import checks, firewall
from nodeready.subjects.ports.firewall import Firewall
from nodeready.subjects.proof.facts import Blocked, Mesh, Proved
from nodeready.subjects.snapshot import Snapshot
from tests.builders.job_env import ports
from tests.builders.judging import by_id

DATA = Path(__file__).parent / "data" / "ports"
POLICY = Policy()
OWN = ("10.1.0.5", "192.168.7.5")
V6 = (*OWN, "2001:db8::5")
FIREWALLD = (DATA / "firewalld.nft").read_text()
UFW = (DATA / "ufw.save").read_text()

BASE = "type filter hook input priority filter; policy"


def tool(name: str, text: str, status: str = "0") -> str:
    return f"\n@ tool {name}\n{text}\n@ status {status}\n"


def evaluated(
    *pieces: str, own: tuple[str, ...] = OWN, rc: int | None = 0, policy: Policy = POLICY
) -> Firewall:
    return firewall.parse(Output("".join(pieces), rc), policy, own)


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


DOCKER = (DATA / "docker.save").read_text()
KUBERNETES = (DATA / "kubernetes.save").read_text()
KUBE_PROXY_NFT = (DATA / "kube-proxy.nft").read_text()

STATEFUL = ("ct state established,related accept", 'iifname "lo" accept', "ct state invalid drop")


@pytest.mark.parametrize(
    ("rules", "verdict", "rule", "manager"),
    [
        pytest.param(tool("nft", ""), "open", "", "", id="no_rules"),
        pytest.param(tool("nft", FIREWALLD), "dropped", "reject with icmpx admin-prohibited",
                     "firewalld", id="firewalld"),
        pytest.param(tool("nft", FIREWALLD.replace("tcp dport 22", "tcp dport 29000-30000")),
                     "open", "", "firewalld", id="firewalld_open"),
        pytest.param(tool("iptables-nft", UFW), "dropped", "policy drop", "ufw", id="ufw"),
        pytest.param(tool("iptables-nft", UFW.replace(
            "--dport 22 ", "-m multiport --dports 22,29500:29510 ")), "open", "", "ufw",
            id="ufw_open"),
        pytest.param(tool("iptables-nft", UFW.replace(
            "-p tcp -m tcp --dport 22 ", "-s 10.1.0.0/16 -p tcp -m tcp --dport 29500:29510 ")),
            "cannot tell", "-s 10.1.0.0/16 -p tcp -m tcp --dport 29500:29510 -j ACCEPT", "ufw",
            id="ufw_from_a_network"),
        pytest.param(tool("iptables-nft", DOCKER), "open", "", "iptables", id="docker"),
        pytest.param(tool("iptables-nft", KUBERNETES), "open", "", "iptables", id="kubernetes"),
        pytest.param(tool("nft", KUBE_PROXY_NFT), "open", "", "nftables", id="kube_proxy_nft"),
        pytest.param(tool("nft", KUBE_PROXY_NFT.replace("10.43.9.9 . tcp . 29500",
                     "10.1.0.5 . tcp . 29500")), "cannot tell", "reject", "nftables",
                     id="kube_proxy_nft_for_one_of_our_addresses"),
        pytest.param(iptables(), "dropped", "policy drop", "iptables", id="iptables_P_INPUT_DROP"),
        pytest.param(iptables(name="iptables"), "dropped", "policy drop", "iptables",
                     id="iptables_legacy"),
        pytest.param(tool("nft", "") + iptables(name="iptables"), "dropped", "policy drop",
                     "iptables", id="legacy_beside_nft"),
        pytest.param(nft("ct state established accept", "tcp dport { 22, 443, 29000-31000 } "
        "accept")
                     + tool("iptables-nft",
                     "# Table `filter' contains incompatible base-chains, use 'nft' tool.\n"
                     "*filter\n:INPUT DROP [0:0]\nCOMMIT"), "open", "", "nftables",
                     id="iptables_save_of_a_table_it_cannot_show"),
    ],
)  # fmt: skip
def test_what_the_usual_firewalls_do(rules: str, verdict: str, rule: str, manager: str) -> None:
    seen = evaluated(rules)
    assert (seen.verdict, seen.rule, seen.manager) == (verdict, rule, manager)


# In a chain that drops what its rules do not accept.
@pytest.mark.parametrize(
    ("rules", "verdict"),
    [
        (("accept",), "open"),
        (("tcp dport 29500-29510 accept",), "open"),
        (("tcp dport >= 1024 accept",), "open"),
        (("tcp dport > 29500 accept",), "dropped"),
        (("tcp dport != 22 accept",), "open"),
        (("tcp dport { 29500, 29501-29505, 29506-29600 } accept",), "open"),
        (("tcp dport { 29500, 29502-29600 } accept",), "dropped"),
        (("th dport 29500-29510 counter packets 1 bytes 60 accept",), "open"),
        (("udp dport 29500-29510 accept",), "dropped"),
        (("udp dport != 53 accept",), "dropped"),
        (("meta l4proto { tcp, udp } th dport 1-65535 accept",), "open"),
        (("ip protocol icmp accept", "ip6 nexthdr tcp accept"), "dropped"),
        (("ct state new tcp dport 20000-30000 log prefix \"in: \" accept",), "open"),
        (("ct state vmap { established : accept, related : accept, new : jump in }",), "open"),
        (("tcp dport vmap { 22 : accept, 29500-29510 : goto in }",), "open"),
        (("tcp dport vmap @ports",), "open"),
        (("tcp dport @allowed accept",), "open"),
        (("tcp dport @nobody accept",), "dropped"),
        (("tcp dport @learnt accept",), "dropped"),
        (("tcp dport @missing accept",), "cannot tell"),
        (("ip saddr 10.1.0.0/16 accept",), "cannot tell"),
        (("ip saddr 0.0.0.0/0 accept",), "open"),
        (("ip saddr 127.0.0.0/8 accept", "ip saddr 224.0.0.0/4 accept"), "dropped"),
        (("ip saddr . tcp dport { 10.1.0.9 . 29500-29510 } accept",), "cannot tell"),
        (("ip saddr . tcp dport { 10.1.0.9 . 22 } accept",), "dropped"),
        (("ip daddr { 10.1.0.5, 192.168.7.5 } tcp dport 29500-29510 accept",), "cannot tell"),
        (("ip daddr 0.0.0.0/0 tcp dport 29500-29510 accept",), "open"),
        (('iifname "eth0" accept',), "cannot tell"),
        (('iifname { "lo", "docker0", "br-0123456789ab" } accept',), "dropped"),
        (('iifname != "lo" accept',), "open"),
        (('meta iifname . tcp dport { "ib0" . 29500-29510 } accept',), "cannot tell"),
        (("limit rate 5/second accept",), "cannot tell"),
        (("meta mark 0x00000001 accept", "meta mark & 0x01 == 0x01 accept"), "dropped"),
        (("meta mark set 0x00000001", "meta mark 0x00000001 accept"), "open"),
        (("meta mark set jhash ip saddr mod 2", "meta mark 0x00000001 accept"), "cannot tell"),
        (("tcp flags syn / fin,syn,rst,ack accept",), "open"),
        (("tcp flags & (fin | syn | rst | ack) == ack accept",), "dropped"),
        (("jump in",), "open"),
        (("jump out", "jump in"), "open"),
        (("goto out", "accept"), "dropped"),
        (("jump nowhere",), "dropped"),
        (("jump loop",), "cannot tell"),
        (("queue flags bypass to 0",), "cannot tell"),
        (("something new 5 accept",), "cannot tell"),
        (("xt match \"bpf\" counter accept",), "cannot tell"),
        (("# xt_recent counter accept",), "cannot tell"),
        (("xt target \"LOG\"", "accept"), "open"),
        (("xt target \"REJECT\"", "accept"), "dropped"),
    ],
)  # fmt: skip
def test_only_what_surely_lets_everybody_in_opens(rules: tuple[str, ...], verdict: str) -> None:
    more = (
        "\tset allowed {\n\t\ttype inet_service\n\t\tflags interval\n"
        "\t\telements = { 22, 80-90,\n\t\t\t     29500-29510 }\n\t}\n"
        "\tset nobody {\n\t\ttype inet_service\n\t}\n"
        "\tset learnt {\n\t\ttype inet_service\n\t\tflags dynamic,timeout\n\t}\n"
        "\tmap ports {\n\t\ttype inet_service : verdict\n\t\tflags interval\n"
        "\t\telements = { 22 : drop, 29500-29510 : accept }\n\t}\n"
        "\tchain in {\n\t\ttcp dport 29500-29510 accept\n\t}\n"
        "\tchain out {\n\t\treturn\n\t\taccept\n\t}\n"
        "\tchain loop {\n\t\tjump loop\n\t}\n"
    )
    assert evaluated(nft(*STATEFUL, *rules, more=more)).verdict == verdict


# In a chain that accepts what its rules do not drop.
@pytest.mark.parametrize(
    ("rules", "verdict", "ports"),
    [
        (STATEFUL, "open", "29500-29510"),
        (("tcp dport 29505 drop",), "dropped", "29505"),
        (("tcp dport { 29500, 29502-29503, 29510 } reject with tcp reset",), "dropped",
         "29500, 29502-29503, 29510"),
        (("ct state established accept", "tcp dport 29000-29999 accept", "drop"), "open",
         "29500-29510"),
        (("tcp dport 29000-29999 accept", "drop"), "dropped", "29500-29510"),
        (("ip saddr 203.0.113.0/24 drop",), "cannot tell", "29500-29510"),
        (("ip saddr 10.1.0.5 drop",), "open", "29500-29510"),
        (("ip daddr 10.1.0.5 tcp dport 29500 drop",), "cannot tell", "29500"),
        (("ip daddr { 10.0.0.0/8, 192.168.0.0/16 } drop",), "cannot tell", "29500-29510"),
        (("ip daddr 172.16.0.0/12 drop", "fib daddr type { broadcast, multicast } drop"), "open",
         "29500-29510"),
        (("fib saddr . iif oif missing drop", "fib saddr . iif check missing drop"), "open",
         "29500-29510"),
        (("tcp flags != syn ct state new drop", "meta pkttype broadcast drop"), "open",
         "29500-29510"),
        (("tcp dport 22 ct state new limit rate over 3/minute drop",), "open", "29500-29510"),
        (("ip6 saddr 2001:db8::/32 drop",), "open", "29500-29510"),
    ],
)  # fmt: skip
def test_a_drop_of_some_ports_is_found(rules: tuple[str, ...], verdict: str, ports: str) -> None:
    seen = evaluated(nft(*rules, policy="accept"))
    assert (seen.verdict, seen.ports) == (verdict, ports)


@pytest.mark.parametrize(
    ("rules", "verdict"),
    [
        (("-A INPUT -p tcp -m tcp --dport 29500:29510 -j ACCEPT",), "open"),
        (("-A INPUT -p udp -m udp --dport 29500:29510 -j ACCEPT",), "dropped"),
        (("-A INPUT ! -p tcp -j ACCEPT",), "dropped"),
        (("-A INPUT ! -p udp -j ACCEPT",), "open"),
        (("-A INPUT -i lo -j ACCEPT", "-A INPUT ! -i lo -j ACCEPT"), "open"),
        (("-A INPUT -i eth+ -j ACCEPT",), "cannot tell"),
        (("-A INPUT -m state --state NEW -m tcp -p tcp --dport 1:65535 -j ACCEPT",), "open"),
        (("-A INPUT -m state --state RELATED,ESTABLISHED -j ACCEPT",), "dropped"),
        (("-A INPUT -m set --match-set cluster src -j ACCEPT",), "cannot tell"),
        (("-A INPUT -p tcp --syn -j ACCEPT",), "open"),
        (("-A INPUT -p tcp -m tcp ! --tcp-flags FIN,SYN,RST,ACK SYN -j ACCEPT",), "dropped"),
        (("-A INPUT -m rpfilter --invert -j ACCEPT",), "dropped"),
        (("-A INPUT -m rt --rt-type 0 -j ACCEPT",), "dropped"),
        (("-A INPUT -m time --timestart 08:00 -j ACCEPT",), "cannot tell"),
        (('-A INPUT -m comment --comment "-j DROP" -j ACCEPT',), "open"),
        (('-A INPUT -m comment --comment "no end -j ACCEPT',), "cannot tell"),
        (("-A INPUT -j MARK --set-xmark 0x1/0xffffffff", "-A INPUT -m mark --mark 0x1 -j ACCEPT"),
         "open"),
        (("-A INPUT -j LOG", "-A INPUT -j RETURN", "-A INPUT -j ACCEPT"), "dropped"),
        (("-A INPUT -j NFQUEUE --queue-num 0",), "cannot tell"),
        (("-A INPUT -g allow",), "open"),
        (("-A INPUT -j", "-A INPUT", "-A", "-A INPUT -s"), "dropped"),
    ],
)  # fmt: skip
def test_rules_of_iptables(rules: tuple[str, ...], verdict: str) -> None:
    answers = "-A INPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT"
    allow = (":allow - [0:0]", "-A allow -j ACCEPT")
    assert evaluated(iptables(*allow, answers, *rules)).verdict == verdict


def test_every_base_chain_on_the_way_counts() -> None:
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


@pytest.mark.parametrize(
    ("rules", "verdict", "let_in"),
    [
        (("ip saddr 10.1.0.0/16 tcp dport 29500-29510 accept",), "cannot tell", ["10.1.0.0/16"]),
        (("ip saddr { 10.0.0.0/8, 192.168.0.0/16 } accept",), "open", [*"ab"]),
        (("ip saddr 10.1.0.0/24 accept",), "cannot tell", []),
        (("ip saddr 172.16.0.0/12 accept",), "dropped", []),
        (('iifname "eth0" accept',), "cannot tell", ["10.1.0.0/16"]),
        (('iifname { "eth*", "ib0" } accept',), "open", [*"ab"]),
        (('iifname "eth0" ip saddr 10.1.0.0/16 accept', 'iifname "ib0" goto in'), "open", [*"ab"]),
        (("ip saddr 203.0.113.7 drop", "accept"), "open", [*"ab"]),
        (("ip saddr @blocked drop", "accept"), "open", [*"ab"]),
        (("ip saddr 10.1.3.0/24 drop", "accept"), "cannot tell", ["192.168.7.0/24"]),
        (("limit rate 5/second accept",), "cannot tell", []),
    ],
)
def test_peers_are_looked_for_in_the_nodes_own_networks(
    rules: tuple[str, ...], verdict: str, let_in: list[str]
) -> None:
    more = (
        "\tchain in {\n\t\taccept\n\t}\n"
        "\tset blocked {\n\t\ttype ipv4_addr\n\t\telements = { 203.0.113.8 }\n\t}\n"
    )
    networks = (("eth0", "10.1.0.0/16"), ("ib0", "192.168.7.0/24"))
    output = Output(nft(*STATEFUL, *rules, more=more), 0)
    seen = firewall.parse(output, POLICY, OWN, networks)
    assert seen.verdict == verdict
    if verdict == "open":
        assert len(seen.networks) == len(let_in)
    else:
        assert [text.partition(" ")[0] for text in seen.networks] == let_in
    assert firewall.parse(output, POLICY, OWN).verdict == "cannot tell"


def test_a_drop_of_ipv6_is_seen_beside_networks_that_get_in() -> None:
    v6 = f"table ip6 f {{\n\tchain c {{\n\t\t{BASE} drop;\n\t}}\n}}\n"
    rules = nft("meta nfproto ipv6 accept", "ip saddr 10.0.0.0/8 accept") + tool("nft", v6)
    networks = (("eth0", "10.1.0.0/16"),)
    assert firewall.parse(Output(rules, 0), POLICY, OWN, networks).verdict == "open"
    seen = firewall.parse(Output(rules, 0), POLICY, V6, networks)
    assert (seen.verdict, seen.ports) == ("cannot tell", "29500-29510 over IPv6")


def test_ipv6_counts_where_the_node_has_an_address() -> None:
    only = tool("nft", f"table ip6 filter {{\n\tchain c {{\n\t\t{BASE} drop;\n\t}}\n}}\n")
    assert evaluated(only).verdict == "open"
    seen = evaluated(only, own=V6)
    assert (seen.verdict, seen.ports) == ("cannot tell", "29500-29510 over IPv6")
    assert evaluated(nft(), own=V6).verdict == "dropped"


@pytest.mark.parametrize(
    ("pieces", "rc", "reason"),
    [
        ((tool("nft", "", "root"),), 0, "seen by root alone"),
        ((tool("nft", "Error: Operation not permitted", "1"),), 0, "seen by root alone"),
        ((tool("nft", "", "missing"),), 0, "nft is not installed"),
        (
            (tool("nft", "the kernel has the tables inet a", "missing"),),
            0,
            "nft is not installed, and the kernel has the tables inet a",
        ),
        ((tool("nft", "\x1b[2J" * 99, "missing"),), 0, "nft is not installed, and \x1b"),
        ((tool("iptables", "", "missing"), tool("nft", "")), 0, "iptables is not installed"),
        ((tool("nft", "Error: syntax\nmore", "1"),), 0, "nft failed Error: syntax"),
        ((tool("nft", "", "odd"),), 0, "a table with an odd name"),
        (("\n@ tool nft\ntable inet x {\n\tchain i",), None, "timed out"),
        (("",), 7, "exit status 7"),
    ],
)
def test_rules_that_cannot_be_seen_are_unknown(
    pieces: tuple[str, ...], rc: int | None, reason: str
) -> None:
    seen = evaluated(*pieces, rc=rc)
    assert seen.verdict == "unknown"
    assert reason in seen.reason


def test_too_many_rules_are_unknown() -> None:
    seen = firewall.parse(Output("\n@ tool nft\n" + "x" * 99, None, truncated=True), POLICY, OWN)
    assert (seen.verdict, seen.reason) == ("unknown", "the ruleset is too large")


def test_what_iptables_shows_does_without_nft() -> None:
    seen = evaluated(tool("nft", "", "missing"), iptables("-A INPUT -j ACCEPT"))
    assert (seen.verdict, [t.state for t in seen.tools]) == ("open", ["missing", "ok"])


@pytest.mark.parametrize(
    ("status", "state"), [("none", "no rules"), ("unseen", "no sign of rules")]
)
def test_a_node_without_nft_and_without_a_sign_of_rules_is_open(status: str, state: str) -> None:
    seen = evaluated(tool("nft", "", status))
    assert (seen.verdict, [t.state for t in seen.tools]) == ("open", [state])
    # What another program shows still counts.
    assert evaluated(tool("nft", "", status), iptables()).verdict == "dropped"
    legacy = tool("iptables", "the kernel has the tables filter", "missing")
    assert evaluated(tool("nft", "", status), legacy).verdict == "unknown"


def test_a_kernel_without_nf_tables_has_no_rules() -> None:
    said = "nft: Unable to initialize Netlink socket: Protocol not supported"
    assert evaluated(tool("nft", said, "3")).verdict == "open"


@pytest.mark.parametrize(
    "text",
    [
        "table", "table inet", "table inet x {", "}" * 5000, "{" * 5000,
        "table inet x { chain c {\n" + BASE + " drop;\n" + "tcp dport { " * 500,
        "table inet x {\n chain c {\n" + BASE + " accept;\n" + "tcp dport\nvmap\n& (\n.\nct\nfib\n"
        "jump\nlog\ncounter packets\nip saddr {\n} }\nset s { elements = { : } }\n}\n}",
        "\x1b[2J[/red] table inet \udcff { chain \udcfe {\n type filter hook input\n '\"\n}\n}",
        '"' * 9999, "table ip filter {\n chain c {\n type filter hook\n policy\n}\n}",
        "tabla de filtro {\n}\n", "*filter\n:INPUT\n:\n-A\n-A INPUT -j\n",
    ],
)  # fmt: skip
def test_hostile_text_is_never_an_error(text: str) -> None:
    for name in ("nft", "iptables-nft", "ip6tables", "\x1b[31m"):
        assert evaluated(tool(name, text)).verdict in ("dropped", "cannot tell", "unknown")


def test_rules_for_very_many_ports_are_not_looked_at_one_by_one() -> None:
    rules = [f"tcp dport {port} accept" for port in range(1100, 3000, 2)]
    wide = Policy(port_range=(1024, 65535))
    seen = evaluated(nft(*rules), policy=wide)
    assert (seen.verdict, seen.rule) == ("cannot tell", "1901 pieces of it")


def data(name: str) -> str:
    """What a tool printed of the rules of data/ports/NAME."""
    text = (DATA / name).read_text()
    return tool("nft" if name.endswith(".nft") else "iptables-nft", text)


DENIED = "create chain_DENY hash:net family inet\nadd chain_DENY 203.0.113.0/24\n"
NETS = (("eth0", "10.1.0.0/16"), ("ib0", "192.168.7.0/24"))
LANS = ("10.1.0.5", "192.168.7.5")


# The form of what these make, composed: as they leave the ports open, and changed so that they
# shut them. Sources: fail2ban's action.d/nftables.conf, cs-firewall-bouncer, firewalld 2.x
# (policies and zones as nft lists them), Felix (projectcalico), cilium's iptables.go, csf,
# libvirt's network rules, amazon-vpc-cni and kube-proxy.
@pytest.mark.parametrize(
    ("rules", "verdict", "words"),
    [
        pytest.param(data("fail2ban.nft"), "open", "", id="fail2ban"),
        pytest.param(data("fail2ban.nft").replace("192.0.2.0/28", "10.0.0.0/8").replace(
            "elements = { 203.0.113.4", "elements = { 192.168.0.0/16, 203.0.113.4"),
            "cannot tell", "@addr-set-recidive", id="fail2ban_bans_a_network_of_ours"),
        pytest.param(data("crowdsec.nft"), "open", "", id="crowdsec"),
        pytest.param(data("crowdsec.nft").replace("203.0.113.9 timeout", "10.1.7.7 timeout"),
                     "cannot tell", "crowdsec-blacklists", id="crowdsec_bans_somebody_near"),
        pytest.param(data("firewalld2.nft"), "cannot tell", "", id="firewalld2_one_network"),
        pytest.param(data("firewalld2.nft").replace("{ 10.1.0.0/16 }", "{ 10.0.0.0/8, "
                     "192.168.0.0/16 }"), "open", "", id="firewalld2"),
        pytest.param(data("firewalld2.nft").replace("tcp dport 29500-29510 accept", ""), "dropped",
                     "reject with icmpx admin-prohibited", id="firewalld2_shut"),
        pytest.param(data("calico.save"), "open", "", id="calico_host_endpoint"),
        pytest.param(data("calico.save").replace("22,29500:29510", "22"), "cannot tell",
                     "cali-fhfw-eth0", id="calico_host_endpoint_shut"),
        pytest.param(data("cilium.save"), "open", "", id="cilium"),
        pytest.param(data("cilium.save") + tool("nft", nft().split("\n", 2)[2].rpartition(
            "\n@")[0]),
                     "dropped", "policy drop", id="cilium_beside_a_shut_table"),
        pytest.param(data("csf.save") + tool("ipset", DENIED), "open", "", id="csf"),
        pytest.param(data("csf.save"), "cannot tell", "chain_DENY", id="csf_without_its_ipset"),
        pytest.param(data("csf.save").replace("100/sec --limit-burst 150", "2/sec --limit-burst 5")
                     + tool("ipset", DENIED), "cannot tell", "--limit 2/sec", id="csf_synflood"),
        pytest.param(data("csf.save").replace("NEW -m tcp --dport 29500:29510", "NEW -m tcp "
                     "--dport 443") + tool("ipset", DENIED), "dropped", "-j DROP", id="csf_shut"),
        pytest.param((data("csf.save") + tool("ipset", DENIED)).replace(
                     "-A OUTPUT ! -o lo -p tcp -m conntrack --ctstate NEW -m tcp --dport "
                     "29500:29510",
                     "-A OUTPUT ! -o lo -p tcp -m conntrack --ctstate NEW -m tcp --dport 443"),
                     "dropped", "-j REJECT", id="csf_shuts_the_way_out"),
        pytest.param(data("libvirt.nft"), "open", "", id="libvirt"),
        pytest.param(data("eks.save"), "open", "", id="eks"),
        pytest.param(data("eks.save").replace("--dport 30080 -j", "--dport 29505 -j"), "dropped",
                     "DNAT --to-destination 10.1.200.7:443", id="eks_node_port_in_the_range"),
        pytest.param(data("ufw.save").replace("--dport 22 ", "--dport 29500:29510 "), "open", "",
                     id="ufw_allow"),
    ],
)  # fmt: skip
def test_what_other_managers_of_rules_do(rules: str, verdict: str, words: str) -> None:
    seen = firewall.parse(Output(rules, 0), POLICY, LANS, NETS)
    assert seen.verdict == verdict, seen
    assert words in f"{seen.rule} {seen.chain}"


#: Peers of the node, by /etc/hosts.
HOSTS = ("10.1.0.11", "10.1.0.12", "192.168.7.11", "192.168.7.12", "203.0.113.80")


@pytest.mark.parametrize(
    ("rules", "unknown", "known"),
    [
        # An accepted list of nodes; one that lacks a node.
        (("ip saddr { 10.1.0.11, 10.1.0.12, 192.168.7.0/24 } accept",), "cannot tell", "open"),
        (("ip saddr { 10.1.0.11, 192.168.7.0/24 } accept",), "cannot tell", "cannot tell"),
        (("ip saddr 10.1.200.0/24 accept", "ip saddr 192.168.7.200 accept"), "cannot tell",
         "dropped"),
        # Banned are others.
        (("ip saddr 10.1.77.7 drop", "accept"), "cannot tell", "open"),
        (("ip saddr { 10.1.0.11, 192.168.7.11 } drop", "accept"), "cannot tell", "cannot tell"),
        (('iifname "mgmt0" accept',), "dropped", "dropped"),
        (("ip saddr 172.20.0.0/16 tcp dport 29500-29510 accept",), "dropped", "dropped"),
    ],
)  # fmt: skip
def test_peers_that_are_known_decide(rules: tuple[str, ...], unknown: str, known: str) -> None:
    output = Output(nft(*STATEFUL, *rules), 0)
    assert firewall.parse(output, POLICY, LANS, NETS).verdict == unknown
    assert firewall.parse(output, POLICY, LANS, NETS, peers=HOSTS).verdict == known


def test_a_node_of_the_fleet_that_is_shut_out_is_no_doubt() -> None:
    output = Output(nft("ip saddr 10.1.0.11 drop", policy="accept"), 0)
    seen = firewall.parse(output, POLICY, LANS, NETS)
    assert seen.verdict == "cannot tell"
    found = firewall.among(seen, ("10.1.0.5", "10.1.0.11", "10.1.0.12"))
    assert (found.verdict, found.peers, found.rule) == (
        "dropped", "1 of 2", "ip saddr 10.1.0.11 drop",
    )  # fmt: skip
    assert firewall.among(seen, ("10.1.0.5", "10.1.0.13")).verdict == "open"


def test_the_rule_that_lets_others_in_is_named_beside_the_drop() -> None:
    output = Output(nft(*STATEFUL, "ip saddr 172.20.0.0/16 accept"), 0)
    seen = firewall.parse(output, POLICY, LANS, NETS)
    assert (seen.rule, seen.beside) == ("policy drop", "ip saddr 172.20.0.0/16 accept")


# What a packet of another kind meets: which packets are lost, in words.
@pytest.mark.parametrize(
    ("hook", "rule", "what"),
    [
        ("output", "tcp sport 29500-29510 drop", "the answers from {}"),
        ("output", "tcp dport 29500-29510 drop", "the way to other nodes' {}"),
        ("output", "ct direction reply tcp flags & syn == 0x0 drop", "what follows from {}"),
        ("input", "tcp sport 29500-29510 reject", "the answers of other nodes' {}"),
        ("input", "ct state established ct direction original drop", "what follows to {}"),
        ("postrouting", "ct direction original tcp flags ! syn drop",
         "what follows to other nodes' {}"),
        ("prerouting", "ct direction reply tcp flags ! syn drop", "what other nodes' {} send"),
    ],
)  # fmt: skip
def test_the_packets_that_are_lost_are_named(hook: str, rule: str, what: str) -> None:
    base = f"type filter hook {hook} priority 0; policy accept;"
    text = f"table inet t {{\n\tchain c {{\n\t\t{base}\n\t\t{rule}\n\t}}\n}}\n"
    seen = evaluated(tool("nft", text))
    assert (seen.verdict, seen.what) == ("dropped", what)


def test_nat_that_was_cut_off_is_not_judged() -> None:
    nat = "table ip nat {\n\tchain PREROUTING {\n\t\ttcp dport 29500 dnat to 10.9.9.9\n# cut\n"
    assert evaluated(tool("nft", ""), tool("nft-nat", nat)).verdict == "open"
    saved = "*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -j DNAT --to-destination 10.9.9.9\n"
    both = f"*filter\n:INPUT DROP [0:0]\nCOMMIT\n{saved}# cut"
    assert evaluated(tool("iptables-nft", f"{saved}# cut")).verdict == "open"
    assert evaluated(tool("iptables-nft", both)).rule == "policy drop"
    assert evaluated(tool("iptables-nft", f"{saved}COMMIT")).verdict == "dropped"
    # A set that nobody could list, and NAT that could not be, cost nothing else.
    assert evaluated(tool("nft", ""), tool("nft-nat", "Error", "1")).verdict == "open"


@pytest.mark.parametrize(
    ("reached", "blocked", "status"),
    [
        (3, (), "ok"),
        (2, (), "warn"),
        (3, (Blocked("target", (29500,), ("b",), 3, "c", None),), "warn"),
    ],
)
def test_the_mesh_decides_what_the_rules_leave_open(
    reached: int, blocked: tuple[Blocked, ...], status: str
) -> None:
    rules = firewall.parse(Output(nft("limit rate 3/minute accept"), 0), POLICY, LANS, NETS)
    held = ports(firewall=rules)
    mesh = Mesh(4, 29500, 29510, (29500,), (), 3, 3, 3, reached, blocked, 1.0, 1.0, "b")
    seen = Snapshot({"ports": held, "proof": Proved(Unknown("x"), mesh=mesh)})
    done = FleetContext({}).completed("a", seen)
    result = by_id(checks, done.subjects["ports"])["ports.firewall"]
    assert result.status == status, result
    assert "limit rate 3/minute accept" in result.actual
    assert ("proof.mesh" in result.actual) == (status == "ok")
    assert "nodeready ready" in by_id(checks, held)["ports.firewall"].fix

"""Real listeners, real packet filter rules and real kernel settings on real nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nodeready.lab import Lab, LabNode
from nodeready.policy import Policy
from nodeready.subjects.judging import judge
from nodeready.subjects.result import Result
from tests.command import wait_for
from tests.helpers import observe
from tests.lab.looks import judged
from tests.lab.rows import rows

POLICY = Policy()
GOOD = dict.fromkeys(
    ("ports.range", "ports.ephemeral", "ports.firewall", "ports.privileged"), "ok"
)
# Says that it listens, then counts who comes. What it was started with ends it.
LISTENER = """
import socket, sys
s = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind((sys.argv[1], int(sys.argv[2])))
s.listen()
print("listening", file=open(sys.argv[3], "w"))
while True:
    s.accept()
    print("somebody came", file=open(sys.argv[3], "a"))
"""


def looked(node: LabNode) -> dict[str, Result]:
    return judged(node, POLICY, "ports")


def statuses(results: dict[str, Result]) -> dict[str, str]:
    return {check: result.status for check, result in results.items()}


def soon(node: LabNode, command: str) -> None:
    """Until the command says yes: it waits for another process."""
    wait_for(lambda: node.run(command, check=False).returncode == 0)


@contextmanager
def listener(node: LabNode, user: str, address: str, port: int) -> Iterator[str]:
    """A program that listens; gives the file in which it says who came."""
    said = f"/tmp/{user}-{port}"
    node.write("/tmp/listener.py", LISTENER, 0o644)
    node.run(
        f"setsid python3 /tmp/listener.py {address} {port} {said} >/dev/null 2>&1 </dev/null & "
        f"echo $! > {said}.pid",
        user=user,
    )
    soon(node, f"grep -q listening {said}")
    try:
        yield said
    finally:
        node.run(f"kill $(cat {said}.pid)", check=False)


@pytest.fixture
def node(lab: Lab) -> LabNode:
    """A node that other tests share: each leaves it as it was."""
    return lab.nodes[0]


def test_a_listener_is_named_and_never_touched(node: LabNode) -> None:
    for user, address, status in (("ml", "::", "warn"), ("root", "0.0.0.0", "fail")):
        with listener(node, user, address, 29504) as log:
            results = looked(node)
            pid = node.read(f"{log}.pid").strip()
            assert statuses(results) == {**GOOD, "ports.range": status}
            assert f"29504 by python3 (pid {pid}, user {user})" in results["ports.range"].actual
            assert node.read(log) == "listening\n"
            # It does notice when somebody comes.
            connect = 'import socket; socket.create_connection(("localhost", 29504))'
            node.run(f"python3 -c '{connect}'")
            soon(node, f"grep -q came {log}")
        soon(node, "! ss -Hltn sport = 29504 | grep .")
    with listener(node, "ml", "0.0.0.0", 29499):
        assert statuses(looked(node)) == GOOD


def test_another_user_sees_the_port_but_not_its_process(node: LabNode) -> None:
    with listener(node, "root", "0.0.0.0", 29510):
        seen = observe(lambda c, i="": node.run(c, "ml", i, False), POLICY, ("ports",))
    results = {result.check: result for result in judge(seen, POLICY, subjects=("ports",))}
    assert results["ports.range"].actual == "29510 by a process (user root)"
    assert results["ports.firewall"].status in ("unknown", "ok")


def test_what_nft_drops_is_found_and_stays(node: LabNode) -> None:
    """What rules mean is asked of connections, in test_ports_traffic."""
    state = "nft list ruleset; ls /tmp /run; sysctl net.ipv4 2>/dev/null | grep port; ss -Hltn"
    base = "add table inet t; add chain inet t in { type filter hook input priority 0; }"
    job = "add chain inet t job; add rule inet t job tcp dport { 29000-29600 } drop; "
    for rules, status, part in (
        ("add rule inet t in tcp sport 40000 drop", "warn", "depends on tcp sport 40000"),
        (f"{job}add rule inet t in tcp dport vmap {{ 29505 : jump job }}", "fail", "inet t job"),
    ):
        node.enter(["nft", f"{base}; {rules}"])
        before = node.run(state).stdout
        results = looked(node)
        assert node.run(state).stdout == before
        node.enter(["nft", "delete table inet t"])
        assert statuses(results) == {**GOOD, "ports.firewall": status}, rules
        firewall = results["ports.firewall"]
        assert part in f"{firewall.actual} {firewall.source}"
    assert statuses(looked(node)) == GOOD


def test_the_tables_of_all_families_are_seen_and_busyboxs_find_does(fresh_node: LabNode) -> None:
    fresh_node.write("/usr/local/bin/find", '#!/bin/sh\nexec busybox find "$@"\n', 0o755)
    with listener(fresh_node, "ml", "0.0.0.0", 29500):
        assert "29500 by python3 (pid " in looked(fresh_node)["ports.range"].actual
    for family in ("ip", "ip6", "inet"):
        for name in ("filter", "nat", "a"):
            fresh_node.enter(["nft", f"add table {family} {name}"])
    assert statuses(looked(fresh_node)) == GOOD
    base = "add chain ip a in { type filter hook prerouting priority 0; policy drop; }"
    fresh_node.enter(["nft", f"{base}; add rule ip a in tcp dport 22 accept; "
                      "add rule ip a in tcp sport 22 accept"])  # fmt: skip
    assert looked(fresh_node)["ports.firewall"].source == "ip a in (nftables)"
    fresh_node.enter(["nft", "; ".join(f"add table inet t{number}" for number in range(20))])
    assert looked(fresh_node)["ports.firewall"].source == "ip a in (nftables)"


# A name cannot become a command, whatever it is.
_ODD = """[ "$*" = "list tables" ] || { echo "$*" >/tmp/asked; exec false; }
echo 'table inet a;flush ruleset'"""
_ENDLESS = "while :; do echo 'table inet x {'; done"
#: What nft does -> the reason.
BROKEN = {
    _ODD: "a table with an odd name",
    "exec sleep 600": "timed out",
    f"[ \"$*\" != 'list tables' ] || exec echo table inet x; {_ENDLESS}": "too large",
}


@pytest.mark.parametrize("script", rows(BROKEN, _ODD))
def test_a_broken_nft_costs_the_firewall_alone(fresh_node: LabNode, script: str) -> None:
    fresh_node.write("/usr/local/bin/nft", f"#!/bin/sh\n{script}\n", 0o755)
    results = looked(fresh_node)
    assert statuses(results) == {**GOOD, "ports.firewall": "unknown"}
    assert BROKEN[script] in results["ports.firewall"].actual
    assert fresh_node.run("cat /tmp/asked", check=False).stdout == ""


@pytest.fixture
def without_nft(fresh_node: LabNode) -> LabNode:
    """A node on which nothing lists rules; its /root/nft is for making them."""
    fresh_node.run("mv /usr/sbin/nft /root/nft; rm -f /usr/sbin/*tables*-save")
    return fresh_node


def test_without_nft_the_kernel_says_whether_there_are_rules(without_nft: LabNode) -> None:
    results = looked(without_nft)
    assert statuses(results) == GOOD
    assert results["ports.firewall"].actual == "open, no rules"
    # NAT is not judged, and so asks for no program.
    without_nft.enter(["/root/nft", "add table ip nat; add table arp a"])
    assert statuses(looked(without_nft)) == GOOD
    without_nft.enter(["/root/nft", "; ".join(f"add table inet t{n:03}" for n in range(300))])
    results = looked(without_nft)
    assert statuses(results) == {**GOOD, "ports.firewall": "unknown"}
    reason = results["ports.firewall"].actual
    assert reason.startswith("nft is not installed, and the kernel has the tables inet t000, ")


# A firewall that is enabled, as its package or its administrator leaves it.
ENABLED = {
    "nftables": "mkdir -p /etc/systemd/system/sysinit.target.wants; "
    "ln -s /lib/x /etc/systemd/system/sysinit.target.wants/nftables.service",
    "ufw": "mkdir -p /etc/ufw; echo ENABLED=yes >/etc/ufw/ufw.conf",
}


@pytest.mark.parametrize("what", rows(ENABLED, "nftables"))
def test_without_nft_and_python_a_sign_of_rules_is_enough(without_nft: LabNode, what: str) -> None:
    python = without_nft.run("readlink -f /usr/bin/python3").stdout.strip()
    without_nft.run(f"mv {python} {python}.gone")
    if without_nft.run("test -d /sys/module/nf_tables", check=False).returncode == 0:
        pytest.skip("here nf_tables is a module, whose being loaded is a sign for all nodes")
    results = looked(without_nft)
    assert statuses(results) == GOOD
    assert results["ports.firewall"].actual == "open, no sign of rules"
    without_nft.run(ENABLED[what])
    reason = f"nft is not installed, and {what} is enabled"
    assert looked(without_nft)["ports.firewall"].actual == reason
    base = "add chain inet t in { type filter hook input priority 0; policy accept; }"
    rule = "add rule inet t in ct state established accept"
    without_nft.enter(["/root/nft", f"add table inet t; {base}; {rule}"])
    reason = "nft is not installed, and the kernel tracks connections"
    without_nft.run("true")  # a connection of its own
    assert looked(without_nft)["ports.firewall"].actual == reason


def test_the_kernel_may_give_the_range_away(fresh_node: LabNode) -> None:
    key = "net.ipv4.ip_local_port_range"
    fresh_node.run(f"sysctl -w {key}='20000 60999'")
    results = looked(fresh_node)
    assert statuses(results) == {**GOOD, "ports.ephemeral": "fail"}
    assert "ephemeral 20000-60999" in results["ports.ephemeral"].actual
    reserve = results["ports.ephemeral"].fix.partition(" in ")[0]
    fresh_node.run(f"sysctl -w '{reserve}'")
    assert statuses(looked(fresh_node)) == GOOD

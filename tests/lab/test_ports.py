"""Real listeners, real packet filter rules and real kernel settings on real nodes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nodeready.core.policy import Policy
from nodeready.core.result import Result
from nodeready.lab import Lab, LabNode
from nodeready.subjects.snapshot import judge
from tests.cases import read_table
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


def test_a_listener_is_named_and_never_touched(node):
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


def test_another_user_sees_the_port_but_not_its_process(node):
    with listener(node, "root", "0.0.0.0", 29510):
        seen = observe(lambda c, i="": node.run(c, "ml", i, False), POLICY, ("ports",))
    results = {result.check: result for result in judge(seen, POLICY, subjects=("ports",))}
    assert results["ports.range"].actual == "29510 by a process (user root)"
    assert results["ports.firewall"].status in ("unknown", "ok")


# The rules of a table inet t -> the status of ports.firewall, and its words.
RULES = {
    "ip saddr 203.0.113.0/24 drop": ("na", "not known: inet t in: ip saddr 203.0.113.0/24 drop; "),
    "tcp dport { 23, 29000-29600 } drop": ("warn", "29500-29510 dropped by the text of inet t in"),
}


def test_the_rules_of_nft_are_read_and_stay(node):
    state = "nft list ruleset; ls /tmp /run; sysctl net.ipv4 2>/dev/null | grep port; ss -Hltn"
    base = "add table inet t; add chain inet t in { type filter hook input priority 0; }"
    for rule, (status, words) in RULES.items():
        node.enter(["nft", f"{base}; add rule inet t in {rule}"])
        before = node.run(state).stdout
        results = looked(node)
        assert node.run(state).stdout == before
        node.enter(["nft", "delete table inet t"])
        assert statuses(results) == {**GOOD, "ports.firewall": status}, rule
        assert words in results["ports.firewall"].actual
    assert statuses(looked(node)) == GOOD


def test_the_rules_of_old_iptables_are_read(fresh_node):
    rule = ["-A", "INPUT", "-p", "tcp", "--dport", "29505", "-j", "DROP"]
    if fresh_node.enter(["iptables-legacy", *rule], check=False).returncode != 0:
        pytest.skip("this machine has no legacy tables")
    results = looked(fresh_node)
    assert statuses(results) == {**GOOD, "ports.firewall": "warn"}
    text = "29505 dropped by the text of ip filter INPUT: -p tcp -m tcp --dport 29505 -j DROP"
    assert results["ports.firewall"].actual == text


def test_busyboxs_find_names_the_holder(fresh_node):
    fresh_node.write("/usr/local/bin/find", '#!/bin/sh\nexec busybox find "$@"\n', 0o755)
    with listener(fresh_node, "ml", "0.0.0.0", 29500):
        assert "29500 by python3 (pid " in looked(fresh_node)["ports.range"].actual


#: What nft does -> the status, and the reason.
BROKEN = read_table(__file__, "BROKEN")


@pytest.mark.parametrize("script", rows(BROKEN, "exec sleep 600"))
def test_a_broken_nft_costs_the_firewall_alone(fresh_node, script):
    if script:
        fresh_node.write("/usr/local/bin/nft", f"#!/bin/sh\n{script}\n", 0o755)
    else:
        fresh_node.run("rm /usr/sbin/nft")
    results = looked(fresh_node)
    firewall = results["ports.firewall"]
    assert (firewall.status, firewall.actual) == BROKEN[script]
    assert statuses(results) == {**GOOD, "ports.firewall": firewall.status}

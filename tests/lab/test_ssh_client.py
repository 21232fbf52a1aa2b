"""ssh from node to node, by real ssh and real sshd: what the three modes promise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from nodeready.lab import Node
from nodeready.operations import ssh_client
from nodeready.policy import Policy
from nodeready.subjects.snapshot import Snapshot, judge
from nodeready.subjects.ssh_client.facts import Identity, SshClient
from nodeready.subjects.ssh_client.known_hosts import Endpoint, Fleet, lines_of_nodes
from tests.builders.ssh_client import key
from tests.helpers import apply, observe, on, plan
from tests.lab.rows import rows

STEPS = (ssh_client.known_hosts, ssh_client.options, ssh_client.leftover)
Nodes = Callable[..., "list[Node]"]


def look(
    nodes: Iterable[Node], want: Policy, fleet: Iterable[Node]
) -> tuple[dict[str, Snapshot], dict[str, Policy]]:
    """These nodes of a fleet, and their policies, which the host keys of all complete."""
    seen = {node.name: observe(on(node), want, ["ssh_client"]) for node in nodes}
    endpoints = {node.name: Endpoint(node.address) for node in fleet}
    known = Fleet(seen, want.ssh_known_hosts, endpoints)
    lines = lines_of_nodes(known, seen, {})
    return seen, {name: replace(want, ssh_known_hosts=lines[name]) for name in seen}


def deploy(nodes: Iterable[Node], want: Policy, fleet: Iterable[Node] = ()) -> int:
    """Deploy the subject to these nodes; how many changes that took.

    fleet: all nodes of the inventory; (): these
    """
    nodes = list(nodes)
    fleet = list(fleet) or nodes
    seen, complete = look(nodes, want, fleet)
    count = 0
    for node in nodes:
        changes = plan(seen[node.name], complete[node.name], STEPS)
        apply(on(node), changes)
        count += len(changes)
    seen, complete = look(nodes, want, fleet)
    for node in nodes:
        results = judge(seen[node.name], complete[node.name])
        assert not [result for result in results if result.bad], node.name
    return count


def ssh(node: Node, target: str, user: str = "root") -> str:
    """The host name at the other end, or ssh's last word when it refuses."""
    done = node.run(f"ssh -o BatchMode=yes {target} hostname", user=user, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


REFUSED = "Host key verification failed."


def test_known_hosts_lets_every_node_reach_every_node(fresh_nodes: Nodes) -> None:
    nodes = fresh_nodes(3)
    first, second, third = nodes
    assert ssh(first, second.name) == REFUSED
    want = Policy()
    assert deploy(nodes, want) == 3
    assert deploy(nodes, want) == 0
    for node in nodes:
        for other in nodes:
            for user in ("root", "ml"):
                assert ssh(node, other.name, user) == other.name
                assert ssh(node, other.address, user) == other.name
    own = first.run("ls -A /home/ml/.ssh", user="ml").stdout.split()
    assert own == ["authorized_keys", "id_ed25519", "id_ed25519.pub"]

    # A limited run keeps the keys of the nodes that it did not see.
    assert deploy([first, second], want, nodes) == 0
    assert ssh(second, third.name) == third.name

    third.reset(new_host_key=True)
    assert ssh(first, third.name) == REFUSED
    assert deploy(nodes, want) == 3
    assert ssh(first, third.name, "ml") == third.name
    assert ssh(third, first.address, "ml") == first.name


@pytest.mark.parametrize(
    ("mode", "other_key"),
    rows([("known_hosts", REFUSED), ("accept-new", REFUSED), ("no", None)], "accept-new"),
)
def test_a_mode_answers_the_question_for_its_hosts_only(fresh_nodes, mode, other_key):
    nodes = first, second = fresh_nodes(2)
    want = Policy(ssh_client_mode=mode, ssh_client_hosts=(second.name, "10.*"))
    deploy(nodes, want)
    assert ssh(first, second.name, "ml") == second.name
    if mode != "known_hosts":
        # Another name of the same node, outside the patterns.
        first.run(f"echo {second.address} elsewhere >>/etc/hosts")
        assert ssh(first, "elsewhere", "ml") == REFUSED
    second.reset(new_host_key=True)
    assert ssh(first, second.name, "ml") == (other_key or second.name)
    # Switched off again, nothing of ours stays in ssh's configuration.
    deploy(nodes, Policy(ssh_client_mode="no"))
    listing = first.run("ls -A /etc/ssh /etc/ssh/ssh_config.d").stdout
    assert not re.search("nodeready|ssh_known_hosts", listing)


def test_a_node_tells_who_it_is(fresh_node: Node) -> None:
    node, name = fresh_node, fresh_node.name
    (ours,) = identity(node).keys
    assert identity(node).addresses == (node.address,)
    node.write("/usr/local/bin/hostname", f"#!/bin/sh\necho {name}.dns.example\n", 0o755)
    node.write("/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1\t{name}.files.example\t{name}\n")
    assert identity(node).names == (name, f"{name}.files.example")
    node.write("/etc/hosts", f"127.0.0.1 localhost\n10.0.0.9 x{name} {name}-ib # {name}\n")
    assert identity(node).names == (name, f"{name}.dns.example")
    node.write("/etc/ssh/site_key.pub", f"{key(3)} root@site\n")
    node.write("/etc/ssh/sshd_config.d/site.conf", "hostkey /etc/ssh/site_key\n")
    assert identity(node).keys == (ours, key(3))


def identity(node: Node) -> Identity:
    seen: SshClient = observe(on(node), Policy(), ["ssh_client"])["ssh_client"]
    return seen.identity

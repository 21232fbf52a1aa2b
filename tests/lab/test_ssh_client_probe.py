"""What a node printed, and what is made of it."""

from __future__ import annotations

from nodeready.lab import Node
from nodeready.policy import Policy
from nodeready.subjects.ssh_client.facts import (
    Identity,
    SshClient,
)
from tests.builders.ssh_client import key
from tests.helpers import observe, on


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

"""ClusterShell's process and ssh, at a port of this machine at which no program listens."""

import os
import re
import signal
import socket

import pytest
from ClusterShell.Topology import TopologyParser

from nodeready.agent.asking import Request
from nodeready.fleet.transport.clush import transport as clush_transport
from nodeready.fleet.transport.clush.gateway import gateways_by_node
from nodeready.fleet.transport.clush.transport import Clush, ClushError
from tests.unit.transport.test_clush import host


def closed(*names):
    return [host(name, ssh_hostname="127.0.0.1", ssh_port=1) for name in names]


def test_every_node_is_named_once_with_its_cause():
    with Clush([*closed("n1", "n2"), host("@local")], topology="") as transport:
        rows = list(transport.ask([Request(name, "true", 9) for name in transport.nodes]))
        channel = transport.open(Request("n1", "cat <&3", 9, payload="", mark="mark"))
        assert channel.read_line(20) is None
    refused = "[127.0.0.1]:1: connection refused: is sshd running?"
    assert sorted((name, answer.gap.kind, answer.gap.reason) for name, answer in rows) == [
        ("@local", "refused", "@local is a connector of pyinfra's: ask with --via ssh"),
        ("n1", "unreachable", refused),
        ("n2", "unreachable", refused),
    ]
    assert channel.error == refused


def test_a_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(clush_transport, "_SILENT_S", 3.0)
    with Clush(closed("n1", "n2"), topology="") as transport:
        os.kill(transport._pool.children[0].pid, signal.SIGSTOP)
        rows = dict(transport.ask([Request(name, "true", 90) for name in transport.nodes]))
    error = "ClusterShell's process gave no sign for 3 s, and was ended"
    assert {name: answer.gap.reason for name, answer in rows.items()} == {"n1": error, "n2": error}


def test_the_gateways_of_names_with_several_numbers(tmp_path):
    """ClusterShell's own tree says the same."""
    path, here = tmp_path / "topology.conf", socket.gethostname().split(".")[0]
    path.write_text(
        f"[routes]\n{here}: gw[1-3]!gw3\ngw1: r1-[1-9]-a,r2-3\ngw2: s[08-11]\nr2-3: t\n"
    )
    tree = TopologyParser(str(path)).tree(here)
    expected = {
        node: tuple(row.nodeset)
        for row in tree.groups
        if here not in row.nodeset
        for group in row.children()
        for node in group.nodeset
    }
    found = gateways_by_node(str(path))
    assert {node: {*names} for node, names in found.items()} == {
        node: {*names} for node, names in expected.items()
    }
    assert found["t"] == ("r2-3",)


def test_a_topology_that_is_no_tree_is_told_and_done_without(tmp_path):
    path = tmp_path / "topology.conf"
    path.write_text("[routes]\nsomebody_else: gw[1-2]\ngw[1-2]: n[1-9]\n")
    told: list[str] = []
    with Clush(closed("n1"), topology=str(path), notify=told.append) as transport:
        ((_, answer),) = transport.ask([Request("n1", "true", 9)])
    assert answer.gap.kind == "unreachable"
    (line,) = told
    assert re.fullmatch(rf"{path}: no route begins at .*: asking every node directly", line)
    with pytest.raises(ClushError, match="nowhere: No such file or directory"):
        Clush(closed("n1"), topology=f"{tmp_path}/nowhere")

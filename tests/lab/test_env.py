"""`nodeready env` on real nodes: what they agree on, what they do not, and its manners."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from typing import Any

import pytest

from nodeready.inventory.nodeset import fold
from nodeready.lab import Node
from tests.command import Done, ours, wait_for, written

RENAME = (
    "ip link set eth0 down; ip link set eth0 name eth7; ip link set eth7 up;"
    "until ip -4 route | grep -q 'dev eth7'; do sleep 0.1; done"
)


def evaluated(text: str) -> dict[str, str]:
    """The environment that dash has after ``eval "$(...)"``."""
    done = subprocess.run(
        ["dash", "-c", 'eval "$(cat)" && env'], input=text, env={"PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    return {name: value for name, value in found.items() if name not in ("PATH", "PWD")}


def unwrapped(text: str) -> str:
    """Each comment as one line."""
    return text.replace("\n#   ", " ")


def rename(node: Node) -> None:
    node.enter(["sh", "-c", RENAME])


def variables(done: Done) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads(done.out)["variables"]}


def test_nodes_that_agree(fresh_nodes, fleet, tool, tmp_path):
    nodes = fresh_nodes(2, profile="h100")
    where = fleet(nodes)
    before = [written(node) for node in nodes]
    done = tool("env", where)
    assert (done.status, done.err) == (0, ""), done
    assert evaluated(done.out) == {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "=" + ",".join(f"mlx5_{number}" for number in range(8)),
        "PDSH_RCMD_TYPE": "ssh",
        "MASTER_PORT": "29500",
    }, done
    assert [line for line in done.out.splitlines() if len(line) > 80] == []
    path = tmp_path / "job.env"
    path.write_text("old\n")
    into = tool("env", where, "-o", path, "--ports", "29600-29700")
    assert (into.status, into.out, into.err) == (0, "", ""), into
    assert evaluated(path.read_text()) == {**evaluated(done.out), "MASTER_PORT": "29600"}
    assert [written(node) for node in nodes] == before
    assert all(ours(node) == [] for node in nodes)


def test_one_node_is_unlike_the_others(fresh_nodes, fleet, tool):
    """Its interface is another, a port is taken on it; what all agree on is exported."""
    *alike, odd = nodes = fresh_nodes(3)
    rename(odd)
    script = "import socket,time; s=socket.create_server(('',29501)); time.sleep(600)"
    odd.run(f'setsid python3 -c "{script}" >/dev/null 2>&1 </dev/null &')
    wait_for(lambda: "29501" in odd.run("ss -Hltn").stdout)
    where = fleet(nodes, {odd.name: {"port_range": (29501, 29510)}})
    done = tool("env", where)
    assert done.status == 3, done
    assert evaluated(done.out) == {"PDSH_RCMD_TYPE": "ssh", "MASTER_PORT": "29502"}, done
    most = re.escape(fold(node.name for node in alike))
    assert re.search(
        rf"^# NCCL_SOCKET_IFNAME is not set: the nodes differ\n#   =eth0  {most}\n"
        rf"#   =eth7  {odd.name}\n# mend {odd.name}, ",
        done.out,
        re.M,
    ), done
    assert f"# not 29501 on {odd.name}: python3 of root listens\n" in unwrapped(done.out)
    assert [line.split()[1] for line in done.lines] == ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"]
    found = variables(tool("env", where, "--format", "json"))
    assert found["GLOO_SOCKET_IFNAME"]["nodes_by_value"][1] == {
        "value": "eth7", "nodes": [odd.name],
    }  # fmt: skip
    assert found["NCCL_IB_HCA"]["settled"] is True


def test_a_port_that_the_fleet_cannot_use(fresh_nodes, fleet, tool):
    """The faults of the lab: a listener on the first port; all may be lent to connections."""
    one, other = fresh_nodes(2)
    one.lab.restart([one], keep_disk=True, fault="port-taken")
    other.lab.restart([other], keep_disk=True, fault="ephemeral")
    done = tool("env", fleet([one, other]))
    assert done.status == 0, done
    assert evaluated(done.out)["MASTER_PORT"] == "29501"
    assert f"# not 29500 on {one.name}: tensorboard of root listens\n" in done.out
    lent = f"# outgoing connections may get it on {other.name}: see ports.ephemeral\n"
    assert lent in unwrapped(done.out)
    done = tool("env", fleet([one, other]), "--ports", "29500")
    assert done.status == 3, done
    assert "MASTER_PORT" not in evaluated(done.out)
    assert done.lines == [
        "nodeready: MASTER_PORT is not set: no port of 29500 is free on all nodes"
    ]


def test_nodes_that_cannot_be_looked_at(fresh_nodes, fleet, tool, tmp_path):
    """They are named, on standard error and in the file; of none alone nothing is written."""
    good, gone = fresh_nodes(2)
    gone.stop_sshd()
    done = tool("env", fleet([good, gone]))
    assert done.status == 4, done
    why = f"{gone.name}: {gone.address}: connection refused: is sshd running?"
    assert done.lines == [f"unreachable {why}"]
    assert f"# not among them: {why}" in unwrapped(done.out)
    assert evaluated(done.out)["MASTER_PORT"] == "29500"
    path = tmp_path / "job.env"
    path.write_text("old\n")
    done = tool("env", fleet([gone]), "-o", path)
    assert (done.status, done.out, path.read_text()) == (4, "", "old\n"), done


def test_a_name_that_is_meant_to_be_code(fresh_nodes, fleet, tool):
    """The kernel allows it; it is no value, and it does not run."""
    good, evil = fresh_nodes(2)
    evil.enter(["sh", "-c", RENAME.replace("eth7", "'$(reboot)'")])
    done = tool("env", fleet([good, evil]))
    assert done.status == 3, done
    assert evaluated(done.out)["NCCL_SOCKET_IFNAME"] == "=eth0"
    reason = "'$(reboot)' is no plausible name of an interface"
    assert f"# unknown on {evil.name}: {reason}\n" in unwrapped(done.out)
    assert f"nodeready: NCCL_SOCKET_IFNAME is unknown on {evil.name}: {reason}" in done.lines


def test_an_interrupt_exports_nothing(fresh_nodes, fleet, tool, tmp_path):
    good, slow = fresh_nodes(2)
    slow.write("/root/.bashrc", "touch /run/waiting; sleep 60\n")
    path = tmp_path / "job.env"
    started = tool.start("env", fleet([good, slow]), "-o", path)
    wait_for(lambda: not slow.enter(["test", "-e", "/run/waiting"], check=False).returncode)
    started.send_signal(signal.SIGINT)
    done = tool.end(started)
    assert (done.status, done.out) == (130, ""), done
    assert done.lines == ["nodeready: interrupted: nothing is exported"]
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ports", "29510-29500"], "--ports 29510-29500: must be FIRST-LAST"),
        (["--ports", "0-10"], "--ports 0-10: must be FIRST-LAST"),
        (["--ports", "1-65536"], "--ports 1-65536: must be FIRST-LAST"),
        (["--ports", "http"], "--ports http: must be FIRST-LAST"),
        (["--ports", ""], "--ports : must be FIRST-LAST"),
        (["--format", "yaml"], "'yaml' is not one of"),
        (["-o", "/nosuch/job.env"], "-o /nosuch/job.env: no directory /nosuch"),
        (["-o", "/tmp"], "-o /tmp: is a directory"),
    ],
)
def test_a_mistake_costs_one_line_and_no_look(words, said, lab, fleet, tool):
    done = tool("env", fleet(lab.nodes), *words)
    assert (done.status, done.out) == (2, ""), done
    assert said in done.err, done

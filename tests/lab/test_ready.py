"""`nodeready ready` on real nodes: who is ready, why not, within its budget; and nothing stays."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeready.lab import Node
from tests.command import Tool, ours, wait_for, written

#: What a lab cannot show: see inventories/lab.py.
WAIVED = {"waivers": {"proof.core": "shared kernel", "proof.backtrace": "shared kernel"}}


@pytest.fixture
def prepared(
    fresh_nodes: Callable[..., list[Node]], fleet: Callable[..., Path], tool: Tool
) -> Callable[..., tuple[list[Node], Path]]:
    """Nodes after a deploy, and their inventory: ``prepared(3, other={}, key=value)``."""

    def make(count: int, **policy: object) -> tuple[list[Node], Path]:
        nodes = fresh_nodes(count)
        where = fleet(nodes, **{**WAIVED, **policy})
        done = tool("deploy", where, "--yes", "-q")
        assert done.status == 0, done
        return nodes, where

    return make


def told(done) -> dict[str, dict[str, str]]:
    """Node -> proof -> status, of a run with --format json."""
    return {
        node["name"]: {
            result["check"]: result["status"]
            for result in node["results"]
            if result["check"].startswith("proof.")
        }
        for node in json.loads(done.out)["nodes"]
    }


def test_a_deployed_fleet_is_ready_and_nothing_stays_on_it(prepared, tool, tmp_path):
    nodes, where = prepared(3)
    hosts = tmp_path / "hosts"
    before = [written(node) for node in nodes]
    done = tool("ready", where, "--user", "root", "--format", "json", "--hostfile-out", hosts)
    assert done.status == 0, done
    proofs = told(done)
    for node in nodes:
        core = {proofs[node.name].pop(f"proof.{name}") for name in ("core", "backtrace")}
        assert core <= {"waived", "ok", "na"}
        assert set(proofs[node.name].values()) == {"ok"}, proofs
        assert not ours(node)
        stopped = node.run("ps -eo stat= | grep -c '^T' || :").stdout.strip()
        assert stopped == "0"
        assert not node.run("ss -Hltn 'sport >= :29500 && sport <= :29510'").stdout
    assert hosts.read_text() == "".join(f"{node.name} slots=1\n" for node in nodes)
    assert [written(node) for node in nodes] == before


def test_one_bad_node_is_named_and_left_out(prepared, tool, tmp_path):
    """A failing check, another's port, an unreachable node: the others may have the job."""
    (good, drifted, busy, away), where = prepared(4)
    drifted.run("rm /etc/pdsh/rcmd_default /etc/profile.d/*nodeready*")
    listen = (
        "import socket, time; s = socket.socket(); s.bind(('', 29503)); s.listen();"
        " open('/run/listens', 'w'); time.sleep(120)"
    )
    busy.run(f'setsid python3 -c "{listen}" </dev/null >/dev/null 2>&1 &')
    wait_for(lambda: busy.run("test -e /run/listens", check=False).returncode == 0)
    away.stop_sshd()
    hosts = tmp_path / "hosts"
    words = ("ready", where, "--user", "root", "--hostfile-out", hosts)
    done = tool(*words, "--hostfile-format", "exclude", "--format", "json")
    assert done.status == 4, done
    made = json.loads(done.out)
    assert made["go"] == [good.name]
    assert not made["enough"]
    reasons = made["no_go"]
    assert any(reason.startswith("pdsh.") for reason in reasons[drifted.name]), reasons
    assert any("29503" in reason for reason in reasons[busy.name]), reasons
    assert "connection refused" in reasons[away.name][0]
    from nodeready.inventory.nodeset import expand

    assert set(expand(hosts.read_text().strip())) == {drifted.name, busy.name, away.name}
    enough = tool(*words, "--nodes-needed", "1", "--hostfile-format", "list", "-q")
    assert enough.status == 0, enough
    assert enough.out.splitlines()[0].split()[:2] == ["GO", good.name]
    assert hosts.read_text() == f"{good.name}\n"
    again = tool("ready", where, "--limit", "@last-failed", "--only", "proof.user")
    assert again.status == 4, again
    assert good.name not in again.out


def test_a_collective_is_proved_where_it_is_named(fresh_nodes, fleet, tool):
    nodes = fresh_nodes(4)
    where = fleet(nodes)
    words = ("ready", where, "--user", "root", "--budget", 150, "--format", "json")
    well = tool(*words, "--only", "proof.collective")
    assert well.status == 0, well
    assert {proofs["proof.collective"] for proofs in told(well).values()} == {"ok"}
    deaf = nodes[2]
    deaf.enter(["iptables", "-A", "OUTPUT", "-p", "tcp", "--dport", "29500:29510", "-j", "DROP"])
    done = tool(*words, "--only", "proof.collective")
    assert done.status == 3, done
    failed = {name for name, proofs in told(done).items() if proofs["proof.collective"] != "ok"}
    assert failed == {deaf.name}, done
    assert not any(ours(node) for node in nodes)


def test_what_the_budget_cuts_off_is_unknown_and_ends(prepared, tool):
    """A node that hangs after its connection, and a py-spy that hangs: the others are ready."""
    (good, slow, frozen), where = prepared(3)
    slow.write("/usr/local/bin/py-spy", "#!/bin/sh\ntrap '' TERM\nsleep 600\n", mode=0o755)
    frozen.pause_sshd()
    words = ("--only", "proof.attach,proof.gdb", "--budget", "10", "--format", "json")
    done = tool("ready", where, "--user", "root", *words)
    assert done.status == 4, done
    made = json.loads(done.out)
    assert made["go"] == [good.name]
    assert [reason.partition(":")[0] for reason in made["no_go"][slow.name]] == ["proof.attach"]
    assert not ours(slow)
    assert "sleep 600" not in slow.run("ps -eo args=").stdout
    frozen.resume_sshd()


def test_a_user_whom_the_nodes_do_not_know(prepared, tool):
    (node,), where = prepared(1)
    done = tool("ready", where, "--user", "nobodyhere", "--only", "proof.attach")
    assert done.status == 3, done
    assert "no such user" in done.out
    ordinary = tool("ready", where, "--user", "ml", "--only", "proof", "--format", "json")
    assert ordinary.status == 0, ordinary
    proofs = told(ordinary)[node.name]
    assert proofs["proof.user"] == "ok"
    assert (proofs["proof.ssh"], proofs["proof.mesh"]) == ("na", "na")


def test_an_interrupt_ends_what_runs_on_the_nodes(prepared, tool):
    (node,), where = prepared(1)
    hang = "#!/bin/sh\ntouch /run/hanging\nsleep 600\n"
    node.write("/usr/local/bin/py-spy", hang, mode=0o755)
    started = tool.start("ready", where, "--user", "root", "--only", "proof.attach")
    wait_for(lambda: node.run("test -e /run/hanging", check=False).returncode == 0)
    started.send_signal(signal.SIGINT)
    done = tool.end(started)
    assert done.status == 130, done
    assert "partial" in done.out + done.err
    wait_for(lambda: not ours(node))
    assert "sleep 600" not in node.run("ps -eo args=").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "0"], "--budget"),
        (["--ports", "29510-29500"], "--ports 29510-29500: must be FIRST-LAST"),
        (["--ports", "x"], "--ports x"),
        (["--user", "a b"], "--user a b: is no user name"),
        (["--nodes-needed", "2"], "--nodes-needed 2: 1 node is selected"),
        (["--local"], "an INVENTORY or --local"),
        (["--only", "proof.atach"], "did you mean proof.attach?"),
        (["--hostfile-out", "/nonexistent/x"], "--hostfile-out /nonexistent/x: no directory"),
    ],
)
def test_a_wrong_argument_ends_before_any_node(tool, words, said):
    done = tool("ready", "@local", *words)
    assert (done.status, done.out) == (2, ""), done
    assert said in done.err

"""`nodeready ready` on real nodes: who is ready, why not, within its budget; and nothing stays."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nodeready.fleet.inventory.nodeset import expand
from nodeready.lab import LabNode
from nodeready.lab.host import reachable_limits
from tests.cases import cases
from tests.command import WAIVERS, Tool, ours, wait_for


@pytest.fixture
def prepared(
    fresh_nodes: Callable[..., list[LabNode]], fleet: Callable[..., Path], tool: Tool
) -> Callable[..., tuple[list[LabNode], Path]]:
    """Nodes after a deploy, and their inventory."""

    def make(count: int) -> tuple[list[LabNode], Path]:
        nodes = fresh_nodes(count)
        where = fleet(nodes, waivers=WAIVERS)
        tool("deploy", where, "--yes", "-q", status=0)
        return nodes, where

    return make


@pytest.mark.parametrize("case", cases(__file__, "healthy.json"))
def test_a_healthy_node_however_odd_is_ready(fresh_nodes, fleet, tool, case):
    """`files`: by path, or by name in the user's home; `does`: what else makes it so; `states`:
    the checks that are not well all the same -> the status, and the reason.
    """
    user, nodes = case.get("user", "ml"), fresh_nodes(2, profile=case.get("profile", "cpu"))
    for node in nodes:
        if "shell" in case:
            node.run(f"usermod -s $(command -v {case['shell']}) {user}")
        for path, text in case.get("files", {}).items():
            node.write(path if path.startswith("/") else f"/home/ml/{path}", text)
        node.run(f"{case.get('does', ':')}; chown -R {user}: ~{user}")
    where = fleet(nodes, **reachable_limits(), waivers=WAIVERS)
    tool("deploy", where, "--yes", "-q", status=0)
    done = tool("ready", where, "--user", user, "--format", "json")
    bad = {
        check: (result["status"], result["actual"])
        for results in done.results.values()
        for check, result in results.items()
        if result["status"] in ("fail", "warn", "unknown")
    }
    states = case.get("states", {})
    assert {check: status for check, (status, _) in bad.items()} == {
        check: status for check, (status, _reason) in states.items()
    }, bad
    assert done.status == 0, done


def test_one_bad_node_is_named_and_left_out(prepared, tool, tmp_path):
    (good, busy, away), where = prepared(3)
    listen = (
        "import socket, time; s = socket.socket(); s.bind(('', 29503)); s.listen();"
        " open('/run/listens', 'w'); time.sleep(120)"
    )
    busy.run(f'setsid python3 -c "{listen}" </dev/null >/dev/null 2>&1 &')
    wait_for(lambda: busy.run("test -e /run/listens", check=False).returncode == 0)
    away.stop_sshd()
    hosts = tmp_path / "hosts"
    words = ("ready", where, "--user", "root", "--hostfile-out", hosts)
    done = tool(*words, "--hostfile-format", "exclude", "--format", "json", status=4)
    made = done.document
    assert made["go"] == [good.name]
    assert not made["enough"]
    reasons = made["no_go"]
    assert any("29503" in reason for reason in reasons[busy.name]), reasons
    assert "connection refused" in reasons[away.name][0]
    assert set(expand(hosts.read_text().strip())) == {busy.name, away.name}
    enough = tool(*words, "--nodes-needed", "1", "--hostfile-format", "list", "-q", status=0)
    assert enough.out.splitlines()[0].split()[:2] == ["GO", good.name]
    assert hosts.read_text() == f"{good.name}\n"


def test_what_the_budget_cuts_off_is_unknown_and_ends(prepared, tool):
    """A node that hangs after its connection, and a py-spy that hangs: the others are ready."""
    (good, slow, frozen), where = prepared(3)
    slow.write("/usr/local/bin/py-spy", "#!/bin/sh\ntrap '' TERM\nsleep 600\n", mode=0o755)
    frozen.pause_sshd()
    words = ("--only", "proof.attach,proof.gdb", "--budget", "10", "--format", "json")
    done = tool("ready", where, "--user", "root", *words, status=4)
    made = done.document
    assert made["go"] == [good.name]
    assert [reason.partition(":")[0] for reason in made["no_go"][slow.name]] == ["proof.attach"]
    assert not ours(slow)
    assert "sleep 600" not in slow.run("ps -eo args=").stdout
    frozen.resume_sshd()


def test_a_job_runs_on_the_nodes_that_are_ready_and_on_no_other(slurm_lab, fleet, tool, tmp_path):
    first, bad, last = slurm_lab.nodes
    where = fleet(slurm_lab.nodes, waivers=WAIVERS)
    tool("deploy", where, "--yes", "-q", status=0)
    bad.run("mv /etc/pdsh/rcmd_default /root/rcmd_default; mv /usr/bin/gdb /usr/bin/gdb.away")
    try:
        files = {form: tmp_path / form for form in ("exclude", "list")}
        for form, path in files.items():
            tool(
                "ready", where, "--user", "root", "--nodes-needed", "2", "-q",
                "--only", "proof.gdb,proof.mesh,pdsh", "--hostfile-out", path,
                "--hostfile-format", form,
                status=0,
            )  # fmt: skip
        assert expand(files["exclude"].read_text().strip()) == [bad.name]
        excluded = files["exclude"].read_text().strip()
        job = first.run(f"srun --exclude={excluded} -N2 uname -n", user="ml").stdout.split()
        assert sorted(job) == sorted([first.name, last.name])
        # The same file on the node: pdsh's own way to take a list.
        first.write("/root/ready.list", files["list"].read_text())
        answers = first.run("pdsh -R ssh -w ^/root/ready.list uname -n | sort").stdout
        assert answers == "".join(f"{name}: {name}\n" for name in sorted([first.name, last.name]))
    finally:
        bad.run("mv /usr/bin/gdb.away /usr/bin/gdb; mv /root/rcmd_default /etc/pdsh/rcmd_default")
    assert not [line for node in slurm_lab.nodes for line in ours(node)]

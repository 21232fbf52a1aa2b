"""The mesh between real nodes: what is wrong is named exactly, and nobody else is touched."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nodeready.lab import Node
from tests.command import ours, wait_for

FIRST, LAST = 29500, 29510
SPAN = f"{FIRST}-{LAST}"
DRIVER = Path(__file__).with_name("mesh_driver.py")
LIMIT_S = 60


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """The mesh over these nodes, running."""
    running: list[subprocess.Popen[str]] = []

    def begin(
        nodes: Sequence[Node],
        *how: str,
        own: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        hosts = [node.inventory_data() for node in nodes]
        path = tmp_path / "inventory.py"
        path.write_text(f"lab = {[(name, {**data, **(own or {})}) for name, data in hosts]!r}\n")
        words = [path, FIRST, LAST, LIMIT_S, *how]
        process = subprocess.Popen(
            [sys.executable, str(DRIVER), *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                "PYTHONPATH": str(DRIVER.parents[2]),
                "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
                **(env or {}),
            },
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=2 * LIMIT_S)
    assert process.returncode == 0, err
    return json.loads(out)


def not_ok(done: Any, check: str) -> dict[str, list[str]]:
    """The nodes of which this check is not ok: status and actual."""
    return {
        name: results[check]
        for name, results in done["results"].items()
        if results[check][0] != "ok"
    }


def drop(node: Node, hook: str, rule: str) -> None:
    """The node's packet filter drops this, in this direction."""
    node.enter(["nft", "add", "table", "inet", "test"])
    chain = f"{{ type filter hook {hook} priority 0; }}"
    node.enter(["nft", f"add chain inet test {hook} {chain}"])
    node.enter(["nft", f"add rule inet test {hook} {rule} drop"])


def listening(node: Node) -> set[int]:
    """The ports of the range on which somebody listens."""
    rows = node.enter(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout.splitlines()
    words = [row.split() for row in rows]
    ports = {int(one[1].rpartition(":")[2], 16) for one in words if one[3] == "0A"}
    return {port for port in ports if FIRST <= port <= LAST}


def nothing_left(nodes: Sequence[Node]) -> bool:
    return not any(ours(node) or listening(node) for node in nodes)


@pytest.mark.nightly
def test_sudo_takes_its_password_from_the_first_line_and_no_other(fresh_nodes, start):
    """Where it wants one, and where it does not."""
    wants, free = nodes = fresh_nodes(2)
    wants.enter(["chpasswd"], input="ml:Zu-4711\n")
    wants.write("/etc/sudoers.d/ml", "ml ALL=(ALL:ALL) ALL\n", mode=0o440)
    own = {"ssh_user": "ml", "_sudo": True, "_sudo_password": "Zu-4711"}
    done = end(start(nodes, own=own))
    assert done["unknown"] == []
    assert not not_ok(done, "proof.mesh")
    assert nothing_left([wants, free])


def test_two_nodes_make_an_asymmetric_pair(fresh_nodes, start):
    one, other = fresh_nodes(2)
    drop(one, "input", "tcp dport 29500")
    done = end(start([one, other], "full"))
    assert not_ok(done, "proof.mesh") == {
        other.name: [
            "fail",
            f"29500 of {one.name} not reached (timed out: dropped); "
            "the way back works: asymmetric",
        ]
    }


def rounds_began(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    while line := process.stderr.readline():
        if line == "rounds\n":
            return
    raise AssertionError("it ended")


def test_a_node_that_dies_in_the_middle_costs_itself(fresh_nodes, start):
    nodes = fresh_nodes(8)
    # Its rounds wait for time-outs: there is a middle.
    deaf, victim = nodes[1], nodes[4]
    drop(deaf, "input", f"tcp dport {SPAN}")
    process = start(nodes)
    rounds_began(process)
    victim.kill()
    done = end(process)
    assert done["unknown"] == [victim.name]
    assert set(not_ok(done, "proof.mesh")) == {deaf.name, victim.name}
    assert done["results"][victim.name]["proof.mesh"][0] == "unknown"
    assert done["results"][victim.name]["proof.ports"][0] == "unknown"
    assert nothing_left([node for node in nodes if node is not victim])


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)]
)
def test_when_the_command_is_ended_nothing_is_left(fresh_nodes, start, number):
    nodes = fresh_nodes(4)
    drop(nodes[0], "input", f"tcp dport {SPAN}")
    process = start(nodes)
    rounds_began(process)
    assert all(listening(node) == {*range(FIRST, LAST + 1)} for node in nodes)
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    wait_for(lambda: nothing_left(nodes))


def test_over_srun_as_an_ordinary_user(slurm_lab, login, start):
    """A step on each node, spoken with; the job and its own step go on."""
    nodes = slurm_lab.nodes
    job = login("sbatch", "--parsable", "-N3", "-D", "/tmp", "--wrap", "srun sleep 600")
    wait_for(lambda: len(login("squeue", "-h", "-s", "-j", job).splitlines()) == 2)
    drop(nodes[1], "input", "tcp dport 29505")
    try:
        done = end(start(nodes, "job", job, env=login.env))
        assert done["unknown"] == []
        named = not_ok(done, "proof.mesh")
        assert list(named) == [nodes[1].name], named
        assert "29505 unreachable from all 2 peers" in named[nodes[1].name][1]
        assert nothing_left(nodes)
        # Killed, it leaves nothing either: the steps end with their input.
        drop(nodes[0], "input", f"tcp dport {SPAN}")
        process = start(nodes, "job", job, env=login.env)
        rounds_began(process)
        assert all(listening(node) == {*range(FIRST, LAST + 1)} for node in nodes)
        process.kill()
        process.communicate(timeout=LIMIT_S)
        wait_for(lambda: nothing_left(nodes))
        wait_for(lambda: len(login("squeue", "-h", "-s", "-j", job).splitlines()) == 2)
    finally:
        for node in nodes[:2]:
            node.enter(["nft", "delete", "table", "inet", "test"], check=False)

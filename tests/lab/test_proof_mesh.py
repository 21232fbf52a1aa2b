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

# Counts who comes; what it was started with ends it.
FOREIGN = """
import socket, sys
s = socket.create_server(("", int(sys.argv[1])))
count = 0
while True:
    open("/tmp/came", "w").write(str(count))
    s.accept()
    count += 1
"""


@pytest.fixture
def start(
    tmp_path: Path,
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
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


@pytest.mark.parametrize(
    ("how", "rounds"), [((), 3), pytest.param(("full",), 7, marks=pytest.mark.nightly)]
)
def test_nodes_that_are_well(fresh_nodes, start, how, rounds):
    nodes = fresh_nodes(8)
    done = end(start(nodes, *how))
    assert not not_ok(done, "proof.mesh")
    assert not not_ok(done, "proof.ports")
    assert (done["rounds"], done["connections"]) == (rounds, 8 * rounds * 11)
    assert nothing_left(nodes)


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


@pytest.mark.nightly
def test_every_fault_among_32_nodes_is_named_once_and_nothing_else(fresh_nodes, start):
    """One port dropped on the way in; one on the way out; all, both ways; a pair of which one
    way is dropped; a name that leads to another node; a listener that is not ours."""
    nodes = fresh_nodes(32)
    inbound, outbound, deaf, one_way, misled, held = (nodes[at] for at in (2, 6, 12, 17, 22, 27))
    drop(inbound, "input", "tcp dport 29505")
    drop(outbound, "output", "tcp dport 29502")
    drop(deaf, "input", f"tcp dport {SPAN}")
    drop(deaf, "output", f"tcp dport {SPAN}")
    drop(one_way, "input", f"ip saddr {nodes[16].address} tcp dport {SPAN}")
    near, far = nodes[23], nodes[9]
    hosts = misled.read("/etc/hosts").replace(f"{near.address} {near.name}", "")
    misled.write("/etc/hosts", f"{hosts}{far.address} {near.name}\n")
    held.write("/tmp/foreign.py", FOREIGN)
    held.run("setsid python3 /tmp/foreign.py 29509 >/dev/null 2>&1 </dev/null & echo $! >/tmp/pid")
    wait_for(lambda: listening(held) == {29509})

    done = end(start(nodes))

    dropped = "timed out: dropped"
    short = f"{dropped}; the first 3 ports stand for all"
    assert not_ok(done, "proof.mesh") == {
        inbound.name: [
            "fail",
            f"29505 unreachable from all 3 peers ({dropped}); its own connections pass: inbound",
        ],
        outbound.name: [
            "fail",
            f"29502 not reached at all 3 peers ({dropped}); it is reached itself: outbound",
        ],
        deaf.name: [
            "fail",
            f"{SPAN} neither reached from nor reached at all 4 peers ({short})",
        ],
        nodes[16].name: [
            "fail",
            f"{SPAN} of {one_way.name} not reached ({short}); the way back works: asymmetric",
        ],
        misled.name: [
            "fail",
            f"to {near.name}: {near.name} resolves to {far.address}, which is {far.name}'s",
        ],
    }
    assert not_ok(done, "proof.ports") == {held.name: ["warn", "29509: Address already in use"]}
    assert held.read("/tmp/came") == "0"
    assert listening(held) == {29509}
    held.run("kill $(cat /tmp/pid)")
    wait_for(lambda: nothing_left(nodes))


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


@pytest.mark.nightly
def test_a_node_alone_listens_and_meets_nobody(fresh_node, start):
    done = end(start([fresh_node]))
    assert done["results"][fresh_node.name] == {
        "proof.ports": ["ok", f"{SPAN} can be listened on"],
        "proof.mesh": ["na", "one node alone"],
    }
    assert done["connections"] == 0


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


@pytest.mark.nightly
def test_over_srun_a_node_whose_slurmd_is_silent_costs_itself(slurm_lab, login, start):
    nodes = slurm_lab.nodes
    job = login("sbatch", "--parsable", "-N3", "-D", "/tmp", "--wrap", "sleep 600")
    wait_for(lambda: login("squeue", "-h", "-o", "%T", "-j", job) == "RUNNING")
    nodes[2].enter(["sh", "-c", "kill -STOP $(cat /run/slurmd.pid)"])
    try:
        done = end(start(nodes, "job", job, env=login.env))
    finally:
        nodes[2].enter(["sh", "-c", "kill -CONT $(cat /run/slurmd.pid)"])
    assert done["unknown"] == [nodes[2].name]
    assert set(not_ok(done, "proof.mesh")) == {nodes[2].name}
    assert nothing_left(nodes[:2])

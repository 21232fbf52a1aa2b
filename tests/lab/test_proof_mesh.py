"""The mesh between real nodes: what is wrong is named exactly, and nobody else is touched."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import Popen

import pytest

from nodeready.lab import LabNode
from tests.command import Done, Tool, ours, wait_for
from tests.lab.rows import rows

FIRST, LAST = 29500, 29510
SPAN = f"{FIRST}-{LAST}"
#: Of `ready`, the mesh alone.
ONLY = ("--only", "proof.ports,proof.mesh", "--format", "json")


@pytest.fixture
def start(tool: Tool, fleet: Callable[..., Path]) -> Callable[..., Popen[bytes]]:

    def begin(nodes: Sequence[LabNode], *words: object, **data: object) -> Popen[bytes]:
        user = () if "_sudo" in data else ("--user", "root")
        return tool.start("ready", fleet(nodes, **data), *user, *ONLY, *words)

    return begin


def not_ok(done: Done, check: str = "proof.mesh") -> dict[str, tuple[str, str]]:
    """The nodes of which this check is not ok: status and actual."""
    return {
        name: (results[check]["status"], results[check]["actual"])
        for name, results in done.results.items()
        if check in results and results[check]["status"] != "ok"
    }


def drop(node: LabNode, rule: str, hook: str = "input") -> None:
    """The node's packet filter drops this, in this direction."""
    node.enter(["nft", "add", "table", "inet", "test"])
    chain = f"{{ type filter hook {hook} priority 0; }}"
    node.enter(["nft", f"add chain inet test {hook} {chain}"])
    node.enter(["nft", f"add rule inet test {hook} {rule} drop"])


def listening(node: LabNode) -> set[int]:
    """The ports of the range on which somebody listens."""
    sockets = node.enter(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout.splitlines()
    words = [row.split() for row in sockets]
    ports = {int(one[1].rpartition(":")[2], 16) for one in words if one[3] == "0A"}
    return {port for port in ports if FIRST <= port <= LAST}


def all_listen(nodes: Sequence[LabNode]) -> bool:
    return all(listening(node) == {*range(FIRST, LAST + 1)} for node in nodes)


def nothing_left(nodes: Sequence[LabNode]) -> bool:
    return not any(ours(node) or listening(node) for node in nodes)


@pytest.mark.nightly
def test_sudo_takes_its_password_from_the_first_line_and_no_other(fresh_nodes, start, tool):
    """Where it wants one, and where it does not."""
    wants, free = fresh_nodes(2)
    wants.enter(["chpasswd"], input="ml:Zu-4711\n")
    wants.write("/etc/sudoers.d/ml", "ml ALL=(ALL:ALL) ALL\n", mode=0o440)
    own = {"ssh_user": "ml", "_sudo": True, "_sudo_password": "Zu-4711", "job_user": "ml"}
    done = tool.end(start([wants, free], **own))
    assert (done.status, not_ok(done)) == (0, {}), done
    assert nothing_left([wants, free])


def test_host_names_are_tried_as_a_job_uses_them(fresh_nodes, start, tool):
    """Debian's /etc/hosts on one node, and another host name than the inventory's on the other."""
    one, other = fresh_nodes(2)
    one.run(f"echo '127.0.1.1 {one.name}' | cat - /etc/hosts >/h; cat /h >/etc/hosts")
    other.run(f"hostname node-b; echo {other.address} node-b >>/etc/hosts")
    words = not_ok(tool.end(start([one, other])))
    own = f"on the node itself, {one.name} resolves to 127.0.1.1, which is loopback"
    assert words.pop(one.name)[1].startswith(own)
    assert words == {}
    # The pair belongs to the node whose name service lacks the name; its own warning goes first.
    one.run(f"echo '{one.address} {one.name}' >/etc/hosts")
    one.run(f"echo '{other.address} {other.name}' >>/etc/hosts")
    told = not_ok(tool.end(start([one, other])))
    assert told[one.name][0] == "warn"
    assert told[one.name][1].startswith(f"to {other.name}: node-b does not resolve (")
    # A node alone has no peers.
    one.run(f"echo '127.0.1.1 {one.name}' >/etc/hosts")
    assert not_ok(tool.end(start([one])))[one.name][0] == "na"


def test_two_nodes_make_an_asymmetric_pair(fresh_nodes, start, tool):
    one, other = fresh_nodes(2)
    drop(one, "tcp dport 29500")
    done = tool.end(start([one, other], "--full-mesh"))
    told = f"29500 of {one.name} not reached (timed out: dropped); "
    assert not_ok(done) == {other.name: ("fail", f"{told}the way back works: asymmetric")}, done


@pytest.mark.nightly
def test_a_node_that_dies_in_the_middle_costs_itself(fresh_nodes, start, tool):
    nodes = fresh_nodes(8)
    # Its rounds wait for time-outs: there is a middle.
    deaf, victim = nodes[1], nodes[4]
    drop(deaf, f"tcp dport {SPAN}")
    process = start(nodes)
    wait_for(lambda: all_listen(nodes))
    victim.kill()
    done = tool.end(process)
    found = not_ok(done)
    assert {name: status for name, (status, _) in found.items()} == {
        deaf.name: "fail", victim.name: "unknown",
    }, done  # fmt: skip
    assert nothing_left([node for node in nodes if node is not victim])


@pytest.mark.parametrize("number", rows([signal.SIGINT, signal.SIGKILL], signal.SIGINT))
def test_when_the_command_is_ended_nothing_is_left(fresh_nodes, start, tool, number):
    nodes = fresh_nodes(4)
    drop(nodes[0], f"tcp dport {SPAN}")
    process = start(nodes)
    wait_for(lambda: all_listen(nodes))
    process.send_signal(number)
    assert tool.end(process).status == (130 if number == signal.SIGINT else -number)
    wait_for(lambda: nothing_left(nodes))


def test_over_srun_as_an_ordinary_user(slurm_lab, login, fleet, tool):
    """A step on each node, spoken with; the job and its own step go on."""
    nodes = slurm_lab.nodes
    job = login("sbatch", "--parsable", "-N3", "-D", "/tmp", "--wrap", "srun sleep 600")

    def steps() -> int:
        return len(login("squeue", "-h", "-s", "-j", job).splitlines())

    wait_for(lambda: steps() == 2)
    words = ("ready", fleet(nodes), "--user", "ml", "--via", "srun", "--job", job, *ONLY)
    drop(nodes[1], "tcp dport 29505")
    try:
        found = not_ok(tool(*words, env=login.env))
        assert list(found) == [nodes[1].name], found
        assert "29505 unreachable from all 2 peers" in found[nodes[1].name][1]
        assert nothing_left(nodes)
        # Killed, it leaves nothing either: the steps end with their input.
        drop(nodes[0], f"tcp dport {SPAN}")
        process = tool.start(*words, env=login.env)
        wait_for(lambda: all_listen(nodes))
        process.kill()
        tool.end(process)
        wait_for(lambda: nothing_left(nodes))
        wait_for(lambda: steps() == 2)
    finally:
        for node in nodes[:2]:
            node.enter(["nft", "delete", "table", "inet", "test"], check=False)


@pytest.mark.nightly
def test_each_fault_among_32_nodes_is_named_once_and_nothing_else(fresh_nodes, start, tool):
    nodes = fresh_nodes(32)
    inbound, outbound, deaf, one_way, misled, held = (nodes[at] for at in (2, 6, 12, 17, 22, 27))
    drop(inbound, "tcp dport 29505")
    drop(outbound, "tcp dport 29502", "output")
    for hook in ("input", "output"):
        drop(deaf, f"tcp dport {SPAN}", hook)
    drop(one_way, f"ip saddr {nodes[16].address} tcp dport {SPAN}")
    near, far = nodes[23], nodes[9]
    hosts = misled.read("/etc/hosts").replace(f"{near.address} {near.name}", "")
    misled.write("/etc/hosts", f"{hosts}{far.address} {near.name}\n")
    # Whoever connects ends it.
    script = "import socket; socket.create_server(('', 29509)).accept()"
    held.run(f'setsid python3 -c "{script}" >/dev/null 2>&1 </dev/null & echo $! >/tmp/pid')
    wait_for(lambda: listening(held) == {29509})
    done = tool.end(start(nodes))
    dropped = "peers (timed out: dropped)"
    short = "(timed out: dropped; the first 3 ports stand for all)"
    blind = f"{SPAN} of {one_way.name} not reached {short}"
    actual = {
        inbound: f"29505 unreachable from all 3 {dropped}; its own connections pass: inbound",
        outbound: f"29502 not reached at all 3 {dropped}; it is reached itself: outbound",
        deaf: f"{SPAN} neither reached from nor reached at all 4 peers {short}",
        nodes[16]: f"{blind}; the way back works: asymmetric",
        misled: f"to {near.name}: {near.name} resolves to {far.address}, which is {far.name}'s",
    }
    assert not_ok(done) == {node.name: ("fail", text) for node, text in actual.items()}
    assert not_ok(done, "proof.ports") == {held.name: ("warn", "29509: Address already in use")}
    assert listening(held) == {29509}
    held.run("kill $(cat /tmp/pid)")
    wait_for(lambda: nothing_left(nodes))

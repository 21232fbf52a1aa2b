"""ClusterShell as the transport, on real nodes: over ssh and through faulty gateways."""

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gevent
import pytest
from pyinfra.api import Config

from nodeready.agent.asking import Answer, Request, Transport, once
from nodeready.fleet.inventory import load as inventory_load
from nodeready.fleet.transport.clush.transport import Clush
from nodeready.lab import LabNode, host
from tests.command import ours, wait_for
from tests.conftest import _lab_name, started_lab
from tests.lab.rows import rows

#: The first two are gateways, the others are behind them.
NODES, GATEWAYS = 6, 2
HERE = socket.gethostname().split(".")[0]
PYTHON = "/usr/local/bin/python3"

# One worker starts the nodes, once.
pytestmark = pytest.mark.xdist_group("clush")


@pytest.fixture(scope="module")
def machines(lab_machine: None) -> Iterator[list[LabNode]]:
    with started_lab(_lab_name("clush"), NODES) as lab:
        for node in lab.nodes[:GATEWAYS]:
            make_gateway(node)
        yield lab.nodes


def make_gateway(node: LabNode) -> None:
    """Host keys that it does not know are taken."""
    node.write("/root/.ssh/config", "Host *\n  StrictHostKeyChecking accept-new\n", 0o600)


class Cluster:
    """The nodes, and transports to them. `told`: what a transport said of its gateways."""

    def __init__(self, nodes: list[LabNode], directory: Path) -> None:
        self.nodes, self.directory, self.told = nodes, directory, list[str]()
        self.names = [node.name for node in nodes]
        self.addresses = [str(node.inventory_data()[1]["ssh_hostname"]) for node in nodes]
        gateways = ",".join(self.names[:GATEWAYS])
        self.route({HERE: gateways, gateways: ",".join(self.behind)})

    @property
    def behind(self) -> list[str]:
        return self.names[GATEWAYS:]

    def route(self, routes: Mapping[str, str]) -> None:
        text = "".join(f"{source}: {targets}\n" for source, targets in routes.items())
        (self.directory / "topology.conf").write_text(f"[routes]\n{text}")

    def inventory(self, **data: Any) -> Path:
        path = self.directory / "inventory.py"
        hosts = [(node.name, {**node.inventory_data()[1], **data}) for node in self.nodes]
        path.write_text(f"lab = {hosts!r}\n")
        return path

    def transport(
        self, *, names: list[str] | None = None, sudo: bool = False, **data: Any
    ) -> Clush:
        hosts = list(inventory_load.load(str(self.inventory(**data)), trusted=True))
        config = Config()
        config.SUDO = sudo
        chosen = [host for host in hosts if names is None or host.name in names]
        topology = str(self.directory / "topology.conf")
        return Clush(
            chosen, config, further_hosts=hosts, topology=topology, notify=self.told.append
        )

    def sources(self, transport: Transport) -> dict[str, str]:
        """Node -> the address that asks it."""
        answers = asked(transport, 'echo "$SSH_CONNECTION"')
        return {name: answer.stdout.split()[0] for name, answer in answers.items()}

    def node(self, name: str) -> LabNode:
        return self.nodes[self.names.index(name)]

    def left(self) -> list[str]:
        """What there still is of a run: its processes on a node, or an ssh here."""
        here = host.run(["ps", "-eo", "args"]).stdout
        addresses = "|".join(map(re.escape, self.addresses))
        found = re.findall(rf"^.*ssh .* (?:{addresses}) .*$", here, re.M)
        for node in self.nodes:
            there = node.enter(["ps", "-eo", "args"]).stdout
            found += re.findall(r"^(?:ssh .*|.*zlib.*|.*nodeready-[0-9a-f]{16}.*)$", there, re.M)
            found += ours(node)
        return found


@pytest.fixture
def cluster(machines: list[LabNode], tmp_path: Path) -> Iterator[Cluster]:
    """Nothing of a test is left on the nodes, which are whole again afterwards."""
    cluster = Cluster(machines, tmp_path)
    yield cluster
    for node in machines:
        if not node.alive:
            node.reboot()
    wait_for(lambda: not cluster.left())


def asked(transport: Transport, script: str, limit_s: int = 20, **how: Any) -> dict[str, Answer]:
    """The same question to every node."""
    said = list(transport.ask([Request(name, script, limit_s, **how) for name in transport.nodes]))
    assert sorted(name for name, _ in said) == sorted(transport.nodes)
    return dict(said)


def test_every_byte_goes_there_and_comes_back(cluster):
    """Through gateways, whatever a login prints, at once and line by line."""
    payload = "".join(chr(33 + n % 90) + ("\n" if n % 977 == 0 else "") for n in range(1_000_000))
    for node in cluster.nodes:
        node.write("/root/.bashrc", "echo welcome; echo nodeready >&2\n")
    octets = "".join(f"\\\\{at:03o}" for at in range(1, 256))
    script = f'printf "{octets}"; printf "no end of line" >&2; exit 7'
    reads = 'while read -r line <&3; do echo "mark $line"; done; echo "mark end"'
    gateways = set(cluster.addresses[:GATEWAYS])
    with cluster.transport() as transport:
        for answer in asked(transport, script).values():
            assert answer.gap is None
            assert answer.stdout.encode("utf-8", "surrogateescape") == bytes(range(1, 256))
            assert answer.stderr.endswith("no end of line")
            assert (answer.rc, answer.seconds > 0) == (7, True)
        for answer in asked(transport, f"head -c {len(payload)} <&3", payload=payload).values():
            assert answer.stdout == payload
        for node in cluster.nodes:
            node.run("rm /root/.bashrc")
        source = cluster.sources(transport)
        assert {source[name] for name in cluster.behind} == gateways
        assert not gateways & {source[name] for name in cluster.names[:GATEWAYS]}
        asks = [Request(name, reads, 60, payload="", mark="mark") for name in transport.nodes]
        channels = [transport.open(request) for request in asks]
        for at in range(3):
            for channel in channels:
                channel.send_line(f"{at}")
            for channel in channels:
                assert channel.read_line(15) == f"mark {at}"
        for channel in channels:
            channel.close()
    assert cluster.told == []


KEYS = "/root/.ssh/authorized_keys"
#: sshd reads its keys again.
HANGUP = "kill -HUP $(cat /run/sshd.pid); sleep 1"
NEW_KEY = "ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key"


def does(script: str) -> Callable[[LabNode], object]:
    return lambda node: node.enter(["sh", "-c", script])


#: What is done to a node, what undoes it, and words of it behind a gateway.
TROUBLES: list[tuple[Callable[[LabNode], object], Callable[[LabNode], object], str]] = [
    (does(f"mv {KEYS} {KEYS}.away"), does(f"mv {KEYS}.away {KEYS}"),
     r"refused user root with any key of gateway \S+$"),
    (LabNode.kill, LabNode.reboot, "no route to the node|no answer in 15 s"),
    (LabNode.pause_sshd, LabNode.resume_sshd, "accepts connections but sends no SSH banner"),
    (does(f"cd /etc/ssh; mkdir away; mv ssh_host_* away; {NEW_KEY}; {HANGUP}"),
     does(f"cd /etc/ssh; mv away/* .; rmdir away; {HANGUP}"),
     r"host key of \S+ changed; refused\..*known_hosts of gateway"),
]  # fmt: skip


def test_nodes_without_a_connection_are_named_with_their_cause(cluster):
    """Each once, and they cost the others nothing."""
    troubled = cluster.nodes[GATEWAYS:]
    with cluster.transport() as transport:
        asked(transport, "true")
    for node, (trouble, _, _) in zip(troubled, TROUBLES, strict=True):
        trouble(node)
    try:
        with cluster.transport() as transport:
            answers = asked(transport, "echo well")
    finally:
        for node, (_, undo, _) in zip(troubled, TROUBLES, strict=True):
            undo(node)
    for node, (_, _, words) in zip(troubled, TROUBLES, strict=True):
        answer = answers.pop(node.name)
        assert answer.gap
        assert re.search(words, answer.gap.reason), answer
    assert {answer.stdout for answer in answers.values()} == {"well\n"}
    assert cluster.told == []


def test_an_unfit_gateway_is_reported_once_and_gone_around(cluster):
    """For one node one gateway is enough, and nobody looks at the unfit one."""
    second = cluster.nodes[1]
    second.write(PYTHON, "#!/bin/sh\necho sh: python3: not found >&2\nexit 127\n", 0o755)
    try:
        with cluster.transport(names=cluster.behind[:1]) as transport:
            (alone,) = cluster.sources(transport).values()
        assert cluster.told == []
        with cluster.transport() as transport:
            for _ in range(2):
                sources = cluster.sources(transport)
    finally:
        second.run(f"rm {PYTHON}")
    (line,) = cluster.told
    assert line.startswith(f"gateway {second.name} is not used: sh: python3: not found; install")
    found = {alone, *(sources[name] for name in cluster.behind)}
    assert found == {cluster.addresses[0]}


@pytest.mark.nightly
def test_without_any_gateway_a_node_is_asked_directly_or_unreachable(cluster, tool):
    """Which gateways are not used is told, and why."""
    first, second, away, *_ = cluster.nodes
    where, topology = cluster.inventory(), cluster.directory / "topology.conf"
    words = ("--limit", ",".join(cluster.behind), "--only", "ptrace.scope", "--format", "json")
    for node in (first, second, away):
        node.stop_sshd()
    try:
        done = tool("audit", where, "--via", "clush", "--topology", topology, *words)
    finally:
        for node in (first, second, away):
            node.resume_sshd()
    assert done.status == 4, done
    errors = {**dict.fromkeys(done.nodes, ""), **done.reasons}
    refused = f"{away.address}: connection refused: is sshd running?"
    assert errors == {**dict.fromkeys(cluster.behind, ""), away.name: refused}
    for gateway in (first, second):
        told = rf"gateway {gateway.name} is not used: {gateway.address}: connection refused"
        assert len(re.findall(told, done.err)) == 1, done


#: Goes on when the test says so.
HELD = "touch /run/began; until [ -e /run/go ]; do sleep 0.2; done; echo well"


def once_all_run(cluster: Cluster, names: Iterable[str], act: Callable[[], object]) -> None:
    """Do it as soon as HELD runs on these nodes; then let all others go on."""

    def wait() -> None:
        for name in names:
            while cluster.node(name).enter(["test", "-e", "/run/began"], check=False).returncode:
                gevent.sleep(0.2)
        act()
        for node in cluster.nodes:
            if node.alive:
                node.enter(["touch", "/run/go"])

    for node in cluster.nodes:
        node.enter(["rm", "-f", "/run/began", "/run/go", "/root/ran"])
    gevent.spawn(wait)


#: What takes a gateway away while its nodes run something.
DEATHS: dict[str, Callable[[LabNode], object]] = {
    "power": LabNode.kill,
    "its program": lambda node: node.enter(["pkill", "-KILL", "-f", "zlib"]),
    "its sshd": lambda node: node.enter(["pkill", "-KILL", "-x", "sshd"]),
}


@pytest.mark.parametrize("how", rows(DEATHS, "power"))
def test_a_gateway_and_a_node_that_die_in_the_middle_cost_what_they_had(cluster, how):
    """Each node is named once; what may have begun there is not begun again."""
    first = cluster.nodes[0]
    with cluster.transport(names=cluster.behind) as transport:
        # Which nodes go over which gateway is the same while they are asked the same.
        sources, address = cluster.sources(transport), cluster.addresses[0]
        mine = {name for name, source in sources.items() if source == address}
        victim = next(name for name in cluster.behind if name not in mine)
        deaths = (lambda: DEATHS[how](first), cluster.node(victim).kill)
        once_all_run(cluster, transport.nodes, lambda: [death() for death in deaths])
        answers = asked(transport, f"echo ran >>/root/ran; {HELD}", 60)
        lost = {
            name: (one.gap.kind, one.gap.reason) for name, one in answers.items() if not one.ok
        }
        assert lost == {
            **dict.fromkeys(mine, ("lost", f"gateway {first.name}: connection lost")),
            victim: ("lost", "connection lost"),
        }
        again = asked(transport, "cat /root/ran")
    if first.alive:
        first.resume_sshd()
    del again[victim]
    assert {answer.stdout for answer in again.values()} == {"ran\n"}
    assert [line.split(":")[0] for line in cluster.told] == [f"gateway {first.name} is not used"]


@pytest.mark.nightly
def test_a_node_that_hangs_is_late(cluster):
    last = cluster.nodes[-1]
    with cluster.transport() as transport:
        asked(transport, "true")
        last.freeze()
        try:
            conversations = {
                name: once(Request(name, "echo well", 60)) for name in transport.nodes
            }
            began = time.monotonic()
            found = dict(transport.converse(conversations, began + 5))
            assert time.monotonic() - began < 25
        finally:
            last.thaw()
    late = found.pop(last.name)
    assert (late.value.gap.kind, late.value.gap.reason) == ("unreachable", "no answer in time")
    assert {outcome.value.stdout for outcome in found.values()} == {"well\n"}


def test_an_interrupt_ends_what_runs_on_the_nodes(cluster):
    def sleeping() -> list[str]:
        look = ["pgrep", "-f", "sleep 977"]
        return [one.name for one in cluster.nodes if not one.enter(look, check=False).returncode]

    with cluster.transport() as transport:
        first, *others = transport.nodes
        conversations = {name: once(Request(name, "sleep 977", 1000)) for name in others}
        conversations[first] = once(Request(first, "echo well", 1000))
        stream: Any = transport.converse(conversations)
        assert next(stream)[1].value.stdout == "well\n"
        wait_for(lambda: len(sleeping()) == len(others))
        began = time.monotonic()
        found = [stream.throw(KeyboardInterrupt()), *stream]
        assert time.monotonic() - began < 25
        assert sleeping() == []
        kinds = sorted((name, outcome.value.gap.kind) for name, outcome in found)
        assert kinds == [(name, "interrupted") for name in sorted(others)]


def test_sudo_without_a_password_goes_through_gateways(cluster):
    """With a gateway in between nobody is asked for a password: it would go through there."""
    for node in cluster.nodes:
        keys = "install -d -o ml /home/ml/.ssh; cp /root/.ssh/* /home/ml/.ssh/"
        node.run(f"{keys}; chown -R ml /home/ml/.ssh; echo 'ml ALL=(ALL) ALL' >/etc/sudoers.d/ml")
    with cluster.transport(sudo=True, ssh_user="ml") as transport:
        answers = asked(transport, "id -u")
    for name, answer in answers.items():
        assert answer.gap.kind == ("refused" if name in cluster.behind else "sudo")
        assert name not in cluster.behind or "which goes through no gateway" in answer.reason()
    for node in cluster.nodes:
        node.run("echo 'ml ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/ml")
    with cluster.transport(sudo=True, ssh_user="ml") as transport:
        answers = asked(transport, "id -u")
    for node in cluster.nodes:
        node.run("rm -r /etc/sudoers.d/ml /home/ml/.ssh")
    assert {answer.stdout for answer in answers.values()} == {"0\n"}


def test_a_process_of_clustershells_that_dies_names_every_node(cluster):
    with cluster.transport() as transport:
        asked(transport, "true")
        gevent.spawn_later(1, os.kill, transport._pool.children[0].pid, 9)
        found = asked(transport, "sleep 5")
    (said,) = {answer.gap.reason for answer in found.values()}
    # With no signal where gevent took the child's status, for a subprocess of its own had been.
    assert re.fullmatch(r"ClusterShell's process (was ended by signal 9|ended)", said)


@pytest.mark.nightly
def test_two_rows_of_gateways(cluster):
    first, second, *rest = cluster.names
    cluster.route({HERE: first, first: second, second: ",".join(rest)})
    with cluster.transport() as transport:
        sources = cluster.sources(transport)
    assert {sources[name] for name in rest} == {cluster.addresses[1]}

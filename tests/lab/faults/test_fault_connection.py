"""Nodes that cannot be reached, or not any more: they are named, and the others finish."""

import contextlib
import re
import socket
import threading
from collections.abc import Iterator

import pytest

from nodeready.fleet.inventory.nodeset import nodes
from tests.cases import read_table
from tests.command import hang, hangs, ours, wait_for, written


@contextlib.contextmanager
def crowded(address: str, times: int) -> Iterator[int]:
    """A port that leads to the node's sshd, which has no room for so many connections first."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as ends:

        def carry(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    target.sendall(data)

        def serve() -> None:
            with contextlib.suppress(OSError):
                for _ in range(times):
                    server.accept()[0].close()
                near = ends.enter_context(server.accept()[0])
                far = ends.enter_context(socket.create_connection((address, 22)))
                threading.Thread(target=carry, args=(far, near), daemon=True).start()
                carry(near, far)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


@contextlib.contextmanager
def peer(say: bytes, *, closes: bool = False) -> Iterator[int]:
    """A stand-in for a node: it accepts connections, says this, and then nothing; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connections.append(connection)
                    connection.sendall(say)
                    if closes:
                        connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        for connection in connections:
            connection.close()


def test_node_unreachable(fresh_nodes, fleet, tool):
    good, crowd, frozen, refusing = fresh_nodes(4)
    frozen.freeze()
    refusing.stop_sshd()
    with (
        peer(b"") as silent,
        peer(b"SSH-2.0-OpenSSH_9.2\r\n") as stuck,
        peer(b"", closes=True) as closing,
        peer(b"Exceeded MaxStartups\r\n", closes=True) as full,
        peer(b"Not allowed at this time\r\n", closes=True) as punished,
        crowded(crowd.address, 2) as busy,
    ):
        here = {"ssh_hostname": "127.0.0.1", "ssh_strict_host_key_checking": "no"}
        where = fleet(
            [good, frozen, refusing],
            {
                "nowhere": {"ssh_hostname": "nowhere.invalid"},
                "silent": {**here, "ssh_port": silent},
                "stuck": {**here, "ssh_port": stuck},
                "closing": {**here, "ssh_port": closing},
                "full": {**here, "ssh_port": full},
                "punished": {**here, "ssh_port": punished},
                "busy": {**crowd.inventory_data()[1], **here, "ssh_port": busy},
            },
        )
        done = tool("deploy", where, "--yes", "-v", "--only", "ptrace")
    frozen.thaw()
    assert done.status == 4, done
    expected = {
        frozen.name: r"no (answer in 15 s|route to the node)",
        refusing.name: "connection refused: is sshd running?",
        "nowhere": "host name nowhere.invalid does not resolve",
        "silent": "accepts connections but sends no SSH banner",
        "stuck": "stopped during the SSH handshake, within 15 s",
        "closing": "its sshd closed the connection before the login: MaxStartups",
        "full": r"its sshd closed the connection before the login \(Exceeded MaxStartups\)",
        "punished": r"its sshd closed the connection before the login \(PerSourcePenalties\)",
    }
    for name, reason in expected.items():
        assert re.search(rf"^unreachable +{name}\n +.*{reason}", done.out, re.M), (name, done)
    assert re.search("^2 changed", done.out, re.M)
    assert "0 failed, 8 unreachable" in done.out
    assert not re.search("^unreachable +busy", done.out, re.M)
    assert good.run("sysctl -n kernel.yama.ptrace_scope").stdout == "0\n"
    # Progress without a terminal: plain lines that name who is waited for.
    waiting = [line for line in done.lines if line.startswith("nodeready: probing: ")]
    assert "silent" in waiting[-1]


#: Case -> what its host has in the inventory, what the one line says.
REFUSALS = read_table(__file__, "REFUSALS")


def test_refused(fresh_nodes, fleet, tool, tmp_path):
    """One line for each, and not one login more."""
    good, bad = fresh_nodes(2)
    other_key = good.run("cat /etc/ssh/ssh_host_ed25519_key.pub").stdout.split()[:2]
    paths = {name: tmp_path / name for name in ("other", "empty", "locked")}
    paths["other"].write_text(f"{bad.address} {' '.join(other_key)}\n")
    paths["empty"].write_text("")
    good.enter(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", "/root/locked"])
    paths["locked"].write_text(good.read("/root/locked"))
    words = {**paths, "address": bad.address, "key": bad.lab.ssh_key}
    before = written(bad), paths["other"].read_text()
    _, login = bad.inventory_data()
    hosts = {
        case: {**login, **{key: value.format(**words) for key, value in data.items()}}
        for case, (data, _) in REFUSALS.items()
    }
    done = tool("audit", fleet([good], hosts), "--only", "ptrace", "-v", status=4)
    quoted = {name: re.escape(str(value)) for name, value in words.items()}
    for case, (_, pattern) in REFUSALS.items():
        lines = re.findall(rf"^unreachable +{case}\n +(.*)$", done.out, re.M)
        assert len(lines) == 1, (case, done)
        assert re.fullmatch(pattern.format(**quoted), lines[0]), lines
    assert re.search(rf"^fail +ptrace.scope +{good.name}  hides cause$", done.out, re.M), done
    assert (written(bad), paths["other"].read_text()) == before
    log = bad.log.read_text(errors="replace")
    assert log.count("Failed publickey for invalid user nobody") <= 1


DEATHS = {
    "power": lambda node: node.kill(),
    "cable": lambda node: node.freeze(),
    "sshd": lambda node: node.enter(["sh", "-c", "kill -9 $(pgrep -x sshd)"]),
}


@pytest.mark.parametrize(
    "deaths", [["power", "sshd"], pytest.param(["cable"], marks=pytest.mark.nightly)]
)
def test_dies_in_the_middle(deaths, fresh_nodes, fleet, tool):
    """While a change runs on each: what was done is told, the rest too, and the others finish."""
    good, *dying = fresh_nodes(1 + len(deaths))
    for node in dying:
        hang(node)
    where = fleet([good, *dying])
    running = tool.start("deploy", where, "--yes", "--only", "core_dumps,limits")
    wait_for(lambda: all(map(hangs, dying)))
    for node, death in zip(dying, deaths, strict=True):
        DEATHS[death](node)
    done = tool.end(running)
    if "cable" in deaths:
        dying[0].thaw()
    assert done.status == 4, done
    said = r"^unreachable +(\S+)\n +connection lost.* in core_dumps\.pattern$"
    lost = {name for part in re.findall(said, done.out, re.M) for name in nodes(part)}
    assert lost == {node.name for node in dying}, done
    assert f"0 failed, {len(dying)} unreachable" in done.out
    assert re.search(r"^changed .*core_dumps\.directory$", done.out, re.M), done
    steps = "core_dumps.directory, core_dumps.pattern, limits.logins"
    assert f"changed     {good.name}: {steps}\n" in done.out, done
    # The step was cut, the file in it is whole.
    path = "/etc/sysctl.d/99-zz-nodeready-core_dumps.conf"
    for node in (node for node in dying if node.alive):
        assert node.read(path) == good.read(path)
        assert not [line for line in ours(node) if ".nodeready." in line]

"""`nodeready env` on real nodes: what they agree on, what they do not, and its manners."""

import shlex
import signal

from nodeready.fleet.inventory.nodeset import fold
from tests.command import ours, wait_for, written

RENAME = (
    "ip link set eth0 down; ip link set eth0 name eth7; ip link set eth7 up;"
    "until ip -4 route | grep -q 'dev eth7'; do sleep 0.1; done"
)


def evaluated(text: str) -> dict[str, str]:
    """What it exports; that shells take it so, tests/unit asks."""
    words = [shlex.split(line)[1] for line in text.splitlines() if line.startswith("export ")]
    return dict(word.split("=", 1) for word in words)


def unwrapped(text: str) -> str:
    """Each comment as one line."""
    return text.replace("\n#   ", " ")


def test_nodes_that_agree(fresh_nodes, fleet, tool, tmp_path):
    nodes = fresh_nodes(2, profile="h100")
    where = fleet(nodes)
    before = [written(node) for node in nodes]
    done = tool("env", where)
    assert (done.status, done.err) == (0, ""), done
    assert evaluated(done.out) == {
        "NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0",
        "OMPI_MCA_btl_tcp_if_include": "eth0", "MASTER_ADDR": nodes[0].address,
        "NCCL_IB_HCA": "=" + ",".join(f"mlx5_{number}" for number in range(8)),
        "PDSH_RCMD_TYPE": "ssh", "MASTER_PORT": "29500",
    }, done  # fmt: skip
    assert max(map(len, done.out.splitlines())) <= 80
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
    odd.enter(["sh", "-c", RENAME])
    script = "import socket,time; s=socket.create_server(('',29501)); time.sleep(600)"
    odd.run(f'setsid python3 -c "{script}" >/dev/null 2>&1 </dev/null &')
    wait_for(lambda: "29501" in odd.run("ss -Hltn").stdout)
    where = fleet(nodes, {odd.name: {"port_range": (29501, 29510)}})
    done = tool("env", where, status=3)
    assert evaluated(done.out) == {
        "PDSH_RCMD_TYPE": "ssh", "MASTER_ADDR": nodes[0].address, "MASTER_PORT": "29502",
    }, done  # fmt: skip
    most = fold(node.name for node in alike)
    told = f"# NCCL_SOCKET_IFNAME is not set: the nodes differ\n#   =eth0  {most}\n"
    assert f"{told}#   =eth7  {odd.name}\n# mend {odd.name}, " in done.out, done
    assert f"# not 29501 on {odd.name}: python3 of root listens\n" in unwrapped(done.out)
    interfaces = ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include"]
    assert [line.split()[1] for line in done.lines] == interfaces
    done = tool("env", where, "--ports", "29501")
    words = "nodeready: MASTER_PORT is not set: no port of 29501 is free on all nodes"
    assert words in done.lines, done


def test_nodes_that_give_no_answer(fresh_nodes, fleet, tool, tmp_path):
    """They are named, on standard error and in the file; of none alone nothing is written."""
    good, gone, slow = fresh_nodes(3)
    gone.stop_sshd()
    done = tool("env", fleet([good, gone]), status=4)
    why = f"{gone.name}: {gone.address}: connection refused: is sshd running?"
    assert done.lines == [
        "unreachable  " + why.partition(": ")[0],
        " " * 9 + why.partition(": ")[2],
    ]
    assert f"# not among them: {why}" in unwrapped(done.out)
    assert evaluated(done.out)["MASTER_PORT"] == "29500"
    path = tmp_path / "job.env"
    path.write_text("old\n")
    done = tool("env", fleet([gone]), "-o", path)
    assert (done.status, done.out, path.read_text()) == (4, "", "old\n"), done
    # An interrupt exports nothing.
    slow.write("/root/.bashrc", "touch /run/waiting; sleep 60\n")
    running = tool.start("env", fleet([good, slow]), "-o", path)
    wait_for(lambda: not slow.enter(["test", "-e", "/run/waiting"], check=False).returncode)
    running.send_signal(signal.SIGINT)
    done = tool.end(running)
    assert (done.status, done.out, path.read_text()) == (130, "", "old\n"), done
    assert done.lines == ["nodeready: interrupted: nothing is exported"]

"""RDMA between nodes, with a stand-in for ib_write_bw that prints what a real one prints."""

import signal
from pathlib import Path

from tests.builders.proof import processes
from tests.command import wait_for, written
from tests.lab.test_proof_active import SMI

DATA = Path(__file__).parents[1] / "unit" / "subjects" / "data" / "active"
TABLE = (DATA / "ib_write_bw-bnxt.txt").read_text()
#: A client connects to the server's port, and prints its node's rate of the device.
TOOL = """#!/usr/bin/python3
import os, socket, sys, time
words = sys.argv[1:]
device, port = (words[words.index(key) + 1] for key in ("-d", "-p"))
rate = f"/run/rate/{device}"
if os.path.exists("/run/hangs"):
    time.sleep(987)
if words[-1] == port:
    server = socket.create_server(("", int(port)))
    server.accept()[0].recv(1)
else:
    with socket.create_connection((words[-1], int(port))) as server:
        text = open(rate).read() if os.path.exists(rate) else "363.47"
    if not text:
        sys.exit(" Unable to Connect the HCA's through the link")
    print(TABLE.replace("363.47", text))
"""
ONLY = ("--only", "proof.rdma_bandwidth", "--user", "root", "--format", "json")


def put(nodes, tool: str = TOOL) -> None:
    for node in nodes:
        node.write("/usr/local/bin/nvidia-smi", SMI, mode=0o755)
        text = tool.replace("import os", f"TABLE = {TABLE!r}\nimport os", 1)
        node.write("/usr/local/bin/ib_write_bw", text, mode=0o755)


def results(done) -> dict[str, str]:
    proofs = {name: found["proof.rdma_bandwidth"] for name, found in done.results.items()}
    return {name: f"{proof['status']}: {proof['actual']}" for name, proof in proofs.items()}


def test_a_slow_port_and_a_missing_tool_are_named_and_nothing_is_left(tool, fleet, fresh_nodes):
    nodes = one, slow, three, bare = fresh_nodes(4, profile="h100")
    put(nodes)
    bare.run("rm /usr/local/bin/ib_write_bw")
    slow.write("/run/rate/mlx5_3", "181.2")
    one.write("/run/rate/mlx5_3", "181.9")
    before = [(processes(node), written(node)) for node in nodes]
    done = tool("ready", fleet(nodes), "--budget", "100", *ONLY)
    assert done.status == 3
    text = f"mlx5_3/1 to {one.name}, {three.name}: 181.2 Gbit/s, the median of 3 nodes is 363.5"
    assert results(done) == {
        one.name: "ok: 9 ports, 363.5 Gbit/s or more",
        slow.name: f"fail: {text}",
        three.name: "ok: 9 ports, 363.5 Gbit/s or more",
        bare.name: "unknown: ib_write_bw is not installed",
    }
    assert [(processes(node), written(node)) for node in nodes] == before


def test_a_test_without_an_end_ends_with_the_budget_and_with_ctrl_c(tool, fleet, fresh_nodes):
    nodes = fresh_nodes(2, profile="h100")
    put(nodes)
    nodes[0].write("/run/hangs", "")
    before = [processes(node) for node in nodes]
    words = ("ready", fleet(nodes), "--budget")
    done = tool(*words, "45", *ONLY)
    lines = results(done)
    assert {text.partition(":")[0] for text in lines.values()} == {"unknown"}
    assert [processes(node) for node in nodes] == before
    for number, status in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        running = tool.start(*words, "100", *ONLY)
        wait_for(lambda: any("ib_write_bw" in row for row in processes(nodes[0])))
        running.send_signal(number)
        assert tool.end(running).status == status
        wait_for(lambda: [processes(node) for node in nodes] == before)

"""The active tests over nodes, with stand-ins for tools, which print what real ones print."""

import signal
from pathlib import Path

from tests.builders.proof import processes
from tests.command import Done, wait_for, written

DATA = Path(__file__).parents[1] / "unit" / "subjects" / "data" / "active"
SMI = """#!/bin/sh
case "$1" in
*compute*) ! [ -e /run/busy ] || cat /run/busy ;;
*) for gpu in 0 1 2 3 4 5 6 7; do echo "$gpu, 4, 81559, NVIDIA H100 80GB HBM3"; done ;;
esac
"""
OF_ROOT = ("--user", "root", "--format", "json")
ONLY = ("--only", "proof.diagnostic,proof.bandwidth", *OF_ROOT)


def put(node, dcgmi: str, rates: str) -> None:
    tools = {"nvidia-smi": SMI, "dcgmi": f"#!/bin/sh\n{dcgmi}\n",
             "nvbandwidth": f"#!/bin/sh\ncat <<'X'\n{rates}\nX\n"}  # fmt: skip
    for name, text in tools.items():
        node.write(f"/usr/local/bin/{name}", text, mode=0o755)


def told(done: Done, test: str) -> dict[str, str]:
    """Node -> what the test says of it."""
    rows = {name: results[f"proof.{test}"] for name, results in done.results.items()}
    return {name: f"{row['status']}: {row['actual']}" for name, row in rows.items()}


def test_faults_are_named_idle_gpus_are_tested_and_nothing_is_left(tool, fleet, fresh_nodes):
    good, faulty, busy = nodes = fresh_nodes(3)
    rates = (DATA / "nvbandwidth-0.10-h100.txt").read_text()
    for node in nodes:
        put(node, f"cat <<'X'\n{(DATA / 'dcgm-3-level-3.json').read_text()}\nX", rates)
    slow = rates.replace("55.33", "27.10")
    put(faulty, f"cat <<'X'\n{(DATA / 'dcgm-4-gb10.json').read_text()}\nX\nexit 226", slow)
    busy.write("/run/busy", "4711, python\n")
    before = [(processes(node), written(node)) for node in nodes]
    done = tool("ready", fleet(nodes), "--active", "3", *ONLY, status=3)
    diagnostic, bandwidth = (told(done, test) for test in ("diagnostic", "bandwidth"))
    assert diagnostic[good.name] == "ok: 4 tests passed; skipped: EUD Test"
    assert bandwidth[good.name] == "ok: from the host 55.3 GB/s, to the host 55.2 GB/s"
    assert diagnostic[faulty.name].startswith("warn: software on GPU 0: Persistence Mode")
    median = "the median of 16 NVIDIA H100 80GB HBM3 is 55.4"
    assert bandwidth[faulty.name] == f"fail: GPU 7 copies from the host at 27.1 GB/s: {median}"
    in_use = "unknown: the GPUs are in use: pid 4711 python"
    assert (diagnostic[busy.name], bandwidth[busy.name]) == (in_use, in_use)
    assert [(processes(node), written(node)) for node in nodes] == before


def test_a_test_without_an_end_ends_with_the_budget_and_with_ctrl_c(tool, fleet, fresh_node):
    put(fresh_node, "trap 'touch /run/asked; exit 1' TERM; sleep 987 & wait", "")
    before = processes(fresh_node)
    words = ("ready", fleet([fresh_node]), "--active", "2", "--budget")
    done = tool(*words, "25", *ONLY)
    text = told(done, "diagnostic")[fresh_node.name]
    assert text.startswith("unknown: dcgmi diag -r 2: did not end within ")
    fresh_node.enter(["rm", "/run/asked"])
    assert processes(fresh_node) == before
    running = tool.start(*words, "100", *ONLY)
    wait_for(lambda: any("sleep 987" in row for row in processes(fresh_node)))
    running.send_signal(signal.SIGINT)
    assert tool.end(running).status == 130
    fresh_node.enter(["rm", "/run/asked"])
    assert processes(fresh_node) == before


# --- RDMA between nodes, with a stand-in for ib_write_bw.

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
RDMA = ("--only", "proof.rdma_bandwidth", *OF_ROOT)


def put_rdma(nodes) -> None:
    for node in nodes:
        node.write("/usr/local/bin/nvidia-smi", SMI, mode=0o755)
        text = TOOL.replace("import os", f"TABLE = {TABLE!r}\nimport os", 1)
        node.write("/usr/local/bin/ib_write_bw", text, mode=0o755)


def test_a_slow_port_and_a_missing_tool_are_named_and_nothing_is_left(tool, fleet, fresh_nodes):
    nodes = one, slow, three, bare = fresh_nodes(4, profile="h100")
    put_rdma(nodes)
    bare.run("rm /usr/local/bin/ib_write_bw")
    slow.write("/run/rate/mlx5_3", "181.2")
    one.write("/run/rate/mlx5_3", "181.9")
    before = [(processes(node), written(node)) for node in nodes]
    done = tool("ready", fleet(nodes), "--budget", "100", *RDMA, status=3)
    text = f"mlx5_3/1 to {one.name}, {three.name}: 181.2 Gbit/s, the median of 3 nodes is 363.5"
    assert told(done, "rdma_bandwidth") == {
        one.name: "ok: 9 ports, 363.5 Gbit/s or more",
        slow.name: f"fail: {text}",
        three.name: "ok: 9 ports, 363.5 Gbit/s or more",
        bare.name: "unknown: ib_write_bw is not installed",
    }
    assert [(processes(node), written(node)) for node in nodes] == before


def test_rdma_without_an_end_ends_with_the_budget_and_with_ctrl_c(tool, fleet, fresh_nodes):
    nodes = fresh_nodes(2, profile="h100")
    put_rdma(nodes)
    nodes[0].write("/run/hangs", "")
    before = [processes(node) for node in nodes]
    words = ("ready", fleet(nodes), "--budget")
    done = tool(*words, "45", *RDMA)
    lines = told(done, "rdma_bandwidth")
    assert {text.partition(":")[0] for text in lines.values()} == {"unknown"}
    assert [processes(node) for node in nodes] == before
    for number, status in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        running = tool.start(*words, "100", *RDMA)
        wait_for(lambda: any("ib_write_bw" in row for row in processes(nodes[0])))
        running.send_signal(number)
        assert tool.end(running).status == status
        wait_for(lambda: [processes(node) for node in nodes] == before)

"""The active tests over nodes, with stand-ins for the tools that print what real ones print."""

import signal
from pathlib import Path

from tests.builders.proof import processes
from tests.command import wait_for, written

DATA = Path(__file__).parents[1] / "unit" / "subjects" / "data" / "active"
SMI = """#!/bin/sh
case "$1" in
*compute*) ! [ -e /run/busy ] || cat /run/busy ;;
*) for gpu in 0 1 2 3 4 5 6 7; do echo "$gpu, 4, 81559, NVIDIA H100 80GB HBM3"; done ;;
esac
"""
ONLY = ("--only", "proof.diagnostic,proof.bandwidth", "--user", "root", "--format", "json")


def put(node, dcgmi: str, rates: str) -> None:
    tools = {"nvidia-smi": SMI, "dcgmi": f"#!/bin/sh\n{dcgmi}\n",
             "nvbandwidth": f"#!/bin/sh\ncat <<'X'\n{rates}\nX\n"}  # fmt: skip
    for name, text in tools.items():
        node.write(f"/usr/local/bin/{name}", text, mode=0o755)


def results(done) -> dict[str, dict[str, str]]:
    return {
        name: {
            test: f"{results[f'proof.{test}']['status']}: {results[f'proof.{test}']['actual']}"
            for test in ("diagnostic", "bandwidth")
        }
        for name, results in done.results.items()
    }


def test_faults_are_named_idle_gpus_are_tested_and_nothing_is_left(tool, fleet, fresh_nodes):
    good, faulty, busy = nodes = fresh_nodes(3)
    rates = (DATA / "nvbandwidth-0.10-h100.txt").read_text()
    for node in nodes:
        put(node, f"cat <<'X'\n{(DATA / 'dcgm-3-level-3.json').read_text()}\nX", rates)
    slow = rates.replace("55.33", "27.10")
    put(faulty, f"cat <<'X'\n{(DATA / 'dcgm-4-gb10.json').read_text()}\nX\nexit 226", slow)
    busy.write("/run/busy", "4711, python\n")
    before = [(processes(node), written(node)) for node in nodes]
    done = tool("ready", fleet(nodes), "--active", "3", *ONLY)
    assert done.status == 3
    found = results(done)
    assert found[good.name] == {
        "diagnostic": "ok: 4 tests passed; skipped: EUD Test",
        "bandwidth": "ok: from the host 55.3 GB/s, to the host 55.2 GB/s",
    }
    assert found[faulty.name]["diagnostic"].startswith("warn: software on GPU 0: Persistence Mode")
    assert found[faulty.name]["bandwidth"] == (
        "fail: GPU 7 copies from the host at 27.1 GB/s: the median of 16 NVIDIA H100 80GB HBM3 is "
        "55.4"
    )
    in_use = "unknown: the GPUs are in use: pid 4711 python"
    assert found[busy.name] == {"diagnostic": in_use, "bandwidth": in_use}
    assert [(processes(node), written(node)) for node in nodes] == before


def test_a_test_without_an_end_ends_with_the_budget_and_with_ctrl_c(tool, fleet, fresh_node):
    put(fresh_node, "trap 'touch /run/asked; exit 1' TERM; sleep 987 & wait", "")
    before = processes(fresh_node)
    words = ("ready", fleet([fresh_node]), "--active", "2", "--budget")
    done = tool(*words, "25", *ONLY)
    text = results(done)[fresh_node.name]["diagnostic"]
    assert text.startswith("unknown: dcgmi diag -r 2: did not end within ")
    fresh_node.enter(["rm", "/run/asked"])
    assert processes(fresh_node) == before
    running = tool.start(*words, "100", *ONLY)
    wait_for(lambda: any("sleep 987" in row for row in processes(fresh_node)))
    running.send_signal(signal.SIGINT)
    assert tool.end(running).status == 130
    fresh_node.enter(["rm", "/run/asked"])
    assert processes(fresh_node) == before

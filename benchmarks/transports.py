"""`benchmarks/run transports`: the same audit by every transport, beside other engines.

One lab with a real Slurm; eight of its nodes are gateways of ClusterShell's tree. In one run, in
turns: `true` by pyinfra (the yardstick E), ClusterShell (flat, tree), Slurm; `nodeready audit` by
ssh, ssh shared between processes, ClusterShell flat and tree, Slurm; Ansible's setup module.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import ClusterShell

from benchmarks import contenders
from benchmarks.command import Benchmark, BenchmarkReport, Budget, budget_rows
from benchmarks.contenders import EXEC, Cluster, Contender, audit, clush
from nodeready.fleet.inventory.nodeset import fold

TREE, AUDIT_TREE = "clush true, tree", "nodeready audit, clush, tree"
PACKAGE = "/usr/lib/python3/dist-packages/ClusterShell"


def make_gateways(nodes: Cluster, count: int) -> Path:
    """ClusterShell's directory, with a topology in which the first nodes are gateways."""
    gateways, leaves = nodes.lab.nodes[:count], nodes.lab.nodes[count:]
    source = Path(ClusterShell.__file__).parent
    for node in gateways:
        node.run(f"test -e {PACKAGE} || ln -s {source} {PACKAGE}")
        # Gateways learn the key of a node at their first login. clush hands its options on, so
        # that the same path must have the configuration on the gateway.
        for path in ("/root/.ssh/config", str(nodes.lab.ssh_config)):
            node.run(f"mkdir -p {Path(path).parent}")
            node.write(path, "Host *\n  StrictHostKeyChecking accept-new\n", 0o600)
    names = fold([gateway.name for gateway in gateways])
    rows = ["[routes]", f"{socket.gethostname().split('.')[0]}: {names}"]
    for index, gateway in enumerate(gateways):
        rows.append(f"{gateway.name}: {fold([leaf.name for leaf in leaves[index::count]])}")
    directory = nodes.directory / "clustershell"
    directory.mkdir()
    (directory / "topology.conf").write_text("\n".join([*rows, ""]))
    return directory


def _contenders(nodes: Cluster, tree: Path, ansible: Path | None) -> list[Contender]:
    """All contenders; each exits with its own status for "all nodes answered"."""
    inventory = nodes.pyinfra_inventory("inventory", {})
    names, login = fold([node.name for node in nodes.lab.nodes]), f"-F {nodes.lab.ssh_config}"
    slurm = {"SLURM_CONF": str(nodes.lab.directory / "slurm.conf")}
    empty = nodes.directory / "none"
    empty.mkdir(exist_ok=True)
    flat = {"CLUSTERSHELL_CFGDIR": str(empty)}
    branches = {"CLUSTERSHELL_CFGDIR": str(tree), "CLUSTERSHELL_GW_PYTHON_EXECUTABLE": "python3"}
    steps = ["srun", f"-N{nodes.size}", f"-n{nodes.size}", f"-w{names}", "true"]
    return [
        contenders.yardstick(inventory),
        clush("clush true", login, names, 64, **flat),
        clush(TREE, login, names, 64, **branches),
        Contender("srun true", steps, environment=slurm),
        audit("nodeready audit, ssh", inventory, "--ssh-processes", "1"),
        audit("nodeready audit, ssh, 2 processes", inventory, "--ssh-processes", "2"),
        audit("nodeready audit, clush", inventory, "--via", "clush", **flat),
        audit("nodeready audit, clush, tree", inventory, "--via", "clush", **branches),
        audit("nodeready audit, srun", inventory, "--via", "srun", **slurm),
        *contenders.ansible_setup(nodes, ansible),
    ]


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    size = arguments.nodes[0]
    with contenders.cluster(size, arguments.name, slurm=True) as nodes:
        tree = make_gateways(nodes, arguments.gateways)
        chosen = _contenders(nodes, tree, arguments.ansible)
        # The first run over the tree is not measured: gateways learn the keys of their nodes.
        trees = [contender for contender in chosen if "tree" in contender.name]
        contenders.in_turns(nodes, trees, 1)
        samples = contenders.in_turns(nodes, chosen, arguments.repeat)
    budget = Budget(f"audit over the tree ÷ {TREE}", 1.2, samples.ratio(AUDIT_TREE, TREE))
    rows = contenders.sample_rows(samples, EXEC, "E", size)
    tables = [("", rows), ("", budget_rows([budget]))]
    remark = f"{arguments.gateways} gateways."
    return BenchmarkReport(f"The transports to {size} nodes", tables, remark)


BENCHMARK = Benchmark(
    _measure,
    {"nodes": "256", "repeat": 3, "gateways": 8},
    ("pyinfra", "paramiko", "ClusterShell"),
    has_ansible=True,
)

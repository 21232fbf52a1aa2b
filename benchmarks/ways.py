"""`benchmarks/run ways`: the same audit by every way to the nodes, beside other engines.

One lab with a real Slurm; eight of its nodes are gateways of ClusterShell's tree. In one run, in
turns: `true` by pyinfra (the yardstick E), ClusterShell (flat, tree), Slurm; `nodeready audit` by
ssh, ssh shared between processes, ClusterShell flat and tree, Slurm; Ansible's setup module.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import ClusterShell

from benchmarks import command, report, table
from benchmarks.cluster import Cluster, cluster
from benchmarks.contenders import BIN, EXEC, Contender, ansible_setup, yardstick
from benchmarks.measure import Sample, median
from nodeready.inventory.nodeset import fold

CLUSH, TREE, OURS = "clush true", "clush true, tree", "nodeready audit, clush, tree"
PACKAGE = "/usr/lib/python3/dist-packages/ClusterShell"


def make_gateways(nodes: Cluster, count: int) -> Path:
    """Gateways of the first nodes, and the topology.conf by which each has its share of the rest.

    Returns the directory with it: ClusterShell's own configuration.
    """
    gateways, rest = nodes.lab.nodes[:count], nodes.lab.nodes[count:]
    source = Path(ClusterShell.__file__).parent
    for node in gateways:
        node.run(f"test -e {PACKAGE} || ln -s {source} {PACKAGE}")
        # The first login to each node is not what is measured: it learns the key. clush hands its
        # own options on: the same path is the gateway's configuration there.
        for path in ("/root/.ssh/config", str(nodes.lab.ssh_config)):
            node.run(f"mkdir -p {Path(path).parent}")
            node.write(path, "Host *\n  StrictHostKeyChecking accept-new\n", 0o600)
    rows = [f"{socket.gethostname().split('.')[0]}: {fold([one.name for one in gateways])}"]
    for at, gateway in enumerate(gateways):
        rows.append(f"{gateway.name}: {fold([one.name for one in rest[at::count]])}")
    directory = nodes.directory / "clustershell"
    directory.mkdir()
    (directory / "topology.conf").write_text("\n".join(["[routes]", *rows, ""]))
    return directory


def contenders(nodes: Cluster, tree: Path, ansible: Path | None) -> list[Contender]:
    """All of them; each exits with its own word for "all nodes answered"."""
    inventory = nodes.pyinfra_inventory("inventory", {})
    names, login = fold([node.name for node in nodes.lab.nodes]), f"-F {nodes.lab.ssh_config}"
    slurm = {"SLURM_CONF": str(nodes.lab.slurm_conf)}
    empty = nodes.directory / "none"
    empty.mkdir(exist_ok=True)
    flat = {"CLUSTERSHELL_CFGDIR": str(empty)}
    branches = {
        "CLUSTERSHELL_CFGDIR": str(tree),
        "CLUSTERSHELL_GW_PYTHON_EXECUTABLE": "python3",
    }
    true = [str(BIN / "clush"), "-S", "-f", "64", "-o", login, "-w", names, "true"]
    audit = [str(BIN / "nodeready"), "audit", str(inventory)]

    def ours(name: str, *words: str, **more: str) -> Contender:
        return Contender(f"nodeready audit, {name}", [*audit, *words], "", (0, 3), more)

    steps = ["srun", f"-N{nodes.size}", f"-n{nodes.size}", f"-w{names}", "true"]
    found = [
        yardstick(inventory),
        Contender(CLUSH, true, "", environment=flat),
        Contender(TREE, true, "", environment=branches),
        Contender("srun true", steps, "", environment=slurm),
        ours("ssh", "--ssh-processes", "1"),
        ours("ssh, 2 processes", "--ssh-processes", "2"),
        ours("clush", "--via", "clush", **flat),
        ours("clush, tree", "--via", "clush", **branches),
        ours("srun", "--via", "srun", **slurm),
    ]
    if ansible is not None:
        names_file = nodes.ansible_inventory({})
        found.append(ansible_setup(names_file, ansible, nodes.size, nodes.directory))
    return found


@dataclass
class Report:
    """Medians by contender, how many runs they are of, and the most logins on one host."""

    size: int = 0
    gateways: int = 0
    found: dict[str, Sample] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    command: str = ""
    about: str = ""

    def rows(self) -> list[tuple[str, ...]]:
        """The table; its first row is the head."""
        unit = self.found[EXEC].wall_s
        head = ("", "runs", "wall", "÷ E", "CPU", "CPU/node", "logins/node", "most on one")
        return [
            head,
            *(
                (
                    name,
                    str(self.runs[name]),
                    f"{one.wall_s:.2f} s",
                    f"{one.wall_s / unit:.2f}",
                    f"{one.cpu_s:.2f} s",
                    f"{one.cpu_s / self.size * 1000:.1f} ms",
                    f"{one.logins:.3g}",
                    str(self.most[name]),
                )
                for name, one in self.found.items()
            ),
        ]

    def budget_rows(self) -> list[tuple[str, ...]]:
        """The limit that the design sets."""
        head = [("", "budget", "measured", "")]
        if OURS not in self.found or TREE not in self.found:
            return head
        ratio = self.found[OURS].wall_s / self.found[TREE].wall_s
        return [*head, report.Budget(f"audit over the tree ÷ {TREE}", 1.2, ratio).row()]

    def text(self) -> str:
        """For a terminal."""
        return "\n\n".join(
            [table.aligned(self.rows()), table.aligned(self.budget_rows()), self.about]
        )

    def markdown(self) -> str:
        """For docs/benchmarks.md."""
        return "\n\n".join(
            [
                f"## The ways to {self.size} nodes\n\n```\n{self.command}\n```",
                textwrap.fill(f"{self.gateways} gateways. {self.about}", 98),
                table.markdown(self.rows()),
                table.markdown(self.budget_rows()),
            ]
        )


def say(text: str) -> None:
    """Progress, beside the result."""
    print(text, file=sys.stderr, flush=True)


def _measure(given: argparse.Namespace, ansible: Path | None) -> Report:
    """Run everything, the contenders in turns."""
    made, only = Report(given.nodes[0], given.gateways), given.only or ()
    with (
        tempfile.TemporaryDirectory(prefix="nr-bench-") as scratch,
        cluster(made.size, Path(scratch), given.name, slurm=True) as nodes,
    ):
        tree = make_gateways(nodes, made.gateways)
        samples: dict[str, list[Sample]] = {}
        # A turn before the others: gateways learn the keys of their nodes.
        for turn in range(-1, given.repeat):
            for one in contenders(nodes, tree, ansible if turn == 0 else None):
                if only and one.name not in only:
                    continue
                if turn < 0 and "tree" not in one.name:
                    continue
                before = nodes.logins()
                sample = one.run(nodes)
                counts = [b - a for a, b in zip(before, nodes.logins(), strict=True)]
                say(f"  {one.name}: {sample.wall_s:.2f} s, CPU {sample.cpu_s:.2f} s")
                if turn >= 0:
                    samples.setdefault(one.name, []).append(sample)
                    made.most[one.name] = max(counts)
        made.found = {key: median(found) for key, found in samples.items()}
        made.runs = {key: len(found) for key, found in samples.items()}
    return made


def main() -> int:
    """The command."""
    parser = command.options("ways", __doc__, "256", 3)
    parser.add_argument("--gateways", type=int, default=8, metavar="N")
    parser.add_argument("--only", action="append", metavar="NAME", help="of a contender")
    return command.main("ways", parser, _measure, ("pyinfra", "paramiko", "ClusterShell"))


if __name__ == "__main__":
    sys.exit(main())

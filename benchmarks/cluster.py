"""A lab of plain ssh nodes for contenders, and the cost of one run of a command against it."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from benchmarks import timed
from benchmarks.report import BenchmarkError, Rows
from nodeready.lab import Lab
from tests import slurm_lab

#: At this level sshd logs every command and file transfer that a client starts. Container images
#: forbid apt its cache of packages, which real nodes have: without it, Ansible's apt module alone
#: costs a second.
FILES = {
    "/etc/ssh/sshd_config.d/benchmark.conf": "LogLevel VERBOSE\n",
    "/etc/apt/apt.conf.d/docker-clean": "",
}


class Cluster:
    """A running lab. directory: for the benchmark's files, removed at the end"""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        self.size = len(lab.nodes)

    def reset(self) -> None:
        """Restart every node with its original disk."""
        self.lab.restart(self.lab.nodes, keep_disk=False, files=FILES)

    def traffic(self) -> list[tuple[int, int]]:
        """What the sshd of each node has counted since it started: its connections, and the
        commands and file transfers, each a round trip at least.
        """
        logs = [node.log.read_text(errors="replace") for node in self.lab.nodes]
        return [
            (
                log.count("Accepted publickey for "),
                len(re.findall(r"^Starting session: ", log, re.M)),
            )
            for log in logs
        ]

    def pyinfra_inventory(self, stem: str, data: dict[str, Any]) -> Path:
        """The path of an inventory file, which holds only constants."""
        path = self.directory / f"{stem}.py"
        path.write_text(f"bench = ({self.lab.inventory_data()!r}, {data!r})\n")
        return path

    def ansible_inventory(self, data: dict[str, Any]) -> Path:
        """The same nodes for Ansible."""
        hosts = {}
        for name, login in self.lab.inventory_data():
            options = f"-o UserKnownHostsFile={login['ssh_known_hosts_file']}"
            hosts[name] = {
                "ansible_host": login["ssh_hostname"],
                "ansible_user": login["ssh_user"],
                "ansible_ssh_private_key_file": login["ssh_key"],
                "ansible_ssh_common_args": f"{options} -o StrictHostKeyChecking=yes",
            }
        path = self.directory / "inventory.yml"
        # JSON is YAML.
        path.write_text(json.dumps({"all": {"hosts": hosts, "vars": data}}, indent=1))
        return path


@contextmanager
def cluster(
    size: int, name: str, *, profile: str = "cpu", slurm: bool = False
) -> Iterator[Cluster]:
    """A lab of this many nodes (slurm: with a real Slurm), removed at the end."""
    slurm_lab.end(name)
    try:
        with tempfile.TemporaryDirectory(prefix="nr-bench-") as directory:
            started = slurm_lab.start(name, size, FILES) if slurm else None
            yield Cluster(started or Lab.up(name, size, profile, FILES), Path(directory))
    finally:
        slurm_lab.end(name)


@dataclass(frozen=True)
class Sample:
    """The cost of one run, or the medians of several."""

    wall_s: float  # from start to exit
    cpu_s: float  # user and system time on the control machine, all processes of the run
    sessions: float  # commands and file transfers, per node
    logins: float  # connections, per node
    most_logins: float  # connections to the node with most of them


def run(
    nodes: Cluster,
    argv: Sequence[str],
    environment: Mapping[str, str],
    accept: Callable[[int, str], bool],
    cwd: Path,
) -> Sample:
    """Run a command against the cluster. Raises BenchmarkError unless ``accept(status, output)``.

    Its output goes to a file: a terminal or a pipe that is read slowly would be measured too.
    """
    result, log = nodes.directory / "cost.json", nodes.directory / "output"
    before = nodes.traffic()
    wrapper = [sys.executable, "-S", str(Path(timed.__file__)), str(result), "--"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*wrapper, *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=cwd,
        )
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    text = log.read_text(errors="replace")
    if not accept(status, text):
        tail = "\n".join(text.splitlines()[-40:])
        raise BenchmarkError(f"{' '.join(argv)}: exit {status}, not what is measured:\n{tail}")
    cost = json.loads(result.read_text())
    pairs = zip(before, nodes.traffic(), strict=True)
    counts = [(later[0] - first[0], later[1] - first[1]) for first, later in pairs]
    logins, sessions = zip(*counts, strict=True)
    means = sum(sessions) / nodes.size, sum(logins) / nodes.size
    return Sample(cost["wall_s"], cost["cpu_s"], *means, max(logins))


def median(samples: Sequence[Sample]) -> Sample:
    """The median of each value by itself."""
    return Sample(*map(statistics.median, zip(*map(astuple, samples), strict=True)))


def sample_rows(
    samples: Mapping[str, Sequence[Sample]],
    unit: str,
    letter: str,
    size: int,
    ratios: tuple[str, Mapping[str, float]] | None = None,
) -> Rows:
    """The table of contenders on a cluster of ``size`` nodes: medians, and ratios to ``unit``.

    letter: the unit's name in the head
    ratios: a further column: its head, and the ratio by contender
    """
    unit_s = median(samples[unit]).wall_s
    head = ("", "runs", "wall", f"÷ {letter}", "CPU", "CPU/node", "commands", "logins", "most")
    rows = []
    for name, runs in samples.items():
        sample = median(runs)
        row = (
            name,
            str(len(runs)),
            f"{sample.wall_s:.2f} s",
            f"{sample.wall_s / unit_s:.2f}",
            f"{sample.cpu_s:.2f} s",
            f"{sample.cpu_s / size * 1000:.1f} ms",
            f"{sample.sessions:.4g}",
            f"{sample.logins:.4g}",
            f"{sample.most_logins:.0f}",
        )
        ratio = ratios[1].get(name) if ratios else None
        rows.append((*row, *([f"{ratio:.2f}" if ratio else ""] if ratios else [])))
    return [(*head, *([ratios[0]] if ratios else [])), *rows]


def say(text: str) -> None:
    """Print progress beside the result."""
    print(text, file=sys.stderr, flush=True)

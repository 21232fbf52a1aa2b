"""The lab of a benchmark: fresh nodes, inventories of them, and what their sshd counted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodeready.lab import Lab, down

NAME = "bench"
#: At this level sshd logs every command and file transfer that a client starts. Container images
#: forbid apt its cache of packages, which real nodes have: without it, Ansible's apt module alone
#: costs a second.
FILES = {
    "/etc/ssh/sshd_config.d/benchmark.conf": "LogLevel VERBOSE\n",
    "/etc/apt/apt.conf.d/docker-clean": "",
}


@dataclass(frozen=True)
class Traffic:
    """What the nodes' sshd counted so far, all nodes together.

    connections: logins
    sessions:    commands and file transfers, each a round trip at least
    """

    connections: int
    sessions: int


class Cluster:
    """A running lab; `directory` is for files of the benchmark and goes away with it."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        self.size = len(lab.nodes)

    def reset(self) -> None:
        """Every node as fresh as on its first day."""
        self.lab.restart(self.lab.nodes, keep_disk=False, files=FILES)

    def _logs(self) -> list[str]:
        return [node.log.read_text(errors="replace") for node in self.lab.nodes]

    def logins(self) -> list[int]:
        """How often each node was logged in to since it started."""
        return [_logins(log) for log in self._logs()]

    def traffic(self) -> Traffic:
        """The counts of all nodes since they started."""
        logs = self._logs()
        return Traffic(
            sum(map(_logins, logs)),
            sum(len(re.findall(r"^Starting session: ", log, re.M)) for log in logs),
        )

    def pyinfra_inventory(self, stem: str, data: dict[str, Any]) -> Path:
        """An inventory file that costs no more than reading it."""
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


def _logins(log: str) -> int:
    return log.count("Accepted publickey for ")


@contextmanager
def cluster(
    size: int, directory: Path, name: str = NAME, *, slurm: bool = False
) -> Iterator[Cluster]:
    """A lab of this many nodes, gone afterwards whatever happens. slurm: with a real Slurm"""
    down(name)
    try:
        yield Cluster(Lab.up(name, nodes=size, files=FILES, slurm=slurm), directory)
    finally:
        down(name)

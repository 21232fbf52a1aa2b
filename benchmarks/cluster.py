"""The lab of a benchmark: fresh nodes, their inventories, and the counts of their sshd."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodeready.lab import Lab
from tests import slurm_lab

#: At this level sshd logs every command and file transfer that a client starts. Container images
#: forbid apt its cache of packages, which real nodes have: without it, Ansible's apt module alone
#: costs a second.
FILES = {
    "/etc/ssh/sshd_config.d/benchmark.conf": "LogLevel VERBOSE\n",
    "/etc/apt/apt.conf.d/docker-clean": "",
}


@dataclass(frozen=True)
class Traffic:
    """What the sshd of each node has counted since the node started.

    logins:   connections
    sessions: commands and file transfers, each a round trip at least
    """

    logins: list[int]
    sessions: list[int]


class Cluster:
    """A running lab. directory: for the benchmark's files, removed at the end"""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        self.size = len(lab.nodes)

    def reset(self) -> None:
        """Restart every node with its original disk."""
        self.lab.restart(self.lab.nodes, keep_disk=False, files=FILES)

    def traffic(self) -> Traffic:
        """The counts of each node since it started."""
        logs = [node.log.read_text(errors="replace") for node in self.lab.nodes]
        return Traffic(
            [log.count("Accepted publickey for ") for log in logs],
            [len(re.findall(r"^Starting session: ", log, re.M)) for log in logs],
        )

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

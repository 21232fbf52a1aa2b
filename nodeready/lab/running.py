"""A lab that runs: its paths and its state, which a change by another command replaces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from nodeready.lab import faults, network, state
from nodeready.lab.image import new_key
from nodeready.lab.machines import kill, start
from nodeready.lab.processes import Files
from nodeready.lab.removal import remove
from nodeready.lab.state import LabError, LabState, NodeState


class RunningLab:
    """What the lab and its nodes have in common; `state` is replaced with each change."""

    def __init__(self, lab_state: LabState) -> None:
        self.state = lab_state
        self.name = lab_state.name
        self.profile = lab_state.profile
        self.directory = state.directory(lab_state.name)
        self.ssh_key = self.directory / "ssh" / "id_ed25519"
        self.ssh_config = self.directory / "ssh" / "ssh_config"
        self.known_hosts = self.directory / "ssh" / "known_hosts"

    def state_of(self, name: str) -> NodeState:
        """The state of this node. Raises LabError."""
        for node in self.state.nodes:
            if node.name == name:
                return node
        raise LabError(f"the lab {self.name} has no node {name}")

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lab's lock, with its current state. Raises LabError if the lab has ended."""
        with state.locked(self.directory):
            current = state.load(self.name)
            if current is None:
                remove(self.directory)
                raise LabError(f"there is no lab {self.name} any more")
            self.state = current
            yield

    def restart_nodes(
        self,
        names: Sequence[str],
        keep_disk: bool,
        files: Files | None = None,
        new_host_key: bool = False,
        fault: str | Mapping[str, str] | None = None,
    ) -> None:
        """Power these nodes off and on, with their disks or with empty ones.

        `fault` is that of all nodes, or by name; "" removes it. With None a fault stays with its
        disk.
        """
        if fault is None:
            new_faults = {} if keep_disk else dict.fromkeys(names, "")
        else:
            new_faults = dict.fromkeys(names, fault) if isinstance(fault, str) else dict(fault)
        for name in filter(None, new_faults.values()):
            faults.find(name, self.profile)
        with self.changing():
            nodes = [self.state_of(name) for name in names]
            for node in nodes:
                kill(node)
                node.fault = new_faults.get(node.name, node.fault)
                if new_host_key:
                    key = new_key(f"root@{node.name}")
                    node.host_key, node.host_key_public = key.private, key.public
            start(self.state, nodes, files, keep_disk=keep_disk)

    def switch_ip(self, *commands: str) -> None:
        """Run `ip` commands where the lab's bridge and the nodes' wires (n1, n2, …) are."""
        network.ip(commands, self.state.switch)

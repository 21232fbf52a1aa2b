"""A lab: start it, find it, change it, end it.

    lab = Lab.up("lab", nodes=3)
    lab.nodes[0].run("hostname").stdout    # node001
    lab.down()

Every change holds the lab's lock. An interrupted `up` removes what it made; `down` finds and
removes what a killed one leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nodeready.lab import faults, image, network, state, syscalls
from nodeready.lab.image import new_key
from nodeready.lab.machines import Progress, grow
from nodeready.lab.needs import check_kernel, check_needs
from nodeready.lab.node import LabNode
from nodeready.lab.processes import Files
from nodeready.lab.profiles import PROFILES
from nodeready.lab.removal import clean, down, remove, remove_empty
from nodeready.lab.running import RunningLab
from nodeready.lab.state import LabError, LabState

# The maximum of all nodes' writes together, as a part of this machine's memory.
_FS_SIZE = "50%"


class Lab(RunningLab):
    """A lab. `started` is the number of nodes that `up` had to start."""

    def __init__(self, lab_state: LabState) -> None:
        super().__init__(lab_state)
        self.subnet = str(network.subnet(lab_state.index))
        self.gateway = str(network.gateway(lab_state.index).ip)
        self.started = 0

    @classmethod
    def load(cls, name: str = "lab") -> Lab | None:
        """The lab of this name; None without one, or for the remains of one."""
        lab_state = state.load(name)
        return cls(lab_state) if lab_state and lab_state.is_current() else None

    @classmethod
    def up(
        cls,
        name: str = "lab",
        nodes: int = 3,
        profile: str | None = None,
        files: Files | None = None,
        *,
        progress: Progress | None = None,
        fault: str | None = None,
    ) -> Lab:
        """A lab of at least this many nodes, all running; `files` go to the new ones.

        `profile` is its nodes' hardware; the default is that of the running lab, or cpu. `fault`
        is that of the last node; with "", all nodes are healthy again.

        Raises LabUnavailable when this machine cannot run a lab, LabError for anything else. After
        any exception, KeyboardInterrupt included, nothing that this call made remains.
        """
        directory = state.directory(name)
        if not 1 <= nodes <= network.MAX_NODES:
            raise LabError(f"a lab has 1 to {network.MAX_NODES} nodes, not {nodes}")
        if profile not in (None, *PROFILES):
            raise LabError(f"no profile {profile!r}; there are: {', '.join(PROFILES)}")
        check_needs()
        try:
            with state.locked(directory):
                lab = cls.load(name)
                profile = profile or (lab.profile if lab else "cpu")
                if fault:
                    faults.find(fault, profile)
                if lab:
                    if lab.profile != profile:
                        raise LabError(
                            f"the lab {name} runs with profile {lab.profile}; end it first: "
                            f"nodeready lab down --name {name}"
                        )
                    lab.started = grow(lab.state, nodes, files, progress, fault)
                    return lab
                try:
                    check_kernel()
                    clean(directory)
                    lab = cls(_create(name, profile))
                    lab.started = grow(lab.state, nodes, files, progress, fault)
                    lab.state.complete = True
                    state.save(lab.state)
                except BaseException:
                    remove(directory)
                    raise
                return lab
        except BaseException:
            remove_empty(directory)
            raise

    @property
    def nodes(self) -> list[LabNode]:
        return [LabNode(self, node) for node in self.state.nodes]

    def node(self, name: str) -> LabNode:
        """The node of this name. Raises LabError."""
        return LabNode(self, self.state_of(name))

    def add(self, count: int = 1, files: Files | None = None) -> list[LabNode]:
        """New nodes, which join /etc/hosts of all nodes. Raises LabError for too many."""
        with self.changing():
            count_before = len(self.state.nodes)
            if count_before + count > network.MAX_NODES:
                raise LabError(f"a lab has at most {network.MAX_NODES} nodes")
            grow(self.state, count_before + count, files)
            return self.nodes[count_before:]

    def restart(
        self,
        nodes: Sequence[LabNode],
        keep_disk: bool,
        files: Files | None = None,
        fault: str | Mapping[str, str] | None = None,
    ) -> None:
        """Power nodes off and on; see RunningLab.restart_nodes."""
        self.restart_nodes([node.name for node in nodes], keep_disk, files, fault=fault)

    def inventory_data(self) -> list[tuple[str, dict[str, Any]]]:
        """The nodes as pyinfra hosts, with the data for logins."""
        return [node.inventory_data() for node in self.nodes]

    def down(self) -> None:
        """End it and remove every trace of it."""
        down(self.name)


def _create(name: str, profile: str) -> LabState:
    """Make everything but the nodes and the network."""
    with state.locked(state.ROOT):
        index = network.free_index(state.taken())
        lab_state = LabState(name, profile, index, state.boot_id())
        state.save(lab_state)
    directory = state.directory(name)
    fs = directory / "fs"
    fs.mkdir()
    # The nodes' users have the numbers of this machine's users: only root may see the nodes'
    # disks, with their keys and setuid programs.
    syscalls.mount("nodeready-lab", str(fs), "tmpfs", 0, f"mode=0700,size={_FS_SIZE}")
    key = new_key(f"{name}@nodeready-lab")
    state.write(directory / "ssh" / "id_ed25519", key.private, 0o600)
    state.write(directory / "ssh" / "id_ed25519.pub", f"{key.public}\n")
    image.build(fs / "base", PROFILES[profile], key)
    (fs / "nodes").mkdir()
    return lab_state

"""A lab: make it, find it, end it.

    lab = Lab.up("lab", nodes=3)
    lab.nodes[0].run("hostname").stdout    # node001
    lab.down()

Every change holds the lab's lock. An interrupted `up` takes back what it made; whatever a
killed one leaves, `down` finds and removes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nodeready.lab import boot, faults, image, network, processes, state
from nodeready.lab.image import new_key
from nodeready.lab.node import Files, Node, Progress, grow, kill, new_controller, start
from nodeready.lab.processes import Done
from nodeready.lab.profiles import PROFILES
from nodeready.lab.slurm import client_conf_path, configure, new_slurm, run_command
from nodeready.lab.state import LabError, LabState, NodeState, check_kernel, check_needs

# --- End a lab in whatever state: whole, half made, or left by a killed command.


def down(name: str) -> bool:
    """End the lab of this name, or what is left of one; was there anything?

    Raises LabError when something of it cannot be ended.
    """
    directory = state.directory(name)
    if not directory.exists():
        return False
    with state.locked(directory):
        remove(directory)
    return True


def remove(directory: Path) -> None:
    """Leave nothing of the lab; its lock is ours."""
    clean(directory)
    shutil.rmtree(directory)
    remove_empty(directory)


def remove_empty(directory: Path) -> None:
    """Remove the lab's directory if nothing is in it, and those above if this was the last."""
    with contextlib.suppress(OSError):
        directory.rmdir()
    if not state.names():
        network.give_room_back()
    for path in (state.ROOT, state.ROOT.parent):
        with contextlib.suppress(OSError):
            path.rmdir()


def clean(directory: Path) -> None:
    """End all processes of the lab, and empty its directory."""
    groups = boot.freezer_group(directory.name)
    with contextlib.suppress(LabError):
        known = state.load(directory.name)
        if known:
            network.delete_interface(known.index)
        if not known or not known.slurm:
            groups = ""
    if groups:
        for pid in processes.of_lab(directory):
            processes.end(pid, wait_s=0.0)
        boot.thaw_group(groups)
    processes.end_all(directory)
    if groups:
        boot.remove_group(groups)
    fs = directory / "fs"
    while os.path.ismount(fs):
        _unmount(fs)
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _unmount(fs: Path) -> None:
    """Unmount, waiting for dead nodes to let go; somebody's open file only delays the end."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            boot.umount(str(fs))
            return
        time.sleep(0.01)
    boot.umount(str(fs), boot.DETACH)


# --- A lab.

# How much all nodes together may write, in part of this machine's memory. The tmpfs is empty
# at first and grows with what they write.
_FS_SIZE = "50%"


class Lab:
    """A lab that exists. `started` is the number of nodes that `up` had to start."""

    def __init__(self, known: LabState) -> None:
        self._state = known
        self.name = known.name
        self.profile = known.profile
        self.directory = state.directory(known.name)
        self.subnet = str(network.subnet(known.index))
        self.gateway = str(network.gateway(known.index).ip)
        self.ssh_key = self.directory / "ssh" / "id_ed25519"
        self.ssh_config = self.directory / "ssh" / "ssh_config"
        self.known_hosts = self.directory / "ssh" / "known_hosts"
        self.slurm_conf = client_conf_path(known.name)
        self.started = 0

    @classmethod
    def load(cls, name: str = "lab") -> Lab | None:
        """The lab of this name; None when there is none, or only what is left of one."""
        known = state.load(name)
        return cls(known) if known and known.is_current() else None

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
        slurm: bool = False,
    ) -> Lab:
        """Have a lab of at least this many nodes, all running; `files` go to the new ones.

        `profile` is its nodes' hardware; without one that of the lab that runs, or cpu.
        `fault` is the name of what is wrong with the last node; with "", all are healthy again.
        With `slurm` the nodes are those of a real Slurm, and known to it when this returns; a lab
        that runs has it or has it not.

        Raises LabUnavailable when this machine cannot, LabError for anything else. On any
        exception, KeyboardInterrupt included, what this call made is gone again.
        """
        directory = state.directory(name)
        if not 1 <= nodes <= network.MAX_NODES:
            raise LabError(f"a lab has 1 to {network.MAX_NODES} nodes, not {nodes}")
        if profile not in (None, *PROFILES):
            raise LabError(f"no profile {profile!r}; there are: {', '.join(PROFILES)}")
        check_needs(slurm)
        try:
            with state.locked(directory):
                known = state.load(name)
                running = known is not None and known.is_current()
                profile = profile or (known.profile if known and running else "cpu")
                if fault:
                    faults.find(fault, profile)
                if known and running:
                    lab = cls(known)
                    if lab.profile != profile:
                        raise LabError(
                            f"the lab {name} runs with profile {lab.profile}; end it first: "
                            f"nodeready lab down --name {name}"
                        )
                    if slurm and not lab.slurm:
                        raise LabError(
                            f"the lab {name} runs without Slurm; end it first: "
                            f"nodeready lab down --name {name}"
                        )
                    lab.started = grow(known, nodes, files, progress, fault)
                    return lab
                return cls._begin(
                    name,
                    nodes,
                    profile,
                    files=files,
                    progress=progress,
                    fault=fault,
                    slurm=slurm,
                )
        except BaseException:
            remove_empty(directory)
            raise

    @classmethod
    def _begin(
        cls,
        name: str,
        nodes: int,
        profile: str,
        *,
        files: Files | None,
        progress: Progress | None,
        fault: str | None,
        slurm: bool,
    ) -> Lab:
        """A new lab, in place of what may be left of one."""
        directory = state.directory(name)
        try:
            check_kernel()
            clean(directory)
            known = _create(name, profile, slurm)
            lab = cls(known)
            lab.started = grow(known, nodes, files, progress, fault)
            known.complete = True
            state.save(known)
        except BaseException:
            remove(directory)
            raise
        return lab

    @property
    def nodes(self) -> list[Node]:
        """Its nodes, in order."""
        return [Node(self, one) for one in self._state.nodes]

    def node(self, name: str) -> Node:
        """The node of this name. Raises LabError."""
        return Node(self, self.state_of(name))

    def state_of(self, name: str) -> NodeState:
        """What is known of this node. Raises LabError."""
        for one in self._state.machines():
            if one.name == name:
                return one
        raise LabError(f"the lab {self.name} has no node {name}")

    def add(self, count: int = 1, files: Files | None = None) -> list[Node]:
        """New nodes, known to the others by /etc/hosts. Raises LabError for too many."""
        with self._changing():
            have = len(self._state.nodes)
            if have + count > network.MAX_NODES:
                raise LabError(f"a lab has at most {network.MAX_NODES} nodes")
            grow(self._state, have + count, files)
            return self.nodes[have:]

    def restart(
        self,
        nodes: Sequence[Node],
        keep_disk: bool,
        files: Files | None = None,
        new_host_key: bool = False,
        fault: str | Mapping[str, str] | None = None,
    ) -> None:
        """Power nodes off and on, with their disks or with empty ones.

        With `fault` they have this one, or each its own by its name; "" is none. Otherwise it
        stays with the disk.
        """
        names = [node.name for node in nodes]
        if fault is None:
            wrong = {} if keep_disk else dict.fromkeys(names, "")
        else:
            wrong = dict.fromkeys(names, fault) if isinstance(fault, str) else dict(fault)
        for name in filter(None, wrong.values()):
            faults.find(name, self.profile)
        with self._changing():
            chosen = [self.state_of(node.name) for node in nodes]
            for one in chosen:
                kill(one)
                one.fault = wrong.get(one.name, one.fault)
                if new_host_key:
                    key = new_key(f"root@{one.name}")
                    one.host_key, one.host_key_public = key.private, key.public
            start(self._state, chosen, files, keep_disk=keep_disk)

    def inventory_data(self) -> list[tuple[str, dict[str, Any]]]:
        """The nodes as pyinfra hosts, with all that it takes to log in."""
        return [node.inventory_data() for node in self.nodes]

    def switch_ip(self, *commands: str) -> None:
        """Run `ip` commands where the lab's bridge and the nodes' wires (n1, n2, …) are."""
        network.ip(commands, self._state.switch)

    @property
    def slurm(self) -> bool:
        """Has it Slurm?"""
        return self._state.slurm is not None

    @property
    def controller(self) -> Node | None:
        """The machine of Slurm's controller, where users may log in too; it is no node."""
        return next((Node(self, one) for one in self._state.beside()), None)

    def slurm_run(self, *argv: str, check: bool = True, timeout: float = 60) -> Done:
        """Run one of Slurm's commands of this machine, as root, on the lab's Slurm.

        Raises LabError with the command's own message when `check` and it fails,
        subprocess.TimeoutExpired after `timeout` seconds.
        """
        done = run_command(self._state, argv, timeout)
        if check and done.returncode:
            raise LabError(f"{argv[0]}: exit {done.returncode}: {done.stderr.strip()}")
        return done

    def slurm_configure(self, *lines: str) -> None:
        """Have these lines in slurm.conf, instead of those of the last call, on all that runs.

        A line replaces the lab's own setting of the same name. slurmd and slurmctld are started
        again; jobs go on. Raises LabError when Slurm refuses them; then it has the old ones.
        """
        with self._changing():
            configure(self._state, lines)

    def down(self) -> None:
        """End it and remove every trace of it."""
        down(self.name)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lab, and know what other commands have done to it."""
        with state.locked(self.directory):
            known = state.load(self.name)
            if known is None:
                remove(self.directory)
                raise LabError(f"there is no lab {self.name} any more")
            self._state = known
            yield


def _create(name: str, profile: str, slurm: bool) -> LabState:
    """Everything but the nodes and the network."""
    with state.locked(state.ROOT):
        index = network.free_index(state.taken())
        known = LabState(name, profile, index, state.boot_id())
        if slurm:
            known.slurm = new_slurm(new_controller(known))
        state.save(known)
    directory = state.directory(name)
    fs = directory / "fs"
    fs.mkdir()
    # The nodes' users have the numbers of this machine's: what the nodes' disks hold (keys, setuid
    # programs) is for nobody here but root.
    boot.mount("nodeready-lab", str(fs), "tmpfs", 0, f"mode=0700,size={_FS_SIZE}")
    key = new_key(f"{name}@nodeready-lab")
    state.write(directory / "ssh" / "id_ed25519", key.private, 0o600)
    state.write(directory / "ssh" / "id_ed25519.pub", f"{key.public}\n")
    image.build(fs / "base", PROFILES[profile], key, slurm=slurm)
    (fs / "nodes").mkdir()
    return known

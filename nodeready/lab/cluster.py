"""A lab: start it, find it, change it, end it.

    lab = Lab.up("lab", nodes=3)
    lab.nodes[0].run("hostname").stdout    # node001
    lab.down()

Every change holds the lab's lock. An interrupted `up` removes what it made; `down` finds and
removes what a killed one leaves.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nodeready.lab import faults, host, image, machines, processes, state
from nodeready.lab.hardware import read_text
from nodeready.lab.host import Done, check_kernel, check_needs, listening, port, run
from nodeready.lab.image import new_key
from nodeready.lab.processes import Content, Files, is_alive
from nodeready.lab.profiles import PROFILES
from nodeready.lab.state import LabError, LabState, NodeState

_FS_SIZE = "50%"  # the maximum of all nodes' writes together, as a part of this machine's memory


class LabNode:
    """A node of a lab; `name`, `address` and `number` never change."""

    def __init__(self, lab: Lab, node: NodeState) -> None:
        self.lab = lab
        self.name = node.name
        self.address = node.address
        self.number = node.number

    def __repr__(self) -> str:
        return f"LabNode({self.name}, {self.address}, {self.status})"

    @property
    def _state(self) -> NodeState:
        return self.lab.state_of(self.name)

    @property
    def pid(self) -> int:
        """Its process 1, as this machine numbers it. Raises LabError when the node is dead."""
        if not self.alive:
            raise LabError(f"{self.name} is dead; `nodeready lab up` starts it again")
        return self._state.pid

    @property
    def alive(self) -> bool:
        return is_alive(self._state)

    @property
    def status(self) -> str:
        """`up`, `no sshd` or `dead`."""
        if not self.alive:
            return "dead"
        return "up" if listening(self._state.pid) else "no sshd"

    @property
    def fault(self) -> str:
        """The name of its fault; "" without one."""
        return self._state.fault

    @property
    def log(self) -> Path:
        """The output of its init and sshd."""
        return self.lab.directory / "fs" / "nodes" / self.name / "log"

    def run(
        self,
        command: str,
        user: str = "root",
        input: str | None = None,
        check: bool = True,
        timeout: float = 60,
    ) -> Done:
        """Run a shell command over ssh in a new session, as any client would.

        Raises LabError with the command's own message when `check` and it fails,
        subprocess.TimeoutExpired after `timeout` seconds.
        """
        argv = ["ssh", "-F", str(self.lab.ssh_config), "-l", user, self.name, "--", command]
        return self._checked(command, run(argv, input or "", timeout), check)

    def enter(
        self,
        argv: Sequence[str],
        input: str | None = None,
        check: bool = True,
        timeout: float = 60,
    ) -> Done:
        """Run a program as root in the node's namespaces without ssh: works on a broken node."""
        done = processes.enter(self.pid, argv, input or "", timeout)
        return self._checked(shlex.join(argv), done, check)

    def _checked(self, command: str, done: Done, check: bool) -> Done:
        if check and done.returncode:
            raise LabError(
                f"{self.name}: `{command}`: exit {done.returncode}: {done.stderr.strip()}"
            )
        return done

    def read(self, path: str) -> str:
        return self.enter(["cat", "--", path]).stdout

    def write(self, path: str, content: str | bytes, mode: int | None = None) -> None:
        """Write a file in place, through a link if it is one; directories are made."""
        if isinstance(content, bytes):
            content = content.decode("utf-8", "surrogateescape")
        # `cat > file` keeps owner and mode of an existing file, and works on bind-mounted files.
        script = 'mkdir -p -- "${1%/*}/" && cat > "$1" && { [ -z "$2" ] || chmod "$2" "$1"; }'
        self.enter(["sh", "-c", script, "sh", path, f"{mode:o}" if mode else ""], input=content)

    def inventory_data(self) -> tuple[str, dict[str, Any]]:
        """The node as a pyinfra host, with the data for logins."""
        return self.name, machines.login_data(self.lab.state, self._state)

    def testinfra(self) -> Any:
        """A testinfra host for this node, over plain ssh."""
        import testinfra

        # A shared connection would outlive the test, and keep the limits of its login.
        spec = f"ssh://root@{self.name}?controlpersist=0"
        return testinfra.get_host(spec, ssh_config=str(self.lab.ssh_config))

    def kill(self) -> None:
        """Cut the node's power: nothing answers at its address."""
        machines.kill(self._state)

    def freeze(self) -> None:
        """Pull the cable: connections neither answer nor close."""
        self.lab.switch_ip(f"link set dev {port(self.number)} down")

    def thaw(self) -> None:
        """Put the cable back."""
        self.lab.switch_ip(f"link set dev {port(self.number)} up")

    def stop_sshd(self) -> None:
        """Stop sshd: new connections are refused, open ones stay."""
        self.enter(["sh", "-c", read_text("stop_sshd.sh")])

    def pause_sshd(self) -> None:
        """Pause sshd: connections open, and no banner comes."""
        self.enter(["sh", "-c", 'kill -STOP "$(cat /run/sshd.pid)"'])

    def resume_sshd(self) -> None:
        """Undo `pause_sshd`, or start sshd after `stop_sshd`; it takes connections then."""
        self.enter(["sh", "-c", read_text("resume_sshd.sh")])

    def reboot(self, fault: str | None = None) -> None:
        """Power off and on: the disk stays, /run, /tmp and live kernel values do not.

        `fault` is its fault from now on: "" removes it, None keeps it.
        """
        self.lab.restart([self], keep_disk=True, fault=fault)

    def reset(
        self,
        files: Mapping[str, Content] | None = None,
        new_host_key: bool = False,
        fault: str = "",
    ) -> None:
        """Make it as fresh as a new node, plus these files and this fault.

        With `new_host_key` it is a re-imaged node: clients that know its old key must refuse it.
        """
        self.lab.restart(
            [self], keep_disk=False, files=files, new_host_key=new_host_key, fault=fault
        )


class Lab:
    """A lab. `state` is replaced with each change, also by another command.

    `started` is the number of nodes that `up` had to start.
    """

    def __init__(self, lab_state: LabState) -> None:
        self.state = lab_state
        self.name = lab_state.name
        self.profile = lab_state.profile
        self.directory = state.directory(lab_state.name)
        self.ssh_key = self.directory / "ssh" / "id_ed25519"
        self.ssh_config = self.directory / "ssh" / "ssh_config"
        self.known_hosts = self.directory / "ssh" / "known_hosts"
        self.subnet = str(host.subnet(lab_state.index))
        self.gateway = str(host.gateway(lab_state.index).ip)
        self.started = 0

    @classmethod
    def load(cls, name: str = "lab") -> Lab | None:
        """The lab of this name; None without one, or for the remains of one."""
        lab_state = state.load(name)
        if lab_state and lab_state.complete and lab_state.boot_id == state.boot_id():
            return cls(lab_state)
        return None

    @classmethod
    def up(
        cls,
        name: str = "lab",
        nodes: int = 3,
        profile: str | None = None,
        files: Files | None = None,
        *,
        progress: machines.Progress | None = None,
        fault: str | None = None,
    ) -> Lab:
        """A lab of at least this many nodes, all running; `files` go to the new ones.

        `profile` is its nodes' hardware; the default is that of the running lab, or cpu. `fault`
        is that of the last node; with "", all nodes are healthy again.

        Raises LabUnavailable when this machine cannot run a lab, LabError for anything else. After
        any exception, KeyboardInterrupt included, nothing that this call made remains.
        """
        directory = state.directory(name)
        if not 1 <= nodes <= host.MAX_NODES:
            raise LabError(f"a lab has 1 to {host.MAX_NODES} nodes, not {nodes}")
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
                    lab.started = machines.grow(lab.state, nodes, files, progress, fault)
                    return lab
                try:
                    check_kernel()
                    machines.clean(directory)
                    lab = cls(_create(name, profile))
                    lab.started = machines.grow(lab.state, nodes, files, progress, fault)
                    lab.state.complete = True
                    state.save(lab.state)
                except BaseException:
                    machines.remove(directory)
                    raise
                return lab
        except BaseException:
            machines.remove_empty(directory)
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
            if count_before + count > host.MAX_NODES:
                raise LabError(f"a lab has at most {host.MAX_NODES} nodes")
            machines.grow(self.state, count_before + count, files)
            return self.nodes[count_before:]

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
                machines.remove(self.directory)
                raise LabError(f"there is no lab {self.name} any more")
            self.state = current
            yield

    def restart(
        self,
        nodes: Sequence[LabNode],
        keep_disk: bool,
        files: Files | None = None,
        new_host_key: bool = False,
        fault: str | Mapping[str, str] | None = None,
    ) -> None:
        """Power these nodes off and on, with their disks or with empty ones.

        `fault` is that of all nodes, or by name; "" removes it. With None a fault stays with its
        disk.
        """
        names = [node.name for node in nodes]
        if fault is None:
            new_faults = {} if keep_disk else dict.fromkeys(names, "")
        else:
            new_faults = dict.fromkeys(names, fault) if isinstance(fault, str) else dict(fault)
        for name in filter(None, new_faults.values()):
            faults.find(name, self.profile)
        with self.changing():
            restarted = [self.state_of(name) for name in names]
            for node in restarted:
                machines.kill(node)
                node.fault = new_faults.get(node.name, node.fault)
                if new_host_key:
                    key = new_key(f"root@{node.name}")
                    node.host_key, node.host_key_public = key.private, key.public
            machines.start(self.state, restarted, files, keep_disk=keep_disk)

    def switch_ip(self, *commands: str) -> None:
        """Run `ip` commands where the lab's bridge and the nodes' wires (n1, n2, …) are."""
        host.ip(commands, self.state.switch)

    def inventory_data(self) -> list[tuple[str, dict[str, Any]]]:
        """The nodes as pyinfra hosts, with the data for logins."""
        return [node.inventory_data() for node in self.nodes]

    def down(self) -> None:
        """End it and remove every trace of it."""
        machines.down(self.name)


def _create(name: str, profile: str) -> LabState:
    """Make everything but the nodes and the network."""
    with state.locked(state.ROOT):
        index = host.free_index(state.taken())
        lab_state = LabState(name, profile, index, state.boot_id())
        state.save(lab_state)
    directory = state.directory(name)
    fs = directory / "fs"
    fs.mkdir()
    # The nodes' users have the numbers of this machine's users: only root may see the nodes'
    # disks, with their keys and setuid programs.
    host.mount("nodeready-lab", str(fs), "tmpfs", 0, f"mode=0700,size={_FS_SIZE}")
    key = new_key(f"{name}@nodeready-lab")
    state.write(directory / "ssh" / "id_ed25519", key.private, 0o600)
    state.write(directory / "ssh" / "id_ed25519.pub", f"{key.public}\n")
    image.build(fs / "base", PROFILES[profile], key)
    (fs / "nodes").mkdir()
    return lab_state

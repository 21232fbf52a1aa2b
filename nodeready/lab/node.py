"""A node of a lab, for tests and people: log in to it, look into it, break it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nodeready.lab import processes
from nodeready.lab.machines import kill, login_data
from nodeready.lab.network import listening, port
from nodeready.lab.processes import Content, is_alive
from nodeready.lab.programs import Done, run
from nodeready.lab.running import RunningLab
from nodeready.lab.state import LabError, NodeState


class LabNode:
    """A node of a lab; `name`, `address` and `number` never change."""

    def __init__(self, lab: RunningLab, node: NodeState) -> None:
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
        """Whether its process 1 lives."""
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
        return self.name, login_data(self.lab.state, self._state)

    def testinfra(self) -> Any:
        """A testinfra host for this node, over plain ssh."""
        import testinfra

        # A shared connection would outlive the test, and keep the limits of its login.
        spec = f"ssh://root@{self.name}?controlpersist=0"
        return testinfra.get_host(spec, ssh_config=str(self.lab.ssh_config))

    def kill(self) -> None:
        """Cut the node's power: nothing answers at its address."""
        kill(self._state)

    def freeze(self) -> None:
        """Pull the cable: connections neither answer nor close."""
        self.lab.switch_ip(f"link set dev {port(self.number)} down")

    def thaw(self) -> None:
        """Put the cable back."""
        self.lab.switch_ip(f"link set dev {port(self.number)} up")

    def stop_sshd(self) -> None:
        """Stop sshd: new connections are refused, open ones stay."""
        # It ends a moment after the signal: until then it takes connections.
        script = """
            pid=$(cat /run/sshd.pid) && kill "$pid" || exit 1
            for i in $(seq 200); do kill -0 "$pid" 2>/dev/null || exit 0; sleep 0.05; done
            exit 1
        """
        self.enter(["sh", "-c", script])

    def pause_sshd(self) -> None:
        """Pause sshd: connections open, and no banner comes."""
        self.enter(["sh", "-c", 'kill -STOP "$(cat /run/sshd.pid)"'])

    def resume_sshd(self) -> None:
        """Undo `pause_sshd`, or start sshd after `stop_sshd`; it takes connections then."""
        # sshd goes into the background before it listens, and writes its number after that.
        script = """
            kill -CONT "$(cat /run/sshd.pid)" 2>/dev/null && exit 0
            rm -f /run/sshd.pid
            /usr/sbin/sshd || exit 1
            for i in $(seq 200); do [ -s /run/sshd.pid ] && exit 0; sleep 0.05; done
            exit 1
        """
        self.enter(["sh", "-c", script])

    def reboot(self, fault: str | None = None) -> None:
        """Power off and on: the disk stays, /run, /tmp and live kernel values do not.

        `fault` is its fault from now on: "" removes it, None keeps it.
        """
        self.lab.restart_nodes([self.name], keep_disk=True, fault=fault)

    def reset(
        self,
        files: Mapping[str, Content] | None = None,
        new_host_key: bool = False,
        fault: str = "",
    ) -> None:
        """Make it as fresh as a new node, plus these files and this fault.

        With `new_host_key` it is a re-imaged node: clients that know its old key must refuse it.
        """
        self.lab.restart_nodes(
            [self.name], keep_disk=False, files=files, new_host_key=new_host_key, fault=fault
        )

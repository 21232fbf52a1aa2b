"""One node of a running lab: log in to it, look into it, break it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodeready.lab import helper, power
from nodeready.lab.errors import LabError
from nodeready.lab.helper import Content, Done
from nodeready.lab.network import listening, port
from nodeready.lab.state import NodeState

if TYPE_CHECKING:
    from nodeready.lab.cluster import Lab


class Node:
    """A node, by its name in the lab; `name`, `address` and `number` never change."""

    def __init__(self, lab: Lab, known: NodeState) -> None:
        self.lab = lab
        self.name = known.name
        self.address = known.address
        self.number = known.number

    def __repr__(self) -> str:
        return f"Node({self.name}, {self.address}, {self.status})"

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
        """Does its process 1 live?"""
        return power.alive(self._state)

    @property
    def status(self) -> str:
        """`up`, `no sshd` or `dead`."""
        if not self.alive:
            return "dead"
        return "up" if listening(self._state.pid) else "no sshd"

    @property
    def fault(self) -> str:
        """The name of what is wrong with it; "": nothing."""
        return self._state.fault

    @property
    def log(self) -> Path:
        """What its init and sshd said."""
        return self.lab.directory / "fs" / "nodes" / self.name / "log"

    def run(
        self,
        command: str,
        user: str = "root",
        input: str | None = None,
        check: bool = True,
        timeout: float = 60,
    ) -> Done:
        """Run a shell command over ssh, with a session of its own, as any client would.

        Raises LabError with the command's own message when `check` and it fails,
        subprocess.TimeoutExpired after `timeout` seconds.
        """
        argv = ["ssh", "-F", str(self.lab.ssh_config), "-l", user, self.name, "--", command]
        return self._checked(command, helper.run(argv, input or "", timeout), check)

    def enter(
        self,
        argv: Sequence[str],
        input: str | None = None,
        check: bool = True,
        timeout: float = 60,
    ) -> Done:
        """Run a program as root in the node's namespaces without ssh: works on a broken node."""
        done = helper.enter(self.pid, argv, input or "", timeout)
        return self._checked(shlex.join(argv), done, check)

    def _checked(self, shown: str, done: Done, check: bool) -> Done:
        if check and done.returncode:
            raise LabError(
                f"{self.name}: `{shown}`: exit {done.returncode}: {done.stderr.strip()}"
            )
        return done

    def read(self, path: str) -> str:
        """A file's content."""
        return self.enter(["cat", "--", path]).stdout

    def write(self, path: str, content: str | bytes, mode: int | None = None) -> None:
        """Write a file in place, through a link if it is one; directories are made."""
        if isinstance(content, bytes):
            content = content.decode("utf-8", "surrogateescape")
        # `cat > file` keeps owner and mode of what is there, and works on bind-mounted files.
        script = 'mkdir -p -- "${1%/*}/" && cat > "$1" && { [ -z "$2" ] || chmod "$2" "$1"; }'
        self.enter(["sh", "-c", script, "sh", path, f"{mode:o}" if mode else ""], input=content)

    def inventory_data(self) -> tuple[str, dict[str, Any]]:
        """The node as a pyinfra host, with all that it takes to log in."""
        data = {
            "ssh_hostname": self.address,
            "ssh_user": "root",
            "ssh_key": str(self.lab.ssh_key),
            "ssh_known_hosts_file": str(self.lab.known_hosts),
            "ssh_strict_host_key_checking": "yes",
        }
        return self.name, data

    def testinfra(self, user: str = "root") -> Any:
        """A testinfra host for this node, over plain ssh."""
        import testinfra

        # No shared connection: it would outlive the test, and keep the limits of its login.
        spec = f"ssh://{user}@{self.name}?controlpersist=0"
        return testinfra.get_host(spec, ssh_config=str(self.lab.ssh_config))

    def kill(self) -> None:
        """The node loses power: nothing answers at its address."""
        power.kill(self._state)

    def freeze(self) -> None:
        """The cable is pulled: connections neither answer nor close."""
        self.lab.switch_ip(f"link set dev {port(self.number)} down")

    def thaw(self) -> None:
        """The cable is back."""
        self.lab.switch_ip(f"link set dev {port(self.number)} up")

    def stop_sshd(self) -> None:
        """Connections are refused; those that are open stay."""
        # It is told, and goes a moment later: until then it takes connections.
        script = """
            pid=$(cat /run/sshd.pid) && kill "$pid" || exit 1
            for i in $(seq 200); do kill -0 "$pid" 2>/dev/null || exit 0; sleep 0.05; done
            exit 1
        """
        self.enter(["sh", "-c", script])

    def pause_sshd(self) -> None:
        """Connections open, and no banner ever comes."""
        self.enter(["sh", "-c", 'kill -STOP "$(cat /run/sshd.pid)"'])

    def resume_sshd(self) -> None:
        """Undo `pause_sshd`, or start sshd after `stop_sshd`."""
        script = 'kill -CONT "$(cat /run/sshd.pid)" 2>/dev/null || exec /usr/sbin/sshd'
        self.enter(["sh", "-c", script])

    def reboot(self, fault: str | None = None) -> None:
        """Power off and on: the disk stays, /run, /tmp and live kernel values do not.

        With `fault` this is wrong with it from now on; "": nothing is.
        """
        self.lab.restart([self], keep_disk=True, fault=fault)

    def reset(
        self,
        files: Mapping[str, Content] | None = None,
        new_host_key: bool = False,
        fault: str = "",
    ) -> None:
        """Make it as fresh as on the first day, plus these files and this fault.

        With `new_host_key` it is a re-imaged node: whoever knew it must refuse it.
        """
        self.lab.restart(
            [self], keep_disk=False, files=files, new_host_key=new_host_key, fault=fault
        )

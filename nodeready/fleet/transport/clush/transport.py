"""The transport by ClusterShell: its workers, its tree of gateways (topology.conf), over ssh.

ClusterShell's event loop does not run under gevent: it is the one thread of another process
(`child`). The same script for many nodes is one worker of ClusterShell's, and the answer of a node
is passed on when its command ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from shutil import which
from typing import TYPE_CHECKING, Any, cast

import gevent
import gevent.socket
from gevent.queue import Empty

from nodeready.agent.asking import Request, TransportUnavailable
from nodeready.agent.line_channel import LineChannel
from nodeready.agent.sudo import as_root
from nodeready.core import shell
from nodeready.fleet.transport.clush.ssh_targets import (
    ClushPlan,
    absolute,
    ssh_target,
    topology_file,
    without_own_keys,
)
from nodeready.fleet.transport.processes import Child, WorkerTransport

if TYPE_CHECKING:
    from pyinfra.api import Config, Host

#: Seconds without an answer of ClusterShell's process, after which it is considered hung.
_SILENT_S = 30.0


class ClushError(TransportUnavailable):
    """ClusterShell cannot be used here, or with this topology.conf; one line."""


class Clush(WorkerTransport):
    """The nodes of an inventory, asked by ClusterShell.

    hosts:    the selected hosts of pyinfra's inventory
    config:   pyinfra's configuration, for its SUDO; None: only the data of the hosts
    further_hosts: of the inventory; some may be gateways
    topology: topology.conf; None: where ClusterShell looks for it; "": no tree
    fanout:   number of nodes that this machine asks at once, and each gateway; 0: the fanout in
              ClusterShell's defaults.conf (64 without it), and 64 on a gateway
    notify:   shows the user a line about each gateway that is not used

    Only ssh sees the host keys: `ssh_peers` is empty.
    Raises ClushError without an ssh program, and for a ``topology`` that cannot be read.
    """

    child_name = "ClusterShell's process"
    one_text = True

    def __init__(
        self,
        hosts: Iterable[Host],
        config: Config | None = None,
        *,
        further_hosts: Iterable[Host] = (),
        topology: str | None = None,
        fanout: int = 0,
        notify: Callable[[str], object] = lambda text: None,
    ) -> None:
        sudo = bool(config is not None and config.SUDO)
        self._targets = without_own_keys(ssh_target(host, sudo) for host in hosts)
        super().__init__(target.name for target in self._targets)
        if not which("ssh"):
            raise ClushError("ssh is not installed here: --via clush is ClusterShell's own ssh")
        topology_path = topology_file() if topology is None else topology
        if topology:
            try:
                with open(topology, "rb"):
                    pass
            except OSError as problem:
                raise ClushError(f"{topology}: {problem.strerror}") from None
        gateways = (*self._targets, *(ssh_target(host) for host in further_hosts))
        self._plan = ClushPlan(
            tuple(self._targets),
            gateways,
            self.tag,
            absolute(topology_path) if topology_path else "",
            fanout,
        )
        self._target_of = {target.name: target for target in self._targets}
        self._notify = notify
        self._watching: Any = None

    def start(self) -> list[Child]:
        """Start a fresh interpreter, in a new session: Ctrl-C is for the parent."""
        parent_end, child_end = gevent.socket.socketpair()
        os.set_inheritable(child_end.fileno(), True)
        # The child has our path, without the current directory.
        path = [entry for entry in sys.path if entry.startswith("/")]
        code = (
            f"import sys; sys.path[:] = {path!r}; "
            f"from nodeready.fleet.transport.clush.child import main; main({child_end.fileno()})"
        )
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-c", code],
            {**os.environ, "LC_ALL": "C"},
            setsid=True,
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],
        )
        child_end.close()
        child = Child(pid, parent_end, self.nodes)
        child.send("begin", self._plan)
        return [child]

    def note(self, text: str) -> None:
        self._notify(text)

    def __enter__(self) -> Clush:
        super().__enter__()
        self._watching = gevent.spawn(self._watch)
        return self

    def __exit__(self, *problem: object) -> None:
        self._watching.kill()
        super().__exit__(*problem)

    def _watch(self) -> None:
        """Kill a silent child, so that all questions to it fail."""
        (child,) = self._pool.children
        while not child.gone_reason:
            gevent.sleep(_SILENT_S / 3)
            if not self.ask_children([child], "ssh_peers", limit_s=_SILENT_S):
                child.kill(f"gave no sign for {_SILENT_S:.0f} s, and was ended")

    def use_password(self, password: str, nodes: Iterable[str]) -> None:
        names = tuple(nodes)
        super().use_password(password, names)
        for name in names:
            self._target_of[name] = replace(self._target_of[name], password=password)

    def open(self, request: Request) -> LineChannel:
        """See Transport. A worker of ClusterShell's for this node, whose input stays open."""
        target = self._target_of[request.node]
        command = shell.command(request.script, request.limit_s, self.tag, request.payload)
        stdin = as_root(command, target.password).stdin if target.sudo else command.stdin
        return LineChannel(
            lambda: _ClushStream(self, request), stdin, request.mark, sudo=target.sudo
        )


class _ClushStream:
    """A command that ClusterShell runs on one node, as a Stream."""

    def __init__(self, transport: Clush, request: Request) -> None:
        self._child = transport.child_of[request.node]
        self._open = contextlib.ExitStack()
        self._number, self._frames = self._open.enter_context(transport.numbered_queue())
        self._child.send("open", self._number, request)

    def read(self, limit_s: float) -> bytes:
        """See Stream. Raises TimeoutError, and ValueError with why the command ended."""
        try:
            _, kind, *details = self._frames.get(timeout=max(0.0, limit_s))
        except Empty:
            raise TimeoutError from None
        if kind == "gone":
            raise ValueError(self._child.gone_reason or "no answer from the process that asks it")
        if kind == "over":
            if details[1]:
                raise ValueError(details[1])
            return b""
        return cast("bytes", details[1])

    def write(self, data: bytes, limit_s: float) -> None:
        self._child.send("line", self._number, data)

    def close(self) -> None:
        """End the command's input, and thereby the command."""
        self._child.send("close", self._number)
        self._open.close()

"""The snapshots of a pyinfra run: one round trip per node, shared by all operations.

For `pyinfra INVENTORY deploy.py`. pyinfra connects to the hosts and calls each operation for each
host, first to prepare and again to execute. The first call probes all nodes in parallel. After an
operation that changed a node, only the subjects that it touches are probed again.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

from gevent.lock import BoundedSemaphore
from pyinfra.api import Host, State, StringCommand
from pyinfra.api.exceptions import PyinfraError

from nodeready import shell
from nodeready.deploy.actions import StepChange
from nodeready.inventory.node_policies import policies
from nodeready.policy import Policy
from nodeready.policy.policy import PolicyError
from nodeready.subjects.context import Judged
from nodeready.subjects.registry import CHANGED
from nodeready.transport.base import Conversation, Key, collect
from nodeready.transport.fleet_context import fleet_context
from nodeready.transport.snapshots import SnapshotReply, snapshot_question, take_snapshot
from nodeready.transport.ssh import ConnectedHosts
from nodeready.transport.sudo import with_sudo


@dataclass
class _PyinfraRun:
    """One pyinfra run.

    policies: each node's declared policy
    nodes:    with their latest results; None: they were not probed yet
    stale:    node -> the subjects that were changed since its last probe
    """

    transport: ConnectedHosts
    policies: dict[str, Policy]
    nodes: dict[str, Judged] | None = None
    stale: dict[str, set[str]] = field(default_factory=dict)
    # pyinfra runs a deploy file for all nodes at once. The first call probes; the others wait.
    lock: BoundedSemaphore = field(default_factory=BoundedSemaphore)

    def probe_all(self, state: State) -> dict[str, Judged]:
        """Probe all nodes in parallel."""
        hosts = list(state.inventory.get_active_hosts())
        self.transport = ConnectedHosts(hosts, self.transport.run)
        names = [str(host.name) for host in hosts]
        conversations: dict[Key, Conversation[SnapshotReply]] = {
            name: take_snapshot(name, self.policies[name], CHANGED) for name in names
        }
        answers = collect(self.transport, conversations)
        replies = [SnapshotReply.of(name, answers[name]) for name in names]
        context = fleet_context(self.transport, self.policies, replies, state.inventory)
        nodes = {}
        for name, reply in zip(names, replies, strict=True):
            # A node that could not be probed has the reason in place of each subject.
            probe = snapshot_question(name, self.policies[name], CHANGED)
            node = Judged(name, self.policies[name], context.about(name))
            nodes[name] = node.judged(reply.snapshot or probe.all_unknown(reply.error))
        self.nodes = nodes
        return nodes

    def probe_again(self, node: Judged, stale: Iterable[str]) -> Judged:
        """The node after another probe of these subjects."""
        probe = snapshot_question(node.name, node.policy, stale)
        for _, answer in self.transport.ask([probe.request]):
            assert node.snapshot is not None
            node = node.judged(node.snapshot.merged(probe.read(answer)))
        return node


# pyinfra passes an operation only its host. So the snapshots are kept here for the next operation,
# by the State of the host. A pyinfra run has one State; the snapshots are freed with it.
_runs: WeakKeyDictionary[State, _PyinfraRun] = WeakKeyDictionary()


def _run(host: Host) -> tuple[_PyinfraRun, dict[str, Judged]]:
    state = host.state
    if state not in _runs:
        try:
            declared = policies(state.inventory, list(state.inventory))
        except PolicyError as error:
            # pyinfra prints its own exceptions as one line, any other as a traceback.
            raise PyinfraError(str(error)) from None
        _runs[state] = _PyinfraRun(ConnectedHosts([], secrets.token_hex(6)), declared)
    run = _runs[state]
    with run.lock:
        return run, run.nodes or run.probe_all(state)


def judged(host: Host) -> Judged:
    """The node with its results. Subjects that became stale are probed again."""
    run, nodes = _run(host)
    stale = run.stale.pop(host.name, None)
    if stale:
        nodes[host.name] = run.probe_again(nodes[host.name], stale)
    return nodes[host.name]


def command(host: Host, change: StepChange) -> StringCommand:
    """The command that makes a change on the node.

    pyinfra itself would put sudo's password into the command line, which every user of the node
    can read. So these commands read the password from the first line of their standard input.
    """
    run, nodes = _run(host)
    wait_s = nodes[host.name].policy.lock_wait_s
    request = change.request(host.name, run.transport.run, wait_s)
    # One line of ASCII: pyinfra sends text.
    line, stdin = shell.command(
        request.script, request.limit_s, run.transport.tag, request.payload or ""
    )
    password = _sudo_password(host)
    if not password:
        return StringCommand(line, _stdin=stdin)
    return StringCommand(
        with_sudo(line, password), _stdin=f"{password}\n{stdin}", _sudo=False, _sudo_password=""
    )


def _sudo_password(host: Host) -> str:
    """The password for sudo to root in the current operation, or ""."""
    arguments = cast("dict[str, Any]", host.current_op_global_arguments or {})
    if not arguments.get("_sudo") or arguments.get("_sudo_user"):
        return ""
    prompted = host.connector_data.get("prompted_sudo_password")
    return str(arguments.get("_sudo_password") or prompted or "")


def refuse(reason: str) -> StringCommand:
    """A command that fails with this reason: pyinfra then counts the node as failed."""
    return StringCommand(f"echo {shell.quote('nodeready: ' + reason)} >&2; exit 1")


def forget(host: Host, touched: Iterable[str]) -> None:
    """Mark these subjects of the node as changed, so that they are probed again before use."""
    run, _ = _run(host)
    run.stale.setdefault(host.name, set()).update(touched)

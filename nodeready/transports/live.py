"""The snapshots of a pyinfra run: one round trip per node, shared by all its operations.

For `pyinfra INVENTORY deploy.py`, where pyinfra connects and runs, and calls each operation per
host, in prepare and again in execute. The first call gathers all nodes in parallel; an operation
that changed something makes only what it touched stale.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from gevent.lock import BoundedSemaphore
from gevent.pool import Pool
from pyinfra.api import Host, State, StringCommand
from pyinfra.api.exceptions import PyinfraError
from pyinfra.context import ctx_host

from nodeready import fleet, known_hosts, shell, snapshot
from nodeready.actions import Change
from nodeready.policy import Policy
from nodeready.policy.load import PolicyError
from nodeready.probes.script import make_script, mark
from nodeready.snapshot import Snapshot
from nodeready.subjects import CHANGED
from nodeready.transports.answer import PROBE_TIMEOUT_S
from nodeready.transports.connector import Become, carry, who


def observe(
    host: Host,
    policy: Policy,
    tag: str,
    subjects: Iterable[str] | None = None,
    rights: Become | None = None,
    *,
    limit_s: int = PROBE_TIMEOUT_S,
) -> tuple[Snapshot, str, str]:
    """One round trip to a connected node: its snapshot, and the error and its kind, or "".

    limit_s: seconds after which the look is ended on the node
    """
    chosen = snapshot.probes(subjects)
    nonce = secrets.token_hex(8)
    script = make_script(snapshot.sections(chosen), policy, nonce, limit_s)
    command = shell.command(script, limit_s, tag)
    answer = carry(host, command, limit_s, rights=rights, mark=mark(nonce))
    if answer.error:
        return snapshot.nothing(answer.error, chosen), answer.error, answer.kind
    if mark(nonce) not in answer.stdout:
        said = f"{answer.stderr}\n{answer.stdout}".strip()
        return snapshot.nothing("no answer from the node's shell", chosen, said), "", ""
    return snapshot.read(answer.stdout, chosen, policy, nonce), "", ""


@dataclass
class _Store:
    """One pyinfra run: its policies, its snapshots, and what became stale."""

    run: str
    declared: dict[str, Policy]
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    wanted: dict[str, Policy] = field(default_factory=dict)
    stale: dict[str, set[str]] = field(default_factory=dict)
    # pyinfra loads a deploy file for all nodes at once: the first gathers, the others wait.
    gathering: BoundedSemaphore = field(default_factory=BoundedSemaphore)


_stores: WeakKeyDictionary[State, _Store] = WeakKeyDictionary()


def _real(host: Host) -> Host:
    """The host itself: operations get pyinfra's context proxy of it."""
    return host.state.inventory.get_host(host.name)


def _gather(store: _Store, state: State) -> None:
    """Look at all nodes that were not looked at yet, in parallel."""
    missing = [h for h in state.inventory.get_active_hosts() if h.name not in store.snapshots]
    seen: dict[str, Snapshot] = {}

    def look(node: Host) -> None:
        with ctx_host.use(node):
            seen[node.name], _, _ = observe(
                node, store.declared[node.name], f"nodeready:{store.run}", CHANGED
            )

    def block(name: str) -> str:
        node = state.inventory.get_host(name)
        line = shell.command(known_hosts.READ_BLOCK, 30, f"nodeready:{store.run}")
        with ctx_host.use(node):
            return carry(node, line, 30).stdout

    Pool(max(1, len(missing))).map(look, missing)
    store.snapshots.update(seen)
    store.wanted = fleet.expectations(store.declared, store.snapshots, state.inventory, block)


def _store(host: Host) -> _Store:
    state = host.state
    if state not in _stores:
        try:
            declared = fleet.policies(state.inventory, list(state.inventory))
        except PolicyError as error:
            # pyinfra prints its own exceptions as one line, any other as a traceback.
            raise PyinfraError(str(error)) from None
        _stores[state] = _Store(secrets.token_hex(6), declared)
    store = _stores[state]
    with store.gathering:
        if host.name not in store.snapshots:
            _gather(store, state)
    return store


def observed(host: Host) -> Snapshot:
    """The node's snapshot, with what became stale looked at again."""
    store, node = _store(host), _real(host)
    stale = store.stale.pop(host.name, None)
    if stale:
        seen, _, _ = observe(node, store.wanted[node.name], f"nodeready:{store.run}", stale)
        store.snapshots[host.name] = store.snapshots[host.name].merged(seen)
    return store.snapshots[host.name]


def policy(host: Host) -> Policy:
    """The node's policy, completed by what the other nodes showed."""
    return _store(host).wanted[host.name]


def command(host: Host, change: Change) -> StringCommand:
    """The one command that makes a change on the node."""
    store = _store(host)
    want = store.wanted[host.name]
    script = change.script(store.run, who(), want.lock_wait_s)
    line = shell.command(script, change.timeout_s + want.lock_wait_s, f"nodeready:{store.run}")
    stdin = change.stdin()
    return StringCommand(line, _stdin=stdin) if stdin else StringCommand(line)


def refuse(reason: str) -> StringCommand:
    """A command that fails with this reason: pyinfra then counts the node as failed."""
    return StringCommand(f"echo {shell.quote('nodeready: ' + reason)} >&2; exit 1")


def forget(host: Host, touched: Iterable[str]) -> None:
    """Something of ours changed these subjects on the node: look again before the next use."""
    _store(host).stale.setdefault(host.name, set()).update(touched)

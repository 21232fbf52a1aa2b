"""From the looks of a run to judged nodes.

A look is what one node showed. The `FleetContext` holds what only all looks of the run, or earlier
runs, tell about each node. A look and the context make a node `Judged`, once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from nodeready.policy import Policy
from nodeready.policy.policy import JudgingPolicy
from nodeready.subjects.access import Access
from nodeready.subjects.base import Counters, Unknown
from nodeready.subjects.nics.facts import Nics, with_peers
from nodeready.subjects.ports import facts as ports
from nodeready.subjects.proof.facts import Mesh, Proved
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.result import Result
from nodeready.subjects.snapshot import Snapshot, judge
from nodeready.subjects.ssh_client import known_hosts
from nodeready.subjects.ssh_client.facts import SshClient

# --- What is kept of a look for the next one: the counters.

# Subject -> the function that reads the counters of an observation with a field "before".
_COUNTING: dict[str, Callable[[Any], dict[str, int]]] = {
    name: subject.counters for name, subject in SUBJECTS.items() if subject.counters
}


@dataclass(frozen=True)
class Counted:
    """The counters that are kept of the looks at one node, all of one boot.

    taken: subject -> (time of the look in seconds since 1970, counter -> value)
    """

    boot_id: str
    taken: Mapping[str, tuple[float, Mapping[str, int]]]

    @property
    def time(self) -> float:
        """The time of the newest look, in seconds since 1970."""
        return max((taken_s for taken_s, _ in self.taken.values()), default=0.0)


def _boot_id(snapshot: Snapshot) -> str:
    """The kernel's name for the node's boot, or "" when the look did not tell."""
    boot_id = getattr(snapshot.subjects.get("host"), "boot_id", None)
    return boot_id if isinstance(boot_id, str) else ""


def _observed(snapshot: Snapshot, subject: str) -> Any:
    """The observation of a subject; None when there is none."""
    observation = snapshot.subjects.get(subject)
    return None if isinstance(observation, Unknown) else observation


def counted(snapshot: Snapshot, moment_s: float) -> Counted | None:
    """The counters of this snapshot; None when a later look could compare with none of them."""
    boot_id = _boot_id(snapshot)
    taken = {
        name: (moment_s, values)
        for name, counters in _COUNTING.items()
        if (observed := _observed(snapshot, name)) is not None and (values := counters(observed))
    }
    return Counted(boot_id, taken) if boot_id and taken else None


def with_counters(snapshot: Snapshot, earlier: Counted | None, moment_s: float) -> Snapshot:
    """The snapshot with the counters of an earlier look at the same boot beside its own.

    An earlier look with a later time (a clock was set back) tells no rate, and is passed over.
    """
    if earlier is None or not earlier.boot_id or earlier.boot_id != _boot_id(snapshot):
        return snapshot
    subjects = dict(snapshot.subjects)
    for name, (taken_s, values) in earlier.taken.items():
        observed = _observed(snapshot, name) if name in _COUNTING else None
        if observed is not None and moment_s > taken_s:
            subjects[name] = replace(observed, before=Counters(moment_s - taken_s, values))
    return replace(snapshot, subjects=subjects)


# --- What all nodes need of each look before any can be judged.

#: The subjects whose results are not told by the node's own look and declared policy alone: see
#: `FleetContext.completed` and `expectations`.
COMPLETED = frozenset({"ssh_client", "gate", "nics", "ports", "proof", *_COUNTING})


def addresses_of(snapshot: Snapshot) -> frozenset[str] | None:
    """The addresses that a node says that it has; None: its interfaces were not observed."""
    nics = snapshot.subjects.get("nics")
    if not isinstance(nics, Nics):
        return None
    return frozenset(
        address.partition("/")[0]
        for interface in nics.interfaces.values()
        for address in interface.addresses or ()
    )


def identity_of(snapshot: Snapshot) -> SshClient | None:
    """Of the observation of ssh, what the fleet's known hosts are made of."""
    observation = snapshot.subjects.get("ssh_client")
    if not isinstance(observation, SshClient):
        return None
    return replace(observation, config={}, files={}, own=(), asked=(), access=Access())


# --- What is known beside the looks, and the one place where looks are judged.


class Looked(Protocol):
    """The outcome of the look at one node."""

    @property
    def name(self) -> str: ...
    @property
    def snapshot(self) -> Snapshot | None: ...
    @property
    def error(self) -> str: ...
    @property
    def unreachable(self) -> bool: ...
    @property
    def seconds(self) -> float: ...


def _all_met(proved: Any) -> bool:
    """Whether the node reached every peer on the job's ports that it tried, and they it."""
    mesh = proved.mesh if isinstance(proved, Proved) else None
    if not isinstance(mesh, Mesh) or mesh.blocked or not mesh.to or not mesh.by:
        return False
    return mesh.reached == mesh.to and mesh.reached_by == mesh.by


@dataclass(frozen=True)
class FleetContext:
    """What only all nodes of a run tell about each of them, and what was kept of earlier runs.

    policies:  the nodes' policies, completed by what all nodes showed (`expectations`)
    addresses: the addresses that exactly one of the nodes has; None: fewer than two nodes were
               looked at
    earlier:   node -> the counters of earlier looks
    moment:    the time of this run, in seconds since 1970
    """

    policies: Mapping[str, Policy]
    addresses: tuple[str, ...] | None = None
    earlier: Mapping[str, Counted] = field(default_factory=dict)
    moment: float = 0.0

    def completed(self, name: str, snapshot: Snapshot) -> Snapshot:
        """The node's snapshot, with its way to the other nodes and its earlier counters."""
        nics = snapshot.subjects.get("nics")
        if self.addresses is not None and isinstance(nics, Nics):
            nics = with_peers(nics, self.addresses)
            snapshot = replace(snapshot, subjects={**snapshot.subjects, "nics": nics})
        port_facts = snapshot.subjects.get("ports")
        if self.addresses is not None and isinstance(port_facts, ports.Ports):
            port_facts = ports.with_peers(port_facts, self.addresses)
            snapshot = replace(snapshot, subjects={**snapshot.subjects, "ports": port_facts})
        if isinstance(port_facts, ports.Ports) and _all_met(snapshot.subjects.get("proof")):
            snapshot = replace(
                snapshot, subjects={**snapshot.subjects, "ports": ports.with_trial(port_facts)}
            )
        return with_counters(snapshot, self.earlier.get(name), self.moment)


@dataclass(frozen=True)
class Judged:
    """What one command knows about one node.

    results: of all checks, from the latest look
    error:   one line when the node could not be looked at, or not to the end
    unreachable: the node was not reached, or was lost on the way
    seconds: wall time of the look, connection included
    """

    name: str
    policy: Policy
    snapshot: Snapshot | None = None
    results: tuple[Result, ...] = ()
    error: str = ""
    unreachable: bool = False
    seconds: float = 0.0

    @property
    def reached(self) -> bool:
        return self.snapshot is not None


def judged(looks: Iterable[Looked], context: FleetContext) -> list[Judged]:
    """Every node with its results: the one place where a look is judged."""
    return [_judged(look, context) for look in looks]


def _judged(look: Looked, context: FleetContext) -> Judged:
    policy = context.policies[look.name]
    if look.snapshot is None:
        return Judged(
            look.name, policy, error=look.error, unreachable=look.unreachable, seconds=look.seconds
        )
    snapshot = context.completed(look.name, look.snapshot)
    results = tuple(judge(snapshot, policy))
    return Judged(look.name, policy, snapshot, results, look.error, look.unreachable, look.seconds)


def expectations(
    policies: Mapping[str, Policy],
    snapshots: Mapping[str, Snapshot],
    endpoints: Mapping[str, known_hosts.Endpoint],
    program: Callable[[], bytes],
    fetch: Callable[[str], str],
) -> Mapping[str, Policy]:
    """The policies, completed by the host keys of all nodes and the digests of the gate's files.

    endpoints: of all nodes of the inventory, those of this run and the others
    program:   makes the node's own program, for the nodes with a gate
    fetch:     runs known_hosts.READ_BLOCK on the node of that name and returns what it printed;
               only called for blocks that were too large to come along and differ from what is
               wanted
    """
    lines: dict[tuple[str, ...], Callable[[str], tuple[str, ...]]] = {}
    for policy in policies.values():
        extra = policy.ssh_known_hosts
        if policy.ssh_client_mode == "known_hosts" and extra not in lines:
            lines[extra] = _known_hosts(snapshots, extra, endpoints, fetch)
    return _Expectations(policies, lines, endpoints, program)


class _Expectations(Mapping[str, Policy]):
    """The completed policies, each made when it is asked for: all of them fill the memory."""

    def __init__(
        self,
        policies: Mapping[str, Policy],
        lines: Mapping[tuple[str, ...], Callable[[str], tuple[str, ...]]],
        endpoints: Mapping[str, known_hosts.Endpoint],
        program: Callable[[], bytes],
    ) -> None:
        self._wanted, self._lines = policies, lines
        self._endpoints, self._program = endpoints, program
        self._made: dict[tuple[int, int], Policy] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

    def __getitem__(self, name: str) -> Policy:
        # Imported here, because it imports the templates: a command that only looks needs none.
        from nodeready.subjects.gate.files import complete

        policy = self._wanted[name]
        if policy.ssh_client_mode != "known_hosts":
            return complete(policy, policy, self._program)
        lines = self._lines[policy.ssh_known_hosts](name)
        # Without the node's own key, one for all nodes of a policy. Both are kept by others.
        key = id(policy), id(lines)
        if key not in self._made:
            own_policy = replace(policy, ssh_known_hosts=lines)
            self._made[key] = complete(own_policy, policy, self._program)
        completed = self._made[key]
        host_key = self._endpoints[name].key if name in self._endpoints else ""
        return JudgingPolicy.completing(completed, host_key=host_key) if host_key else completed


def _known_hosts(
    snapshots: Mapping[str, Snapshot],
    extra: tuple[str, ...],
    endpoints: Mapping[str, known_hosts.Endpoint],
    fetch: Callable[[str], str],
) -> Callable[[str], tuple[str, ...]]:
    """The function from a node to the lines that it shall have."""
    fleet = known_hosts.Fleet(snapshots, extra, endpoints)
    missing = known_hosts.unsent(snapshots, fleet.lines()) if fleet.unseen else {}
    blocks: dict[str, tuple[str, ...]] = {}
    for digest, nodes in missing.items():
        for node in nodes:
            with contextlib.suppress(ValueError):
                blocks[digest] = known_hosts.read_block(fetch(node), digest)
                break
    lines_by_node = known_hosts.lines_of_nodes(fleet, snapshots, blocks)
    return lambda name: lines_by_node.get(name, fleet.lines())

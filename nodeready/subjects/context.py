"""From the snapshots of a run to judged nodes.

The `FleetContext` holds the facts about a node that only the snapshots of all nodes, or earlier
runs, provide. A snapshot and the context make a node `Judged`, once.
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
from nodeready.subjects.judging import judge
from nodeready.subjects.nics.facts import Nics, with_peers
from nodeready.subjects.ports import facts as ports
from nodeready.subjects.proof.facts import Mesh, Proved
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.result import Result
from nodeready.subjects.snapshot import Snapshot
from nodeready.subjects.ssh_client import known_hosts
from nodeready.subjects.ssh_client.facts import SshClient

# --- Counters, which are kept of a snapshot for the next run.

# Subject -> the function that reads the counters of an observation with a field "before".
_COUNTING: dict[str, Callable[[Any], dict[str, int]]] = {
    name: subject.counters for name, subject in SUBJECTS.items() if subject.counters
}


@dataclass(frozen=True)
class CounterSample:
    """The latest counters of one node, all of one boot.

    taken: subject -> (time of the snapshot in seconds since 1970, counter -> value)
    """

    boot_id: str
    taken: Mapping[str, tuple[float, Mapping[str, int]]]

    @property
    def time(self) -> float:
        """The time of the newest snapshot, in seconds since 1970."""
        return max((taken_s for taken_s, _ in self.taken.values()), default=0.0)


def _boot_id(snapshot: Snapshot) -> str:
    """The kernel's id of the node's boot; "" when it was not observed."""
    boot_id = getattr(snapshot.subjects.get("host"), "boot_id", None)
    return boot_id if isinstance(boot_id, str) else ""


def _observed(snapshot: Snapshot, subject: str) -> Any:
    """The observation of a subject; None when it was not observed."""
    observation = snapshot.subjects.get(subject)
    return None if isinstance(observation, Unknown) else observation


def counter_sample(snapshot: Snapshot, moment_s: float) -> CounterSample | None:
    """The counters of this snapshot; None when there is nothing to compare with later."""
    boot_id = _boot_id(snapshot)
    taken = {
        name: (moment_s, values)
        for name, counters in _COUNTING.items()
        if (observed := _observed(snapshot, name)) is not None and (values := counters(observed))
    }
    return CounterSample(boot_id, taken) if boot_id and taken else None


def with_counters(snapshot: Snapshot, earlier: CounterSample | None, moment_s: float) -> Snapshot:
    """The snapshot with the counters of an earlier snapshot of the same boot.

    An earlier snapshot with a later time (a clock was set back) gives no rate, and is ignored.
    """
    if earlier is None or not earlier.boot_id or earlier.boot_id != _boot_id(snapshot):
        return snapshot
    subjects = dict(snapshot.subjects)
    for name, (taken_s, values) in earlier.taken.items():
        observed = _observed(snapshot, name) if name in _COUNTING else None
        if observed is not None and moment_s > taken_s:
            subjects[name] = replace(observed, before=Counters(moment_s - taken_s, values))
    return replace(snapshot, subjects=subjects)


# --- The parts of each snapshot that judging any node needs.

#: The subjects whose results need more than the node's own snapshot and declared policy: see
#: `FleetContext.completed` and `expectations`.
NEEDS_FLEET = frozenset({"ssh_client", "gate", "nics", "ports", "proof", *_COUNTING})


def addresses_of(snapshot: Snapshot) -> frozenset[str] | None:
    """The addresses that a node claims; None: its interfaces were not observed."""
    nics = snapshot.subjects.get("nics")
    if not isinstance(nics, Nics):
        return None
    return frozenset(
        address.partition("/")[0]
        for interface in nics.interfaces.values()
        for address in interface.addresses or ()
    )


def identity_of(snapshot: Snapshot) -> SshClient | None:
    """The part of ssh's observation from which the fleet's known hosts are built."""
    observation = snapshot.subjects.get("ssh_client")
    if not isinstance(observation, SshClient):
        return None
    return replace(observation, config={}, files={}, root_lines=(), effective=(), access=Access())


# --- The fleet's context, and the judging of snapshots.


class NodeSnapshot(Protocol):
    """The outcome of probing one node."""

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


def _reached_all_peers(proved: Any) -> bool:
    """Whether all tried peers reached the node on the job's ports, and it reached them."""
    mesh = proved.mesh if isinstance(proved, Proved) else None
    if not isinstance(mesh, Mesh) or mesh.blocked or not mesh.to or not mesh.by:
        return False
    return mesh.reached == mesh.to and mesh.reached_by == mesh.by


@dataclass(frozen=True)
class FleetContext:
    """The facts about a node that come from all nodes of a run, or from earlier runs.

    policies:  the nodes' policies, completed from all nodes' observations (`expectations`)
    addresses: the addresses that exactly one of the nodes has; None: fewer than two nodes were
               probed
    earlier:   node -> the counters of earlier snapshots
    moment:    the time of this run, in seconds since 1970
    """

    policies: Mapping[str, Policy]
    addresses: tuple[str, ...] | None = None
    earlier: Mapping[str, CounterSample] = field(default_factory=dict)
    moment: float = 0.0

    def completed(self, name: str, snapshot: Snapshot) -> Snapshot:
        """The node's snapshot with its route to its peers and its earlier counters."""
        nics = snapshot.subjects.get("nics")
        if self.addresses is not None and isinstance(nics, Nics):
            nics = with_peers(nics, self.addresses)
            snapshot = replace(snapshot, subjects={**snapshot.subjects, "nics": nics})
        port_facts = snapshot.subjects.get("ports")
        if self.addresses is not None and isinstance(port_facts, ports.Ports):
            port_facts = ports.with_peers(port_facts, self.addresses)
            snapshot = replace(snapshot, subjects={**snapshot.subjects, "ports": port_facts})
        if isinstance(port_facts, ports.Ports) and _reached_all_peers(
            snapshot.subjects.get("proof")
        ):
            snapshot = replace(
                snapshot, subjects={**snapshot.subjects, "ports": ports.with_trial(port_facts)}
            )
        return with_counters(snapshot, self.earlier.get(name), self.moment)


@dataclass(frozen=True)
class Judged:
    """The results of one node in one command.

    results: of all checks, from the latest snapshot
    error:   one line when probing the node failed, or did not finish
    unreachable: the node was not reached, or was lost on the way
    seconds: wall time of probing, connection included
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


def judge_nodes(nodes: Iterable[NodeSnapshot], context: FleetContext) -> list[Judged]:
    """Every node with its results."""
    return [_judge_node(node, context) for node in nodes]


def _judge_node(node: NodeSnapshot, context: FleetContext) -> Judged:
    policy = context.policies[node.name]
    if node.snapshot is None:
        return Judged(
            node.name, policy, error=node.error, unreachable=node.unreachable, seconds=node.seconds
        )
    snapshot = context.completed(node.name, node.snapshot)
    results = tuple(judge(snapshot, policy))
    return Judged(node.name, policy, snapshot, results, node.error, node.unreachable, node.seconds)


def expectations(
    policies: Mapping[str, Policy],
    snapshots: Mapping[str, Snapshot],
    endpoints: Mapping[str, known_hosts.Endpoint],
    program: Callable[[], bytes],
    fetch: Callable[[str], str],
) -> Mapping[str, Policy]:
    """The policies, completed by the host keys of all nodes and the digests of the gate's files.

    endpoints: of all nodes of the inventory, not only of this run
    program:   makes the node's own program, for the nodes with a gate
    fetch:     runs known_hosts.READ_BLOCK on the node of that name and returns what it printed;
               only called for blocks that were too large for the snapshot and differ from the
               expected block
    """
    lines: dict[tuple[str, ...], Callable[[str], tuple[str, ...]]] = {}
    for policy in policies.values():
        extra = policy.ssh_known_hosts
        if policy.ssh_client_mode == "known_hosts" and extra not in lines:
            lines[extra] = _known_hosts(snapshots, extra, endpoints, fetch)
    return _Expectations(policies, lines, endpoints, program)


class _Expectations(Mapping[str, Policy]):
    """The completed policies, each built on access: all at once would fill the memory."""

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
        # Imported here, because it imports the templates, which a probe does not need.
        from nodeready.subjects.gate.files import complete

        policy = self._wanted[name]
        if policy.ssh_client_mode != "known_hosts":
            return complete(policy, policy, self._program)
        lines = self._lines[policy.ssh_known_hosts](name)
        # Without the node's own key, nodes of one policy share a copy. Other objects keep both
        # alive, so that their ids stay unique.
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
    """A function that maps a node to its expected lines."""
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

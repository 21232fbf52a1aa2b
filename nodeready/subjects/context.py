"""From the snapshots of a run to judged nodes.

The `FleetContext` holds what the snapshots of all nodes tell about each node. A snapshot and the
`FleetFacts` of its node make a node `Judged`, once.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from nodeready.core.outcome import Gap, Outcome
from nodeready.core.policy import Policy
from nodeready.core.result import ALONE, Counters, FleetFacts, Result
from nodeready.subjects.access import Access
from nodeready.subjects.nics.facts import Nics
from nodeready.subjects.snapshot import Snapshot, judge
from nodeready.subjects.ssh_client import known_hosts
from nodeready.subjects.ssh_client.facts import SshClient

# --- Counters, which the memory keeps for the next run.


@dataclass(frozen=True)
class CounterSample:
    """The latest counters of one node, all of one boot."""

    boot_id: str
    # subject -> (time of the snapshot in seconds since 1970, counter -> value)
    taken: Mapping[str, tuple[float, Mapping[str, int]]]

    @classmethod
    def parse(cls, text: str) -> CounterSample | None:
        """The sample of this JSON, which has the fields of this class; None: of "" """
        if not text:
            return None
        data = json.loads(text)
        taken = {name: (taken_s, values) for name, (taken_s, values) in data["taken"].items()}
        return cls(data["boot_id"], taken)


def boot_id_of(snapshot: Snapshot) -> str:
    """The kernel's id of the node's boot; "" when it was not observed."""
    boot_id = getattr(snapshot.subjects.get("host"), "boot_id", None)
    return boot_id if isinstance(boot_id, str) else ""


def earlier_counters(
    sample: CounterSample | None, boot_id: str, moment_s: float
) -> dict[str, Counters]:
    """Subject -> its counters in an earlier snapshot of the same boot.

    An earlier snapshot with a later time (a clock was set back) gives no rate, and is ignored.
    """
    if sample is None or not sample.boot_id or sample.boot_id != boot_id:
        return {}
    return {
        name: Counters(moment_s - taken_s, values)
        for name, (taken_s, values) in sample.taken.items()
        if moment_s > taken_s
    }


# --- The parts of each snapshot that judging any node needs.


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


@dataclass(frozen=True)
class FleetContext:
    """What all nodes of a run tell about each node."""

    policies: Mapping[str, Policy]  # of the nodes
    addresses: tuple[str, ...] | None = None  # of one node alone; None: fewer than two are probed
    # node -> the lines of its block of host keys
    known_hosts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # node -> the key with which its sshd answered this run
    host_keys: Mapping[str, str] = field(default_factory=dict)
    # node -> (path, sha256) of every file of its gate
    gate_files: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    def about(self, node: str) -> FleetFacts:
        return FleetFacts(
            addresses=self.addresses,
            known_hosts=self.known_hosts.get(node),
            host_key=self.host_keys.get(node, ""),
            gate_files=self.gate_files.get(node),
        )


@dataclass(frozen=True)
class Judged:
    """The results of one node in one command."""

    name: str
    policy: Policy
    fleet: FleetFacts = ALONE
    snapshot: Snapshot | None = None
    results: tuple[Result, ...] = ()  # of all checks, from the latest snapshot
    gap: Gap | None = None  # why the node was not probed, or was lost; None: it was probed

    @property
    def reached(self) -> bool:
        return self.snapshot is not None

    def judged(self, snapshot: Snapshot) -> Judged:
        results = tuple(judge(snapshot, self.policy, self.fleet))
        return replace(self, snapshot=snapshot, results=results)


def judge_nodes(outcomes: Iterable[Outcome[Snapshot]], context: FleetContext) -> list[Judged]:
    nodes = []
    for outcome in outcomes:
        name = outcome.node
        node = Judged(name, context.policies[name], context.about(name), gap=outcome.gap)
        nodes.append(node if outcome.value is None else node.judged(outcome.value))
    return nodes


def unique_addresses(claimed: Sequence[Set[str]], reached: Set[str]) -> tuple[str, ...] | None:
    """The addresses that exactly one node claims, and those that were reached; None: one node.

    An address of several nodes, such as a container bridge's, leads to none of them. A node may
    claim no more addresses than the median node.

    claimed: the addresses that each node reports
    reached: the addresses of the nodes' sshds. An address that this run has connected to is its
             node's, whichever other node claims it
    """
    if len(claimed) < 2:
        return None
    median = sorted(map(len, claimed))[len(claimed) // 2]
    counts = Counter(address for addresses in claimed for address in sorted(addresses)[:median])
    unique = {address for address, count in counts.items() if count == 1}
    return tuple(sorted(unique | (reached & counts.keys())))


def context_of(
    policies: Mapping[str, Policy],
    snapshots: Mapping[str, Snapshot],
    endpoints: Mapping[str, known_hosts.Endpoint],
    program: Callable[[], bytes],
    fetch: Callable[[str], str],
) -> FleetContext:
    """The host keys of all nodes, and the digests of the gate's files.

    endpoints: of all nodes of the inventory, not only of this run
    program:   makes the node's own program, for the nodes with a gate
    fetch:     runs known_hosts.READ_BLOCK on the node of that name and returns what it printed;
               only called for blocks that were too large for the snapshot and differ from the
               expected block
    """
    lines_of: dict[tuple[str, ...], Callable[[str], tuple[str, ...]]] = {}
    lines_of_node, files_of_node = {}, {}
    for name, policy in policies.items():
        extra = policy.ssh_known_hosts
        if policy.ssh_client_mode == "known_hosts":
            if extra not in lines_of:
                lines_of[extra] = _known_hosts(snapshots, extra, endpoints, fetch)
            lines_of_node[name] = lines_of[extra](name)
        if policy.gate:
            # Imported here, because it imports the templates, which a probe does not need.
            from nodeready.subjects.gate.files import digests

            files_of_node[name] = digests(policy, program)
    host_keys = {name: endpoint.key for name, endpoint in endpoints.items() if endpoint.key}
    return FleetContext(
        policies, known_hosts=lines_of_node, host_keys=host_keys, gate_files=files_of_node
    )


def _known_hosts(
    snapshots: Mapping[str, Snapshot],
    extra: tuple[str, ...],
    endpoints: Mapping[str, known_hosts.Endpoint],
    fetch: Callable[[str], str],
) -> Callable[[str], tuple[str, ...]]:
    fleet = known_hosts.FleetHostKeys(snapshots, extra, endpoints)
    missing = known_hosts.unsent(snapshots, fleet.lines()) if fleet.unseen else {}
    blocks: dict[str, tuple[str, ...]] = {}
    for digest, nodes in missing.items():
        for node in nodes:
            with contextlib.suppress(ValueError):
                blocks[digest] = known_hosts.read_block(fetch(node), digest)
                break
    lines_by_node = known_hosts.lines_of_nodes(fleet, snapshots, blocks)
    return lambda name: lines_by_node.get(name, fleet.lines())

"""What only all nodes of a run tell about each of them, and the judging.

A look is what one node showed. The `FleetContext` stands beside the looks: what only all of them
together tell. Both make a node `Judged`, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from nodeready.policy import Policy
from nodeready.subjects.base import Counters, Unknown
from nodeready.subjects.nics import facts as nics_probe
from nodeready.subjects.nics.facts import Nics
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.result import Result
from nodeready.subjects.snapshot import Snapshot, judge
from nodeready.subjects.ssh_client import known_hosts

# Subject -> what reads the counters of its observation, which has a field "before".
_COUNTING: dict[str, Callable[[Any], dict[str, int]]] = {
    name: subject.counters for name, subject in SUBJECTS.items() if subject.counters
}


@dataclass(frozen=True)
class Counted:
    """What is kept of a look at a node: subject -> (time of the look, its counters), all of one
    boot.
    """

    boot_id: str
    taken: Mapping[str, tuple[float, Mapping[str, int]]]

    @property
    def time(self) -> float:
        """When the newest of it was seen, in seconds since 1970."""
        return max((seen for seen, _ in self.taken.values()), default=0.0)


def _boot_id(snapshot: Snapshot) -> str:
    """The boot that the node is in, or "" when the look did not tell."""
    boot_id = getattr(snapshot.subjects.get("host"), "boot_id", None)
    return boot_id if isinstance(boot_id, str) else ""


def _observed(snapshot: Snapshot, subject: str) -> Any:
    """What was observed of a subject; None when nothing was."""
    found = snapshot.subjects.get(subject)
    return None if isinstance(found, Unknown) else found


def counted(snapshot: Snapshot, now: float) -> Counted | None:
    """What of this snapshot is to be kept; None when nothing can be compared with it later."""
    boot_id = _boot_id(snapshot)
    taken = {
        name: (now, values)
        for name, counters in _COUNTING.items()
        if (observed := _observed(snapshot, name)) is not None and (values := counters(observed))
    }
    return Counted(boot_id, taken) if boot_id and taken else None


def with_counters(snapshot: Snapshot, earlier: Counted | None, now: float) -> Snapshot:
    """The snapshot with the counters of an earlier look at the same boot beside its own.

    A look that lies in the future (a clock was set back) tells no rate, and is passed over.
    """
    if earlier is None or not earlier.boot_id or earlier.boot_id != _boot_id(snapshot):
        return snapshot
    subjects = dict(snapshot.subjects)
    for name, (seen, values) in earlier.taken.items():
        observed = _observed(snapshot, name) if name in _COUNTING else None
        if observed is not None and now > seen:
            subjects[name] = replace(observed, before=Counters(now - seen, values))
    return replace(snapshot, subjects=subjects)


class Looked(Protocol):
    """What came of the look at one node."""

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


@dataclass(frozen=True)
class FleetContext:
    """What only all nodes of a run tell about each of them, and what was kept of earlier runs.

    policies:  the nodes' policies, completed by what all of them showed
    addresses: where exactly one node is, of those that were looked at; None: there are no two
    earlier:   the last looks at the nodes' counters, taken at other times
    moment:    of this run, in seconds since 1970
    """

    policies: Mapping[str, Policy]
    addresses: tuple[str, ...] | None = None
    earlier: Mapping[str, Counted] = field(default_factory=dict)
    moment: float = 0.0

    def completed(self, name: str, seen: Snapshot) -> Snapshot:
        """What a node showed, with what is known beside it."""
        nics = seen.subjects.get("nics")
        if self.addresses is not None and isinstance(nics, Nics):
            nics = nics_probe.with_peers(nics, self.addresses)
            seen = replace(seen, subjects={**seen.subjects, "nics": nics})
        return with_counters(seen, self.earlier.get(name), self.moment)


@dataclass(frozen=True)
class Judged:
    """What one command knows about one node.

    results: of all checks, from the latest look
    error:   one line when the node could not be looked at, or not to the end
    unreachable: it was not reached, or got lost on the way
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
    return [_judged(one, context) for one in looks]


def _judged(one: Looked, context: FleetContext) -> Judged:
    want = context.policies[one.name]
    if one.snapshot is None:
        return Judged(
            one.name, want, error=one.error, unreachable=one.unreachable, seconds=one.seconds
        )
    seen = context.completed(one.name, one.snapshot)
    results = tuple(judge(seen, want))
    return Judged(one.name, want, seen, results, one.error, one.unreachable, one.seconds)


def expectations(
    wanted: Mapping[str, Policy],
    snapshots: Mapping[str, Snapshot],
    endpoints: Mapping[str, known_hosts.Endpoint],
    program: Callable[[], bytes],
    fetch: Callable[[str], str],
) -> dict[str, Policy]:
    """The policies, completed by what all nodes of the run showed, every node's host keys, and by
    what this nodeready makes of them (gate.complete).

    endpoints: the address and port of each node, as the inventory has them
    program:   the node's own program, for the nodes with a gate
    fetch:     runs known_hosts.READ_BLOCK on the node of that name and returns what it printed;
               only called for blocks that were too large to come along and differ from what is
               wanted
    """
    # It renders templates: nothing that only looks has a use for that.
    from nodeready.subjects.gate import files as gate

    lines: dict[tuple[str, ...], tuple[str, ...]] = {}
    made: dict[str, Policy] = {}
    for name, policy in wanted.items():
        if policy.ssh_client_mode != "known_hosts":
            made[name] = gate.complete(policy, policy, program)
            continue
        extra = policy.ssh_known_hosts
        if extra not in lines:
            lines[extra] = _known_hosts(snapshots, extra, endpoints, fetch)
        told = replace(policy, ssh_known_hosts=lines[extra])
        made[name] = gate.complete(told, policy, program)
    return made


def _known_hosts(
    snapshots: Mapping[str, Snapshot],
    extra: tuple[str, ...],
    endpoints: Mapping[str, known_hosts.Endpoint],
    fetch: Callable[[str], str],
) -> tuple[str, ...]:
    lines = known_hosts.fleet_lines(snapshots, extra, endpoints)
    missing = known_hosts.unsent(snapshots, lines)
    blocks: dict[str, tuple[str, ...]] = {}
    for digest, node in missing.items():
        try:
            blocks[digest] = known_hosts.read_block(fetch(node), digest)
        except ValueError:
            continue
    return known_hosts.fleet_lines(snapshots, extra, endpoints, blocks) if blocks else lines

"""The nodes' policies, what follows for each from all nodes of the run together, and the judging.

A `Look` is what one node showed. The `FleetContext` stands beside the looks: what only all of them
together tell. Both make a node `Judged`, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pyinfra.api import Inventory
from pyinfra.api.connectors import get_all_connectors
from pyinfra.api.host import Host

from nodeready.audit import history
from nodeready.policy import Policy
from nodeready.policy.load import PolicyError, check_settings
from nodeready.subjects import snapshot
from nodeready.subjects.gate import files as gate
from nodeready.subjects.nics import facts as nics_probe
from nodeready.subjects.nics.facts import Nics
from nodeready.subjects.registry import check_ids
from nodeready.subjects.result import Result
from nodeready.subjects.snapshot import Snapshot, judge
from nodeready.subjects.ssh_client import known_hosts
from nodeready.transport.base import UNREACHED, Carrier, Request
from nodeready.transport.look import Look

#: Host data that is pyinfra's or an inventory's, and never a misspelt setting of ours.
_INVENTORY_KEYS = frozenset({"slots"})


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
    earlier: Mapping[str, history.Look] = field(default_factory=dict)
    moment: float = 0.0

    def completed(self, name: str, seen: Snapshot) -> Snapshot:
        """What a node showed, with what is known beside it."""
        nics = seen.subjects.get("nics")
        if self.addresses is not None and isinstance(nics, Nics):
            nics = nics_probe.with_peers(nics, self.addresses)
            seen = replace(seen, subjects={**seen.subjects, "nics": nics})
        return history.with_history(seen, self.earlier.get(name), self.moment)


@dataclass(frozen=True)
class Judged:
    """What one command knows about one node.

    results: of all checks, from the latest look
    error:   one line when the node could not be looked at, or not to the end; kind says whose
             fault it is
    seconds: wall time of the look, connection included
    """

    name: str
    policy: Policy
    snapshot: Snapshot | None = None
    results: tuple[Result, ...] = ()
    error: str = ""
    kind: str = ""
    seconds: float = 0.0

    @property
    def reached(self) -> bool:
        return self.snapshot is not None

    @property
    def unreachable(self) -> bool:
        """Whether it was not reached, or got lost on the way."""
        return self.kind in UNREACHED


def judged(looks: Iterable[Look], context: FleetContext) -> list[Judged]:
    """Every node with its results: the one place where a look is judged."""
    return [_judged(one, context) for one in looks]


def _judged(one: Look, context: FleetContext) -> Judged:
    want = context.policies[one.name]
    if one.snapshot is None:
        return Judged(one.name, want, error=one.error, kind=one.kind, seconds=one.seconds)
    seen = context.completed(one.name, one.snapshot)
    results = tuple(judge(seen, want))
    return Judged(one.name, want, seen, results, one.error, one.kind, one.seconds)


def completed(
    carrier: Carrier, wanted: Mapping[str, Policy], looks: Iterable[Look], inventory: Inventory
) -> FleetContext:
    """The policies, completed by what the looks at all nodes say together.

    carrier: of the same run: a block of known hosts that was too large for a look is fetched
    """
    snapshots = {one.name: one.snapshot for one in looks if one.snapshot is not None}

    def block(name: str) -> str:
        request = Request(name, known_hosts.READ_BLOCK, 30)
        return "".join(answer.stdout for _, answer in carrier.ask([request]))

    return FleetContext(expectations(wanted, snapshots, inventory, block))


def _foreign() -> frozenset[str]:
    keys = set(_INVENTORY_KEYS)
    for connector in get_all_connectors().values():
        keys.update(getattr(connector, "data_meta", {}) or {})
    return frozenset(keys)


def _origin(inventory: Inventory, group: str) -> str:
    """The files that set a group's data, or the group's name when pyinfra itself loaded them."""
    files = getattr(inventory, "group_files", {}).get(group, ())
    return ", ".join(str(path) for path in files) or f"group {group}"


def policies(inventory: Inventory, hosts: Iterable[Host]) -> dict[str, Policy]:
    """The policy of each of these hosts, by name, from group and host data as pyinfra merges them.

    Raises PolicyError with the problems of all origins, each with its file or host, before any
    node is touched.
    """
    foreign, ids = _foreign(), check_ids()
    problems: list[str] = []
    cache: dict[tuple[Any, ...], Policy] = {}

    def settings(data: Mapping[str, Any], where: str) -> dict[str, Any]:
        try:
            found = check_settings(data, where, foreign)
        except PolicyError as error:
            problems.extend(error.problems)
            return {}
        waived = snapshot.problems(Policy(waivers=found.get("waivers", ())), ids)
        problems.extend(f"{where}: {problem}" for problem in waived)
        return found

    everywhere = settings(inventory.get_data(), _origin(inventory, "all"))
    by_group = {
        group: settings(inventory.get_group_data(group), _origin(inventory, group))
        for group in inventory.groups.keys() | inventory.group_data.keys()
    }
    override = settings(inventory.get_override_data(), "command line")
    made: dict[str, Policy] = {}
    for host in hosts:
        own = settings(inventory.get_host_data(host.name), f"host {host.name}")
        key = (tuple(host.groups), tuple(sorted(own.items())))
        if key not in cache:
            merged = dict(everywhere)
            for group in host.groups:
                merged.update(by_group.get(group, {}))
            cache[key] = Policy(**{**merged, **own, **override})
        made[host.name] = cache[key]
    if problems:
        raise PolicyError(list(dict.fromkeys(problems)))
    return made


def expectations(
    wanted: Mapping[str, Policy],
    snapshots: Mapping[str, Snapshot],
    inventory: Inventory,
    fetch: Callable[[str], str],
) -> dict[str, Policy]:
    """The policies, completed by what all nodes of the run showed, every node's host keys, and by
    what this nodeready makes of them (gate.complete).

    fetch: runs known_hosts.READ_BLOCK on the node of that name and returns what it printed; only
           called for blocks that were too large to come along and differ from what is wanted
    """
    lines: dict[tuple[str, ...], tuple[str, ...]] = {}
    made: dict[str, Policy] = {}
    endpoints = {name: _endpoint(inventory, name) for name in snapshots}
    for name, policy in wanted.items():
        if policy.ssh_client_mode != "known_hosts":
            made[name] = gate.complete(policy, policy)
            continue
        extra = policy.ssh_known_hosts
        if extra not in lines:
            lines[extra] = _known_hosts(snapshots, extra, endpoints, fetch)
        told = replace(policy, ssh_known_hosts=lines[extra])
        made[name] = gate.complete(told, policy)
    return made


def _endpoint(inventory: Inventory, name: str) -> known_hosts.Endpoint:
    data = inventory.get_host(name).data
    return str(data.get("ssh_hostname") or ""), int(data.get("ssh_port") or 22)


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

"""Lemons: nodes and GPUs that fail far more often than their peers.

Few nodes cause most failures: three of 63 nodes caused more than half of all exclusions in one
fleet (arXiv 2605.09370), and removing some 1 % of the nodes of two others reduced the failures of
large jobs from 14 % to 4 % (arXiv 2410.21680, "lemon nodes"). Each failure of such a node looks
like any other; only its history shows it.

The rule: a unit (a node, or a GPU by its serial number) is a lemon if it had incidents on at least
MIN_DAYS days, and if the probability that a fleet of equal units has a unit with as many days is
less than FALSE_ALARM. The number of a unit's incident days is taken as Poisson distributed, with
the rate of its peers and the time that the unit was observed.

- A day counts once: a link that flaps ten times an hour is one incident, and the distribution
  requires independent ones.
- An incident of many nodes at once is the fleet's: a file server, a switch or a deploy.
- A found lemon is removed from the peers and the search is repeated, because several lemons raise
  the rate of the fleet and would hide each other.
- The number of parts that a node shows does not change its peers' rate: each node counts once, and
  one node without incidents does not count.
- Only an incident with a witness counts: root observed it on that node, or two users did
  independently. Root is the witness of failed checks and connections: this machine observed them.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Annotated, ClassVar, NamedTuple

from nodeready.core.exit_codes import exit_code
from nodeready.core.json_types import Count, Moment, Name, Names
from nodeready.core.severity import HARDWARE
from nodeready.core.text import counted, utc_moment
from nodeready.runs.memory.look import ERROR, GATE, RESULTS, Event, NodeLook, PartSpan
from nodeready.runs.memory.store import Memory
from nodeready.subjects.proof.facts import HISTORY
from nodeready.subjects.registry import SUBJECTS

DAY_S = 86400.0
#: Fewer incident days are bad luck in a fleet of any size: with two, every fourth unit of a fleet
#: with one incident per unit and window would be suspicious.
MIN_DAYS = 3
#: The probability that a fleet of equal units has a lemon: one false alarm in a hundred windows.
FALSE_ALARM = 0.01
_PCI_ADDRESS = re.compile(r"\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")
#: A check that fails anew on this part of the nodes, and on at least MIN_SHARED, in one look has a
#: cause that they share.
SHARED_PART, MIN_SHARED = 0.05, 3
#: The rule finds at most this part of the units, rounded up: what more do is how the fleet is.
MAX_PART = 0.2

# --- The witness of an event: root on the node, or its kernel; a user's log there, which counts
# beside those of other users; none, where no hardware is to blame, or it is not known which.

ROOT, USER, NOBODY = "root", "user", "nobody"

_SOFTWARE = (
    *("oom", "exception", "segfault", "storage", "timeout", "limit", "signal", "environment"),
    "unclear",
)
#: Kind of event -> its witness.
WITNESSES = {
    "smoke-suspect": ROOT,
    # Either of the two nodes may have made all of their tests fail.
    "smoke-pair": NOBODY,
    # A cause of `postmortem` that the node's kernel has logged as well.
    **dict.fromkeys(("confirmed-gpu", "confirmed-network"), ROOT),
    **dict.fromkeys(("postmortem-gpu", "postmortem-network"), USER),
    **dict.fromkeys((f"postmortem-{cause}" for cause in _SOFTWARE), NOBODY),
}


class SuspectUnit(NamedTuple):
    """A node, or a GPU in one node: a node may show the serial number of any GPU."""

    name: str  # of the node, or the serial number
    node: str


@dataclass(frozen=True)
class Lemon:
    """The incidents of a node or a GPU in the window."""

    unit: Name  # the name of the node, or the serial number of the GPU
    kind: Annotated[str, {"enum": ("node", "gpu")}]  # node or gpu
    node: str  # the node, or the node that the GPU is in; "": it is no longer there
    nodes: Names  # where the incidents were seen, in the order of time
    days: Count  # days with an incident
    # days with an incident that its peers have in the same time
    expected: Annotated[float, {"minimum": 0}]
    # the probability that a fleet of equal units has a unit with as many days
    chance: Annotated[float, {"minimum": 0, "maximum": 1}]
    is_lemon: bool  # whether the rule names it
    incidents: Annotated[tuple[Event, ...], {"minItems": 1}]  # the newest first

    def __str__(self) -> str:
        unit = f"GPU {self.unit}" if self.kind == "gpu" else self.unit
        expected = f"{self.expected:.1f}" if self.expected >= 0.05 else "below 0.1"
        return f"{unit}: {counted(self.days, 'day')} with incidents, {expected} expected"


@dataclass(frozen=True)
class Lemons:
    """The document of `nodeready lemons`."""

    SCHEMA: ClassVar = "lemons"

    since: Moment  # the window, UTC
    until: Moment  # likewise
    node_count: Count  # of the nodes and GPUs that were observed in it
    gpu_count: Count  # likewise
    # the nodes and GPUs with an incident that is not shared, lemons first
    units: tuple[Lemon, ...]
    shared: Count  # incidents that many nodes had at once; they count for no node

    @property
    def lemons(self) -> tuple[Lemon, ...]:
        return tuple(unit for unit in self.units if unit.is_lemon)


def find_lemons(memory: Memory, nodes: Collection[str], since_s: float, until_s: float) -> Lemons:
    """The lemons among these nodes and their GPUs in this time. Raises MemoryUnavailable."""
    checks = hardware_checks()
    parts: dict[SuspectUnit, list[PartSpan]] = defaultdict(list)
    gpus: dict[str, list[PartSpan]] = defaultdict(list)
    for part in reversed(memory.parts_of_kind("gpu")):
        if part.node in nodes:
            parts[SuspectUnit(part.serial, part.node)].append(part)
            gpus[part.node].append(part)
    events: dict[str, list[Event]] = defaultdict(list)
    for event in events_that_count(e for e in memory.events() if since_s <= e.time_s <= until_s):
        events[event.node].append(event)
    results = {f"{check.partition('.')[0]}{RESULTS}" for check in checks}
    incidents = [
        incident
        for name, life in memory.lives([ERROR, GATE, *results])
        if name in nodes
        for incident in node_incidents(life, gpus[name], events[name], checks)
        if since_s <= incident.time_s <= until_s
    ]
    unshared = own_incidents(incidents, len(nodes))
    by_gpu = _gpu_incidents(unshared, parts)

    def observed_s(first_s: float, last_s: float) -> float:
        return max(0.0, min(last_s, until_s) - max(first_s, since_s))

    gpu_s = {u: sum(observed_s(s.first_s, s.last_s) for s in parts[u]) for u in parts}
    spans = memory.spans()
    node_s = {SuspectUnit(n, n): observed_s(*span) for n, span in spans.items() if n in nodes}
    units = rank(by_gpu, gpu_s, "gpu", {unit for unit in parts if parts[unit][-1].is_there})
    # What a bad GPU did counts for the node that it was in, unless the GPU is the lemon.
    of_lemons = {incident for unit in units if unit.is_lemon for incident in unit.incidents}
    by_node: dict[SuspectUnit, list[Event]] = defaultdict(list)
    for incident in unshared:
        if incident not in of_lemons:
            by_node[SuspectUnit(incident.node, incident.node)].append(incident)
    units += rank(by_node, node_s, "node", node_s)
    return Lemons(
        utc_moment(since_s), utc_moment(until_s), len(node_s), len({unit.name for unit in parts}),
        tuple(sorted(units, key=lambda unit: (not unit.is_lemon, unit.chance))),
        len(incidents) - len(unshared),
    )  # fmt: skip


def _gpu_incidents(
    incidents: Iterable[Event], spans: dict[SuspectUnit, list[PartSpan]]
) -> dict[SuspectUnit, list[Event]]:
    """The incidents of each GPU in each node. A GPU's incidents in earlier nodes count for its new
    node once it fails there, too: until then, a single node reported the serial number. spans: of
    each GPU in each node, the oldest first; they move with the incidents
    """
    by_unit: dict[SuspectUnit, list[Event]] = defaultdict(list)
    for incident in incidents:
        if (unit := SuspectUnit(incident.serial, incident.node)) in spans:
            by_unit[unit].append(incident)
    places = {unit.name: unit for unit in by_unit if spans[unit][-1].is_there}
    for unit in [*by_unit]:
        place = places.get(unit.name)
        if place is not None and not spans[unit][-1].is_there:
            first_s = spans[place][-1].first_s
            by_unit[place] += [i for i in by_unit.pop(unit) if i.time_s < first_s]
            spans[place] = spans.pop(unit) + spans[place]
    return by_unit


def hardware_checks() -> frozenset[str]:
    """The ids of the checks that hardware can fail: an action on hardware repairs them."""
    checks = (check for subject in SUBJECTS.values() for check in subject.checks)
    # An earlier verdict is no evidence.
    checks = (check for check in checks if check.proof != HISTORY)
    return frozenset(c.id for c in checks if not {*HARDWARE}.isdisjoint(c.cost.actions))


def lemons_of_nodes(document: Lemons) -> dict[str, tuple[str, ...]]:
    """Node -> a line for itself and for each GPU in it that is a lemon."""
    lines: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for lemon in document.lemons:
        lines[lemon.node] += (str(lemon),)
    return dict(lines)


def lemons_code(document: Lemons) -> int:
    """The exit code of `nodeready lemons`: 3 if there is one, 2 if no node was observed."""
    return exit_code(usage=not document.node_count, check=bool(document.lemons))


def node_incidents(
    life: Iterable[NodeLook], parts: Iterable[PartSpan], events: Iterable[Event],
    checks: Collection[str],
) -> list[Event]:  # fmt: skip
    """The incidents of one node. A check that fails on begins no second incident, unless it names
    another GPU. life: the node at each look at which something changed, the oldest first. parts:
    the GPUs that were in the node. checks: the ids of those that hardware can fail
    """
    gpus: dict[str, list[PartSpan]] = defaultdict(list)
    for part in sorted(parts, key=lambda part: part.first_s):
        gpus[part.slot].append(part)
    active: set[tuple[str, str]] = set()
    incidents = []
    for look in life:
        failing: dict[tuple[str, str], str] = {}
        if look.unreachable:
            failing["unreachable", ""] = look.error
        for check in checks:
            result = look.results.get(check)
            if look.error or (result is not None and result.status == "unknown"):
                # Whether it still fails was not observed.
                failing.update({key: "" for key in active if key[0] == check})
            elif result is not None and result.status in ("fail", "warn"):
                serials = _serials(result.actual, gpus, look.time_s)
                failing.update({(check, serial): result.actual for serial in serials})
        new = ((key, text) for key, text in failing.items() if key not in active)
        incidents += [Event(look.time_s, look.node, *key[::-1], text) for key, text in new]
        active = {*failing}
    return [*incidents, *events]


def _serials(text: str, gpus: Mapping[str, Sequence[PartSpan]], time_s: float) -> set[str]:
    """The serials of the GPUs whose addresses are in the text; {""}: it names none of them.

    gpus: slot -> the GPUs that were in it, in the order of time
    """
    serials = set()
    for slot in {*_PCI_ADDRESS.findall(text)} & gpus.keys():
        index = bisect_right(gpus[slot], time_s, key=lambda gpu: gpu.first_s) - 1
        if index >= 0 and gpus[slot][index].was_there(time_s):
            serials.add(gpus[slot][index].serial)
    return serials or {""}


def events_that_count(events: Iterable[Event]) -> Iterator[Event]:
    """The events that have their witnesses. Of the users whose logs name the same node, the user
    with the most days is left out: so no incident counts on the word of a single user.
    """
    # (node, kind) -> user -> day -> an event of the day
    logs: dict[tuple[str, str], dict[str, dict[float, Event]]]
    logs = defaultdict(lambda: defaultdict(dict))
    for event in events:
        witness = WITNESSES.get(event.kind, NOBODY)
        if witness == ROOT:
            yield event
        elif witness == USER and event.user:
            logs[event.node, event.kind][event.user][event.time_s // DAY_S] = event
    for by_user in logs.values():
        loudest = max(by_user.values(), key=len)
        for days in by_user.values():
            if days is not loudest:
                yield from days.values()


def poisson_tail(mean: float, count: int) -> float:
    """The probability of at least ``count`` where ``mean`` are expected.

    >>> round(poisson_tail(1.0, 3), 4)
    0.0803
    """
    if count <= 0:
        return 1.0
    if mean <= 0:
        return 0.0
    # From the first term on, so that a small probability keeps its digits.
    term = math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
    total = 0.0
    while term > total * 1e-12:
        total += term
        count += 1
        term *= mean / count
    return min(1.0, total)


def own_incidents(incidents: Iterable[Event], nodes: int) -> list[Event]:
    """The incidents without those that many of ``nodes`` nodes had at the same time."""
    listed = list(incidents)
    nodes_of: dict[tuple[float, str], set[str]] = defaultdict(set)
    for incident in listed:
        nodes_of[incident.time_s, incident.kind].add(incident.node)
    shared = max(MIN_SHARED, SHARED_PART * nodes)
    return [i for i in listed if len(nodes_of[i.time_s, i.kind]) < shared]


def rank(
    incidents: Mapping[SuspectUnit, Sequence[Event]], observed_s: Mapping[SuspectUnit, float],
    kind: str, present: Collection[SuspectUnit],
) -> list[Lemon]:  # fmt: skip
    """The units with an incident, the most suspicious first. incidents: of units of this kind
    (node or gpu), without those of the fleet. observed_s: every unit of the fleet -> seconds of
    the window in which it was observed. present: the units that are there now
    """
    days = {unit: len({i.time_s // DAY_S for i in incidents[unit]}) for unit in incidents}
    # Each node counts once: its parts weigh together at most as much as those of the median node.
    counts = Counter(unit.node for unit in observed_s)
    median = median_low(counts.values()) if counts else 0
    weights = {unit: min(1.0, median / counts[unit.node]) for unit in observed_s}
    size = sum(weights.values())
    peers_days = sum(weights[unit] * days[unit] for unit in days)
    node_s: dict[str, float] = defaultdict(float)
    for unit, seconds in observed_s.items():
        node_s[unit.node] += weights[unit] * seconds
    # One node without incidents, which may lie, makes no lemon of another.
    silent_s = max(node_s.values()) if len(node_s) > 1 else 0.0
    peers_s = sum(node_s.values())
    removed, lemon_count = 0.0, 0
    rows: list[tuple[SuspectUnit, float, float]] = []
    ordered = sorted(days, key=lambda unit: (-days[unit] / max(DAY_S, observed_s[unit]), unit))
    for number, unit in enumerate(ordered, start=1):
        if may_be_lemon := removed < MAX_PART * size:
            removed += weights[unit]
            peers_days -= weights[unit] * days[unit]
            peers_s -= weights[unit] * observed_s[unit]
        # Half a day is added: peers without any incident prove no rate of zero.
        expected = (peers_days + 0.5) / max(DAY_S, peers_s - silent_s) * observed_s[unit]
        chance = min(1.0, size * poisson_tail(expected, days[unit]))
        if may_be_lemon and days[unit] >= MIN_DAYS and chance < FALSE_ALARM:
            # Those before it have a higher rate still, which hid them from each other.
            lemon_count = number
        rows.append((unit, expected, chance))
    lemons = []
    for index, (unit, expected, chance) in enumerate(rows):
        newest = tuple(sorted(incidents[unit], key=lambda incident: -incident.time_s))
        nodes = tuple(dict.fromkeys(incident.node for incident in reversed(newest)))
        figures = days[unit], expected, chance, index < lemon_count
        place = unit.node if unit in present else ""
        lemons.append(Lemon(unit.name, kind, place, nodes, *figures, newest))
    return sorted(lemons, key=lambda lemon: (not lemon.is_lemon, lemon.chance, lemon.unit))

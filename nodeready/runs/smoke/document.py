"""The document of `nodeready smoke`: GO or NO-GO, the suspects with their evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Annotated, ClassVar

from nodeready.core.json_types import Count, Moment, Name, Positive
from nodeready.core.outcome import Gap, NodeGap, NodeGaps, gaps_code
from nodeready.runs.smoke.knowledge import PAIR, SmokeSuspect
from nodeready.subjects.environment_rules import EnvironmentFinding

#: The statuses of a node, worst first; see `SmokeNode.status`.
NODE_STATUSES = ("suspect", "unreachable", "untested", "warned", "passed")
SUSPECT, UNREACHABLE, UNTESTED, WARNED, PASSED = NODE_STATUSES


@dataclass(frozen=True)
class SmokeNode:
    """One node."""

    JSON_KEYS: ClassVar = {"reason": "why"}

    name: str
    # suspect: a suspect names it; unreachable: it was not reached, or the connection was lost;
    # untested: no test could run there; warned: it passed, with ``warnings``
    status: Annotated[str, {"enum": NODE_STATUSES}]
    reason: str = ""  # why it was not tested, or what was lost; "": it was tested, or has a gap
    ranks: int = 0  # number of its ranks in each test
    gpus: tuple[int, ...] = ()  # indexes of the GPUs of its ranks
    engine: str = ""  # such as ``torch 2.13.0 over gloo``; "": none was found
    # values that got worse during the test (errors of a GPU, of a port), or are slow
    warnings: tuple[str, ...] = ()
    # maximum processes of a job: its GPUs, with those that took no part; 0: unknown
    slots: int = 0
    # that NCCL chose: ``IB``, ``Socket``, ``OFI`` or a plugin's; ``gloo``; "": unknown
    network: str = ""
    interface: str = ""  # of its sockets; "": unknown
    hcas: tuple[str, ...] = ()  # the RDMA ports that NCCL uses: ``mlx5_0:1/IB``
    gdr: bool | None = None  # GPUDirect RDMA is used; null: unknown
    gap: Gap | None = field(default=None, repr=False)

    @property
    def absence(self) -> str:
        """Why it was not reached or not tested; "": it was tested."""
        return self.gap.reason if self.gap else self.reason


@dataclass(frozen=True)
class LinkBandwidth:
    """The bandwidth of one class of links, in Gbit/s of bus bandwidth."""

    JSON_KEYS: ClassVar = {"slowest_nodes": "where"}

    name: str  # ``inside``: between the GPUs or ranks of a node; ``between``: between nodes
    tests: int
    median_gbps: float
    least_gbps: float  # the minimum of all tests that passed
    slowest_nodes: tuple[str, ...]  # of the test with the minimum
    floor_gbps: float = 0.0  # minimum of the policy; 0: it has none


@dataclass(frozen=True)
class SmokeReport:
    """The document of `nodeready smoke`. Texts are lines without control characters; bytes that
    are no UTF-8 are escapes: \\xNN.

    gaps:     the nodes that were not probed, or were lost
    """

    SCHEMA: ClassVar = "smoke"
    VERSION: ClassVar = 2
    JSON: ClassVar = (
        *("started", "finished", "verdict", "complete", "stopped", "engine", "proves", "control"),
        *("budget_s", "tests", "single_node_tests", "rounds", "go", "exclude"),
        *("suspects", "gaps", "nodes", "links", "environment", "summary"),
    )
    JSON_KEYS: ClassVar = {"single_node_tests": "alone"}

    started: Moment  # UTC
    finished: Moment  # UTC
    complete: bool  # False when it was interrupted
    # the program that ran the collectives, such as ``torch 2.13.0 over gloo``; "": none
    engine: str
    proves: str  # what a pass of this engine proves
    control: str  # the engine of the control tests; "": there were none
    budget_s: Positive  # maximum duration in seconds
    tests: Count  # number of collectives of several nodes
    single_node_tests: Count  # number of tests of one node
    rounds: Count  # number of rounds of simultaneous tests
    nodes: tuple[SmokeNode, ...]
    suspects: tuple[SmokeSuspect, ...]
    links: tuple[LinkBandwidth, ...]  # the bandwidth of each class of links
    stopped: str = ""  # why it ended early, such as the budget; "": it did not
    # what is wrong with the variables of the ranks
    environment: tuple[EnvironmentFinding, ...] = ()

    @property
    def gaps(self) -> NodeGaps:
        return tuple(NodeGap(node.name, *node.gap) for node in self.nodes if node.gap)

    @property
    def exclude(self) -> tuple[Name, ...]:
        """The fewest nodes that explain every failure, in the order of the inventory: suspects,
        nodes that were not reached or not tested, and of pairs the nodes of most pairs. A suspect
        of kind scale excludes no node.
        """
        excluded = {node.name for node in self.nodes if node.status in (UNREACHABLE, UNTESTED)}
        pairs: list[tuple[str, str]] = []
        for suspect in self.suspects:
            if suspect.kind == PAIR:
                pairs += combinations(suspect.nodes, 2)
            else:
                excluded |= {*suspect.blamed}
        names = [node.name for node in self.nodes]
        excluded |= _cover((pair for pair in pairs if not excluded & {*pair}), names)
        return tuple(name for name in names if name in excluded)

    @property
    def go(self) -> tuple[Name, ...]:
        """The nodes that are not excluded, in the order of the inventory."""
        excluded = {*self.exclude}
        return tuple(node.name for node in self.nodes if node.name not in excluded)

    @property
    def summary(self) -> Annotated[dict[str, Count], {"keys": NODE_STATUSES}]:
        """Nodes by status, with every status."""
        counts = Counter(node.status for node in self.nodes)
        return {status: counts[status] for status in NODE_STATUSES}

    @property
    def good(self) -> bool:
        """Whether the job may start on all nodes: every test was made, and all passed."""
        is_finished = self.complete and not self.stopped
        return is_finished and bool(self.nodes) and not self.suspects and not self.exclude

    @property
    def verdict(self) -> Annotated[str, {"enum": ("GO", "NO-GO")}]:
        """GO: every test was made, and all passed."""
        return "GO" if self.good else "NO-GO"


def _cover(pairs: Iterable[tuple[str, str]], names: list[str]) -> set[str]:
    """A small set of names with at least one name of each pair.

    It is the smallest set unless the pairs form a circle.

    names: in the inventory's order. Of two equal choices the later name is taken, because a job
           needs its first node for the rendezvous
    """
    remaining = {frozenset(pair) for pair in pairs}
    positions = {name: position for position, name in enumerate(names)}
    cover = set()
    while remaining:
        partners: dict[str, set[str]] = {}
        for first, second in map(tuple, remaining):
            partners.setdefault(first, set()).add(second)
            partners.setdefault(second, set()).add(first)
        # The partner of a node with one pair covers that pair, and perhaps more.
        better = {name for peers in partners.values() if len(peers) == 1 for name in peers}
        best = max(better or partners, key=lambda name: (len(partners[name]), positions[name]))
        cover.add(best)
        remaining = {pair for pair in remaining if best not in pair}
    return cover


def code(smoke: SmokeReport) -> int:
    """The exit code: 0 GO, 3 NO-GO; see `nodeready.core.exit_codes`."""
    return gaps_code(
        smoke.gaps,
        complete=smoke.complete,
        usage=not smoke.nodes,
        check=not smoke.good,
        failures=frozenset(),
    )

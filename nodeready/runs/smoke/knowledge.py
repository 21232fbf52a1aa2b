"""The results of a search so far: the tests, their outcomes, and the suspects. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from nodeready.agent.smoke.orders import RankNetwork
from nodeready.core.json_types import Count, Name

NODE, GPU, PAIR, SCALE = KINDS = ("node", "gpu", "pair", "scale")

#: The purposes of a test.
ALONE, GROUP, HALF, CONFIRM = "alone", "group", "half", "confirm"
MERGE, SWEEP, CONTROL = "merge", "sweep", "control"


@dataclass(frozen=True)
class Test:
    """One test. Tests of one round share no node. In a sweep a node may be in two tests of a
    round: once as the source and once as the target.
    """

    number: int  # unique in the run
    purpose: str  # one of ALONE … CONTROL
    nodes: tuple[str, ...]  # in the order of their ranks; of a sweep (source, target)
    # (node, numbers of its GPUs that take part); of other nodes, all GPUs of the run
    gpus: tuple[tuple[str, tuple[int, ...]], ...] = ()

    # Not a test of pytest's.
    __test__ = False


@dataclass(frozen=True)
class SmokeOutcome:
    """The outcome of a test."""

    ok: bool  # every rank ended with the right results
    cause: str = ""  # why the test failed, in words that two tests of the same fault share
    ms: float = 0.0  # the slowest rank's; 0: unknown
    gbps: float = 0.0  # likewise
    lost: tuple[str, ...] = ()  # nodes whose connection ended: they are not tested again
    # nodes that another user keeps from the test: not tested again, not suspected
    barred: tuple[str, ...] = ()
    # nodes that report an own fault (a rank that died at start, a wrong sum, a missing GPU): the
    # search begins with them, and tests each of them
    culprits: tuple[str, ...] = ()
    retransmits: int = 0  # TCP segments that the source of a sweep sent again; 0: none, or unknown
    # (node, the network that its ranks used), where it is known
    networks: tuple[tuple[str, RankNetwork], ...] = ()


@dataclass(frozen=True)
class SmokeSuspect:
    """A cause of failed tests."""

    # ``node``; ``gpu``: a GPU of a node; ``pair``: two nodes that pass with other nodes and fail
    # together; ``scale``: nodes that fail together, and no node is the cause
    kind: Annotated[str, {"enum": KINDS}]
    # in the inventory's order. Of kind scale: those of the smallest test that failed
    nodes: tuple[Name, ...]
    gpus: tuple[Count, ...]  # of kind gpu, the GPU's number on its node
    # a sentence for each piece, the strongest first, test numbers in brackets
    evidence: tuple[str, ...]

    @property
    def blamed(self) -> tuple[str, ...]:
        """Its nodes; of kind scale none: each of them passes among fewer."""
        return () if self.kind == SCALE else self.nodes

    def explains(self, test: Test) -> bool:
        """Whether this suspect is a reason for the failure of this test."""
        present = {*test.nodes}.intersection(self.nodes)
        if self.kind == PAIR:
            return len(present) == 2
        if self.kind == SCALE:
            return len(present) == len(test.nodes)
        return bool(present)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    suspects: tuple[SmokeSuspect, ...]  # in the order of the inventory
    # nodes that passed with other nodes (or alone, where there is one node)
    passed: tuple[str, ...]
    tests: int  # collective tests of several nodes
    rounds: int  # rounds of all kinds
    untested: tuple[str, ...] = ()  # nodes without a result


def join_names(nodes: Sequence[str], limit: int = 4) -> str:
    """Nodes in a sentence.

    >>> join_names(["a", "b", "c"])
    'a, b and c'
    >>> join_names(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    if len(nodes) > limit:
        return f"{', '.join(nodes[: limit - 1])} and {len(nodes) - limit + 1} more"
    return " and ".join(filter(None, (", ".join(nodes[:-1]), *nodes[-1:])))


def cite(tests: Iterable[Test]) -> str:
    """The numbers of tests in a sentence, such as ``[3, 5 and 8]``."""
    numbers = sorted({test.number for test in tests})
    return f"[{join_names([str(number) for number in numbers], 12)}]"


def with_cause(cause: str) -> str:
    """The end of a sentence that names the cause."""
    return f": {cause}" if cause else ""


class Knowledge:
    """The results of a search so far; consistent at any moment, so that the search can be stopped.

    positions:   node -> its position in the inventory
    finished:    the tests with their outcomes
    doubts:      node that is suspected and not confirmed yet -> the reason
    is_complete: the search has ended by itself
    """

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}
        self.finished: list[tuple[Test, SmokeOutcome]] = []
        self.rounds = 0
        self.suspects: list[SmokeSuspect] = []
        self.doubts: dict[str, str] = {}
        self.is_complete = False

    def sorted(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """These nodes in the inventory's order."""
        return tuple(sorted({*nodes}, key=self.positions.__getitem__))

    def collectives(self) -> list[tuple[Test, SmokeOutcome]]:
        """The finished tests of several nodes, without the sweep."""
        return [
            (test, outcome)
            for test, outcome in self.finished
            if len(test.nodes) > 1 and test.purpose != SWEEP
        ]

    def suspect(
        self, kind: str, nodes: Collection[str], *evidence: str, gpus: Sequence[int] = ()
    ) -> None:
        """Add a suspect, unless an earlier one explains it."""
        members = {*nodes}
        excluded = self.excluded()
        if kind != GPU and members <= excluded:
            return
        pairs = [suspect for suspect in self.suspects if suspect.kind == PAIR]
        is_known = any({*pair.nodes} == members for pair in pairs)
        if kind == PAIR and (is_known or members & excluded):
            return
        if kind == NODE:
            # A node that fails with all nodes explains its pairs.
            self.remove(pair for pair in pairs if members & {*pair.nodes})
        self.suspects.append(SmokeSuspect(kind, self.sorted(nodes), tuple(sorted(gpus)), evidence))
        for name in nodes:
            self.doubts.pop(name, None)

    def remove(self, suspects: Iterable[SmokeSuspect]) -> None:
        """Remove these suspects: the evidence has another cause."""
        removed = [*suspects]
        self.suspects = [suspect for suspect in self.suspects if suspect not in removed]

    def excluded(self) -> set[str]:
        """The nodes that are not tested again."""
        return {name for s in self.suspects if s.kind in (NODE, GPU) for name in s.nodes}

    def partners(self, name: str) -> set[str]:
        """The nodes that fail as a pair with this node."""
        pairs = (s.nodes for s in self.suspects if s.kind == PAIR and name in s.nodes)
        return {partner for pair in pairs for partner in pair if partner != name}

    def _unexplained(self) -> list[SmokeSuspect]:
        """A suspect of kind scale for the unexplained failures that share nodes: the smallest."""
        groups: list[tuple[set[str], list[Test], tuple[tuple[str, ...], str]]] = []
        failed = [
            (test, outcome.cause)
            for test, outcome in self.finished
            if not outcome.ok and not any(suspect.explains(test) for suspect in self.suspects)
        ]
        for test, cause in sorted(failed, key=lambda failure: len(failure[0].nodes)):
            nodes, tests, smallest = {*test.nodes}, [test], (test.nodes, cause)
            for group in [group for group in groups if group[0] & nodes][::-1]:
                groups.remove(group)
                nodes, tests, smallest = nodes | group[0], group[1] + tests, group[2]
            groups.append((nodes, tests, smallest))
        state = "could not be pinned down" if self.is_complete else "was not searched to the end"
        suspects = []
        for _, tests, (smallest_nodes, cause) in groups:
            names = self.sorted(smallest_nodes)
            failure = f"what failed {cite(tests)}{with_cause(cause)}, {state}"
            evidence = f"{failure}: among {join_names(names)}"
            suspects.append(SmokeSuspect(SCALE, names, (), (evidence,)))
        return suspects

    def result(self) -> SearchResult:
        """The result so far."""
        doubted = [
            SmokeSuspect(NODE, (name,), (), (f"not confirmed: {reason}",))
            for name, reason in self.doubts.items()
        ]
        excluded = self.excluded()
        is_single = len(self.positions) - len(excluded) == 1
        passed = {
            name
            for test, outcome in self.finished
            if outcome.ok and (len(test.nodes) > 1 or is_single)
            for name in test.nodes
        } - (excluded | self.doubts.keys())
        suspects = [*self.suspects, *doubted, *self._unexplained()]
        covered = passed.union(*(suspect.nodes for suspect in suspects))
        suspects.sort(
            key=lambda s: ([self.positions[n] for n in s.nodes[:1]], KINDS.index(s.kind))
        )
        return SearchResult(
            tuple(suspects),
            self.sorted(passed),
            sum(test.purpose not in (ALONE, SWEEP) for test, _ in self.finished),
            self.rounds,
            self.sorted(self.positions.keys() - covered),
        )

"""Which nodes are tested together, and who spoils it. Pure: a generator of rounds of tests.

Everything alone first; then groups of about √N, side by side; a group that fails is halved, each
half beside nodes that passed; a suspect is confirmed beside nodes that passed; then groups are put
together up to all nodes, for what only pairs or numbers show; then the pairs themselves.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

NODE, GPU, PAIR, SCALE = KINDS = ("node", "gpu", "pair", "scale")

#: What a test is for.
ALONE, GROUP, HALF, CONFIRM, MERGE, SWEEP, CONTROL = (
    "alone",
    "group",
    "half",
    "confirm",
    "merge",
    "sweep",
    "control",
)


@dataclass(frozen=True)
class Test:
    """One test. Tests of one round share no node, but for those of a sweep: there a node may be in
    two, once as the source and once as the target.

    number:  unique in the run
    purpose: one of ALONE … CONTROL
    nodes:   in the order of their ranks; of a sweep (source, target)
    gpus:    nodes with the GPUs that take part there, as positions in the node's own list of the
             run's GPUs; a node that is not here takes part with all
    """

    number: int
    purpose: str
    nodes: tuple[str, ...]
    gpus: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of a test.

    ok:       everybody came to the end with the right results
    cause:    why not, in words that two tests of the same fault share
    ms, gbps: of the test as a whole: the slowest rank's; 0: unknown
    lost:     nodes that are gone (their connection ended): they are tested no more, and blame none
    culprits: nodes that say themselves that it is they (a rank that died at start, a wrong sum of
              one's own, a GPU that is missing): the search begins with them; never believed
              without a test of its own
    """

    ok: bool
    cause: str = ""
    ms: float = 0.0
    gbps: float = 0.0
    lost: tuple[str, ...] = ()
    culprits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suspect:
    """Who spoils it.

    kind:  ``node``; ``gpu``: of one node, ``gpus`` says which; ``pair``: two nodes that pass with
           others and not with each other; ``scale``: nobody alone, only so many together
    nodes: sorted as the inventory has them; several of kind node: they pass among themselves, and
           with no other
    why:   one sentence for each piece of evidence, with the numbers of the tests in brackets
    """

    kind: str
    nodes: tuple[str, ...]
    gpus: tuple[int, ...]
    why: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """The end of a search.

    suspects: in the order of the inventory
    passed:   nodes that passed with others (or alone, where there is one node)
    tests:    collective tests that were made, those of one node alone not counted
    rounds:   rounds of all kinds
    untested: nodes of which nothing can be said
    """

    suspects: tuple[Suspect, ...]
    passed: tuple[str, ...]
    tests: int
    rounds: int
    untested: tuple[str, ...] = ()


#: Yields a round of tests, is sent their outcomes by number, returns what was found.
Search = Generator["list[Test]", "Mapping[int, Outcome]", Found]


def search(nodes: Sequence[str], gpus: Mapping[str, int], *, full: bool = False) -> Search:
    """Search among these nodes.

    nodes: in the inventory's order
    gpus:  how many GPUs each node's ranks have; 0: ranks without GPUs
    full:  all pairs in the sweep, not only ring and skips
    """
    raise NotImplementedError

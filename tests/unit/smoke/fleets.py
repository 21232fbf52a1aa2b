"""Simulated fleets: nodes with faults that answer the tests of a search, by the rules that the
driver keeps.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

from nodeready.runs.smoke.knowledge import SCALE, Knowledge, SearchResult, SmokeOutcome, Test
from nodeready.runs.smoke.search import search

GBPS, MS = 90.0, 2.0


def names(count: int) -> list[str]:
    return [f"n{number:04}" for number in range(count)]


@dataclass
class Fleet:
    nodes: list[str]
    bad: tuple[str, ...] = ()  # fail with whomever, and pass alone
    dead: tuple[str, ...] = ()  # fail alone as well
    gpus: int = 0  # of each node
    bad_gpus: tuple[tuple[str, int], ...] = ()  # (node, GPU)
    gpu_pairs: tuple[tuple[str, int, int], ...] = ()  # (node, GPU, GPU)
    rails: tuple[tuple[str, int], ...] = ()  # (node, GPU) that fail with other nodes only
    pairs: tuple[tuple[str, str], ...] = ()  # fail together wherever both are
    ring_pairs: tuple[tuple[str, str], ...] = ()  # only as neighbours among the ranks
    paths: tuple[tuple[str, str], ...] = ()  # fail in a sweep only, from the first to the second
    heads: tuple[str, ...] = ()  # fail where theirs is the first rank of several
    tails: tuple[str, ...] = ()  # where it is not
    sets: tuple[tuple[str, ...], ...] = ()  # pass among themselves, and with no other
    limit: int = 0  # more nodes than this fail together
    slow: dict[str, float] = field(default_factory=dict)  # node -> what is left of its bandwidth
    slow_pairs: dict[tuple[str, str], float] = field(default_factory=dict)
    late: dict[str, float] = field(default_factory=dict)  # node -> so many times slower in ms
    unreached: tuple[str, ...] = ()  # in a sweep nobody reaches them
    once: int = -1  # the number of a test that fails, and nothing is wrong
    noise: float = 0.0  # every figure is off by up to this part, any way
    flaky: dict[str, int] = field(default_factory=dict)  # node -> it fails every so manieth test
    lossy: tuple[str, ...] = ()  # nodes of which a third of the tests fail and the others are slow
    drops: dict[str, int] = field(default_factory=dict)  # packets are lost, 0: from it, 1: to it
    lost: dict[str, int] = field(default_factory=dict)  # node -> the test in which it is lost
    freezes: dict[str, int] = field(default_factory=dict)  # node -> tests before all fail
    says: dict[str, str] = field(default_factory=dict)  # node -> whom it blames; "" itself
    seed: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.count: Counter[str] = Counter()
        self.gone: set[str] = set()
        self.numbers: set[int] = set()
        self.knowledge = Knowledge()
        self.rounds: list[list[Test]] = []

    # --- What a test comes to.

    def cause(self, test: Test) -> str:
        """Why this test fails; "": it does not."""
        inside = {*test.nodes}
        if test.number == self.once:
            return "timed out"
        if test.purpose == "alone":
            return self.cause_alone(test)
        bad = inside.intersection(self.bad)
        if test.purpose != "sweep":
            chosen = dict(test.gpus)
            bad |= {n for n, gpu in self.rails if n in inside and gpu in chosen.get(n, (gpu,))}
        bad |= {n for n in inside & self.freezes.keys() if self.count[n] > self.freezes[n]}
        bad |= {n for n in inside & self.flaky.keys() if self.count[n] % self.flaky[n] == 0}
        bad |= {n for n in inside.intersection(self.lossy) if self.chance.random() < 1 / 3}
        if bad or test.nodes[0] in self.heads or {*test.nodes[1:]} & {*self.tails}:
            return "timed out"
        if any({*pair} <= inside for pair in self.pairs):
            return "timed out"
        ring = {
            frozenset(pair)
            for pair in zip(test.nodes, (*test.nodes[1:], test.nodes[0]), strict=True)
        }
        if any({*pair} in ring for pair in self.ring_pairs):
            return "timed out"
        if test.purpose == "sweep":
            gone = test.nodes[1] in self.unreached or test.nodes in self.paths
            return "refused" if gone else ""
        if any(0 < len(inside & {*one}) < len(inside) for one in self.sets):
            return "unreachable"
        if self.limit and len(inside) > self.limit:
            return "out of memory"
        return ""

    def cause_alone(self, test: Test) -> str:
        (node,) = test.nodes
        gpus = {*(test.gpus[0][1] if test.gpus else range(self.gpus))}
        if any(one == node and gpu in gpus for one, gpu in self.bad_gpus):
            return "wrong sum"
        if any(one == node and {*pair} <= gpus for one, *pair in self.gpu_pairs):
            return "timed out"
        return "rank died" if node in self.dead else ""

    def figures(self, test: Test) -> tuple[float, float]:
        """Milliseconds and Gbit/s of a test that passes."""
        inside = {*test.nodes}
        left = [self.slow[n] for n in inside & self.slow.keys()]
        left += [part for pair, part in self.slow_pairs.items() if {*pair} <= inside]
        left += [0.1 for _ in inside.intersection(self.lossy)]
        times = [self.late[n] for n in inside & self.late.keys()]
        ms = MS * max([1.0, *times]) * self.off()
        return ms, GBPS * min([1.0, *left]) * self.off()

    def off(self) -> float:
        return 1 + self.noise * (2 * self.chance.random() - 1)

    def outcome(self, test: Test) -> SmokeOutcome:
        self.count.update(test.nodes)
        lost = tuple(n for n in test.nodes if n in self.lost and self.count[n] >= self.lost[n])
        if lost:
            self.gone.update(lost)
            return SmokeOutcome(False, "lost", lost=lost)
        cause = self.cause(test)
        if cause:
            said = tuple(self.says[n] or n for n in test.nodes if n in self.says)
            return SmokeOutcome(False, cause, culprits=said)
        sweep = zip(test.nodes, (0, 1), strict=True) if test.purpose == "sweep" else ()
        lossy = any(self.drops.get(node) == place for node, place in sweep)
        again = self.chance.choice((2, 3, 4, 5) if lossy else (0, 0, 0, 1))
        return SmokeOutcome(True, "", *self.figures(test), retransmits=again)

    # --- A whole search.

    def check(self, tests: list[Test]) -> None:
        seats: set[object] = set()
        assert tests
        for test in tests:
            assert test.number not in self.numbers
            self.numbers.add(test.number)
            assert len({*test.nodes}) == len(test.nodes)
            assert not self.gone & {*test.nodes}
            assert (len(test.nodes) == 1) == (test.purpose == "alone")
            assert test.purpose != "sweep" or len(test.nodes) == 2
            mine = {*enumerate(test.nodes)} if test.purpose == "sweep" else {*test.nodes}
            assert not seats & mine
            seats |= mine

    def search(self, *, full: bool = False, rounds: int = -1, until: str = "") -> SearchResult:
        """What a search finds; when it is stopped after so many rounds, or before a round of tests
        for that purpose, what it knows then.
        """
        running = search(
            self.nodes, dict.fromkeys(self.nodes, range(self.gpus)), full=full,
            knowledge=self.knowledge,
        )  # fmt: skip
        tests = next(running)
        while True:
            if tests[0].purpose == until or len(self.rounds) == rounds:
                running.close()
                return self.knowledge.result()
            self.check(tests)
            self.rounds.append(tests)
            outcomes = {test.number: self.outcome(test) for test in tests}
            try:
                tests = running.send(outcomes)
            except StopIteration as end:
                found: SearchResult = end.value
                return found

    def made(self, *purposes: str) -> list[Test]:
        return [test for tests in self.rounds for test in tests if test.purpose in purposes]


def suspects_of(found: SearchResult) -> set[tuple[object, ...]]:
    """The suspects: kind, nodes, and GPUs where there are some; of kind scale the number of
    nodes.
    """
    return {
        (suspect.kind, len(suspect.nodes))
        if suspect.kind == SCALE
        else (suspect.kind, suspect.nodes, *([suspect.gpus] if suspect.gpus else []))
        for suspect in found.suspects
    }


#: Faults that fail the same each time.
STEADY = (
    "bad", "dead", "heads", "tails", "bad_gpus", "gpu_pairs", "rails", "pairs", "ring_pairs",
    "paths", "slow_pairs", "sets", "slow", "late", "lost", "unreached",
)  # fmt: skip
#: The faults of two nodes, of GPUs, and those with a figure: one of these.
_PAIRS = ("pairs", "ring_pairs", "paths", "slow_pairs")
_GPUS = {"bad_gpus": 1, "gpu_pairs": 2, "rails": 1}
_FIGURES = {
    "slow": (0.4, 0.3, 0.01), "slow_pairs": (0.2,), "late": (5, 50), "lost": (1, 2, 3, 4, 5),
    "flaky": (3,), "freezes": (3,), "drops": (0, 1),
}  # fmt: skip


def placed(seed: int, count: int, kinds: tuple[str, ...], most: int) -> tuple[Fleet, set[object]]:
    """A fleet with at most `most` faults at random places, and the suspects that it must have.

    More nodes are good than not, and no two faults share a node: else two faults can be one (pairs
    that share a node are that node where it has few others). A set is small, so that most of the
    groups are without it. A random node calls another one the culprit.
    """
    choose = random.Random(seed)
    nodes = names(count)
    free = choose.sample(nodes, count)
    lists: dict[str, tuple[object, ...]] = {}
    maps: dict[str, dict[object, float]] = {}
    expected: set[object] = set()
    for _ in range(choose.randint(0, most)):
        kind = choose.choice(kinds)
        size = choose.randint(2, 6) if kind == "sets" else 1 + (kind in _PAIRS)
        if len(free) - size < max(4, count - len(free) + size + 1):
            continue
        if kind == "sets" and 4 * size >= count:
            continue
        mine = tuple(sorted(free[:size]))
        if kind == "ring_pairs":
            neighbours = [pair for pair in itertools.pairwise(nodes) if {*pair} <= {*free}]
            if not neighbours:
                continue
            mine = choose.choice(neighbours)
        free = [name for name in free if name not in mine]
        gpus = tuple(sorted(choose.sample(range(8), _GPUS.get(kind, 0))))
        place = mine if size > 1 else mine[0]
        if kind in _FIGURES:
            maps.setdefault(kind, {})[place] = choose.choice(_FIGURES[kind])
        else:
            lists[kind] = (*lists.get(kind, ()), (*mine, *gpus) if gpus else place)
        if kind in _PAIRS:
            expected.add(("pair", mine))
        elif len(gpus) == 1:
            expected.add(("gpu", mine, gpus))
        else:
            expected |= {("node", (name,)) for name in mine}
    liar, scapegoat = choose.choice(nodes), choose.choice(nodes)
    fleet = Fleet(nodes, gpus=8, noise=choose.choice((0.0, 0.15)), seed=seed,
                  says={liar: scapegoat}, **lists, **maps)  # type: ignore[arg-type]  # fmt: skip
    return fleet, expected

"""Which nodes are tested together, and who spoils it. Pure: a generator of rounds of tests.

Everything alone first; then groups of about √N, side by side. The groups that passed are put
together: where they fail, it is two nodes, two sets of nodes, or the number. A group that failed
is halved, each half beside nodes that passed; a suspect is confirmed beside two of these, and they
without it. Then all that is left together, and the plain paths between them.

A node is accused when it fails beside nodes that pass without it; a pair, when each of the two
passes with those; what is slow, in turns with good nodes and nothing else running. What failed
and was none of these is told with the nodes that it was among.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from nodeready.ready import localize, mesh

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
    gpus:    nodes with the numbers of the GPUs that take part there; a node that is not here takes
             part with all that the run has there
    """

    number: int
    purpose: str
    nodes: tuple[str, ...]
    gpus: tuple[tuple[str, tuple[int, ...]], ...] = ()

    # It is none of pytest's.
    __test__ = False


@dataclass(frozen=True)
class Outcome:
    """What came of a test.

    ok:       everybody came to the end with the right results
    cause:    why not, in words that two tests of the same fault share
    ms, gbps: of the test as a whole: the slowest rank's; 0: unknown
    again:    TCP segments that the source of a sweep had to send again; 0 where nobody knows
    lost:     nodes that are gone (their connection ended): they are tested no more, and blame none
    barred:   nodes that another user keeps from it: they are tested no more, and not suspected
    culprits: nodes that say themselves that it is they (a rank that died at start, a wrong sum of
              one's own, a GPU that is missing): the search begins with them; never believed
              without a test of its own
    """

    ok: bool
    cause: str = ""
    ms: float = 0.0
    gbps: float = 0.0
    lost: tuple[str, ...] = ()
    barred: tuple[str, ...] = ()
    culprits: tuple[str, ...] = ()
    again: int = 0


@dataclass(frozen=True)
class Suspect:
    """Who spoils it.

    kind:  ``node``; ``gpu``: of one node, ``gpus`` says which; ``pair``: two nodes that pass with
           others and not with each other; ``scale``: nobody alone, only so many together
    nodes: sorted as the inventory has them; several of kind node: they pass among themselves, and
           with no other; of kind scale the fewest that failed, one more than pass, or all those
           among whom is what could not be pinned down
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


def _named(nodes: Sequence[str], most: int = 4) -> str:
    """Nodes in a sentence."""
    if len(nodes) > most:
        return f"{', '.join(nodes[: most - 1])} and {len(nodes) - most + 1} more"
    return " and ".join(filter(None, (", ".join(nodes[:-1]), *nodes[-1:])))


def _tests(tests: Iterable[Test]) -> str:
    """The numbers of tests in a sentence."""
    numbers = sorted({test.number for test in tests})
    return f"[{_named([str(number) for number in numbers], 12)}]"


def _because(cause: str) -> str:
    return f": {cause}" if cause else ""


def _explains(suspect: Suspect, test: Test) -> bool:
    """Whether this suspect lets a test fail, of any number of nodes."""
    here = {*test.nodes}.intersection(suspect.nodes)
    if suspect.kind == PAIR:
        return len(here) == 2
    if suspect.kind == SCALE:
        return len(here) == len(test.nodes)
    return bool(here) and (len(suspect.nodes) == 1 or len(here) < len(test.nodes))


class Known:
    """What a search knows so far, also when nobody goes on asking it.

    place:    of each node in the inventory
    most:     so many nodes pass together, one more does not, whoever they are; 0: no such number
    doubts:   nodes that may be to blame, with the reason: nobody has confirmed it yet
    finished: the search is through
    """

    def __init__(self) -> None:
        self.place: dict[str, int] = {}
        self.made: list[tuple[Test, Outcome]] = []
        self.rounds = 0
        self.most = 0
        self.suspects: list[Suspect] = []
        self.doubts: dict[str, str] = {}
        self.finished = False

    def sorted(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """These nodes as the inventory has them."""
        return tuple(sorted({*nodes}, key=self.place.__getitem__))

    def accuse(
        self, kind: str, nodes: Collection[str], *why: str, gpus: Sequence[int] = ()
    ) -> None:
        """Name these, where nobody named explains them."""
        whole = {*nodes}
        if (kind != GPU and whole <= self.out()) or (
            kind == PAIR and (whole & self.out() or self._paired(whole))
        ):
            return
        if kind == NODE:
            # What fails with somebody who fails with all is no pair.
            self.drop(one for one in self.suspects if one.kind == PAIR and whole & {*one.nodes})
        self.suspects.append(Suspect(kind, self.sorted(nodes), tuple(sorted(gpus)), why))
        for name in nodes:
            self.doubts.pop(name, None)

    def drop(self, suspects: Iterable[Suspect]) -> None:
        """Take back what others explain."""
        dropped = [*suspects]
        self.suspects = [one for one in self.suspects if one not in dropped]

    def _paired(self, nodes: set[str]) -> bool:
        return any(one.kind == PAIR and {*one.nodes} == nodes for one in self.suspects)

    def out(self) -> set[str]:
        """The nodes that take part no more."""
        return {n for one in self.suspects if one.kind in (NODE, GPU) for n in one.nodes}

    def partners(self, name: str) -> set[str]:
        """With whom this node does not pass."""
        pairs = (one.nodes for one in self.suspects if one.kind == PAIR and name in one.nodes)
        return {other for pair in pairs for other in pair if other != name}

    def _explained(self, test: Test) -> bool:
        """Whether a suspect is why this test failed."""
        if 0 < self.most < len(test.nodes):
            return True
        named = (one for one in self.suspects if one.kind != SCALE or not self.most)
        return any(_explains(one, test) for one in named)

    def _recount(self) -> None:
        """Take the number back, where others explain all that failed above it: they fail below it
        as well."""
        failed = [t for t, o in self.made if not o.ok and t.purpose not in (ALONE, SWEEP)]
        above = [test for test in failed if 0 < self.most < len(test.nodes)]
        below = [test for test in failed if len(test.nodes) <= self.most]
        named = [one for one in self.suspects if one.kind != SCALE]
        able = [one for one in named if any(_explains(one, test) for test in below)]
        if above and all(any(_explains(one, test) for one in able) for test in above):
            self.most = 0
            self.drop(one for one in self.suspects if one.kind == SCALE)

    def _left(self) -> list[Suspect]:
        """Those among whom is what was seen and nobody named so far explains."""
        found: list[tuple[set[str], list[Test], str]] = []
        failed = [pair for pair in self.made if not pair[1].ok and not self._explained(pair[0])]
        for test, outcome in sorted(failed, key=lambda pair: len(pair[0].nodes)):
            for nodes, tests, _ in found:
                if nodes & {*test.nodes}:
                    nodes &= {*test.nodes}
                    tests.append(test)
                    break
            else:
                found.append(({*test.nodes}, [test], outcome.cause))
        what = "could not be pinned down" if self.finished else "was not searched to the end"
        suspects = []
        for nodes, tests, cause in found:
            names = self.sorted(nodes)
            among = f"what failed {_tests(tests)}{_because(cause)}, {what}"
            suspects.append(Suspect(SCALE, names, (), (f"{among}: among {_named(names)}",)))
        return suspects

    def found(self) -> Found:
        """What is known now."""
        self._recount()
        doubted = [
            Suspect(NODE, (name,), (), (f"not confirmed: {why}",))
            for name, why in self.doubts.items()
        ]
        alone = len(self.place) - len(self.out()) == 1
        out = self.out() | self.doubts.keys()
        ok = (t.nodes for t, o in self.made if o.ok and (len(t.nodes) > 1 or alone))
        passed = {name for nodes in ok for name in nodes} - out
        suspects = [*self.suspects, *doubted, *self._left()]
        seen = passed.union(*(one.nodes for one in suspects))
        suspects.sort(
            key=lambda one: ([self.place[n] for n in one.nodes[:1]], KINDS.index(one.kind))
        )
        return Found(
            tuple(suspects),
            self.sorted(passed),
            sum(test.purpose not in (ALONE, SWEEP) for test, _ in self.made),
            self.rounds,
            self.sorted(self.place.keys() - seen),
        )


# --- How a search asks. All of it is written as steps, which yield what they ask for and are sent
# what came of it; many run side by side, and one place makes rounds of what they ask.

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Ask:
    """A test that is wanted.

    pads:  how many good nodes shall take part beside; never fewer than make a test of two
    avoid: who shall not be among them
    gpus:  of the one node, of a test of some of its GPUs
    """

    purpose: str
    nodes: tuple[str, ...]
    pads: int = 0
    avoid: frozenset[str] = frozenset()
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Made:
    """A test that was made."""

    test: Test
    outcome: Outcome

    def beside(self, node: str) -> str:
        """With whom, in words, with the number and the cause."""
        others = [name for name in self.test.nodes if name != node]
        return f"{_named(others)} {_tests([self.test])}{_because(self.outcome.cause)}"


#: None: nobody is left for the test.
_Answers = list["_Made | None"]
_Steps = Generator["list[_Ask]", _Answers, _T]
#: Returns those that go on from where it ends.
_Task = Generator["list[_Ask]", _Answers, "list[_Task]"]

#: What a hunt is after: a test that failed, one that was slow, one that failed and then passed.
_BROKEN, _SLOW, _FLAKY = "broken", "slow", "flaky"
#: A test is looked into below this part of what the fastest quarter has; a node is accused when
#: all its turns are at most that part of all others'.
#: The median of its turns has to be lower still: half of a rate, with some noise. Of 85 runs on 64
#: nodes that share one machine's memory, two that were well had at most 0.65 and 0.67.
_LOOK, _ACCUSE, _TYPICAL = 0.55, 0.7, 0.58
#: Below that part, which no noise makes of it, after fewer turns.
_AT_ONCE = 0.4
#: So many times the quickest quarter's time are looked into and accused, and milliseconds more.
_LOOK_TIMES, _ACCUSE_TIMES, _MORE_MS = 4.0, 3.0, 5.0
#: How often a test is repeated for what fails now and then; turns against such a node.
_REPEATS, _TURNS, _MOST_TURNS = 3, 3, 6
#: Packets are lost of a node whose sweeps send so many segments again on average, and so many
#: times as many as most nodes' do: of 5 in 100, a sweep loses about three. In turns with good
#: nodes it has to show in most turns, and in all together.
_AGAIN, _AGAIN_TIMES, _AGAIN_TURNS = 1.0, 5.0, 4
#: Of the faults between groups, and of slow pairs of a sweep, so many are looked into.
_MOST_FAULTS = 16
#: So many accused are tried with each other; of more, each with the next one, and where that shows
#: a set, so many pairs.
_FEW, _MOST_PAIRS = 4, 64
#: So many nodes' sweep is of all pairs.
_ALL_PAIRS = 64


_NO_THIRD = "there is no third node to tell which of them it is"


def _without(controls: Sequence[_Made]) -> list[str]:
    """What the good nodes do among themselves."""
    tests = _tests(m.test for m in controls)
    return [f"without it these pass together {tests}"] if controls else []


def _failed(made: _Made | None) -> bool:
    return made is not None and not made.outcome.ok


def _firm(made: Sequence[_Made]) -> bool:
    """Whether it failed again."""
    return sum(map(_failed, made)) > 1


def _neighbours(items: Sequence[_T], _: int) -> Iterable[tuple[_T, _T]]:
    return itertools.pairwise(items)


def _upper(values: Iterable[float]) -> float:
    """What the highest quarter reaches; 0: there are too few to tell."""
    known = sorted(value for value in values if value > 0)
    return known[math.ceil(0.75 * len(known)) - 1] if len(known) > 1 else 0.0


def _lower(values: Iterable[float]) -> float:
    known = sorted(value for value in values if value > 0)
    return known[math.floor(0.25 * len(known))] if len(known) > 1 else 0.0


def _looks_slow(outcome: Outcome, fast: float, quick: float) -> bool:
    """Whether this is worth a look, beside what good ones have."""
    late = quick > 0 and outcome.ms > max(_LOOK_TIMES * quick, quick + _MORE_MS)
    return outcome.ok and (late or 0 < outcome.gbps < _LOOK * fast)


def _parts(nodes: Sequence[str]) -> list[list[str]]:
    """Groups of about √N neighbours, none of one node."""
    count = max(1, min(len(nodes) // 2, round(math.sqrt(len(nodes)))))
    ends = [len(nodes) * number // count for number in range(count + 1)]
    return [list(nodes[begin:end]) for begin, end in itertools.pairwise(ends)]


def _halves(nodes: Sequence[str], culprits: Collection[str]) -> list[list[str]]:
    """Those that say themselves that it is they, and the others; else the two halves."""
    said = [name for name in nodes if name in culprits]
    if 0 < len(said) <= len(nodes) // 2:
        return [said, [name for name in nodes if name not in culprits]]
    middle = (len(nodes) + 1) // 2
    return [half for half in (list(nodes[:middle]), list(nodes[middle:])) if half]


def _circle(nodes: Sequence[str], most: int) -> Iterable[list[tuple[str, str]]]:
    """Rounds of pairs, in which everybody meets another one each time."""
    turning: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    for _ in range(min(len(turning) - 1, most)):
        half = len(turning) // 2
        pairs = zip(turning[:half], reversed(turning[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        turning = [turning[0], turning[-1], *turning[1:-1]]


def _offsets(count: int, full: bool) -> list[int]:
    """The sweep's: there, and back where not all pairs are among them."""
    if full or count <= _ALL_PAIRS:
        return [*mesh.full(count)]
    return [way for offset in mesh.ring_and_skips(count) for way in (offset, count - offset)]


class Plan(NamedTuple):
    """What a fleet takes when nothing is wrong with it.

    tests:  of several nodes together; those of one node alone and the sweep are not counted
    rounds: with those before them; sweeps: rounds of pairs after them
    """

    tests: int
    rounds: int
    sweeps: int


def plan(count: int, *, full: bool = False) -> Plan:
    """What a fleet of so many nodes takes at best."""
    if count < 2:
        return Plan(0, count, 0)
    groups = len(_parts([""] * count))
    merges = int(groups > 1)
    sweeps = len({offset % count for offset in _offsets(count, full)})
    return Plan(groups + merges, 2 + merges, sweeps)


class _Search:
    """One search.

    base:  nodes that passed together, beside which others are tested
    block: the group in which each of them passed
    size:  of a group
    fast, quick: bandwidth and time of a good group
    """

    def __init__(
        self, nodes: Sequence[str], gpus: Mapping[str, Sequence[int]], full: bool, known: Known
    ) -> None:
        self.nodes, self.gpus, self.full, self.known = list(nodes), gpus, full, known
        known.place = {name: place for place, name in enumerate(nodes)}
        self.gone: set[str] = set()
        self.base: list[str] = []
        self.block: dict[str, int] = {}
        self.size, self.fast, self.quick = 2, 0.0, 0.0
        self.leaves: list[tuple[str, _Made, str]] = []
        self.turns: list[tuple[str, _Made, str]] = []
        self.confirmed: dict[str, _Made] = {}
        self.aside: set[str] = set()

    # --- Rounds.

    def run(self) -> Search:
        """All of it."""
        steps = self._everything()
        made: _Answers | None = None
        while True:
            try:
                asks = next(steps) if made is None else steps.send(made)
            except StopIteration:
                self.known.finished = True
                return self.known.found()
            made = yield from self._rounds(asks)

    def _rounds(self, asks: list[_Ask]) -> Generator[list[Test], Mapping[int, Outcome], _Answers]:
        """Make these tests, in as few rounds as their nodes allow. One during which a node was
        lost is made once more without it."""
        made: _Answers = [None] * len(asks)
        waiting = list(enumerate(asks))
        while waiting:
            tests, waiting = self._round(waiting)
            if not tests:
                break
            self.known.rounds += 1
            outcomes = yield [test for _, _, test in tests]
            for index, ask, test in tests:
                outcome = outcomes[test.number]
                if not outcome.barred:
                    self.known.made.append((test, outcome))
                lost = self._lose(outcome.lost, test) | {*outcome.barred}
                self.gone |= lost
                if not lost & {*test.nodes}:
                    made[index] = _Made(test, outcome)
                elif test.purpose != SWEEP:
                    left = tuple(name for name in test.nodes if name not in lost)
                    waiting.append((index, replace(ask, nodes=left, pads=ask.pads and 1)))
        return made

    def _lose(self, names: Iterable[str], test: Test) -> set[str]:
        lost = {name for name in names if name in self.known.place}
        for name in lost - self.gone:
            self.known.accuse(NODE, [name], f"its connection ended in test {test.number}")
        self.gone |= lost
        return lost

    def _round(
        self, waiting: list[tuple[int, _Ask]]
    ) -> tuple[list[tuple[int, _Ask, Test]], list[tuple[int, _Ask]]]:
        """The tests of the next round, and what waits for a later one."""
        out = self.known.out()
        never = out | {name for _, ask in waiting for name in ask.nodes}
        # Others each time: no good node is beside everybody.
        turn = 7 * self.known.rounds % max(1, len(self.base))
        free = [name for name in self.base[turn:] + self.base[:turn] if name not in never]
        wanting = sum(ask.pads > 0 for _, ask in waiting)
        tests: list[tuple[int, _Ask, Test]] = []
        later: list[tuple[int, _Ask]] = []
        busy: set[object] = set()
        number = len(self.known.made)
        for index, ask in waiting:
            nodes = [name for name in ask.nodes if name not in self.gone]
            seats: set[object] = {*nodes}
            if ask.purpose == SWEEP:
                seats = {*enumerate(nodes)}
            least = 0 if ask.purpose == ALONE else max(0, 2 - len(nodes))
            if not nodes or (least and not ask.pads):
                continue
            if busy & seats:
                later.append((index, ask))
                continue
            pads: list[str] = []
            if ask.pads:
                most = self.known.most - len(nodes) if self.known.most else ask.pads
                wanted = max(least, min(ask.pads, most, len(free) // wanting))
                wanting -= 1
                shun = ask.avoid.union(*(self.known.partners(name) for name in nodes))
                pads = [name for name in free if name not in shun][:wanted]
                if len(pads) < least:
                    later.append((index, ask))
                    continue
                free = [name for name in free if name not in pads]
            busy |= seats | {*pads}
            number += 1
            gpus = ((nodes[0], ask.gpus),) if ask.gpus else ()
            tests.append((index, ask, Test(number, ask.purpose, (*nodes, *pads), gpus)))
        return tests, later

    def _together(self, tasks: Iterable[_Task]) -> _Steps[None]:
        """Run tasks side by side, and those that go on from them."""
        live: list[tuple[_Task, list[_Ask]]] = []
        for task in tasks:
            self._advance(task, None, live)
        while live:
            made = yield [ask for _, asks in live for ask in asks]
            before, live = live, []
            for task, asks in before:
                mine, made = made[: len(asks)], made[len(asks) :]
                self._advance(task, mine, live)

    def _advance(
        self, task: _Task, made: _Answers | None, live: list[tuple[_Task, list[_Ask]]]
    ) -> None:
        try:
            live.append((task, next(task) if made is None else task.send(made)))
        except StopIteration as end:
            for other in end.value:
                self._advance(other, None, live)

    def _everything(self) -> _Steps[None]:
        yield from self._alone()
        live = self._live()
        if len(live) < 2:
            return
        yield from self._groups(live)
        yield from self._join()
        yield from self._in_turns()
        yield from self._gpus_beside()
        if self.base:
            yield from self._sweep()

    def _live(self) -> list[str]:
        out = self.known.out()
        return [name for name in self.nodes if name not in out]

    # --- Every node alone.

    def _alone(self) -> _Steps[None]:
        made = yield [_Ask(ALONE, (name,)) for name in self.nodes]
        yield from self._together(
            self._one(one.test.nodes[0], one) for one in made if one and not one.outcome.ok
        )

    def _one(self, node: str, first: _Made) -> _Task:
        """Which of a node's GPUs it is, or the node."""
        numbers = self.gpus.get(node, ())
        count = len(numbers)

        def some(gpus: Sequence[int]) -> _Ask:
            return _Ask(ALONE, (node,), gpus=tuple(gpus))

        if count > 1:
            each = yield [some([gpu]) for gpu in numbers]
        else:
            each = yield [some([])]
        bad = [one for one in each if one and not one.outcome.ok]
        if node in self.gone or (count < 2 and not bad):
            return []
        if len(bad) == len(each):
            every = (
                f"each of its {count} GPUs alone does as well" if count > 1 else "so it does again"
            )
            why = f"alone it fails {_tests([first.test])}{_because(first.outcome.cause)}; {every}"
            self.known.accuse(NODE, [node], f"{why} {_tests(one.test for one in bad)}")
            return []
        for one in bad:
            (gpu,) = one.test.gpus[0][1]
            why = f"GPU {gpu} of {node} fails alone {_tests([one.test])}"
            self.known.accuse(GPU, [node], why + _because(one.outcome.cause), gpus=[gpu])
        good = [one.test.gpus[0][1][0] for one in each if one and one.outcome.ok]
        while len(good) > 1:
            (again,) = yield [some(good)]
            if again is None or again.outcome.ok:
                break
            gpu, other, size = yield from self._smallest(some, good, 1)
            (both,) = yield [some([gpu, other])]
            why = f"{_tests([again.test])}{_because(again.outcome.cause)}"
            if not _failed(both) or both is None:
                why = f"its GPUs pass alone, and {size} of them together fail {why}"
                self.known.accuse(NODE, [node], why)
                break
            why = f"its GPUs {gpu} and {other} pass alone and fail together {_tests([both.test])}"
            why += _because(both.outcome.cause)
            self.known.accuse(GPU, [node], why, gpus=[gpu, other])
            good.remove(other)
        return []

    def _smallest(
        self, ask: Callable[[Sequence[_T]], _Ask], order: Sequence[_T], low: int
    ) -> _Steps[tuple[_T, _T, int]]:
        """Two of the fewest that fail together, and how many these are: all of this order fail,
        the first ``low`` do not."""
        last = yield from self._shortest(ask, order, low)
        one = order[last - 1]
        before = order[: last - 1]
        first = yield from self._shortest(lambda some: ask([*some, one]), before, 0)
        return before[first - 1], one, first + 1

    def _shortest(
        self, ask: Callable[[Sequence[_T]], _Ask], order: Sequence[_T], low: int
    ) -> _Steps[int]:
        """How long the shortest beginning is that fails."""
        high = len(order)
        while high - low > 1:
            middle = (low + high) // 2
            (made,) = yield [ask(order[:middle])]
            low, high = (low, middle) if _failed(made) else (middle, high)
        return high

    # --- Groups, and their halves.

    def _groups(self, live: list[str]) -> _Steps[None]:
        parts = _parts(live)
        self.size = max(map(len, parts))
        made = yield [_Ask(GROUP, tuple(part)) for part in parts]
        passed = [one for one in made if one and one.outcome.ok]
        if len(passed) > 1:
            self.fast = _upper(one.outcome.gbps for one in passed)
            self.quick = _lower(one.outcome.ms for one in passed)
        slow = [one for one in passed if self._slow(one)]
        again = yield [_Ask(GROUP, one.test.nodes) for one in slow]
        slow = [one for one in again if one and self._bad(one)]
        taken = {name for one in slow for name in one.test.nodes}
        good = [[*one.test.nodes] for one in passed if not taken & {*one.test.nodes}]
        bad = [one for one in made if one and not one.outcome.ok]
        hunts = [self._hunt([*m.test.nodes], m.test, _BROKEN, m.outcome.culprits) for m in bad]
        hunts += [self._hunt([*m.test.nodes], m.test, _SLOW, m.outcome.culprits) for m in slow]
        if not good:
            good, alone = yield from self._any_pair(live)
            if not good:
                return
            hunts = [self._hunt([name], None, _BROKEN) for name in alone]
        yield from self._merge(good)
        yield from self._together(hunts)
        yield from self._confirm()
        rest = {*self._live()} - self.block.keys() - self.known.doubts.keys()
        if rest - self.aside:
            base = [name for name in self.base if name in self.block]
            yield from self._merge([base, *([name] for name in self.known.sorted(rest))])

    def _slow(self, made: _Made | None) -> bool:
        """Whether a test is so slow that it is worth a look. Larger tests take longer anyway."""
        if made is None or len(made.test.nodes) > 1.5 * self.size:
            return False
        return _looks_slow(made.outcome, self.fast, self.quick)

    def _bad(self, made: _Made | None) -> bool:
        return _failed(made) or self._slow(made)

    def _any_pair(self, live: list[str]) -> _Steps[tuple[list[list[str]], list[str]]]:
        """No group passed: the pairs that do, and who is in none."""
        tried: list[_Made] = []
        good: list[list[str]] = []
        alone = live
        # Of a few nodes all pairs, if need be, until most have met one with whom they pass.
        for pairs in _circle(live, len(live) if len(live) <= 16 else 4):
            if 2 * len(alone) <= len(live):
                break
            made = yield [_Ask(HALF, pair) for pair in pairs if {*pair} <= {*alone}]
            tried += [one for one in made if one]
            good += [[*one.test.nodes] for one in made if one and one.outcome.ok]
            found = {name for pair in good for name in pair}
            alone = [name for name in self._live() if name not in found]
        if good:
            return good, alone
        live = self._live()
        if tried and len(live) > 1:
            causes = _because(tried[0].outcome.cause)
            if len(live) == 2:
                why = f"each passes alone, together they fail {_tests(one.test for one in tried)}"
                self.known.accuse(PAIR, live, why + causes, _NO_THIRD)
            else:
                tests = _tests(one.test for one in tried)
                why = f"each passes alone, and no two of them together {tests}"
                self.known.accuse(SCALE, live, why + causes)
        return [], []

    def _hunt(
        self,
        nodes: list[str],
        failed: Test | None,
        mode: str,
        culprits: Collection[str] = (),
    ) -> _Task:
        """Halve nodes that fail together, each half beside good nodes."""
        halves = _halves(nodes, culprits)
        made: _Answers = []
        for _ in range(_REPEATS if mode == _FLAKY else 1):
            made = yield [self._half(half, mode) for half in halves]
            if any(map(self._bad, made)):
                break
        slow = [m.test.nodes for m in made if m and self._slow(m)]
        again = yield [_Ask(HALF, both) for both in slow]
        noise = {m.test.nodes for m in again if m and not self._bad(m)}
        tasks: list[_Task] = []
        found = False
        for half, one in zip(halves, made, strict=True):
            if one is None:
                continue
            if self._bad(one) and one.test.nodes not in noise:
                found = True
                state = _FLAKY if mode == _FLAKY else _SLOW if one.outcome.ok else _BROKEN
                if len(half) == 1:
                    (self.leaves if state == _BROKEN else self.turns).append((half[0], one, state))
                    self.known.doubts[half[0]] = f"fails with {one.beside(half[0])}"
                else:
                    tasks.append(self._hunt(half, one.test, state))
            elif len(half) < len(one.test.nodes) and len(self.base) < 2 * self.size:
                # It passed beside good nodes: where these are few, more can be tested at a time.
                self.base += [name for name in half if name not in self.base]
        if found or mode != _BROKEN or failed is None or 0 < self.known.most < len(failed.nodes):
            return tasks
        once_more = yield [_Ask(HALF, failed.nodes)]
        if any(map(_failed, once_more)):
            # In the same order: who begins may matter.
            low = len(halves[0]) if [*failed.nodes[: len(halves[0])]] == halves[0] else 1
            if (yield from self._pin(failed.nodes, low)):
                return []
        return [self._hunt(nodes, failed, _FLAKY)]

    def _half(self, half: list[str], mode: str) -> _Ask:
        # One node beside it is the first half of the proof; what is slow is compared with groups.
        if len(half) == 1 and mode != _SLOW:
            return _Ask(HALF, tuple(half), 1)
        return _Ask(HALF, tuple(half), max(0, self.size - len(half)))

    def _confirm(self) -> _Steps[None]:
        """Each suspect beside a second good node, and these good nodes without it."""
        firsts = {node: first for node, first, _ in self.leaves}
        for _ in range(_REPEATS):
            out = self.known.out()
            firsts = {node: first for node, first in firsts.items() if node not in out}
            asks = [
                _Ask(CONFIRM, (node,), 1, frozenset(first.test.nodes))
                for node, first in firsts.items()
            ]
            seconds = dict(zip(firsts, (yield asks), strict=True))
            beside = [
                {name for made in (first, seconds[node]) if made for name in made.test.nodes}
                - {node}
                for node, first in firsts.items()
            ]
            everybody = set[str]().union(*beside)
            most = self.known.most or len(everybody)
            groups = [everybody] if len(everybody) <= most else beside
            controls = yield [_Ask(CONTROL, self.known.sorted(group)) for group in groups]
            if not any(map(_failed, controls)):
                break
            # A good node is none any more: who it is, and once more without it.
            yield from self._merge([[name] for name in self.base])
            again = yield [_Ask(CONFIRM, (node,), 1) for node in firsts]
            firsts = {m.test.nodes[0]: m for m in again if m and _failed(m)}
        else:
            seconds = {}
        without = _without([m for m in controls if m])
        odd: list[_Task] = []
        for node, first in firsts.items():
            second = seconds.get(node)
            if second and _failed(second):
                why = f"fails with {first.beside(node)}, and with {second.beside(node)}"
                self.known.accuse(NODE, [node], why, *without)
                self.confirmed[node] = second
            else:
                odd.append(self._odd(node, first))
        yield from self._together(odd)
        self.leaves = []
        waiting = {node for node, _, _ in self.turns}
        self.known.doubts = {n: why for n, why in self.known.doubts.items() if n in waiting}

    def _odd(self, node: str, first: _Made) -> _Task:
        """A suspect that fails with one node and passes with another."""
        other = next((name for name in first.test.nodes if name != node), "")
        if not other or not (yield from self._blame(node, other)):
            self.turns.append((node, first, _FLAKY))
        return []

    # --- Two nodes, two sides, or a number.

    def _pin(self, order: Sequence[str], low: int) -> _Steps[bool]:
        """Search what makes these fail together: True: it is found and told."""

        def ask(some: Sequence[str]) -> _Ask:
            return _Ask(CONFIRM, tuple(some))

        before = len(self.gone)
        low -= len(self.gone.intersection(order[:low]))
        order = [name for name in order if name not in self.gone]
        if len(order) < 2:
            return True
        one, other, size = yield from self._smallest(ask, order, low)
        (both,) = yield [ask([one, other])]
        if _failed(both):
            return (yield from self._blame(one, other))
        # A node that was lost meanwhile may have been all of it.
        return len(self.gone) > before or (yield from self._number(order, size))

    def _number(self, order: Sequence[str], size: int) -> _Steps[bool]:
        """Whether it is the number: others, as many, fail as well, and one less passes."""
        if 0 < self.known.most < size:
            return True
        pool = self.known.sorted({*order, *self.base} & {*self._live()})
        many: list[_Made] = []
        fewer: list[_Made] = []
        for quarter in (4, 2, 3, 1):
            # The first time from the end; two choices of nodes have to say the same.
            first = len(pool) * quarter // 4
            turned = pool[::-1] if quarter == 4 else (*pool[first:], *pool[:first])
            asks = [_Ask(CONFIRM, turned[:size]), _Ask(CONFIRM, turned[len(pool) - size + 1 :])]
            more, less = yield asks
            if self.gone.intersection(pool):
                # A test was made without one that was lost meanwhile: not of so many nodes.
                return True
            if more is None or less is None or more.outcome.ok:
                return False
            # Fewer that fail may have another fault among them: no proof, and none against it.
            if less.outcome.ok:
                many.append(more)
                fewer.append(less)
            if len(fewer) == 2:
                break
        else:
            return False
        self.known.most = size - 1
        why = f"any {size} nodes fail together, as these {_tests(m.test for m in many)}"
        below = f"any {size - 1} pass {_tests(m.test for m in fewer)}"
        self.known.accuse(SCALE, many[0].test.nodes, why + _because(many[0].outcome.cause), below)
        return True

    def _witnesses(self, one: str, other: str) -> list[str]:
        """Two good nodes, of other groups than these where there are some."""
        never = self.known.out() | {one, other}
        never |= self.known.partners(one) | self.known.partners(other)
        able = [name for name in self.base if name not in never]
        own = {self.block.get(one, -1), self.block.get(other, -1)}
        found: list[str] = []
        while able and len(found) < 2:
            best = min(able, key=lambda name: self.block.get(name, -2) in own)
            found.append(best)
            own.add(self.block.get(best, -2))
            able.remove(best)
        return found

    def _blame(self, one: str, other: str) -> _Steps[bool]:
        """Two nodes fail together: the pair, where each passes with others; else who does not."""
        witnesses = self._witnesses(one, other)
        # Each keeps its place: it may fail only as the first, or only after another. Those that
        # share no node go into one round.
        ours, theirs = [(one, w) for w in witnesses], [(w, other) for w in witnesses[::-1]]
        edges = [edge for both in zip(ours, theirs, strict=True) for edge in both]
        first, control, *made = yield [
            _Ask(CONFIRM, (one, other)),
            _Ask(CONTROL, tuple(witnesses)),
            *(_Ask(CONFIRM, edge) for edge in edges),
        ]
        if {one, other} & self.gone:
            return True
        if first is None or first.outcome.ok:
            return False
        bad = {
            end: [m for m in made if m and _failed(m) and end in m.test.nodes]
            for end in (one, other)
        }
        grouped = {one, other} <= self.block.keys()
        odd = any(bad.values()) or _failed(control)
        if odd and grouped and (yield from self._sides(one, other)):
            return True
        if _failed(control):
            return False
        for end, failed in bad.items():
            if failed and len(failed) == len(witnesses):
                beside = " and ".join(m.beside(end) for m in [first, *failed])
                self.known.accuse(
                    NODE, [end], f"fails with {beside}", *_without([control] if control else [])
                )
                self.confirmed[end] = failed[0]
        out = self.known.out()
        again = [m.test.nodes for m in [*bad[one], *bad[other]] if not {*m.test.nodes} & out]
        doubtful = yield [_Ask(CONFIRM, pair) for pair in again]
        for m in [first, *doubtful]:
            if m and _failed(m):
                self._pair(m, [m for m in made if m and m.outcome.ok])
        return True

    def _pair(self, failed: _Made, passed: Sequence[_Made]) -> None:
        one, other = failed.test.nodes
        why = f"fail together {_tests([failed.test])}{_because(failed.outcome.cause)}"
        good = [m.test for m in passed if {one, other} & {*m.test.nodes}]
        more = f"each passes with others {_tests(good)}" if good else _NO_THIRD
        self.known.accuse(PAIR, (one, other), why, more)

    def _sides(self, one: str, other: str) -> _Steps[bool]:
        """Whether these two are of two sets that pass among themselves, and not together; the
        smaller set is named."""
        blocks: dict[int, list[str]] = defaultdict(list)
        for name in self.base:
            blocks[self.block[name]].append(name)
        here, there = self.block[one], self.block[other]
        if here == there:
            return False
        ours = [name for name in blocks[here] if name != one] or [one]
        theirs = [name for name in blocks[there] if name != other] or [other]
        made = yield [
            *(_Ask(CONFIRM, tuple(blocks[b])) for b in (here, there) if len(blocks[b]) > 1),
            _Ask(CONFIRM, (ours[-1], theirs[-1])),
        ]
        if any(map(_failed, made[:-1])) or not _failed(made[-1]):
            return False
        others = [block for block in blocks if block not in (here, there)]
        sides: dict[int, list[int]] = {here: [here], there: [there]}
        for side in (here, there):
            asks = [
                _Ask(CONFIRM, (blocks[side][n % len(blocks[side])], *blocks[block]))
                for n, block in enumerate(others)
            ]
            made = yield asks
            sides[side] += [b for b, m in zip(others, made, strict=True) if m and m.outcome.ok]
            others = [b for b in others if b not in sides[side]]
        nodes = {side: [n for b in of for n in blocks[b]] for side, of in sides.items()}
        small = min((there, here), key=lambda side: len(nodes[side]))
        main = nodes[here if small == there else there]
        asks = [
            _Ask(CONFIRM, (blocks[block][n % len(blocks[block])], main[-1 - n % len(main)]))
            for block in sides[small]
            for n in range(2)
        ]
        crossing = yield asks
        cut: list[str] = []
        for number, block in enumerate(sides[small]):
            if all(map(_failed, crossing[2 * number : 2 * number + 2])):
                cut += blocks[block]
        if not cut:
            return False
        among = yield [_Ask(CONFIRM, self.known.sorted(cut))] if len(cut) > 1 else []
        if any(map(_failed, among)):
            return False
        self.confirmed |= {m.test.nodes[0]: m for m in crossing if m and m.test.nodes[0] in cut}
        self._set(cut, [m for m in among if m], main)
        return True

    def _set(self, nodes: Collection[str], among: Sequence[_Made], others: Sequence[str]) -> None:
        """Accuse these, who pass among themselves and not with the others; where the others are
        fewer, them."""
        crossing = [self.confirmed[n] for n in self.known.sorted(nodes) if n in self.confirmed]
        cause = _because(crossing[0].outcome.cause) if crossing else ""
        why = [f"pass among themselves {_tests(m.test for m in among)}"] if among else []
        if crossing:
            fail = "fails" if len(nodes) == 1 else "fail"
            why.append(f"{fail} with the others {_tests(m.test for m in crossing)}{cause}")
        if len(others) == len(nodes):
            why.append("the others are as many: it may be they")
        if 0 < len(others) < len(nodes):
            # The base was the few: nobody knew so when the first pairs passed.
            why = [f"{len(nodes)} others {text}" for text in why]
            self.base, nodes = [*self.known.sorted(nodes)], others
            self.block = dict.fromkeys(self.base, 0)
        self.known.accuse(NODE, nodes, *why)

    def _merge(self, blocks: list[list[str]]) -> _Steps[None]:
        """Put groups together, each of which passed, up to all; those that then pass together are
        the base. What fails between them is searched and told, one after the other."""
        aside: set[str] = set()
        for _ in range(_MOST_FAULTS):
            nodes = {name for block in blocks for name in block} - self.known.out()
            for one in self.known.suspects:
                if one.kind == PAIR and {*one.nodes} <= nodes - aside:
                    aside.add(one.nodes[1])
            nodes -= aside
            blocks = [left for block in blocks if (left := [n for n in block if n in nodes])]
            self.block = {name: number for number, block in enumerate(blocks) for name in block}
            self.base = [*self.known.sorted(self.block)]
            if len(blocks) < 2 or 0 < self.known.most < len(self.base):
                break
            (made,) = yield [_Ask(MERGE, tuple(self.base))]
            if made is None or made.outcome.ok:
                break
            (again,) = yield [_Ask(MERGE, made.test.nodes)]
            order = made.test.nodes
            low = next(
                (n for n, name in enumerate(order) if self.block[name] != self.block[order[0]]), 1
            )
            if not _failed(again) or not (yield from self._pin(order, low)):
                yield from self._together([self._hunt([*order], made.test, _FLAKY)])
                break
        self.aside |= aside
        for name in self.known.sorted(aside):
            yield from self._rest(name)

    def _rest(self, name: str) -> _Steps[None]:
        """With whom else a node of a pair does not pass."""
        for _ in range(_MOST_FAULTS):
            never = self.known.partners(name) | self.known.out()
            order = [*(other for other in self.base if other not in never), name]
            if name in never or 0 < self.known.most < len(order):
                return
            (made,) = yield [_Ask(MERGE, tuple(order))]
            if not _failed(made) or not (yield from self._pin(order, len(order) - 1)):
                return

    def _join(self) -> _Steps[None]:
        """Nodes that are accused, one by one or as sets, and pass among themselves: one set."""
        known, links = self.known, list[_Made]()
        parts = [{*one.nodes} for one in known.suspects if one.kind == NODE and one.nodes[1:]]
        single = self.confirmed.keys() - self.gone - set().union(*parts)
        parts += [{name} for name in single]
        parts.sort(key=lambda part: min(map(known.place.__getitem__, part)))
        tried: set[tuple[str, ...]] = set()
        for few in (False, True):
            firsts = [known.sorted(part)[0] for part in parts]
            every = few or len(parts) <= _FEW
            pairs = [*(itertools.combinations if every else _neighbours)(firsts, 2)]
            made = yield [_Ask(CONFIRM, pair) for pair in pairs[:_MOST_PAIRS] if pair not in tried]
            tried.update(pairs)
            passed = [m for m in made if m and m.outcome.ok]
            for link in passed:
                both = [part for part in parts if part & {*link.test.nodes}]
                parts = [part for part in parts if part not in both] + [set().union(*both)]
            links += passed
            if not passed:
                break
        for part in parts:
            if not any(part & {*link.test.nodes} for link in links):
                continue
            # The other way round: one that fails only as the first may have been the last.
            asks = [_Ask(CONFIRM, known.sorted(part)[::-1])]
            whole = yield asks if not 0 < known.most < len(part) else []
            mine = [m for m in whole or links if m and m.outcome.ok and {*m.test.nodes} <= part]
            if mine:
                known.drop(o for o in known.suspects if o.kind == NODE and part & {*o.nodes})
                others = [name for name in self._live() if name not in part]
                self._set(part, mine, others)

    # --- Which GPU of a node that fails with others only: each may have a port of its own.

    def _gpus_beside(self) -> _Steps[None]:
        nodes = [node for node in self.confirmed if len(self.gpus.get(node, ())) > 1]
        yield from self._together(self._gpu_beside(node) for node in nodes)

    def _gpu_beside(self, node: str) -> _Task:
        """Halve its GPUs beside good nodes, as long as one half fails and the other passes."""
        left, passed = list(self.gpus[node]), list[_Made]()
        last: _Made | None = None
        while len(left) > 1:
            middle = (len(left) + 1) // 2
            halves = [left[:middle], left[middle:]]
            made = yield [_Ask(CONFIRM, (node,), 1, gpus=tuple(half)) for half in halves]
            bad = [(half, m) for half, m in zip(halves, made, strict=True) if _failed(m)]
            if len(bad) != 1 or None in made or node in self.gone:
                return []
            ((left, last),) = bad
            passed += [m for m in made if m and m.outcome.ok]
        mine = [one for one in self.known.suspects if (one.kind, one.nodes) == (NODE, (node,))]
        if last is not None and mine:
            self.known.drop(mine)
            why = f"GPU {left[0]} of {node} fails beside {last.beside(node)}"
            rest = f"its others pass with good nodes {_tests(m.test for m in passed)}"
            before = [f"all of them: {text}" for one in mine for text in one.why[:1]]
            self.known.accuse(GPU, [node], why, rest, *before, gpus=left)
        return []

    # --- In turns.

    def _in_turns(self) -> _Steps[None]:
        for node, seen, mode in self.turns:
            others = self._witnesses(node, node)
            if node in self.known.out() or self.known.partners(node) or len(others) < 2:
                self.known.doubts.pop(node, None)
                continue
            one, other = others
            found = yield from self._turns(
                ((node, one), (node, other)), (one, other), CONFIRM, mode == _FLAKY
            )
            self.known.doubts.pop(node, None)
            if found:
                self.known.accuse(NODE, [node], *found, f"first seen {_tests([seen.test])}")

    def _turns(
        self,
        suspects: Sequence[tuple[str, ...]],
        good: tuple[str, ...],
        purpose: str,
        flaky: bool = False,
    ) -> _Steps[tuple[str, ...]]:
        """Suspects (a node beside one, beside another) and good nodes in turns, nothing else at
        the same time: why they are to blame; (): they are not."""
        mine: list[_Made] = []
        others: list[_Made] = []
        control = SWEEP if purpose == SWEEP else CONTROL
        why = ""
        for turn in range(1, _MOST_TURNS + 1):
            suspect = suspects[turn % len(suspects)]
            for ask, kept in ((_Ask(purpose, suspect), mine), (_Ask(control, good), others)):
                (one,) = yield [ask]
                if one is None:
                    return ()
                kept.append(one)
            why = _worse(mine, others, _ACCUSE)
            if any(map(_failed, others)) or not (why or flaky):
                return ()
            if turn == _TURNS and _worse(mine, others, _AT_ONCE):
                break
        failed = [one for one in mine if _failed(one)]
        # With each of its partners: else it may be one of them.
        if not why and len({one.test.nodes for one in failed}) == len(suspects) > 1:
            why = (
                f"fails now and then, {len(failed)} of {len(mine)} times "
                f"{_tests(m.test for m in failed)}{_because(failed[0].outcome.cause)}; "
                f"{_named(good)} never {_tests(m.test for m in others)}"
            )
        return (why,) if why else ()

    # --- Sweeps.

    def _sweep(self) -> _Steps[None]:
        """The plain paths between the nodes that are left."""
        live, out = self._live(), self.known.out()
        pairs = {one.nodes for one in self.known.suspects if one.kind == PAIR}
        every: dict[tuple[str, ...], list[_Made]] = {}
        for edges in mesh.rounds(live, _offsets(len(live), self.full)):
            asks = [_Ask(SWEEP, edge) for edge in edges if not {edge, edge[::-1]} & pairs]
            every |= {m.test.nodes: [m] for m in (yield asks) if m}
        # What failed is tried again, and what then passes a third time.
        for _ in range(2):
            again = [edge for edge, of in every.items() if _failed(of[0]) and not _firm(of)]
            for m in (yield [_Ask(SWEEP, edge) for edge in again]):
                if m:
                    every[m.test.nodes].append(m)
        every = {edge: of for edge, of in every.items() if not {*edge} & self.gone}
        if every and all(map(_firm, every.values())):
            failed = [m for of in every.values() for m in of]
            why = "they pass together, and no plain path works between any two of them "
            why += f"{_tests(m.test for m in failed)}{_because(failed[0].outcome.cause)}"
            self.known.accuse(SCALE, live, why)
            return
        yield from self._lossy([of[0] for of in every.values() if any(m.outcome.ok for m in of)])
        every = {edge: of for edge, of in every.items() if not {*edge} & self.known.out()}
        blamed: dict[str, set[str]] = {}
        for found in localize.attribute(
            localize.Attempt(edge[0], edge[1], "", not _firm(of), of[0].outcome.cause)
            for edge, of in every.items()
        ):
            if found.kind != localize.PAIR:
                blamed[found.node] = {*found.peers}
            self._unreached(found, every)
        self._now_and_then(every)
        yield from self._slow_sweeps([of[0] for of in every.values() if of[0].outcome.ok])
        # Who did not reach only those that are to blame themselves is not.
        out = self.known.out() - blamed.keys()
        excused = {name for name, peers in blamed.items() if peers <= out}
        self.known.drop(one for one in self.known.suspects if {*one.nodes} <= excused)

    def _unreached(
        self, found: localize.Finding, every: Mapping[tuple[str, ...], Sequence[_Made]]
    ) -> None:
        edges = [edge for peer in found.peers for edge in ((peer, found.node), (found.node, peer))]
        tests = _tests(m.test for edge in edges for m in every.get(edge, ()) if _failed(m))
        cause = _because(found.cause)
        if found.kind == localize.PAIR:
            (peer,) = found.peers
            ways: dict[bool | None, str] = {
                True: "; the way back works",
                False: "; nor the way back",
            }
            why = f"{found.node} does not reach {peer} {tests}{cause}{ways.get(found.back, '')}"
            self.known.accuse(PAIR, (found.node, peer), why)
            return
        how = {
            localize.TARGET: "is not reached by",
            localize.SOURCE: "does not reach",
            localize.BOTH: "neither reaches nor is reached by",
        }
        why = (
            f"{how[found.kind]} {len(found.peers)} of {found.tried} others: {_named(found.peers)}"
        )
        self.known.accuse(NODE, [found.node], f"{why} {tests}{cause}")

    def _now_and_then(self, every: Mapping[tuple[str, ...], Sequence[_Made]]) -> None:
        """Nodes of which some sweeps fail, and pass when they are made again."""
        beside: dict[str, dict[str, list[_Made]]] = defaultdict(lambda: defaultdict(list))
        for edge, made in every.items():
            for name, other in (edge, edge[::-1]):
                if _failed(made[0]):
                    beside[name][other] += made
        for name, of in sorted(beside.items(), key=lambda item: -len(item[1])):
            peers = [other for other in of if other not in self.known.out()]
            tried = [m for other in peers for m in of[other]]
            failed = [m for m in tried if _failed(m)]
            if len(peers) > 2 and len(failed) < len(tried):
                why = f"does not always reach {_named(peers)}, or they it"
                cause = _because(failed[0].outcome.cause)
                self.known.accuse(NODE, [name], f"{why} {_tests(m.test for m in failed)}{cause}")

    def _lossy(self, made: Sequence[_Made]) -> _Steps[None]:
        """Nodes of which packets are lost on the way, to them or from them: whoever sends knows.
        Confirmed in turns, with nothing else on the way."""
        for place, way in enumerate(("from", "to")):
            of = defaultdict[str, list[int]](list)
            for m in made:
                of[m.test.nodes[place]].append(m.outcome.again)
            often = {name: statistics.fmean(seen) for name, seen in of.items()}
            usual = statistics.median(often.values()) if often else 0.0
            odd = [
                name
                for name, seen in of.items()
                if often[name] >= max(_AGAIN, _AGAIN_TIMES * usual)
                and 2 * sum(again > 0 for again in seen) >= len(seen)
            ]
            for name in sorted(odd, key=lambda name: -often[name]):
                out = {*odd} | self.known.out() | self.known.partners(name)
                others = [other for other in of if other not in out][:2]
                if len(others) == 2:
                    why = yield from self._lost_in_turns(name, others, place, way)
                    if why:
                        self.known.accuse(NODE, [name], why)

    def _lost_in_turns(
        self, name: str, others: Sequence[str], place: int, way: str
    ) -> _Steps[str]:
        """Why packets of this node are lost; "": they are not."""
        mine: list[_Made] = []
        good: list[_Made] = []
        for turn in range(_AGAIN_TURNS):
            other = others[turn % 2]
            for edge, kept in (
                ((other, name) if place else (name, other), mine),
                ((others[0], others[1]), good),
            ):
                (one,) = yield [_Ask(SWEEP, edge)]
                if one is None:
                    return ""
                kept.append(one)
        lost = sum(m.outcome.again for m in mine)
        usual = sum(m.outcome.again for m in good)
        shown = sum(_failed(m) or m.outcome.again > 0 for m in mine)
        if 2 * shown <= len(mine) or lost < max(len(mine) * _AGAIN, _AGAIN_TIMES * usual):
            return ""
        return (
            f"packets are lost on the way {way} it: {lost} TCP segments sent again in "
            f"{_named(others)}'s turns with it {_tests(m.test for m in mine)}, {usual} between "
            f"these {_tests(m.test for m in good)}"
        )

    def _slow_sweeps(self, made: Sequence[_Made]) -> _Steps[None]:
        """Nodes, then pairs, whose sweeps are slow: confirmed in turns."""
        known, of = self.known, defaultdict[str, list[Outcome]](list)
        good = [m for m in made if not {*m.test.nodes} & known.out()]
        for m in good:
            for name in m.test.nodes:
                of[name].append(m.outcome)
        usual: dict[str, Outcome] = {}
        for name, seen in of.items():
            ms, gbps = (
                statistics.median(each)
                for each in zip(*((o.ms, o.gbps) for o in seen), strict=True)
            )
            usual[name] = Outcome(True, "", ms, gbps)
        fast, quick = _upper(m.outcome.gbps for m in good), _lower(m.outcome.ms for m in good)
        slow = [name for name in usual if _looks_slow(usual[name], fast, quick)]
        able = [name for name in usual if name not in slow]
        for name in sorted(slow, key=lambda name: usual[name].gbps):
            others = [other for other in able if other not in known.partners(name)][:2]
            if len(others) == 2:
                why = yield from self._turns([(name, o) for o in others], tuple(others), SWEEP)
                if why:
                    known.accuse(NODE, [name], *why)

        def odd(m: _Made | None) -> bool:
            ends = [usual[name] for name in m.test.nodes] if m else []
            return m is not None and _looks_slow(
                m.outcome, min(end.gbps for end in ends), max(end.ms for end in ends)
            )

        pairs = [m.test.nodes for m in good if not {*m.test.nodes} & known.out() and odd(m)]
        again = yield [_Ask(SWEEP, pair) for pair in pairs]
        for pair in [m.test.nodes for m in again if m and odd(m)][:_MOST_FAULTS]:
            other = next(
                (
                    name
                    for name in able
                    if name not in {*pair} | known.out() | known.partners(pair[1])
                    and (name, pair[1]) not in pairs
                ),
                None,
            )
            if other is not None:
                why = yield from self._turns([pair], (other, pair[1]), SWEEP)
                if why:
                    known.accuse(PAIR, pair, *why)


def _worse(mine: Sequence[_Made], others: Sequence[_Made], part: float) -> str:
    """In what all of these are worse than all others, whose ``part`` they have at most; "": they
    are not."""
    who = set(mine[0].test.nodes).intersection(*(m.test.nodes for m in mine))
    partner = "" if len(who) > 1 else " beside good nodes"
    told = f"{_named(sorted(who))}{partner}, in turns with {_named(others[0].test.nodes)}:"
    tests = f"{_tests(m.test for m in mine)} against {_tests(m.test for m in others)}"
    if not any(m.outcome.ok for m in mine):
        return f"{told} fails each time {tests}{_because(mine[0].outcome.cause)}"
    ours = [m.outcome.gbps if m.outcome.ok else 0.0 for m in mine]
    theirs = [m.outcome.gbps for m in others]
    most, least = max(ours), min(theirs)
    typical = statistics.median(ours) <= _TYPICAL * statistics.median(theirs)
    if 0 < most <= part * least and typical:
        return f"slow: {told} at most {most:.3g} against {least:.3g} Gbit/s {tests}"
    soonest = min(m.outcome.ms if m.outcome.ok else math.inf for m in mine)
    latest = max(m.outcome.ms for m in others)
    if latest > 0 and soonest >= max(2.1 / part * latest, latest + _MORE_MS):
        return f"slow: {told} at least {soonest:.3g} against {latest:.3g} ms {tests}"
    return ""


def search(
    nodes: Sequence[str],
    gpus: Mapping[str, Sequence[int]],
    *,
    full: bool = False,
    known: Known | None = None,
) -> Search:
    """Search among these nodes.

    nodes: in the inventory's order
    gpus:  the numbers of the GPUs that each node's ranks have; none: ranks without GPUs
    full:  all pairs in the sweep, not only ring and skips
    known: is told what is found meanwhile, for whoever stops before the end
    """
    return _Search(nodes, gpus, full, known if known is not None else Known()).run()

"""What the tests' figures and the looks before and after tell. Pure.

First what came of a test, then which engine and which GPUs a test may have and how long, and at
last what got worse meanwhile, and how fast the links are. What a node says may cost it its own
row; of others it is a hint, which a test of theirs has to bear out.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from nodeready.node.proofs.mesh import OK, SKIPPED
from nodeready.node.smoke.orders import (
    NCCL_TESTS,
    PHASES,
    RING,
    TORCH,
    Collective,
    Engine,
    Hello,
    Paired,
    Ran,
    Rank,
)
from nodeready.ready import mesh
from nodeready.smoke.document import UNREACHABLE, UNTESTED, Link, Smoke
from nodeready.smoke.search import CONTROL, GPU, PAIR, SCALE, SWEEP, Outcome, Test
from nodeready.subjects.base import Unknown
from nodeready.subjects.gpus import health, kernel_log
from nodeready.subjects.gpus.gpu import Gpu, Gpus
from nodeready.subjects.ports.checks import folded
from nodeready.subjects.proof.facts import ProvedCollective as Proved
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.result import some
from nodeready.subjects.snapshot import Snapshot
from nodeready.text import counted, sanitise
from nodeready.transport.look import Look

# --- What came of a test of several ranks.

#: Gbit/s and ms above which a figure is made up: a hundred times what a GPU's NVLinks carry, and
#: longer than any test.
_MOST_GBPS, _MOST_MS = 1e6, 3.6e6
#: Characters of a rank's words in a cause.
_SAID = 200
#: Phases in which a rank needs no other one.
_OWN_PHASES = ("start", "compute")

#: A rank did not find another one: words of our ring, of the kernel, of PyTorch's store, of gloo
#: and of NCCL's sockets.
_UNCONNECTED = re.compile(
    r"(?i)no connection|not answered|connect(?:ing)? to|unreachable|no route|refused|resolve"
    r"|resolution|name or service|clients joined"
)
#: Its own name service leads it astray.
_ASTRAY = re.compile(r"(?i)resolve|resolution|name or service")
#: It had found the other one, and too little came: words of our ring and of TCP's counters.
_PATH = re.compile(r"acknowledge|small messages pass|bit/s from|something|bytes in \w+, not")
#: Nothing came: gloo's pair.cc, PyTorch's TCPStore and watchdog, NCCL's ncclRemoteError and the
#: retries of its InfiniBand part; or it was ended by us.
_WAITED = re.compile(
    r"(?i)\btime[sd]?[ -]?out|connection (?:was )?(?:closed|reset|aborted)|closed the connection"
    r"|broken pipe|end of file|\bEOF\b|failed to recv|remote process|remote ?error|network error"
    r"|retry (?:counter )?exceeded|communicator was aborted|did not (?:end|finish|come)|no data"
    r"|sent nothing|(?:limit of|after) [0-9.]+ m?s|others had ended"
)
#: The ring's own word for a node that did not run for a while.
_STILL = "this node stood still"
_RANK = re.compile(r"\brank (\d{1,9})\b")


@dataclass(frozen=True)
class _One:
    """One rank. who: ``gpu03``, ``gpu03 GPU 5``, ``gpu03 local rank 1``: the same in all tests.

    said, wrong: what it says, with other ranks by such names
    """

    node: str
    who: str
    rank: Rank
    said: str
    wrong: str

    @property
    def alone(self) -> bool:
        """Whether it came no further than where it needs no other rank, so that none is why."""
        return self.rank.phase in _OWN_PHASES and not self.wrong

    @property
    def own(self) -> str:
        """What it failed of by itself, in words; "": it passed, or needed another one."""
        said = self.said
        if self.alone:
            said = said or f"does not get beyond {self.rank.phase}"
        elif not said.startswith(_STILL) and (
            self.rank.waits_for >= 0
            or any(one.search(said) for one in (_UNCONNECTED, _PATH, _WAITED))
        ):
            said = ""
        said = self.wrong or said
        return f"{self.who}: {said}" if said else ""


def ran(
    test: Test,
    answers: Mapping[str, Ran | str],
    orders: Mapping[str, Collective] = MappingProxyType({}),
) -> Outcome:
    """What came of a test, from the answers of its nodes.

    answers: a text is why a node gave none
    orders:  what the nodes were ordered: whose each rank is; without a node's, its ranks have to
             follow each other and be nobody else's
    """
    given = {name: answers[name] for name in test.nodes if name in answers}
    came = {name: answer for name, answer in given.items() if isinstance(answer, Ran)}
    lost = tuple(name for name in test.nodes if name not in came)
    gone = f"{lost[0]} is lost: {_line(str(given.get(lost[0], 'no answer')))}" if lost else ""
    certain = _strange(test, came, orders)
    ranks = {
        rank.rank: (name, rank)
        for name, answer in came.items()
        if name not in certain
        for rank in answer.ranks
    }
    home = {number: name for number, (name, _) in ranks.items()}
    for name, order in orders.items():
        home |= dict.fromkeys(range(order.first, order.first + order.ranks), name)
    whos = _whos(home, orders)

    def line(text: str) -> str:
        return _line(_RANK.sub(lambda found: whos.get(int(found[1]), found[0]), text))

    seen = [
        _One(name, whos[number], rank, line(rank.said), line(rank.wrong))
        for number, (name, rank) in sorted(ranks.items())
    ]
    for name, answer in came.items():
        if answer.error:
            certain.setdefault(name, f"{name}: {_line(answer.error)}")
    likely: dict[str, str] = {}
    for one in seen:
        if one.own:
            (certain if one.alone else likely).setdefault(one.node, one.own)
    failed = [one for one in seen if not one.rank.ok]

    def fails(cause: str, culprits: Iterable[str]) -> Outcome:
        named = {*culprits}
        ordered = tuple(name for name in test.nodes if name in named and name not in lost)
        return Outcome(False, cause, lost=lost, culprits=ordered)

    if certain:
        return fails(next(certain[name] for name in test.nodes if name in certain), certain)
    if likely:
        cause = next(likely[name] for name in test.nodes if name in likely)
        # It can be of what others sent: a wrong sum goes around.
        few = 2 * len(likely) <= len(test.nodes) or len(test.nodes) == 1
        return fails(cause, _accused(seen, home) or (likely if few else ()))
    if failed:
        awaited = _awaited(failed, home)
        cause = _waiting(failed, [name for name in test.nodes if name in awaited])
        if lost:
            return fails(f"{gone}; then it {cause}", awaited)
        astray = {one.node for one in failed if _ASTRAY.search(one.said)}
        return fails(cause, awaited or astray or _behind(seen))
    if lost:
        return fails(gone, ())
    rates = [one.rank.gbps for one in seen if one.rank.gbps > 0]
    slowest = max((one.rank.ms for one in seen), default=0.0)
    return Outcome(True, ms=slowest, gbps=min(rates, default=0.0))


def taken(answer: Ran | Paired | str) -> str:
    """Who has the port of rank 0, in words, by the answer of its node; "": rank 0 got it."""
    return _line(answer.taken) if isinstance(answer, Ran) else ""


def _line(text: str) -> str:
    return sanitise(text, _SAID)


def _whos(home: Mapping[int, str], orders: Mapping[str, Collective]) -> dict[int, str]:
    """Rank -> its name: the node's, with the GPU or the place among the node's ranks."""
    by_node: dict[str, list[int]] = {}
    for number in sorted(home):
        by_node.setdefault(home[number], []).append(number)
    found = {}
    for name, numbers in by_node.items():
        gpus = orders[name].gpus if name in orders else ()
        for place, number in enumerate(numbers):
            more = f" GPU {gpus[place]}" if place < len(gpus) else f" local rank {place}"
            found[number] = name if len(numbers) == 1 and not gpus else name + more
    return found


def _strange(
    test: Test, came: Mapping[str, Ran], orders: Mapping[str, Collective]
) -> dict[str, str]:
    """The nodes whose answers cannot be: another test's, other ranks, figures that nobody has."""
    claimed = Counter(rank.rank for answer in came.values() for rank in answer.ranks)
    found = {}
    for name, answer in came.items():
        numbers = sorted(rank.rank for rank in answer.ranks)
        own = range(numbers[0], numbers[0] + len(numbers)) if numbers else range(0)
        order = orders.get(name)
        if order is not None:
            own = range(order.first, order.first + order.ranks)
        twice = order is None and any(claimed[number] > 1 for number in numbers)
        if answer.number != test.number:
            found[name] = f"{name} answers another test"
        elif {*numbers} - {*own} or len({*numbers}) < len(numbers) or twice:
            found[name] = f"{name} answers for ranks that are not its own"
        elif (numbers != [*own] or not numbers) and not (answer.error and not numbers):
            found[name] = f"{name} does not answer for all of its ranks"
        elif any(
            rank.phase not in PHASES or not _figures(rank.ms, rank.gbps) for rank in answer.ranks
        ):
            found[name] = f"{name} answers with figures that cannot be"
    return found


def _figures(ms: float, gbps: float) -> bool:
    return 0 <= ms <= _MOST_MS and 0 <= gbps <= _MOST_GBPS


def _waiting(failed: list[_One], awaited: list[str]) -> str:
    """What ranks that need others failed of: no connection, too little, or how far they came."""
    for words in (_UNCONNECTED, _PATH):
        told = Counter(one.said for one in failed if words.search(one.said))
        if told:
            return min(told, key=lambda said: (-told[said], said))
    phases = Counter(one.rank.phase for one in failed)
    phase = min(phases, key=lambda name: (-phases[name], PHASES.index(name)))
    where = "at its end" if phase == "done" else f"in {phase}"
    return f"hangs {where}" + (f", waiting for {some(awaited, ', ')}" if awaited else "")


def _by_two(named: Iterable[tuple[str | None, str]]) -> set[str]:
    """Of (node, who names it), those that two others or more name: one alone accuses nobody."""
    by: dict[str, set[str]] = {}
    for name, source in named:
        if name is not None and name != source:
            by.setdefault(name, set()).add(source)
    return {name for name, sources in by.items() if len(sources) > 1}


def _accused(seen: list[_One], home: Mapping[int, str]) -> set[str]:
    """The nodes whose ranks' numbers are wrong for others."""
    return _by_two(
        (home.get(int(number)), one.node)
        for one in seen
        for number in _RANK.findall(one.rank.wrong)
    )


def _awaited(failed: list[_One], home: Mapping[int, str]) -> set[str]:
    """The nodes for which others wait, also through each other; not those of a circle."""
    waits = {one.rank.rank: one.rank.waits_for for one in failed}
    end: dict[int, int | None] = {}
    for start in waits:
        at, path = start, dict[int, None]()
        while at not in end and at not in path and waits.get(at) in home and waits[at] != at:
            path[at] = None
            at = waits[at]
        last = end.get(at, None if at in path else at)
        end.update(dict.fromkeys(path, last))
        end.setdefault(at, last)
    return _by_two(
        (home.get(last), home[rank]) for rank in waits if (last := end[rank]) is not None
    )


def _behind(seen: list[_One]) -> set[str]:
    """The nodes with a rank in an earlier phase than all ranks of most nodes."""
    first: dict[str, int] = {}
    for one in seen:
        place = PHASES.index(one.rank.phase)
        first[one.node] = min(place, first.get(one.node, place))
    earliest = min(first.values())
    named = {name for name, place in first.items() if place == earliest}
    return named if 2 * len(named) < len(first) else set()


# --- What came of a test of the plain path between two nodes.


def paired(
    test: Test, answer: Paired | str, owners: mesh.Owners, ports: tuple[int, ...] = ()
) -> Outcome:
    """What came of a pair, from the source's answer; a text is why it gave none.

    owners: whose each address is
    ports:  that were asked for; (): whatever the source says
    """
    source, target = test.nodes
    if isinstance(answer, str):
        return Outcome(False, f"{source} is lost: {_line(answer)}", lost=(source,))
    if (answer.number, answer.target) != (test.number, target):
        return Outcome(False, f"{source} answers another test", culprits=(source,))
    if not _figures(answer.ms, answer.gbps) or answer.outcome not in _DATA:
        why = f"{source} answers with figures that cannot be"
        return Outcome(False, why, culprits=(source,))
    if owners.of(mesh.address(answer.address)) != target:
        cause = sanitise(mesh.name_cause(source, answer, owners), 2 * _SAID)
        return Outcome(False, f"on {source} {cause}")
    tries = [one for one in answer.tries if not ports or one.port in ports]
    skipped = any(one.outcome == SKIPPED for one in tries)
    failing: dict[str, list[int]] = {}
    for one in tries:
        if one.outcome != OK:
            cause = sanitise(mesh.port_cause(one, skipped), _SAID)
            failing.setdefault(cause, []).append(one.port)
    if failing:
        words = [
            f"{'port' if len(numbers) == 1 else 'ports'} {folded(numbers)}: {cause}"
            for cause, numbers in failing.items()
        ]
        return Outcome(False, f"no connection to {target} {some(words)}")
    if not tries:
        return Outcome(False, f"no connection to {target} was tried in time")
    cause = _DATA[answer.outcome]
    return Outcome(
        not cause,
        cause and f"{target}: {cause}",
        ms=answer.ms,
        gbps=answer.gbps,
        again=max(0, answer.retransmits),
    )


#: What a `Paired` says of the data -> why it is no pass.
_DATA = {
    OK: "",
    "": "it can be connected to, and there was no time for data",
    "small": "it can be connected to, and then no data comes back",
    "large": "small messages come back and large ones do not: full packets are dropped on the way "
    "(a smaller MTU there, and no ICMP that says so)",
}


# --- Which engine all nodes have.


@dataclass(frozen=True)
class Choice:
    """The engine of a run.

    engine, backend: ""; "": no node has one
    name:    ``torch 2.13.0 over gloo``
    proves:  what its pass proves
    alone:   engine and backend of the tests of one node
    control: engine and backend of the control arm; None: there is no other that all nodes have
    out:     the nodes that cannot take part -> why, one line
    instead: why it is not a better one, which nobody asked for by name; ""
    """

    engine: str = ""
    backend: str = ""
    name: str = ""
    proves: str = ""
    alone: tuple[str, str] = ("", "")
    control: tuple[str, str] | None = None
    out: Mapping[str, str] = field(default_factory=dict)
    instead: str = ""


_Kind = tuple[str, str]
_NCCL, _GLOO, _TESTS, _RING = (TORCH, "nccl"), (TORCH, "gloo"), (NCCL_TESTS, "nccl"), (RING, "tcp")
_TITLES = {TORCH: "PyTorch", NCCL_TESTS: "nccl-tests", RING: "the ring"}


def title(engine: Engine) -> str:
    """``torch 2.13.0 over gloo``."""
    version = f" {sanitise(engine.version, 40)}" if engine.version else ""
    return f"{engine.name}{version} over {sanitise(engine.backend, 40)}"


def choose(hellos: Mapping[str, Hello], wanted: str = "", gpus: bool = False) -> Choice:
    """The best engine that most nodes have, and the nodes that have another one or none.

    wanted: ``torch``, ``torch:gloo``, ``nccl-tests``, ``ring``; "": the best
    gpus:   GPUs are tested
    nccl-tests want MPI between nodes: they test each node alone, and the ring tests the rest.
    """
    out = {name: sanitise(one.why, _SAID) for name, one in hellos.items() if one.why}
    there = {name: one for name, one in hellos.items() if name not in out}
    name, _, backend = wanted.partition(":")
    best = [_NCCL, _GLOO, _RING] if gpus else [_GLOO, _RING]
    if name == NCCL_TESTS or (gpus and len(hellos) == 1):
        best.insert(1, _TESTS)
    known = [kind for kind in best if name in ("", kind[0]) and backend in ("", kind[1])]
    if not known:
        return Choice(
            out={**dict.fromkeys(hellos, f"{wanted} needs GPUs, and none takes part"), **out}
        )
    having = {kind: _having(there, kind) for kind in known}
    kind = next((one for one in known if 2 * len(having[one]) > len(there)), None)
    kind = kind or max(known, key=lambda one: len(having[one]))
    usable, instead = having[kind], ""
    if kind != known[0]:
        without = (hello for name, hello in there.items() if name not in having[known[0]])
        lacks = Counter(_lack(hello, known[0]) for hello in without)
        instead = lacks.most_common(1)[0][0]
    out |= {one: _lack(hello, kind) for one, hello in there.items() if one not in usable}
    if not usable:
        return Choice(out=out)
    out |= _other_versions(usable)
    chosen = [one for one in usable if one not in out]
    first = usable[chosen[0]]
    alone = kind
    if kind == _TESTS and len(hellos) > 1:
        kind = _RING
        out |= {one: _lack(hellos[one], kind) for one in chosen if not _find(hellos[one], kind)}
        chosen = [one for one in chosen if one not in out]
        if not chosen:
            return Choice(out=out)
        first = _find(hellos[chosen[0]], kind) or first
    elif kind[1] != "nccl" and gpus and all(_find(hellos[one], _TESTS) for one in chosen):
        alone = _TESTS
    others = (one for one in (_GLOO, _RING) if one != kind)
    common = (one for one in others if all(_find(hellos[node], one) for node in chosen))
    order = [one for one in hellos if one in out]
    return Choice(
        *kind,
        name=title(first),
        proves=first.proves,
        alone=alone,
        control=next(common, None),
        out={one: out[one] for one in order},
        instead=instead,
    )


def _find(hello: Hello, kind: _Kind, usable: bool = True) -> Engine | None:
    found = (one for one in hello.engines if (one.name, one.backend) == kind)
    return next((one for one in found if not (usable and one.why)), None)


def _having(hellos: Mapping[str, Hello], kind: _Kind) -> dict[str, Engine]:
    found = {name: _find(hello, kind) for name, hello in hellos.items()}
    return {name: one for name, one in found.items() if one is not None}


def _lack(hello: Hello, kind: _Kind) -> str:
    """Why the node has no such engine."""
    seen = _find(hello, kind, usable=False)
    why = seen.why if seen else next((one.why for one in hello.engines if one.name == kind[0]), "")
    words = _TITLES.get(kind[0], kind[0]) + ("" if kind[0] == RING else f" over {kind[1]}")
    return f"no {words.removeprefix('the ')}: {_line(why) or 'it was not found'}"


#: How a reason begins that no engine is there.
_LACKS = tuple(f"no {words.removeprefix('the ')}" for words in _TITLES.values())


def _other_versions(usable: Mapping[str, Engine]) -> dict[str, str]:
    """The nodes with another version than most; of as many, the first node's counts. Two versions
    of PyTorch or NCCL in one job fail at its start, or hang."""
    versions = Counter((one.version, one.library) for one in usable.values())
    (most, count), *_ = versions.most_common(1)
    found = {}
    for name, one in usable.items():
        if (one.version, one.library) == most:
            continue
        what = f"{_TITLES.get(one.name, one.name)} "
        here, there = one.version, most[0]
        if here == there:
            what, (here, there) = "", (one.library, most[1])
        nodes = counted(count, "node")
        here, there = (sanitise(text, 60) or "of no version" for text in (here, there))
        found[name] = f"{what}{here} here, {there} on {nodes}"
    return found


# --- Which GPUs a test may have.

#: Per cent of a GPU's memory in use, with no process to be seen, that are somebody's whom this
#: node does not show (a container's): the driver's own part of an idle data centre GPU is less.
_OCCUPIED = 10

_Numbers = tuple[int, ...]


def idle(
    looks: Mapping[str, Look],
    gpus: tuple[int, ...] | int | None = None,
    busy: bool = False,
    counts: Mapping[str, int | None] = MappingProxyType({}),
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Node -> the numbers of its GPUs that take part; node -> why none can.

    gpus:   how many, or which; None: all, and as many as on most nodes; 0 or (): none
    busy:   those that have processes, too
    counts: node -> how many the policy says that it has
    Where most nodes have no GPU and shall have none, all take part without.
    """
    seen: dict[str, Gpus] = {}
    why: dict[str, str] = {}
    for name, look in looks.items():
        one = look.snapshot.subjects.get("gpus") if look.snapshot else None
        if isinstance(one, Gpus):
            seen[name] = one
        else:
            said = one.reason if isinstance(one, Unknown) else look.error or "nobody looked"
            why[name] = f"its GPUs are not known: {sanitise(said, _SAID)}"
    having = [
        one for one in seen if health.expected(seen[one]) or seen[one].gpus or counts.get(one)
    ]
    if gpus in (0, ()) or (gpus is None and 2 * len(having) < max(1, len(seen))):
        return dict.fromkeys(looks, ()), {}
    devices = {name: _devices(one, busy) for name, one in seen.items()}
    usual, nodes = Counter(map(len, devices.values())).most_common(1)[0] if devices else (0, 0)
    found: dict[str, _Numbers] = {}
    for name, one in seen.items():
        wanted, where = counts.get(name), "in the policy"
        if wanted is None and gpus is None and 2 * nodes > len(seen):
            wanted, where = usual, f"on {counted(nodes, 'node')}"
        chosen: _Numbers = ()
        reason = _too_few(one, devices[name], wanted, where)
        if not reason:
            chosen, reason = _chosen(devices[name], gpus, busy)
        if reason:
            why[name] = sanitise(reason, 2 * _SAID)
        else:
            found[name] = chosen
    return found, {name: why[name] for name in looks if name in why}


def _devices(seen: Gpus, busy: bool) -> dict[int, Gpu]:
    """Number -> GPU that a job of this node could have; a processor's own graphics are none.

    busy: without the vendor's tool, those on the bus: nobody asks whether they are idle
    """
    bus = health.expected(seen)
    others = {gpu.address for gpu in seen.pci} - {gpu.address for gpu in bus}
    shown = [one for one in seen.nvidia or seen.amd if one.pci_address not in others]
    if busy and not shown and bus and health.tool(seen, bus[0].vendor).state == "missing":
        shown = [Gpu(at, one.vendor, one.address) for at, one in enumerate(bus)]
    return {one.index: one for one in shown}


def _too_few(seen: Gpus, devices: Mapping[int, Gpu], wanted: int | None, where: str) -> str:
    have = counted(len(devices), "GPU") if devices else "no GPU"
    there = {one.pci_address for one in devices.values()}
    gone = [gpu.address for gpu in health.unseen(seen) if gpu.address not in there]
    if gone and not seen.gpus:
        return f"nobody can tell which GPUs are idle: {health.why_unseen(seen)}"
    if gone:
        return f"{have}: its tool does not show {some(gone, ', ')}"
    if not devices or (wanted is not None and len(devices) < wanted):
        return f"{have}, {wanted} {where}" if wanted else have
    return ""


def _chosen(
    devices: Mapping[int, Gpu], gpus: tuple[int, ...] | int | None, busy: bool
) -> tuple[_Numbers, str]:
    """The GPUs of one node, or why they are too few."""
    asked = list(gpus) if isinstance(gpus, tuple) else sorted(devices)
    need = gpus if isinstance(gpus, int) else len(asked)
    have = counted(len(devices), "GPU")
    missing = [number for number in asked if number not in devices]
    if missing:
        return (), f"no GPU {_listed(missing)}: it has {have}"
    if len(asked) < need:
        return (), f"{have}, {need} wanted"
    taken = {number: _taken(devices[number], busy) for number in asked}
    free = [number for number in asked if not taken[number][0]]
    if len(free) >= need:
        return tuple(free[:need]), ""
    words = []
    for why in dict.fromkeys(why for why, _ in taken.values() if why):
        numbers = [number for number in asked if taken[number][0] == why]
        by = dict.fromkeys(one for number in numbers for one in taken[number][1])
        is_ = "is" if len(numbers) == 1 else "are"
        words.append(f"GPU {_listed(numbers)} {is_} {why}" + (f" ({some(by)})" if by else ""))
    hint = "; --busy tests beside them" if any(one == _BUSY for one, _ in taken.values()) else ""
    return (), "; ".join(words) + hint


def _listed(numbers: list[int]) -> str:
    """``0``, ``0 and 3``, ``0, 3 and 5``."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


_BUSY = "busy"


def _taken(gpu: Gpu, busy: bool) -> tuple[str, tuple[str, ...]]:
    """Why the GPU cannot take part, and by whom it is used; "": it can."""
    if gpu.mig == "on":
        return "divided (MIG): a collective needs whole GPUs", ()
    if gpu.compute_mode == "prohibited":
        return "closed to programs (compute mode prohibited)", ()
    if busy:
        return "", ()
    by = [
        f"{one.name.rpartition('/')[2] or 'a process'}, pid {one.pid}"
        for one in gpu.processes
        if one.kind != "G"
    ]
    if by:
        return _BUSY, tuple(by)
    hidden = [said for name, said in gpu.unread if name == "processes"]
    if hidden or (gpu.vendor == "amd" and gpu.idle is None):
        return _BUSY, ("or not: its tool cannot tell its processes", *hidden)
    used, total = gpu.memory_used_mb or 0, gpu.memory_total_mb or 0
    if not gpu.processes and used * 100 > total * _OCCUPIED:
        return _BUSY, (f"{used} MiB in use, by nobody whom this node shows",)
    return "", ()


# --- How long a test may take.


def seconds(
    engine: str, backend: str, world: int, large: int, *, first: bool = False, rounds: int = 6
) -> float:
    """The limit of one test: its start, the ranks that have to find each other, and its data.

    world:  its ranks; of the ring, its nodes
    large:  bytes of the all_reduce whose bandwidth counts; rounds: how often it is made
    first:  the node's first test with this engine: PyTorch is read from a disk that may be cold
    """
    start = _START_S.get((engine, backend), _LONGEST_START_S) + (_COLD_S if first else 0.0)
    slowest = _LEAST_GBPS["nccl" if backend == "nccl" else "tcp"]
    # Around a ring each byte leaves a rank twice (nccl-tests' PERFORMANCE.md).
    data = rounds * 2 * large * 8 / (slowest * 1e9)
    return round(start + world * _PER_RANK_S + data, 1)


#: Seconds of a start: of the ring three connections with their time-outs (4.5 s each); of gloo a
#: fork, a store and a connection between every two ranks; of NCCL the driver's context on each
#: GPU and the search for paths between them, which nccl-tests begin with their libraries.
_START_S = {_RING: 15.0, _GLOO: 20.0, _NCCL: 40.0, _TESTS: 60.0}
_LONGEST_START_S = 60.0
#: Reading PyTorch's gigabyte over NFS at 30 MB/s.
_COLD_S = 40.0
#: Seconds for each rank more: the store of rank 0 answers them one after the other, and around a
#: ring a small collective takes two steps for each.
_PER_RANK_S = 0.05
#: Gbit/s of a path that is worth waiting for: a tenth of the slowest port in use (1 Gbit/s), and
#: of the slowest between GPUs of several nodes (10 Gbit/s).
_LEAST_GBPS = {"tcp": 0.1, "nccl": 1.0}


# --- What got worse during the test.

#: Counters of a GPU -> what one more is.
_GPU_COUNTS = {
    "ecc_uncorrectable_volatile": "new uncorrected ECC error",
    "ecc_correctable_volatile": "new corrected ECC error",
    "ecc_deferred": "new deferred ECC error",
    "xgmi_errors": "new XGMI error",
    "remapped_uncorrectable": "newly remapped memory row",
    "retired_pages": "newly retired memory page",
}
#: What was not so before.
_GPU_STATES = {
    "remap_pending": "a row of its memory waits to be remapped",
    "remap_failed": "a row of its memory could not be remapped",
    "retired_pending": "a page of its memory waits to be retired",
    "repair_pending": "its memory waits to be repaired",
    "unrepairable": "its memory cannot be repaired",
    "sram_exceeded": "its SRAM had too many errors",
}
#: The counters of ports (`Subject.counters`) -> what one more is. Errors of a receiver that are no
#: CRC errors, and of a sender, have causes beside the wire: so many of them are nothing.
_PORT_COUNTS = {
    "symbol_error": ("new symbol error", 0),
    "link_downed": ("new link failure", 0),
    "local_link_integrity_errors": ("new local link integrity error", 0),
    "excessive_buffer_overrun_errors": ("new excessive buffer overrun error", 0),
    "rnr_nak_retry_err": ("new RNR NAK retry error", 0),
    "carrier_changes": ("link change", 0),
    "rx_crc_errors": ("new CRC error", 0),
    "rx_errors": ("new receive error", 120),
    "tx_errors": ("new send error", 120),
}


def _grown(before: int | None, after: int | None) -> int:
    """By how much a counter grew; all of it when it began anew."""
    if before is None or after is None:
        return 0
    return after - before if after >= before else after


def worse(before: Snapshot, after: Snapshot) -> tuple[str, ...]:
    """What got worse on a node between two looks, a sentence each: errors of GPUs and ports."""
    words: list[str] = []
    for subject in ("gpus", "rdma", "nics"):
        then: Any = before.subjects.get(subject)
        now: Any = after.subjects.get(subject)
        if any(one is None or isinstance(one, Unknown) for one in (then, now)):
            continue
        counters = SUBJECTS[subject].counters
        words += _ports(counters(then), counters(now)) if counters else _gpus(then, now)
    return tuple(sanitise(one, 2 * _SAID) for one in words)


def _gpus(then: Gpus, now: Gpus) -> Iterator[str]:
    old = {(one.pci_address, one.uuid): one for one in then.gpus}
    new = {(one.pci_address, one.uuid): one for one in now.gpus}
    for key, gpu in old.items():
        source = health.tool(now, gpu.vendor)
        if key in new:
            yield from (f"GPU {gpu.index}: {text}" for text in _gpu(gpu, new[key]))
        elif source.works:
            yield f"GPU {gpu.index}: {source.name} does not show it any more"
    for vendor in dict.fromkeys(gpu.vendor for gpu in then.gpus):
        source = health.tool(now, vendor)
        if not source.works:
            yield f"{source.name} {source.state}, which answered before the test"
    errors = {one.address: one.aer for one in then.pci}
    for one in now.pci:
        known = {(kind, name): count for kind, name, count in errors.get(one.address, one.aer)}
        for kind, name, count in one.aer:
            more = _grown(known.get((kind, name), 0), count)
            if more:
                what = counted(more, "new uncorrected PCIe error")
                yield f"{one.address}: {what} ({name}, {kind}) during the test"
    yield from _faults(then, now)


def _gpu(then: Gpu, now: Gpu) -> Iterator[str]:
    for name, text in _GPU_COUNTS.items():
        more = _grown(getattr(then, name, None), getattr(now, name, None))
        if more:
            yield f"{counted(more, text)} during the test"
    for name, text in _GPU_STATES.items():
        if getattr(now, name) and not getattr(then, name):
            yield text
    began = [one for one in now.throttle if one not in then.throttle]
    if began:
        yield f"slows down ({', '.join(began)})"
    for what, name, limit in (
        ("", "temperature_c", "temperature_slowdown_c"),
        ("memory ", "memory_temperature_c", "memory_temperature_max_c"),
    ):
        most, degrees, earlier = getattr(now, limit), getattr(now, name), getattr(then, name)
        if most is not None and degrees is not None and degrees >= most > (earlier or 0):
            yield f"{what}{degrees} C, its limit is {most} C"
    if now.recovery not in (None, "none", then.recovery):
        yield f"its driver asks for {now.recovery}"


def _faults(then: Gpus, now: Gpus) -> Iterator[str]:
    """Faults in the kernel's log; those of an application can be our own end of a test."""
    if not (then.kernel_log.works and now.kernel_log.works):
        return
    known = Counter[tuple[object, ...]]()
    for one in then.kernel_faults:
        known[one.source, one.code, one.pci_address, one.action] += one.count
    new = []
    for one in now.kernel_faults:
        more = one.count - known[one.source, one.code, one.pci_address, one.action]
        known[one.source, one.code, one.pci_address, one.action] -= one.count
        if more > 0 and one.action != kernel_log.APPLICATION:
            new.append(replace(one, count=min(more, one.count)))
    if new:
        yield f"in the kernel's log during the test: {health.faults_in_words(now, new)}"


def _ports(then: Mapping[str, int], now: Mapping[str, int]) -> Iterator[str]:
    for key, value in now.items():
        name, _, counter = key.rpartition(".")
        more = _grown(then.get(key), value)
        if counter in _PORT_COUNTS and more > _PORT_COUNTS[counter][1]:
            where = name.replace("/", " port ")
            yield f"{where}: {counted(more, _PORT_COUNTS[counter][0])} during the test"


# --- How fast the links are.


class Floor(NamedTuple):
    """A node's policy, in Gbit/s of bus bandwidth; 0: it has none."""

    between: float = 0.0
    inside: float = 0.0


INSIDE, BETWEEN = "inside", "between"
_WORDS = {INSIDE: "inside the node", BETWEEN: "between nodes"}
_SETTINGS = {INSIDE: "smoke_min_node_gbps", BETWEEN: "smoke_min_gbps"}
Floors = Mapping[str, Floor]
Made = Iterable["tuple[Test, Outcome]"]


def _measured(made: Made) -> dict[str, list[tuple[Test, float]]]:
    """Class -> the tests of the engine that passed and have a bandwidth; one rank has none."""
    found: dict[str, list[tuple[Test, float]]] = {}
    for test, outcome in made:
        if outcome.ok and outcome.gbps > 0 and test.purpose not in (SWEEP, CONTROL):
            name = INSIDE if len(test.nodes) == 1 else BETWEEN
            found.setdefault(name, []).append((test, outcome.gbps))
    return found


def _floor(name: str, nodes: Iterable[str], floors: Floors) -> float:
    """The lowest floor of these nodes; 0 when one has none: it may be slower."""
    return min((getattr(floors.get(node, Floor()), name) for node in nodes), default=0.0)


def links(made: Made, floors: Floors = MappingProxyType({})) -> tuple[Link, ...]:
    """The bandwidth inside of nodes, and between them; a class without a test is not there."""
    measured, found = _measured(made), []
    for name in (INSIDE, BETWEEN):
        tests = measured.get(name)
        if not tests:
            continue
        slowest, least = min(tests, key=lambda one: one[1])
        middle = statistics.median(gbps for _, gbps in tests)
        lowest = min(
            filter(None, (_floor(name, test.nodes, floors) for test, _ in tests)), default=0.0
        )
        found.append(Link(name, len(tests), middle, least, slowest.nodes, lowest))
    return tuple(found)


def below(made: Made, floors: Floors, without: Iterable[str] = ()) -> dict[str, tuple[str, ...]]:
    """The nodes that reach the policy's floor in no test -> a sentence for each class of links.

    without: suspects: a test with one of them says nothing of the others
    """
    others, found = {*without}, dict[str, tuple[str, ...]]()
    for name, tests in _measured(made).items():
        best: dict[str, tuple[float, Test]] = {}
        for test, gbps in tests:
            if others & {*test.nodes}:
                continue
            for node in test.nodes:
                if gbps > best.get(node, (0.0, test))[0]:
                    best[node] = gbps, test
        for node, (gbps, test) in best.items():
            floor = _floor(name, (node,), floors)
            if gbps < floor:
                words = (
                    f"at best {gbps:.3g} Gbit/s {_WORDS[name]}, the policy wants {floor:g} "
                    f"({_SETTINGS[name]}) [{test.number}]"
                )
                found[node] = (*found.get(node, ()), words)
    return found


# --- The document as a proof of `nodeready ready`.


def proved(found: Smoke) -> dict[str, Proved]:
    """What the test showed of each node; one that ended early proves nothing."""
    against: dict[str, list[str]] = {}
    for one in found.suspects:
        for name in one.nodes:
            others = some((other for other in one.nodes if other != name), ", ")
            start = {
                PAIR: f"with {others}: ",
                GPU: f"GPU {_listed([*one.gpus])}: " if one.gpus else "",
                SCALE: f"only together with {others}: ",
            }.get(one.kind, "")
            against.setdefault(name, []).append(start + "; ".join(one.evidence))
    made = {}
    for node in found.nodes:
        out = node.status in (UNTESTED, UNREACHABLE)
        why = (node.why or "not tested") if out else found.stopped
        made[node.name] = Proved(
            nodes=len(found.nodes),
            engine=found.engine,
            proves=found.proves,
            against=tuple(against.get(node.name, ())),
            untested=why,
            lacking=out and not found.engine and why.startswith(_LACKS),
            warnings=node.warnings,
        )
    return made

"""The outcome of a test, from the answers of its nodes. Pure.

An answer can prove a fault of the node that sent it. A report about another node proves nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from nodeready.agent.proofs.mesh import OK, SKIPPED
from nodeready.agent.smoke.orders import (
    PHASES,
    CollectiveAnswer,
    CollectiveOrder,
    PairAnswer,
    RankResult,
)
from nodeready.core.result import join_first
from nodeready.core.text import sanitise
from nodeready.runs.ready import mesh
from nodeready.runs.smoke.document import of_node
from nodeready.runs.smoke.knowledge import SmokeOutcome, Test
from nodeready.subjects.ports.checks import ports_text

#: Maximum plausible values: a hundred times a GPU's NVLinks; an hour, which no test lasts.
_MAX_GBPS, _MAX_MS = 1e6, 3.6e6
_MESSAGE_LENGTH = 200  # characters of a rank's message in a cause
_OWN_PHASES = ("start", "compute")  # phases in which a rank needs no other rank

#: A rank has no connection: from nodeready, the kernel, PyTorch's store, gloo, NCCL's sockets.
_UNCONNECTED = re.compile(
    r"(?i)no connection|not answered|connect(?:ing)? to|unreachable|no route|refused|resolve"
    r"|resolution|name or service|clients joined"
)
#: Messages of a rank with a wrong name service.
_NAME_SERVICE = re.compile(r"(?i)resolve|resolution|name or service")
#: Messages of a rank that received nothing, or that nodeready ended: from gloo's pair.cc,
#: PyTorch's TCPStore and watchdog, NCCL's ncclRemoteError and the retries of its InfiniBand part.
_WAITED = re.compile(
    r"(?i)\btime[sd]?[ -]?out|connection (?:was )?(?:closed|reset|aborted)"
    r"|broken pipe|end of file|\bEOF\b|failed to recv|remote process|remote ?error|network error"
    r"|retry (?:counter )?exceeded|communicator was aborted|did not (?:end|finish|come)|no data"
    r"|(?:limit of|after) [0-9.]+ m?s|^ended: "
)
_RANK = re.compile(r"\brank (\d{1,9})\b")


@dataclass(frozen=True)
class _NamedRank:
    node: str
    title: str  # ``gpu03``, ``gpu03 GPU 5``, ``gpu03 local rank 1``: the same in all tests
    rank: RankResult
    message: str  # the rank's error, with titles in place of ranks' numbers
    mismatch: str  # likewise

    @property
    def failed_alone(self) -> bool:
        """Whether it failed in a phase in which it needs no other rank."""
        return self.rank.phase in _OWN_PHASES and not self.mismatch

    @property
    def own_failure(self) -> str:
        """The rank's own failure; "" if it passed or waited for another rank."""
        message = self.mismatch or self.message
        if self.failed_alone:
            message = message or f"does not get beyond {self.rank.phase}"
        elif not self.mismatch and (_UNCONNECTED.search(message) or _WAITED.search(message)):
            message = ""
        return f"{self.title}: {message}" if message else ""


def collective_outcome(
    test: Test,
    answers: Mapping[str, CollectiveAnswer | str],
    orders: Mapping[str, CollectiveOrder],
) -> SmokeOutcome:
    """The outcome of a collective. answers: of nodes; a text: why the answer is missing"""
    received = {name: a for name in test.nodes if isinstance(a := answers[name], CollectiveAnswer)}
    lost = tuple(name for name in test.nodes if name not in received)
    loss = f"{lost[0]} is lost: {_line(str(answers[lost[0]]))}" if lost else ""
    certain = _implausible(test, received, orders)
    plausible = {name: answer for name, answer in received.items() if name not in certain}
    ranks = _named_ranks(plausible, orders)
    used = {name: of_node(rank.network for rank in a.ranks) for name, a in plausible.items()}
    networks = tuple((name, network) for name, network in used.items() if network)
    certain |= {name: f"{name}: {_line(a.error)}" for name, a in plausible.items() if a.error}
    likely: dict[str, str] = {}
    for named in ranks:
        if failure := named.own_failure:
            (certain if named.failed_alone else likely).setdefault(named.node, failure)
    failed = [named for named in ranks if not named.rank.ok]

    def fails(cause: str, nodes: Iterable[str]) -> SmokeOutcome:
        culprits = tuple(name for name in test.nodes if name in {*nodes} and name not in lost)
        return SmokeOutcome(False, cause, lost=lost, culprits=culprits, networks=networks)

    if certain:
        return fails(next(certain[name] for name in test.nodes if name in certain), certain)
    if likely:
        cause = next(likely[name] for name in test.nodes if name in likely)
        # If many nodes fail, the data of another rank may be the cause: a wrong sum goes around.
        are_few = 2 * len(likely) <= len(test.nodes) or len(test.nodes) == 1
        return fails(cause, likely if are_few else ())
    if failed:
        cause = _waiting_cause(failed)
        if lost:
            return fails(f"{loss}; then it {cause}", ())
        misled = {named.node for named in failed if _NAME_SERVICE.search(named.message)}
        return fails(cause, misled or _behind(ranks))
    if lost:
        return fails(loss, ())
    rates = [named.rank.gbps for named in ranks if named.rank.gbps > 0]
    slowest_ms = max((named.rank.ms for named in ranks), default=0.0)
    return SmokeOutcome(True, ms=slowest_ms, gbps=min(rates, default=0.0), networks=networks)


def port_holder(answer: CollectiveAnswer | PairAnswer | str) -> str:
    """The process of another user that has rank 0's port, by its node's answer; "": none."""
    return _line(answer.port_holder) if isinstance(answer, CollectiveAnswer) else ""


def _line(text: str) -> str:
    return sanitise(text, _MESSAGE_LENGTH)


def _named_ranks(
    answers: Mapping[str, CollectiveAnswer], orders: Mapping[str, CollectiveOrder]
) -> list[_NamedRank]:
    """The ranks of these answers, by their numbers."""
    titles: dict[int, str] = {}
    for name, order in orders.items():
        for place in range(order.ranks):
            detail = f" GPU {order.gpus[place]}" if order.gpus else f" local rank {place}"
            is_single = order.ranks == 1 and not order.gpus
            titles[order.first + place] = name if is_single else name + detail

    def line(text: str) -> str:
        return _line(_RANK.sub(lambda match: titles.get(int(match[1]), match[0]), text))

    ranks = [
        _NamedRank(name, titles[rank.rank], rank, line(rank.error), line(rank.mismatch))
        for name, answer in answers.items()
        for rank in answer.ranks
    ]
    return sorted(ranks, key=lambda named: named.rank.rank)


def _implausible(
    test: Test, received: Mapping[str, CollectiveAnswer], orders: Mapping[str, CollectiveOrder]
) -> dict[str, str]:
    """Node -> why its answer is impossible: another test, other ranks, impossible figures."""
    failures = {}
    for name, answer in received.items():
        numbers = sorted(rank.rank for rank in answer.ranks)
        own_numbers = [*range(orders[name].first, orders[name].first + orders[name].ranks)]
        if answer.number != test.number:
            failures[name] = f"{name} answers another test"
        elif {*numbers} - {*own_numbers} or len({*numbers}) < len(numbers):
            failures[name] = f"{name} answers for ranks that are not its own"
        elif numbers != own_numbers and not (answer.error and not numbers):
            failures[name] = f"{name} does not answer for all of its ranks"
        elif not all(rank.phase in PHASES and _is_possible(rank) for rank in answer.ranks):
            failures[name] = f"{name} answers with figures that cannot be"
    return failures


def _is_possible(figures: RankResult | PairAnswer) -> bool:
    return 0 <= figures.ms <= _MAX_MS and 0 <= figures.gbps <= _MAX_GBPS


def _waiting_cause(failed: list[_NamedRank]) -> str:
    """Why ranks that wait for other ranks fail: no connection, else the phase."""
    if counts := Counter(named.message for named in failed if _UNCONNECTED.search(named.message)):
        return min(counts, key=lambda message: (-counts[message], message))
    phases = Counter(named.rank.phase for named in failed)
    phase = min(phases, key=lambda name: (-phases[name], PHASES.index(name)))
    return "hangs at its end" if phase == "done" else f"hangs in {phase}"


def _behind(ranks: list[_NamedRank]) -> set[str]:
    """The nodes with a rank in an earlier phase than all ranks of most nodes."""
    earliest: dict[str, int] = {}
    for named in ranks:
        phase = PHASES.index(named.rank.phase)
        earliest[named.node] = min(phase, earliest.get(named.node, phase))
    minimum = min(earliest.values())
    behind = {name for name, phase in earliest.items() if phase == minimum}
    return behind if 2 * len(behind) < len(earliest) else set()


# --- A test of the plain path between two nodes.

#: The outcome of the data of a `PairAnswer` -> why it fails, but for the rate of ``slow``.
_DATA_CAUSES = {
    OK: "",
    "": "the connection succeeds, and there was no time for data",
    "small": "the connection succeeds, and no data comes back",
    "large": "small messages come back and large ones do not: full packets are dropped on the way "
    "(a smaller MTU there, and no ICMP that says so)",
    "slow": "there and back",
}


def pairs_outcome(
    test: Test,
    edges: Iterable[tuple[str, str]],
    answers: Mapping[str, PairAnswer | str],
    owners: mesh.Owners,
    ports: Mapping[str, tuple[int, ...]],
) -> SmokeOutcome:
    """The outcome of several pairs. answers: of sources; ports: of targets, to be tried"""
    outcomes = {}
    for edge in edges:
        pair, (source, target) = replace(test, nodes=edge), edge
        outcomes[edge] = pair_outcome(pair, answers[source], owners, ports[target])
    failed = {edge: outcome for edge, outcome in outcomes.items() if not outcome.ok}
    if not failed:
        ms, gbps = max(o.ms for o in outcomes.values()), min(o.gbps for o in outcomes.values())
        retransmits = sum(outcome.retransmits for outcome in outcomes.values())
        return SmokeOutcome(True, ms=ms, gbps=gbps, retransmits=retransmits)
    reported = {name for outcome in failed.values() for name in outcome.culprits}
    # A node that two others do not reach, or do not answer.
    counts = Counter(name for edge in failed for name in edge)
    culprits = reported or {name for name, count in counts.items() if count > 1}
    return SmokeOutcome(
        False,
        next(iter(failed.values())).cause,
        lost=tuple(name for outcome in failed.values() for name in outcome.lost),
        culprits=tuple(name for name in test.nodes if name in culprits),
    )


def pair_outcome(
    test: Test, answer: PairAnswer | str, owners: mesh.Owners, ports: tuple[int, ...]
) -> SmokeOutcome:
    """The outcome of a pair. answer: of its source, or why it is missing; ports: to be tried"""
    source, target = test.nodes
    if isinstance(answer, str):
        return SmokeOutcome(False, f"{source} is lost: {_line(answer)}", lost=(source,))
    if (answer.number, answer.target) != (test.number, target):
        return SmokeOutcome(False, f"{source} answers another test", culprits=(source,))
    if not _is_possible(answer) or answer.outcome not in _DATA_CAUSES:
        cause = f"{source} answers with figures that cannot be"
        return SmokeOutcome(False, cause, culprits=(source,))
    if owners.of(mesh.address(answer.address)) != target:
        cause = mesh.name_cause(owners, source, target, answer.resolved, _line(answer.error))
        return SmokeOutcome(False, f"on {source} {cause}")
    tries = [attempt for attempt in answer.tries if attempt.port in ports]
    are_skipped = any(attempt.outcome == SKIPPED for attempt in tries)
    failing: dict[str, list[int]] = {}
    for attempt in (attempt for attempt in tries if attempt.outcome != OK):
        cause = _line(mesh.port_cause(attempt, are_skipped))
        failing.setdefault(cause, []).append(attempt.port)
    if failing:
        causes = [
            f"{'port' if len(numbers) == 1 else 'ports'} {ports_text(numbers)}: {cause}"
            for cause, numbers in failing.items()
        ]
        return SmokeOutcome(False, f"no connection to {target} {join_first(causes)}")
    if not tries:
        return SmokeOutcome(False, f"no connection to {target} was tried in time")
    cause = _DATA_CAUSES[answer.outcome]
    if answer.outcome == "slow":
        cause = f"{1000 * answer.gbps:.2g} Mbit/s {cause}"
    return SmokeOutcome(
        not cause, cause and f"{target}: {cause}", answer.ms, answer.gbps,
        retransmits=max(0, answer.retransmits),
    )  # fmt: skip

"""The sweep: tests of the plain paths between the remaining nodes. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from nodeready.runs.ready import mesh, reach
from nodeready.runs.smoke.knowledge import (
    NODE,
    PAIR,
    SCALE,
    SWEEP,
    Knowledge,
    SmokeOutcome,
    Steps,
    Trial,
    TrialRequest,
    cite_trials,
    is_failed,
    join_names,
    looks_slow,
    quartile,
    retry_alternately,
    sweep_offsets,
    take_turns,
    with_cause,
)

#: A node loses packets if its sweeps send at least this number of segments again on average, and
#: at least this multiple of the median node's: with 5 of 100 packets lost, a sweep sends about
#: three again. This number of retrials with good nodes has to confirm it.
_RETRANSMITS, _RETRANSMITS_TIMES, _RETRANSMITS_RETRIALS = 1.0, 5.0, 4
_MAX_SLOW_PAIRS = 16  # maximum slow pairs that are retried

Edge = tuple[str, ...]


def _is_firm(trials: Sequence[Trial]) -> bool:
    return sum(map(is_failed, trials)) > 1


class Sweep:
    def __init__(self, knowledge: Knowledge, nodes: Sequence[str]) -> None:
        self.knowledge, self.nodes = knowledge, nodes

    def run(self, full: bool) -> Steps[None]:
        knowledge = self.knowledge
        pairs = {suspect.nodes for suspect in knowledge.suspects if suspect.kind == PAIR}
        trials: dict[Edge, list[Trial]] = {}
        for edges in mesh.rounds(self.nodes, sweep_offsets(len(self.nodes), full)):
            requests = [
                TrialRequest(SWEEP, edge) for edge in edges if not {edge, edge[::-1]} & pairs
            ]
            trials |= {trial.test.nodes: [trial] for trial in (yield requests) if trial}
        # A failed path is tried again, and a third time if it then passes.
        for _ in range(2):
            again = [edge for edge, of in trials.items() if is_failed(of[0]) and not _is_firm(of)]
            for trial in (yield [TrialRequest(SWEEP, edge) for edge in again]):
                if trial:
                    trials[trial.test.nodes].append(trial)
        trials = {edge: of for edge, of in trials.items() if not {*edge} & knowledge.lost}
        if trials and all(map(_is_firm, trials.values())):
            failed = [trial for of in trials.values() for trial in of]
            evidence = "they pass together, and no plain path works between any two of them "
            evidence += f"{cite_trials(failed)}{with_cause(failed[0].outcome.cause)}"
            knowledge.suspect(SCALE, self.nodes, evidence)
            return
        passed_once = [of[0] for of in trials.values() if any(t.outcome.ok for t in of)]
        yield from self._find_packet_loss(passed_once)
        excluded = knowledge.excluded()
        trials = {edge: of for edge, of in trials.items() if not {*edge} & excluded}
        unreached: dict[str, set[str]] = {}
        for finding in reach.attribute(
            reach.ReachAttempt(edge[0], edge[1], "", not _is_firm(of), of[0].outcome.cause)
            for edge, of in trials.items()
        ):
            if finding.kind != reach.PAIR:
                unreached[finding.node] = {*finding.peers}
            self._suspect_finding(finding, trials)
        yield from self._find_slow([of[0] for of in trials.values() if of[0].outcome.ok])
        # A node that failed to reach only faulty nodes is not suspected.
        faulty = knowledge.excluded() - unreached.keys()
        excused = {name for name, peers in unreached.items() if peers <= faulty}
        knowledge.remove(s for s in knowledge.suspects if {*s.nodes} <= excused)

    def _suspect_finding(
        self, finding: reach.ReachFinding, trials: Mapping[Edge, Sequence[Trial]]
    ) -> None:
        node, peers = finding.node, finding.peers
        edges = [edge for peer in peers for edge in ((peer, node), (node, peer))]
        failed = [trial for edge in edges for trial in trials.get(edge, ()) if is_failed(trial)]
        tests, cause = cite_trials(failed), with_cause(finding.cause)
        if finding.kind == reach.PAIR:
            (peer,) = peers
            back = {True: "; the way back works", False: "; nor the way back", None: ""}
            evidence = f"{node} does not reach {peer} {tests}{cause}{back[finding.back]}"
            self.knowledge.suspect(PAIR, (node, peer), evidence)
            return
        verb = {
            reach.TARGET: "is not reached by",
            reach.SOURCE: "does not reach",
            reach.BOTH: "neither reaches nor is reached by",
        }[finding.kind]
        evidence = f"{verb} {len(peers)} of {finding.tried} others: {join_names(peers)}"
        self.knowledge.suspect(NODE, [node], f"{evidence} {tests}{cause}")

    def _find_packet_loss(self, trials: Sequence[Trial]) -> Steps[None]:
        """Suspect nodes that lose packets, on the way from them or to them, by the sender's
        retransmits. Retrials with no other test beside them have to confirm it.
        """
        for place, direction in enumerate(("from", "to")):
            counts = defaultdict[str, list[int]](list)
            for trial in trials:
                counts[trial.test.nodes[place]].append(trial.outcome.retransmits)
            means = {name: statistics.fmean(of) for name, of in counts.items()}
            usual = statistics.median(means.values()) if means else 0.0
            lossy = [
                name
                for name, of in counts.items()
                if means[name] >= max(_RETRANSMITS, _RETRANSMITS_TIMES * usual)
                and 2 * sum(count > 0 for count in of) >= len(of)
            ]
            for name in sorted(lossy, key=lambda name: -means[name]):
                out = {*lossy} | self.knowledge.excluded() | self.knowledge.partners(name)
                peers = [peer for peer in counts if peer not in out][:2]
                if len(peers) == 2:
                    evidence = yield from self._confirm_loss(name, peers, place, direction)
                    if evidence:
                        self.knowledge.suspect(NODE, [name], evidence)

    def _confirm_loss(
        self, name: str, peers: Sequence[str], place: int, direction: str
    ) -> Steps[str]:
        """The evidence that this node loses packets, or ""."""
        edges = [(peer, name) if place else (name, peer) for peer in peers]
        suspected, good = yield from take_turns(
            edges, (peers[0], peers[1]), SWEEP, lambda _, good: len(good) < _RETRANSMITS_RETRIALS
        )
        if not good:
            return ""
        count = sum(trial.outcome.retransmits for trial in suspected)
        usual = sum(trial.outcome.retransmits for trial in good)
        shown = sum(is_failed(trial) or trial.outcome.retransmits > 0 for trial in suspected)
        limit = max(len(suspected) * _RETRANSMITS, _RETRANSMITS_TIMES * usual)
        if 2 * shown <= len(suspected) or count < limit:
            return ""
        return (
            f"packets are lost on the way {direction} it: {count} TCP segments sent again in "
            f"{join_names(peers)}'s turns with it {cite_trials(suspected)}, {usual} between "
            f"these {cite_trials(good)}"
        )

    def _find_slow(self, trials: Sequence[Trial]) -> Steps[None]:
        """Suspect nodes, then pairs, with slow sweeps that retrials confirm."""
        knowledge, outcomes = self.knowledge, defaultdict[str, list[SmokeOutcome]](list)
        good = [trial for trial in trials if not {*trial.test.nodes} & knowledge.excluded()]
        for trial in good:
            for name in trial.test.nodes:
                outcomes[name].append(trial.outcome)
        median, medians = statistics.median, dict[str, SmokeOutcome]()
        for name, of in outcomes.items():
            ms, gbps = median(outcome.ms for outcome in of), median(outcome.gbps for outcome in of)
            medians[name] = SmokeOutcome(True, ms=ms, gbps=gbps)
        usual_gbps = quartile((trial.outcome.gbps for trial in good), 3)
        usual_ms = quartile((trial.outcome.ms for trial in good), 1)
        slow = [name for name in medians if looks_slow(medians[name], usual_gbps, usual_ms)]
        fast = [name for name in medians if name not in slow]
        for name in sorted(slow, key=lambda name: medians[name].gbps):
            peers = [peer for peer in fast if peer not in knowledge.partners(name)][:2]
            if len(peers) == 2:
                edges = [(name, peer) for peer in peers]
                evidence = yield from retry_alternately(edges, tuple(peers), SWEEP)
                if evidence:
                    knowledge.suspect(NODE, [name], evidence)

        def is_slow_pair(trial: Trial | None) -> bool:
            if trial is None:
                return False
            ends = [medians[name] for name in trial.test.nodes]
            gbps, ms = min(end.gbps for end in ends), max(end.ms for end in ends)
            return looks_slow(trial.outcome, gbps, ms)

        excluded = knowledge.excluded()
        pairs = [t.test.nodes for t in good if not {*t.test.nodes} & excluded and is_slow_pair(t)]
        again = yield [TrialRequest(SWEEP, pair) for pair in pairs]
        for trial in [t for t in again if t and is_slow_pair(t)][:_MAX_SLOW_PAIRS]:
            pair = trial.test.nodes
            out = {*pair} | knowledge.excluded() | knowledge.partners(pair[1])
            able = (name for name in fast if name not in out and (name, pair[1]) not in pairs)
            peer = next(able, None)
            if peer is not None:
                evidence = yield from retry_alternately([pair], (peer, pair[1]), SWEEP)
                if evidence:
                    knowledge.suspect(PAIR, pair, evidence)

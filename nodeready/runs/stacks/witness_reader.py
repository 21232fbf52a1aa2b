"""Reads the witnesses of a job: the flight recorder, logs, RAS, GPUs, network and kernel."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nodeready.agent.witnesses import nccl_errors
from nodeready.agent.witnesses.gpus import WitnessedGpus
from nodeready.agent.witnesses.kernel_log import KernelMessage
from nodeready.agent.witnesses.nccl_errors import CAUSE, FOLLOWS, LOST_PEER, NOTE, VICTIM
from nodeready.agent.witnesses.nccl_log import NcclRank
from nodeready.core.text import counted
from nodeready.runs.stacks.collective_lag import CollectiveReader
from nodeready.runs.stacks.evidence import (
    MAX_LINE,
    MAX_NAME,
    Evidence,
    KeptLog,
    RankPlace,
    WitnessReport,
    ranks_of,
)
from nodeready.subjects.environment_rules import EnvironmentFinding, RankEnvironment, judge
from nodeready.subjects.gpus import xids

# --- What NCCL says, compared over the ranks of a job: who differs, and the errors. Pure.

#: The order of errors by role: what a reader wants first.
ROLES = (CAUSE, VICTIM, FOLLOWS, NOTE)


class PlacedRank(NamedTuple):
    """A rank of a job and what NCCL says about it."""

    node: str
    rank: int | None  # global; None: unknown
    nccl: NcclRank


class NcclDifference(NamedTuple):
    """Ranks that differ from most of their peers in one fact."""

    fact: str  # of `FACTS`: ``network``
    value: str  # theirs, and that of most ranks
    usual: str  # likewise
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]

    @property
    def line(self) -> str:
        """``network Socket, its peers IB``"""
        pronoun = "its" if len(self.ranks or self.nodes) == 1 else "their"
        return f"{FACTS[self.fact]} {self.value}, {pronoun} peers {self.usual}"


class FoldedError(NamedTuple):
    """One kind of error over all ranks."""

    meaning: nccl_errors.NcclMeaning
    text: str  # the line of the first rank
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    peers: tuple[str, ...]  # the named peers, the most frequent first


#: The facts that are compared, the gravest first, in words.
FACTS: Mapping[str, str] = {
    "network": "network", "provider": "libfabric's provider", "gdr": "GPUDirect RDMA",
    "gid": "GID index", "state": "communicator", "completed": "last collective",
    "version": "version", "hcas": "HCAs:", "interface": "interface", "channels": "channels:",
    "tuner": "tuner", "profiler": "profiler",
}  # fmt: skip
_STATES = {"init": "not complete", "ready": "complete", "aborted": "aborted"}


def _value(fact: str, nccl: NcclRank) -> str:
    """A fact of a rank in a word; "": the log does not say it."""
    if fact == "hcas":
        # Ranks of one node may use different HCAs: their number and kind is compared.
        kinds = Counter(hca.rpartition("/")[2] for hca in nccl.hcas)
        return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    if fact == "gdr":
        return "" if nccl.gdr is None else "on" if nccl.gdr else "off"
    if fact == "state":
        return _STATES.get(nccl.state, "")
    value = getattr(nccl, fact)
    return "" if value is None else str(value)


def differences(ranks: Iterable[PlacedRank]) -> tuple[NcclDifference, ...]:
    """The ranks that differ from most, fact by fact; only where more than half are equal."""
    placed = list(ranks)
    rows = []
    for fact in FACTS:
        members: dict[str, list[PlacedRank]] = {}
        for rank in placed:
            if value := _value(fact, rank.nccl):
                members.setdefault(value, []).append(rank)
        total = sum(map(len, members.values()))
        usual = max(members, key=lambda value: len(members[value]), default="")
        if len(members) < 2 or 2 * len(members[usual]) <= total:
            continue
        for value, group in members.items():
            if value != usual:
                rows.append(NcclDifference(fact, value, usual, _numbers(group), _nodes(group)))
    return tuple(rows)


def fold_errors(ranks: Iterable[PlacedRank]) -> tuple[FoldedError, ...]:
    """The errors of all ranks, equal kinds once, causes first, then the rarest."""
    members: dict[str, list[PlacedRank]] = {}
    texts: dict[str, str] = {}
    peers: dict[str, Counter[str]] = {}
    for rank in ranks:
        for error in rank.nccl.errors:
            members.setdefault(error.key, []).append(rank)
            texts.setdefault(error.key, error.text)
            peers.setdefault(error.key, Counter()).update([error.peer] if error.peer else [])
    errors = [
        FoldedError(
            nccl_errors.by_key(key), texts[key], _numbers(group), _nodes(group),
            tuple(peer for peer, _ in peers[key].most_common(8)),
        )
        for key, group in members.items()
    ]  # fmt: skip
    errors.sort(key=lambda error: (ROLES.index(error.meaning.role), len(error.ranks)))
    return tuple(errors)


#: A call of a collective, as in `NcclRank.calls`.
Call = tuple[int, int, str]


def diverging(calls_of: Mapping[int, Sequence[Call]]) -> Iterator[tuple[str, list[int]]]:
    """Where the collectives of few ranks first differ from those of most, in words, and these
    ranks; else the few that have called fewer. calls_of: rank -> its last calls in a communicator
    """
    ranks_by_call: dict[tuple[int, int], dict[str, list[int]]] = {}
    for rank, calls in calls_of.items():
        for operation, place, text in calls:
            texts = ranks_by_call.setdefault((operation, place), {})
            texts.setdefault(text, []).append(rank)
    for (operation, _), texts in sorted(ranks_by_call.items()):
        usual = max(texts, key=lambda text: len(texts[text]))
        if len(texts) > 1:
            if 2 * len(texts[usual]) > sum(map(len, texts.values())):
                for text, ranks in texts.items():
                    if text != usual:
                        yield f"called {text} as opCount {operation:x}, its peers {usual}", ranks
            # All later calls may differ because of this one.
            return
    last = {rank: calls[-1] for rank, calls in calls_of.items()}
    farthest = max(last.values(), default=None, key=lambda call: call[:2])
    behind = [rank for rank in last if farthest and last[rank][:2] < farthest[:2]]
    if farthest and 2 * len(behind) < len(last):
        for rank in behind:
            operation, _, text = last[rank]
            peers = f"its peers {farthest[2]} as {farthest[0]:x}"
            yield f"called last {text} as opCount {operation:x}, {peers}", [rank]


def _numbers(group: Iterable[PlacedRank]) -> tuple[int, ...]:
    return tuple(sorted({rank.rank for rank in group if rank.rank is not None}))


def _nodes(group: Iterable[PlacedRank]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(rank.node for rank in group))


# --- What the witnesses say.


class WitnessReader(CollectiveReader):
    def own_logs(self, logs: Mapping[int, KeptLog]) -> None:
        """Errors at the end of a rank's log; few logs that ended long before the rest."""
        errors = {rank: log.error for rank, log in logs.items() if log.error}
        first = {rank: error for rank, error in errors.items() if not _CONSEQUENCE.search(error)}
        for rank, error in errors.items():
            # An error caused by the end of another rank says nothing about this one.
            weight = 1 if rank in first or not first else 0
            self.add_statement("logs", f"its log ends in an error: {error}", [rank], weight=weight)
        self.report.raised = first
        if len(logs) < 4 or self.moving:
            return
        shapes = {rank: _NUMBERS.sub("0", log.last) for rank, log in logs.items() if log.last}
        usual, count = Counter(shapes.values()).most_common(1)[0] if shapes else ("", 0)
        if 4 * count >= 3 * len(logs):
            for rank, shape in shapes.items():
                if shape != usual:
                    self.report.last[rank] = logs[rank].last
                    text = f"its last line is unlike the others': {logs[rank].last}"
                    self.add_statement("logs", text, [rank])
        order = sorted(logs, key=lambda rank: -logs[rank].age_s)
        few = max(1, len(order) // 8)
        ages = [logs[rank].age_s for rank in order]
        gaps = [age - next_age for age, next_age in itertools.pairwise(ages[: few + 1])]
        at = max(range(len(gaps)), key=gaps.__getitem__)
        # The remaining logs must stop together; otherwise ranks write at irregular times.
        if gaps[at] >= _SILENT_S and ages[at + 1] - ages[-1] <= gaps[at] / 2:
            text = f"wrote last {gaps[at]} s before the other ranks"
            self.add_statement("logs", text, order[: at + 1], weight=1)

    def nccl(self) -> None:
        """Read what NCCL says in the logs: the ranks that differ from their peers, and errors."""
        placed = [
            PlacedRank(place.node, place.rank, log.nccl)
            for place in self.places
            if place.rank in self.all_ranks
            and (log := self.evidence.logs.get(place[:2]))
            and log.nccl
        ]
        for difference in differences(placed):
            weight = 1 if difference.fact in _NCCL_SIGNS and not self.moving else 0
            self.add_statement("logs", f"NCCL: {difference.line}", difference.ranks, weight=weight)
        choices: dict[tuple[str, ...], list[int]] = {}
        for rank in placed:
            if rank.nccl.choices and rank.rank is not None:
                choices.setdefault(rank.nccl.choices, []).append(rank.rank)
        for names, ranks in choices.items():
            self.add_statement("logs", f"NCCL chose {', '.join(names)}", ranks)
        calls_of = {
            place.rank: calls
            for place in self.places
            if place.rank in self.all_ranks and (calls := self.evidence.nccl_calls.get(place[:2]))
        }
        # A smaller communicator has other calls in each of its groups.
        if all(calls.calls_size >= len(self.all_ranks) for calls in calls_of.values()):
            for text, ranks in diverging({rank: row.calls for rank, row in calls_of.items()}):
                weight = 0 if self.moving else 1
                self.add_statement("logs", f"NCCL: {text}", ranks, weight=weight)
        for error in fold_errors(placed):
            role, key = error.meaning.role, error.meaning.key
            # The reports of the watchdog and of gloo have the lost peers.
            if role != NOTE and key not in LOST_PEER:
                # A lost peer says nothing against the rank that lost it.
                weight = 1 if role == CAUSE and not self.moving else 0
                peer = f" (peer {error.peers[0]})" if error.peers else ""
                step = f"; {error.meaning.step}" if role == CAUSE else ""
                text = f"NCCL: {error.meaning.meaning}{peer}{step} [{key}]"
                self.add_statement("logs", text, error.ranks, weight=weight)

    # --- GPUs, ports, the kernel.

    def gpus(self) -> None:
        spins: list[int] = []
        works: set[int] = set()
        idle: list[int] = []
        for node in self.nodes:
            gpus = self.evidence.gpus.get(node, WitnessedGpus())
            if gpus.absent:
                self.absent["gpu"][gpus.absent].append(node)
            for device in gpus.devices:
                sm, power, limit_w = device.sm_percent, device.power_w, device.limit_w
                owners = (self.rank_of.get((node, pid)) for pid in device.pids)
                ranks = [rank for rank in owners if rank is not None]
                for xid in device.xids:
                    self._xid("gpu", xid, node, ranks)
                # A GPU on which only other processes compute belongs to another job.
                if device.throttle and (ranks or not device.pids):
                    reason = ", ".join(device.throttle)[:MAX_LINE]
                    text = f"the hardware slows a GPU down: {reason}"
                    self.add_statement("gpu", text, ranks, [node], weight=1)
                if sm is None or not ranks:
                    continue
                low = not power or not limit_w or power <= 0.6 * limit_w
                if sm >= 90 and (device.memory_percent or 0) <= 5 and low:
                    spins += ranks
                elif sm <= 5:
                    idle += ranks
                elif sm >= 50:
                    works.update(ranks)
        if spins:
            text = "SM busy, memory idle, low power: a kernel that spins in a collective"
            self.add_statement("gpu", text, spins, weight=1, against=True)
        few = max(1, len(spins) // 3)
        if idle and len(idle) <= few and spins:
            text = f"its GPU is idle while those of {ranks_of(spins)} spin in a collective"
            self.add_statement("gpu", text, idle, weight=1)
        elif idle:
            self.add_statement("gpu", "its GPU is idle", idle)
        if works and len(works) <= few and spins:
            text = f"its GPU computes while those of {ranks_of(spins)} spin in a collective"
            self.add_statement("gpu", text, works, weight=1)
        elif works:
            self.add_statement("gpu", GPU_COMPUTES, works)

    def _xid(self, name: str, code: int, node: str, ranks: Sequence[int], when: str = "") -> None:
        xid = xids.XIDS.get(code)
        meaning = xid.meaning if xid else "unknown"
        action = xid.action if xid else xids.MONITOR
        grave = action in (xids.ISOLATE, xids.REBOOT, xids.RESET)
        weight = 2 if grave else 1 if action == xids.APPLICATION else 0
        text = f"Xid {code} {meaning}{when} ({action})"
        self.add_statement(name, text, ranks, [node], weight=weight)

    def network(self) -> None:
        total, is_measured = 0.0, False
        quiet: dict[str, list[str]] = defaultdict(list)
        states: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        rates: dict[str, dict[float, list[str]]] = defaultdict(lambda: defaultdict(list))
        for node in self.nodes:
            network = self.evidence.networks.get(node)
            if network is None:
                continue
            if network.absent:
                self.absent["network"][network.absent].append(node)
                continue
            rdma = any(port.kind in _RDMA for port in network.ports)
            carry, silent = 0, []
            for port in network.ports:
                moved = max(0, port.received) + max(0, port.sent)
                states[port.name[:MAX_NAME]][port.state[:MAX_NAME]].append(node)
                if port.gbps and port.state == "up":
                    rates[port.name[:MAX_NAME]][port.gbps].append(node)
                if port.errors:
                    rose = ", ".join(f"{name[:MAX_NAME]} +{by}" for name, by in port.errors[:4])
                    fatal = any("link_downed" in name for name, _ in port.errors)
                    text = f"errors of {port.name[:MAX_NAME]} rise: {rose}"
                    self.add_statement("network", text, nodes=[node], weight=2 if fatal else 1)
                if port.state != "up" or (rdma and port.kind not in _RDMA):
                    continue
                carry += moved
                silent += [port.name[:MAX_NAME]] if not moved else []
            if 0 < network.seconds < _MAX_SAMPLE_S and network.ports:
                is_measured = True
                total += carry / network.seconds
                if silent:
                    names = ", ".join(silent[:8])
                    quiet[f"no bytes on {names} in {network.seconds:.0f} s"].append(node)
                elif carry / network.seconds >= MOVING_BYTES_PER_S:
                    text = f"bytes move on its {'RDMA ' if rdma else ''}ports"
                    self.add_statement("network", text, nodes=[node])
        for text, nodes in quiet.items():
            self.add_statement("network", text, nodes=nodes)
        self._port_differences(states, rates)
        # Ranks of one node communicate by its memory; its ports carry other traffic.
        if is_measured and len(self.nodes) > 1:
            self.report.bytes_per_s = total

    def _port_differences(
        self, states: Mapping[str, dict[str, list[str]]],
        rates: Mapping[str, Mapping[float, list[str]]],
    ) -> None:  # fmt: skip
        """Note ports that are down or slower on few nodes: name -> state, or Gb/s -> the nodes."""
        for name, by_state in states.items():
            up = len(by_state.pop("up", []))
            for state, nodes in by_state.items():
                # A port that is down nearly everywhere is not connected.
                if up > len(nodes):
                    text = f"port {name} is {state}, and up on {counted(up, 'other node')}"
                    self.add_statement("network", text, nodes=nodes, weight=1)
        for name, by_rate in rates.items():
            usual = max(by_rate, key=lambda rate: (len(by_rate[rate]), rate))
            for rate, nodes in by_rate.items():
                if rate < usual and len(nodes) < len(by_rate[usual]):
                    peers = counted(len(by_rate[usual]), "other node")
                    text = f"port {name} runs at {rate:g} Gb/s, and at {usual:g} on {peers}"
                    self.add_statement("network", text, nodes=nodes, weight=1)

    def kernel(self) -> None:
        for node, log in self.evidence.kernels.items():
            if log.absent and node in self.ranks_of_node:
                self.absent["kernel"][log.absent].append(node)
            for message in log.messages:
                self._message(message, node)

    def _message(self, message: KernelMessage, node: str) -> None:
        rank = self.rank_of.get((node, message.pid)) if message.pid else None
        ranks = [rank] if rank is not None else []
        when = f" {age_text(message.ago_s)} ago"
        code = _XID.search(message.text) if message.kind == "xid" else None
        if code:
            self._xid("kernel", int(code[1]), node, ranks, when)
            return
        words = _MESSAGES.get(message.kind, message.kind[:MAX_NAME])
        named = f" (pid {message.pid})" if message.pid else ""
        weight = 2 if message.kind == "oom" or ranks else 1
        if message.kind == "memory" and not ranks:
            weight = 0
        text = f"{words}{named}{when}: {message.text[:MAX_LINE]}"
        self.add_statement("kernel", text, ranks, [node], weight=weight)

    # --- The environment.

    def environment(self) -> None:
        for place in self.places:
            read = self.evidence.environments.get((place.node, place.pid))
            if read and read.absent:
                self.absent["environment"][read.absent].append(place)
        findings = judge_environments(self.evidence, self.places)
        for finding in findings:
            text, subjects = f"{finding.text}; {finding.advice}", (finding.ranks, finding.nodes)
            self.add_statement("environment", text, *subjects, weight=finding.weight)
        self.report.environment = tuple(finding for finding in findings if finding.weight > 1)


#: Minimum seconds that a log must have ended before the rest to be reported.
_SILENT_S = 60
#: Bytes per second of all ports above which the job moves data: heartbeats and ssh are below.
MOVING_BYTES_PER_S = 1e6
#: Seconds between two samples of the ports from which on the time is nonsense.
_MAX_SAMPLE_S = 1e6
_RDMA = ("infiniband", "roce")
#: Statement about a working GPU.
GPU_COMPUTES = "its GPU computes"
#: Errors caused by the end of another rank: connections of gloo and NCCL, the launcher's signal.
_CONSEQUENCE = re.compile(
    r"(?i)connection (?:closed|reset|refused|was)|broken pipe|reset by peer"
    r"|remote (?:process|peer)|abort|SIGTERM|Signal(?:s\.SIGTERM)? 15|ChildFailedError"
    r"|timed? ?out|failed on Socket|NCCL error|ncclRemoteError|EOFError|end of file"
)
#: The differences between ranks that are a sign.
_NCCL_SIGNS = ("network", "gdr", "state", "completed", "version")
_NUMBERS = re.compile(r"\d+(?:\.\d+)?")
_XID = re.compile(r"\bXid\b\s*(?:\([^)]*\))?:\s*(\d{1,4})\b")
_MESSAGES = {
    "oom": "killed for memory", "xid": "Xid", "link": "link",
    "filesystem": "file system", "hung": "hung in the kernel", "memory": "memory error",
    "segfault": "crashed",
}  # fmt: skip


def age_text(seconds: int) -> str:
    """A duration, as in ``40 s``, ``12 min``, ``3 h``."""
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


def judge_environments(
    evidence: Evidence, places: Iterable[RankPlace]
) -> tuple[EnvironmentFinding, ...]:
    """What is wrong with the environment of these ranks."""
    # Ranks with equal variables share them.
    variables = {id(read): dict(read.variables) for read in evidence.environments.values()}
    ranks = []
    for place in places:
        read = evidence.environments.get((place.node, place.pid))
        if read and not read.absent:
            identity = (place.rank, place.local_rank, read.cpus, read.contained)
            ranks.append(RankEnvironment(place.node, variables[id(read)], *identity))
    nodes = dict.fromkeys(rank.node for rank in ranks)
    facts = {node: evidence.environment_facts[node] for node in nodes
             if node in evidence.environment_facts}  # fmt: skip
    versions = {node_facts.nccl for node_facts in facts.values()}
    unknown = "" if "" in versions or not versions else None
    nccl = min(filter(None, versions), default=unknown)
    return judge(ranks, facts, nccl=nccl)


def read_witnesses(evidence: Evidence, places: Iterable[Any], moving: bool) -> WitnessReport:
    """The reports of all witnesses on the job with these processes (node, pid, rank)."""
    if not evidence:
        return WitnessReport()
    reader = WitnessReader(evidence, [RankPlace(*place[:4]) for place in places], moving)
    reader.recorder()
    reader.own_logs(reader.logs())
    for read in (reader.nccl, reader.ras, reader.gpus, reader.network, reader.kernel):
        read()
    reader.environment()
    answers = {
        "logs": evidence.logs, "flight_recorder": evidence.recordings, "nccl_ras": evidence.ras,
        "gpu": evidence.gpus, "network": evidence.networks, "kernel": evidence.kernels,
        "environment": evidence.environments,
    }  # fmt: skip
    reader.report.witnesses = reader.witnesses(name for name, answer in answers.items() if answer)
    return reader.report

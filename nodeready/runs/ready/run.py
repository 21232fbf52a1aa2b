"""Run the proofs and take the snapshots of all nodes in parallel, until one deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

from nodeready.agent import asking
from nodeready.agent.asking import INTERRUPT, Conversation, Key, Transport, collect, request
from nodeready.agent.proofs.mesh import CONNECT_S, TOKEN_S, Listening, MeshRound
from nodeready.agent.snapshots import take_snapshot
from nodeready.core import wire
from nodeready.core.base import Unknown
from nodeready.core.outcome import INTERRUPTED, LATE, SUDO, UNREACHABLE, Gap, Outcome
from nodeready.core.policy import Policy
from nodeready.fleet.transport.channels import Channels
from nodeready.runs.ready import mesh
from nodeready.runs.ready.rdma import run_rdma
from nodeready.runs.ready.reach import reach
from nodeready.subjects import snapshot
from nodeready.subjects.debug_tools.facts import PY_SPY
from nodeready.subjects.proof import facts as proof
from nodeready.subjects.proof.active import with_medians
from nodeready.subjects.proof.facts import Mesh, Peers, ProofConfig, Proved, RdmaBandwidth
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.snapshot import Snapshot

MAX_PEERS = 4  # peers that a node tries by ssh: a handshake costs both ends 100 ms of CPU
_MARGIN_S = 2  # seconds at the end of the time for the last answers to arrive


@dataclass(frozen=True)
class WantedProofs:
    session: tuple[str, ...] = tuple(proof.SESSION)  # names in facts.SESSION
    mesh: bool = True  # connect the nodes over the job's ports
    full: bool = False  # connect every node with every other node, not only with some
    collective: bool = False  # run a collective over all nodes
    history: bool = True  # look for earlier failures in the memory
    active: tuple[str, ...] = ()  # names in facts.ACTIVE
    level: int = 1  # of dcgmi diag
    rdma: bool = False  # write between the nodes' RDMA ports

    @classmethod
    def of(cls, checks: Iterable[str], *, full: bool = False, level: int = 1) -> WantedProofs:
        check_ids = {*checks}
        needed = {check.proof for check in SUBJECTS["proof"].checks if check.id in check_ids}
        session = tuple(name for name in proof.SESSION if name in needed)
        active = tuple(name for name in proof.ACTIVE if name in needed)
        further, rdma = (proof.COLLECTIVE in needed, proof.HISTORY in needed), proof.RDMA in needed
        return cls(session, proof.MESH in needed, full, *further, active, level, rdma)


ACTIVE_MAIN = "nodeready.agent.proofs.active"  # the program of the active tests
_SNAPSHOT, _PROOFS = "snapshot", "proofs"  # the two conversations with a node


@dataclass(frozen=True)
class ReadyTask:
    transport: Transport
    policies: Mapping[str, Policy]  # node -> its policy
    subjects: tuple[str, ...]  # the subjects to probe
    proofs: WantedProofs
    budget_s: int  # the user's budget, for messages
    deadline: float  # the moment of time.monotonic() at which everything has ended
    inventory_addresses: Mapping[str, str] = field(default_factory=dict)  # address -> its node
    # runs the smoke test of these nodes until the deadline
    collective: Callable[[tuple[str, ...]], Mapping[str, proof.ProvedCollective]] | None = None
    # node -> its earlier failures; None: no memory
    histories: Mapping[str, proof.ProvedHistory] | None = None

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def peers(self) -> dict[str, tuple[str, ...]]:
        """The nodes that each node tries by ssh; {} if no check needs them."""
        if "peers" not in self.proofs.session:
            return {}
        names = list(self.policies)
        return mesh.peers_of(names, mesh.ring_and_skips(len(names))[:MAX_PEERS])


def prove(
    task: ReadyTask,
    on_found: Callable[[str, str], object] = lambda name, part: None,
    password: Callable[[list[str]], bool] = lambda names: False,
) -> list[Outcome[Snapshot]]:
    """Probe and prove every node; the proofs are the subject "proof" of each snapshot.

    on_found: gets a node's name and "snapshot" or "proofs", as they come
    password: asks for the sudo password of these nodes; whether there is one now

    An observation that is missing at the deadline is Unknown.
    """
    proving = _Proving(task, on_found)
    proving.converse(task.policies)
    asking = [o.node for o in proving.snapshots() if o.gap and o.gap.kind == SUDO]
    if asking and not task.transport.interrupted and password(asking):
        proving.waiting |= {*asking}
        proving.converse(asking)
    # After the snapshot, which would show the tests as a job's load. The collective comes after
    # all other proofs, which would slow it down and use the same ports.
    tested, measured = proving.active_tests(), proving.rdma()
    return proving.with_proofs(proving.collectives(), tested, measured)


class _Proving:
    """The conversations of one task, and what they have shown so far."""

    def __init__(self, task: ReadyTask, on_found: Callable[[str, str], object]) -> None:
        self.task, self.on_found, self.peers = task, on_found, task.peers
        self.results: dict[Key, Outcome[Any]] = {}
        self.meshes: dict[str, Mesh | Unknown] = {}
        self.waiting = set(task.policies)

    def converse(self, names: Iterable[str]) -> None:
        task = self.task
        conversations: dict[Key, Conversation[Any]] = {}
        for name in names:
            policy = task.policies[name]
            conversations[name, _SNAPSHOT] = take_snapshot(
                name, policy, task.subjects, task.budget_s, nonce=task.transport.nonce
            )
            conversations[name, _PROOFS] = self._prove_node(name)
        self.results |= collect(task.transport, conversations, self._add, task.deadline)

    def _add(self, key: Key, outcome: Outcome[Any]) -> None:
        name, part = cast("tuple[str, str]", key)
        self.results[key] = outcome
        self.on_found(name, part)
        if part == _SNAPSHOT:
            self.waiting.discard(name)
            if not self.waiting and not self.task.transport.interrupted:
                # The proofs on the nodes continue meanwhile.
                self._connect()

    def _config(self, **values: Any) -> ProofConfig:
        limit_s = max(1, int(self.task.left_s) - _MARGIN_S)
        nonce = asking.new_nonce()
        return ProofConfig(nonce, self.task.transport.tag, limit_s=limit_s, **values)

    def _prove_node(self, name: str) -> Conversation[Proved]:
        policy = self.task.policies[name]
        config = self._config(
            user=policy.job_user, proofs=self.task.proofs.session, peers=self.peers.get(name, ()),
            py_spy=PY_SPY if policy.py_spy_version else "", step=True,
        )  # fmt: skip
        answer = yield request(name, "nodeready.agent.proofs.program", config)
        if answer.gap and not answer.stdout:
            is_late = answer.gap.kind == LATE
            return proof.all_unknown(proof.UNFINISHED if is_late else answer.gap.reason, config)
        return proof.read(answer.stdout, config)

    def active_tests(self) -> Mapping[str, Proved]:
        """Node -> what the active tests of its GPUs showed, beside those of its peers."""
        task = self.task
        if not task.proofs.active or task.transport.interrupted:
            return {}
        reached = self._reached()
        conversations: dict[Key, Conversation[Proved]] = {n: self._test_node(n) for n in reached}
        outcomes = collect(task.transport, conversations, deadline=task.deadline)
        return with_medians({str(name): o.value for name, o in outcomes.items() if o.value})

    def _test_node(self, name: str) -> Conversation[Proved]:
        proofs = self.task.proofs
        config = self._config(proofs=proofs.active)
        answer = yield request(name, ACTIVE_MAIN, config, level=proofs.level)
        return proof.read(answer.stdout, config)

    def rdma(self) -> Mapping[str, RdmaBandwidth | Unknown]:
        """Node -> the bandwidth between its RDMA ports and those of its neighbours."""
        task = self.task
        if not task.proofs.rdma or task.transport.interrupted:
            return {}
        ports = {name: task.policies[name].port_range for name in self._reached()}
        return run_rdma(task.transport, ports, task.deadline - _MARGIN_S / 2)

    def snapshots(self) -> list[Outcome[Snapshot]]:
        """The snapshot of every node; without an answer within the budget, that error."""
        task, outcomes = self.task, []
        reason = f"no answer within the budget of {task.budget_s} s"
        for name in task.policies:
            outcome = self.results.get((name, _SNAPSHOT)) or Outcome[Snapshot](name, gap=INTERRUPT)
            if outcome.gap and outcome.gap.kind == LATE:
                # The node is connected: every subject is unknown.
                unknown = snapshot.unknown_snapshot(reason, snapshot.probes(task.subjects))
                outcome = Outcome(name, unknown)
            elif outcome.gap == Gap(UNREACHABLE, asking.LATE_WORDS):
                outcome = replace(outcome, gap=Gap(UNREACHABLE, reason))
            outcomes.append(outcome)
        return outcomes

    def _reached(self) -> tuple[str, ...]:
        return tuple(outcome.node for outcome in self.snapshots() if outcome.value)

    def _connect(self) -> None:
        task = self.task
        self.meshes.clear()
        by_ports: dict[tuple[int, int], list[str]] = {}
        for name in self._reached() if task.proofs.mesh else ():
            by_ports.setdefault(task.policies[name].port_range, []).append(name)
        for ports, names in by_ports.items():
            self.meshes |= run_mesh(
                task.transport, names, ports, task.deadline - _MARGIN_S / 2, full=task.proofs.full,
                inventory_addresses=task.inventory_addresses,
            )  # fmt: skip

    def collectives(self) -> Mapping[str, proof.ProvedCollective]:
        task, names = self.task, self._reached()
        if not task.proofs.collective or task.collective is None or task.transport.interrupted:
            return {}
        if len(names) < 2:
            return dict.fromkeys(names, proof.ProvedCollective(1))
        return task.collective(names)

    def with_proofs(
        self,
        collectives: Mapping[str, proof.ProvedCollective],
        tested: Mapping[str, Proved],
        measured: Mapping[str, RdmaBandwidth | Unknown],
    ) -> list[Outcome[Snapshot]]:
        """The snapshots with the subject "proof": proofs of each node, and between the nodes."""
        task, snapshots, session = self.task, self.snapshots(), self.task.proofs.session
        observed = {o.node: o.value for o in self.results.values() if isinstance(o.value, Proved)}
        tried = {
            name: _ordered_peers(proved.peers, self.peers.get(name, ()))
            for name, proved in observed.items()
            if isinstance(proved.peers, Peers)
        }
        reach_by_node = reach(tried, {outcome.node for outcome in snapshots if not outcome.value})
        late = Unknown(INTERRUPTED if task.transport.interrupted else proof.UNFINISHED)
        completed = []
        for outcome in snapshots:
            if outcome.value is None:
                completed.append(outcome)
                continue
            name = outcome.node
            proved = observed.get(name) or Proved(late, **dict.fromkeys(session, late))
            active = tested.get(name) or Proved(late, **dict.fromkeys(task.proofs.active, late))
            proofs: dict[str, Any] = {key: getattr(active, key) for key in proof.ACTIVE}
            if "peers" in session:
                unknown = proved.peers if isinstance(proved.peers, Unknown) else None
                proofs["reach"] = reach_by_node.get(name, unknown)
            if task.proofs.mesh:
                proofs["mesh"] = self.meshes.get(name, late)
            if task.proofs.collective:
                proofs["collective"] = collectives.get(name, late)
            if task.proofs.rdma:
                proofs["rdma_bandwidth"] = measured.get(name, late)
            if task.proofs.history and task.histories is not None:
                proofs["history"] = task.histories.get(name)
            subjects = {**outcome.value.subjects, "proof": replace(proved, **proofs)}
            completed.append(replace(outcome, value=replace(outcome.value, subjects=subjects)))
        return completed


def _ordered_peers(peers: Peers, names: tuple[str, ...]) -> Peers:
    """The node's answer, only about the peers that it was ordered to try."""
    run, ssh = peers.pdsh, tuple(attempt for attempt in peers.ssh if attempt.name in names)
    if run is not None:
        run = replace(run, targets=tuple(name for name in run.targets if name in names))
    return replace(peers, ssh=ssh, pdsh=run)


# --- The rounds between the nodes, over one program on each of them.


_MAIN = "nodeready.agent.proofs.mesh"  # the program on the node
_START_S = 20  # seconds for the program to start on a node: a Python, and a disk that may be cold
_ROUND_S = 8.0  # seconds of a round: the name, and time-outs of ports inside of the range
_MORE_S = CONNECT_S + TOKEN_S + 1  # for the last connection of a round, and the answer
_LONGER_S = 5  # seconds after the deadline for listeners: another program may take a free port


def run_mesh(
    transport: Transport,
    nodes: Iterable[str],
    ports: tuple[int, int],
    deadline: float,
    *,
    full: bool = False,
    inventory_addresses: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Mesh | Unknown]:
    """The mesh of each node on these ports, at the deadline at the latest.

    full: every node tries every other node; else the ring and skips that double
    inventory_addresses: address -> its node by the inventory

    Never raises for a node's fault; an interrupt also ends what runs on the nodes.
    """
    run = MeshRun(transport, tuple(nodes), ports, deadline, inventory_addresses)
    try:
        run.listen()
        run.rounds(full)
        # A node that died in the last round: its peers may have found closed ports there.
        run.channels.drop_dead()
    finally:
        run.channels.close()
    return run.results()


class MeshRun:
    def __init__(
        self,
        transport: Transport,
        nodes: tuple[str, ...],
        ports: tuple[int, int],
        deadline: float,
        inventory_addresses: Mapping[str, str],
    ) -> None:
        self.transport, self.nodes, self.ports = transport, nodes, ports
        self.channels = Channels(transport, deadline)
        self.inventory_addresses = inventory_addresses
        self.listening: dict[str, Listening] = {}
        self.mesh_rounds = mesh.Rounds(len(nodes), ports, {})
        self.round_count = 0

    def listen(self) -> None:
        """Start the program on every node; it listens before its first line."""
        ports = mesh.chosen_ports(*self.ports)
        limit_s = max(1, int(self.channels.left_s)) + _LONGER_S
        nonce = self.channels.nonce
        config = ProofConfig(nonce, self.transport.tag, limit_s=limit_s)

        def start(name: str) -> None:
            self.channels.start(request(name, _MAIN, config, mark=nonce, stdin=True, ports=ports))
            first_line = self.channels.read(name, "listening", Listening, _START_S)
            if first_line is not None:
                self.listening[name] = first_line

        self.channels.for_each(start, self.nodes)
        present = {name: self.listening[name] for name in self.nodes if name in self.listening}
        known_owners = mesh.known_owners(self.inventory_addresses, self.transport.ssh_peers())
        self.mesh_rounds = mesh.Rounds(len(self.nodes), self.ports, present, known_owners)

    def rounds(self, full: bool) -> None:
        names = list(self.mesh_rounds.ports)
        offsets = (mesh.full if full else mesh.ring_and_skips)(len(names))
        for pairs in mesh.rounds(names, offsets):
            self._round(dict(pairs))
        self._round(self.mesh_rounds.opposite_pairs())

    def _round(self, target_of: dict[str, str]) -> None:
        channels = self.channels
        if channels.left_s < _MORE_S or not target_of:
            return
        number, limit_s = self.round_count, min(_ROUND_S, channels.left_s - _MORE_S)
        self.round_count += 1

        def try_target(source: str) -> None:
            target = target_of[source]
            ports = self.mesh_rounds.ports_to_try(source, target)
            listening, addresses = self.listening[target], self.mesh_rounds.addresses[target]
            message = {
                "round": number, "target": target, "ports": ports, "addresses": addresses,
                "token": listening.token, "host": listening.host, "limit_s": limit_s,
            }  # fmt: skip
            channels.open[source].send_line(json.dumps(message, separators=(",", ":")))
            answer = channels.read(source, "round", MeshRound, limit_s + _MORE_S)
            if answer is None:
                return
            if (answer.number, answer.target) != (number, target):
                text = wire.shown(asdict(answer))
                channels.lose(source, "the answer makes no sense (another round)", text)
                return
            self.mesh_rounds.add(source, target, ports, answer)

        sources = [s for s, t in target_of.items() if s in channels.open and t in channels.open]
        channels.for_each(try_target, sources)
        for name in channels.lost:
            self.mesh_rounds.drop(name)
        self.mesh_rounds.skip_explained()

    def results(self) -> dict[str, Mesh | Unknown]:
        for name in self.channels.lost:
            self.mesh_rounds.drop(name)
        results: dict[str, Mesh | Unknown] = {**self.mesh_rounds.meshes(), **self.channels.lost}
        late = Unknown("did not finish in time")
        return {name: results.get(name, late) for name in self.nodes}

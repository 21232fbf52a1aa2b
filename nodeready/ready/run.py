"""Run the proofs and take the snapshots of all nodes in parallel, until one deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from nodeready.policy import Policy
from nodeready.ready import mesh
from nodeready.ready.mesh_run import run_mesh
from nodeready.ready.reach import reach
from nodeready.subjects import snapshot
from nodeready.subjects.base import Unknown
from nodeready.subjects.debug_tools.facts import PY_SPY
from nodeready.subjects.proof import facts as proof
from nodeready.subjects.proof.facts import (
    COLLECTIVE,
    HISTORY,
    MESH,
    SESSION,
    ProofConfig,
    Proved,
    ProvedCollective,
    ProvedHistory,
)
from nodeready.subjects.proof.peer_facts import Mesh, Peers
from nodeready.subjects.registry import SUBJECTS
from nodeready.transport.base import (
    INTERRUPTED,
    LATE,
    LATE_WORDS,
    SUDO,
    UNREACHABLE,
    Answer,
    Conversation,
    Failure,
    Key,
    Transport,
    collect,
    new_nonce,
    node_of,
    request,
)
from nodeready.transport.snapshots import SnapshotReply, take_snapshot

#: Peers that a node tries by ssh: a handshake costs both ends 100 ms of CPU.
MAX_PEERS = 4
#: Seconds at the end of the time for the last answers to arrive.
_MARGIN_S = 2


@dataclass(frozen=True)
class WantedProofs:
    """The proofs to make.

    session:    names in facts.SESSION
    mesh:       connect the nodes over the job's ports
    full:       connect every node with every other node, not only with some
    collective: run a collective over all nodes
    history:    look for earlier failures in the memory
    """

    session: tuple[str, ...] = tuple(SESSION)
    mesh: bool = True
    full: bool = False
    collective: bool = False
    history: bool = True

    @classmethod
    def of(cls, checks: Iterable[str], *, full: bool = False) -> WantedProofs:
        """The proofs that these checks need."""
        check_ids = {*checks}
        needed = {check.proof for check in SUBJECTS["proof"].checks if check.id in check_ids}
        session = tuple(name for name in SESSION if name in needed)
        return cls(session, MESH in needed, full, COLLECTIVE in needed, HISTORY in needed)


#: The two conversations with a node.
_SNAPSHOT, _PROOFS = "snapshot", "proofs"


@dataclass(frozen=True)
class ReadyTask:
    """The request of ``ready``.

    policies: node -> its policy
    subjects: the subjects to probe
    budget_s: the user's budget, for messages
    deadline: the moment of time.monotonic() at which everything has ended
    inventory_addresses: address -> its node by the inventory
    collective: runs the smoke test of these nodes until the deadline
    histories: node -> its earlier failures; None: no memory
    """

    transport: Transport
    policies: Mapping[str, Policy]
    subjects: tuple[str, ...]
    proofs: WantedProofs
    budget_s: int
    deadline: float
    inventory_addresses: Mapping[str, str] = field(default_factory=dict)
    collective: Callable[[tuple[str, ...]], Mapping[str, ProvedCollective]] | None = None
    histories: Mapping[str, ProvedHistory] | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
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
) -> list[SnapshotReply]:
    """Probe and prove every node; the proofs are the subject "proof" of each snapshot.

    on_found: gets a node's name and "snapshot" or "proofs", as they come
    password: asks for the sudo password of these nodes; whether there is one now

    An observation that is missing at the deadline is Unknown.
    """
    results: dict[Key, SnapshotReply | Proved | Failure] = {}
    meshes: dict[str, Mesh | Unknown] = {}
    waiting = set(task.policies)

    def add(key: Key, value: SnapshotReply | Proved | Failure) -> None:
        nonlocal meshes
        name, part = cast("tuple[str, str]", key)
        results[key] = value
        on_found(name, part)
        if part == _SNAPSHOT:
            waiting.discard(name)
            if not waiting and not task.transport.interrupted:
                # The proofs on the nodes continue meanwhile.
                meshes = _meshes(task, _reached(task, results))

    _round(task, task.policies, add, results)
    asking = [reply.name for reply in _replies(task, results) if reply.kind == SUDO]
    if asking and not task.transport.interrupted and password(asking):
        waiting |= {*asking}
        _round(task, asking, add, results)
    return _with_proofs(task, results, meshes, _collectives(task, results))


def _round(
    task: ReadyTask,
    names: Iterable[str],
    add: Callable[[Key, Any], None],
    results: dict[Key, SnapshotReply | Proved | Failure],
) -> None:
    peers = task.peers
    conversations: dict[Key, Conversation[Any]] = {}
    for name in names:
        policy = task.policies[name]
        conversations[name, _SNAPSHOT] = take_snapshot(
            name, policy, task.subjects, task.budget_s, nonce=task.transport.nonce
        )
        conversations[name, _PROOFS] = _prove_node(task, name, peers.get(name, ()))
    results.update(collect(task.transport, conversations, add, task.deadline))


def _prove_node(task: ReadyTask, name: str, peers: tuple[str, ...]) -> Conversation[Proved]:
    """The conversation with the program that makes a node's proofs."""
    policy = task.policies[name]
    config = ProofConfig(
        nonce=new_nonce(),
        tag=task.transport.tag,
        user=policy.job_user,
        proofs=task.proofs.session,
        peers=peers,
        limit_s=max(1, int(task.left_s) - _MARGIN_S),
        py_spy=PY_SPY if policy.py_spy_version else "",
        step=True,
    )
    answer = yield request(name, "nodeready.node.proofs.program", config)
    return read_answer(answer, config)


def read_answer(answer: Answer, config: ProofConfig) -> Proved:
    """The proofs in the answer of a node's program."""
    if answer.kind == LATE and not answer.stdout:
        return proof.all_unknown(proof.UNFINISHED, config)
    if answer.error and not answer.stdout:
        return proof.all_unknown(answer.error, config)
    return proof.read(answer.stdout, config)


def _replies(
    task: ReadyTask, results: Mapping[Key, SnapshotReply | Proved | Failure]
) -> list[SnapshotReply]:
    """The snapshot of every node; without an answer within the budget, that error."""
    reason = f"no answer within the budget of {task.budget_s} s"
    replies = []
    for name in task.policies:
        value = results.get((name, _SNAPSHOT))
        reply = SnapshotReply(name)
        if value is not None and not isinstance(value, Proved):
            reply = SnapshotReply.of(name, value)
        if reply.kind == LATE:
            # The node is connected: every subject is unknown.
            unknown = snapshot.unknown_snapshot(reason, snapshot.probes(task.subjects))
            reply = SnapshotReply(name, unknown)
        elif reply.kind == UNREACHABLE and reply.error == LATE_WORDS:
            reply = replace(reply, error=reason)
        replies.append(reply)
    return replies


def _reached(
    task: ReadyTask, results: Mapping[Key, SnapshotReply | Proved | Failure]
) -> tuple[str, ...]:
    return tuple(reply.name for reply in _replies(task, results) if reply.reached)


def _meshes(task: ReadyTask, reached: Iterable[str]) -> dict[str, Mesh | Unknown]:
    if not task.proofs.mesh:
        return {}
    by_ports: dict[tuple[int, int], list[str]] = {}
    for name in reached:
        by_ports.setdefault(task.policies[name].port_range, []).append(name)
    meshes: dict[str, Mesh | Unknown] = {}
    until = task.deadline - _MARGIN_S / 2
    for ports, names in by_ports.items():
        meshes |= run_mesh(
            task.transport, names, ports, until, full=task.proofs.full,
            inventory_addresses=task.inventory_addresses,
        )  # fmt: skip
    return meshes


def _collectives(
    task: ReadyTask, results: Mapping[Key, SnapshotReply | Proved | Failure]
) -> Mapping[str, ProvedCollective]:
    """The collective of each node. It begins after all other proofs, which would slow it down and
    use the same ports."""
    if not task.proofs.collective or task.collective is None or task.transport.interrupted:
        return {}
    names = _reached(task, results)
    return task.collective(names) if len(names) > 1 else dict.fromkeys(names, ProvedCollective(1))


def _ordered_peers(peers: Peers, names: tuple[str, ...]) -> Peers:
    """The node's answer, only about the peers that it was ordered to try."""
    run = peers.pdsh
    if run is not None:
        run = replace(run, targets=tuple(name for name in run.targets if name in names))
    return replace(
        peers, ssh=tuple(attempt for attempt in peers.ssh if attempt.name in names), pdsh=run
    )


def _with_proofs(
    task: ReadyTask,
    results: Mapping[Key, SnapshotReply | Proved | Failure],
    meshes: Mapping[str, Mesh | Unknown],
    collectives: Mapping[str, ProvedCollective],
) -> list[SnapshotReply]:
    """The snapshots, each with the subject "proof": the node's proofs, and the proofs between the
    nodes."""
    replies, session, peers = _replies(task, results), task.proofs.session, task.peers
    observed = {node_of(key): value for key, value in results.items() if isinstance(value, Proved)}
    tried = {
        name: _ordered_peers(proved.peers, peers.get(name, ()))
        for name, proved in observed.items()
        if isinstance(proved.peers, Peers)
    }
    reach_by_node = reach(tried, {reply.name for reply in replies if not reply.reached})
    late = Unknown(INTERRUPTED if task.transport.interrupted else proof.UNFINISHED)
    completed = []
    for reply in replies:
        if reply.snapshot is None:
            completed.append(reply)
            continue
        proved = observed.get(reply.name) or Proved(late, **dict.fromkeys(session, late))
        if "peers" in session:
            unknown = proved.peers if isinstance(proved.peers, Unknown) else None
            proved = replace(proved, reach=reach_by_node.get(reply.name, unknown))
        if task.proofs.mesh:
            proved = replace(proved, mesh=meshes.get(reply.name, late))
        if task.proofs.collective:
            proved = replace(proved, collective=collectives.get(reply.name, late))
        if task.proofs.history and task.histories is not None:
            proved = replace(proved, history=task.histories.get(reply.name))
        subjects = {**reply.snapshot.subjects, "proof": proved}
        completed.append(replace(reply, snapshot=replace(reply.snapshot, subjects=subjects)))
    return completed

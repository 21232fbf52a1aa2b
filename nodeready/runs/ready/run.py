"""Run the proofs and take the snapshots of all nodes in parallel, until one deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from nodeready.agent.asking import (
    INTERRUPT,
    LATE_WORDS,
    Conversation,
    Key,
    Transport,
    collect,
    new_nonce,
    request,
)
from nodeready.agent.snapshots import take_snapshot
from nodeready.core.base import Unknown
from nodeready.core.outcome import INTERRUPTED, LATE, SUDO, UNREACHABLE, Gap, Outcome
from nodeready.core.policy import Policy
from nodeready.runs.ready import mesh
from nodeready.runs.ready.mesh_run import run_mesh
from nodeready.runs.ready.reach import reach
from nodeready.subjects import snapshot
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
from nodeready.subjects.snapshot import Snapshot

#: Peers that a node tries by ssh: a handshake costs both ends 100 ms of CPU.
MAX_PEERS = 4
#: Seconds at the end of the time for the last answers to arrive.
_MARGIN_S = 2


@dataclass(frozen=True)
class WantedProofs:
    """The proofs to make."""

    session: tuple[str, ...] = tuple(SESSION)  # names in facts.SESSION
    mesh: bool = True  # connect the nodes over the job's ports
    full: bool = False  # connect every node with every other node, not only with some
    collective: bool = False  # run a collective over all nodes
    history: bool = True  # look for earlier failures in the memory

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
    """The request of ``ready``."""

    transport: Transport
    policies: Mapping[str, Policy]  # node -> its policy
    subjects: tuple[str, ...]  # the subjects to probe
    proofs: WantedProofs
    budget_s: int  # the user's budget, for messages
    deadline: float  # the moment of time.monotonic() at which everything has ended
    # address -> its node by the inventory
    inventory_addresses: Mapping[str, str] = field(default_factory=dict)
    # runs the smoke test of these nodes until the deadline
    collective: Callable[[tuple[str, ...]], Mapping[str, ProvedCollective]] | None = None
    # node -> its earlier failures; None: no memory
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
) -> list[Outcome[Snapshot]]:
    """Probe and prove every node; the proofs are the subject "proof" of each snapshot.

    on_found: gets a node's name and "snapshot" or "proofs", as they come
    password: asks for the sudo password of these nodes; whether there is one now

    An observation that is missing at the deadline is Unknown.
    """
    results: dict[Key, Outcome[Any]] = {}
    meshes: dict[str, Mesh | Unknown] = {}
    waiting = set(task.policies)

    def add(key: Key, outcome: Outcome[Any]) -> None:
        nonlocal meshes
        name, part = cast("tuple[str, str]", key)
        results[key] = outcome
        on_found(name, part)
        if part == _SNAPSHOT:
            waiting.discard(name)
            if not waiting and not task.transport.interrupted:
                # The proofs on the nodes continue meanwhile.
                meshes = _meshes(task, _reached(task, results))

    _round(task, task.policies, add, results)
    outcomes = _snapshots(task, results)
    asking = [o.node for o in outcomes if o.gap and o.gap.kind == SUDO]
    if asking and not task.transport.interrupted and password(asking):
        waiting |= {*asking}
        _round(task, asking, add, results)
    collectives: Mapping[str, ProvedCollective] = {}
    if task.proofs.collective and task.collective and not task.transport.interrupted:
        # After all other proofs, which would slow it down and use the same ports.
        names = _reached(task, results)
        one_node = dict.fromkeys(names, ProvedCollective(1))
        collectives = task.collective(names) if len(names) > 1 else one_node
    return _with_proofs(task, results, meshes, collectives)


def _round(
    task: ReadyTask,
    names: Iterable[str],
    add: Callable[[Key, Any], None],
    results: dict[Key, Outcome[Any]],
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
    answer = yield request(name, "nodeready.agent.proofs.program", config)
    if answer.gap and not answer.stdout:
        is_late = answer.gap.kind == LATE
        return proof.all_unknown(proof.UNFINISHED if is_late else answer.gap.reason, config)
    return proof.read(answer.stdout, config)


def _snapshots(task: ReadyTask, results: Mapping[Key, Outcome[Any]]) -> list[Outcome[Snapshot]]:
    """The snapshot of every node; without an answer within the budget, that error."""
    reason = f"no answer within the budget of {task.budget_s} s"
    outcomes = []
    for name in task.policies:
        outcome = results.get((name, _SNAPSHOT)) or Outcome[Snapshot](name, gap=INTERRUPT)
        if outcome.gap and outcome.gap.kind == LATE:
            # The node is connected: every subject is unknown.
            unknown = snapshot.unknown_snapshot(reason, snapshot.probes(task.subjects))
            outcome = Outcome(name, unknown)
        elif outcome.gap == Gap(UNREACHABLE, LATE_WORDS):
            outcome = replace(outcome, gap=Gap(UNREACHABLE, reason))
        outcomes.append(outcome)
    return outcomes


def _reached(task: ReadyTask, results: Mapping[Key, Outcome[Any]]) -> tuple[str, ...]:
    return tuple(outcome.node for outcome in _snapshots(task, results) if outcome.value)


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


def _ordered_peers(peers: Peers, names: tuple[str, ...]) -> Peers:
    """The node's answer, only about the peers that it was ordered to try."""
    run, ssh = peers.pdsh, tuple(attempt for attempt in peers.ssh if attempt.name in names)
    if run is not None:
        run = replace(run, targets=tuple(name for name in run.targets if name in names))
    return replace(peers, ssh=ssh, pdsh=run)


def _with_proofs(
    task: ReadyTask,
    results: Mapping[Key, Outcome[Any]],
    meshes: Mapping[str, Mesh | Unknown],
    collectives: Mapping[str, ProvedCollective],
) -> list[Outcome[Snapshot]]:
    """The snapshots, each with the subject "proof": the node's proofs, and the proofs between the
    nodes."""
    snapshots, session, peers = _snapshots(task, results), task.proofs.session, task.peers
    observed = {
        outcome.node: outcome.value
        for outcome in results.values()
        if isinstance(outcome.value, Proved)
    }
    tried = {
        name: _ordered_peers(proved.peers, peers.get(name, ()))
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
        if "peers" in session:
            unknown = proved.peers if isinstance(proved.peers, Unknown) else None
            proved = replace(proved, reach=reach_by_node.get(name, unknown))
        if task.proofs.mesh:
            proved = replace(proved, mesh=meshes.get(name, late))
        if task.proofs.collective:
            proved = replace(proved, collective=collectives.get(name, late))
        if task.proofs.history and task.histories is not None:
            proved = replace(proved, history=task.histories.get(name))
        subjects = {**outcome.value.subjects, "proof": proved}
        completed.append(replace(outcome, value=replace(outcome.value, subjects=subjects)))
    return completed

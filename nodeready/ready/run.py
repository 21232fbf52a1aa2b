"""The proofs of all nodes, side by side with the look, until one deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from nodeready.policy import Policy
from nodeready.ready import localize, mesh, mesh_run
from nodeready.subjects import snapshot
from nodeready.subjects.base import Unknown
from nodeready.subjects.debug_tools.facts import PY_SPY
from nodeready.subjects.proof import facts as proof
from nodeready.subjects.proof.facts import MESH, SESSION, Config, Peers, Proved
from nodeready.subjects.registry import SUBJECTS
from nodeready.transport.base import (
    INTERRUPTED,
    LATE,
    LATE_WORDS,
    SUDO,
    UNREACHABLE,
    Answer,
    Carrier,
    Conversation,
    Failure,
    Key,
    collect,
    new_nonce,
    node_of,
    request,
)
from nodeready.transport.look import Look, look_at

#: Peers that a node tries by ssh: a handshake costs both ends 100 ms of CPU.
MAX_PEERS = 4
#: Seconds at the end of the time for the last answers to arrive.
_MARGIN_S = 2


@dataclass(frozen=True)
class Wanted:
    """What is to be proved.

    session: the proofs of facts.SESSION
    mesh:    connect the nodes over the job's ports
    full:    every node with every other, not only with some
    """

    session: tuple[str, ...] = tuple(SESSION)
    mesh: bool = True
    full: bool = False

    @classmethod
    def of(cls, checks: Iterable[str], *, full: bool = False) -> Wanted:
        """What has to run for these checks."""
        wanted = {*checks}
        needed = {one.proof for one in SUBJECTS["proof"].checks if one.id in wanted}
        return cls(tuple(name for name in SESSION if name in needed), MESH in needed, full)


#: The two conversations with a node.
_LOOK, _PROOFS = "look", "proofs"

Meshes = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """What ``ready`` asks of its nodes, and until when.

    policies: the nodes', by name
    subjects: what is looked at
    budget_s: what the user allowed, for the words about what it cut off; deadline: the moment of
              time.monotonic() at which everything has ended
    given:    address -> the node to which the inventory gives it
    """

    carrier: Carrier
    policies: Mapping[str, Policy]
    subjects: tuple[str, ...]
    wanted: Wanted
    budget_s: int
    deadline: float
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def peers(self) -> dict[str, tuple[str, ...]]:
        """The nodes that each node tries by ssh; none when nobody asked for that."""
        if "peers" not in self.wanted.session:
            return {}
        names = list(self.policies)
        return mesh.peers_of(names, mesh.ring_and_skips(len(names))[:MAX_PEERS])


def prove(
    task: Task,
    on_found: Callable[[str, str], object] = lambda name, what: None,
    password: Callable[[list[str]], bool] = lambda names: False,
) -> list[Look]:
    """Look at every node and prove; the proofs are the subject "proof" of each look.

    heard:    gets a node's name and "look" or "proofs", as they come
    password: asks for sudo's, for these nodes; whether there is one now

    What is not there at the deadline is Unknown.
    """
    found: dict[Key, Look | Proved | Failure] = {}
    meshes: Meshes = {}
    waiting = set(task.policies)

    def add(key: Key, value: Look | Proved | Failure) -> None:
        nonlocal meshes
        name, what = cast("tuple[str, str]", key)
        found[key] = value
        on_found(name, what)
        if what == _LOOK:
            waiting.discard(name)
            if not waiting and not task.carrier.interrupted:
                # The proofs on the nodes go on meanwhile.
                meshes = _meshes(task, [one.name for one in _looks(task, found) if one.reached])

    _round(task, task.policies, add, found)
    asking = [one.name for one in _looks(task, found) if one.kind == SUDO]
    if asking and not task.carrier.interrupted and password(asking):
        waiting |= {*asking}
        _round(task, asking, add, found)
    return _with_proofs(task, found, meshes)


def _round(
    task: Task,
    names: Iterable[str],
    add: Callable[[Key, Any], None],
    found: dict[Key, Look | Proved | Failure],
) -> None:
    peers = task.peers
    conversations: dict[Key, Conversation[Any]] = {}
    for name in names:
        policy = task.policies[name]
        conversations[name, _LOOK] = look_at(name, policy, task.subjects, task.budget_s)
        conversations[name, _PROOFS] = _prove_node(task, name, peers.get(name, ()))
    found.update(collect(task.carrier, conversations, add, task.deadline))


def _prove_node(task: Task, name: str, peers: tuple[str, ...]) -> Conversation[Proved]:
    """The conversation of the proofs in the job's user's session on a node."""
    policy = task.policies[name]
    config = Config(
        nonce=new_nonce(),
        tag=task.carrier.tag,
        user=policy.job_user,
        wanted=task.wanted.session,
        peers=peers,
        limit_s=max(1, int(task.left_s) - _MARGIN_S),
        py_spy=PY_SPY if policy.py_spy_version else "",
        step=True,
    )
    answer = yield request(name, "nodeready.node.proofs.program", config)
    return read_answer(answer, config)


def read_answer(answer: Answer, config: Config) -> Proved:
    """What a node's program proof."""
    if answer.kind in (LATE, INTERRUPTED) and not answer.stdout:
        return proof.nothing(proof.UNFINISHED, config)
    if answer.error and not answer.stdout:
        return proof.nothing(answer.error, config)
    return proof.read(answer.stdout, config)


def _looks(task: Task, found: Mapping[Key, Look | Proved | Failure]) -> list[Look]:
    """The look at every node; where the budget cut one off, that is its error."""
    why = f"no answer within the budget of {task.budget_s} s"
    looks = []
    for name in task.policies:
        value = found.get((name, _LOOK))
        one = Look(name) if value is None or isinstance(value, Proved) else Look.of(name, value)
        if one.kind == LATE:
            # The node is connected: every subject is unknown.
            nothing = snapshot.nothing(why, snapshot.probes(task.subjects))
            one = Look(name, nothing)
        elif one.kind == UNREACHABLE and one.error == LATE_WORDS:
            one = replace(one, error=why)
        looks.append(one)
    return looks


def _meshes(task: Task, reached: Iterable[str]) -> Meshes:
    if not task.wanted.mesh:
        return {}
    by_ports: dict[tuple[int, int], list[str]] = {}
    for name in reached:
        by_ports.setdefault(task.policies[name].port_range, []).append(name)
    found: dict[str, Any] = {}
    until = task.deadline - _MARGIN_S / 2
    for ports, names in by_ports.items():
        found |= mesh_run.run(
            task.carrier, names, ports, until, full=task.wanted.full, given=task.given
        )
    return found


def _asked(peers: Peers, names: tuple[str, ...]) -> Peers:
    """What the node says of the peers that it was asked to try, and of no other."""
    run = peers.pdsh
    if run is not None:
        run = replace(run, asked=tuple(name for name in run.asked if name in names))
    return replace(peers, ssh=tuple(one for one in peers.ssh if one.name in names), pdsh=run)


def _with_proofs(
    task: Task, found: Mapping[Key, Look | Proved | Failure], meshes: Meshes
) -> list[Look]:
    """The looks, each with its proofs and what only all nodes tell as the subject "proof"."""
    looks, session, peers = _looks(task, found), task.wanted.session, task.peers
    seen = {node_of(key): one for key, one in found.items() if isinstance(one, Proved)}
    tried = {
        name: _asked(one.peers, peers.get(name, ()))
        for name, one in seen.items()
        if isinstance(one.peers, Peers)
    }
    away = {one.name for one in looks if not one.reached}
    reach = localize.reach(tried, away)
    late = Unknown(proof.UNFINISHED)
    made = []
    for look in looks:
        if look.snapshot is None or task.carrier.interrupted:
            made.append(look)
            continue
        one = seen.get(look.name) or Proved(late, **dict.fromkeys(session, late))
        if "peers" in session:
            late_too = one.peers if isinstance(one.peers, Unknown) else None
            one = replace(one, reach=reach.get(look.name, late_too))
        if task.wanted.mesh:
            one = replace(one, mesh=meshes.get(look.name, late))
        subjects = {**look.snapshot.subjects, "proof": one}
        made.append(replace(look, snapshot=replace(look.snapshot, subjects=subjects)))
    return made

"""The proofs of all nodes, side by side with the look, until one deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

from nodeready.node.proofs.mesh import CONNECT_S, TOKEN_S, Listening, Round
from nodeready.policy import Policy
from nodeready.ready import localize, mesh
from nodeready.subjects import snapshot, wire
from nodeready.subjects.base import Unknown
from nodeready.subjects.debug_tools.facts import PY_SPY
from nodeready.subjects.proof import facts as proof
from nodeready.subjects.proof.facts import (
    COLLECTIVE,
    MESH,
    SESSION,
    Collective,
    Config,
    Mesh,
    Peers,
    Proved,
)
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
from nodeready.transport.channels import Channels
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
    collective: make one over all nodes
    """

    session: tuple[str, ...] = tuple(SESSION)
    mesh: bool = True
    full: bool = False
    collective: bool = False

    @classmethod
    def of(cls, checks: Iterable[str], *, full: bool = False) -> Wanted:
        """What has to run for these checks."""
        wanted = {*checks}
        needed = {one.proof for one in SUBJECTS["proof"].checks if one.id in wanted}
        session = tuple(name for name in SESSION if name in needed)
        return cls(session, MESH in needed, full, COLLECTIVE in needed)


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
    together: makes a collective over these nodes, until the deadline: the smoke test, which knows
              this room, and not the other way round
    """

    carrier: Carrier
    policies: Mapping[str, Policy]
    subjects: tuple[str, ...]
    wanted: Wanted
    budget_s: int
    deadline: float
    given: Mapping[str, str] = field(default_factory=dict)
    together: Callable[[tuple[str, ...]], Mapping[str, Collective]] | None = None

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
    return _with_proofs(task, found, meshes, _together(task, found))


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
        conversations[name, _LOOK] = look_at(
            name, policy, task.subjects, task.budget_s, nonce=task.carrier.nonce
        )
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
    if answer.kind == LATE and not answer.stdout:
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
        found |= run_mesh(
            task.carrier, names, ports, until, full=task.wanted.full, given=task.given
        )
    return found


def _together(
    task: Task, found: Mapping[Key, Look | Proved | Failure]
) -> Mapping[str, Collective]:
    """What a collective shows of each node: when all else has ended, which would slow it down and
    has the same ports."""
    if not task.wanted.collective or task.together is None or task.carrier.interrupted:
        return {}
    names = tuple(look.name for look in _looks(task, found) if look.reached)
    return task.together(names) if len(names) > 1 else dict.fromkeys(names, Collective(1))


def _asked(peers: Peers, names: tuple[str, ...]) -> Peers:
    """What the node says of the peers that it was asked to try, and of no other."""
    run = peers.pdsh
    if run is not None:
        run = replace(run, asked=tuple(name for name in run.asked if name in names))
    return replace(peers, ssh=tuple(one for one in peers.ssh if one.name in names), pdsh=run)


def _with_proofs(
    task: Task,
    found: Mapping[Key, Look | Proved | Failure],
    meshes: Meshes,
    together: Mapping[str, Collective],
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
    late = Unknown(INTERRUPTED if task.carrier.interrupted else proof.UNFINISHED)
    made = []
    for look in looks:
        if look.snapshot is None:
            made.append(look)
            continue
        one = seen.get(look.name) or Proved(late, **dict.fromkeys(session, late))
        if "peers" in session:
            late_too = one.peers if isinstance(one.peers, Unknown) else None
            one = replace(one, reach=reach.get(look.name, late_too))
        if task.wanted.mesh:
            one = replace(one, mesh=meshes.get(look.name, late))
        if task.wanted.collective:
            one = replace(one, collective=together.get(look.name, late))
        subjects = {**look.snapshot.subjects, "proof": one}
        made.append(replace(look, snapshot=replace(look.snapshot, subjects=subjects)))
    return made


#: The program on the node.
_MAIN = "nodeready.node.proofs.mesh"
#: Seconds for the program to come up on a node: a Python, and a disk that may be cold.
_START_S = 20
#: One round on a node: the name, and time-outs of ports in the middle of the range.
_ROUND_S = 8.0
#: What the last connection of a round may take beyond that, and the way here.
_MORE_S = CONNECT_S + TOKEN_S + 1
#: Listeners outlive the last connection to them: a port that is free again is somebody else's.
_LONGER_S = 5


def run_mesh(
    carrier: Carrier,
    nodes: Iterable[str],
    ports: tuple[int, int],
    deadline: float,
    *,
    full: bool = False,
    given: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Mesh | Unknown]:
    """What the nodes see of each other on the ports, for each node, at the deadline at the latest.

    nodes:    that are connected
    ports:    first and last
    deadline: on the monotonic clock
    full:     every node tries every other one; else the ring and skips that double
    given:    address -> the node to which the inventory gives it
    Never raises for a node's fault; an interrupt ends what runs on the nodes, too.
    """
    made = _Run(carrier, tuple(nodes), ports, deadline, given)
    try:
        made.listen()
        made.rounds(full)
        made.drop_dead()
    finally:
        made.channels.close()
    return made.results()


class _Run:
    def __init__(
        self,
        carrier: Carrier,
        nodes: tuple[str, ...],
        ports: tuple[int, int],
        deadline: float,
        given: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.carrier, self.nodes, self.ports = carrier, nodes, ports
        self.channels = Channels(carrier, deadline, "the mesh")
        self.given = given
        self.listening: dict[str, Listening] = {}
        self.seen = mesh.Rounds(len(nodes), ports, {})
        self.made = 0

    @property
    def left_s(self) -> float:
        return self.channels.left_s

    def listen(self) -> None:
        """Start the program on every node; it listens before it says anything."""
        asked = mesh.chosen_ports(*self.ports)
        limit_s = max(1, int(self.left_s)) + _LONGER_S
        nonce = self.channels.nonce
        config = Config(nonce, self.carrier.tag, limit_s=limit_s)

        def start(name: str) -> None:
            self.channels.start(request(name, _MAIN, config, mark=nonce, stdin=True, ports=asked))
            seen = self.channels.read(name, "listening", Listening, _START_S)
            if seen is not None:
                self.listening[name] = seen

        self.channels.for_each(start, self.nodes)
        present = {name: self.listening[name] for name in self.nodes if name in self.listening}
        known = mesh.known_owners(self.given, self.carrier.met())
        self.seen = mesh.Rounds(len(self.nodes), self.ports, present, known)

    def rounds(self, full: bool) -> None:
        """All rounds of the pattern, as far as there is time."""
        names = list(self.seen.ports)
        offsets = (mesh.full if full else mesh.ring_and_skips)(len(names))
        for pairs in mesh.rounds(names, offsets):
            self._round(dict(pairs))
        self._round(self.seen.ways_back())

    def _round(self, target_of: dict[str, str]) -> None:
        """One round, when there is still time for one."""
        if self.left_s < _MORE_S or not target_of:
            return
        number, limit_s = self.made, min(_ROUND_S, self.left_s - _MORE_S)
        self.made += 1
        channels = self.channels

        def one(source: str) -> None:
            target = target_of[source]
            asked = self.seen.to_ask(source, target)
            message = {
                "round": number,
                "target": target,
                "ports": asked,
                "addresses": self.seen.addresses[target],
                "token": self.listening[target].token,
                "host": self.listening[target].host,
                "limit_s": limit_s,
            }
            channels.open[source].send_line(json.dumps(message, separators=(",", ":")))
            seen = channels.read(source, "round", Round, limit_s + _MORE_S)
            if seen is None:
                return
            if (seen.number, seen.target) != (number, target):
                said = wire.shown(asdict(seen))
                channels.lose(source, "the answer makes no sense (another round)", said)
                return
            self.seen.add(source, target, asked, seen)

        here = [s for s, t in target_of.items() if s in channels.open and t in channels.open]
        channels.for_each(one, here)
        for name in channels.lost:
            self.seen.drop(name)
        self.seen.cut()

    def drop_dead(self) -> None:
        """Drop the nodes that died in the last round: others may have met a closed port there."""
        self.channels.drop_dead()
        for name in self.channels.lost:
            self.seen.drop(name)

    def results(self) -> dict[str, Mesh | Unknown]:
        """For each node what was seen, or why nothing was."""
        found: dict[str, Mesh | Unknown] = {**self.seen.meshes(), **self.channels.lost}
        late = Unknown("did not finish in time")
        return {name: found.get(name, late) for name in self.nodes}

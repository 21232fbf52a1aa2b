"""The proofs of all nodes of a session, side by side with the look, until one deadline."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import gevent
from pyinfra.context import ctx_host

from nodeready import meshing, pattern, reaching, shell, snapshot
from nodeready.probes import debug_tools
from nodeready.probes.base import Unknown
from nodeready.proofs import proved, source
from nodeready.proofs.config import Config
from nodeready.proofs.proved import Proved
from nodeready.proofs.seen import SESSION, Peers
from nodeready.session import NodeRun, Progress, Session
from nodeready.transports.answer import UNREACHABLE

#: The module of nodeready/proofs that has to run for a check of the subject "proof".
_RUNS = {
    "limits": "limits",
    "attach": "attach",
    "attach_nonblocking": "attach",
    "attach_native": "attach",
    "gdb": "tracers",
    "strace": "tracers",
    "core": "core",
    "backtrace": "core",
    "ssh": "peers",
    "pdsh": "peers",
}
#: Peers that a node tries by ssh: a handshake costs both ends 100 ms of CPU.
MAX_PEERS = 4
#: Seconds at the end of the time for the last answers to arrive, and to end what is left over.
_MARGIN_S, _END_S = 2, 2


@dataclass(frozen=True)
class Wanted:
    """What is to be proved.

    session: the proofs of seen.SESSION
    mesh:    connect the nodes over the job's ports
    full:    every node with every other, not only with some
    """

    session: tuple[str, ...] = SESSION
    mesh: bool = True
    full: bool = False

    @classmethod
    def of(cls, checks: Iterable[str], *, full: bool = False) -> Wanted:
        """What has to run for these checks."""
        names = [check.partition(".")[2] for check in checks if check.startswith("proof.")]
        needed = {_RUNS[name] for name in names if name in _RUNS}
        chosen = tuple(name for name in SESSION if name in needed)
        return cls(chosen, bool({"mesh", "ports"} & {*names}), full)


@dataclass
class Proving:
    """One command's proofs. ``begin`` is called for each node as soon as it is connected."""

    session: Session
    wanted: Wanted
    deadline: float
    seen: dict[str, Proved] = field(default_factory=dict)
    _jobs: dict[str, Any] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def begin(self, node: NodeRun) -> None:
        """Start the proofs in the job's user's session on this node, and do not wait for them."""
        self._jobs[node.name] = gevent.spawn(self._prove, node)

    def _peers(self) -> dict[str, tuple[str, ...]]:
        names = [node.name for node in self.session.nodes]
        offsets = pattern.ring_and_skips(len(names))[:MAX_PEERS]
        return pattern.peers_of(names, offsets)

    def _config(self, node: NodeRun) -> Config:
        return Config(
            nonce=f"nodeready-{secrets.token_hex(8)}",
            tag=self.session.tag,
            user=node.policy.job_user,
            wanted=self.wanted.session,
            peers=self.peers.get(node.name, ()),
            limit_s=max(1, int(self.left_s) - _MARGIN_S),
            py_spy=debug_tools.PY_SPY if node.policy.py_spy_version else "",
        )

    def __post_init__(self) -> None:
        self.peers = self._peers() if "peers" in self.wanted.session else {}

    def _prove(self, node: NodeRun) -> None:
        config = self._config(node)
        line = shell.command(source.script(config), config.limit_s + 2, self.session.tag)
        with ctx_host.use(node.host):
            answer = self.session.carry(node, line, config.limit_s + 2)
        if answer.error and not answer.stdout:
            self.seen[node.name] = proved.nothing(answer.error, config)
            return
        self.seen[node.name] = proved.read(answer.stdout, config)

    def finish(self, done: Progress) -> None:
        """The mesh between the nodes that were reached, and the end of everything that was begun.

        What is not there at the deadline is Unknown.
        """
        for name, job in self._jobs.items():
            job.link(lambda _, name=name: done(name))
        reached = [node for node in self.session.nodes if node.reached]
        meshes: dict[str, Any] = {}
        if self.wanted.mesh:
            meshes = self._mesh(reached)
        gevent.joinall(list(self._jobs.values()), timeout=max(0.0, self.left_s))
        late = [job for job in self._jobs.values() if not job.ready()]
        gevent.killall(late, block=False)
        if late:
            self.session.end_remote(_END_S)
        self._tell(reached, meshes)

    def _mesh(self, reached: list[NodeRun]) -> dict[str, Any]:
        by_ports: dict[tuple[int, int], list[NodeRun]] = {}
        for node in reached:
            by_ports.setdefault(node.policy.port_range, []).append(node)
        found: dict[str, Any] = {}
        for ports, nodes in by_ports.items():
            found |= meshing.run(
                self.session, nodes, ports, self.deadline - _MARGIN_S / 2, full=self.wanted.full
            )
        return found

    def _tell(self, reached: list[NodeRun], meshes: dict[str, Any]) -> None:
        """Put what was proved beside what was seen, with what only all nodes together tell."""
        names = {node.name for node in reached}
        tried = {
            name: one.peers for name, one in self.seen.items() if isinstance(one.peers, Peers)
        }
        away = {node.name for node in self.session.nodes} - names
        reach = reaching.reach(tried, away)
        late = Unknown(proved.UNFINISHED)
        for node in reached:
            one = self.seen.get(node.name)
            if one is None:
                one = Proved(late, **dict.fromkeys(self.wanted.session, late))
            if "peers" in self.wanted.session:
                late_too = one.peers if isinstance(one.peers, Unknown) else None
                one = replace(one, reach=reach.get(node.name, late_too))
            if self.wanted.mesh:
                one = replace(one, mesh=meshes.get(node.name, late))
            assert node.snapshot is not None
            subjects = {**node.snapshot.subjects, "proof": one}
            node.snapshot = replace(node.snapshot, subjects=subjects)


def out_of_time(session: Session, budget_s: int) -> None:
    """What the end of the budget cut off: a node that did not even connect is unreachable."""
    why = f"no answer within the budget of {budget_s} s"
    for node in session.nodes:
        if node.reached or node.error:
            continue
        if node.host.connected:
            node.snapshot = snapshot.nothing(why, snapshot.probes(session.subjects))
        else:
            node.error, node.kind = why, UNREACHABLE

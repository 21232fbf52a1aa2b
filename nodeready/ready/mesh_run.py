"""The job's ports between all nodes: a listener and a speaker on each, and rounds between them.

One channel per node, over the connection that is there. In each round every node connects to one
other and is connected to by one; the next begins when all have answered.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import gevent
from gevent.pool import Pool

from nodeready.node import payload
from nodeready.node.proofs.mesh import CONNECT_S, TOKEN_S, Listening, Round
from nodeready.ready import mesh
from nodeready.subjects import wire
from nodeready.subjects.base import ProbeError, Unknown
from nodeready.subjects.proof.facts import Config, Mesh
from nodeready.transport.base import Carrier, Channel, request

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


def run(
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
        made.close()
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
        self.carrier, self.nodes, self.ports, self.deadline = carrier, nodes, ports, deadline
        self.channels: dict[str, Channel] = {}
        self.given = given
        self.listening: dict[str, Listening] = {}
        self.lost: dict[str, Unknown] = {}
        self.seen = mesh.Rounds(len(nodes), ports, {})
        self.made = 0
        self.nonce = f"nodeready-{secrets.token_hex(8)}"

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def _each(self, work: Callable[[str], None], names: Iterable[str]) -> None:
        """Do it for all of these nodes at once. Our own mistake costs the node alone."""

        def one(name: str) -> None:
            try:
                work(name)
            except Exception as problem:  # noqa: BLE001 - as everywhere
                self._lose(name, f"internal error: {type(problem).__name__}: {problem}")

        jobs = [gevent.spawn(one, name) for name in names]
        try:
            gevent.joinall(jobs)
        except BaseException:
            gevent.killall(jobs, block=False)
            raise

    def _lose(self, name: str, reason: str, evidence: str = "") -> None:
        """The node takes no part any more. It costs itself, not those that tried it."""
        self.lost.setdefault(name, Unknown(reason, evidence))
        channel = self.channels.pop(name, None)
        if channel is not None:
            channel.close()

    def _read(self, name: str, what: str, limit_s: float) -> Any:
        """The next observation of this name from the node. None: the node is lost, or the deadline
        came."""
        channel = self.channels[name]
        line = channel.read_line(min(limit_s, max(0.1, self.left_s)))
        if line is None:
            if channel.error:
                self._lose(name, channel.error)
            elif self.left_s > 0:
                self._lose(name, f"no answer in {limit_s:.0f} s")
            return None
        if line.startswith(f"{self.nonce} {payload.NO_PYTHON}"):
            self._lose(name, f"{payload.NO_PYTHON} on the node: the mesh needs it")
            return None
        try:
            found = dict(wire.lines(f"{line}\n", self.nonce))
        except ProbeError as problem:
            self._lose(name, problem.reason)
            return None
        if set(found) != {what} or found[what] is None:
            self._lose(name, "the answer makes no sense (another row)", line[:200])
            return None
        return found[what]

    def listen(self) -> None:
        """Start the program on every node; it listens before it says anything."""
        asked = mesh.chosen_ports(*self.ports)
        limit_s = max(1, int(self.left_s)) + _LONGER_S
        config = Config(self.nonce, self.carrier.tag, limit_s=limit_s)

        def start(name: str) -> None:
            wanted = request(name, _MAIN, config, mark=self.nonce, stdin=True, ports=asked)
            self.channels[name] = self.carrier.open(wanted)
            data = self._read(name, "listening", _START_S)
            if data is None:
                return
            try:
                self.listening[name] = wire.decode(Listening, data)
            except ProbeError as problem:
                self._lose(name, problem.reason, problem.evidence)

        self._each(start, self.nodes)
        present = {name: self.listening[name] for name in self.nodes if name in self.listening}
        self.seen = mesh.Rounds(len(self.nodes), self.ports, present, self._known())

    def _known(self) -> dict[str, str]:
        """Address -> the node that has it, by the inventory, or where this run's connection found
        the node; "": two of its names are one machine's."""
        found = {mesh.address(one): name for one, name in self.given.items()}
        met: dict[str, str] = {}
        for name, one in self.carrier.met().items():
            where = mesh.address(one.address)
            met[where] = name if where not in met else ""
        found.update(met)
        found.pop("", None)
        return found

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

        def one(source: str) -> None:
            target = target_of[source]
            asked = self.seen.to_ask(source, target)
            message = {
                "round": number,
                "target": target,
                "ports": asked,
                "addresses": self.seen.addresses[target],
                "token": self.listening[target].token,
                "limit_s": limit_s,
            }
            self.channels[source].send_line(json.dumps(message, separators=(",", ":")))
            data = self._read(source, "round", limit_s + _MORE_S)
            if data is None:
                return
            try:
                seen = wire.decode(Round, data)
            except ProbeError as problem:
                self._lose(source, problem.reason, problem.evidence)
                return
            if (seen.number, seen.target) != (number, target):
                self._lose(source, "the answer makes no sense (another round)", wire.shown(data))
                return
            self.seen.add(source, target, asked, seen)

        here = [s for s, t in target_of.items() if s in self.channels and t in self.channels]
        self._each(one, here)
        for name in self.lost:
            self.seen.drop(name)
        self.seen.cut()

    def drop_dead(self) -> None:
        """Drop the nodes that died in the last round: others may have met a closed port there."""

        def still(name: str) -> None:
            channel = self.channels[name]
            channel.read_line(0.05)
            if channel.error:
                self._lose(name, channel.error)

        self._each(still, list(self.channels))
        for name in self.lost:
            self.seen.drop(name)

    def close(self) -> None:
        """End the programs: all at once, for none connects to another any more."""
        closing = Pool(64)
        for channel in self.channels.values():
            closing.spawn(channel.close)
        with contextlib.suppress(gevent.Timeout):
            closing.join(timeout=5)

    def results(self) -> dict[str, Mesh | Unknown]:
        """For each node what was seen, or why nothing was."""
        found: dict[str, Mesh | Unknown] = {**self.seen.meshes(), **self.lost}
        late = Unknown("did not finish in time")
        return {name: found.get(name, late) for name in self.nodes}

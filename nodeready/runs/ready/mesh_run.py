"""The rounds between the nodes, over one program on each of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from types import MappingProxyType

from nodeready.agent.asking import Transport, request
from nodeready.agent.proofs.mesh import CONNECT_S, TOKEN_S, Listening, MeshRound
from nodeready.core import wire
from nodeready.core.base import Unknown
from nodeready.fleet.transport.channels import Channels
from nodeready.runs.ready import mesh
from nodeready.subjects.proof.facts import ProofConfig
from nodeready.subjects.proof.peer_facts import Mesh

#: The program on the node.
_MAIN = "nodeready.agent.proofs.mesh"
#: Seconds for the program to start on a node: a Python, and a disk that may be cold.
_START_S = 20
#: Seconds of a round on a node: the name, and time-outs of ports in the middle of the range.
_ROUND_S = 8.0
#: Seconds beyond that for the last connection of a round and the answer.
_MORE_S = CONNECT_S + TOKEN_S + 1
#: Seconds after the deadline for which the listeners stay: another program may take a free port.
_LONGER_S = 5


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

    nodes:    the connected nodes
    ports:    first and last
    deadline: on the monotonic clock
    full:     every node tries every other node; else the ring and skips that double
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
    """The rounds over one program on each node."""

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
        """Run the rounds of the pattern, as long as there is time."""
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
            message = {
                "round": number,
                "target": target,
                "ports": ports,
                "addresses": self.mesh_rounds.addresses[target],
                "token": self.listening[target].token,
                "host": self.listening[target].host,
                "limit_s": limit_s,
            }
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
        """The mesh of each node, or the reason for its absence."""
        for name in self.channels.lost:
            self.mesh_rounds.drop(name)
        results: dict[str, Mesh | Unknown] = {**self.mesh_rounds.meshes(), **self.channels.lost}
        late = Unknown("did not finish in time")
        return {name: results.get(name, late) for name in self.nodes}

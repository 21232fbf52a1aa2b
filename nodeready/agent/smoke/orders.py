"""The control machine's orders in a smoke test, and the node's answers.

An order is one line of JSON on the program's standard input, an answer one line of its output
(`nodeready.core.wire`). A node gets one order at a time; the target of a pair needs none.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from nodeready.agent.proofs.mesh import Try
from nodeready.core import wire
from nodeready.subjects.environment_table import EnvironmentFacts

#: The engines, best first: the job's own library, the vendor's test program, plain TCP between
#: pairs of nodes.
TORCH, NCCL_TESTS, PAIRS = ENGINES = ("torch", "nccl-tests", "pairs")

#: The phases of a rank, in order. ``compute``: a product of matrices on its own GPU, ``init``: the
#: rendezvous and the process group, ``large``: the all_reduce whose bandwidth counts.
PHASES = (
    "start", "compute", "init", "barrier", "all_reduce", "all_gather", "send_recv", "large",
    "done",
)  # fmt: skip


@dataclass(frozen=True)
class SmokeConfig:
    nonce: str
    tag: str
    user: str = ""  # the user of the ranks; "": the user who logs in
    limit_s: int = 60  # seconds after which everything has ended
    ports: tuple[int, ...] = ()  # the ports of the policy's range on which the node listens
    engines: tuple[str, ...] = ENGINES  # the engines to search for
    python: str = ""  # the Python of the job, an absolute path; "": python3 of the user's session
    prefix: tuple[str, ...] = ()  # before the Python: ``apptainer exec --nv image.sif``
    environment: tuple[str, ...] = ()  # ``NAME=VALUE`` of the job

    @property
    def variables(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self.environment if "=" in word)


@dataclass(frozen=True)
class Engine:
    """An engine with one backend on a node, such as ``torch`` over ``gloo``."""

    name: wire.Name  # one of `ENGINES`
    backend: wire.Name  # ``nccl`` (RCCL with AMD's GPUs), ``gloo``, ``tcp``
    version: wire.Line  # of the engine, such as ``2.13.0+cu130``; ""
    library: wire.Line  # of the data's transport, such as ``NCCL 2.28.3``; ""
    proves: wire.Line  # what a pass proves
    reason: wire.Line  # why it cannot be used on this node; "": it can be used


@dataclass(frozen=True)
class Hello:
    """The program's first line."""

    token: wire.Name  # of its listeners
    ports: tuple[wire.Port, ...]  # on which it listens now
    addresses: tuple[wire.Name, ...]  # the node's own, without loopback and link-local addresses
    engines: tuple[Engine, ...]  # the best first; unusable engines are included
    reason: wire.Line  # why nothing can be tested on this node; "": something can
    # (name, value) of the ranks' environment that decide how they communicate
    variables: tuple[tuple[wire.Name, wire.Name], ...] = ()
    # the facts of the node that decide about these variables
    facts: EnvironmentFacts = EnvironmentFacts("not probed")


# --- Orders.


@dataclass(frozen=True)
class SmokePeer:
    """Another node in an order."""

    name: str  # the job's name for it: it is resolved on the node that gets the order
    addresses: tuple[str, ...]  # the peer's own, from its `Hello`, checked by the control machine
    port: int
    token: str


@dataclass(frozen=True)
class CollectiveOrder:
    """One test: this node's ranks of a collective. The answer is a `CollectiveAnswer`."""

    number: int  # the test's number, unique in the run
    engine: str  # as in `Engine`
    backend: str  # likewise
    world: int  # the number of ranks of all nodes
    first: int  # the number of this node's first rank
    ranks: int  # the number of this node's ranks
    gpus: tuple[int, ...]  # the GPU of each of these ranks; empty: no GPU
    head: SmokePeer  # the node of rank 0, with the port of the rendezvous
    small: int  # bytes of the collectives whose results are checked number by number
    large: int  # bytes of the all_reduce whose bandwidth is measured
    limit_s: float  # seconds after which the node has ended all of the test's processes
    kind: str = "collective"


@dataclass(frozen=True)
class PairOrder:
    """One test of the plain path to another node. The answer is a `PairAnswer`."""

    number: int
    target: SmokePeer
    # of the target, tried in this order; ``small`` and ``large`` bytes go there and back over the
    # first port that works
    ports: tuple[int, ...]
    small: int
    large: int
    limit_s: float
    kind: str = "pair"


@dataclass(frozen=True)
class EndOrder:
    """End this test now: other tests passed long ago. The node still answers the test."""

    number: int
    kind: str = "end"


def line(order: CollectiveOrder | PairOrder | EndOrder) -> str:
    """The order as its line, without the end of the line."""
    return json.dumps(dataclasses.asdict(order), separators=(",", ":"))


_KINDS: dict[str, type[CollectiveOrder | PairOrder | EndOrder]] = {
    kind.kind: kind for kind in (CollectiveOrder, PairOrder, EndOrder)
}


def read(text: str) -> CollectiveOrder | PairOrder | EndOrder:
    """The order in a line. Raises DecodeError, KeyError, TypeError."""
    data = wire.load_json(text)
    return wire.decode(_KINDS[data["kind"]], data)


# --- Answers.


@dataclass(frozen=True)
class RankNetwork:
    """The network that a rank's library chose."""

    # ``IB``, ``Socket``, ``OFI`` or another plugin's (`nccl_log.network_family`); ``gloo``
    name: wire.Name
    interface: wire.Name = ""  # of its sockets; "": unknown
    hcas: tuple[wire.Name, ...] = ()  # ``mlx5_0:1/IB``
    gdr: bool | None = None  # whether GPUDirect RDMA is used; None: unknown, as on one node
    note: wire.Line = ""  # why it has no better network, in words; "": unknown


@dataclass(frozen=True)
class RankResult:
    rank: wire.Count
    phase: wire.Name  # the last phase, of `PHASES`; ``done``: the rank came to its end
    mismatch: wire.Line  # how a result differs from the expected result; "": all are right
    error: wire.Line  # why it failed, the last line of its error; "": it did not fail
    ms: float  # the median of its small collectives; 0: there was none
    gbps: float  # bus bandwidth of its large all_reduce, in Gbit/s; 0: there was none
    network: RankNetwork | None = None  # that it used between ranks; None: unknown

    @property
    def ok(self) -> bool:
        """Whether it came to its end with the right results."""
        return self.phase == "done" and not self.mismatch and not self.error


MAX_ERROR = 300  # maximum characters of a rank's error


def failed_ranks(order: CollectiveOrder, phase: str, message: str) -> tuple[RankResult, ...]:
    """All ranks of this node, failed in this phase for one reason."""
    numbers, error = range(order.first, order.first + order.ranks), message[:MAX_ERROR]
    return tuple(RankResult(number, phase, "", error, 0.0, 0.0) for number in numbers)


@dataclass(frozen=True)
class CollectiveAnswer:
    """The answer to a `CollectiveOrder`: all of this node's ranks."""

    number: wire.Count
    error: wire.Line  # why no rank could be started; "": all were started
    ranks: tuple[RankResult, ...]
    port_holder: wire.Line = ""  # the port that rank 0 did not get, and who has it; "": it got it


@dataclass(frozen=True)
class PairAnswer:
    """The answer to a `PairOrder`."""

    number: wire.Count
    target: wire.Name
    # the addresses of the target's name on this node, in the resolver's order
    resolved: tuple[wire.Name, ...] = ()
    error: wire.Line = ""  # why the name has no address
    address: wire.Name = ""  # of the connection; "": no resolved address is the target's own
    tries: tuple[Try, ...] = ()  # in the ports' order; fewer when the time was over
    # of the data: ``ok``, ``small`` or ``large`` (the part that did not come back), ``slow`` (the
    # large part cannot come back in time), "" when no port works
    outcome: wire.Name = ""
    ms: float = 0.0  # the median of the small messages' round trips
    gbps: float = 0.0  # of the large message, in both directions, in Gbit/s
    retransmits: int = -1  # TCP segments that this node sent again for it; -1: unknown

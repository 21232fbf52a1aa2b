"""The document of `nodeready smoke`: GO or NO-GO, the suspects with their evidence."""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.exit_codes import exit_code

#: What a node's row says, worst first: it is suspected; it was lost or not reached; nothing could
#: be tested there; it passed, and something on it got worse meanwhile; it passed.
SUSPECT, UNREACHABLE, UNTESTED, WARNED, PASSED = NODE_STATUSES = (
    "suspect",
    "unreachable",
    "untested",
    "warned",
    "passed",
)


@dataclass(frozen=True)
class Suspect:
    """Who spoils the collective.

    kind:     ``node``, ``gpu``, ``pair`` or ``scale``
    nodes:    names
    gpus:     of kind gpu, its numbers on the one node
    evidence: one sentence each, the strongest first
    """

    kind: str
    nodes: tuple[str, ...]
    gpus: tuple[int, ...]
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Node:
    """One node.

    status:   one of NODE_STATUSES
    why:      of a node that was not reached or not tested; ""
    ranks:    that it ran in each test
    gpus:     that its ranks had
    engine:   such as ``torch 2.13.0, gloo``; "" where none was found
    warnings: what got worse during the test (errors of a GPU, of a port), or is slow
    """

    name: str
    status: str
    why: str = ""
    ranks: int = 0
    gpus: tuple[int, ...] = ()
    engine: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Link:
    """The bandwidth of one class of links, in Gbit/s of bus bandwidth.

    name:   ``inside``: between the GPUs or ranks of a node; ``between``: between nodes
    least:  of all tests that passed; where: the nodes of that test
    floor:  the policy's; 0: it has none
    """

    name: str
    tests: int
    median_gbps: float
    least_gbps: float
    where: tuple[str, ...]
    floor_gbps: float = 0.0


@dataclass(frozen=True)
class Smoke:
    """What one smoke test found.

    started, finished: ISO 8601, UTC, with a Z
    complete:  False when it was interrupted
    engine:    that was used, such as ``torch 2.13.0, gloo``
    proves:    what its pass proves
    control:   the engine of the control arm; ""
    tests:     collective tests of several nodes; alone: tests of one; rounds: of all kinds
    stopped:   why it ended before it was through, such as the budget; ""
    """

    started: str
    finished: str
    complete: bool
    engine: str
    proves: str
    control: str
    budget_s: int
    tests: int
    alone: int
    rounds: int
    nodes: tuple[Node, ...]
    suspects: tuple[Suspect, ...]
    links: tuple[Link, ...]
    stopped: str = ""

    @property
    def exclude(self) -> tuple[str, ...]:
        """The fewest nodes without which nothing of what was found is left, in the order of the
        inventory: suspects, those that were not tested, and of each pair one."""
        raise NotImplementedError

    @property
    def go(self) -> tuple[str, ...]:
        """The nodes that may get the job: all others."""
        out = {*self.exclude}
        return tuple(node.name for node in self.nodes if node.name not in out)


def code(smoke: Smoke) -> int:
    """The exit code: 0 GO, 3 NO-GO, and the others as everywhere."""
    return exit_code(
        interrupted=not smoke.complete,
        usage=not smoke.nodes,
        failed=False,
        unreachable=any(node.status == UNREACHABLE for node in smoke.nodes),
        check=bool(smoke.suspects) or bool(smoke.exclude),
    )

"""`nodeready smoke` on nodes of the lab: exactly the culprit is named, and nothing is left.

NODEREADY_SMOKES=20 tries each fault at so many places, on 64 nodes over the ring and on 12 nodes
with PyTorch; without it there is one place each, on 16, and PyTorch where it makes the difference.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nodeready.lab import Lab, Node, down
from tests.command import Tool, ours, wait_for, written
from tests.lab import smoke_faults
from tests.lab.smoke_faults import FIRST, LAST, PATCHES, Fault

pytestmark = pytest.mark.xdist_group("smoke")

#: Places of each fault, and whether somebody asked for them.
ASKED = os.environ.get("NODEREADY_SMOKES", "")
PLACES = int(ASKED or "1")
#: Nodes over the ring, and with PyTorch.
MANY, TORCH_NODES = (64 if ASKED else 16), 12
#: Seconds of the budget, and those in which the command has certainly ended.
BUDGET_S, LIMIT_S = 300, 400
RING = ("--engine", "ring")
#: The system's Python with Debian's python3-torch, which nodes of the lab see; where no patch is,
#: PYTHONPATH names nothing.
TORCH = ("--engine", "torch", "--user", "ml", "--env", f"PYTHONPATH={PATCHES}")
_TORCH = Path("/usr/lib/python3/dist-packages/torch/__init__.py")


@pytest.fixture(scope="module")
def smoke_lab(lab_machine: None) -> Iterator[Lab]:
    """One lab for all of these tests; what one of them spoils it puts right."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    name = f"test-{worker}-{os.getpid()}-smoke"
    try:
        yield Lab.up(name, MANY)
    finally:
        down(name)


@pytest.fixture
def nodes(smoke_lab: Lab) -> Iterator[list[Node]]:
    """The nodes; nothing of a run may be left on any of them, and no file may be another."""
    before = {node.name: written(node) for node in smoke_lab.nodes}
    yield smoke_lab.nodes
    wait_for(lambda: not left(smoke_lab.nodes))
    for node in smoke_lab.nodes:
        assert _own(written(node)) == _own(before[node.name]), node.name


def _own(found: Mapping[str, tuple[int, int, int]]) -> set[str]:
    """The paths that a run could have made: the faults put their own back, at another time."""
    return {path for path in found if not path.startswith((PATCHES, "/etc/hosts", "/opt"))}


@pytest.fixture
def torch_nodes(nodes: list[Node]) -> list[Node]:
    """Those that make their collectives with PyTorch. Without it a skip; in CI a failure."""
    if not _TORCH.exists():
        reason = "no torch for /usr/bin/python3 (Debian: python3-torch)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return nodes[:TORCH_NODES]


def listening(node: Node) -> set[int]:
    """The ports of the range on which somebody listens."""
    rows = node.enter(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout.splitlines()
    words = [row.split() for row in rows]
    ports = {int(one[1].rpartition(":")[2], 16) for one in words if one[3] == "0A"}
    return {port for port in ports if FIRST <= port <= LAST}


def left(nodes: Sequence[Node]) -> list[str]:
    """What a run has left on these nodes: processes, temporary files, listeners, shared memory."""
    found = []
    for node in nodes:
        users = node.enter(["ps", "-u", "ml", "-o", "args="], check=False).stdout.splitlines()
        shared = node.enter(["ls", "/dev/shm"]).stdout.split()
        found += [
            f"{node.name}: {one}" for one in (*ours(node), *users, *listening(node), *shared)
        ]
    return found


class Found:
    """What the command said."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err
        assert "Traceback" not in out + err, out + err
        self.data: dict[str, Any] = json.loads(out) if out.startswith("{") else {}

    def __repr__(self) -> str:
        rows = [json.dumps(one) for one in self.data.get("suspects", ())]
        odd = [one for one in self.data.get("nodes", ()) if one["status"] != "passed"]
        return "\n".join([f"exit {self.status}", *rows, *map(json.dumps, odd), self.err[-3000:]])

    @property
    def suspects(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return tuple((one["kind"], tuple(sorted(one["nodes"]))) for one in self.data["suspects"])

    @property
    def evidence(self) -> str:
        return "\n".join(text for one in self.data["suspects"] for text in one["evidence"])

    def of(self, status: str) -> dict[str, str]:
        """The nodes of this status, with why."""
        return {one["name"]: one["why"] for one in self.data["nodes"] if one["status"] == status}


def begin(tool: Tool, where: Path, *words: object, **how: Any) -> subprocess.Popen[bytes]:
    return tool.start("smoke", where, "--budget", BUDGET_S, "--format", "json", *words, **how)


def planned(started: subprocess.Popen[bytes]) -> bytes:
    """What it has said when the tests begin: its plan is the last of that."""
    assert started.stderr is not None
    said = b""
    while b"when all is well" not in said:
        row = started.stderr.readline()
        assert row, said
        said += row
    return said


def end(started: subprocess.Popen[bytes], said: bytes = b"") -> Found:
    out, err = started.communicate(timeout=LIMIT_S)
    return Found(started.returncode, out.decode(), (said + err).decode())


def named_alone(
    fault: Fault, seed: int, nodes: Sequence[Node], start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """The fault is put somewhere: who is named, for what reason, and who may get the job."""
    placed = fault(nodes, Random(f"{fault.__name__} {seed}"))
    try:
        started = start()
        said = planned(started)
        placed.meanwhile()
        found = end(started, said)
    finally:
        placed.undo()
    assert found.suspects == placed.suspects, (placed.where, found)
    assert placed.says in found.evidence, (placed.where, found)
    assert found.status == 3, (placed.where, found)
    assert (found.data["verdict"], found.data["complete"]) == ("NO-GO", True)
    # Without the node, or without one of the two, the others may run.
    ((_, accused),) = placed.suspects
    assert len(found.data["exclude"]) == 1, found
    assert {*found.data["exclude"]} <= {*accused}
    assert len(found.data["go"]) == len(nodes) - 1


@pytest.mark.parametrize("seed", range(PLACES))
@pytest.mark.parametrize("fault", smoke_faults.PATHS, ids=lambda one: one.__name__)
def test_the_ring_names_the_culprit_alone(fault, seed, nodes, tool, fleet):
    named_alone(fault, seed, nodes, lambda: begin(tool, fleet(nodes), *RING))


@pytest.mark.parametrize("seed", range(PLACES))
@pytest.mark.parametrize(
    "fault",
    [*smoke_faults.LIBRARY, *(smoke_faults.PATHS if ASKED else [smoke_faults.black_hole])],
    ids=lambda one: one.__name__,
)
def test_the_jobs_own_pytorch_names_the_culprit_alone(fault, seed, torch_nodes, tool, fleet):
    where = fleet(torch_nodes)
    named_alone(fault, seed, torch_nodes, lambda: begin(tool, where, *TORCH))

"""`nodeready smoke` on nodes of the lab: exactly the culprit is named, and nothing is left.

`make test-lab` runs one fault of each mechanism at one place, on 16 nodes over plain TCP, and a
dead rank of PyTorch on 12; `make test-all` runs every fault. NODEREADY_SMOKES=20 tries each fault
at 20 random places, on 64 nodes over plain TCP and on 12 with PyTorch: benchmarks/HISTORY.md.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nodeready.agent.asking import Request
from nodeready.fleet.transport import srun
from nodeready.fleet.transport.allocation import running
from nodeready.lab import Lab, LabNode
from tests.command import Done, Tool, cannot_run, ours, wait_for, written
from tests.conftest import _lab_name, started_lab
from tests.lab import smoke_faults
from tests.lab.smoke_faults import PATCHES, Fault
from tests.lab.test_proof_mesh import listening
from tests.slurm_lab import SlurmLab

pytestmark = pytest.mark.xdist_group("smoke")

ASKED = os.environ.get("NODEREADY_SMOKES", "")
#: Places of each fault; nodes over plain TCP, and with PyTorch.
PLACES, MANY, TORCH_NODES = int(ASKED or "1"), (64 if ASKED else 16), 12
nightly = pytest.mark.nightly
#: Seconds of the budget, and those in which the command has certainly ended.
BUDGET_S, LIMIT_S = 300, 400
PAIRS = ("--engine", "pairs")
#: The system's Python with Debian's python3-torch, which nodes of the lab see; where no patch is,
#: PYTHONPATH names nothing.
TORCH = ("--engine", "torch", "--user", "ml", "--env", f"PYTHONPATH={PATCHES}")
_TORCH = Path("/usr/lib/python3/dist-packages/torch/__init__.py")


@pytest.fixture(scope="module")
def smoke_lab(lab_machine: None) -> Iterator[Lab]:
    """One lab for all of these tests; what one of them spoils it puts right."""
    with started_lab(_lab_name("smoke"), MANY) as lab:
        yield lab


@pytest.fixture
def nodes(smoke_lab: Lab) -> Iterator[list[LabNode]]:
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
def torch_nodes(nodes: list[LabNode]) -> list[LabNode]:
    """Those that make their collectives with PyTorch. Without it a skip; in CI a failure."""
    if not _TORCH.exists():
        cannot_run("no torch for /usr/bin/python3 (Debian: python3-torch)")
    return nodes[:TORCH_NODES]


def left(nodes: Sequence[LabNode]) -> list[str]:
    """What a run has left on these nodes: processes, temporary files, listeners, shared memory."""
    look = ["sh", "-c", "ps -u ml -o args=; ls /dev/shm"]
    return [
        f"{node.name}: {one}"
        for node in nodes
        for one in (*ours(node), *listening(node), *node.enter(look).stdout.splitlines())
    ]


class SmokeResult(Done):
    """How the command ended, and what it printed: its document, its suspects, their evidence."""

    def __init__(self, status: int, out: str, err: str) -> None:
        super().__init__(status, out, err)
        self.data: dict[str, Any] = json.loads(out) if out.startswith("{") else {}
        rows = self.data.get("suspects", ())
        self.suspects = tuple((row["kind"], tuple(sorted(row["nodes"]))) for row in rows)
        self.evidence = "\n".join(why for row in rows for why in row["evidence"])


def begin(tool: Tool, where: Path, *words: object) -> subprocess.Popen[bytes]:
    return tool.start("smoke", where, "--budget", BUDGET_S, "--format", "json", *words)


def planned(started: subprocess.Popen[bytes]) -> bytes:
    """What it has said when the tests begin: its plan is the last of that."""
    assert started.stderr is not None
    said = b""
    while b"; budget " not in said:
        row = started.stderr.readline()
        assert row, said
        said += row
    return said


def end(started: subprocess.Popen[bytes], said: bytes = b"") -> SmokeResult:
    out, err = started.communicate(timeout=LIMIT_S)
    return SmokeResult(started.returncode, out.decode(), (said + err).decode())


def named_alone(
    fault: Fault, seed: int, nodes: Sequence[LabNode], start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """The fault is put somewhere: who is named, for what reason, and who may get the job."""
    placed = fault(nodes, Random(f"{fault.__name__} {seed}"))
    try:
        said = planned(started := start())
        placed.meanwhile()
        found = end(started, said)
    finally:
        placed.undo()
    assert (found.status, found.suspects) == (3, placed.suspects), f"{placed.where}{found}"
    assert re.search(placed.says, found.evidence), f"{placed.where}{found}"
    assert (found.data["verdict"], found.data["complete"]) == ("NO-GO", True)
    # Without the node, or without one of the two, the others may run.
    ((_, accused),) = placed.suspects
    assert len(found.data["exclude"]) == 1, found
    assert {*found.data["exclude"]} <= {*accused}
    assert len(found.data["go"]) == len(nodes) - 1


def rows(*faults: Fault) -> list[Any]:
    """Each fault at each place; but for a few they are for `make test-all`."""
    return [
        pytest.param(
            fault, seed, id=f"{fault.__name__}-{seed}",
            marks=() if fault in smoke_faults.SHORT else nightly,
        )
        for fault in faults
        for seed in range(PLACES)
    ]  # fmt: skip


@pytest.mark.parametrize(("fault", "seed"), rows(*smoke_faults.PATHS))
def test_plain_tcp_names_the_culprit_alone(fault, seed, nodes, tool, fleet):
    named_alone(fault, seed, nodes, lambda: begin(tool, fleet(nodes), *PAIRS))


@pytest.mark.parametrize(
    ("fault", "seed"),
    rows(*smoke_faults.LIBRARY, *(smoke_faults.PATHS if ASKED else [smoke_faults.black_hole])),
)
def test_the_jobs_own_pytorch_names_the_culprit_alone(fault, seed, torch_nodes, tool, fleet):
    where = fleet(torch_nodes)
    named_alone(fault, seed, torch_nodes, lambda: begin(tool, where, *TORCH))


# --- Nodes that are well.


ENGINES = [pytest.param(PAIRS, id="pairs"), pytest.param(TORCH, id="torch", marks=nightly)]


@pytest.fixture(params=ENGINES)
def engine(
    request: pytest.FixtureRequest, nodes: list[LabNode]
) -> tuple[list[LabNode], tuple[str, ...]]:
    if request.param == PAIRS:
        return nodes, PAIRS
    return request.getfixturevalue("torch_nodes"), TORCH


@pytest.mark.parametrize("seed", range(50 if ASKED else 1))
def test_nobody_is_accused_among_nodes_that_are_well(seed, engine, tool, fleet):
    these, words = engine
    found = end(begin(tool, fleet(these), *words))
    assert (found.status, found.suspects) == (0, ()), found
    assert (found.data["verdict"], len(found.data["go"])) == ("GO", len(these))
    assert "warned" not in {node["status"] for node in found.data["nodes"]}, found


# --- What ends in the middle.


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(n, marks=nightly) for n in (signal.SIGTERM, signal.SIGKILL))],
)
def test_when_the_command_is_ended_nothing_is_left(number, engine, tool, fleet):
    """The ranks hang at that moment: one node hears nobody."""
    these, words = engine[0][:4], engine[1]
    placed = smoke_faults.one_direction(these, Random(str(number)))
    try:
        started = begin(tool, fleet(these), *words)
        said = planned(started)
        wait_for(lambda: any(left(these)))
        started.send_signal(number)
        found = end(started, said)
        wait_for(lambda: not left(these))
    finally:
        placed.undo()
    if number != signal.SIGKILL:
        assert (found.status, found.data["complete"]) == (130, False), found
        assert found.data["stopped"].startswith("interrupted")


# --- In a job of Slurm's, without ssh.


def test_in_a_job_by_its_own_user(slurm_lab, login, tool):
    """A step on each node, beside the job's own, which goes on."""
    these, bad = slurm_lab.nodes, slurm_lab.nodes[1]
    job = login("sbatch", "--parsable", "-N3", "-D", "/tmp", "--wrap", "srun sleep 900")
    wait_for(lambda: len(login("squeue", "-h", "-s", "-j", job).splitlines()) == 2)
    words = ("smoke", "--job", job, "--budget", BUDGET_S, "--format", "json", *PAIRS)
    well = end(tool.start(*words, env=login.env))
    assert (well.status, well.suspects) == (0, ()), well
    assert sorted(well.data["go"]) == sorted(node.name for node in these)
    # Not all of a direction: srun and slurmd talk over TCP, too.
    placed = smoke_faults.one_port([bad], Random(0))
    try:
        found = end(tool.start(*words, env=login.env))
    finally:
        placed.undo()
    assert (found.status, found.suspects) == (3, placed.suspects), found
    wait_for(lambda: not [row for node in these for row in (*ours(node), *listening(node))])
    assert len(login("squeue", "-h", "-s", "-j", job).splitlines()) == 2


@pytest.fixture
def with_gpus(slurm_lab: SlurmLab) -> Iterator[None]:
    """Slurm gives two GPUs of each node to jobs: device files are all that it asks for."""
    make = "for n in 0 1; do mknod -m 666 /dev/nvidia$n c 195 $n; done; cat >/etc/slurm/gres.conf"
    machines = [*slurm_lab.nodes, slurm_lab.controller]
    for machine in machines:
        machine.enter(["sh", "-c", make], input="Name=gpu File=/dev/nvidia[0-1]\n")
    try:
        slurm_lab.slurm_configure("GresTypes=gpu", "NodeName=DEFAULT Gres=gpu:2")
        yield
    finally:
        for machine in machines:
            machine.enter(["sh", "-c", "rm -f /dev/nvidia[01] /etc/slurm/gres.conf"])
        slurm_lab.slurm_configure()


@nightly
@pytest.mark.usefixtures("with_gpus")
@pytest.mark.parametrize(("works", "seen"), [(True, "0,1"), (False, "")])
def test_a_step_has_the_jobs_gpus_where_it_works(works, seen, slurm_lab, login, monkeypatch):
    """Also while the job's own step has them all."""
    wrap = "srun --gres=gpu:2 sleep 900"
    job = login("sbatch", "--parsable", "-N3", "--gres=gpu:2", "-D", "/tmp", "--wrap", wrap)
    wait_for(lambda: len(login("squeue", "-h", "-s", "-j", job).splitlines()) == 2)
    monkeypatch.setenv("PATH", login.env["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with srun.Srun(running(job), works=works) as transport:
        asked = 'echo "M <$CUDA_VISIBLE_DEVICES>"; cat <&3 >/dev/null'
        channel = transport.open(Request(slurm_lab.nodes[2].name, asked, 30, "", "M "))
        try:
            assert channel.read_line(30) == f"M <{seen}>", channel.error
        finally:
            channel.close()
    login("scancel", job)

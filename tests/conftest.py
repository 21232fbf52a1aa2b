"""The lab for every test that wants real nodes.

lab            three nodes that all tests of the session share: look, do not break
fresh_nodes    a factory: `fresh_nodes(2, files={...}, profile="mi300x")` gives pristine nodes, for
               this test alone, to do with as it likes
fresh_node     one of them
slurm_lab      three nodes with a real Slurm that all tests of the session share: who drains a node
               or calls `slurm_configure` puts that back
login          a user's session there: `login("sbatch", …)`, and an environment with that `srun`
own_lab        the name of a lab that is ended after the test, for tests of `lab up` itself
inventory      a factory: `inventory(nodes, core_pattern="x")` writes a pyinfra inventory of them

tool, fleet    the command as a user runs it, and inventories for it: tests/command.py

The folder of a test says what it needs: tests/unit nothing beyond Python and sh, not even root;
tests/lifecycle nodes of the lab, and no program beyond those of `make demo`; tests/lab nodes of
the lab; tests/attacks the same and somebody hostile on them; tests/vm the virtual machine;
tests/hang a real training on nodes of the lab. It says the tier, too: tests/tiers.py.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nodeready.core.result import Check
from nodeready.lab import Lab, LabNode, LabUnavailable, down, state
from nodeready.lab.host import check_kernel, check_needs
from nodeready.lab.processes import Content, nsenter
from nodeready.runs.deploy.pyinfra import DeployStep
from tests import declared, machine_reads
from tests import slurm_lab as slurm
from tests.command import cannot_run, fleet, ours, tool, wait_for
from tests.slurm_lab import SlurmLab

__all__ = ["fleet", "tool"]

pytest_plugins = ["tests.tiers"]

Files = Mapping[str, Content]


@pytest.fixture(scope="session", autouse=True)
def children_hear_signals() -> None:
    """What a test starts is not deaf to SIGINT (a script's background) or SIGHUP (nohup).

    An ignored signal is inherited by every child and its children; one with a handler is the
    default's in a child (execve(2)). The tests' own process stays deaf, as it was started.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


# test-WORKER-PID-WHAT: unique among the workers of pytest-xdist and the runs on this machine.
_OURS = re.compile(r"test-[a-z0-9]+-([0-9]+)-[a-z0-9]+")


def _lab_name(what: str) -> str:
    """A name for a lab of this test process; if it dies, the next run ends the lab."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    return f"test-{worker}-{os.getpid()}-{what}"


@pytest.fixture(scope="session", autouse=True)
def _checks_do_what_they_declare() -> Iterator[None]:
    """Whenever a test runs a check or a step, it is held to what it declares."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Check, "__call__", declared.judged)
        patch.setattr(DeployStep, "actions", declared.acted)
        yield


@pytest.fixture(scope="session", autouse=True)
def _verdicts_read_nothing_here() -> None:
    """Whenever a test observes or judges a node, no module of `subjects` reads this machine."""
    sys.addaudithook(machine_reads.refuse)


@pytest.fixture(scope="session")
def lab_machine() -> None:
    """Skip where no lab can run; in CI that is a failure."""
    try:
        check_needs()
        check_kernel()
    except LabUnavailable as error:
        cannot_run(f"no lab here: {error}")
    for name in state.names():
        match = _OURS.fullmatch(name)
        if match and not Path("/proc", match[1]).exists():
            slurm.end(name)


@pytest.fixture
def own_lab(lab_machine: None) -> Iterator[str]:
    """The name of a lab that the test may start; it is ended after the test."""
    name = _lab_name("own")
    try:
        yield name
    finally:
        down(name)


@pytest.fixture(scope="session")
def lab(lab_machine: None) -> Iterator[Lab]:
    with started_lab(_lab_name("lab"), 3) as lab:
        yield lab


@contextlib.contextmanager
def started_lab(name: str, nodes: int, profile: str = "cpu") -> Iterator[Lab]:
    """A lab, ended afterwards."""
    try:
        yield Lab.up(name, nodes, profile)
    finally:
        down(name)


@pytest.fixture(scope="session")
def slurm_lab(lab_machine: None) -> Iterator[SlurmLab]:
    """Three nodes with a real Slurm, shared by all tests of the session."""
    with started_slurm(_lab_name("slurm"), 3) as lab:
        yield lab


@contextlib.contextmanager
def started_slurm(name: str, nodes: int) -> Iterator[SlurmLab]:
    """A lab with Slurm, ended afterwards; without Slurm here the test is skipped (in CI fails)."""
    try:
        lab = slurm.start(name, nodes)
    except LabUnavailable as error:
        cannot_run(str(error))
    try:
        yield lab
    finally:
        slurm.end(name)


class Login:
    """`srun` and the others as an ordinary user on a node of a lab with Slurm."""

    def __init__(self, node: LabNode, directory: Path) -> None:
        self.directory, self.node = directory, node
        for name in ("srun", "squeue", "scontrol", "sbatch", "scancel"):
            # When the one here is ended, the one there gets a TERM.
            line = (
                f"exec {shlex.join(nsenter(node.pid))} setpriv --reuid=ml --regid=ml "
                f'--init-groups --pdeathsig=TERM {name} "$@"'
            )
            path = directory / name
            path.write_text(f"#!/bin/sh\n{line}\n")
            path.chmod(0o755)

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": f"{self.directory}:{os.environ['PATH']}"}

    def __call__(self, *words: str) -> str:
        argv = [str(self.directory / words[0]), *words[1:]]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def login(slurm_lab: SlurmLab, tmp_path: Path) -> Iterator[Login]:
    """A user's session on the first node of `slurm_lab`; the user's jobs end with the test."""
    directory = tmp_path / "bin"
    directory.mkdir()
    made = Login(slurm_lab.nodes[0], directory)
    yield made
    made("scancel", "--user=ml")
    wait_for(lambda: not made("squeue", "-h"))
    assert not [row for node in slurm_lab.nodes for row in ours(node)]


class NodePool:
    """Nodes to break: a lab per profile that grows; every node is reset for the next test."""

    def __init__(self) -> None:
        self.labs: dict[str, Lab] = {}

    def take(
        self, count: int, files: Files | None, profile: str, taken: set[str]
    ) -> list[LabNode]:
        """Pristine nodes that are not among `taken`."""
        if profile not in self.labs:
            self.labs[profile] = Lab.up(_lab_name(profile), count, profile, files)
            return self.labs[profile].nodes
        lab = self.labs[profile]
        free = [node for node in lab.nodes if node.name not in taken][:count]
        if free:
            lab.restart(free, keep_disk=False, files=files)
        if len(free) < count:
            free += lab.add(count - len(free), files)
        return free

    def end(self) -> None:
        for profile in self.labs:
            down(_lab_name(profile))


@pytest.fixture(scope="session")
def node_pool(lab_machine: None) -> Iterator[NodePool]:
    pool = NodePool()
    try:
        yield pool
    finally:
        pool.end()


@pytest.fixture
def fresh_nodes(node_pool: NodePool) -> Callable[..., list[LabNode]]:
    """A factory of pristine nodes: `fresh_nodes(count=1, files=None, profile="cpu")`."""
    taken: set[str] = set()

    def take(count: int = 1, files: Files | None = None, profile: str = "cpu") -> list[LabNode]:
        nodes = node_pool.take(count, files, profile, taken)
        taken.update(node.name for node in nodes)
        return nodes

    return take


@pytest.fixture
def fresh_node(fresh_nodes: Callable[..., list[LabNode]]) -> LabNode:
    return fresh_nodes(1)[0]


@pytest.fixture
def inventory(tmp_path: Path) -> Callable[..., Path]:
    """A factory of inventory files: `inventory(nodes, name=value)`, the values for all nodes."""

    def write(nodes: Sequence[LabNode], **data: Any) -> Path:
        path = tmp_path / "inventory.py"
        hosts = [node.inventory_data() for node in nodes]
        path.write_text(f"lab = ({hosts!r}, {data!r})\n")
        return path

    return write

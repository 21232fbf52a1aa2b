"""A real training on four nodes, eight ranks under torchrun, that hangs as it is told: for the
pictures of the documentation (`scripts/pictures.py`).
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodeready.core.policy import Policy
from nodeready.lab import LabNode
from nodeready.runs.deploy import py_spy_binary
from tests.command import wait_for

HERE = "/run/job"
NODES, PER_NODE = 4, 2
RANKS = range(NODES * PER_NODE)
PORT = 29500

# With `--redirects` and `--tee` because torch 1.13 under Python 3.11 has no value for "none".
TORCHRUN = f"""
setsid /usr/bin/python3 -m torch.distributed.run --nnodes {NODES} --nproc_per_node {PER_NODE} \
    --max_restarts 0 --redirects 1 --tee 2 --log_dir {HERE}/logs \
    --node_rank {{number}} --master_addr {{master}} --master_port {PORT} \
    {HERE}/train.py </dev/null >{HERE}/log 2>&1 &
"""


@dataclass(frozen=True)
class Stand:
    """What a rank itself says: its pid, and in which phase of which step it is."""

    pid: int
    step: int
    phase: str


class Job:
    """The job, and what can be done to it."""

    def __init__(self, nodes: Sequence[LabNode]) -> None:
        self.nodes = nodes
        tool = py_spy_binary.binary(Policy().py_spy_version, platform.machine())
        program = Path(__file__).with_name("train.py").read_text()
        for node in nodes:
            node.write("/usr/local/bin/py-spy", tool, 0o755)
            node.write(f"{HERE}/train.py", program)
            node.enter(["mkfifo", f"{HERE}/go"])
            node.enter(["chown", "-R", "ml", HERE])
        for number, node in enumerate(nodes):
            node.run(TORCHRUN.format(number=number, master=nodes[0].name), user="ml")
        try:
            self.goes_on()
        except AssertionError:
            raise AssertionError("\n".join(node.read(f"{HERE}/log") for node in nodes)) from None

    def node(self, rank: int) -> LabNode:
        return self.nodes[rank // PER_NODE]

    def file(self, rank: int, name: str) -> Path:
        """A file of the job's on the node of this rank."""
        return Path(f"/proc/{self.node(rank).pid}/root{HERE}/{name}")

    def stands(self) -> dict[int, Stand]:
        """Where every rank that ever was is, by what it wrote last."""
        stands = {}
        for rank in RANKS:
            with contextlib.suppress(FileNotFoundError):
                pid, step, phase = self.file(rank, f"rank-{rank}").read_text().split()
                stands[rank] = Stand(int(pid), int(step), phase)
        return stands

    def goes_on(self) -> None:
        """Until every rank has made two more steps. Raises AssertionError."""
        before = self.stands()
        last = max((stand.step for stand in before.values()), default=0) + 2

        def later() -> bool:
            now = self.stands()
            return len(now) == len(RANKS) and all(stand.step >= last for stand in now.values())

        wait_for(later)

    def hangs(self, phase: str, but: int | None = None) -> None:
        """Until all ranks but this one are in this phase, and stay there."""

        def still() -> bool:
            first = self.stands()
            time.sleep(1)
            others = [stand for rank, stand in first.items() if rank != but]
            return first == self.stands() and {stand.phase for stand in others} == {phase}

        wait_for(still)

    @contextlib.contextmanager
    def fault(self, rank: int, kind: str) -> Iterator[None]:
        """The rank is so, and the others wait for it; afterwards the job goes on."""
        node, faulty = self.node(rank), self.file(rank, "faulty")
        node.write(f"{HERE}/fault", f"{rank % PER_NODE} {kind}")
        wait_for(faulty.exists)
        self.hangs("reduce", but=rank)
        try:
            yield
        finally:
            node.enter(["rm", f"{HERE}/fault", f"{HERE}/faulty"])
            self.file(rank, "go").write_text("go")
        self.goes_on()

"""A job of plain Python sleepers on lab nodes: two ranks on each, everyone in `all_reduce`."""

import contextlib
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

from nodeready.core.policy import Policy
from nodeready.lab import LabNode
from nodeready.runs.deploy import py_spy_binary
from tests.command import wait_for

HERE = "/run/job"
PY_SPY = "/usr/local/bin/py-spy"
PER_NODE = 2
PORT = 29500

TRAIN = f"""
import os, sys, time
def stand():
    open("{HERE}/at-" + os.environ["RANK"], "w").write(sys.argv[1])
    time.sleep(600)
def all_reduce():
    stand()
def load_batch():
    stand()
def train():
    globals()[sys.argv[1]]()
train()
"""


class Job:
    """The ranks, and what can be done to them. ``pids``: rank -> its process."""

    #: Further variables of a rank, further words of its command line, and where its output goes.
    environment, words, log = "", "", "/dev/null"

    def __init__(self, nodes: Sequence[LabNode], train: str = TRAIN, slurm_job: str = "") -> None:
        self.nodes = nodes
        if slurm_job:
            self.environment = f"SLURM_JOB_ID={slurm_job} "
        self.size = len(nodes) * PER_NODE
        self.pids: dict[int, int] = {}
        tool = py_spy_binary.binary(Policy().py_spy_version, platform.machine())
        for node in nodes:
            node.write(PY_SPY, tool, 0o755)
            node.write(f"{HERE}/train.py", train)
        for rank in range(self.size):
            self.start(rank)

    @property
    def name(self) -> str:
        return f"{self.nodes[0].name}:{PORT}"

    def node(self, rank: int) -> LabNode:
        return self.nodes[rank // PER_NODE]

    def start(self, rank: int, where: str = "all_reduce") -> None:
        """Start a rank, and wait until it stands there."""
        node, own = self.node(rank), rank % PER_NODE
        at = f"{HERE}/at-{rank}"
        words = (
            f"RANK={rank} LOCAL_RANK={own} WORLD_SIZE={self.size} "
            f"MASTER_ADDR={self.nodes[0].name} MASTER_PORT={PORT} {self.environment}"
        )
        log = self.log.format(rank)
        line = f"/usr/bin/python3 {HERE}/train.py {where} {self.words} </dev/null >{log} 2>&1"
        node.enter(["rm", "-f", at])
        said = node.run(f"{words} setsid {line} & echo $!").stdout
        self.pids[rank] = int(said)
        wait_for(lambda: Path(f"/proc/{node.pid}/root{at}").exists())

    def end(self, rank: int) -> None:
        self.node(rank).enter(["kill", "-KILL", str(self.pids[rank])])
        wait_for(lambda: self.state(rank) in "Z")

    def state(self, rank: int) -> str:
        """The letter of /proc/PID/stat; "" when it is gone."""
        path = Path(f"/proc/{self.node(rank).pid}/root/proc/{self.pids[rank]}/stat")
        with contextlib.suppress(OSError):
            return path.read_text().rpartition(")")[2].split()[0]
        return ""

    def states(self) -> list[str]:
        return [self.state(rank) for rank in range(self.size)]

    @contextlib.contextmanager
    def elsewhere(self, rank: int, where: str = "load_batch") -> Iterator[None]:
        """This rank stands somewhere else."""
        self.end(rank)
        self.start(rank, where)
        yield
        self.end(rank)
        self.start(rank)

    @contextlib.contextmanager
    def without(self, rank: int) -> Iterator[None]:
        """This rank has died."""
        self.end(rank)
        yield
        self.start(rank)

    @contextlib.contextmanager
    def stopped(self, rank: int) -> Iterator[None]:
        """A signal has stopped this rank."""
        pid = str(self.pids[rank])
        self.node(rank).enter(["kill", "-STOP", pid])
        wait_for(lambda: self.state(rank) == "T")
        yield
        self.node(rank).enter(["kill", "-CONT", pid])

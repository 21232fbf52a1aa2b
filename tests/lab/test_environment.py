"""Wrong environments on nodes of the lab: smoke names them before a job starts, stacks while it
hangs.
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeready.lab import Lab, LabNode
from tests.cases import cases
from tests.command import wait_for
from tests.conftest import _lab_name, started_lab
from tests.lab.stacks_job import PER_NODE, TRAIN, Job

pytestmark = pytest.mark.nightly

#: A real job: it hangs, or dies, in the rendezvous of gloo.
GLOO = """
import os, time
open(f"/run/job/at-{os.environ['RANK']}", "w").write("gloo")
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
time.sleep(600)
"""


@pytest.fixture(scope="module")
def lab(lab_machine: None) -> Iterator[Lab]:
    with started_lab(_lab_name("environment"), 2, "h100") as lab:
        yield lab


class WrongJob(Job):
    """A job whose ranks have the environment of a case."""

    def __init__(self, nodes: list[LabNode], case: dict[str, Any], train: str) -> None:
        self.case, self.first = case, nodes[0]
        super().__init__(nodes, train)

    def start(self, rank: int, where: str = "all_reduce") -> None:
        extra = self.case.get("second", {}) if rank >= PER_NODE else {}
        values = {**self.case.get("env", {}), **extra}
        self.environment = " ".join(
            f"{name}={shlex.quote(value)}" for name, value in values.items()
        )
        super().start(rank, where)


def names(case: dict[str, Any], lab: Lab) -> dict[str, Any]:
    """The case with the names of the nodes."""
    first, second = (node.name for node in lab.nodes)
    return json.loads(json.dumps(case).replace("FIRST", first).replace("SECOND", second))


@pytest.fixture
def spoilt(lab: Lab, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The case, with the nodes as it wants them."""
    case = names(request.param, lab)

    def run(key: str, nodes: list[LabNode]) -> None:
        for number, node in enumerate(nodes, 1):
            if key in case:
                node.run(case[key].replace("NUMBER", str(number)))

    first, second = lab.nodes
    try:
        for key, nodes in (("setup_both", [first, second]), ("first_setup", [first]),
                           ("setup", [second])):  # fmt: skip
            run(key, nodes)
        yield case
    finally:
        for key, nodes in (("undo_both", [first, second]), ("first_undo", [first]),
                           ("undo", [second])):  # fmt: skip
            run(key, nodes)


ALL = cases(__file__, "wrong_environments.toml")


@pytest.mark.parametrize("spoilt", ALL, indirect=True)
def test_stacks_names_it_while_the_job_hangs(lab, fleet, tool, spoilt):
    train = GLOO if spoilt.get("torch") else TRAIN
    job = WrongJob(lab.nodes, spoilt, train)
    try:
        if spoilt.get("torch"):
            wait_for(lambda: all("torch" in maps(job, rank) for rank in range(job.size)))
        done = tool("stacks", fleet(lab.nodes), "--interval", "0.5", "--format", "json")
        document = done.document
        (witness,) = (row for row in document["witnesses"] if row["name"] == "environment")
        assert spoilt["words"] in "\n".join(row["text"] for row in witness["says"]), done
        if spoilt.get("torch"):
            assert document["verdict"]["kind"] == "environment", document["verdict"]
            assert spoilt["words"].partition(" ")[0] in document["verdict"]["text"]
    finally:
        for rank, pid in job.pids.items():
            job.node(rank).run(f"kill -KILL {pid} || true")


def maps(job: Job, rank: int) -> str:
    """The libraries of a rank; those of one that has ended do not matter."""
    path = Path(f"/proc/{job.node(rank).pid}/root/proc/{job.pids[rank]}/maps")
    return path.read_text() if path.exists() else "torch"


@pytest.mark.parametrize(
    "spoilt", [case for case in ALL if case.values[0].get("smoke", True)], indirect=True
)
def test_smoke_names_it_before_the_job_starts(lab, fleet, tool, spoilt):
    words = [word for name, value in spoilt.get("env", {}).items()
             for word in ("--env", f"{name}={value}")]  # fmt: skip
    done = tool("smoke", fleet(lab.nodes), "--engine", "pairs", "--gpus", "0", *words,
                "--budget", "60", "--format", "json")  # fmt: skip
    findings = done.document["environment"]
    texts = [f"{row['variable']}={row['value']} {row['problem']}".replace("= ", " ")
             for row in findings]  # fmt: skip
    assert spoilt["words"] in "\n".join(texts), done
    # It is said before the first test.
    assert done.err.index(spoilt["words"]) < done.err.index("; budget 60 s")

"""`nodeready watch` and `incident` on real nodes: a job that moves, hangs, and ends."""

from __future__ import annotations

import json
import platform
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeready.deploy import py_spy_binary
from nodeready.lab import Lab, Node, down
from nodeready.policy import Policy
from tests.command import Tool, ours, wait_for
from tests.conftest import _lab_name
from tests.lab.stacks_job import HERE, PY_SPY

PORT = 29533
SIZE = 4
TOKEN, PASSWORD = "hf_abcdefghijABCDEFGHIJ01234567", "s3cr3tpassw0rd"
QUICK = ("--every", "1", "--confirm", "3")

#: Steps of work and a line in the log, until somebody wants it to hang: then rank 3 waits for its
#: data, and all others for rank 3.
TRAIN = f"""
import os, sys, time
rank = int(os.environ["RANK"])
def wait():
    while os.path.exists("{HERE}/hang"):
        time.sleep(5)
def all_reduce():
    wait()
def load_batch():
    wait()
def train():
    step = 0
    while True:
        sum(i * i for i in range(200_000))
        (load_batch if rank == 3 else all_reduce)()
        step += 1
        print(f"[rank{{rank}}] step {{step}} with --hub-token {TOKEN}", flush=True)
        time.sleep(0.05)
train()
"""


class Job:
    """Two ranks on each of two nodes, each with a log of its own."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.pids: dict[int, int] = {}
        tool = py_spy_binary.binary(Policy().py_spy_version, platform.machine())
        for node in nodes:
            node.write(PY_SPY, tool, 0o755)
            node.write(f"{HERE}/train.py", TRAIN)

    @property
    def name(self) -> str:
        return f"{self.nodes[0].name}:{PORT}"

    def log(self, rank: int) -> str:
        return f"/var/log/train/rank{rank}.log"

    def start(self) -> None:
        for rank in range(SIZE):
            words = (
                f"RANK={rank} LOCAL_RANK={rank % 2} WORLD_SIZE={SIZE} HF_TOKEN={TOKEN} "
                f"MASTER_ADDR={self.nodes[0].name} MASTER_PORT={PORT}"
            )
            line = f"/usr/bin/python3 {HERE}/train.py --password {PASSWORD} </dev/null"
            node = self.nodes[rank // 2]
            said = node.run(
                f"mkdir -p /var/log/train; {words} setsid {line} >{self.log(rank)} 2>&1 & echo $!"
            )
            self.pids[rank] = int(said.stdout)
        wait_for(lambda: all(self.steps(rank) for rank in range(SIZE)))

    def steps(self, rank: int) -> int:
        node = self.nodes[rank // 2]
        log = Path(f"/proc/{node.pid}/root{self.log(rank)}")
        return log.read_text().count("step") if log.exists() else 0

    def hang(self) -> None:
        for node in self.nodes:
            node.write(f"{HERE}/hang", "")

    def go_on(self) -> None:
        for node in self.nodes:
            node.enter(["rm", "-f", f"{HERE}/hang"])

    def end(self) -> None:
        for rank, pid in self.pids.items():
            self.nodes[rank // 2].enter(["kill", "-KILL", str(pid)])
        self.pids.clear()

    def state(self, rank: int) -> str:
        path = Path(f"/proc/{self.nodes[rank // 2].pid}/root/proc/{self.pids[rank]}/stat")
        return path.read_text().rpartition(")")[2].split()[0]


# One worker starts the nodes, once.
pytestmark = pytest.mark.xdist_group("incident")


@pytest.fixture(scope="module")
def cluster(lab_machine: None) -> Iterator[Lab]:
    name = _lab_name("incident")
    try:
        yield Lab.up(name, 2)
    finally:
        down(name)


@pytest.fixture
def job(cluster: Lab) -> Iterator[Job]:
    made = Job(list(cluster.nodes))
    made.go_on()
    made.start()
    yield made
    made.end()
    made.go_on()
    assert not [row for node in made.nodes for row in ours(node)]


class Watching:
    """A watch that runs on, whose words can be read meanwhile."""

    def __init__(self, tool: Tool, path: Path, *words: object) -> None:
        self.path, self.tool = path, tool
        with open(path, "wb") as file:
            self.process = tool.start("watch", *words, *QUICK, stdout=file)

    def out(self) -> str:
        return self.path.read_text()

    def end(self) -> tuple[int, str]:
        done = self.tool.end(self.process)
        return done.status, self.out()


@pytest.fixture
def watching(tool: Tool, tmp_path: Path, job: Job, fleet: Callable[..., Path]) -> Watching:
    words = (fleet(job.nodes), "--job", job.name, "-o", tmp_path / "hangs")
    return Watching(tool, tmp_path / "watched", *words)


def incidents(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.is_dir()) if place.exists() else []


def test_a_hang_is_kept_once_whole_and_without_secrets(job, fleet, tool, tmp_path):
    job.hang()
    place, told = tmp_path / "hangs", tmp_path / "told"
    then = tmp_path / "then"
    then.write_text(f'#!/bin/sh\necho "$1|$NODEREADY_JOB|$NODEREADY_INCIDENT" >>{told}\n')
    then.chmod(0o755)
    done = tool(
        *("watch", fleet(job.nodes), "--job", job.name, *QUICK, "-o", place, "--once"),
        *("--then", f"{then} 'two words'"),
    )
    assert done.status == 3, done
    (kept,) = incidents(place)
    assert told.read_text() == f"two words|{job.name}|{kept}\n"
    assert f"job {job.name}: does not move: 4 ranks on " in done.out
    found = json.loads((kept / "incident.json").read_text())
    assert found["complete"] is True
    parts = {part["name"]: part["status"] for part in found["parts"]}
    assert parts == {"stacks": "kept", "logs": "kept", "cores": "empty", "audit": "kept"}
    assert found["reason"].startswith("nothing has moved for ")
    names = {path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()}
    with tarfile.open(f"{kept}.tar.gz") as archive:
        held = {one.name.partition("/")[2]: archive.extractfile(one).read() for one in archive}
    assert held.keys() == names
    for name, content in held.items():
        assert content == (kept / name).read_bytes()
        assert TOKEN.encode() not in content, name
        assert PASSWORD.encode() not in content, name
    again = tool("stacks", "--from", kept / "stacks", "--format", "json")
    kinds = [one["frames"][-2]["function"] for one in json.loads(again.out)["groups"]]
    assert sorted(kinds) == ["all_reduce", "load_batch"]
    assert {job.state(rank) for rank in range(SIZE)} == {"S"}
    done = tool("watch", fleet(job.nodes), "--job", "4711", *QUICK)
    assert done.status == 2, done
    assert "no ranks of job 4711 on " in done.err


@pytest.mark.nightly
def test_a_job_that_works_fires_nothing_and_each_hang_once(job, watching, tmp_path):
    place = tmp_path / "hangs"
    wait_for(lambda: "moves: 4 ranks" in watching.out())
    # More looks than it takes to fire.
    before = job.steps(0)
    wait_for(lambda: job.steps(0) > before + 60)
    assert incidents(place) == []
    for count in (1, 2):
        wait_for(lambda n=count: watching.out().count("moves: 4 ranks") >= n)
        job.hang()
        wait_for(lambda n=count: watching.out().count(": incident /") == n)
        job.go_on()
    wait_for(lambda: watching.out().count("moves: 4 ranks") == 3)
    job.end()
    status, out = watching.end()
    assert status == 0, out
    assert out.splitlines()[-1].endswith(f"job {job.name}: the job has ended")
    assert len(incidents(place)) == 2

"""`nodeready watch` and `incident` on real nodes: a job that moves, hangs, and ends."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeready.lab import Lab, down
from tests.command import ours, wait_for
from tests.conftest import _lab_name
from tests.lab.stacks_job import HERE, Job

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
        open(f"{HERE}/at-{{rank}}", "w").close()
        time.sleep(0.05)
train()
"""


class Moving(Job):
    """Two ranks on each of two nodes, each with a log of its own."""

    environment, words = f"HF_TOKEN={TOKEN} ", f"--password {PASSWORD}"
    log = "/var/log/train/rank{}.log"

    def steps(self) -> int:
        log = Path(f"/proc/{self.nodes[0].pid}/root{self.log.format(0)}")
        return log.read_text().count("step")

    def hang(self) -> None:
        for node in self.nodes:
            node.write(f"{HERE}/hang", "")

    def go_on(self) -> None:
        for node in self.nodes:
            node.enter(["rm", "-f", f"{HERE}/hang"])


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
def job(cluster: Lab) -> Iterator[Moving]:
    for node in cluster.nodes:
        node.enter(["sh", "-c", f"mkdir -p /var/log/train; rm -f {HERE}/hang"])
    made = Moving(list(cluster.nodes), TRAIN)
    yield made
    for rank in range(SIZE):
        made.node(rank).enter(["kill", "-KILL", str(made.pids[rank])], check=False)
    made.go_on()
    assert not [row for node in made.nodes for row in ours(node)]


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
    assert (found["complete"], found["reason"][:22]) == (True, "nothing has moved for ")
    parts = {part["name"]: part["status"] for part in found["parts"]}
    assert parts == {"stacks": "kept", "logs": "kept", "cores": "empty", "audit": "kept"}
    names = {path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()}
    with tarfile.open(f"{kept}.tar.gz") as archive:
        held = {one.name.partition("/")[2]: archive.extractfile(one).read() for one in archive}
    assert held.keys() == names
    for name, content in held.items():
        assert content == (kept / name).read_bytes()
        assert not [one for one in (TOKEN, PASSWORD) if one.encode() in content], name
    again = tool("stacks", "--from", kept / "stacks", "--format", "json")
    kinds = [one["frames"][-2]["function"] for one in json.loads(again.out)["groups"]]
    assert sorted(kinds) == ["all_reduce", "load_batch"]
    assert set(job.states()) == {"S"}
    done = tool("watch", fleet(job.nodes), "--job", "4711", *QUICK)
    assert done.status == 2, done
    assert "no ranks of job 4711 on " in done.err


@pytest.mark.nightly
def test_a_job_that_works_fires_nothing_and_each_hang_once(job, fleet, tool, tmp_path):
    place, said = tmp_path / "hangs", tmp_path / "watched"
    words = ("watch", fleet(job.nodes), "--job", job.name, "-o", place, *QUICK)
    with said.open("wb") as file:
        process = tool.start(*words, stdout=file)

    def told(words: str, count: int) -> None:
        wait_for(lambda: said.read_text().count(words) == count)

    told("moves: 4 ranks", 1)
    # More looks than it takes to fire.
    before = job.steps()
    wait_for(lambda: job.steps() > before + 60)
    assert incidents(place) == []
    for count in (1, 2):
        job.hang()
        told(": incident /", count)
        job.go_on()
        told("moves: 4 ranks", count + 1)
    for rank in range(SIZE):
        job.end(rank)
    assert tool.end(process).status == 0
    assert said.read_text().splitlines()[-1].endswith(f"job {job.name}: the job has ended")
    assert len(incidents(place)) == 2

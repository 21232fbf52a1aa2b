"""`nodeready watch` and `incident` on real nodes: a job that moves, hangs, and ends."""

import json
import tarfile
from collections.abc import Callable, Iterator

import pytest

from nodeready.lab import LabNode
from tests.command import ours, wait_for
from tests.lab.stacks_job import HERE, Job

TOKEN, PASSWORD = "hf_abcdefghijABCDEFGHIJ01234567", "s3cr3tpassw0rd"

#: Steps of work and a line in the log, until somebody wants it to hang: then rank 3 waits for its
#: data, and all others for rank 3.
TRAIN = f"""
import os, sys, time
rank = int(os.environ["RANK"])
def wait():
    while os.path.exists("{HERE}/hang"):
        beats = os.path.exists("{HERE}/beats")
        if beats:
            print("heartbeat: rank", rank, "is alive at", time.time(), flush=True)
        time.sleep(0.2 if beats else 5)
def all_reduce():
    wait()
def load_batch():
    wait()
def train():
    while True:
        sum(i * i for i in range(200_000))
        (load_batch if rank == 3 else all_reduce)()
        print(f"[rank{{rank}}] a step with --hub-token {TOKEN}", flush=True)
        open(f"{HERE}/at-{{rank}}", "w").close()
        time.sleep(0.05)
train()
"""


class Moving(Job):
    """Two ranks on each of two nodes, each with a log of its own."""

    environment, words = f"HF_TOKEN={TOKEN} ", f"--password {PASSWORD}"
    log = "/var/log/train-rank{}.log"

    def steps(self) -> int:
        return self.nodes[0].read(self.log.format(0)).count("step")


@pytest.fixture
def job(fresh_nodes: Callable[..., list[LabNode]]) -> Iterator[Moving]:
    made = Moving(fresh_nodes(2), TRAIN)
    yield made
    assert not [row for node in made.nodes for row in ours(node)]


@pytest.mark.parametrize("beats", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_hang_is_kept_once_whole_and_without_secrets(job, fleet, tool, tmp_path, beats):
    """A job that works fires nothing; that a second hang fires again, tests/unit asks.

    beats: the job's log goes on to grow while it hangs, and the watch knows its steps
    """
    place, told, said = (tmp_path / name for name in ("hangs", "told", "said"))
    then = tmp_path / "then"
    then.write_text(f'#!/bin/sh\necho "$1|$NODEREADY_JOB|$NODEREADY_INCIDENT" >>{told}\n')
    then.chmod(0o755)
    words = ("watch", fleet(job.nodes), "--interval", "1s", "--confirm", "3", "--job")
    with said.open("wb") as file:
        more = ["-o", place, "--once", "--then", f"{then} 'two words'"]
        more += ["--progress", "a st.p with"] if beats else []
        watching = tool.start(*words, job.name, *more, stdout=file)
    wait_for(lambda: "moves: 4 ranks" in said.read_text())
    # More looks than it takes to fire.
    before = job.steps()
    wait_for(lambda: job.steps() > before + 60)
    assert not place.exists()
    for node in job.nodes:
        if beats:
            node.write(f"{HERE}/beats", "")
        node.write(f"{HERE}/hang", "")
    assert tool.end(watching).status == 3
    (kept,) = (path for path in place.iterdir() if path.is_dir())
    assert told.read_text() == f"two words|{job.name}|{kept}\n"
    assert f"job {job.name}: does not move: 4 ranks on " in said.read_text()
    found = json.loads((kept / "incident.json").read_text())
    assert (found["complete"], found["reason"][:22]) == (True, "nothing has moved for ")
    parts = {part["name"]: part["status"] for part in found["parts"]}
    assert parts == {"stacks": "kept", "logs": "kept", "cores": "empty", "audit": "kept"}
    with tarfile.open(f"{kept}.tar.gz") as archive:
        held = {one.name.partition("/")[2]: archive.extractfile(one).read() for one in archive}
    files = [path for path in kept.rglob("*") if path.is_file()]
    assert held == {path.relative_to(kept).as_posix(): path.read_bytes() for path in files}
    everything = b"".join(held.values())
    assert (TOKEN.encode() in everything, PASSWORD.encode() in everything) == (False, False)
    again = tool("stacks", "--from", kept / "stacks", "--format", "json")
    kinds = [one["frames"][-2]["function"] for one in again.document["groups"]]
    assert sorted(kinds) == ["all_reduce", "load_batch"]
    assert set(job.states()) == {"S"}
    done = tool(*words, "4711")
    assert (done.status, "no ranks of job 4711 on " in done.err) == (2, True), done

"""The same hang under every launcher: each rank is found, by its number, and the culprit is first.

Each runs in process and mount namespaces of its own: what is found is its, and all ends with it.
Slurm's step runs on nodes of the lab.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nodeready.lab import Lab
from tests.builders.proof import put_py_spy
from tests.command import Tool, wait_for
from tests.hang.play import HERE, free_port
from tests.hang.pythons import ALL, DEBIAN, Python, found, needed

LAUNCHED = HERE / "launched"
Seen = dict[str, Any]


@dataclass(frozen=True)
class Launcher:
    """One row.

    command:  for a shell, in the directory of the launched programs
    ranks:    how many; the last one reads
    module:   what the Python must have; "": torch alone
    program:  what must be on this machine
    core:     in the short run
    numbered: whether anybody can tell the numbers of the ranks from outside
    """

    name: str
    command: str
    ranks: int = 4
    module: str = ""
    program: str = ""
    core: bool = False
    numbered: bool = True


_TORCHRUN = "{python} -m torch.distributed.run --master_addr 127.0.0.1 --master_port {port}"
_LOOP = (
    "export MASTER_ADDR=127.0.0.1 MASTER_PORT={port} WORLD_SIZE=4;"
    " for RANK in 0 1 2 3; do RANK=$RANK {python} script.py {directory} & done; wait"
)
_JAX = "for n in 0 1; do {python} jax_run.py $n 2 {port} {directory} & done; wait"

LAUNCHERS = (
    Launcher("torchrun", f"{_TORCHRUN} --nproc_per_node 4 script.py {{directory}}", core=True),
    Launcher(
        "torchrun-rdzv",
        "{python} -m torch.distributed.run --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{port}"
        " --rdzv_id run-7 --nnodes 1 --nproc_per_node 2 script.py {directory}",
        ranks=2,
    ),
    Launcher(
        "torchrun-two-nodes",
        f"for n in 0 1; do {_TORCHRUN} --nnodes 2 --node_rank $n --nproc_per_node 2"
        " script.py {directory} & done; wait",
    ),
    Launcher("spawn", "{python} spawn.py {port} {directory}", core=True),
    Launcher("shell", _LOOP),
    Launcher(
        "mpirun",
        "mpirun --allow-run-as-root --oversubscribe --mca btl self,tcp --mca plm_rsh_agent false"
        " -np 2 -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT={port} {python} script.py {directory}",
        ranks=2,
        program="mpirun",
    ),
    Launcher("lightning", "{python} lightning_fit.py", ranks=2, module="lightning"),
    Launcher("ray-train", "{python} ray_train.py", ranks=2, module="ray"),
    Launcher(
        "accelerate",
        # With --cpu it would start one process, whatever --num_processes says.
        "ACCELERATE_USE_CPU=true"
        " {python} -m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1"
        " --mixed_precision no --dynamo_backend no --main_process_port {port}"
        " script.py {directory}",
        ranks=2,
        module="accelerate",
    ),
    Launcher(
        "deepspeed",
        "DS_ACCELERATOR=cpu {python} -m deepspeed.launcher.runner --num_gpus 2"
        " --master_port {port} deepspeed_train.py",
        ranks=2,
        module="deepspeed",
    ),
    Launcher("jax", _JAX, ranks=2, module="jax", numbered=False),
)


def rows() -> list[Any]:
    pythons = [python for python in found() if not python.debian]
    return [
        pytest.param(python, launcher, id=f"{python.name}-{launcher.name}")
        for python in pythons[:1]
        for launcher in LAUNCHERS
        if ALL or launcher.core
    ] + [
        # What is too heavy for everybody's tests, where somebody has it.
        pytest.param(python, launcher, id=f"{python.name}-{launcher.name}")
        for python in pythons[1:]
        for launcher in LAUNCHERS
        if ALL and launcher.module and python.has(launcher.module)
    ]


class Box:
    """Namespaces for processes and mounts: the job and the command see nobody else."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            ["unshare", "-p", "-f", "-m", "--mount-proc", "--kill-child", "sleep", "infinity"],
            start_new_session=True,
        )
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        wait_for(lambda: bool(children.read_text().split()))
        self.pid = children.read_text().split()[0]
        comm = Path(f"/proc/{self.pid}/comm")
        wait_for(lambda: comm.read_text() == "sleep\n")

    def argv(self, *words: str) -> list[str]:
        return ["nsenter", "-t", self.pid, "-p", "-m", "--wd=" + os.getcwd(), "--", *words]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def box(lab_machine: None) -> Iterator[Box]:
    box = Box()
    yield box
    box.end()


def look(box: Box, tool: Tool) -> tuple[Seen, str, int]:
    directory = tool.home / "kept"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = ["-m", "nodeready", "stacks", "--local", "-v", "-o", str(directory)]
    done = subprocess.run(
        box.argv(sys.executable, *words),
        env=tool.environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr, done
    assert done.returncode in (0, 3), done
    return json.loads((directory / "stacks.json").read_text()), done.stdout, done.returncode


@pytest.mark.parametrize(("python", "launcher"), rows())
def test_every_rank_is_found_and_the_last_is_the_culprit(
    python: Python, launcher: Launcher, box: Box, tool: Tool, tmp_path: Path
) -> None:
    needed()
    if launcher.program and not shutil.which(launcher.program):
        reason = f"no {launcher.program} here (scripts/setup.sh test)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    if launcher.module and not python.has(launcher.module):
        pytest.skip(f"no {launcher.module} in {python.path}: too heavy to install for the tests")
    place = tmp_path / "job"
    place.mkdir()
    os.mkfifo(place / "fifo")
    command = launcher.command.format(python=python.path, port=free_port(), directory=place)
    path = f"{Path(python.path).parent}:{os.environ['PATH']}"
    with open(place / "log", "w") as log:
        job = subprocess.Popen(
            box.argv("sh", "-c", f"cd {LAUNCHED} && {command}"),
            env={
                "PATH": path,
                "HOME": str(tmp_path),
                "OMP_NUM_THREADS": "1",
                "HANG_DIRECTORY": str(place),
                "PYTHONDONTWRITEBYTECODE": "1",
                "RAY_TRAIN_V2_ENABLED": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    ranks = range(launcher.ranks)

    def there() -> bool:
        assert job.poll() is None, (place / "log").read_text()[-3000:]
        return all((place / f"stand-{rank}").exists() for rank in ranks)

    try:
        for _ in range(3):
            # Some import for a minute on a busy machine.
            with contextlib.suppress(AssertionError):
                wait_for(there)
        assert there(), (place / "log").read_text()[-3000:]
        seen, told, _status = look(box, tool)
        with open(place / "fifo", "w") as fifo:
            fifo.write("go")
        wait_for(lambda: all((place / f"done-{rank}").exists() for rank in ranks))
    finally:
        job.kill()
        job.wait()
    last = launcher.ranks - 1
    pids = {rank: int((place / f"stand-{rank}").read_text()) for rank in ranks}
    told_pids = {one["pid"]: one for one in seen["processes"]}
    wrong = []
    if {*told_pids} != {*pids.values()}:
        wrong.append(f"processes found: {sorted(told_pids)}, not {pids}")
    if launcher.numbered:
        if seen["world_size"] != launcher.ranks:
            wrong.append(f"world_size is {seen['world_size']}")
        numbers = {one["rank"]: pid for pid, one in told_pids.items()}
        if numbers != pids:
            wrong.append(f"ranks found: {numbers}, not {pids}")
    first = [pid for pid, one in told_pids.items() if one["group"] == 0]
    if first != [pids[last]] or seen["groups"][0]["role"] != "suspect":
        wrong.append(f"first is {first} ({seen['groups'][0]['role']}), not {pids[last]}")
    if (seen["verdict"] or {}).get("kind") not in ("late", "storage"):
        wrong.append(f"the verdict is {seen['verdict']}")
    if "read_shard" not in told:
        wrong.append("nothing is said of read_shard")
    assert not wrong, f"{wrong}\n{told}"


#: A step of Slurm's with a rank on each node; srun gives each its number.
_SRUN = """#!/bin/sh
export MASTER_ADDR=$(scontrol show hostnames | head -1) MASTER_PORT=29500 OMP_NUM_THREADS=1
exec srun -n3 /usr/bin/python3 /run/launched/script.py /run/launched
"""


def test_srun_with_a_rank_on_each_node(
    slurm_lab: Lab, tool: Tool, fleet: Callable[..., Path], tmp_path: Path
) -> None:
    """Debian's torch: the nodes have it, whatever this machine has beside."""
    if DEBIAN not in found():
        pytest.skip("no torch for /usr/bin/python3 (Debian: python3-torch)")
    nodes = slurm_lab.nodes
    files = {rank: Path(f"/proc/{node.pid}/root/run/launched") for rank, node in enumerate(nodes)}
    for node in nodes:
        put_py_spy(node)
        for name in ("rank.py", "script.py"):
            node.write(f"/run/launched/{name}", (LAUNCHED / name).read_text())
        node.enter(["mkfifo", "/run/launched/fifo"])
        node.enter(["chmod", "-R", "a+rwX", "/run/launched"])
    script = tmp_path / "job.sh"
    script.write_text(_SRUN)
    where = ("-N3", "-n3", "--ntasks-per-node=1", "--overcommit", "-D", "/tmp", "-o", "/tmp/out")
    job = slurm_lab.slurm_run("sbatch", "--parsable", *where, str(script)).stdout.strip()
    try:
        wait_for(lambda: all((at / f"stand-{rank}").exists() for rank, at in files.items()))
        done = tool("stacks", fleet(nodes), "--job", job, "--format", "json")
        assert done.status == 0, done
        seen = json.loads(done.out)
        (files[2] / "fifo").write_text("go")
        wait_for(lambda: all((at / f"done-{rank}").exists() for rank, at in files.items()))
    finally:
        slurm_lab.slurm_run("scancel", job)
        for node in nodes:
            node.enter(["rm", "-rf", "/run/launched"])
    first, rest = seen["groups"]
    assert (seen["job"], seen["world_size"]) == (job, 3)
    assert (first["ranks"], first["role"], first["nodes"]) == ([2], "suspect", [nodes[2].name])
    assert (rest["ranks"], rest["role"]) == ([0, 1], "victim")
    assert seen["verdict"]["kind"] in ("late", "storage")
    assert seen["verdict"]["suspects"][0]["ranks"] == [2]

"""A debugger of one rank under torchrun: the other rank waits in its collective meanwhile."""

import os
import subprocess

import pytest

from nodeready.agent import run as supervisor
from tests.command import wait_for
from tests.hang.play import PATH, free_port
from tests.hang.pythons import DEBIAN, found, missing

TRAIN = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
rank = dist.get_rank()
loss = torch.tensor([float(rank + 1)])
breakpoint()
dist.all_reduce(loss)
print(f"rank {rank} has {loss.item():g}", flush=True)
"""


@pytest.mark.parametrize("wraps", ["the worker", "the agent"])
def test_a_rank_of_torchrun_waits_and_all_go_on(tool, tmp_path, wraps):
    if DEBIAN not in found():
        missing("no torch of Debian's", in_ci=not found())
    train = tmp_path / "train.py"
    train.write_text(TRAIN)
    run = [DEBIAN.path, "-I", "-S", supervisor.__file__, "--debug-rank", "1"]
    torchrun = [DEBIAN.path, "-m", "torch.distributed.run", "--nproc_per_node", "2",
                "--master_port", str(free_port()), "--redirects", "1",
                "--tee", "2", "--log_dir", str(tmp_path / "logs")]  # fmt: skip
    if wraps == "the worker":
        words = [*torchrun, "--no_python", *run, DEBIAN.path, str(train)]
    else:
        words = [*run, *torchrun, str(train)]
    log = tmp_path / "log"
    env = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        job = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)

    def text() -> str:
        files = [path for path in tmp_path.glob("logs/**/std*") if path.is_file()]
        return "".join(path.read_text() for path in (log, *files))

    try:
        wait_for(lambda: "rank 1 waits for a debugger" in text())
        assert "rank 0 waits" not in text()
        look = ("stacks", "--local", "--match", str(train), "--attach", "1")
        typed = tmp_path / "typed"
        typed.write_text("p loss\nn\nc\n")
        with typed.open() as stdin:
            done = tool(*look, stdin=stdin, env={"PATH": PATH})
        assert done.status == 0, done
        assert "tensor([2.])" in done.out
        assert job.wait(60) == 0
    finally:
        job.kill()
        job.wait()
    assert "rank 0 has 3" in text()
    assert "rank 1 has 3" in text()
    assert not [*tmp_path.glob("nodeready-*")]

"""`nodeready run --watch` under torchrun: the stacks are on disk before the job's timeout."""

import os
import subprocess
import sys
from pathlib import Path

from tests.hang.play import free_port
from tests.hang.pythons import DEBIAN, found, missing

#: The stacks are taken after 0.6 of it, and have the rest of it, on a machine that is busy.
TIMEOUT_S = 100
TRAIN = f"""
import datetime, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={TIMEOUT_S}))
if dist.get_rank() == 1:
    time.sleep(600)
dist.all_reduce(torch.zeros(1))
"""


def test_the_stacks_of_a_hang_are_kept_before_the_timeout(tmp_path):
    if DEBIAN not in found():
        missing("no torch of Debian's", in_ci=not found())
    train = tmp_path / "train.py"
    train.write_text(TRAIN)
    program = Path(sys.executable).with_name("nodeready")
    torchrun = [DEBIAN.path, "-m", "torch.distributed.run", "--nproc_per_node", "2",
                "--master_port", str(free_port()), "--redirects", "1", "--tee", "2",
                "--log_dir", str(tmp_path / "logs"), "--no_python"]  # fmt: skip
    rank = [str(program), "run", "--watch", DEBIAN.path, str(train)]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1",
           "PATH": f"{program.parent}:{os.environ['PATH']}"}  # fmt: skip
    # torchrun ends with a failure, after which nothing is left of the watch.
    done = subprocess.run([*torchrun, *rank, "--ddp_timeout", str(TIMEOUT_S)], env=env, text=True,
                          capture_output=True, timeout=3 * TIMEOUT_S, check=False)  # fmt: skip
    assert "Timed out waiting" in done.stderr
    incident, _, after = done.stderr.partition(".tar.gz: late: rank 1 ")
    assert "Timed out waiting" in after
    assert "Timed out waiting" not in incident
    (archive,) = tmp_path.glob("nodeready/incidents/*.tar.gz")
    text = Path(str(archive).removesuffix(".tar.gz"), "stacks", "stacks.txt").read_text()
    assert "victim   rank 0" in text

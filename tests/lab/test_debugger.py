"""The debugger of a rank in a step of Slurm; and in a Python that runs scripts of others."""

import shutil
import subprocess
from pathlib import Path

import pytest

from nodeready.agent import payload
from nodeready.agent import run as supervisor
from nodeready.agent.debugger import DebuggerConfig
from tests.command import cannot_run, wait_for
from tests.lab.stacks_job import HERE

TRAIN = """
import os
rank = int(os.environ["SLURM_PROCID"])
breakpoint()
open(f"/run/job/end-{rank}", "w").close()
"""


def test_a_rank_of_a_step_of_slurm_by_its_ordinary_user(slurm_lab, login, tool, tmp_path):
    for node in slurm_lab.nodes:
        node.write(f"{HERE}/train.py", TRAIN)
        node.write(f"{HERE}/run.py", Path(supervisor.__file__).read_text())
        node.enter(["sh", "-c", f"chmod 1777 {HERE}; rm -f {HERE}/end-*"])
    run = f"srun python3 -I -S {HERE}/run.py --debug-rank 1 python3 {HERE}/train.py"
    number = login("sbatch", "--parsable", "-N2", "-D", "/tmp", "-o", f"{HERE}/log", "--wrap", run)
    first, second = (Path(f"/proc/{node.pid}/root{HERE}") for node in slurm_lab.nodes[:2])
    # The other rank does not wait.
    wait_for((first / "end-0").exists)
    wait_for(lambda: "rank 1 waits for a debugger" in (first / "log").read_text())
    typed = tmp_path / "typed"
    typed.write_text("p rank + 4710\n")
    words = ("stacks", "--via", "srun", "--job", number, "--attach")
    with typed.open() as stdin:
        done = tool(*words, "1", stdin=stdin, env=login.env)
    assert done.status == 0, done
    assert "(Pdb) 4711\n" in done.out
    wait_for((second / "end-1").exists)


# --- Python 3.14 runs a script of another process (PEP 768).

TURNS = """
import time
turns = 0
while True:
    turns += 1
    time.sleep(0.01)
"""
SLEEPS = "import time; time.sleep(600)"
#: Starts the rank, and becomes the node's program; its words are those of the rank.
DRIVER = """
import subprocess, sys, time
with open("/program") as file:
    program = file.read()
rank = subprocess.Popen([sys.executable, *sys.argv[1:]])
time.sleep(1)
try:
    exec(program.replace("987654", str(rank.pid)))
finally:
    print("alive", rank.poll() is None)
    rank.kill()
"""


@pytest.fixture(scope="module")
def root_314(tmp_path_factory) -> Path:
    """A directory with Debian's Python 3.14 and what it needs."""
    root = tmp_path_factory.mktemp("python") / "root"
    said = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    mirror = (said.stdout.split() or ["http://deb.debian.org/debian"])[0]
    argv = ["mmdebstrap", "--variant=extract", "--aptopt=Acquire::Check-Valid-Until false"]
    argv += ["--include=python3.14-minimal,libpython3.14-stdlib,libc6", "sid", str(root)]
    argv += [f"deb {mirror} sid main"]
    lacks = not shutil.which(argv[0])
    if lacks or subprocess.run(argv, capture_output=True, check=False).returncode:
        cannot_run("Debian's Python 3.14 is not here")
    for name in ("bin", "lib", "lib64"):
        if not (root / name).exists():
            (root / name).symlink_to(f"usr/{name}")
    for name in ("proc", "tmp", "dev"):
        (root / name).mkdir(exist_ok=True)
    return root


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "typed", "shown"),
    [
        (("-c", TURNS), "p turns > 0\nn\nq\n", "True"),
        (("-X", "disable-remote-debug", "-c", TURNS), "", "and RuntimeError: Remote debugging"),
        (("-c", SLEEPS), "", "its main thread runs no Python: it is in a call of C"),
    ],
)
def test_a_rank_that_was_not_prepared(lab_machine, root_314, words, typed, shown):
    program = payload.text(
        "nodeready.agent.debugger", DebuggerConfig("NONCE", "nodeready:test", 1, 987654, 60)
    )
    (root_314 / "program").write_text(program)
    script = 'mount -t proc proc "$0/proc" && mount --bind /dev "$0/dev" && exec chroot "$0" "$@"'
    python = ["/usr/bin/python3.14", "-I", "-S", "-c", DRIVER]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, str(root_314), *python, *words],
        input=typed, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert shown in done.stdout, done
    assert done.stdout.endswith("alive True\n")
    assert not [*(root_314 / "tmp").iterdir()]

"""An ordinary user's processes are no ranks of another's job, whatever their environment says."""

import os

from tests.attacks.opens import opened
from tests.builders.proof import put_py_spy
from tests.command import wait_for
from tests.lab.targets import WAIT


def launch(person, program, **values):
    words = [f"{name}={value}" for name, value in values.items()]
    return person.start("env", *words, "python3", "-c", program)


def count(node, uid, least):
    there = f"test $(pgrep -c -u {uid} python3) -ge {least}"
    wait_for(lambda: node.enter(["sh", "-c", there], check=False).returncode == 0)


#: More ranks than the job has, and each of them moves.
MOVES = """
import os, time
for number in range(5):
    if os.fork() == 0:
        os.environ["RANK"] = str(number)
        move = "import time\\nwhile True: sum(range(99999)), time.sleep(0.2)"
        os.execvp("python3", ["python3", "-S", "-c", move])
time.sleep(600)
"""


def test_who_claims_a_job_hides_neither_its_hang_nor_its_ranks(mallory, bob, tool, fleet):
    """She has more ranks than bob, and they move. Slurm tells whose the job is: by a stand-in."""
    node = mallory.node
    put_py_spy(node)
    where, log = fleet([node]), tool.home / "watch.log"
    job = {"SLURM_JOB_ID": 4711, "MASTER_ADDR": "a", "MASTER_PORT": 29500}
    for rank in range(2):
        launch(bob, WAIT, RANK=rank, WORLD_SIZE=2, UP="/dev/null", **job)
    count(node, bob.uid, 2)
    words = ("--job", "4711", "--every", 1, "--confirm", 3, "--once", "-o", tool.home / "hangs")
    with log.open("wb") as file:
        watching = tool.start("watch", where, *words, stdout=file)
        wait_for(lambda: "2 ranks" in log.read_text())
        launch(mallory, MOVES, RANK=0, WORLD_SIZE=5, **job)
        count(node, mallory.uid, 5)
        assert tool.end(watching).status == 3
    assert "moves: " not in log.read_text()
    # Nothing tells whose it is.
    done = tool("watch", where, *words, status=2)
    assert "is unknown: uid 4001 and uid 4002 claim it: --user NAME" in done.err
    squeue = tool.home / "squeue"
    squeue.write_text(f"#!/bin/sh\necho '4711|4711|{bob.uid}|'\n")
    squeue.chmod(0o755)
    path = {"PATH": f"{tool.home}:{os.environ['PATH']}"}
    words = ("stacks", where, "--job", "4711", "--samples", 1)
    done = tool(*words, "--format", "json", env=path)
    found = done.document
    assert (found["user"], [one["rank"] for one in found["processes"]]) == ("bob", [0, 1]), done
    assert [(one["user"], one["stranger"]) for one in found["others"]] == [("mallory", True)]
    assert f"claim to be of job 4711 and are not: of mallory on {node.name}" in " ".join(
        found["advice"]
    )


#: A rank whose process has mapped a libpython of hers, whose name is now that file, now a link.
SWAPS = """
import ctypes, mmap, os, shutil, sys, time
home, leads = os.environ["HOME"], sys.argv[1]
name = f"{home}/libpython3.11.so.1.0"
shutil.copy("/bin/true", name)
os.symlink(leads, f"{home}/other")
code = mmap.PROT_READ | mmap.PROT_EXEC
mapped = mmap.mmap(os.open(name, os.O_RDONLY), 4096, mmap.MAP_PRIVATE, code)
libc = ctypes.CDLL(None)
if os.fork() == 0:
    while True:
        assert libc.renameat2(-100, name.encode(), -100, f"{home}/other".encode(), 2) == 0
time.sleep(600)
"""


def test_roots_py_spy_opens_no_more_than_its_processs_user_may(mallory, tool, fleet):
    """A map's name is opened by py-spy; of a device, that alone has an effect."""
    node = mallory.node
    put_py_spy(node)
    node.enter(["install", "-d", "-m", "755", "/srv/devices"])
    node.enter(["install", "-m", "600", "/dev/null", "/srv/devices/watchdog"])
    mallory.start("env", "RANK=0", "WORLD_SIZE=1", "python3", "-c", SWAPS, "/srv/devices/watchdog")
    count(node, mallory.uid, 2)
    where = fleet([node])
    with opened(node, "/srv/devices") as names:
        for _ in range(2):
            done = tool("stacks", where, "--samples", 6, "--interval", 0.1, "--format", "json")
            assert done.document["processes"], done
    assert names == set()

"""Mallory fills the directory of logs; `nodeready tail` by root opens nothing of it that is no
log, shows nothing that she could not read, and bob's log is there all the same.
"""

import os
import subprocess

import pytest

from nodeready.lab import LabNode
from nodeready.lab.processes import nsenter
from nodeready.runs.postmortem.directory import NoEvidenceError, read_directory
from tests.attacks.conftest import Person
from tests.attacks.opens import opened
from tests.builders.proof import put_py_spy
from tests.command import Done, ours, wait_for, written

LOGS = "/var/log/train"
SECRET = "s3cr3t-of-root"


@pytest.fixture
def node(fresh_node: LabNode, mallory: Person, bob: Person) -> LabNode:
    """A node with a log directory that everybody may write to, bob's log in it, and secrets."""
    fresh_node.enter(["install", "-d", "-m", "1777", LOGS])
    fresh_node.enter(["sh", "-c", f"echo {SECRET} >/etc/shadow; chmod 600 /etc/shadow"])
    fresh_node.enter(["install", "-d", "-m", "700", "/root/only"])
    fresh_node.enter(["sh", "-c", f"echo {SECRET} >/root/only/rank_77.log"])
    bob.run(f"echo 'step 4711' >{LOGS}/rank_0.log; umask 077; echo {SECRET} >secret")
    return fresh_node


def told(done: Done) -> dict[str, tuple[str, list[str]]]:
    """Name -> why it was not read, and its lines."""
    return {
        file["path"].rpartition("/")[2]: (group["why"], group["lines"])
        for group in done.document["groups"]
        for file in group["files"]
    }


def test_what_mallory_could_not_read_is_not_shown(node, mallory, bob, tool, fleet):
    mallory.run(f"""
        cd {LOGS}
        mkfifo rank_10.log
        python3 -c 'import socket; socket.socket(1).bind("rank_11.log")'
        mkdir rank_13.log
        ln -s /etc/shadow rank_14.log
        ln -s {bob.home}/secret rank_15.log
        ln -s /root/only d_16
        ln -s rank_0.log rank_17.log
        ln -s /proc/self/environ rank_20.log
        """)
    node.enter(["mknod", "-m", "666", f"{LOGS}/rank_12.log", "c", "1", "5"])
    node.enter(["ln", "/etc/shadow", f"{LOGS}/rank_18.log"])
    node.enter(["ln", f"{bob.home}/secret", f"{LOGS}/rank_19.log"])
    before = written(node)
    where = fleet([node])
    with opened(node, LOGS) as names, opened(node, "/root/only") as roots:
        done = tool("tail", where, f"{LOGS}/rank_*.log", "--format", "json")
        below = tool("tail", where, f"{LOGS}/d_*/*.log", "--format", "json")
    assert SECRET not in done.out + done.err + below.out + below.err
    assert "rank_77" not in below.out + below.err
    assert (names, roots) == ({"rank_0.log"}, set())
    found = told(done)
    assert found["rank_0.log"] == ("", ["step 4711"])
    assert found["rank_14.log"][0] == found["rank_15.log"][0] == "permission denied"
    assert "hard link" in found["rank_18.log"][0]
    assert "hard link" in found["rank_19.log"][0]
    assert done.status == 3, done
    assert (written(node), ours(node)) == (before, [])


def test_a_log_that_becomes_a_link_in_between_is_not_followed(node, mallory, bob, tool, fleet):
    """She exchanges a directory of hers for a link to root's again and again, while root looks."""
    mallory.run(f"mkdir {LOGS}/hers; echo plain >{LOGS}/hers/rank_77.log")
    mallory.python(f"""
import ctypes, os
os.chdir({LOGS!r})
os.symlink("/root/only", "other")
renameat2 = ctypes.CDLL(None).renameat2
while True:
    assert renameat2(-100, b"hers", -100, b"other", 2) == 0
""")
    where = fleet([node])
    with opened(node, "/root/only") as roots:
        for _ in range(2):
            done = tool("tail", where, f"{LOGS}/hers/rank_*.log", "--format", "json")
            assert SECRET not in done.out + done.err
    assert roots == set()


#: A rank whose log has the name of another file in a mount namespace of its own.
RANK = """
import sys, time
print("step 4711", flush=True)
open(sys.argv[1], "w").close()
time.sleep(600)
"""
#: $1: a directory of the caller's, put over $2; $3: a name there; $4: said when it is up.
ELSEWHERE = """
    mount --bind "$1" "$2" && cd / && exec python3 -c "$0" "$4" >"$2/$3" 2>&1
"""


def test_no_incident_keeps_what_the_ranks_user_could_not_read(node, mallory, bob, tool, fleet):
    """The name of a log is its process's word: in its mount namespace it is another file."""
    put_py_spy(node)
    bob.run(f"umask 077; echo {SECRET} >diary")
    mallory.run("mkdir over up")
    node.enter(["sh", "-c", f"mkdir /srv/container; echo {SECRET} >/root/only/host.log"])
    job = ("env", "MASTER_ADDR=a", "MASTER_PORT=29500", "WORLD_SIZE=3")
    own = ("unshare", "--map-root-user", "--mount", "sh", "-c", ELSEWHERE, RANK)
    for rank, (place, name) in enumerate((("/etc", "shadow"), (bob.home, "diary"))):
        words = (f"{mallory.home}/over", place, name, f"{mallory.home}/up/{rank}")
        mallory.start(*job, f"RANK={rank}", *own, *words)
    contained = ("unshare", "--mount", "sh", "-c", ELSEWHERE, RANK)
    where = ("/srv/container", "/root/only", "host.log", f"{mallory.home}/up/2")
    started = subprocess.Popen([*nsenter(node.pid), *job, "RANK=2", *contained, *where])
    try:
        wait_for(lambda: len(node.run(f"ls {mallory.home}/up").stdout.split()) == 3)
        done = tool("incident", fleet([node]), "--job", "a:29500", "-o", tool.home / "hang")
    finally:
        started.kill()
        started.wait()
    files = [path for path in (tool.home / "hang").rglob("*") if path.is_file()]
    assert [path.name for path in files if SECRET in path.read_text()] == [], done
    logs = {path.name[4:]: path.read_text() for path in (tool.home / "hang/logs").iterdir()}
    assert sorted(text.count("step 4711") for text in logs.values()) == [1, 1, 1], logs


def test_a_link_of_hers_above_logs_that_root_reads_here_leads_where_she_may_read(tmp_path):
    """`postmortem --from` on the control machine: her link to root's directory, and to her own."""
    for directory in (tmp_path, *tmp_path.parents[:-2]):
        directory.chmod(0o755)
    roots, hers = tmp_path / "root", tmp_path / "hers"
    for directory, mode in ((roots, 0o700), (hers, 0o755)):
        (directory / "run").mkdir(parents=True)
        (directory / "run" / "rank_0.log").write_text(f"RuntimeError: of {directory.name}\n")
        directory.chmod(mode)
    (hers / "latest").symlink_to("run")
    (hers / "stolen").symlink_to(roots / "run")
    for path in (hers, *hers.rglob("*")):
        os.chown(path, 4001, 4001, follow_symlinks=False)
    (file,) = read_directory(hers / "latest").files
    assert [event.text for event in file.failures.events] == ["RuntimeError: of hers"]
    for path in (hers / "stolen", hers / "stolen" / "rank_0.log"):
        with pytest.raises(NoEvidenceError, match=f"^{roots}.*: permission denied$"):
            read_directory(path)

"""The lab gives what a cluster has: nodes of their own, real ssh, and nothing left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nodeready.lab import Lab, LabError, host, image, processes, state
from tests.cases import read_data
from tests.command import wait_for
from tests.helpers import Done, nodeready
from tests.lab.rows import rows
from tests.paths import ROOT


def run(*argv: object, **environment: str) -> Done:
    env = {**os.environ, **environment}
    how = {"cwd": ROOT, "env": env, "capture_output": True, "text": True}
    return subprocess.run(list(map(str, argv)), check=False, **how)


def traces(name: str, index: int | None) -> list[str]:
    """Whatever this machine still has of a lab."""
    directory = state.ROOT / name
    found = [f"process {pid}" for pid in processes.of_lab(directory)]
    paths = [directory, *([Path("/sys/class/net", host.interface(index))] if index else [])]
    found += [str(path) for path in paths if path.exists()]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{directory}/" in (process / "mountinfo").read_text():
                found.append(f"mount in {process}")
    return found


@pytest.fixture
def name(own_lab: str) -> str:
    """The name of a lab that does not exist."""
    assert traces(own_lab, None) == []
    return own_lab


def loaded(name: str) -> Lab:
    lab = Lab.load(name)
    assert lab is not None
    return lab


def index_of(name: str) -> int | None:
    return getattr(state.load(name), "index", None)


def test_life_of_a_lab(name):
    first = nodeready("lab", "up", "--nodes", "2", "--name", name, status=0)
    assert first.stdout.startswith(f"{name}: 2 nodes up: {name}[001-002]\n")
    lab = loaded(name)
    index = index_of(name)
    assert traces(name, index) != []
    pids = [node.pid for node in lab.nodes]

    again = nodeready("lab", "up", "--nodes", "2", "--name", name)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.startswith(f"{name}: already up, 2 nodes")
    assert [node.pid for node in lab.nodes] == pids

    shown = nodeready("lab", "status").stdout
    row = next(line for line in shown.splitlines() if line.split()[0] == name)
    addresses = f"{lab.nodes[0].address}-{lab.nodes[1].address}"
    assert row.split() == [name, "cpu", "2/2", f"{name}[001-002]", addresses]
    login = next(line for line in shown.splitlines() if line.startswith(f"{name}: log in: "))
    assert run(*login.partition("log in: ")[2].split(), "hostname").stdout == f"{name}001\n"

    ended = nodeready("lab", "down", "--name", name)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{name}: ended\n", "")
    assert traces(name, index) == []
    nothing = nodeready("lab", "down", "--name", name)
    assert (nothing.returncode, nothing.stdout) == (0, f"{name}: no such lab runs\n")


def test_up_starts_what_is_dead_or_missing(name):
    lab = Lab.up(name, 2)
    healthy, dead = lab.nodes
    dead.run("echo mine > /etc/kept; echo gone > /run/gone")
    dead.kill()
    with pytest.raises(LabError, match="is dead"):
        dead.enter(["true"])
    status = nodeready("lab", "status", status=3)
    assert f"{name}: dead: {dead.name}" in status.stdout
    pid = healthy.pid

    done = nodeready("lab", "up", "--nodes", "3", "--name", name)
    assert done.stdout.startswith(f"{name}: 2 of 3 nodes started")
    lab = loaded(name)
    assert lab.nodes[0].pid == pid
    assert lab.nodes[1].run("cat /etc/kept; ls /run/gone", check=False).stdout == "mine\n"
    hosts = lab.nodes[0].run(f"getent hosts {lab.nodes[2].name}").stdout.split()
    assert hosts == [lab.nodes[2].address, lab.nodes[2].name]
    # A dead switch is replaced.
    known = state.load(name)
    assert known is not None
    processes.end(known.switch)
    Lab.up(name, 3).nodes[0].run("true")
    # A state file that is broken is named, and the lab can be ended.
    (state.directory(name) / "state.json").write_text('{"name": ')
    for words in (["up", "--name", name], ["status"]):
        done = nodeready("lab", *words)
        assert done.returncode in (1, 3)
        assert f"clean up: nodeready lab down --name {name}" in done.stdout + done.stderr
    assert nodeready("lab", "down", "--name", name).returncode == 0
    # The kernel takes the interface away after its namespace.
    wait_for(lambda: traces(name, known.index) == [])


def test_two_ups_at_once_make_one_lab(name):
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda _: nodeready("lab", "up", "--name", name), range(2)))
    assert [done.returncode for done in answers] == [0, 0]
    assert sorted("already" in done.stdout for done in answers) == [False, True]


#: Moments of a start, by the lab's directory.
MOMENTS: dict[str, Callable[[Path], bool]] = {
    "begun": Path.exists,
    "no node": lambda directory: (directory / "fs" / "nodes").exists(),
    "some nodes": lambda directory: len(processes.of_lab(directory)) > 8,
}
CUTS = [
    ("some nodes", signal.SIGKILL),
    ("no node", signal.SIGINT),
    ("begun", signal.SIGKILL),
    ("some nodes", signal.SIGTERM),
]


def cut(name: str, moment: str, signum: signal.Signals) -> tuple[int | None, int, str]:
    """A start of many nodes that gets a signal: the lab's index, the exit status, what it said."""
    argv = [sys.executable, "-m", "nodeready", "lab", "up", "--nodes", "48", "--name", name]
    how = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, **how) as process:
        while process.poll() is None and not MOMENTS[moment](state.directory(name)):
            time.sleep(0.001)
        index = index_of(name)
        process.send_signal(signum)
        _, errors = process.communicate()
    return index, process.returncode, errors


@pytest.mark.parametrize(("moment", "signum"), rows(CUTS, *CUTS[:2]))
def test_up_cut_short_leaves_nothing(name, moment, signum):
    index, status, errors = cut(name, moment, signum)
    if signum == signal.SIGKILL:
        assert (status, Lab.load(name)) == (-signal.SIGKILL, None)
        unfinished = nodeready("lab", "status")
        assert (unfinished.returncode, f"{name}: unfinished" in unfinished.stdout) == (3, True)
        if moment == "some nodes":
            # Another up begins anew.
            done = nodeready("lab", "up", "--nodes", "1", "--name", name)
            assert done.stdout.startswith(f"{name}: 1 nodes up: {name}001\n"), done
            assert len(processes.of_lab(state.directory(name))) == 2  # the switch and the node
            index = index_of(name)
        assert nodeready("lab", "down", "--name", name).returncode == 0
    else:
        assert (status, "Traceback" in errors) == (130, False)
    wait_for(lambda: traces(name, index) == [])


@pytest.mark.nightly
def test_a_running_lab_survives_a_crash_while_it_grows(name):
    pid = Lab.up(name, 1).nodes[0].pid
    cut(name, "some nodes", signal.SIGKILL)
    assert nodeready("lab", "up", "--nodes", "4", "--name", name).returncode == 0
    lab = loaded(name)
    assert lab.nodes[0].pid == pid
    names = [node.run("hostname").stdout for node in lab.nodes[:4]]
    assert names == [f"{name}{number:03d}\n" for number in range(1, 5)]
    assert len(processes.of_lab(state.directory(name))) == 1 + len(lab.nodes)


def test_a_separate_file_system_of_the_machine_is_part_of_the_node(name):
    mounted = "mount -t tmpfs t /usr/local/share && echo here > /usr/local/share/x"
    script = f"{mounted} && exec {sys.executable} -m nodeready lab up --nodes 1 --name {name}"
    subprocess.run(["unshare", "--mount", "sh", "-c", script], cwd=ROOT, check=True)
    lab = loaded(name)
    assert lab.nodes[0].run("cat /usr/local/share/x").stdout == "here\n"


#: A root of these directories of this machine. `$1`: what makes it a mount point.
CHROOT = read_data(__file__, "chroot.sh")


def test_a_lab_in_a_chroot_enters_its_nodes_and_not_the_machine(name):
    """Its root is not that of its mount namespace, into which `nsenter` alone leads."""
    up = (sys.executable, "-m", "nodeready", "lab", "up", "--nodes", "1", "--name", name)
    chroot = ("unshare", "--mount", "sh", "-ec", CHROOT, "sh")
    refused = run(*chroot, "", *up)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1), refused
    assert "mount --bind" in refused.stderr
    done = run(*chroot, "mount --rbind /mnt/root /mnt/root", *up)
    assert done.returncode == 0, done
    (node,) = loaded(name).nodes
    assert node.enter(["sh", "-c", "cat /etc/hostname; pwd"]).stdout == f"{node.name}\n/\n"


def test_the_inventory_of_the_lab(lab):
    pyinfra = Path(sys.executable).with_name("pyinfra")
    argv = (pyinfra, "inventories/lab.py", "-y", "exec", "--", "hostname")
    done = run(*argv, NODEREADY_LAB=lab.name)
    assert done.returncode == 0, done.stderr
    for node in lab.nodes:
        assert f"[{node.name}] {node.name}" in done.stdout + done.stderr


def test_a_machine_that_cannot_says_so_in_one_line(name):
    up = (sys.executable, "-m", "nodeready", "lab", "up", "--name", name)
    for done, says in (
        (run("unshare", "--user", *up), "run it as root"),
        (run(*up, PATH="/no"), "not installed: ssh, nsenter; install openssh-client"),
    ):
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1), done
        assert says in done.stderr
        assert traces(name, None) == []


def test_the_kernel_knows_all_neighbours_of_a_large_lab(tmp_path, monkeypatch):
    """All namespaces share a table of 1,024 by default."""
    limit, before = tmp_path / "gc_thresh3", tmp_path / "before"
    limit.write_text("1024\n")
    monkeypatch.setattr(host, "_NEIGHBOURS", limit)
    monkeypatch.setattr(host, "_NEIGHBOURS_BEFORE", before)
    for nodes, room in ((20, 1024), (64, 8192), (32, 8192), (100, 20000)):
        host.make_room(nodes)
        assert int(limit.read_text()) == room
    for _ in range(2):
        host.restore_neighbour_limit()
        assert (limit.read_text(), before.exists()) == ("1024\n", False)
    # In a container that has no such file nothing is changed, and nothing is wrong.
    limit.unlink()
    host.make_room(100)
    assert not limit.exists()
    assert not before.exists()


def test_files_of_nodeready_are_not_looked_for_behind_links(tmp_path, monkeypatch):
    """An image of a container engine below /var/lib has such a link: var/run -> /run."""
    for path in ("lib/nodeready/inner", "etc/sysctl.d"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "etc/sysctl.d/99-nodeready.conf").touch()
    (tmp_path / "etc/back").symlink_to(tmp_path / "lib")
    monkeypatch.setattr(image, "OURS", (str(tmp_path / "etc"),))
    assert list(image._nodeready_paths()) == [f"{tmp_path}/etc/sysctl.d/99-nodeready.conf"]

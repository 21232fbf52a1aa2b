"""`nodeready undrain` after real "Kill task failed" drains: who returns, and what holds the rest.

A job reads a FUSE file system that never answers: state D, which Slurm's SIGKILL does not end.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nodeready.agent.gate.drain import INCIDENTS
from nodeready.lab import LabNode
from nodeready.subjects.gate import facts as probe
from tests.cases import read_data, read_table
from tests.command import WAIVERS, Tool, wait_for
from tests.conftest import _lab_name, started_slurm
from tests.lab.test_gate import SETTINGS
from tests.slurm_lab import SlurmLab

pytestmark = [pytest.mark.xdist_group("undrain"), pytest.mark.nightly]

REASON = "Kill task failed"
CONF = ("UnkillableStepTimeout=3", "KillWait=1", "MessageTimeout=5")
POLICY = {**SETTINGS, "waivers": WAIVERS, "gate_undrain": True}
NODES = 5
#: Ignores TERM, and has open what it is told to open.
STUBBORN = (
    "import signal, sys, time\nsignal.signal(15, signal.SIG_IGN)\n"
    "files = [open(path) for path in sys.argv[1:]]\ntime.sleep(600)\n"
)
MOUNT, FUSE, HOLDS_OPEN = "/mnt/hang", "/run/fuse.py", "/run/stubborn.py"
FREEZER = "/sys/fs/cgroup/freezer"


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undrain") / "inventory.py"


@pytest.fixture(scope="module")
def cluster(lab_machine: None, where: Path) -> Iterator[SlurmLab]:
    """Nodes with a policy, with the users ml and eve."""
    with started_slurm(_lab_name("undrain"), NODES) as lab:
        for node in (*lab.nodes, lab.controller):
            node.run("useradd -m -u 2001 eve")
            node.write(FUSE, read_data(__file__, "undrain_fuse.py"))
            node.write(HOLDS_OPEN, STUBBORN)
        where.write_text(f"lab = ({lab.inventory_data()!r}, {POLICY!r})\n")
        lab.slurm_configure(*CONF)
        yield lab


@pytest.fixture
def undrain(cluster: SlurmLab, where: Path, tool: Tool) -> Callable[..., dict[str, Any]]:
    """Run the command; the nodes of its document by name."""
    env = {"SLURM_CONF": str(cluster.slurm_conf)}
    if not cluster.nodes[0].run(f"ls {probe.HEALTH_CHECK}", check=False).stdout:
        tool("deploy", where, "--yes", "-q", status=0)

    def run(*words: str, status: int) -> dict[str, Any]:
        done = tool("undrain", where, "--format", "json", "--user", "ml", *words, env=env)
        assert done.status == status, done
        return {node["name"]: node for node in done.document["nodes"]}

    return run


def state(node: LabNode) -> tuple[bool, str]:
    """Whether Slurm has drained the node, and the reason."""
    shown = node.lab.slurm_run("scontrol", "show", "node", node.name).stdout
    reason = [row.strip() for row in shown.splitlines() if row.strip().startswith("Reason=")]
    return "DRAIN" in shown, reason[0][7:].rpartition(" [")[0] if reason else ""


def as_user(node: LabNode, user: str, script: str, **values: str) -> str:
    """Run it on the node, outside of every login; what it prints."""
    words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "env"]
    words += [f"{name}={value}" for name, value in values.items()]
    return node.enter([*words, "sh", "-c", script]).stdout.strip()


def submit(node: LabNode, user: str, command: str) -> str:
    words = f"sbatch --parsable -n1 -w {node.name} -D /tmp -o /dev/null --wrap '{command}'"
    number = as_user(node, user, words)
    known = ("scontrol", "show", "job", number)
    wait_for(lambda: "JobState=RUNNING " in node.lab.slurm_run(*known).stdout)
    return number


def start(node: LabNode, *words: str, **values: str) -> int:
    """Start the stubborn program on the node, outside of every job; its pid."""
    argv = " ".join(("/usr/bin/python3", HOLDS_OPEN, *words))
    return int(
        as_user(node, "ml", f"setsid {argv} >/dev/null 2>&1 </dev/null & echo $!", **values)
    )


def serve(node: LabNode, path: str, uid: int) -> None:
    """Mount the file system that does not answer."""
    node.run(
        "rm -f /run/release /run/mounted; "
        f"setsid /usr/bin/python3 {FUSE} {path} {uid} >/dev/null 2>&1 </dev/null &"
    )
    wait_for(lambda: node.run("ls /run/mounted", check=False).stdout)


def fail_to_kill(node: LabNode) -> str:
    """Have Slurm drain the node with "Kill task failed"; the number of the job."""
    serve(node, MOUNT, 0)
    number = submit(node, "ml", f"cat {MOUNT}/x")
    in_d = "grep -s request_wait_answer /proc/[0-9]*/wchan"
    wait_for(lambda: node.run(in_d, check=False).stdout)
    node.lab.slurm_run("scancel", number)
    wait_for(lambda: state(node) == (True, REASON))
    return number


def release(node: LabNode) -> None:
    """Let the job's process end; Slurm ends the job."""
    node.run("touch /run/release")
    wait_for(lambda: not node.run("pgrep -x cat", check=False).stdout)
    node.run(f"umount -l {MOUNT}", check=False)
    squeue = ("squeue", "-h", "-t", "CG", "-w", node.name)
    wait_for(lambda: not node.lab.slurm_run(*squeue).stdout)


def cgroup_leftover(node: LabNode, number: str) -> int:
    """A process in the cgroup of a job."""
    pid = start(node)
    group = f"{FREEZER}/slurm_{node.name}/uid_2000/job_{number}/step_batch"
    node.run(f"mkdir -p {group}; echo {pid} >{group}/cgroup.procs")
    return pid


#: What holds a node -> makes it, for the job of this number; a pid if a process can be ended.
HOLDS: dict[str, Callable[[LabNode, str], int | None]] = {
    "D": lambda node, number: None,
    "cgroup": cgroup_leftover,
    "claim": lambda node, number: start(node, SLURM_JOB_ID=number),
    "gpu": lambda node, number: start(node, "/dev/nvidia0") and None,
    "shm": lambda node, number: node.run("touch /dev/shm/nccl-Qx", user="ml") and None,
    "elastic": lambda node, number: node.run("mkdir /tmp/torchelastic_ab", user="ml") and None,
    "job mount": lambda node, number: (
        node.run(f"mkdir -p /tmp/job_{number}; mount -t tmpfs tmpfs /tmp/job_{number}") and None
    ),
    "user mount": lambda node, number: serve(node, "/home/ml/m", 2000),
}
KINDS = {"D": "process", "cgroup": "process", "claim": "process", "gpu": "process"}
KINDS |= {"shm": "files", "elastic": "files", "job mount": "mount", "user mount": "mount"}
#: 30 drains: what holds each node, ten of them; "": nothing.
ROUNDS = read_table(__file__, "ROUNDS")


def eves(node: LabNode) -> str:
    """The pid of the living job."""
    return str(node.run("pgrep -u eve python3", check=False).stdout)


def clean(node: LabNode) -> None:
    """The node as it was, and in service."""
    node.run(
        "touch /run/release; pkill -KILL -u ml; scancel -u eve; pkill -KILL -u eve; "
        "rm -rf /dev/shm/nccl* /tmp/torchelastic* /dev/nvidia0; "
        f"umount -l {MOUNT} /home/ml/m /tmp/job_*",
        check=False,
    )
    release(node)
    wait_for(lambda: not node.lab.slurm_run("squeue", "-h", "-w", node.name).stdout)
    if state(node)[0]:
        node.lab.slurm_run("scontrol", "update", f"nodename={node.name}", "state=resume")


@pytest.mark.parametrize("holds", ROUNDS, ids=map(" ".join, ROUNDS))
def test_nodes_return_unless_something_holds_them(cluster, undrain, holds):
    nodes = cluster.nodes
    living = {}
    try:
        for node in nodes:
            node.run("mknod -m 666 /dev/nvidia0 c 1 3", check=False)
            # A living job of another user, with all that a leftover could be.
            number = submit(node, "eve", f"exec python3 {HOLDS_OPEN} /dev/nvidia0")
            as_user(node, "eve", "touch /dev/shm/nccl-living")
            wait_for(lambda node=node: eves(node))
            living[node.name] = (number, eves(node))
        with ThreadPoolExecutor(NODES) as pool:
            numbers = list(pool.map(fail_to_kill, nodes))
        pids = {}
        for node, number, kind in zip(nodes, numbers, holds, strict=True):
            if kind != "D":
                release(node)
            if kind:
                pids[node.name] = HOLDS[kind](node, number)
        found = undrain("--yes", status=3 if any(holds) else 0)
        for node, kind in zip(nodes, holds, strict=True):
            row = found[node.name]
            assert row["outcome"] == ("stays" if kind else "returned"), row
            assert state(node) == ((True, REASON) if kind else (False, ""))
            assert bool(row["leftovers"]) == bool(kind), row
            for leftover in row["leftovers"][: bool(kind)]:
                assert (leftover["kind"], leftover["uid"]) == (KINDS[kind], 2000), row
        # Nothing was ended; now only processes of jobs that are over are.
        for node in nodes:
            if pid := pids.get(node.name):
                node.run(f"kill -0 {pid}")
        found = undrain(
            "--yes", "--end-leftovers", status=3 if {*holds} - {"", "cgroup", "claim"} else 0
        )
        for node, kind in zip(nodes, holds, strict=True):
            if kind in ("cgroup", "claim"):
                row = found[node.name]
                assert row["outcome"] == "returned", row
                (evidence,) = json.loads(node.read(f"{row['incident']}/incident.json"))[
                    "leftovers"
                ]
                assert evidence["pid"] == pids[node.name]
                assert row["incident"].startswith(f"{INCIDENTS}/")
            elif kind:
                assert state(node) == (True, REASON)
        for node in nodes:
            number, pid = living[node.name]
            shown = cluster.slurm_run("scontrol", "show", "job", number).stdout
            assert "JobState=RUNNING " in shown
            assert eves(node) == pid
            assert node.run("ls /dev/shm/nccl-living").stdout
    finally:
        for node in nodes:
            clean(node)


def test_the_drain_of_a_person_stays_and_the_gate_returns_only_slurms(cluster, undrain):
    node = cluster.nodes[0]
    healthcheck = f"env -i SLURMD_NODENAME={node.name} {probe.HEALTH_CHECK}"
    update = ("scontrol", "update", f"nodename={node.name}")
    try:
        cluster.slurm_run(*update, "state=drain", "reason=disk swap")
        node.run(healthcheck)
        row = undrain("--yes", "--end-leftovers", status=0)[node.name]
        assert (row["outcome"], state(node)) == ("stays", (True, "disk swap"))
        cluster.slurm_run(*update, "state=resume")
        number = fail_to_kill(node)
        node.run(healthcheck)
        assert state(node) == (True, REASON)
        release(node)
        pid = start(node, SLURM_JOB_ID=number)
        done = node.run(
            f"SLURMD_NODENAME={node.name} python3 {probe.BUNDLE} healthcheck", check=False
        )
        assert f"not undrained: process {pid} of ml (job {number}, CANCELLED)" in done.stderr
        assert state(node) == (True, REASON)
        node.run(f"kill -KILL {pid}")
        node.run(healthcheck)
        assert state(node) == (False, "")
    finally:
        clean(node)

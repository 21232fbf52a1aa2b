"""A job on three nodes hangs, crashes and is looked into: stacks, tail, incident, cores, smoke.

Plain Python ranks, nothing of torch. Each test leaves the job as it was.
"""

import json
import re
import shlex
import tarfile
from collections.abc import Iterator
from datetime import datetime, timezone

import pytest

from nodeready.lab import LabNode
from tests.cases import read_table
from tests.command import ours, wait_for, written
from tests.lab.stacks_job import HERE, Job

pytestmark = pytest.mark.xdist_group("lifecycle-job")

LATE = 3
LOGS = "/var/log/train"


#: A stand-in for PyTorch: its file and function, in which ranks wait for each other.
TORCH = read_table(__file__, "TORCH")
TRAIN = f"""
import os, sys, time
from torch.distributed import distributed_c10d
def mark():
    open("{HERE}/at-" + os.environ["RANK"], "w").close()
def all_reduce():
    distributed_c10d.all_reduce(mark)
def load_batch():
    mark()
    time.sleep(600)
def train():
    globals()[sys.argv[1]]()
train()
"""


@pytest.fixture(scope="module")
def job(nodes: list[LabNode]) -> Job:
    """Six ranks that wait in `all_reduce`."""
    for node in nodes:
        for path, text in TORCH.items():
            node.write(f"{HERE}/torch/{path}", text)
    return Job(nodes, TRAIN)


@pytest.fixture
def late_rank(job: Job) -> Iterator[int]:
    """This rank still loads its batch; afterwards nobody was touched and nothing of ours runs."""
    with job.elsewhere(LATE):
        yield LATE
        assert set(job.states()) == {"S"}
        assert not [row for node in job.nodes for row in ours(node)]


def test_jobs_says_what_runs_where(job, nodes, where, tool):
    (found,) = tool("jobs", where, "--format", "json").document["jobs"]
    assert (found["job"], found["ranks"], found["world_size"]) == (job.name, [*range(6)], 6)
    assert found["nodes"] == [node.name for node in nodes]
    assert found["since"] < datetime.now(timezone.utc).isoformat()


def test_stacks_names_the_late_rank_first(late_rank, job, where, tool, tmp_path):
    kept = tmp_path / "hang"
    done = tool("stacks", where, "--interval", "0.3", "-o", kept, status=0)
    assert re.search(rf"^late +rank {late_rank}", done.out, re.M), done
    assert done.out.index("load_batch") < done.out.index("all_reduce")
    document = json.loads((kept / "stacks.json").read_text())
    verdict, groups = document["verdict"], document["groups"]
    assert [suspect["ranks"] for suspect in verdict["suspects"]] == [[late_rank]]
    assert [group["ranks"] for group in groups] == [[3], [0, 1, 2, 4, 5]]
    assert (document["world_size"], document["complete"]) == (6, True)
    # The same again, without the nodes.
    again = tool("stacks", "--from", kept, "--format", "json")
    assert again.document["groups"] == groups


#: Without the sample for jobs of slow steps, 8 s later: nobody moves here.
SOON = """
from nodeready.runs.stacks import collect
collect.LONGER_S = 0.0
"""


def test_incident_keeps_the_evidence_in_one_archive(late_rank, job, where, tool, tmp_path):
    tool("incident", where, "--job", job.name, "-o", tmp_path / "kept", first=SOON, status=0)
    (archive,) = tmp_path.glob("kept*.tar.gz")
    assert archive.stat().st_mode & 0o777 == 0o600
    with tarfile.open(archive) as tar:
        names = [name.partition("/")[2] for name in tar.getnames()]
        (stacks,) = [name for name in tar.getnames() if name.endswith("stacks/stacks.json")]
        member = tar.extractfile(stacks)
        assert member is not None
        suspects = json.load(member)["verdict"]["suspects"]
    assert [suspect["ranks"] for suspect in suspects] == [[late_rank]]
    assert "README.txt" in names or "index.html" in names or "incident.json" in names, names


def test_tail_shows_the_odd_log_before_the_equal_ones(nodes, where, tool):
    for index, node in enumerate(nodes):
        steps = "".join(f"[rank{index}]: step {step}\n" for step in range(30))
        node.write(f"{LOGS}/rank_{index}.log", steps)
    nodes[1].write(f"{LOGS}/rank_1.log", "[rank1]: step 29\nNCCL error\x1b[2J\n")
    before = [written(node) for node in nodes]
    done = tool("tail", where, f"{LOGS}/rank_*.log", "-n", "2", "--format", "json", status=0)
    groups = done.document["groups"]
    assert [[file["rank"] for file in group["files"]] for group in groups] == [[1], [0, 2]]
    table = tool("tail", where, f"{LOGS}/rank_*.log", "-n", "2")
    assert "\x1b" not in table.out
    assert [written(node) for node in nodes] == before


#: Ranks on a star of sockets: the last one raises, and all others lose a peer.
DYING = """
import os, select, socket, sys, time
rank, size, master = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
print(time.strftime("%Y-%m-%d %H:%M:%S"), "INFO rank", rank, flush=True)
if rank == 0:
    server = socket.create_server(("", 29517))
    peers = [server.accept()[0] for _ in range(1, size)]
else:
    while True:
        try:
            peers = [socket.create_connection((master, 29517))]
            break
        except OSError:
            time.sleep(0.05)
def load(batch):
    return {"a": 1}[batch]
def all_reduce():
    if select.select(peers, [], []):
        raise ConnectionResetError("Connection closed by peer")
if rank == size - 1:
    load("b")
all_reduce()
"""


def test_postmortem_names_the_rank_that_failed_first(nodes, where, tool, tmp_path):
    logs = "/var/log/dead"
    for rank, node in enumerate(nodes):
        node.write(f"{HERE}/dying.py", DYING)
        node.enter(["mkdir", "-p", logs])
        node.run(
            f"RANK={rank} WORLD_SIZE={len(nodes)} setsid /usr/bin/python3 {HERE}/dying.py "
            f"{nodes[0].address} >{logs}/rank_{rank}.log 2>&1 </dev/null &"
        )
    for rank, node in enumerate(nodes):
        wait_for(lambda node=node, rank=rank: "Error: " in node.read(f"{logs}/rank_{rank}.log"))
    before = [written(node) for node in nodes]
    kept = tmp_path / "dead.json"
    done = tool("postmortem", where, "--logs", f"{logs}/*.log", "-o", f"json:{kept}", status=0)
    assert done.out.split()[:3] == ["exception", "rank", "2"]
    document = json.loads(kept.read_text())
    cause = document["cause"]
    assert (cause["kind"], cause["ranks"], cause["nodes"]) == ("exception", [2], [nodes[2].name])
    assert "KeyError: 'b'" in cause["text"]
    lost = [group["ranks"] for group in document["failures"] if group["role"] == "lost"]
    assert lost == [[0, 1]]
    assert [written(node) for node in nodes] == before


def test_cores_groups_a_crash_by_where_it_happened(nodes, where, tool):
    for node in nodes:
        node.write("/proc/sys/kernel/core_pattern", "/var/crash/core.%e.%P.%h.%t\n")
        node.enter(["install", "-d", "-m", "1777", "/var/crash"])
    crash(nodes[0], 4)
    crash(nodes[2], 5)
    done = tool("cores", where, "--format", "json", status=0)
    (group,) = done.document["groups"]
    assert (group["signal_name"], group["ranks"]) == ("SIGSEGV", [4, 5])
    assert group["nodes"] == sorted([nodes[0].name, nodes[2].name])
    # The name of the function that crashed needs debug symbols on some systems.
    assert any("_ctypes" in frame["library"] for frame in group["frames"]), group
    node_file = nodes[0].run("ls /var/crash").stdout
    assert node_file.count("core.") == 1


def crash(node: LabNode, rank: int, *, time: int = 0, uid: int = 0) -> str:
    """Crash a rank; the path of its core, with the name that the node's own pattern gives it.

    time: in its name; 0: one for each rank
    gdb writes the core: the kernel of the lab is this machine's, and its core_pattern may give
    cores to a program of this machine. The cores of a kernel are the virtual machine's (tests/vm).
    """
    program = shlex.quote("import ctypes; ctypes.string_at(0)")
    script = f"""
        set -eu
        mkdir -m 777 /var/crash/now; cd /var/crash/now; umask 077
        setpriv --reuid {uid} --regid {uid} --clear-groups \
            env RANK={rank} SLURM_JOB_ID=88 gdb -nx -batch -ex run -ex generate-core-file \
            --args /usr/bin/python3 -c {program} >&2
        pid=$(echo core.*); pid=${{pid#core.}}
        path=/var/crash/core.python3.$pid.$(uname -n).{time or 1000 + rank}
        mv core.$pid $path; rmdir /var/crash/now; echo $path
    """
    return node.enter(["sh", "-c", script]).stdout.strip()


def test_smoke_lets_the_others_go_without_a_lost_node(nodes, where, tool, tmp_path):
    exclude = tmp_path / "exclude"
    words = ("smoke", where, "--engine", "pairs", "--ranks", "1", "--exclude-out", exclude)
    good = tool(*words, "--format", "json", status=0)
    assert good.document["verdict"] == "GO"
    lost = nodes[2]
    lost.stop_sshd()
    try:
        done = tool(*words, "--format", "json")
    finally:
        lost.resume_sshd()
    document = done.document
    assert done.status == 4, done
    assert document["go"] == [node.name for node in nodes[:2]]
    assert exclude.read_text().strip() == lost.name
    assert not [row for node in nodes for row in ours(node)]

"""`nodeready stacks` on real nodes: who stands where, who is missing; nobody is touched."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from nodeready.core.policy import Policy
from nodeready.lab import Lab, LabNode
from nodeready.runs.deploy import py_spy_binary
from tests.command import Done, ours, wait_for
from tests.conftest import Login, _lab_name, started_lab
from tests.lab.stacks_job import HERE, PY_SPY, TRAIN, Job

QUICK = ("--interval", "0.3")


@pytest.fixture(scope="module")
def job(lab_machine: None) -> Iterator[Job]:
    """Eight ranks on four nodes, shared by the tests here: each leaves it as it was."""
    with started_lab(_lab_name("stacks"), 4) as lab:
        yield Job(lab.nodes)


@pytest.fixture
def where(job: Job, fleet: Callable[..., Path]) -> Iterator[Path]:
    """The inventory of the job's nodes; afterwards all is as it was, and none of ours there."""
    before = job.pids.copy()
    yield fleet(job.nodes)
    assert not [row for node in job.nodes for row in ours(node)]
    if job.pids == before:
        assert set(job.states()) == {"S"}


def groups(done: Done) -> list[tuple[str, list[int]]]:
    """Kind and ranks of each group, of a run with --format json."""
    return [(one["kind"], one["ranks"]) for one in done.document["groups"]]


def test_a_missing_rank_and_one_that_is_stopped(job, where, tool):
    with job.without(5), job.stopped(2):
        done = tool("stacks", where, *QUICK, "--format", "json")
        assert job.state(2) == "T"
    assert done.status == 3, done
    assert groups(done) == [("missing", [5]), ("stopped", [2]), ("stack", [0, 1, 3, 4, 6, 7])]


def test_without_py_spy_there_is_what_the_kernel_tells_and_what_to_do(job, where, tool):
    node = job.nodes[1]
    node.enter(["mv", PY_SPY, f"{PY_SPY}.away"])
    try:
        done = tool("stacks", where, *QUICK, "--format", "json")
        table = tool("stacks", where, *QUICK)
    finally:
        node.enter(["mv", f"{PY_SPY}.away", PY_SPY])
    assert done.status == 3, done
    assert groups(done) == [("no-data", [2, 3]), ("stack", [0, 1, 4, 5, 6, 7])]
    assert {one["state"] for one in done.document["processes"]} == {"S"}
    assert "py-spy is not installed (nodeready deploy installs it)" in table.out


def test_a_check_of_a_job_names_a_variable_that_keeps_ranks_apart(job, where, tool):
    job.environment = "GLOO_SOCKET_IFNAME=lo"
    with job.elsewhere(5, "all_reduce"):
        job.environment = ""
        done = tool("stacks", where, *QUICK, "--check", "--format", "json")
    found = {(row["item"], row["result"]): row for row in done.document["findings"]}
    assert found["stack", "ok"]["ranks"] == [*range(8)], done
    assert {row["found"] for (item, _), row in found.items() if item == "recorder"} == {
        "no PyTorch is loaded"
    }
    assert (done.status, ("log", "fail") in found) == (3, True), done
    wrong = found["environment", "fail"]
    assert (wrong["ranks"], wrong["nodes"]) == ([5], [job.node(5).name]), done
    assert wrong["found"] == "GLOO_SOCKET_IFNAME=lo leads to the node itself"


@pytest.mark.nightly
def test_what_is_kept_is_all_of_one_run(job, where, tool, tmp_path):
    kept, away = tmp_path / "kept", job.nodes[3]
    away.stop_sshd()
    try:
        with job.elsewhere(1):
            done = tool("stacks", where, *QUICK, "-o", kept, "--format", "json")
    finally:
        away.resume_sshd()
    assert done.status == 4, done
    assert groups(done)[-2:] == [("stack", [1]), ("stack", [0, 2, 3, 4, 5])]
    (gap,) = done.document["gaps"]
    assert (gap["node"], "connection refused" in gap["reason"]) == (away.name, True)
    names = {"stacks.json", "stacks.html", *(f"trace-{node.name}.json" for node in job.nodes)}
    assert {path.name for path in kept.iterdir()} == names
    assert json.loads((kept / "stacks.json").read_text()) == done.document
    # The next run into it: what the first one knew of other nodes does not stay.
    tool("stacks", where, *QUICK, "--limit", job.nodes[0].name, "-o", kept, status=0)
    # Nobody asked for the others: they are not missing.
    assert {path.name for path in kept.glob("trace-*")} == {f"trace-{job.nodes[0].name}.json"}


def test_no_rank_anywhere_says_what_was_looked_for_and_what_runs_instead(job, where, tool):
    done = tool("stacks", where, *QUICK, "--job", "4711", status=2)
    sought, running, ended = done.lines
    for words in ("RANK", "SLURM_PROCID", "job 4711"):
        assert words in sought
    assert "nodeready postmortem" in ended
    assert running.startswith(f"nodeready: running: job {job.node(0).name}:29500 of root: 8 ")


def test_a_process_and_a_pattern_are_ways_to_choose(job, where, tool):
    limit = ("--limit", job.node(4).name, "--pid", job.pids[4])
    one = tool("stacks", where, *QUICK, *limit, "--format", "json")
    assert [p["pid"] for p in one.document["processes"]] == [job.pids[4]]
    with job.elsewhere(0):
        some = tool("stacks", where, *QUICK, "--match", "load_[b]atch", "--format", "json")
    assert [p["rank"] for p in some.document["processes"]] == [0]


@contextlib.contextmanager
def program(job: Job, name: str, text: str, *words: str) -> Iterator[None]:
    """Eight ranks of another job, MASTER_ADDR=NAME, once all of them stand."""
    files = [f"{HERE}/at-{rank}" for rank in range(8)]
    for node in job.nodes:
        node.write(f"{HERE}/{name}.py", text)
        node.enter(["rm", "-f", *files])
    for rank in range(8):
        variables = f"RANK={rank} WORLD_SIZE=8 MASTER_ADDR={name} MASTER_PORT=1"
        line = f"{variables} setsid /usr/bin/python3 {HERE}/{name}.py {' '.join(words)}"
        job.node(rank).run(f"{line} </dev/null >/dev/null 2>&1 &")
    try:
        at = [Path(f"/proc/{job.node(r).pid}/root{file}") for r, file in enumerate(files)]
        wait_for(lambda: all(path.exists() for path in at))
        yield
    finally:
        for node in job.nodes:
            # Some may have ended when another one did.
            node.enter(["pkill", "-KILL", "-f", f"{name}.py"], check=False)


#: Rank 5, on another node than most, has all connections; the others wait at their other ends.
TALKS = f"""
import os, socket, sys, time
rank, address = int(os.environ["RANK"]), (sys.argv[1], 29600)
def serve():
    server = socket.create_server(("", 29600))
    kept = [server.accept() for _ in range(7)]
    open("{HERE}/at-5", "w").write("")
    time.sleep(600)
def fetch():
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.1)
    open(f"{HERE}/at-{{rank}}", "w").write("")
    connection.recv(1)
serve() if rank == 5 else fetch()
"""


@pytest.mark.nightly
def test_ranks_of_all_nodes_wait_for_the_one_that_has_the_other_ends(job, where, tool):
    with program(job, "talks", TALKS, job.node(5).address):
        done = tool("stacks", where, *QUICK, "--job", "talks:1", "--format", "json")
    assert groups(done) == [("stack", [5]), ("stack", [0, 1, 2, 3, 4, 6, 7])]
    assert [one["role"] for one in done.document["groups"]] == ["suspect", "victim"]
    assert "7 ranks wait for it, or it may be slow" in done.document["verdict"]["text"]


#: A thread without Python waits in a semaphore, on rank 5 in pause(2).
NATIVE = f"""
import ctypes, os, threading
libc, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_create.argtypes = [ctypes.c_void_p] * 4
libc.pthread_setname_np.argtypes = [ctypes.c_ulong, ctypes.c_char_p]
rank, thread = int(os.environ["RANK"]), ctypes.c_ulong()
for number in range(3):
    name = "pause" if (rank, number) == (5, 1) else "sem_wait"
    call = ctypes.cast(getattr(libc, name), ctypes.c_void_p).value
    place = ctypes.addressof(thread), None, call, ctypes.addressof(semaphore)
    libc.pthread_create(*place)
    libc.pthread_setname_np(thread.value, f"rt-worker-{{number}}".encode())
def train():
    open(f"{HERE}/at-{{rank}}", "w").write("")
    threading.Event().wait()
train()
"""


def test_a_thread_without_python_that_waits_differently_is_possible(job, where, tool):
    words = ("stacks", where, *QUICK, "--job", "native:1", "--format", "json")
    with program(job, "native", NATIVE):
        done, native = tool(*words), tool(*words, "--native")
    found, unwound = done.document, native.document
    (odd,) = found["odd_threads"]
    assert (odd["rank"], odd["node"], odd["name"]) == (5, job.node(5).name, "rt-worker-N")
    assert "pause" in odd["wait"]
    (text,) = (text for text in found["advice"] if text.startswith("possible: rank 5 "))
    assert f"`gdb -p {odd['thread']} " in text
    assert found["verdict"]["kind"] == "unclear"
    assert any("pause" in name for name in unwound["odd_threads"][0]["native"]), native


def test_this_machine_without_any_connection(tool, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace(HERE, str(tmp_path)))
    words = ("stacks", "--local", "--job", f"{tmp_path.name}:29500", *QUICK, "--format", "json")
    own = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": tmp_path.name, "MASTER_PORT": "29500"}
    rank = subprocess.Popen([sys.executable, script, "all_reduce"], env={**os.environ, **own})
    try:
        wait_for((tmp_path / "at-0").exists)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = tool(*words, env={"PATH": path})
    finally:
        rank.kill()
        rank.wait()
    assert done.status == 3, done
    assert groups(done) == [("missing", [1]), ("stack", [0])]
    assert done.document["groups"][1]["nodes"] == [os.uname().nodename]


def test_an_interrupt_shows_what_is_there_and_leaves_nothing(job, where, tool):
    """Three nodes have answered; on the last one py-spy takes its time."""
    slow, others = job.nodes[3], job.nodes[:3]
    slow.enter(["mv", PY_SPY, f"{PY_SPY}.away"])
    # For a process of root's, py-spy can write no file: that it runs is seen in the process list.
    slow.write(PY_SPY, "#!/bin/sh\nexec sleep 654\n", 0o755)
    try:
        started = tool.start("stacks", where, *QUICK, "--format", "json")
        running = ["pgrep", "-fx", "sleep 654"]
        wait_for(lambda: slow.enter(running, check=False).returncode == 0)
        wait_for(lambda: not any(ours(node) for node in others))
        started.send_signal(signal.SIGINT)
        done = tool.end(started)
    finally:
        slow.enter(["mv", f"{PY_SPY}.away", PY_SPY])
    assert done.status == 130, done
    assert f"interrupted: the results are partial; not {slow.name}" in done.err
    assert done.document["complete"] is False
    (gap,) = done.document["gaps"]
    assert (gap["node"], gap["kind"]) == (slow.name, "interrupted")
    assert groups(done)[-1] == ("stack", [0, 1, 2, 3, 4, 5])


def test_what_a_node_with_gpus_and_infiniband_tells_beside_the_stacks(
    fresh_nodes, fleet, tool, tmp_path
):
    (node,) = fresh_nodes(1, profile="h100")
    Job([node])
    xid = "NVRM: Xid (PCI:0000:1b:00): 79, pid=4711, name=python, GPU has fallen off the bus."
    old = "Out of memory: Killed process 12 (python) total-vm:1kB"
    node.run(
        "read -r up rest </proc/uptime;"
        f'printf "[%s] %s\\n" "$up" "{xid}" >>/.lab/kernel.log;'
        f'sed -i "1a [    1.000000] {old}" /.lab/kernel.log'
    )
    tool("stacks", fleet([node]), *QUICK, "-o", tmp_path / "kept")
    found = json.loads((tmp_path / f"kept/trace-{node.name}.json").read_text())["witnesses"]
    assert found["gpus"]["absent"] == ""
    gpus = [(one["name"], one["xids"]) for one in found["gpus"]["devices"]]
    assert gpus == [("NVIDIA H100 80GB HBM3", [79] * (at == 0)) for at in range(8)]
    assert [(one["kind"], one["pid"]) for one in found["kernel"]["messages"]] == [("xid", 4711)]
    ports = {one["name"]: (one["state"], one["kind"]) for one in found["network"]["ports"]}
    assert ports["mlx5_0/1"] == ("up", "infiniband")
    assert found["nccl_ras"]["absent"]
    assert ours(node) == []


# --- As steps of a job of Slurm's.


def start_step(login: Login, lab: Lab, nodes: int) -> str:
    """The number of a job with two ranks on each of the first nodes."""
    words = (f"-N{nodes}", "--ntasks-per-node=2", "-o", f"{HERE}/log-%j")
    return start_ranks(login, lab, [node for node in lab.nodes[:nodes] for _ in "12"], words)


def start_ranks(
    login: Login,
    lab: Lab,
    places: list[LabNode],
    words: Sequence[str],
    *,
    step: str = "-l --ntasks-per-node=2",
    rest: Sequence[str] = (),
) -> str:
    """The number of a job of `sbatch WORDS --wrap ... REST`, once its ranks stand, the last one
    elsewhere. places: the node of each rank.
    """
    binary = py_spy_binary.binary(Policy().py_spy_version, os.uname().machine)
    for node in lab.nodes:
        node.write(f"{HERE}/train.py", TRAIN.replace('"RANK"', '"SLURM_PROCID"'))
        node.enter(["chmod", "1777", HERE])
        node.enter(["sh", "-c", f"rm -f {HERE}/at-*"])
        node.write(PY_SPY, binary, 0o755)
    place = f"[ $SLURM_PROCID = {len(places) - 1} ] && w=load_batch || w=all_reduce"
    run = f"/usr/bin/python3 {HERE}/train.py $w"
    begin = "echo rank $SLURM_PROCID begins"
    script = f"srun {step} sh -c '{begin}; {place}; {run}; :'"
    number = login("sbatch", "--parsable", "-D", "/tmp", *words, "--wrap", script, *rest)
    at = [Path(f"/proc/{node.pid}/root{HERE}/at-{rank}") for rank, node in enumerate(places)]
    wait_for(lambda: all(path.exists() for path in at))
    return number


@pytest.fixture
def running(login: Login, slurm_lab: Lab) -> str:
    return start_step(login, slurm_lab, 3)


def test_as_a_step_of_the_job_by_an_ordinary_user(slurm_lab, login, running, tool):
    words = ("stacks", "--via", "srun", "--job", running, *QUICK)
    done = tool(*words, "--native", "--format", "json", env=login.env, status=0)
    found = done.document
    assert groups(done) == [("stack", [5]), ("stack", [0, 1, 2, 3, 4])]
    assert found["groups"][0]["nodes"] == [slurm_lab.nodes[2].name]
    assert (found["job"], found["world_size"]) == (running, 6)
    assert all(one["native"] for one in found["groups"])
    assert "RUNNING" in login("squeue", "-h", "-o", "%T", "-j", running)
    for unknown in ("999999", f"{running}_7"):
        none = tool("stacks", "--via", "srun", "--job", unknown, env=login.env)
        assert (none.status, len(none.lines)) == (2, 1), none
        assert f"--job {unknown}" in none.err


@pytest.mark.nightly
def test_evidence_and_watch_as_a_step_by_an_ordinary_user(
    slurm_lab, login, running, tool, tmp_path
):
    """As steps of the job; the log is the one that srun writes on the first node."""
    words = ("--via", "srun", "--job", running)
    done = tool("incident", *words, "-o", tmp_path / "kept", env=login.env, status=0)
    found = json.loads((tmp_path / "kept" / "incident.json").read_text())
    parts = {part["name"]: part["status"] for part in found["parts"]}
    assert parts == {"stacks": "kept", "logs": "kept", "cores": "empty", "audit": "kept"}, done
    (log,) = (tmp_path / "kept" / "logs").iterdir()
    assert log.name.startswith(slurm_lab.nodes[0].name)
    assert "0: rank 0 begins" in log.read_text()
    seen = json.loads((tmp_path / "kept" / "stacks" / "stacks.json").read_text())
    heard = {one["name"]: one for one in seen["witnesses"]}["logs"]
    assert "srun takes its output to another node" in "".join(heard["absent"]), heard
    more = ("--every", "1", "--confirm", "3", "--once", "-o", tmp_path / "hangs")
    done = tool("watch", *words, *more, env=login.env, status=3)
    assert f"job {running}: does not move: 6 ranks on " in done.out
    assert len([*(tmp_path / "hangs").glob(f"{running}-*.tar.gz")]) == 1
    assert "RUNNING" in login("squeue", "-h", "-o", "%T", "-j", running)


#: Ranks of the job's own user on a node that the job does not have: more than the job's, and they
#: work. A number of them is that of the rank that holds the job up.
CLAIMS = """
import os, time
for rank in range(9):
    if os.fork() == 0:
        os.environ["SLURM_PROCID"] = str(rank)
        os.execvp("python3", ["python3", "-S", "-c", "while True: sum(range(99999))"])
time.sleep(600)
"""


@pytest.mark.nightly
def test_ranks_on_a_node_that_slurm_did_not_give_to_the_job_are_only_claims(
    slurm_lab, login, fleet, tool
):
    number = start_step(login, slurm_lab, 2)
    *nodes, other = slurm_lab.nodes
    values = f"SLURM_JOB_ID={number} SLURM_STEP_ID=0 SLURM_NTASKS=9"
    line = f"{values} setsid python3 -c '{CLAIMS}' >/dev/null 2>&1 & echo $!"
    claims = other.run(line, user="ml").stdout.strip()
    count = ["sh", "-c", f"test $(pgrep -c -P {claims}) = 9"]
    wait_for(lambda: other.enter(count, check=False).returncode == 0)
    env = {"SLURM_CONF": slurm_lab.slurm_conf}
    try:
        words = (fleet(slurm_lab.nodes), "--job", number)
        done = tool("stacks", *words, *QUICK, "--format", "json", env=env)
        found = done.document
        assert groups(done) == [("stack", [3]), ("stack", [0, 1, 2])], done
        assert found["groups"][0]["nodes"] == [nodes[1].name]
        assert (found["job"], found["user"], found["world_size"]) == (number, "ml", 4)
        (claim,) = found["others"]
        assert (claim["job"], claim["user"], claim["stranger"]) == (number, "ml", True)
        assert claim["nodes"] == [other.name]
        assert f"to be of job {number} and are not: of ml on {other.name}" in done.out
        # They burn CPU time, the job's ranks sleep.
        where = ("-o", tool.home / "hangs")
        done = tool(
            "watch", *words, "--every", "1", "--confirm", "3", "--once", *where, env=env, status=3
        )
        assert f"job {number}: does not move: 4 ranks on " in done.out
        # The job ends, the claims stay: they are no ranks either.
        login("scancel", number)
        wait_for(lambda: not login("squeue", "-h", "-j", number))
        done = tool("stacks", *words, *QUICK, env=env, status=2)
        assert f"Processes on {other.name} claim the job and are no ranks of it" in done.err
    finally:
        other.enter(["sh", "-c", f"kill -KILL -{claims}"])


def test_the_parts_of_a_heterogeneous_job_are_one_job(slurm_lab, login, fleet, tool):
    """Each part has a number and a cgroup of its own; the job has the first part's number."""
    first, second, _ = slurm_lab.nodes
    parts, rest = ("-w", first.name, "-o", "/dev/null"), (":", "-w", second.name)
    step = "--het-group=0,1"
    number = start_ranks(login, slurm_lab, [first, second], parts, step=step, rest=rest)
    env = {"SLURM_CONF": slurm_lab.slurm_conf}
    words = ("stacks", fleet(slurm_lab.nodes), "--job", number, *QUICK, "--format", "json")
    done = tool(*words, env=env)
    assert sorted(groups(done)) == [("stack", [0]), ("stack", [1])], done
    found = done.document
    assert (found["job"], found["others"]) == (number, [])
    assert [row["node"] for row in found["processes"]] == [first.name, second.name]

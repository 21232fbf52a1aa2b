"""A look at ranks that really run: what they do between two looks is in the counters."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeready.agent.witnesses import motion
from nodeready.agent.witnesses.motion import Motion, MotionConfig
from tests.command import wait_for

JOB = f"node-of-motion:{os.getpid()}"
COUNTERS = ("main_cpu_s", "cpu_s", "switches", "faults", "moved_bytes", "log_bytes")
WAITS = "time.sleep(600)"
#: Computes, writes, takes new pages (an allocator would give the same ones again), logs, waits.
WORKS = """
import mmap
while True:
    sum(range(100_000))
    with open(sys.argv[1], "wb", buffering=0) as file:
        file.write(b"x" * 65536)
    mmap.mmap(-1, 1 << 20).write(b"x" * (1 << 20))
    print("step", flush=True)
    time.sleep(0.01)
"""
CHILD = f"""
import subprocess
subprocess.Popen([sys.executable, "-c", "while True: sum(range(1000))"])
{WAITS}
"""


@pytest.fixture
def starts(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts a rank that is nobody's child and writes to the file ``log``; its pid."""
    groups = []

    def start(program: str, rank: int = 0, variable: str = "RANK") -> int:
        address, _, port = JOB.partition(":")
        job = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": port}
        text = f"import sys, time\nprint('there', flush=True)\n{program}"
        log = tmp_path / f"log{rank}"
        script = 'log=$1; shift; "$@" > "$log" 2>&1 & echo $!'
        argv = ["sh", "-c", script, "sh", log, sys.executable, "-c", text, tmp_path / "written"]
        how = {"stdout": subprocess.PIPE, "start_new_session": True}
        environment = {**os.environ, variable: str(rank), **job}
        with subprocess.Popen(argv, env=environment, **how) as shell:
            groups.append(shell.pid)
            pid = int(shell.stdout.readline())
        wait_for(lambda: log.exists() and b"there" in log.read_bytes())
        return pid

    yield start
    for group in groups:
        os.killpg(group, 9)


def look(job: str = JOB) -> list[Motion]:
    found, error = motion.probe(MotionConfig("", "nodeready:test", 20, job), time.monotonic() + 20)
    assert error == ""
    return sorted(found, key=lambda rank: rank.rank or 0)


def test_the_program_of_a_node_prints_its_ranks_its_ports_and_its_end(starts):
    pid = starts(WAITS)
    code = "import os; os.nice = int; from nodeready.agent.witnesses import motion"
    code += f"; motion.main(motion.MotionConfig('nonce', 'nodeready:test', 20, {JOB!r}))"
    text = subprocess.check_output([sys.executable, "-c", code], text=True)
    rows = [row.split(" ", 2) for row in text.splitlines()]
    assert [row[:2] for row in rows] == [["nonce", kind] for kind in ("motion", "ports", "found")]
    assert json.loads(rows[0][2])["pid"] == pid


def test_where_the_last_line_of_progress_ends(starts):
    """Heartbeats after it do not move it, and a line that is not complete counts."""
    starts(f"print('step 1\\rstep 22', flush=True)\nprint('alive\\n' * 9, flush=True)\n{WAITS}", 1)
    wait_for(lambda: look()[0].log_bytes > 60)
    config = MotionConfig("", "nodeready:test", 20, JOB, progress=r"step \d+")
    (found,), _ = motion.probe(config, time.monotonic() + 20)
    assert found.progress == len("there\nstep 1\rstep 22")
    assert look()[0].progress is None


def test_the_jobs_timeout_is_in_the_arguments_and_the_environment(starts, monkeypatch):
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "2")
    starts(f"# --ddp_timeout 300\n{WAITS}")
    assert [rank.timeout_s for rank in look()] == [120]


def test_a_rank_that_waits_is_found_by_its_job_and_does_nothing(starts):
    pid = starts(WAITS, 1)
    (before,), (after,) = look(), look()
    assert (before.pid, before.rank, before.state, before.descendant_count) == (pid, 1, "S", 0)
    same = [name for name in COUNTERS if getattr(before, name) == getattr(after, name)]
    assert same == [*COUNTERS]
    assert look("4711") == []


@pytest.mark.parametrize(("program", "counters"), [(WORKS, COUNTERS), (CHILD, ("cpu_s",))])
def test_the_work_of_a_rank_is_in_its_counters(starts, program, counters):
    starts(program)
    (before,) = look()
    grown = set()

    def is_complete() -> bool:
        (now,) = look()
        grown.update(name for name in COUNTERS if getattr(now, name) > getattr(before, name))
        return grown >= set(counters)

    wait_for(is_complete)
    assert program == WORKS or "main_cpu_s" not in grown


def test_the_watchdogs_word_is_found_at_the_end_of_a_log(starts):
    starts(WAITS)
    line = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41"
    starts(f"print({line!r}, flush=True)\n{WAITS}", 1)
    wait_for(lambda: look()[1].watchdog)
    assert not look()[0].watchdog


@pytest.mark.parametrize(("numbers", "has_log"), [((1,), True), ((1, 2), False)])
def test_a_pipe_is_no_log(starts, tmp_path, numbers, has_log):
    """And nobody waits for one that nobody writes."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    pipe = f"import os; pipe = os.open({str(path)!r}, os.O_RDWR); print('x', file=sys.stderr)"
    starts("\n".join([pipe, *(f"os.dup2(pipe, {number})" for number in numbers), WAITS]))
    wait_for(lambda: (look()[0].log_bytes is not None) == has_log)
    assert (look()[0].log_age_s is not None) == has_log


def test_a_rank_of_mpi_may_poll(starts):
    for rank, variable in enumerate(("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")):
        starts(WAITS, rank, variable)
    assert [motion.may_poll for motion in look()] == [False, True, True]

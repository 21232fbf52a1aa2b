"""A look at ranks that really run: what they do between two looks is in the counters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from nodeready.node.witnesses.motion import Config, Motion
from nodeready.transport.base import Answer, Request, collect, once
from nodeready.transport.local import Local
from nodeready.triage.watch import take
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

Starts = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def starts(tmp_path: Path) -> Iterator[Starts]:
    """Starts a rank that writes to the file ``log``, and waits until it is there."""
    started = []

    def start(program: str, rank: int = 0) -> subprocess.Popen[bytes]:
        address, _, port = JOB.partition(":")
        words = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": port}
        text = f"import sys, time\nprint('there', flush=True)\n{program}"
        log = tmp_path / f"log{rank}"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", text, str(tmp_path / "written")],
                env={**os.environ, **words},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        wait_for(lambda: b"there" in log.read_bytes())
        return process

    yield start
    for process in started:
        os.killpg(process.pid, 9)
        process.wait()


def look(job: str = JOB) -> list[Motion]:
    """One look, by the program as a node runs it: whom we started ourselves is no rank for us."""
    carrier = Local()

    def ask(what: str, requests: Mapping[str, Request]) -> Mapping[str, Answer]:
        return collect(carrier, {node: once(request) for node, request in requests.items()})

    answer = take(ask, carrier.nodes, Config("", carrier.tag, 20, job), 0.0)
    assert answer.errors == {}
    return sorted(answer.ranks.values(), key=lambda motion: motion.rank or 0)


def test_a_rank_that_waits_is_found_by_its_job_and_does_nothing(starts):
    process = starts(WAITS, 1)
    (before,), (after,) = look(), look()
    assert (before.pid, before.rank, before.state, before.below) == (process.pid, 1, "S", 0)
    for name in COUNTERS:
        assert getattr(before, name) == getattr(after, name), name
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


def test_a_log_that_is_a_pipe_is_none(starts, tmp_path):
    """And nobody waits for one that nobody writes."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    pipe = f"number = os.open({str(path)!r}, os.O_RDWR); os.dup2(number, 1); os.dup2(number, 2)"
    starts(f"import os; {pipe}\n{WAITS}")
    wait_for(lambda: look()[0].log_bytes is None)
    assert look()[0].log_age_s is None

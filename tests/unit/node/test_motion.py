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
#: What the program of a rank does when it has said that it is there.
WORKS = "while True: sum(range(1000))"
WAITS = "time.sleep(600)"
WRITES = """
while True:
    with open(sys.argv[1], "wb", buffering=0) as file:
        file.write(b"x" * 65536)
    time.sleep(0.01)
"""
CHILD = f"""
import subprocess
subprocess.Popen([sys.executable, "-c", {WORKS!r}])
time.sleep(600)
"""

#: New pages each time; an allocator would give the same ones again.
FAULTS = """
import mmap
while True:
    mmap.mmap(-1, 1 << 20).write(b"x" * (1 << 20))
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


def seen(job: str = JOB) -> list[Motion]:
    """One look, by the program as a node runs it: whom we started ourselves is no rank for us."""
    carrier = Local()

    def ask(what: str, asked: Mapping[str, Request]) -> Mapping[str, Answer]:
        return collect(carrier, {name: once(one) for name, one in asked.items()})

    found = take(ask, carrier.nodes, Config("", carrier.tag, 20, job), 0.0)
    assert found.errors == {}
    return sorted(found.ranks.values(), key=lambda one: one.rank or 0)


def later(name: str) -> float:
    """By how much a counter of the one rank grows within moments."""
    (before,) = seen()
    found = [before]

    def grown() -> bool:
        found[:] = seen()
        return bool(getattr(found[0], name) > getattr(before, name))

    wait_for(grown)
    return float(getattr(found[0], name) - getattr(before, name))


def test_a_rank_is_found_by_its_job_and_no_other(starts):
    process = starts(WAITS, 1)
    (found,) = seen()
    assert (found.pid, found.rank, found.state, found.below) == (process.pid, 1, "S", 0)
    assert seen("4711") == []


def test_one_that_waits_does_nothing(starts):
    starts(WAITS)
    (before,), (after,) = seen(), seen()
    for name in ("main_cpu_s", "cpu_s", "switches", "faults", "moved_bytes", "log_bytes"):
        assert getattr(before, name) == getattr(after, name), name


@pytest.mark.parametrize(
    ("program", "counter"),
    [
        (WORKS, "main_cpu_s"),
        (WORKS, "cpu_s"),
        (CHILD, "cpu_s"),
        (WRITES, "moved_bytes"),
        (WRITES, "switches"),
        ("while True: print('step', flush=True); time.sleep(0.01)", "log_bytes"),
        (FAULTS, "faults"),
    ],
)
def test_what_one_does_is_in_its_counters(starts, program, counter):
    starts(program)
    assert later(counter) > 0


def test_the_watchdogs_word_is_found_at_the_end_of_a_log(starts):
    starts(WAITS)
    assert not seen()[0].watchdog
    line = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41"
    starts(f"print({line!r}, flush=True)\n{WAITS}", 1)
    wait_for(lambda: seen()[1].watchdog)


def test_a_log_that_is_a_pipe_is_none(starts, tmp_path):
    """And nobody waits for one that nobody writes."""
    os.mkfifo(tmp_path / "pipe")
    starts(f"import os\nnumber = os.open({str(tmp_path / 'pipe')!r}, os.O_RDWR)\n"
           f"os.dup2(number, 1); os.dup2(number, 2)\n{WAITS}")  # fmt: skip
    wait_for(lambda: seen()[0].log_bytes is None)
    assert seen()[0].log_age_s is None

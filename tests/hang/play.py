"""Jobs of forked ranks, on this machine: each plays a scenario, is looked at, and goes on."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nodeready.lab import processes
from tests.command import wait_for
from tests.hang.pythons import Python, found, needed
from tests.hang.scenarios import Scenario

HERE = Path(__file__).parent
#: Where a command finds py-spy, which nobody has deployed here: beside this Python.
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
#: What a rank's environment can take, with what the tests' own has.
_ROOM = "NODEREADY_TEST_ROOM"


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    # One thread for a matrix: ranks share the machine.
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def fields(pid: int) -> list[str]:
    """proc_pid_stat(5) from field 3 on. Raises OSError where there is no such process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def runs(pid: int) -> bool:
    """Whether a thread of the process runs, or would if it got the processor. Raises OSError."""
    return any(fields(int(task.name))[0] == "R" for task in Path(f"/proc/{pid}/task").iterdir())


def cpu_ticks(pid: int) -> int:
    """Of the processor's time; -1: it has ended."""
    try:
        return sum(map(int, fields(pid)[11:13]))
    except OSError:
        return -1


def held(pids: Iterable[int]) -> dict[int, str]:
    """Those that are stopped or traced, and how."""
    states = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            values = dict(row.split(":\t", 1) for row in status.splitlines() if ":\t" in row)
            if values["State"][0] in "Tt" or values["TracerPid"] != "0":
                states[pid] = f"{values['State'][0]} {values['TracerPid']}"
    return states


def in_sessions(leaders: set[int]) -> list[int]:
    """All processes of these sessions."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(fields(int(path.name))[3]) in leaders:
                pids.append(int(path.name))
    return pids


def release(pid: int) -> None:
    """Send SIGUSR1 to the main thread of a process; nothing where it has ended.

    To the process it may go to another thread, for one while the main one is just woken by
    SIGCONT (wants_signal() in kernel/signal.c): Python notes it there, and the main thread's
    sleep goes on.
    """
    tgkill = 131 if os.uname().machine == "aarch64" else 234
    ctypes.CDLL(None).syscall(tgkill, pid, pid, signal.SIGUSR1)


class Stable:
    """A Python that forks ranks, in a mount namespace of its own: what a scenario mounts ends
    with it.
    """

    def __init__(self, python: str) -> None:
        room = {_ROOM: "x" * 8000}
        self.process = subprocess.Popen(
            ["unshare", "-m", "--propagation", "private", python, str(HERE / "stable.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**_environment(), **room, "PYTHONPATH": str(HERE)},
            start_new_session=True,
        )
        assert self.process.stdout
        if self.process.stdout.readline() != "ready\n":
            raise AssertionError(f"{python} cannot import what the ranks need")

    def fork(self, rank: int, environment: dict[str, str], place: Path, acts: list[str]) -> None:
        order = {"rank": rank, "environment": environment, "directory": str(place), "acts": acts}
        assert self.process.stdin
        print(json.dumps(order), file=self.process.stdin, flush=True)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Play:
    scenario: Scenario
    stable: Stable
    place: Path
    port: int = field(default_factory=free_port)
    server: int = 0

    @property
    def job(self) -> str:
        return f"127.0.0.1:{self.port}"

    def file(self, name: str) -> Path:
        return self.place / name

    def start(self) -> None:
        if self.scenario.fault[0] == "dead_mount":
            words = (str(self.stable.process.pid), "dead_mount", str(self.file("data")))
            self.server = int(processes.module("nodeready.lab.culprits", *words).stdout)
        for rank, (acts, _hangs) in self.scenario.parts.items():
            os.mkfifo(self.file(f"fifo-{rank}"))
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.scenario.world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
                "TORCH_FR_DUMP_TEMP_FILE": str(self.file("recorder-")),
            }
            self.stable.fork(rank, environment, self.place, acts)

    def told(self, rank: int) -> tuple[int, int, int]:
        """The rank's pid, and the number of its act and of its step, by its own word."""
        pid, number, step = self.file(f"rank-{rank}").read_text().split()
        return int(pid), int(number), int(step)

    def pids(self) -> dict[int, int]:
        return {rank: self.told(rank)[0] for rank in self.scenario.parts}

    def family(self) -> list[int]:
        return in_sessions(set(self.pids().values()))

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.place.glob("log-*")))

    def _there(self) -> bool:
        """Whether every rank is in the act that it hangs in."""
        for rank, (_acts, hangs) in self.scenario.parts.items():
            try:
                _pid, number, step = self.told(rank)
            except (FileNotFoundError, ValueError):
                return False
            if number < hangs or (self.scenario.healthy and not step):
                assert not self.file(f"exit-{rank}").exists(), self.log()
                return False
        return True

    def _quiet(self) -> bool:
        """Whether all are where they stay: for half a second no process of the job has used the
        processor, waited for it, begun or ended.
        """
        moving = {self.pids()[rank] for rank in self.scenario.moves}

        def used() -> dict[int, int]:
            return {pid: cpu_ticks(pid) for pid in self.family() if pid not in moving}

        before = used()
        time.sleep(0.5)
        if used() != before:
            return False
        try:
            # On a full machine a thread may not get the processor for half a second.
            return not any(map(runs, before))
        except OSError:
            return False

    def hangs(self) -> None:
        """Until it hangs, or is at its steps."""
        wait_for(self._there)
        if not self.scenario.healthy:
            wait_for(self._quiet)
        if self.scenario.ends:
            assert not [*self.place.glob("exit-*")], self.log()

    def go_on(self) -> None:
        """Until every rank has done the rest, right, and has ended. Raises AssertionError."""
        self.file("end").write_text("")
        for rank, (_acts, _hangs) in self.scenario.parts.items():
            if rank in self.scenario.released:
                release(self.pids()[rank])
        ranks = self.scenario.parts
        with contextlib.suppress(AssertionError):
            wait_for(lambda: all(self.file(f"exit-{rank}").exists() for rank in ranks))
        left = {rank: self.told(rank) for rank in ranks if not self.file(f"exit-{rank}").exists()}
        states = {rank: fields(pid)[0] for rank, (pid, _, _) in left.items()}
        assert not left, f"it does not go on: {left} {states}\n{self.log()}"
        ends = {rank: self.file(f"exit-{rank}").read_text() for rank in ranks}
        assert ends == dict.fromkeys(ranks, "0"), f"{ends}\n{self.log()}"
        world = self.scenario.world
        total = 3 * sum(range(world)) + 3 * world
        assert {self.file(f"done-{rank}").read_text() for rank in ranks} == {str(float(total))}

    def end(self) -> None:
        """Kill what is left of it."""
        if self.server:
            # First: what asks a mount whose server is dead cannot be killed.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.server, signal.SIGKILL)
        for _ in range(2):
            leaders = set()
            for rank in self.scenario.parts:
                with contextlib.suppress(OSError, ValueError):
                    leaders.add(self.told(rank)[0])
            for pid in in_sessions(leaders):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def fault(self) -> Iterator[None]:
        """What the test itself does to ranks, and undoes."""
        kind, ranks = self.scenario.fault
        with contextlib.ExitStack() as undo:
            for rank in ranks:
                getattr(self, f"_{kind}")(self.pids()[rank], undo)
            yield

    def _stopped(self, pid: int, undo: contextlib.ExitStack) -> None:
        undo.callback(os.kill, pid, signal.SIGCONT)
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: fields(pid)[0] == "T")

    def _frozen(self, pid: int, undo: contextlib.ExitStack) -> None:
        # The freezer of cgroup v1, else v2.
        mounts = (Path("/sys/fs/cgroup", name) for name in ("freezer", "unified", ""))
        mount = next(filter(Path.is_dir, mounts))
        is_v1 = mount.name == "freezer"
        home = re.search(f":{'freezer' * is_v1}:(.*)", Path(f"/proc/{pid}/cgroup").read_text())
        assert home
        cgroup = mount / f"nodeready-hang-{pid}"
        cgroup.mkdir()
        undo.callback(cgroup.rmdir)
        (cgroup / "cgroup.procs").write_text(str(pid))
        undo.callback(Path(f"{mount}{home[1]}", "cgroup.procs").write_text, str(pid))
        switch = cgroup / ("freezer.state" if is_v1 else "cgroup.freeze")
        undo.callback(switch.write_text, "THAWED" if is_v1 else "0")
        switch.write_text("FROZEN" if is_v1 else "1")
        state = switch if is_v1 else cgroup / "cgroup.events"
        wait_for(lambda: re.search("FROZEN|frozen 1", state.read_text()))

    def _traced(self, pid: int, undo: contextlib.ExitStack) -> None:
        words = ["strace", "-o", "/dev/null", "-p", str(pid)]
        tracer = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        undo.callback(tracer.wait)
        undo.callback(tracer.terminate)
        wait_for(lambda: pid in held([pid]))

    def _dead_mount(self, pid: int, undo: contextlib.ExitStack) -> None:
        # Any signal that the rank hears: from then on its wait has no end (fs/fuse/dev.c).
        os.kill(pid, signal.SIGUSR1)
        wait_for(lambda: fields(pid)[0] == "D")
        undo.callback(os.kill, self.server, signal.SIGKILL)

    def _killed(self, pid: int, undo: contextlib.ExitStack) -> None:
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}").exists())


@contextlib.contextmanager
def playing(
    scenario: Scenario, stable: Stable, place: Path, plan: dict[str, Any] | None = None
) -> Iterator[Play]:
    """A job that is not started yet, in this new directory; it is ended, and nothing is left."""
    place.mkdir()
    if plan is not None:
        (place / "plan.json").write_text(json.dumps(plan))
    play = Play(scenario, stable, place)
    try:
        yield play
    finally:
        play.end()
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module")
def stable(lab_machine: None) -> Iterator[Callable[..., Stable]]:
    """A factory of Pythons that fork ranks, one of each; None: the first that has torch."""
    started: dict[Python, Stable] = {}

    def take(python: Python | None = None) -> Stable:
        python = python or needed(next(iter(found()), None))
        if python not in started:
            started[python] = Stable(python.path)
        return started[python]

    yield take
    for python in started.values():
        python.end()

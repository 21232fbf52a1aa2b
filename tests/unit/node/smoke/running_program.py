"""The real program of a smoke test, as it travels to a node, spoken with over pipes.

Its listeners and its engines are stand-ins.
"""

import base64
import contextlib
import functools
import json
import os
import queue
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from nodeready.agent import payload
from nodeready.agent.smoke import orders
from nodeready.agent.smoke.orders import (
    CollectiveAnswer,
    CollectiveOrder,
    EndOrder,
    Hello,
    PairAnswer,
    PairOrder,
    SmokeConfig,
    SmokePeer,
)
from nodeready.core import shell, wire

MAIN = "nodeready.agent.smoke.program"
KINDS = {"hello": Hello, "collective": CollectiveAnswer, "pair": PairAnswer}

#: Listeners, and a pair that waits as long as ``small`` says in ms.
PAIR = """
import socket, threading, time
from nodeready.agent.smoke.orders import PairAnswer
from nodeready.subjects.proof.facts import Busy
class SmokeListeners:
    def __init__(self, ports):
        self.token, self.accepted_count, self.open, self.busy = "token", 0, {}, ()
        for port in ports:
            why = self._take(port)
            if why:
                self.busy += (Busy(port, why),)
    ports = property(lambda self: tuple(self.open))
    def _take(self, port):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("0.0.0.0", port))
            one.listen(8)
        except OSError as problem:
            one.close()
            return problem.strerror
        self.open[port] = one
        return ""
    def take(self, port):
        return port in self.open or not self._take(port)
    def lend(self, port):
        self.open.pop(port).close()
    def serve(self):
        threading.Event().wait()
def run_pair(order, own, stop):
    if order.small == 13:
        raise OSError("the pair is broken")
    stop.wait(min(order.small / 1000, order.limit_s))
    why = "its address is this node's own" if set(order.target.addresses) & set(own) else ""
    why = "ended" if stop.is_set() else why
    return PairAnswer(order.number, order.target.name, (), why, "", (), "", 0.0, 0.0, -1)
"""

#: An engine whose ranks are real processes.
ENGINES = """
import os, socket, time
from nodeready.agent.smoke.orders import Engine, RankResult
class Engines:
    engines = (Engine("torch", "gloo", "2", "", "", ""),)
    python_pid = None
    def __init__(self, supervisor, config):
        if config.python == "raises":
            raise ValueError("what is this")
        self.supervisor = supervisor
    def close(self):
        pass
    def run(self, order, stop):
        began = time.monotonic()
        argv = ["sh", "-c", "%s; :" % order.backend, self.supervisor.tag]
        process = self.supervisor.start(argv)
        held = None
        if order.small == 29:
            held = socket.create_server(("0.0.0.0", order.head.port))
        while process.poll() is None and not stop.is_set():
            if time.monotonic() > began + order.limit_s:
                break
            time.sleep(0.02)
        said = "ended" if process.poll() is None else ""
        self.supervisor.stop(process)
        if held:
            held.close()
        return tuple(
            RankResult(order.first + at, "done", "", said, 1.0, 2.0)
            for at in range(order.ranks)
        )
"""


HERE = SmokePeer("here", ("192.0.2.1",), 29500, "token")


def stubborn(python: str = sys.executable) -> str:
    """A rank that ignores signals, and a child of it in a session of its own."""
    child = f"{python} -c 'import os, time; os.setsid(); time.sleep(300)' $0"
    return f"trap '' TERM INT HUP; {child} & sleep 301"


def torch(
    number: int, shell: str = "true", limit_s: float = 10, **changed: object
) -> CollectiveOrder:
    order = CollectiveOrder(number, "torch", shell, 4, 0, 2, (), HERE, 1, 8, limit_s)
    return replace(order, **changed)


def pair(number: int, target: SmokePeer = HERE, **changed: object) -> PairOrder:
    return replace(PairOrder(number, target, (target.port,), 1, 8, 10), **changed)


def within(limit_s: float, holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + limit_s
    while not (held := holds()) and time.monotonic() < until:
        time.sleep(0.02)
    return held


@functools.cache
def _packed(*changed: tuple[str, str]) -> tuple[str, frozenset[str]]:
    """The program as it travels, with the stand-ins, and with these words of its text changed."""
    modules = payload.closure([MAIN, "nodeready.agent.payload"])
    modules |= {f"nodeready.agent.smoke.{name}": PAIR for name in ("listeners", "pair")}
    modules["nodeready.agent.smoke.engines"] = ENGINES
    for words, other in changed:
        assert words in modules[MAIN]
        modules[MAIN] = modules[MAIN].replace(words, other)
    packed = base64.b85encode(zlib.compress(json.dumps(modules).encode(), 1)).decode("ascii")
    return packed, frozenset(name for name in modules if payload.is_package(name))


def _full_cores() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)


class RunningProgram:
    """What it prints comes in time, or the test fails."""

    def __init__(self, config: SmokeConfig, login: str, changed: Mapping[str, str]) -> None:
        self.config = config
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(payload, "_modules", lambda main: _packed(*changed.items()))
            program = payload.program(MAIN, config, stdin=True)
        command = shell.command(program.script, config.limit_s + 2, config.tag, program.text)
        self.process = subprocess.Popen(
            [*(["su", login, "-s", "/bin/sh"] if login else ["sh"]), "-c", command.line],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
            preexec_fn=_full_cores,  # noqa: PLW1509 - it calls nothing but the kernel
        )  # fmt: skip
        self.rows: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.printed: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.write(command.stdin)

    def _read(self) -> None:
        for row in self.process.stdout:
            self.rows.put(row)
        self.rows.put("")

    def write(self, text: str) -> None:
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def order(self, order: CollectiveOrder | PairOrder | EndOrder) -> None:
        self.write(f"{orders.line(order)}\n")

    def answer(self, limit_s: float = 30) -> Hello | CollectiveAnswer | PairAnswer | None:
        """The next answer; None: the program has ended."""
        row = self.rows.get(timeout=limit_s)
        self.printed.append(row)
        if not row:
            return None
        ((name, data),) = wire.lines(row, self.config.nonce)
        return wire.decode(KINDS[name], data)

    def close(self) -> tuple[int, str]:
        """End its input: its exit status, and what it printed of its end."""
        self.process.stdin.close()
        return self.wait()

    def wait(self) -> tuple[int, str]:
        status = self.process.wait(20)
        return status, self.process.stderr.read()

    def pids(self, *words: str) -> list[int]:
        """The processes of this run with these words in their command lines."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{name}/cmdline").read_text(errors="replace")
                if all(word in line for word in (self.config.tag, *words)):
                    found.append(int(name))
        return found

    def wait_for_ranks(self, words: str = "sleep 30", count: int = 1) -> None:
        assert within(20, lambda: len(self.pids(words)) >= count)

    def pythons(self) -> list[int]:
        """Our programs and their watchdogs, root's first."""
        return sorted(
            pid for pid in self.pids()
            if "python" in os.readlink(f"/proc/{pid}/exe") and pid not in self.pids("sleep(300)")
        )  # fmt: skip

    def is_gone(self) -> bool:
        return within(10, lambda: not self.pids())

    def end(self, how: str) -> None:
        """Begin its end: stdin, a signal, or its own alarm."""
        if how == "stdin":
            self.process.stdin.close()
        elif how != "alarm":
            os.kill(self.pythons()[0], getattr(signal, f"SIG{how}"))


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def programs(port: int) -> Iterator[Callable[..., RunningProgram]]:
    """``start(user="ada")``: a program with this Config, on this port. login: who starts it;
    changed: words of its text, and those in their place.
    """
    started: list[RunningProgram] = []

    def start(
        login: str = "", changed: Mapping[str, str] | None = None, **config: object
    ) -> RunningProgram:
        word = secrets.token_hex(8)
        given = SmokeConfig(f"nodeready-{word}", f"nodeready:{word}", ports=(port,), limit_s=60)
        started.append(RunningProgram(replace(given, **config), login, changed or {}))
        return started[-1]

    yield start
    for program in started:
        with contextlib.suppress(OSError):
            program.process.stdin.close()
        for pid in program.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(program.process.pid, signal.SIGKILL)
        program.process.wait(10)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(port: int) -> Iterator[Callable[..., RunningProgram]]:
    with programs(port) as start:
        yield start

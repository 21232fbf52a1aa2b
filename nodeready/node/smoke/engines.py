"""The engines of a node: the job's own PyTorch, the vendor's test program, and what each proves.

`find` says which there are, and of each that cannot be used, why. `Engines.run` does this node's
part of one test; whatever happens, it returns by the test's limit, and its processes have ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nodeready.node.proofs.mesh import resolve
from nodeready.node.runtime import ProcessSupervisor, end_all
from nodeready.node.smoke import torch_ranks
from nodeready.node.smoke.orders import (
    NCCL_TESTS,
    PHASES,
    RING,
    TORCH,
    Collective,
    Config,
    Engine,
    Rank,
)

_LONGEST = torch_ranks.LONGEST

_NCCL, _GLOO = "nccl", "gloo"
PROVES = {
    (TORCH, _NCCL): "init, all_reduce, all_gather, send/recv and barrier of the job's own PyTorch "
    "over {library}, the sums, and each GPU's products and memory",
    (TORCH, _GLOO): "init, all_reduce, all_gather, send/recv and barrier of the job's own PyTorch "
    "over gloo, and the sums; no GPU",
    (NCCL_TESTS, _NCCL): "all_reduce over {library} and its sums between the GPUs of one node",
    (RING, "tcp"): "plain TCP connections around all nodes and the data over them; no library, "
    "no GPU",
}


def _engine(
    name: str, backend: str, *, version: str = "", library: str = "", where: str = "",
    why: str = "",
) -> Engine:  # fmt: skip
    proves = PROVES[name, backend].format(library=library or "NCCL")
    return Engine(name, backend, version, library, where, proves, why)


# --- A rank's answer.


def _lost(
    order: Collective, phase: str, said: str, phases: Mapping[int, str] | None = None
) -> tuple[Rank, ...]:
    """All ranks of this node, failed for one reason; phases: how far each came."""
    gpus = order.gpus or (-1,) * order.ranks
    numbers = range(order.first, order.first + order.ranks)
    return tuple(
        Rank(number, gpu, (phases or {}).get(number, phase), "", said[:_LONGEST], -1,
             0.0, 0.0, -1, 0.0)
        for number, gpu in zip(numbers, gpus)
    )  # fmt: skip


def _number(value: Any, least: float) -> float:
    found = float(value)
    if not math.isfinite(found) or found < least:
        raise ValueError(value)
    return found


def _ranks(order: Collective, answer: Mapping[str, Any]) -> tuple[Rank, ...]:
    """The ranks that the job's Python answered. Raises KeyError, TypeError, ValueError for what
    makes no sense: it is the user's."""
    ranks = tuple(
        Rank(
            int(one["rank"]), int(one["gpu"]), str(one["phase"]), str(one["wrong"])[:_LONGEST],
            str(one["said"])[:_LONGEST], int(one["waits_for"]), _number(one["ms"], 0),
            _number(one["gbps"], 0), int(one["retransmits"]), _number(one["seconds"], 0),
        )
        for one in answer["ranks"]
    )  # fmt: skip
    numbers = list(range(order.first, order.first + order.ranks))
    if [one.rank for one in ranks] != numbers or not {one.phase for one in ranks} <= {*PHASES}:
        raise ValueError("other ranks")
    return ranks


def misled(name: str, own: tuple[str, ...], resolved: tuple[str, ...], error: str) -> str:
    """Why a name does not lead to the node that it names; "": it does.

    own: the addresses of that node; resolved: those that the resolver gives, or its error
    """
    if not resolved:
        return f"{name}: {error or 'no address'}"
    if {*resolved}.isdisjoint(own):
        return f"{name} resolves to {', '.join(resolved[:3])}, which is not {name}'s"
    return ""


# --- The job's Python.

# All of Python 2 and 3 understand this much; then the program comes over the standard input.
_BOOT = (
    "import sys;sys.version_info<(3,8)and sys.exit('Python %d.%d: older than 3.8'%"
    "sys.version_info[:2]);exec(compile(sys.stdin.buffer.read(int(sys.argv[1])),"
    "'torch_ranks.py','exec'))"
)
#: Seconds for the import of torch at most: from a network's disk it takes a minute.
_IMPORT_S = 90.0
#: Of the whole time, what the import may take.
_IMPORT_SHARE = 0.5
#: Seconds after its limit in which a test is answered, before its Python is given up.
_GRACE_S = 0.6
_OUTPUT = 1 << 20


class _Python:
    """The job's Python with torch imported. Raises `_Failed` where there is none."""

    def __init__(
        self,
        supervisor: ProcessSupervisor,
        config: Config,
        limit_s: float,
        listeners: Mapping[int, int],
    ) -> None:
        """listeners: port -> its listener's descriptor"""
        self._supervisor, self._listeners = supervisor, dict(listeners)
        self._mark = "nr" + secrets.token_hex(8)
        self._kept, self._last = b"", deque[str](maxlen=50)
        self.name = config.python or "python3"
        environment = _environment(config)
        self.words = (*config.prefix, self.name)
        given = dict(word.split("=", 1) for word in config.environment if "=" in word)
        source = _source() + f"\nmain({self._mark!a}, {supervisor.left_s + 1!a}, {given!a}, "
        source += f"{self._listeners!a})\n"
        text = source.encode()
        argv = [*_found(self.words, environment), "-B", "-c", _BOOT, str(len(text))]
        self.process = _start(supervisor, argv, environment, self._listeners.values())
        try:
            threading.Thread(target=self._drain, daemon=True).start()
            self._write(text)
            self.hello = self._greeting(limit_s)
        except BaseException:
            self.stop()
            raise

    def _drain(self) -> None:
        """Keep the last lines of its errors."""
        assert self.process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for row in self.process.stderr:
                if row.strip():
                    self._last.append(row[:2000].decode("utf-8", "replace").rstrip())

    def _write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def _greeting(self, limit_s: float) -> dict[str, Any]:
        until = time.monotonic() + limit_s
        imported = False
        while time.monotonic() < until:
            for data in self.lines(until - time.monotonic()):
                imported = imported or "imported" in data
                if "why" in data and "torch" not in data:
                    raise _Failed(f"{self.name}: {data['why']}"[:_LONGEST])
                if "torch" in data:
                    return data
            if self.ended:
                raise _Failed(self._end())
        if imported:
            raise _Failed(f"{self.name}: the GPUs' driver did not answer in {limit_s:.0f} s")
        raise _Failed(f"{self.name}: no import of torch in {limit_s:.0f} s")

    def _end(self) -> str:
        """Why it ended before it had said anything."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)
        # The thread that reads its errors may be a moment behind.
        time.sleep(0.05)
        rc = self.process.returncode
        how = f"status {rc}"
        if rc is not None and rc < 0:
            how = signal.Signals(-rc).name if -rc in {*signal.Signals} else f"signal {-rc}"
        said = torch_ranks.last_line("\n".join(self._last))
        name = os.path.basename(self.words[0])
        return f"{name}: {said}"[:_LONGEST] if said else f"{name}: ended with {how}"

    ended = False

    def lines(self, wait_s: float) -> list[dict[str, Any]]:
        """The lines of ours that come within this time; at once when there are some."""
        assert self.process.stdout is not None
        try:
            number = self.process.stdout.fileno()
            if not select.select([number], [], [], max(0.0, wait_s))[0]:
                return []
            piece = os.read(number, 65536)
        except (OSError, ValueError):  # it was stopped meanwhile
            piece = b""
        if not piece:
            self.ended = True
            return []
        *rows, kept = (self._kept + piece).split(b"\n")
        self._kept = kept[-_OUTPUT:]
        found = []
        for row in rows:
            mark, _, text = row.decode("utf-8", "replace").partition(" ")
            if mark == self._mark:
                with contextlib.suppress(ValueError):
                    data = json.loads(text)
                    found += [data] if isinstance(data, dict) else []
        return found

    def takes(self, port: int) -> bool:
        """Whether rank 0's store gets the listener of this port, which stays open."""
        said = self.hello.get("listeners")
        return isinstance(said, list) and port in said and port in self._listeners

    def run(self, order: Collective, limit_s: float, stop: threading.Event) -> tuple[Rank, ...]:
        """One test. Afterwards `ended` says whether this Python is good for another one."""
        told = {
            "number": order.number, "host": order.head.name, "port": order.head.port,
            "token": order.head.token,
            "listener": self._listeners[order.head.port] if self.takes(order.head.port) else -1,
            "backend": order.backend, "world": order.world, "first": order.first,
            "ranks": order.ranks, "gpus": list(order.gpus), "small": order.small,
            "large": order.large, "seconds": max(limit_s, 1.0),
        }  # fmt: skip
        self._write(json.dumps(told).encode() + b"\n")
        until = time.monotonic() + limit_s + _GRACE_S
        phases: dict[int, str] = {}
        asked = False
        while time.monotonic() < until and not self.ended:
            for data in self.lines(min(0.1, until - time.monotonic())):
                if data.get("number") != order.number:
                    continue
                if "phase" in data:
                    if data["phase"] in PHASES and isinstance(data.get("rank"), int):
                        phases[data["rank"]] = data["phase"]
                    continue
                try:
                    if data["error"]:
                        return _lost(order, "start", str(data["error"]))
                    return _ranks(order, data)
                except (KeyError, TypeError, ValueError):
                    return _lost(order, "start", "the ranks' answer makes no sense", phases)
            if stop.is_set() and not asked:
                asked, until = True, min(until, time.monotonic() + 2)
                self._write(json.dumps({"end": order.number}).encode() + b"\n")
        how = "ended in the test" if self.ended else "did not answer, and was ended"
        said = f"{os.path.basename(self.name)} {how}"
        self.stop(at_once=True)
        return _lost(order, "start", said, phases)

    def stop(self, *, at_once: bool = False) -> None:
        """End it with its ranks; by its input's end, else by force."""
        self.ended = True
        if at_once:
            # Its ranks have sessions of their own.
            end_all({self.process.pid})
        elif self.process.returncode is None:
            with contextlib.suppress(OSError, ValueError):
                assert self.process.stdin is not None
                self.process.stdin.close()
            try:
                self.process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                end_all({self.process.pid})
        self._supervisor.stop(self.process)


class _Failed(Exception):
    """Why an engine cannot be used, in one line."""


def _source() -> str:
    """The text of the program for the job's Python."""
    source: str = torch_ranks.__spec__.loader.get_source(torch_ranks.__name__)  # type: ignore
    return source


def _environment(config: Config) -> dict[str, str]:
    """The session's, with the job's words."""
    return {**os.environ, **dict(word.split("=", 1) for word in config.environment if "=" in word)}


def _found(words: tuple[str, ...], environment: Mapping[str, str]) -> list[str]:
    """The command with its first word found. Raises `_Failed`."""
    first = words[0]
    if "/" not in first and not shutil.which(first, path=environment.get("PATH")):
        raise _Failed(f"{first}: command not found")
    return list(words)


def _start(
    supervisor: ProcessSupervisor,
    argv: list[str],
    environment: Mapping[str, str],
    descriptors: Iterable[int] = (),
) -> subprocess.Popen[bytes]:
    """Raises `_Failed`."""
    how = {"stdin": subprocess.PIPE, "env": environment, "pass_fds": tuple(descriptors)}
    try:
        return supervisor.start(argv, **how)
    except OSError as problem:
        why = problem.strerror or str(problem)
        if isinstance(problem, FileNotFoundError) and os.path.exists(argv[0]):
            why = "its interpreter is not there"
        raise _Failed(f"{argv[0]}: {why}"[:_LONGEST]) from None


# --- nccl-tests, rccl-tests.

_PROGRAM = "all_reduce_perf"
_PLACES = (
    "/opt/nccl-tests/build", "/usr/local/bin", "/usr/local/nccl-tests/build", "/opt/nccl-tests",
    "/opt/rccl-tests/build", "/opt/rccl-tests", "/opt/rocm/bin",
)  # fmt: skip
#: Repetitions of nccl-tests, and those before them that do not count.
_REPETITIONS, _WARM = 5, 2
_VERSION = re.compile(r"^#? *([nr]ccl-tests)(?: version|: Version) (\S+)", re.M)
_LIBRARY = re.compile(r"\b([nr])ccl-library=(\d+)")
# size count type redop root (old ones have none), then twice: time algbw busbw #wrong; that is N/A
# unchecked, and the largest difference in old ones.
_ROW = re.compile(
    r"^ *(\d+) +\d+ +\w+ +\w+(?: +-?\d+)?"
    r" +([\d.e+]+) +([\d.e+]+) +([\d.e+]+) +(\S+) +([\d.e+]+) +([\d.e+]+) +([\d.e+]+) +(\S+)\s*$",
    re.M,
)
_OUT_OF_BOUNDS = re.compile(r"^#? *Out of bounds values : (\d+) (\w+)", re.M)
_FAILURE = re.compile(r"Test (?:NCCL|CUDA) failure \S+ '(.*?)(?: / )?'", re.S)


@dataclass(frozen=True)
class Performance:
    """What a run of all_reduce_perf printed.

    version, library: of the program, and ``NCCL 2.28.8``; "" where it does not say
    whole:            it came to its end, and has checked its results
    wrong:            wrong results, in words
    ms, gbps:         the time of the smallest size; bus bandwidth of the largest, in Gbit/s
    said:             its error
    """

    version: str
    library: str
    whole: bool
    wrong: str
    ms: float
    gbps: float
    said: str


def performance(text: str) -> Performance:
    """Read what all_reduce_perf of nccl-tests or rccl-tests printed."""
    version = _VERSION.search(text)
    library = _LIBRARY.search(text)
    name = ""
    if library:
        code = int(library[2])
        # 2.28.8 is 22808; before 2.9, 2.8.3 was 2803.
        major, rest = divmod(code, 10000 if code >= 10000 else 1000)
        name = f"{library[1].upper()}CCL {major}.{rest // 100}.{rest % 100}"
    rows = [(int(row[1]), row) for row in _ROW.finditer(text)]
    wrong = ""
    for size, row in rows:
        for count in (row[5], row[9]):
            if not wrong and count.isdigit() and int(count):
                wrong = f"all_reduce of {size} bytes: {count} numbers are wrong"
    bounds = _OUT_OF_BOUNDS.search(text)
    if bounds and bounds[2] != "OK":
        wrong = wrong or f"all_reduce: out of bounds values: {bounds[1]}"
    ms = gbps = 0.0
    if rows:
        first, last = min(rows)[1], max(rows)[1]
        ms = min(float(first[2]), float(first[6])) / 1000
        gbps = max(float(last[4]), float(last[8])) * 8
    checked = bool(rows) and not any("N/A" in (row[5], row[9]) for _, row in rows)
    failure = _FAILURE.search(text)
    said = failure[1].strip() if failure else ""
    warning = torch_ranks.warned(text)
    if failure and warning:
        said += f" ({warning})"
    whole = checked and bounds is not None and not failure
    return Performance(
        version[2] if version else "", name, whole, wrong, ms, gbps, said[:_LONGEST]
    )


def _nccl_tests(environment: Mapping[str, str]) -> str:
    """The path of all_reduce_perf; "": it is not here."""
    path = environment.get("PATH", os.defpath)
    return shutil.which(_PROGRAM, path=os.pathsep.join((path, *_PLACES))) or ""


# --- All engines of this node.


def _gpus_of_driver(supervisor: ProcessSupervisor) -> int:
    """How many GPUs the driver's tool sees, or AMD's driver itself; 0: none."""
    with contextlib.suppress(OSError):
        rows = supervisor.run(["nvidia-smi", "-L"], 15).out.splitlines()
        count = sum(row.startswith("GPU ") for row in rows)
        if count:
            return count
    count = 0
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    with contextlib.suppress(OSError):
        for name in os.listdir(nodes):
            # A node without SIMDs is a processor; what is not ours cannot be read.
            with contextlib.suppress(OSError), open(f"{nodes}/{name}/properties") as file:
                count += bool(re.search(r"^simd_count [1-9]", file.read(), re.M))
    return count


class Engines:
    """What `find` found.

    engines: best first, also those that cannot be used
    gpus:    that the job's PyTorch sees, else the driver's tool
    """

    def __init__(
        self,
        supervisor: ProcessSupervisor,
        config: Config,
        listeners: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        """listeners: gives the descriptor of each port's listener"""
        self._supervisor, self._config, self._listeners = supervisor, config, listeners
        self._python: _Python | None = None
        self._program = ""
        self.engines: tuple[Engine, ...] = ()
        self.gpus = 0
        wanted = config.engines
        found: list[Engine] = []
        if TORCH in wanted:
            found += self._torch()
        if self._python is None:
            self.gpus = _gpus_of_driver(supervisor)
        if NCCL_TESTS in wanted:
            found.append(self._vendor())
        found.append(_engine(RING, "tcp"))
        self.engines = tuple(found)

    def _import_s(self) -> float:
        return min(_IMPORT_S, self._supervisor.left_s * _IMPORT_SHARE)

    def _torch(self) -> list[Engine]:
        try:
            python = self._python = self._started(self._import_s())
        except _Failed as problem:
            where = " ".join((*self._config.prefix, self._config.python or "python3"))
            return [
                _engine(TORCH, backend, where=where, why=str(problem))
                for backend in (_NCCL, _GLOO)
            ]
        hello = python.hello
        self.gpus = hello["gpus"] if type(hello.get("gpus")) is int else 0
        version = str(hello["torch"])[:80]
        where = str(hello.get("executable", ""))
        if self._config.prefix or not where:
            where = " ".join(python.words)
        whys = {_NCCL: "", _GLOO: ""}
        if not hello.get("distributed"):
            whys = dict.fromkeys(whys, f"PyTorch {version} is built without torch.distributed")
        else:
            if not hello.get("gloo"):
                whys[_GLOO] = f"PyTorch {version} is built without gloo"
            if not (hello.get("cuda") or hello.get("hip")):
                whys[_NCCL] = f"PyTorch {version} is built without CUDA and ROCm"
            elif not hello.get("nccl"):
                whys[_NCCL] = f"PyTorch {version} is built without NCCL"
            elif not self.gpus:
                more = str(hello.get("why", ""))
                whys[_NCCL] = "PyTorch sees no GPU" + (f": {more}" if more else "")
        library = str(hello.get("library", ""))[:80]
        return [
            _engine(
                TORCH, backend, version=version, library=carries, where=where, why=whys[backend]
            )
            for backend, carries in ((_NCCL, library), (_GLOO, "gloo"))
        ]

    def _vendor(self) -> Engine:
        environment = _environment(self._config)
        self._program = _nccl_tests(environment)
        if not self._program:
            return _engine(NCCL_TESTS, _NCCL, why=f"{_PROGRAM}: not found")
        version = library = why = ""
        # Some say it here; it asks no GPU.
        try:
            ended = self._supervisor.run([self._program, "-h"], 5, env=environment)
            seen = performance(f"{ended.out}\n{ended.err}")
            version, library = seen.version, seen.library
            if ended.rc not in (0, None) and "error while loading" in ended.err:
                why = f"{self._program}: {ended.first}"[:_LONGEST]
        except OSError as problem:
            why = f"{self._program}: {problem.strerror}"
        if not why and not self.gpus:
            why = "no GPU"
        return _engine(
            NCCL_TESTS, _NCCL, version=version, library=library, where=self._program, why=why
        )

    def _started(self, limit_s: float) -> _Python:
        return _Python(self._supervisor, self._config, limit_s, self._listeners())

    # --- One test.

    def takes(self, order: Collective) -> bool:
        """Whether the test leaves the head's listener open: rank 0 gets it, or needs no port."""
        if order.engine != TORCH:
            return True
        return self._python is not None and self._python.takes(order.head.port)

    def run(
        self, order: Collective, addresses: tuple[str, ...], stop: threading.Event
    ) -> tuple[Rank, ...]:
        """This node's ranks of a test of torch or nccl-tests.

        addresses: of the head, its own; (): those of the order. Blocks, for at most the order's
        limit and a moment; afterwards no process of the test is left.
        """
        began = time.monotonic()
        for engine in self.engines:
            if (engine.name, engine.backend) == (order.engine, order.backend) and engine.why:
                return _lost(order, "start", engine.why)
        if order.engine == NCCL_TESTS:
            return self._run_vendor(order, stop)
        if order.engine != TORCH:
            return _lost(order, "start", f"no engine {order.engine}")
        own = addresses or order.head.addresses
        why = misled(order.head.name, self._own(order, own), *resolve(order.head.name))
        if why:
            ranks = _lost(order, "init", why)
            return tuple(replace(one, seconds=time.monotonic() - began) for one in ranks)
        try:
            if self._python is None or self._python.ended:
                self._python = self._started(order.limit_s / 2)
        except _Failed as problem:
            return _lost(order, "start", str(problem))
        left = order.limit_s - (time.monotonic() - began)
        return self._python.run(order, left, stop)

    @staticmethod
    def _own(order: Collective, own: tuple[str, ...]) -> tuple[str, ...]:
        """The head's own addresses, as this node may use them: the head itself may come by the
        loopback, as Debian's own name does (127.0.1.1 in /etc/hosts)."""
        return (*own, "127.0.0.1", "127.0.1.1", "::1") if order.first == 0 else own

    def _run_vendor(self, order: Collective, stop: threading.Event) -> tuple[Rank, ...]:
        if order.world != order.ranks:
            return _lost(order, "start", f"{NCCL_TESTS} without MPI proves the GPUs of one node")
        began = time.monotonic()
        environment = _environment(self._config)
        environment.setdefault("NCCL_DEBUG", "WARN")
        environment.pop("NCCL_DEBUG_FILE", None)
        gpus = list(order.gpus)
        try:
            name = "HIP_VISIBLE_DEVICES" if os.path.exists("/dev/kfd") else "CUDA_VISIBLE_DEVICES"
            environment[name] = torch_ranks.visible(gpus, environment.get(name, ""))
        except RuntimeError as problem:
            return _lost(order, "start", str(problem))
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        factor = max(2, order.large // max(1, order.small))
        argv = [
            self._program, "-b", str(order.small), "-e", str(order.large), "-f", str(factor),
            "-g", str(order.ranks), "-n", str(_REPETITIONS), "-w", str(_WARM), "-c", "1",
        ]  # fmt: skip
        try:
            process = _start(self._supervisor, argv, environment)
        except _Failed as problem:
            return _lost(order, "start", str(problem))
        text, why = _watch(process, began + order.limit_s - 0.5, stop)
        rc = process.returncode
        files = torch_ranks.shared(process.pid) if rc is None else []
        end_all({process.pid} if rc is None else set())
        self._supervisor.stop(process)
        torch_ranks.remove(files)
        seen = performance(text)
        said = seen.said or why
        if not said and not seen.wrong and (rc or not seen.whole):
            last = torch_ranks.reason(text) or torch_ranks.last_line(text)
            said = f"{_PROGRAM} ended with status {rc}" + (f": {last}" if last else "")
        phase = "done" if not said else "all_reduce" if "#wrong" in text else "init"
        seconds = time.monotonic() - began
        return tuple(
            replace(
                one, phase=phase, said=said[:_LONGEST], wrong=seen.wrong, seconds=seconds,
                ms=round(seen.ms, 4) if not said else 0.0,
                gbps=round(seen.gbps, 4) if not said else 0.0,
            )
            for one in _lost(order, phase, said)
        )  # fmt: skip

    def close(self) -> None:
        """End the job's Python."""
        if self._python is not None:
            self._python.stop()


def _watch(
    process: subprocess.Popen[bytes], until: float, stop: threading.Event
) -> tuple[str, str]:
    """All that a program prints until its end, and why it was not waited for any longer."""
    began = time.monotonic()
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.close()
    kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    open_ = set(kept)
    while open_ and not stop.is_set() and time.monotonic() < until:
        for number in select.select(list(open_), [], [], 0.1)[0]:
            piece = os.read(number, 65536)
            if not piece:
                open_.discard(number)
            kept[number] += piece
            del kept[number][:-_OUTPUT]
    text = "\n".join(one.decode("utf-8", "replace") for one in kept.values())
    if not open_:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        return text, ""
    if stop.is_set():
        return text, "ended: others had passed in less time"
    return text, f"no end after {time.monotonic() - began:.1f} s"


def find(
    supervisor: ProcessSupervisor,
    config: Config,
    listeners: Callable[[], Mapping[int, int]] = dict,
) -> Engines:
    """The engines of this node; the job's Python stays, with torch imported, until `close`."""
    return Engines(supervisor, config, listeners)

"""The engines of a node: the job's own PyTorch, and the vendor's test program.

`Engines` finds the engines, with what each proves and why one cannot be used. `Engines.run` runs
this node's ranks of one test. It returns within the test's limit, and its processes have ended.
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

from nodeready.agent.resolver import resolve
from nodeready.agent.runtime import ProcessSupervisor, end_all
from nodeready.agent.smoke import torch_ranks
from nodeready.agent.smoke.orders import (
    NCCL_TESTS,
    PAIRS,
    PHASES,
    TORCH,
    CollectiveOrder,
    Engine,
    RankNetwork,
    RankResult,
    SmokeConfig,
    failed_ranks,
)
from nodeready.agent.witnesses import nccl_errors
from nodeready.agent.witnesses.nccl_log import read_log

_LONGEST = torch_ranks.LONGEST

_NCCL, _GLOO = "nccl", "gloo"
PROVES = {
    (TORCH, _NCCL): "init, all_reduce, all_gather, send/recv and barrier of the job's own PyTorch "
    "over {library}, the sums, and each GPU's products and memory",
    (TORCH, _GLOO): "init, all_reduce, all_gather, send/recv and barrier of the job's own PyTorch "
    "over gloo, and the sums; no GPU",
    (NCCL_TESTS, _NCCL): "all_reduce over {library} and its sums between the GPUs of one node",
    (PAIRS, "tcp"): "plain TCP connections between pairs of nodes, all nodes at once, and the "
    "data over them; no library, no GPU",
}  # fmt: skip


def _engine(
    name: str, backend: str, *, version: str = "", library: str = "", path: str = "",
    reason: str = "",
) -> Engine:  # fmt: skip
    proves = PROVES[name, backend].format(library=library or "NCCL")
    return Engine(name, backend, version, library, path, proves, reason)


# --- A rank's answer.


def _finite(value: Any) -> float:
    """The number, which is neither negative nor infinite. Raises TypeError, ValueError."""
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(value)
    return number


def _network(lines: Iterable[str], rank: int) -> RankNetwork | None:
    """The network in NCCL's lines of a rank's process; None: they name none."""
    ranks = [row for row in read_log(lines).ranks if row.network]
    nccl = next((row for row in ranks if row.rank == rank), ranks[0] if ranks else None)
    if nccl is None:
        return None
    notes = [
        nccl_errors.by_key(error.key).meaning
        for error in nccl.errors
        if error.key in nccl_errors.FALLBACKS
    ]
    note = "; ".join(notes) if nccl.network == "Socket" else ""
    return RankNetwork(nccl.network, nccl.interface, nccl.hcas, nccl.gdr, note)


def _rank_network(row: Mapping[str, Any]) -> RankNetwork | None:
    """The network of a rank in an answer of the job's Python. Raises TypeError, ValueError."""
    interface, address = (str(word)[:80] for word in row.get("address", ("", "")))
    if address:
        return RankNetwork(_GLOO, interface or address)
    lines = [str(line) for line in row.get("nccl", ())[: torch_ranks.DEBUG_LINES]]
    return _network(lines, int(row["rank"]))


def _parse_ranks(order: CollectiveOrder, answer: Mapping[str, Any]) -> tuple[RankResult, ...]:
    """The ranks in an answer of the job's Python, which is the user's program. Raises KeyError,
    TypeError, ValueError for an answer that makes no sense.
    """
    ranks = tuple(
        RankResult(
            int(row["rank"]), int(row["gpu"]), str(row["phase"]), str(row["mismatch"])[:_LONGEST],
            str(row["error"])[:_LONGEST], int(row["waits_for"]), _finite(row["ms"]),
            _finite(row["gbps"]), _finite(row["seconds"]), _rank_network(row),
        )
        for row in answer["ranks"]
    )  # fmt: skip
    numbers = list(range(order.first, order.first + order.ranks))
    if [rank.rank for rank in ranks] != numbers or not {rank.phase for rank in ranks} <= {*PHASES}:
        raise ValueError("other ranks")
    return ranks


def name_problem(
    name: str, addresses: tuple[str, ...], resolved: tuple[str, ...], error: str
) -> str:
    """Why a name does not resolve to its node; "": it does.

    addresses: of that node
    resolved:  the resolver's addresses; error: why it has none
    """
    if not resolved:
        return f"{name}: {error or 'no address'}"
    if {*resolved}.isdisjoint(addresses):
        return f"{name} resolves to {', '.join(resolved[:3])}, which is not {name}'s"
    return ""


# --- The job's Python.

# Every Python 2 and 3 understands this. The program follows over the standard input.
_BOOT = (
    "import sys;sys.version_info<(3,8)and sys.exit('Python %d.%d: older than 3.8'%"
    "sys.version_info[:2]);exec(compile(sys.stdin.buffer.read(int(sys.argv[1])),"
    "'torch_ranks.py','exec'))"
)
#: Maximum seconds for the import of torch, which takes a minute from a network's disk; and its
#: maximum part of the whole time.
_IMPORT_S, _IMPORT_SHARE = 90.0, 0.5
#: Seconds after a test's limit in which the job's Python must answer; then it is killed.
_GRACE_S = 0.6
#: Bytes of output that are kept.
_OUTPUT = 1 << 20


class _TorchProcess:
    """The job's Python with torch imported. Raises `EngineUnusable` if it cannot be started."""

    def __init__(
        self,
        supervisor: ProcessSupervisor,
        config: SmokeConfig,
        limit_s: float,
        listeners: Mapping[int, int],
    ) -> None:
        """listeners: port -> its listener's descriptor"""
        self._supervisor, self._listeners = supervisor, dict(listeners)
        self._mark = "nr" + secrets.token_hex(8)
        self._partial, self._last_errors = b"", deque[str](maxlen=50)
        self.ended = False
        self.name = config.python or "python3"
        self.words = (*config.prefix, self.name)
        variables = config.variables
        environment = {**os.environ, **variables}
        if "/" not in self.words[0] and not shutil.which(
            self.words[0], path=environment.get("PATH")
        ):
            raise EngineUnusable(f"{self.words[0]}: command not found")
        source = torch_ranks.__spec__.loader.get_source(torch_ranks.__name__)  # type: ignore
        arguments = (self._mark, supervisor.left_s + 1, variables, self._listeners)
        text = f"{source}\nmain{arguments!a}\n".encode()
        argv = [*self.words, "-B", "-c", _BOOT, str(len(text))]
        self.process = _start(supervisor, argv, environment, self._listeners.values())
        try:
            threading.Thread(target=self._drain, daemon=True).start()
            self._write(text)
            self.hello = self._wait_for_hello(limit_s)
        except BaseException:
            self.stop()
            raise

    def _drain(self) -> None:
        """Keep the last lines of its standard error."""
        assert self.process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for row in self.process.stderr:
                if row.strip():
                    self._last_errors.append(row[:2000].decode("utf-8", "replace").rstrip())

    def _write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def _wait_for_hello(self, limit_s: float) -> dict[str, Any]:
        until = time.monotonic() + limit_s
        imported = False
        while time.monotonic() < until:
            for data in self.lines(until - time.monotonic()):
                imported = imported or "imported" in data
                if "reason" in data and "torch" not in data:
                    raise EngineUnusable(f"{self.name}: {data['reason']}"[:_LONGEST])
                if "torch" in data:
                    return data
            if self.ended:
                raise EngineUnusable(self._end_reason())
        if imported:
            raise EngineUnusable(
                f"{self.name}: the GPUs' driver did not answer in {limit_s:.0f} s"
            )
        raise EngineUnusable(f"{self.name}: no import of torch in {limit_s:.0f} s")

    def _end_reason(self) -> str:
        """Why the process ended before its hello."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)
        # The thread that reads its errors may be a moment behind.
        time.sleep(0.05)
        rc = self.process.returncode
        how = f"status {rc}"
        if rc is not None and rc < 0:
            how = signal.Signals(-rc).name if -rc in {*signal.Signals} else f"signal {-rc}"
        message = torch_ranks.last_line("\n".join(self._last_errors))
        name = os.path.basename(self.words[0])
        return f"{name}: {message}"[:_LONGEST] if message else f"{name}: ended with {how}"

    def lines(self, wait_s: float) -> list[dict[str, Any]]:
        """The messages that are there, else the first ones within this time."""
        assert self.process.stdout is not None
        try:
            number = self.process.stdout.fileno()
            if not select.select([number], [], [], max(0.0, wait_s))[0]:
                return []
            chunk = os.read(number, 65536)
        except (OSError, ValueError):  # another thread stopped it
            chunk = b""
        if not chunk:
            self.ended = True
            return []
        *rows, partial = (self._partial + chunk).split(b"\n")
        self._partial = partial[-_OUTPUT:]
        messages = []
        for row in rows:
            mark, _, text = row.decode("utf-8", "replace").partition(" ")
            if mark == self._mark:
                with contextlib.suppress(ValueError):
                    data = json.loads(text)
                    messages += [data] if isinstance(data, dict) else []
        return messages

    def keeps_listener(self, port: int) -> bool:
        """Whether rank 0's store takes over the listener of this port, which stays open."""
        ports = self.hello.get("listeners")
        return isinstance(ports, list) and port in ports and port in self._listeners

    def run(
        self, order: CollectiveOrder, limit_s: float, stop: threading.Event
    ) -> tuple[RankResult, ...]:
        """Run one test. Afterwards `ended` tells whether this Python can run another test."""
        port = order.head.port
        test = {
            "number": order.number, "host": order.head.name, "port": port,
            "token": order.head.token,
            "listener": self._listeners[port] if self.keeps_listener(port) else -1,
            "backend": order.backend, "world": order.world, "first": order.first,
            "ranks": order.ranks, "gpus": list(order.gpus), "small": order.small,
            "large": order.large, "seconds": max(limit_s, 1.0),
        }  # fmt: skip
        self._write(json.dumps(test).encode() + b"\n")
        until = time.monotonic() + limit_s + _GRACE_S
        phases: dict[int, str] = {}
        is_end_sent = False
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
                        return failed_ranks(order, "start", str(data["error"]))
                    return _parse_ranks(order, data)
                except (KeyError, TypeError, ValueError):
                    message = "the ranks' answer makes no sense"
                    return failed_ranks(order, "start", message, phases)
            if stop.is_set() and not is_end_sent:
                is_end_sent, until = True, min(until, time.monotonic() + 2)
                self._write(json.dumps({"end": order.number}).encode() + b"\n")
        how = "ended in the test" if self.ended else "did not answer, and was ended"
        message = f"{os.path.basename(self.name)} {how}"
        self.stop(at_once=True)
        return failed_ranks(order, "start", message, phases)

    def stop(self, *, at_once: bool = False) -> None:
        """End it with its ranks: close its input, else kill it."""
        self.ended = True
        if at_once:
            # Each of its ranks has its own session.
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


class EngineUnusable(Exception):
    """The reason why an engine cannot be used, in one line."""


def _start(
    supervisor: ProcessSupervisor,
    argv: list[str],
    environment: Mapping[str, str],
    descriptors: Iterable[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process. Raises `EngineUnusable`."""
    try:
        return supervisor.start(
            argv, stdin=subprocess.PIPE, env=environment, pass_fds=tuple(descriptors)
        )
    except OSError as problem:
        reason = problem.strerror or str(problem)
        if isinstance(problem, FileNotFoundError) and os.path.exists(argv[0]):
            reason = "its interpreter is not there"
        raise EngineUnusable(f"{argv[0]}: {reason}"[:_LONGEST]) from None


# --- nccl-tests, rccl-tests.

_PROGRAM = "all_reduce_perf"
_PLACES = (
    "/opt/nccl-tests/build", "/usr/local/bin", "/usr/local/nccl-tests/build", "/opt/nccl-tests",
    "/opt/rccl-tests/build", "/opt/rccl-tests", "/opt/rocm/bin",
)  # fmt: skip
#: Repetitions of nccl-tests, and warm-up repetitions before them.
_REPETITIONS, _WARM_UPS = 5, 2
_VERSION = re.compile(r"^#? *([nr]ccl-tests)(?: version|: Version) (\S+)", re.M)
_LIBRARY = re.compile(r"\b([nr])ccl-library=(\d+)")
# size count type redop root (old versions have no root), then twice: time algbw busbw #wrong. The
# last is N/A if unchecked, and the largest difference in old versions.
_ROW = re.compile(
    r"^ *(\d+) +\d+ +\w+ +\w+(?: +-?\d+)?"
    r" +([\d.e+]+) +([\d.e+]+) +([\d.e+]+) +(\S+) +([\d.e+]+) +([\d.e+]+) +([\d.e+]+) +(\S+)\s*$",
    re.M,
)
_OUT_OF_BOUNDS = re.compile(r"^#? *Out of bounds values : (\d+) (\w+)", re.M)
_FAILURE = re.compile(r"Test (?:NCCL|CUDA) failure \S+ '(.*?)(?: / )?'", re.S)


@dataclass(frozen=True)
class Performance:
    """The result of a run of all_reduce_perf."""

    version: str  # of the program, such as ``NCCL 2.28.8``; "" if it is not printed
    library: str  # likewise
    is_complete: bool  # the run came to its end, and has checked its results
    mismatch: str  # wrong results, in words
    ms: float  # the time of the smallest size; bus bandwidth of the largest, in Gbit/s
    gbps: float  # likewise
    error: str  # of the program; "": none


def performance(text: str) -> Performance:
    """Parse the output of all_reduce_perf of nccl-tests or rccl-tests."""
    version = _VERSION.search(text)
    library = _LIBRARY.search(text)
    name = ""
    if library:
        code = int(library[2])
        # 2.28.8 is 22808; before 2.9, 2.8.3 was 2803.
        major, minor = divmod(code, 10000 if code >= 10000 else 1000)
        name = f"{library[1].upper()}CCL {major}.{minor // 100}.{minor % 100}"
    rows = [(int(row[1]), row) for row in _ROW.finditer(text)]
    mismatch = ""
    for size, row in rows:
        for count in (row[5], row[9]):
            if not mismatch and count.isdigit() and int(count):
                mismatch = f"all_reduce of {size} bytes: {count} numbers are wrong"
    bounds = _OUT_OF_BOUNDS.search(text)
    if bounds and bounds[2] != "OK":
        mismatch = mismatch or f"all_reduce: out of bounds values: {bounds[1]}"
    ms = gbps = 0.0
    if rows:
        first, last = min(rows)[1], max(rows)[1]
        ms = min(float(first[2]), float(first[6])) / 1000
        gbps = max(float(last[4]), float(last[8])) * 8
    checked = bool(rows) and not any("N/A" in (row[5], row[9]) for _, row in rows)
    failure = _FAILURE.search(text)
    message = failure[1].strip() if failure else ""
    warning = torch_ranks.last_warning(text)
    if failure and warning:
        message += f" ({warning})"
    is_complete = checked and bounds is not None and not failure
    return Performance(
        version[2] if version else "", name, is_complete, mismatch, ms, gbps, message[:_LONGEST]
    )


# --- All engines of this node.


def _gpus_of_driver(supervisor: ProcessSupervisor) -> int:
    """The number of GPUs that NVIDIA's tool or AMD's driver sees; 0: none."""
    with contextlib.suppress(OSError):
        rows = supervisor.run(["nvidia-smi", "-L"], 15).out.splitlines()
        count = sum(row.startswith("GPU ") for row in rows)
        if count:
            return count
    count = 0
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    with contextlib.suppress(OSError):
        for name in os.listdir(nodes):
            # A node without SIMDs is a processor. Another user's file cannot be read.
            with contextlib.suppress(OSError), open(f"{nodes}/{name}/properties") as file:
                count += bool(re.search(r"^simd_count [1-9]", file.read(), re.M))
    return count


class Engines:
    """The engines of this node. The job's Python runs, with torch imported, until `close`.

    engines: the best first; unusable engines are included
    gpus:    the number that the job's PyTorch sees, else the driver's tool
    """

    def __init__(
        self,
        supervisor: ProcessSupervisor,
        config: SmokeConfig,
        listeners: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        """listeners: gives the descriptor of each port's listener"""
        self._supervisor, self._config, self._listeners = supervisor, config, listeners
        self._python: _TorchProcess | None = None
        self._program = ""
        self.engines: tuple[Engine, ...] = ()
        self.gpus = 0
        engines: list[Engine] = []
        if TORCH in config.engines:
            engines += self._torch()
        if self._python is None:
            self.gpus = _gpus_of_driver(supervisor)
        if NCCL_TESTS in config.engines:
            engines.append(self._vendor())
        engines.append(_engine(PAIRS, "tcp"))
        self.engines = tuple(engines)

    def _torch(self) -> list[Engine]:
        limit_s = min(_IMPORT_S, self._supervisor.left_s * _IMPORT_SHARE)
        try:
            python = self._python = self._start_python(limit_s)
        except EngineUnusable as problem:
            path = " ".join((*self._config.prefix, self._config.python or "python3"))
            return [
                _engine(TORCH, backend, path=path, reason=str(problem))
                for backend in (_NCCL, _GLOO)
            ]
        hello = python.hello
        self.gpus = hello["gpus"] if type(hello.get("gpus")) is int else 0
        version = str(hello["torch"])[:80]
        path = str(hello.get("executable", ""))
        if self._config.prefix or not path:
            path = " ".join(python.words)
        reasons = {_NCCL: "", _GLOO: ""}
        if not hello.get("distributed"):
            reason = f"PyTorch {version} is built without torch.distributed"
            reasons = dict.fromkeys(reasons, reason)
        else:
            if not hello.get("gloo"):
                reasons[_GLOO] = f"PyTorch {version} is built without gloo"
            if not (hello.get("cuda") or hello.get("hip")):
                reasons[_NCCL] = f"PyTorch {version} is built without CUDA and ROCm"
            elif not hello.get("nccl"):
                reasons[_NCCL] = f"PyTorch {version} is built without NCCL"
            elif not self.gpus:
                detail = str(hello.get("reason", ""))
                reasons[_NCCL] = "PyTorch sees no GPU" + (f": {detail}" if detail else "")
        library = str(hello.get("library", ""))[:80]
        return [
            _engine(TORCH, backend, version=version, library=name, path=path,
                    reason=reasons[backend])
            for backend, name in ((_NCCL, library), (_GLOO, "gloo"))
        ]  # fmt: skip

    def _vendor(self) -> Engine:
        environment = {**os.environ, **self._config.variables}
        path = os.pathsep.join((environment.get("PATH", os.defpath), *_PLACES))
        self._program = shutil.which(_PROGRAM, path=path) or ""
        if not self._program:
            return _engine(NCCL_TESTS, _NCCL, reason=f"{_PROGRAM}: not found")
        version = library = reason = ""
        # Some versions print their version here, without using a GPU.
        try:
            ended = self._supervisor.run([self._program, "-h"], 5, env=environment)
            result = performance(f"{ended.out}\n{ended.err}")
            version, library = result.version, result.library
            if ended.rc not in (0, None) and "error while loading" in ended.err:
                reason = f"{self._program}: {ended.first}"[:_LONGEST]
        except OSError as problem:
            reason = f"{self._program}: {problem.strerror}"
        if not reason and not self.gpus:
            reason = "no GPU"
        return _engine(
            NCCL_TESTS, _NCCL, version=version, library=library, path=self._program, reason=reason
        )

    def _start_python(self, limit_s: float) -> _TorchProcess:
        return _TorchProcess(self._supervisor, self._config, limit_s, self._listeners())

    # --- One test.

    def keeps_listener(self, order: CollectiveOrder) -> bool:
        """Whether the head's listener stays open: rank 0 takes it over or needs no port."""
        if order.engine != TORCH:
            return True
        return self._python is not None and self._python.keeps_listener(order.head.port)

    def run(self, order: CollectiveOrder, stop: threading.Event) -> tuple[RankResult, ...]:
        """Run this node's ranks of a test of torch or nccl-tests, and leave no process. The call
        takes at most a moment longer than the order's limit.
        """
        began = time.monotonic()
        for engine in self.engines:
            if (engine.name, engine.backend) == (order.engine, order.backend) and engine.reason:
                return failed_ranks(order, "start", engine.reason)
        if order.engine == NCCL_TESTS:
            return self._run_vendor(order, stop)
        if order.engine != TORCH:
            return failed_ranks(order, "start", f"no engine {order.engine}")
        # On the head itself its name may resolve to a loopback address, as on Debian (127.0.1.1 in
        # /etc/hosts).
        loopback = ("127.0.0.1", "127.0.1.1", "::1") if order.first == 0 else ()
        addresses = order.head.addresses + loopback
        reason = name_problem(order.head.name, addresses, *resolve(order.head.name))
        if reason:
            ranks = failed_ranks(order, "init", reason)
            return tuple(replace(rank, seconds=time.monotonic() - began) for rank in ranks)
        try:
            if self._python is None or self._python.ended:
                self._python = self._start_python(order.limit_s / 2)
        except EngineUnusable as problem:
            return failed_ranks(order, "start", str(problem))
        remaining_s = order.limit_s - (time.monotonic() - began)
        return self._python.run(order, remaining_s, stop)

    def _run_vendor(self, order: CollectiveOrder, stop: threading.Event) -> tuple[RankResult, ...]:
        if order.world != order.ranks:
            message = f"{NCCL_TESTS} without MPI proves the GPUs of one node"
            return failed_ranks(order, "start", message)
        debug = torch_ranks.open_debug_file()
        try:
            return self._run_program(order, stop, debug)
        finally:
            if debug >= 0:
                os.close(debug)

    def _run_program(
        self, order: CollectiveOrder, stop: threading.Event, debug: int
    ) -> tuple[RankResult, ...]:
        """Run nccl-tests. debug: the descriptor of NCCL's file; -1: none"""
        began = time.monotonic()
        environment = {**os.environ, **self._config.variables}
        environment.update(torch_ranks.debug_variables(debug))
        environment.pop("NCCL_DEBUG_SUBSYS", None)
        gpus = list(order.gpus)
        try:
            name = "HIP_VISIBLE_DEVICES" if os.path.exists("/dev/kfd") else "CUDA_VISIBLE_DEVICES"
            environment[name] = torch_ranks.visible_devices(gpus, environment.get(name, ""))
        except RuntimeError as problem:
            return failed_ranks(order, "start", str(problem))
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        factor = max(2, order.large // max(1, order.small))
        argv = [
            self._program, "-b", str(order.small), "-e", str(order.large), "-f", str(factor),
            "-g", str(order.ranks), "-n", str(_REPETITIONS), "-w", str(_WARM_UPS), "-c", "1",
        ]  # fmt: skip
        try:
            process = _start(self._supervisor, argv, environment, [debug] if debug >= 0 else [])
        except EngineUnusable as problem:
            return failed_ranks(order, "start", str(problem))
        text, reason = _watch(process, began + order.limit_s - 0.5, stop)
        rc = process.returncode
        files = []
        if rc is None:
            files = torch_ranks.shared_memory_files(process.pid)
            end_all({process.pid})
        self._supervisor.stop(process)
        torch_ranks.remove_files(files)
        lines = torch_ranks.debug_lines(debug) if debug >= 0 else []
        text = "\n".join((text, *lines))
        result = performance(text)
        message = result.error or reason
        if not message and not result.mismatch and (rc or not result.is_complete):
            last = torch_ranks.output_reason(text) or torch_ranks.last_line(text)
            message = f"{_PROGRAM} ended with status {rc}" + (f": {last}" if last else "")
        phase = "done" if not message else "all_reduce" if "#wrong" in text else "init"
        seconds = time.monotonic() - began
        ms, gbps = (0.0, 0.0) if message else (round(result.ms, 4), round(result.gbps, 4))
        return tuple(
            replace(
                rank, mismatch=result.mismatch, ms=ms, gbps=gbps, seconds=seconds,
                network=_network(lines, rank.rank),
            )
            for rank in failed_ranks(order, phase, message)
        )  # fmt: skip

    @property
    def python_pid(self) -> int | None:
        """The process of the job's Python, or of its prefix; None: there is none."""
        return self._python.process.pid if self._python is not None else None

    def close(self) -> None:
        """End the job's Python."""
        if self._python is not None:
            self._python.stop()


def _watch(
    process: subprocess.Popen[bytes], until: float, stop: threading.Event
) -> tuple[str, str]:
    """The output of a program, and why it was ended; "": it ended by itself."""
    began = time.monotonic()
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.close()
    outputs = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    open_ = set(outputs)
    while open_ and not stop.is_set() and time.monotonic() < until:
        for number in select.select(list(open_), [], [], 0.1)[0]:
            data = os.read(number, 65536)
            if not data:
                open_.discard(number)
            outputs[number] += data
            del outputs[number][:-_OUTPUT]
    text = "\n".join(output.decode("utf-8", "replace") for output in outputs.values())
    if not open_:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        return text, ""
    if stop.is_set():
        return text, "ended: others had passed in less time"
    return text, f"no end after {time.monotonic() - began:.1f} s"

"""The engines of a node: the job's own PyTorch, and the vendor's test program.

`Engines` finds the engines, with what each proves and why one cannot be used. `Engines.run` runs
this node's ranks of one test. It returns within the test's limit, and its processes have ended.
"""

from __future__ import annotations

import contextlib
import json
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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nodeready.agent.resolver import resolve
from nodeready.agent.runtime import ProcessSupervisor, end_all
from nodeready.agent.smoke import orders, torch_ranks
from nodeready.agent.smoke.orders import CollectiveOrder, RankNetwork, RankResult, SmokeConfig
from nodeready.agent.smoke.pair import listener_mark
from nodeready.agent.witnesses import nccl_errors
from nodeready.agent.witnesses.nccl_log import read_log
from nodeready.core import wire

_NCCL, _GLOO = "nccl", "gloo"
TORCH, NCCL_TESTS, PAIRS = orders.ENGINES
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
    name: str, backend: str, *, version: str = "", library: str = "", reason: str = ""
) -> orders.Engine:
    proves = PROVES[name, backend].format(library=library or "NCCL")
    return orders.Engine(name, backend, version, library, proves, reason)


# --- What the job's Python says. It is the user's program, so that it may say anything.


@dataclass(frozen=True)
class TorchHello:
    torch: wire.Name  # its version
    library: wire.Name  # as in `Engine`; "": not known
    nccl: wire.Line  # why NCCL cannot be used; "": it can
    gloo: wire.Line  # likewise


def _network(lines: Iterable[str], rank: int) -> RankNetwork | None:
    """The network in NCCL's lines of a rank's process; None: they name none."""
    ranks = [row for row in read_log(lines).ranks if row.network]
    nccl = next((row for row in ranks if row.rank == rank), ranks[0] if ranks else None)
    if nccl is None:
        return None
    keys = [error.key for error in nccl.errors if error.key in nccl_errors.FALLBACKS]
    note = "; ".join(nccl_errors.by_key(key).meaning for key in keys)
    note = note if nccl.network == "Socket" else ""
    return RankNetwork(nccl.network, nccl.interface, nccl.hcas, nccl.gdr, note)


def rank_result(row: Mapping[str, Any]) -> RankResult:
    """A rank in an answer. Raises DecodeError, KeyError, TypeError, ValueError for nonsense."""
    fields = {name: value for name, value in row.items() if name not in ("nccl", "address")}
    rank = wire.decode(RankResult, {**fields, "network": None})
    interface, address = (str(word)[:80] for word in row["address"])
    if address:
        return replace(rank, network=RankNetwork(_GLOO, interface or address))
    lines = [str(line) for line in row["nccl"][: torch_ranks.DEBUG_LINES]]
    return replace(rank, network=_network(lines, rank.rank))


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
_GRACE_S = 0.6  # seconds after a limit for the job's Python to answer; then it is killed
_OUTPUT = 1 << 20  # bytes of a line that are kept


class _TorchProcess:
    """The job's Python with torch imported. Raises `EngineUnusable` if it cannot be started."""

    def __init__(self, supervisor: ProcessSupervisor, config: SmokeConfig, limit_s: float) -> None:
        self._supervisor = supervisor
        self._mark = "nr" + secrets.token_hex(8)
        self._partial, self._last_errors = b"", deque[str](maxlen=50)
        self.ended = False
        self.name = config.python or "python3"
        self.words = (*config.prefix, self.name)
        environment = {**os.environ, **config.variables}
        is_path = "/" in self.words[0]
        if not is_path and not shutil.which(self.words[0], path=environment.get("PATH")):
            raise EngineUnusable(f"{self.words[0]}: command not found")
        source = torch_ranks.__spec__.loader.get_source(torch_ranks.__name__)  # type: ignore
        arguments = (self._mark, supervisor.left_s + 1, config.variables)
        text = f"{source}\nmain{arguments!a}\n".encode()
        argv = [*self.words, "-B", "-c", _BOOT, str(len(text))]
        self.process = _start(supervisor, argv, environment)
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

    def _wait_for_hello(self, limit_s: float) -> TorchHello:
        until = time.monotonic() + limit_s
        reason = f"no import of torch in {limit_s:.0f} s"
        while time.monotonic() < until:
            for data in self.lines(until - time.monotonic()):
                if "imported" in data:
                    reason = f"the GPUs' driver did not answer in {limit_s:.0f} s"
                elif "reason" in data:
                    raise EngineUnusable(f"{self.name}: {data['reason']}"[: orders.MAX_ERROR])
                else:
                    try:
                        return wire.decode(TorchHello, data)
                    except wire.DecodeError as problem:
                        raise EngineUnusable(f"{self.name}: {problem.reason}") from None
            if self.ended:
                raise EngineUnusable(self._end_reason())
        raise EngineUnusable(f"{self.name}: {reason}")

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
        message = torch_ranks.last_line("\n".join(self._last_errors)) or f"ended with {how}"
        return f"{os.path.basename(self.words[0])}: {message}"[: orders.MAX_ERROR]

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

    def run(
        self, order: CollectiveOrder, limit_s: float, stop: threading.Event
    ) -> tuple[RankResult, ...]:
        """Run one test. Afterwards `ended` tells whether this Python can run another test."""
        test = asdict(order)
        head = test.pop("head")
        test |= {"host": head["name"], "port": head["port"], "seconds": max(limit_s, 1.0)}
        test["mark"] = listener_mark(order.head.token).decode()
        self._write(json.dumps(test).encode() + b"\n")
        until = time.monotonic() + limit_s + _GRACE_S
        is_end_sent = False
        while time.monotonic() < until and not self.ended:
            for data in self.lines(min(0.1, until - time.monotonic())):
                if data.get("number") != order.number:
                    continue
                try:
                    if data["error"]:
                        return orders.failed_ranks(order, "start", str(data["error"]))
                    return tuple(map(rank_result, data["ranks"]))
                except (wire.DecodeError, KeyError, TypeError, ValueError):
                    return orders.failed_ranks(order, "start", "the ranks' answer makes no sense")
            if stop.is_set() and not is_end_sent:
                is_end_sent, until = True, min(until, time.monotonic() + 2)
                self._write(json.dumps({"end": order.number}).encode() + b"\n")
        how = "ended in the test" if self.ended else "did not answer, and was ended"
        self.stop(at_once=True)
        return orders.failed_ranks(order, "init", f"{os.path.basename(self.name)} {how}")

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
    supervisor: ProcessSupervisor, argv: list[str], environment: Mapping[str, str], **how: object
) -> subprocess.Popen[bytes]:
    """Start a process. Raises `EngineUnusable`."""
    try:
        return supervisor.start(argv, **{"stdin": subprocess.PIPE, "env": environment, **how})
    except OSError as problem:
        reason = problem.strerror or str(problem)
        if isinstance(problem, FileNotFoundError) and os.path.exists(argv[0]):
            reason = "its interpreter is not there"
        raise EngineUnusable(f"{argv[0]}: {reason}"[: orders.MAX_ERROR]) from None


# --- nccl-tests, rccl-tests.

_PROGRAM = "all_reduce_perf"
_PLACES = (
    "/opt/nccl-tests/build", "/usr/local/bin", "/usr/local/nccl-tests/build", "/opt/nccl-tests",
    "/opt/rccl-tests/build", "/opt/rccl-tests", "/opt/rocm/bin",
)  # fmt: skip
_REPETITIONS, _WARM_UPS = 5, 2  # repetitions of nccl-tests, and warm-up repetitions before them
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
    program, error = version[2] if version else "", message[: orders.MAX_ERROR]
    return Performance(program, name, is_complete, mismatch, ms, gbps, error)


# --- All engines of this node.


class Engines:
    """The engines of this node. The job's Python runs, with torch imported, until `close`.
    engines: the best first; unusable engines are included
    """

    def __init__(self, supervisor: ProcessSupervisor, config: SmokeConfig) -> None:
        self._supervisor, self._config = supervisor, config
        self._python: _TorchProcess | None = None
        self._program = ""
        engines: list[orders.Engine] = []
        if TORCH in config.engines:
            engines += self._torch()
        if NCCL_TESTS in config.engines:
            engines.append(self._vendor())
        self.engines = (*engines, _engine(PAIRS, "tcp"))

    def _torch(self) -> list[orders.Engine]:
        limit_s = min(_IMPORT_S, self._supervisor.left_s * _IMPORT_SHARE)
        try:
            python = self._python = _TorchProcess(self._supervisor, self._config, limit_s)
        except EngineUnusable as problem:
            return [_engine(TORCH, kind, reason=str(problem)) for kind in (_NCCL, _GLOO)]
        hello = python.hello
        version, library = hello.torch[:80], hello.library[:80]
        return [
            _engine(TORCH, _NCCL, version=version, library=library, reason=hello.nccl),
            _engine(TORCH, _GLOO, version=version, library="gloo", reason=hello.gloo),
        ]

    def _vendor(self) -> orders.Engine:
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
                reason = f"{self._program}: {ended.first}"[: orders.MAX_ERROR]
        except OSError as problem:
            reason = f"{self._program}: {problem.strerror}"
        return _engine(NCCL_TESTS, _NCCL, version=version, library=library, reason=reason)

    # --- One test.

    def run(self, order: CollectiveOrder, stop: threading.Event) -> tuple[RankResult, ...]:
        """Run this node's ranks of a test of torch or nccl-tests, and leave no process. The call
        takes at most a moment longer than the order's limit.
        """
        began = time.monotonic()
        for engine in self.engines:
            if (engine.name, engine.backend) == (order.engine, order.backend) and engine.reason:
                return orders.failed_ranks(order, "start", engine.reason)
        if order.engine == NCCL_TESTS:
            return self._run_vendor(order, stop)
        if order.engine != TORCH:
            return orders.failed_ranks(order, "start", f"no engine {order.engine}")
        # On the head its own name may be a loopback address, as on Debian (127.0.1.1, /etc/hosts).
        loopback = ("127.0.0.1", "127.0.1.1", "::1") if order.first == 0 else ()
        addresses = order.head.addresses + loopback
        if reason := name_problem(order.head.name, addresses, *resolve(order.head.name)):
            return orders.failed_ranks(order, "init", reason)
        try:
            if self._python is None or self._python.ended:
                self._python = _TorchProcess(self._supervisor, self._config, order.limit_s / 2)
        except EngineUnusable as problem:
            return orders.failed_ranks(order, "start", str(problem))
        remaining_s = order.limit_s - (time.monotonic() - began)
        return self._python.run(order, remaining_s, stop)

    def _run_vendor(self, order: CollectiveOrder, stop: threading.Event) -> tuple[RankResult, ...]:
        if order.world != order.ranks:
            message = f"{NCCL_TESTS} without MPI proves the GPUs of one node"
            return orders.failed_ranks(order, "start", message)
        debug = torch_ranks.open_debug_file()
        try:
            return self._run_program(order, stop, debug)
        except (EngineUnusable, RuntimeError) as problem:
            return orders.failed_ranks(order, "start", str(problem))
        finally:
            if debug >= 0:
                os.close(debug)

    def _run_program(
        self, order: CollectiveOrder, stop: threading.Event, debug: int
    ) -> tuple[RankResult, ...]:
        """Run nccl-tests. Raises EngineUnusable, RuntimeError. debug: of NCCL's file; -1: none"""
        began = time.monotonic()
        environment = {**os.environ, **self._config.variables}
        environment.update(torch_ranks.debug_variables(debug))
        environment.pop("NCCL_DEBUG_SUBSYS", None)
        name = "HIP_VISIBLE_DEVICES" if os.path.exists("/dev/kfd") else "CUDA_VISIBLE_DEVICES"
        environment[name] = torch_ranks.visible_devices([*order.gpus], environment.get(name, ""))
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        factor = max(2, order.large // max(1, order.small))
        argv = [
            self._program, "-b", str(order.small), "-e", str(order.large), "-f", str(factor),
            "-g", str(order.ranks), "-n", str(_REPETITIONS), "-w", str(_WARM_UPS), "-c", "1",
        ]  # fmt: skip
        how = {"stdin": subprocess.DEVNULL, "pass_fds": (debug,) if debug >= 0 else ()}
        process = _start(self._supervisor, argv, environment, **how)
        reason = ""
        while not reason:
            try:
                outputs = process.communicate(timeout=0.1)
                break
            except subprocess.TimeoutExpired as running:
                outputs = running.output or b"", running.stderr or b""
                if stop.is_set():
                    reason = "ended: others had passed in less time"
                elif time.monotonic() > began + order.limit_s - 0.5:
                    reason = f"no end after {time.monotonic() - began:.1f} s"
        if reason:
            files = torch_ranks.shared_memory_files(process.pid)
            end_all({process.pid})
            torch_ranks.remove_files(files)
        self._supervisor.stop(process)
        lines = torch_ranks.debug_lines(debug) if debug >= 0 else []
        text = "\n".join((*(output.decode("utf-8", "replace") for output in outputs), *lines))
        result = performance(text)
        message = result.error or reason
        rc = process.returncode
        if not message and not result.mismatch and (rc or not result.is_complete):
            last = torch_ranks.output_reason(text) or torch_ranks.last_line(text)
            message = f"{_PROGRAM} ended with status {rc}" + (f": {last}" if last else "")
        phase = "done" if not message else "all_reduce" if "#wrong" in text else "init"
        ms, gbps = (0.0, 0.0) if message else (round(result.ms, 4), round(result.gbps, 4))
        figures: dict[str, Any] = {"mismatch": result.mismatch, "ms": ms, "gbps": gbps}
        ranks = orders.failed_ranks(order, phase, message)
        networks = {rank.rank: _network(lines, rank.rank) for rank in ranks}
        return tuple(replace(r, **figures, network=networks[r.rank]) for r in ranks)

    @property
    def python_pid(self) -> int | None:
        """The process of the job's Python, or of its prefix; None: not started."""
        return self._python.process.pid if self._python is not None else None

    def close(self) -> None:
        if self._python is not None:
            self._python.stop()

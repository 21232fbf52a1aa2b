"""The ranks of a smoke test in the job's own Python, with the job's own PyTorch.

This module is self-contained, for Python 3.8 and torch 1.13 and newer: its text is sent over the
standard input of ``PYTHON -c``, so it also runs behind a container's prefix. It imports torch once
and forks a process for each rank of each order: an import takes seconds, a fork milliseconds. CUDA
is never initialised in the process that forks.

An order is a line of JSON on the standard input, an answer a line on the standard output that
begins with a mark. A rank reports each phase over a pipe, so the phase of a hanging rank is known.
All ranks of a test have ended when it is answered, except a rank that hangs in the kernel, which
the answer reports. Ranks end with this process (PR_SET_PDEATHSIG) and by their own alarm. This
process ends with its standard input.

The environment is the job's. A rank sets CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, so that GPU
numbers are the driver's; NCCL_DEBUG=INFO and NCCL_DEBUG_FILE, a file in memory that ends with the
rank, for its network and the reason of an error; TORCH_NCCL_DUMP_ON_TIMEOUT=0, because a dump is a
file in /tmp; MASTER_ADDR and MASTER_PORT of the test's store.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import fcntl
import gc
import importlib
import inspect
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

KILL_S = 0.3  # seconds before the end of a test at which its ranks are killed
AFTER_FAILURE_S = 2.0  # seconds for the remaining ranks of this node when one rank has failed
REAP_S = 0.6  # maximum seconds for a killed process to end, unless it hangs in the kernel
COUNT_S = 25.0  # seconds for the driver to count its GPUs
#: Seconds by which the store's time-out is shorter than the test, so that a rank can report
#: missing ranks.
STORE_S = 1.0
#: Seconds within which our listener sends its mark; seconds for one connection to the store;
#: seconds between two of them, so that thousands of ranks are no flood.
SILENT_S, CONNECT_S, AGAIN_S = 0.05, 3.0, 0.1
SHARE = 0.2  # fraction of the test's time for the repetitions of the large all_reduce
REPETITIONS, LATENCIES = 5, 5  # maximum of the large all_reduce; of the small one
LONGEST, KEPT = 300, 32768  # maximum characters of an error; kept bytes of an output
#: Bytes of NCCL's lines that are read, at their beginning and at their end; the maximum lines that
#: are sent, and characters of each.
DEBUG_HEAD, DEBUG_TAIL, DEBUG_LINES, DEBUG_WIDTH = 256 << 10, 64 << 10, 64, 300
#: Side of the matrices, on a GPU and on a CPU; bytes that are copied to a GPU's memory and back.
SIDE, SIDE_CPU, COPIED = 2048, 64, 64 << 20


# --- Errors, in one line.

# Lines and sentences that libraries add after the error itself.
_ADVICE = re.compile(
    r"(CUDA|HIP) kernel errors might|For debugging consider|Compile with|Search for|"
    r"Device-side assert|frame #|Last error:$|\(?Triggered internally|terminate called|"
    r"This may indicate a possible application crash"
)
_SUGGESTION = re.compile(r"\.? (This is typically caused by|Please check that|See the inner) .*")
_WHERE = re.compile(r"\[[^\]\s]*\.(cc|cpp|cu|h|hpp):\d+\] ")


def last_line(text: str) -> str:
    """The line of an error's text with the reason."""
    text = re.split(r"\n?Exception raised from ", text)[0]
    text = _SUGGESTION.sub("", text)
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not _ADVICE.match(line)]
    return _WHERE.sub("", lines[-1])[:LONGEST] if lines else ""


def error_line(problem: BaseException) -> str:
    message = last_line(str(problem))
    if isinstance(problem, (RuntimeError, ImportError, OSError)) and message:
        return message
    return (type(problem).__name__ + (": " + message if message else ""))[:LONGEST]


def last_match(output: str, *patterns: str) -> str:
    """What the last line with the first of these patterns that is there says; "": none is."""
    for pattern in patterns:
        for match in reversed(list(re.finditer(pattern, output))):
            if match.group(1).strip():
                return match.group(1).strip()[:LONGEST]
    return ""


def output_reason(output: str) -> str:
    """Why a library ended a rank, from its output: its last warning, else its error."""
    errors = (r"what\(\): *(.*)", r"(?:\w*Error|Exception): (.*)")
    return last_match(output, r"NCCL WARN (.*)", *errors)


def last_warning(output: str) -> str:
    """The last warning of NCCL or of torch's network code; "" without a warning."""
    return last_match(output, r"((?<=NCCL WARN ).*|Unable to (?:resolve hostname|find address).*)")


# --- NCCL's own lines (NCCL_DEBUG=INFO), in a file in memory.

# The lines about the network, the links and failures; of a link, what differs between links.
_TELLING = re.compile(
    r"NCCL (?:WARN|version)|RCCL version|Using network|Assigned NET|NET/(?:IB|Socket|OFI|Plugin)|"
    r"Bootstrap ?:|comm 0x|libibverbs|GPU Direct|coll channels|Channel .* via (.*)"
)


def open_debug_file() -> int:
    """The descriptor of a new file in memory; -1: the kernel or the container has none."""
    with contextlib.suppress(OSError, AttributeError):
        return os.memfd_create("nccl")
    return -1


def debug_lines(number: int) -> list[str]:
    """The lines about the network in NCCL's file, each kind of link once, the last lines last."""
    size = os.fstat(number).st_size
    data = os.pread(number, DEBUG_HEAD, 0)
    if size > DEBUG_HEAD:
        tail = os.pread(number, DEBUG_TAIL, max(DEBUG_HEAD, size - DEBUG_TAIL))
        # Lines that are cut are left out.
        data = data[: data.rfind(b"\n")] + tail[tail.find(b"\n") :]
    lines: dict[str, str] = {}
    for line in data.decode("utf-8", "replace").splitlines():
        if match := _TELLING.search(line):
            link = re.sub(r"\d+", "", match.group(1) or "")
            lines.setdefault(link or line, line[:DEBUG_WIDTH])
    rows = list(lines.values())
    return rows[: DEBUG_LINES // 2] + rows[DEBUG_LINES // 2 :][-DEBUG_LINES // 2 :]


# --- TCP connections of this process.


def own_address(without: int) -> str:
    """The own address of most of this process's connections; "": no connection. without: the port
    of connections that do not count
    """
    counts: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if not os.readlink("/proc/self/fd/" + name).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                local, peer = connection.getsockname(), connection.getpeername()
            if is_tcp and without not in (local[1], peer[1]):
                address = local[0].rpartition("::ffff:")[2]
                counts[address] = counts.get(address, 0) + 1
    return max(counts, key=lambda address: counts[address]) if counts else ""


def interface_of(address: str) -> str:
    """The interface with this IPv4 address (netdevice(7)); "": unknown."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket() as probe:
            request = struct.pack("256s", os.fsencode(name))
            if socket.inet_ntoa(fcntl.ioctl(probe, 0x8915, request)[20:24]) == address:
                return name  # SIOCGIFADDR
    return ""


def store_problem(host: str, port: int, mark: bytes, wait_s: float) -> str:
    """Why there is no store yet; "": the store is there. A store sends nothing first. Our
    listener, which has the port before the store, sends a mark.
    """
    try:
        with socket.create_connection((host, port), max(0.1, wait_s)) as connection:
            connection.settimeout(SILENT_S)
            try:
                data = connection.recv(len(mark))
            except socket.timeout:
                return ""
            return f"{host}:{port}: rank 0 has not come" if mark.startswith(data) else ""
    except socket.timeout:
        return f"{host}:{port} does not answer"
    except OSError as problem:
        return f"{host}:{port}: {problem.strerror or problem}"


# --- One rank, in its own process.


def mismatch(got: Any, expected: Any, title: str) -> str:
    """How a result differs from the expected one; "": it does not."""
    bad = got != expected
    count = int(bad.sum().item())
    if not count:
        return ""
    index = int(bad.reshape(-1).nonzero()[0].item())
    value, expected_value = (tensor.reshape(-1)[index].item() for tensor in (got, expected))
    share = f"{count} of {bad.numel()} numbers are wrong"
    return f"{title}: {share}, number {index} is {value}, not {expected_value}"


class RankWork:
    """The phases of one rank. say: sends keyword arguments to the process that forked this rank"""

    def __init__(self, order: dict[str, Any], index: int, torch: Any, say: Callable[..., None]):
        self.order, self.torch, self.say = order, torch, say
        self.dist = importlib.import_module("torch.distributed")
        self.rank, self.world = order["first"] + index, order["world"]
        on_gpu = order["backend"] == "nccl" and bool(order["gpus"])
        self.gpu = order["gpus"][index] if on_gpu else -1
        self.device = torch.device("cuda", index) if on_gpu else torch.device("cpu")
        self.deadline: float = order["deadline"]
        self.mismatch, self.ms, self.gbps, self.large_s = "", 0.0, 0.0, 1.0
        self.store: Any = None

    def left_s(self) -> float:
        return max(0.5, self.deadline - time.monotonic())

    def run(self) -> None:
        for phase in ("compute", "init", "barrier", "all_reduce", "all_gather", "send_recv",
                      "large"):  # fmt: skip
            self.say(phase=phase)
            getattr(self, phase)()
        self.say(phase="done", ms=self.ms, gbps=self.gbps)
        self.wait_for_all()

    def compare(self, got: Any, expected: Any, title: str) -> None:
        """Report a result that differs from the expected one."""
        self.report_mismatch(mismatch(got, expected, title))

    def report_mismatch(self, message: str) -> None:
        """Report the first wrong result. The work continues: other ranks need this rank."""
        if message and not self.mismatch:
            self.mismatch = message
            self.say(mismatch=message)

    def sync(self) -> None:
        if self.gpu >= 0:
            self.torch.cuda.synchronize(self.device)

    def compute(self) -> None:
        """Check a product of matrices, and memory that is copied to the GPU and back. Raises
        RuntimeError for a GPU that PyTorch does not see.
        """
        torch = self.torch
        if self.gpu >= 0:
            count = torch.cuda.device_count()
            if count < len(self.order["gpus"]):
                torch.cuda.init()
                requested = len(self.order["gpus"])
                raise RuntimeError(f"GPU {self.gpu}: PyTorch sees {count} of {requested} GPUs")
            torch.cuda.set_device(self.device)
        side = SIDE if self.gpu >= 0 else SIDE_CPU
        four = (torch.arange(side) % 4).to(torch.float32)
        # a[i, k] = i + k, b[k, j] = j - k, all modulo 4; the sums of 0, 1, 2, 3 and of their
        # squares are 6 and 14. Small integers: exact in float32, and in TF32.
        left_matrix = (four[:, None] + four[None, :]).to(self.device)
        right = (four[None, :] - four[:, None]).to(self.device)
        got = (left_matrix @ right).cpu()
        n, s, q = side, side / 4 * 6, side / 4 * 14
        i, j = four[:, None], four[None, :]
        self.compare(got, n * i * j - s * i + s * j - q, "the product of matrices")
        if self.gpu >= 0:
            sent = torch.arange(COPIED // 8, dtype=torch.int64) * 2654435761
            self.compare(sent.to(self.device).cpu(), sent, "memory there and back")
            self.sync()

    def init(self) -> None:
        dist, order = self.dist, self.order
        if order["first"]:
            self.reach()
        self.store = dist.TCPStore(
            order["host"], order["port"], self.world, self.rank == 0,
            timeout=self.store_limit(), wait_for_workers=False,
        )  # fmt: skip
        self.join()
        is_nccl = order["backend"] == "nccl"
        # Later than the test's end: the rank is killed before its own watchdog acts.
        late = datetime.timedelta(seconds=self.left_s() + 3600)
        options: dict[str, Any] = {"timeout": late if is_nccl else self.store_limit()}
        if is_nccl and "device_id" in inspect.signature(dist.init_process_group).parameters:
            options["device_id"] = self.device
        options.update(store=self.store, rank=self.rank, world_size=self.world)
        dist.init_process_group(order["backend"], **options)
        if not is_nccl:
            address = own_address(order["port"])
            self.say(address=[interface_of(address), address])

    def store_limit(self) -> datetime.timedelta:
        """The limit of the store, with time for this rank's report."""
        return datetime.timedelta(seconds=max(0.5, self.left_s() - STORE_S))

    def reach(self) -> None:
        """Wait for the store of another node, which may be a moment behind. Raises RuntimeError if
        the store does not come.
        """
        host, port, mark = (self.order[name] for name in ("host", "port", "mark"))
        while True:
            remaining_s = self.left_s() - STORE_S
            reason = store_problem(host, port, mark.encode(), min(CONNECT_S, remaining_s))
            if not reason:
                return
            if remaining_s <= 0:
                raise RuntimeError(reason)
            time.sleep(AGAIN_S)

    def join(self) -> None:
        """Rank 0 waits for all ranks, as its store would, and reports missing ones. Raises
        RuntimeError when they do not come.
        """
        self.store.add(f"nodeready/rank{self.rank}", 1)
        self.store.add("nodeready/ranks", 1)
        if self.rank:
            try:
                self.store.wait(["nodeready/all"], self.store_limit())
            except RuntimeError:
                if self.left_s() > STORE_S + 0.5:
                    raise
                raise RuntimeError("timed out: other ranks did not come") from None
            return
        while self.store.add("nodeready/ranks", 0) < self.world:
            if self.left_s() <= STORE_S:
                ranks = range(self.world)
                missing = [n for n in ranks if not self.store.add(f"nodeready/rank{n}", 0)]
                numbers = ", ".join(str(number) for number in missing[:8])
                suffix = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
                noun = "rank" if len(missing) == 1 else "ranks"
                self.say(error=f"timed out: {noun} {numbers}{suffix} did not come")
                # The remaining ranks need the store until each has reported its own reason.
                time.sleep(self.left_s() + 5)
            time.sleep(0.005)
        self.store.set("nodeready/all", "1")

    def barrier(self) -> None:
        if self.order["backend"] == "nccl":
            self.dist.barrier(device_ids=[self.device.index])
        else:
            self.dist.barrier()
        self.sync()

    def positions(self, item: int, size_bytes: int, dtype: Any) -> Any:
        """The numbers 0, 1, 2, ... that fit into these bytes."""
        count, torch = max(1, size_bytes // item), self.torch
        return torch.arange(count, dtype=torch.int64, device=self.device).to(dtype)

    def all_reduce(self) -> None:
        torch, n = self.torch, self.world
        values = self.positions(8, self.order["small"], torch.int64) + 1
        got = values * (self.rank + 1)
        self.dist.all_reduce(got)
        self.sync()
        expected = values * (n * (n + 1) // 2)
        message = mismatch(got, expected, "all_reduce of int64")
        difference = int((got - expected)[0].item())
        is_one_rank = bool((got - expected == values * difference).all())
        if message and 1 <= abs(difference) <= n and is_one_rank:
            how = "were missing" if difference < 0 else "counted twice"
            message = f"all_reduce of int64: as if rank {abs(difference) - 1} {how}"
        self.report_mismatch(message)
        # Exact in float32: nothing is larger than 2^24 for up to 160,000 ranks.
        values = self.positions(4, self.order["small"], torch.float32) % 13 + 1
        expected = values * sum(rank % 8 + 1 for rank in range(n))
        took = []
        for _ in range(LATENCIES):
            got = values * (self.rank % 8 + 1)
            self.sync()
            began = time.monotonic()
            self.dist.all_reduce(got)
            self.sync()
            took.append(time.monotonic() - began)
            self.compare(got, expected, "all_reduce of float32")
        self.ms = sorted(took)[len(took) // 2] * 1000

    def all_gather(self) -> None:
        torch = self.torch
        values = self.positions(8, self.order["small"], torch.int64)
        parts = [torch.full_like(values, -1) for _ in range(self.world)]
        self.dist.all_gather(parts, values + self.rank * 1000003)
        self.sync()
        for rank, part in enumerate(parts):
            self.compare(part, values + rank * 1000003, f"all_gather, the part of rank {rank}")

    def send_recv(self) -> None:
        """Send to the next rank of the ring, receive from the previous rank."""
        if self.world == 1:
            return
        torch, dist = self.torch, self.dist
        values = self.positions(8, self.order["small"], torch.int64)
        previous, following = (self.rank - 1) % self.world, (self.rank + 1) % self.world
        sent, got = values + self.rank * 7919, torch.full_like(values, -1)
        if self.order["backend"] == "nccl":
            send = dist.P2POp(dist.isend, sent, following)
            work = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, got, previous)])
        else:
            work = [dist.isend(sent, following), dist.irecv(got, previous)]
        for request in work:
            request.wait()
        self.sync()
        self.compare(got, values + previous * 7919, f"what rank {previous} sent")

    def large(self) -> None:
        """Measure the fastest of some repetitions. All ranks agree on their number."""
        torch, n = self.torch, self.world
        count = max(1, self.order["large"] // 4)
        few = torch.arange(1, 14, dtype=torch.float32, device=self.device)
        values = few.repeat(count // 13 + 1)[:count]
        got = torch.empty_like(values)

        def once() -> float:
            torch.mul(values, self.rank % 8 + 1, out=got)
            self.sync()
            began = time.monotonic()
            self.dist.all_reduce(got)
            self.sync()
            return time.monotonic() - began

        once()
        expected = values * sum(rank % 8 + 1 for rank in range(n))
        self.compare(got, expected, "the large all_reduce")
        times = [once()]
        self.large_s = times[0]
        # The store carries the number: a library that sums wrongly would not.
        if self.rank == 0:
            share = min(self.order["seconds"] * SHARE, self.left_s() / 2)
            self.store.set("nodeready/more", str(min(REPETITIONS, int(share / self.large_s))))
        times += [once() for _ in range(int(self.store.get("nodeready/more")))]
        self.compare(got, expected, "the large all_reduce")
        moved = values.numel() * 4 * 8 * 2 * (n - 1) / n
        self.gbps = moved / min(times) / 1e9

    def wait_for_all(self) -> None:
        """Wait until all ranks are done: they read this GPU's memory, and rank 0 has the store.
        The results are already there, so a problem here is no failure.
        """
        limit = datetime.timedelta(seconds=min(self.left_s(), max(1.0, 3 * self.large_s)))
        if self.world > 1:
            # Without polling, because there may be thousands of ranks.
            with contextlib.suppress(Exception):
                if self.store.add("nodeready/done", 1) == self.world:
                    self.store.set("nodeready/over", "1")
                self.store.wait(["nodeready/over"], limit)
                if self.store.add("nodeready/left", 1) == self.world:
                    self.store.set("nodeready/gone", "1")
                if self.rank == 0:
                    self.store.wait(["nodeready/gone"], limit)


def visible_devices(gpus: list[int], session_gpus: str) -> str:
    """CUDA_VISIBLE_DEVICES for these GPUs, by the driver's numbers.

    session_gpus: the session's CUDA_VISIBLE_DEVICES; of UUIDs, a number is the place in the list

    Raises RuntimeError for a GPU that the session does not have.
    """
    allowed = [name.strip() for name in session_gpus.split(",") if name.strip()]
    if not allowed:
        return ",".join(str(gpu) for gpu in gpus)
    named = not all(name.isdigit() for name in allowed)
    for gpu in gpus:
        if gpu >= len(allowed) if named else str(gpu) not in allowed:
            have = f"CUDA_VISIBLE_DEVICES={session_gpus[:80]}"
            raise RuntimeError(f"GPU {gpu} is not this session's: {have}")
    return ",".join(allowed[gpu] if named else str(gpu) for gpu in gpus)


def debug_variables(number: int) -> dict[str, str]:
    """The variables for NCCL's lines in this file; -1: only failures, in the output."""
    if number < 0:
        return {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": ""}
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"/proc/self/fd/{number}"}


def prepare(order: dict[str, Any], hip: bool) -> None:
    """The environment of a rank."""
    os.environ.update(debug_variables(order["debug"]))
    os.environ.pop("NCCL_DEBUG_SUBSYS", None)
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = order["host"], str(order["port"])
    if order["gpus"]:
        name = "HIP_VISIBLE_DEVICES" if hip else "CUDA_VISIBLE_DEVICES"
        session_gpus = os.environ.get(name) or os.environ.get("CUDA_VISIBLE_DEVICES", "")
        os.environ[name] = visible_devices(order["gpus"], session_gpus)
        if hip:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"


def isolate(limit_s: float, parent: int, output: int) -> None:
    """Let this process end with its parent or by its alarm, without a core."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    # With a limit of 1 byte no core is written, not even through a pipe (fs/coredump.c).
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (1 if hard else 0, hard))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    for stream in (1, 2):
        os.dup2(output, stream)


def rank_process(torch: Any, order: dict[str, Any], index: int, tell: int) -> None:
    """Run a rank, and end its process."""

    def say(**data: Any) -> None:
        os.write(tell, json.dumps(data).encode("ascii") + b"\n")

    failed = 0
    try:
        torch.set_num_threads(1)
        prepare(order, bool(getattr(torch.version, "hip", None)))
        RankWork(order, index, torch, say).run()
    except BaseException as problem:  # noqa: BLE001
        failed = 1
        say(error=error_line(problem))
    finally:
        # Without destructors: a library's destructor may wait for a rank that has ended.
        os._exit(failed)


# --- The process that forks the ranks.


def shared_memory_files(pid: int) -> list[str]:
    """The files of NCCL's shared memory that a process has open. NCCL removes their names when all
    ranks have opened them, but not if a rank is killed before.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        paths = re.findall(rb" (/dev/shm/nccl-\S+)$", file.read(), re.M)
        return [os.fsdecode(path) for path in paths]
    return []


def remove_files(files: list[str]) -> None:
    for path in set(files):
        with contextlib.suppress(OSError):
            os.unlink(path)


class RankProcess:
    """A rank's process, as its parent sees it."""

    def __init__(self, torch: Any, order: dict[str, Any], index: int, out: int) -> None:
        self.began, self.number = time.monotonic(), order["first"] + index
        self.ended: int | None = None  # its exit status, or minus its signal; None: it runs
        self.report: dict[str, Any] = {"phase": "start"}  # the rank's messages, merged
        self.buffer, self.output = b"", b""
        self.killed = ""  # why it was killed; "": it was not
        self.files: list[str] = []
        self.nccl: list[str] = []  # NCCL's lines about its network, after its end
        self.debug = open_debug_file()
        self.messages_end, tell = os.pipe()
        self.log, output = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(out)
                isolate(order["seconds"] + 1, parent, output)
                order["debug"] = self.debug
                rank_process(torch, order, index, tell)
            finally:
                os._exit(1)
        for number in (tell, output):
            os.close(number)
        for number in (self.messages_end, self.log):
            os.set_blocking(number, False)

    @property
    def failed(self) -> bool:
        """Whether the rank itself failed. A time-out does not count: all ranks have it."""
        message = self.report.get("error", "")
        if self.report["phase"] == "done" or re.search("timed? ?out", message, re.I):
            return False
        return self.ended is not None or bool(message)

    def state(self) -> str:
        """The kernel's state of the process if it explains the hang; else ""."""
        with contextlib.suppress(OSError, IndexError):
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                letter = file.read().rpartition(b") ")[2][:1].decode()
            states = {"T": "it is stopped", "t": "it is being traced", "D": "it is in state D"}
            return states.get(letter, "")
        return ""

    def read_messages(self) -> None:
        for number, name in ((self.log, "output"), (self.messages_end, "buffer")):
            with contextlib.suppress(BlockingIOError):
                while True:
                    chunk = os.read(number, 65536)
                    if not chunk:
                        break
                    text = getattr(self, name) + chunk
                    setattr(self, name, text[-KEPT:] if name == "output" else text)
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            self.report.update(json.loads(line))

    def reap(self) -> bool:
        """Whether the process has ended; takes its status."""
        if self.ended is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.ended = -(status & 127) if status & 127 else status >> 8
        return self.ended is not None

    def kill(self) -> None:
        """Kill the process with its children."""
        if self.ended is not None:
            return
        if not self.state():
            self.files += shared_memory_files(self.pid)
        for number in (signal.SIGKILL, signal.SIGCONT):
            with contextlib.suppress(OSError):
                os.killpg(self.pid, number)
        # The process may not have its own session yet.
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self.debug >= 0:
            self.nccl = debug_lines(self.debug)
            os.close(self.debug)
        for number in (self.messages_end, self.log):
            os.close(number)
        remove_files(self.files)

    def answer(self) -> dict[str, Any]:
        report = self.report
        error = "" if report["phase"] == "done" else self.failure()
        return {
            "rank": self.number, "phase": report["phase"],
            "mismatch": report.get("mismatch", ""), "error": error[:LONGEST],
            "ms": round(report.get("ms", 0.0), 4), "gbps": round(report.get("gbps", 0.0), 4),
            "nccl": self.nccl, "address": report.get("address", ["", ""]),
        }  # fmt: skip

    def failure(self) -> str:
        """Why the rank did not come to its end."""
        error = self.report.get("error", "")
        output = "\n".join((self.output.decode("utf-8", "replace"), *self.nccl))
        warning = last_warning(output)
        if self.ended is None:
            return f"{self.killed}; process {self.pid} does not end after SIGKILL"
        if self.killed:
            return error or (f"{self.killed}; {warning}" if warning else self.killed)
        if error:
            return f"{error} ({warning})" if warning and warning not in error else error
        end = f"with status {self.ended}"
        if self.ended < 0:
            end = f"by signal {-self.ended}"
            with contextlib.suppress(ValueError):
                end = f"by {signal.Signals(-self.ended).name}"
        reason = output_reason(output)
        return f"ended {end}: {reason}" if reason else f"ended {end}"


class Forker:
    """Reads orders, forks ranks and prints answers."""

    def __init__(self, torch: Any, out: int, mark: str) -> None:
        self.torch, self.out, self.mark, self.input = torch, out, mark, b""
        self.zombies: list[int] = []  # killed processes that have not ended

    def say(self, data: dict[str, Any]) -> None:
        text = (self.mark + " " + json.dumps(data) + "\n").encode("ascii")
        while text:
            text = text[os.write(self.out, text) :]

    def lines(self, wait_s: float | None) -> Iterator[dict[str, Any]]:
        """The orders received. Raises EOFError at the input's end, which ends the program."""
        if wait_s is not None and not select.select([0], [], [], wait_s)[0]:
            return
        data = os.read(0, 65536)
        if not data:
            raise EOFError
        *rows, self.input = (self.input + data).split(b"\n")
        for row in rows:
            yield json.loads(row)

    def serve(self) -> None:
        while True:
            for order in self.lines(None):
                if "end" not in order:
                    self.test(order)

    def test(self, order: dict[str, Any]) -> None:
        began = time.monotonic()
        order["deadline"] = began + order["seconds"]
        ranks: list[RankProcess] = []
        error = ""
        try:
            try:
                for index in range(order["ranks"]):
                    ranks.append(RankProcess(self.torch, order, index, self.out))
            except OSError as problem:
                error = f"fork: {problem.strerror}"
            else:
                self.watch(order, ranks)
        finally:
            self.end(ranks)
        answers = [] if error else [rank.answer() for rank in ranks]
        self.say({"number": order["number"], "error": error, "ranks": answers})

    def watch(self, order: dict[str, Any], ranks: list[RankProcess]) -> None:
        """Wait until all ranks have ended, the time is over, or an order ends the test."""
        until, reason = order["deadline"] - KILL_S, ""
        while True:
            running = [rank for rank in ranks if not rank.reap()]
            for rank in ranks:
                rank.read_messages()
            if not running:
                return
            failed = next((rank for rank in ranks if rank.failed), None)
            if failed is not None and not reason:
                until = min(until, time.monotonic() + AFTER_FAILURE_S)
                reason = f"ended: rank {failed.number} had failed"
            remaining_s = until - time.monotonic()
            if remaining_s <= 0:
                break
            ends = [end for rank in running for end in (rank.messages_end, rank.log)]
            ready = select.select([0, *ends], [], [], min(remaining_s, 0.1))[0]
            if 0 in ready:
                for message in self.lines(0):
                    if message.get("end") == order["number"]:
                        reason, until = reason or "ended: others had passed in less time", 0.0
            elif ready:
                # A pipe ends a moment before its process does.
                time.sleep(0.001)
        for rank in running:
            late = f"no end after {time.monotonic() - rank.began:.1f} s"
            rank.killed = "; ".join(part for part in (reason or late, rank.state()) if part)

    def end(self, ranks: list[RankProcess]) -> None:
        """Kill the ranks that run, and wait briefly for their end."""
        for rank in ranks:
            rank.kill()
        until = time.monotonic() + REAP_S
        while sum(not rank.reap() for rank in ranks) and time.monotonic() < until:
            time.sleep(0.005)
        for rank in ranks:
            rank.read_messages()
            rank.close()
        self.zombies = [pid for pid in self.zombies if not os.waitpid(pid, os.WNOHANG)[0]]
        self.zombies += [rank.pid for rank in ranks if rank.ended is None]


# --- The Python, its torch and its GPUs; the start.


def library(torch: Any) -> str:
    """The collective library of this torch, such as ``NCCL 2.28.3``."""
    version = importlib.import_module("torch.cuda.nccl").version()
    if isinstance(version, int):
        version = (version // 1000, version % 1000 // 100, version % 100)
    name = "RCCL" if getattr(torch.version, "hip", None) else "NCCL"
    return name + " " + ".".join(str(part) for part in version[:3])


def print_gpu_count(torch: Any, tell: int) -> None:
    """Count the GPUs, in a fork: counting may initialise CUDA."""
    result: dict[str, Any] = {"gpus": 0, "reason": "", "library": ""}
    try:
        with contextlib.suppress(Exception):
            result["library"] = library(torch)
        result["gpus"] = torch.cuda.device_count()
        if not result["gpus"]:
            torch.cuda.init()
    except BaseException as problem:  # noqa: BLE001
        result["reason"] = error_line(problem)
    os.write(tell, json.dumps(result).encode("ascii"))


def gpu_report(torch: Any) -> dict[str, Any]:
    """The number of GPUs that PyTorch sees, why it sees none, and its library for them."""
    read, write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            isolate(COUNT_S, parent, 2)
            print_gpu_count(torch, write)
        finally:
            os._exit(0)
    os.close(write)
    text = b""
    until = time.monotonic() + COUNT_S
    while select.select([read], [], [], max(0.0, until - time.monotonic()))[0]:
        data = os.read(read, 65536)
        if not data:
            break
        text += data
    os.close(read)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 1
    while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < until:
        time.sleep(0.005)
    result = {"gpus": 0, "library": "", "reason": f"the driver did not answer in {COUNT_S:.0f} s"}
    with contextlib.suppress(ValueError):
        result = json.loads(text)
    return result


def unusable_backends(torch: Any, dist: Any) -> dict[str, str]:
    """Backend -> why this PyTorch does not have it; "": it does."""
    built = "PyTorch " + str(torch.__version__) + " is built without "
    if not dist.is_available():
        return dict.fromkeys(("nccl", "gloo"), built + "torch.distributed")
    # Newer versions only.
    has_gloo = getattr(dist, "is_gloo_available", lambda: hasattr(dist, "ProcessGroupGloo"))()
    nccl = "" if dist.is_nccl_available() else built + "NCCL"
    if not (getattr(torch.version, "hip", None) or getattr(torch.version, "cuda", None)):
        nccl = built + "CUDA and ROCm"
    return {"nccl": nccl, "gloo": "" if has_gloo else built + "gloo"}


def main(mark: str, limit_s: float, environment: dict[str, str]) -> None:
    """Serve orders until the end of the input.

    mark:    the beginning of each line of output
    limit_s: seconds after which this process ends
    """
    # Ignored and blocked signals are inherited.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    os.environ.update(environment)
    # Any other output, such as a library's, goes to standard error.
    out = os.dup(1)
    os.set_inheritable(out, False)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    # -c puts the current directory first; a job has its script's directory there.
    sys.path[:] = [path for path in sys.path if path]
    forker = Forker(None, out, mark)
    try:
        torch = importlib.import_module("torch")
        dist = importlib.import_module("torch.distributed")
        forker.torch = torch
    except BaseException as problem:  # noqa: BLE001
        forker.say({"reason": error_line(problem)})
        os._exit(1)
    forker.say({"imported": True})
    report = gpu_report(torch)
    reason, gpus = report.pop("reason"), report.pop("gpus")
    hello = {"torch": str(torch.__version__), **unusable_backends(torch, dist), **report}
    if torch.cuda.is_initialized():
        reason, gpus = "the import of torch initialises CUDA: no rank can be forked", 0
    if not hello["nccl"] and not gpus:
        hello["nccl"] = "PyTorch sees no GPU" + (": " + reason if reason else "")
    gc.collect()
    gc.freeze()
    forker.say(hello)
    with contextlib.suppress(EOFError):
        forker.serve()
    os._exit(0)

"""`nodeready run COMMAND ...`: start one rank of a job so that its hang can be examined.

It takes the place of the program, under every launcher::

    srun nodeready run python train.py
    torchrun --no-python --nproc-per-node 8 nodeready run python train.py
    python3 run.py --log-dir logs python train.py       # this file alone, in a container

It is one file and needs only the standard library of Python 3.9. It starts COMMAND as its only
child, and

- writes each line of the child's output whole, after ``[node:rank]``, and unchanged into its log;
- makes the child write all stacks on SIGURG, even while it hangs in C (Python's faulthandler);
- raises the limit of core files, and sets unset variables of the flight recorder;
- with --debug-rank, lets `nodeready stacks --attach` debug one rank;
- with --sync-cuda, --on-cpu or --sanitizer, shows an error of a GPU where it arises;
- with --watch, has `nodeready watch` keep the evidence of a hang.

SIGURG is harmless: its default action is to be ignored (signal(7)), so it can be sent to a whole
step (``scancel --signal=23 JOB``) without ending other programs. SIGUSR1 and SIGUSR2 announce
preemption (Slurm's --signal, submitit, Lightning). SIGTERM, SIGINT, SIGHUP and SIGQUIT end a
worker of torchrun, and a real-time signal ends a program that does not catch it.

In the job, this file is the module `nodeready_run` with `install_hooks` and `printflock`.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import select
import signal
import stat
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import FrameType
from typing import Any

#: The launchers' variables for the rank, the most reliable first. A Slurm batch script has
#: SLURM_PROCID 0 and no step.
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
#: The launchers' variables for the number of restarts.
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
MAX_LINE_BYTES = 1 << 20  # maximum bytes of a line; a longer line becomes several lines
#: Seconds until an unfinished line is written; until the next state of a progress bar is written
#: to a file; of silence, and in total, until the pipe of an ended child is given up, if one of the
#: child's own children keeps the pipe open.
UNFINISHED_S, BAR_S, SILENCE_S, DRAIN_S = 2.0, 10.0, 0.2, 2.0
#: Bytes that a single write puts into a pipe without interleaving (PIPE_BUF of pipe(7)).
_ATOMIC_BYTES = 4096
_READ_BYTES = 1 << 16
#: The header of a block of `printflock`, followed by the block's size and a line break; the
#: maximum bytes of a block; the variable with the streams (device:inode) that a supervisor reads.
_BLOCK_MARK, _MAX_BLOCK_BYTES, _STREAMS = b"\x1enodeready-block ", 1 << 20, "NODEREADY_RUN_STREAMS"
#: The exit status if the program is missing, or cannot be executed, as in a shell; of a usage
#: error.
NOT_FOUND, NOT_RUN, USAGE = 127, 126, 2


# --- The directory of one run, and the directories of killed runs.


def private_directory(prefix: str) -> tuple[str, int]:
    """A new temporary directory, and a descriptor whose lock (flock(2)) marks it as used.

    This user's unused directories with the same prefix are removed. Raises OSError.
    """
    import tempfile

    _remove_leftovers(tempfile.gettempdir(), prefix)
    directory = tempfile.mkdtemp(prefix=prefix)
    number = os.open(directory, _DIRECTORY)
    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return directory, number


#: Flags to open a directory; maximum entries of the temporary directory that are checked; seconds
#: in which a new directory may have no lock yet.
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ENTRIES, _NEW_S = 10_000, 60.0


def _remove_leftovers(parent: str, prefix: str) -> None:
    import shutil

    with suppress(OSError), os.scandir(parent) as entries:
        names = [entry.name for entry in islice(entries, _ENTRIES)]
        for path in (f"{parent}/{name}" for name in names if name.startswith(prefix)):
            with suppress(OSError):
                number = os.open(path, _DIRECTORY)
                try:
                    status = os.fstat(number)
                    if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _NEW_S:
                        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(number)


# --- The node, the rank and the restart.


def node_name(environment: Mapping[str, str]) -> str:
    """The node's name without its domain."""
    name = environment.get("SLURMD_NODENAME") or os.uname().nodename
    return name.partition(".")[0] or "node"


def rank_of(environment: Mapping[str, str]) -> str:
    """The rank by its launcher; ``local3`` if only the local rank is known; "": no rank."""
    for name in RANKS:
        text = environment.get(name, "")
        if name == "SLURM_PROCID" and not environment.get("SLURM_STEP_ID"):
            continue
        if text.isascii() and text.isdigit():
            return text
    local = environment.get("LOCAL_RANK", "")
    return "local" + local if local.isascii() and local.isdigit() else ""


def restart_of(environment: Mapping[str, str]) -> int:
    """The number of restarts of the job by its launcher."""
    for name in RESTARTS:
        text = environment.get(name, "")
        if text.isascii() and text.isdigit() and len(text) < 7:
            return int(text)
    return 0


# --- Output in whole lines, even of many ranks into one pipe.


class PipeLock:
    """A lock for several writes into a pipe that other processes also write into.

    A pipe keeps one write of up to 4096 bytes together. A longer line, or several lines that
    belong together, need this lock. A POSIX lock belongs to a process, even if all ranks have
    inherited the same pipe.
    """

    def __init__(self, fd: int) -> None:
        mode = os.fstat(fd).st_mode
        self._fd = fd
        # A file (which may be on a network) and a terminal order their writes themselves.
        self._locks = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)

    def __enter__(self) -> None:
        if not self._locks:
            return
        waited, pause = 0.0, 0.001
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError):
                pass
            except OSError:
                self._locks = False
                return
            # The owner of the lock may be stopped forever. A slow reader is only slow.
            _, free, _ = select.select([], [self._fd], [], 0)
            waited += pause if free else 0.0
            if waited > 1.0:
                return
            time.sleep(pause)
            pause = min(pause * 2, 0.02)

    def __exit__(self, *_: object) -> None:
        if self._locks:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)
            except OSError:
                self._locks = False


def write_all(fd: int, data: bytes) -> None:
    """Write all data, also to a non-blocking descriptor. Raises OSError."""
    remaining = memoryview(data)
    while remaining:
        try:
            remaining = remaining[os.write(fd, remaining) :]
        except BlockingIOError:
            select.select([], [fd], [], 1.0)


def _batches(lines: Sequence[bytes]) -> Iterator[bytes]:
    """The lines, joined into batches that a pipe takes in one write."""
    held: list[bytes] = []
    size = 0
    for line in lines:
        if held and size + len(line) > _ATOMIC_BYTES:
            yield b"".join(held)
            held, size = [], 0
        held.append(line)
        size += len(line)
    if held:
        yield b"".join(held)


class LineCutter:
    """Cuts output into lines, each after the prefix.
    terminal: an unfinished line is shown at once, and a carriage return begins a line, for prompts
              and progress bars; otherwise only the last state of a progress bar is a line
    """

    def __init__(self, prefix: bytes, terminal: bool) -> None:
        self._prefix, self._terminal = prefix, terminal
        self.held = b""
        self._held_since = self._written_at = 0.0
        self._is_line_start = True

    def add(self, data: bytes, now_s: float) -> list[bytes]:
        """The lines that this data completes."""
        if self._terminal:
            return self._add_prefixes(data)
        *lines, remaining = (self.held + data).split(b"\n")
        if lines:
            self._written_at = now_s
        if not self.held or lines:
            self._held_since = now_s
        self.held = remaining
        complete = [part for line in lines for part in self._cut(line)]
        while len(self.held) > MAX_LINE_BYTES:
            complete.append(self._prefix + self.held[:MAX_LINE_BYTES] + b"\n")
            self.held = self.held[MAX_LINE_BYTES:]
        return complete + self.overdue(now_s, min_age_s=BAR_S if b"\r" in self.held else 1e9)

    def overdue(self, now_s: float, min_age_s: float = UNFINISHED_S) -> list[bytes]:
        """The unfinished line as a separate line, if it is old enough.

        A progress bar is written at most every `BAR_S` seconds.
        """
        if not self.held or now_s - self._held_since < min_age_s:
            return []
        if b"\r" in self.held and now_s - self._written_at < BAR_S:
            return []
        return self.flush(now_s)

    def flush(self, now_s: float) -> list[bytes]:
        """The unfinished line as a separate line."""
        held, self.held = self.held, b""
        self._held_since = self._written_at = now_s
        return [] if self._terminal or not held.strip(b"\r") else self._cut(held)

    def _cut(self, line: bytes) -> list[bytes]:
        body = line.rstrip(b"\r")
        if b"\r" in body:
            line = body.rpartition(b"\r")[2]
        starts = range(0, max(1, len(line)), MAX_LINE_BYTES)
        return [self._prefix + line[start : start + MAX_LINE_BYTES] + b"\n" for start in starts]

    def _add_prefixes(self, data: bytes) -> list[bytes]:
        parts = []
        # bytes.splitlines only splits at \n and \r.
        for part in data.replace(b"\r\n", b"\n").splitlines(keepends=True):
            if self._is_line_start and part != b"\r":
                parts.append(self._prefix)
            self._is_line_start = part.endswith((b"\n", b"\r"))
            parts.append(part)
        return parts


class BlockCutter:
    """Cuts output at the beginning and the end of each block of `printflock`."""

    def __init__(self) -> None:
        self.held = b""
        self._held_since = 0.0

    def add(self, data: bytes, now_s: float) -> Iterator[bytes]:
        """The complete blocks, and the output between them."""
        held, self.held = self.held + data, b""
        while held:
            before, mark, remaining = held.partition(_BLOCK_MARK)
            if not mark:
                # The end of the data may be the beginning of a mark.
                lengths = range(len(_BLOCK_MARK), -1, -1)
                length = next(n for n in lengths if held.endswith(_BLOCK_MARK[:n]))
                before, self.held = held[: len(held) - length], held[len(held) - length :]
            if before:
                yield before
            if not mark:
                break
            size, end, body = remaining.partition(b"\n")
            is_long = len(size) > len(str(_MAX_BLOCK_BYTES))
            if is_long or size.strip(b"0123456789") or (end and not size):
                # The mark is not printflock's.
                yield mark
                held = remaining
                continue
            if not end or len(body) < min(int(size), _MAX_BLOCK_BYTES):
                self.held = mark + remaining
                break
            yield body[: int(size)]
            held = body[int(size) :]
        self._held_since = now_s

    def overdue(self, now_s: float) -> bytes:
        """The incomplete block, if it is so old that its end may never come; b"": none."""
        return self.flush() if self.held and now_s - self._held_since >= UNFINISHED_S else b""

    def flush(self) -> bytes:
        """The incomplete block."""
        held, self.held = self.held, b""
        if held.startswith(_BLOCK_MARK):
            size, end, body = held[len(_BLOCK_MARK) :].partition(b"\n")
            return body if end and size.isdigit() else held
        return held


class RankLogFile:
    """A rank's log, with its unchanged output. If the log cannot be written, the job continues."""

    def __init__(self, complain: Callable[[str], None]) -> None:
        self._fd, self._complain = -1, complain
        self.path = ""  # "": there is no log
        self.number = 0  # of the start of the job

    def open(self, directory: str, stem: str, restart: int) -> None:
        """Open ``DIRECTORY/STEM.RESTART.log``; if it exists, the next free number is taken."""
        path = directory
        try:
            os.makedirs(directory, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            for number in range(restart, restart + 10000):
                path = os.path.join(directory, f"{stem}.{number}.log")
                with suppress(FileExistsError):
                    self._fd = os.open(path, flags, 0o666)
                    self.path, self.number = path, number
                    return
            self._complain(f"no log: {directory} has too many of {stem}")
        except OSError as error:
            self._complain(f"no log: {path}: {error.strerror}")

    def write(self, data: bytes) -> None:
        if self._fd < 0:
            return
        try:
            write_all(self._fd, data)
        except OSError as error:
            os.close(self._fd)
            self._fd = -1
            self._complain(f"the log stops here: {self.path}: {error.strerror}")


class OutputChannel:
    """One stream of the child's output, which is copied to our own stream.
    source: to read it; closed if our stream has no reader, so that the child's writes fail
    """

    def __init__(self, source: int, target: int, prefix: bytes, log: RankLogFile) -> None:
        self.source, self._target, self._log = source, target, log
        self._lines, self._blocks = LineCutter(prefix, os.isatty(target)), BlockCutter()
        self._pipe_lock, self._has_reader = PipeLock(target), True
        self.read_bytes = 0  # in total

    def expected_bytes(self) -> int:
        """The total bytes after all data that is in the pipe now has been read."""
        try:
            waiting = fcntl.ioctl(self.source, termios.FIONREAD, b"\0" * 4)
        except OSError:
            return self.read_bytes
        return self.read_bytes + int(struct.unpack("i", waiting)[0])

    def read(self) -> bool:
        """Copy the available data. Whether more may come."""
        try:
            data = os.read(self.source, _READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:  # A terminal whose other side is closed: EIO.
            data = b""
        if not data:
            self.end()
            return False
        self.read_bytes += len(data)
        now_s = time.monotonic()
        for block in self._blocks.add(data, now_s):
            self._add(block, now_s)
        return self.source >= 0

    def _add(self, data: bytes, now_s: float) -> None:
        self._log.write(data)
        self._write(self._lines.add(data, now_s))

    @property
    def unfinished(self) -> bool:
        return bool(self.source >= 0 and (self._lines.held or self._blocks.held))

    def overdue(self) -> None:
        """Write an unfinished line or block that is old enough."""
        now_s = time.monotonic()
        if data := self._blocks.overdue(now_s):
            self._add(data, now_s)
        self._write(self._lines.overdue(now_s))

    def resize(self) -> None:
        """Give the child's terminal the size of our terminal."""
        if self.source >= 0 and os.isatty(self._target):
            _copy_terminal_size(self.source, self._target)

    def end(self) -> None:
        """Write the remaining data, and stop reading."""
        if self.source >= 0:
            now_s = time.monotonic()
            if data := self._blocks.flush():
                self._add(data, now_s)
            self._write(self._lines.flush(now_s))
            os.close(self.source)
            self.source = -1

    def _write(self, lines: list[bytes]) -> None:
        if not lines or not self._has_reader:
            return
        try:
            with self._pipe_lock:
                for data in _batches(lines):
                    write_all(self._target, data)
        except OSError as error:
            # A full disk may get room again. A reader that has ended does not return.
            if error.errno != errno.ENOSPC:
                self._has_reader = False
                if self.source >= 0 and not self._log.path:
                    os.close(self.source)
                    self.source = -1


# --- Signals, which the child gets once.


class SignalProbe:
    """A process that shows whether a signal was sent to us alone.

    torchrun, a shell and a terminal signal the whole process group, and Slurm signals every
    process of a step. The child then already has the signal, and must not get it twice: a second
    SIGTERM often means "at once". The probe blocks all signals, so a signal to all is pending
    there (/proc/PID/status, ShdPnd: proc(5)). Without a probe, every signal is forwarded.
    """

    _DELIVERY_S = 0.05  # seconds for a sender that signals one process after another

    def __init__(self) -> None:
        self._child: Any = None
        self._start()

    def _start(self) -> None:
        import subprocess

        how: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        how |= {"env": {"PATH": "/usr/bin:/bin"}, "cwd": "/", "preexec_fn": _block_signals}
        with suppress(OSError):
            self._child = subprocess.Popen(["sleep", "2147483647"], **how)

    def end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def has(self, number: int) -> bool:
        """Whether the signal was also sent to the probe."""
        # A further signal waits until the next probe is there.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            if self._child is None:
                return False
            end = time.monotonic() + self._DELIVERY_S
            while not self._pending(number):
                if time.monotonic() > end:
                    return False
                time.sleep(0.002)
            self.end()
            self._start()
            return True
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _pending(self, number: int) -> bool:
        path = f"/proc/{self._child.pid}/status"
        with suppress(OSError, ValueError, IndexError), open(path, "rb") as status:
            for line in status:
                if line.startswith(b"ShdPnd:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
        return False


def _end_with_parent() -> None:
    """End this process when its parent ends in any way (prctl(2))."""
    # Without ctypes or prctl, the only harm is a possible orphan.
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _block_signals() -> None:
    _end_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def forwarded_signals() -> list[int]:
    """The signals that the child gets from us.

    Excluded are signals of job control and of ended children, signals that our own instructions
    raise, and signals that our starter made us ignore (nohup).
    """
    excluded = {
        signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGTSTP, signal.SIGTTIN,
        signal.SIGTTOU, signal.SIGCONT, signal.SIGPIPE, signal.SIGSEGV, signal.SIGBUS,
        signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS, signal.SIGWINCH,
        32, 33,  # the C library's own
    }  # fmt: skip
    numbers = sorted({int(number) for number in signal.valid_signals()} - excluded)
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


# --- The child's environment.


def recorder_variables(
    torch: str, environment: Mapping[str, str], directory: str
) -> dict[str, str]:
    """The flight recorder's variables that are unset, by the names of the installed PyTorch.

    torch:     the directory of the package
    directory: for its dumps; "": PyTorch's default

    A header in the package has the names: TORCH_FR_* since 2.8 (FlightRecorder.hpp), with
    TORCH_NCCL_* as deprecated names. Before 2.7 dumps had to be requested by a variable.
    """
    names = ""
    for header in ("FlightRecorder.hpp", "NCCLUtils.hpp"):
        path = os.path.join(torch, "include/torch/csrc/distributed/c10d", header)
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            names += file.read(1 << 20)
    if not names:
        return {}
    values: dict[str, str] = {}

    def set_default(new: str, old: str, value: str) -> None:
        if not environment.get(new) and not environment.get(old):
            values[new if new in names else old] = value

    set_default("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
    if "TORCH_FR_BUFFER_SIZE" not in names:
        set_default("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if directory:
        prefix = os.path.join(os.path.abspath(directory), "comm_lib_trace_rank_")
        set_default("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", prefix)
    return values


def find_torch(command: str, environment: Mapping[str, str]) -> str:
    """The directory of the PyTorch that COMMAND's Python, not started, would import; "": none."""
    import glob
    import shutil

    interpreter = shutil.which(command, path=environment.get("PATH")) or ""
    try:
        with open(interpreter or "/dev/null", "rb") as file:
            first = file.readline(512)
    except OSError:
        first = b""
    if first.startswith(b"#!"):
        interpreter = os.fsdecode((first[2:].split() or [b""])[0])
    if not os.path.basename(interpreter).startswith(("python", "pypy")):
        interpreter = shutil.which("python", path=environment.get("PATH")) or ""
    places = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    prefix = os.path.dirname(os.path.dirname(interpreter))
    for pattern in ("local/lib/python3*", "lib/python3*", "lib64/python3*"):
        for packages in ("site-packages", "dist-packages"):
            places += sorted(glob.glob(os.path.join(glob.escape(prefix), pattern, packages)))
    for place in places:
        if os.path.isfile(os.path.join(place, "torch", "version.py")):
            return os.path.join(place, "torch")
    return ""


# --- Errors of a GPU, which a program sees later than they arise.

#: NCCL from the first version to before the second hangs with CUDA_LAUNCH_BLOCKING=1
#: (NVIDIA/nccl#750, #774); PyTorch from and to before these comes with `_OLD_NCCL`
#: (pytorch/pytorch#97843).
BLOCKING_HANGS, _HAS_OLD_NCCL, _OLD_NCCL = ((2, 13), (2, 17)), ((1, 13), (2, 1)), "2.14.3"
#: Hides every GPU. An empty HIP_VISIBLE_DEVICES would show all of them (ROCm/clr, rocdevice.cpp).
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": ""}
_SYNC_CUDA = {"CUDA_LAUNCH_BLOCKING": "1"}
_SYNC_AMD = {"HIP_LAUNCH_BLOCKING": "1", "AMD_SERIALIZE_KERNEL": "3"}


def torch_versions(torch: str) -> dict[str, str]:
    """The versions of a PyTorch (``__version__``), of the CUDA or ROCm of its build (``cuda``,
    ``hip``), and of the package of NCCL in the same directory (``nccl``), as far as known.

    torch: the directory of the package; "": not found

    Its source also runs on a node, in Python 3.7 (`nodeready env`).
    """
    import re

    versions: dict[str, str] = {}
    with suppress(OSError), open(f"{torch}/version.py", "rb") as file:
        pattern = r"^(__version__|cuda|hip) *(?::[^=]*)?= *['\"]([\w.+-]+)['\"]"
        text = file.read(4096).decode("utf-8", "replace")
        versions = dict(re.findall(pattern, text, re.M))
        names = " ".join(os.listdir(os.path.dirname(torch)))
        for nccl in re.findall(r"\bnvidia_nccl_cu\d+-([\d.]+)\.dist-info", names):
            versions["nccl"] = nccl
    return versions


def sync_hazard(torch: str, nccl: str) -> str:
    """Why a launch must not wait for its kernel, with these versions; "": it may, or not known.

    nccl: "": PyTorch's own

    >>> sync_hazard("1.13.1+cu117", "")
    'NCCL 2.14.3 hangs with CUDA_LAUNCH_BLOCKING=1: use NCCL 2.17 or newer'
    """

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(int(word) for word in version.split(".")[:2] if word.isdigit())

    if not nccl and _HAS_OLD_NCCL[0] <= numbers(torch) < _HAS_OLD_NCCL[1]:
        nccl = _OLD_NCCL
    first, fixed = BLOCKING_HANGS
    if not first <= numbers(nccl) < fixed:
        return ""
    newer = ".".join(map(str, fixed))
    return f"NCCL {nccl} hangs with CUDA_LAUNCH_BLOCKING=1: use NCCL {newer} or newer"


def sync_variables(is_cuda: bool | None) -> dict[str, str]:
    """The variables that make each launch wait for its kernel.
    is_cuda: PyTorch was built for NVIDIA's GPUs; False: for AMD's; None: not known
    """
    if is_cuda is None:
        return {**_SYNC_CUDA, **_SYNC_AMD}
    return _SYNC_CUDA if is_cuda else _SYNC_AMD


def job_of(environment: Mapping[str, str]) -> str:
    """The job's name for `nodeready watch --job`; "": it has none."""
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    names = [environment.get("SLURM_JOB_ID", ""), environment.get("TORCHELASTIC_RUN_ID", "")]
    names.append(f"{address}:{port}" if address and port else "")
    return next((name for name in names if name not in ("", "none")), "")


_SITE = '''\
"""Before every Python of the job: `install_hooks`, the user's sitecustomize, the debugger."""
import os, sys

def _chain():
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [path for path in sys.path if os.path.abspath(path or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)

try:
    if sys.version_info >= (3, 9):
        import nodeready_run
        nodeready_run.install_hooks({number})
except Exception as error:
    sys.stderr.write("nodeready run: this Python has no signal for its stacks: %r\\n" % (error,))
_chain()
# Now, because the user's sitecustomize may set sys.excepthook.
if "NODEREADY_RUN_DEBUG" in os.environ and sys.version_info >= (3, 9):
    nodeready_run.install_debugger()
'''


def prepare(directory: str, number: int) -> None:
    """Fill the directory that comes first in the job's PYTHONPATH. Raises OSError.
    number: the signal for the stacks; 0: none
    """
    # By the loader, because this file may lie in a bundle, there beside its compiled copy.
    loader: Any = globals()["__loader__"]
    text: bytes = loader.get_data(__file__.removesuffix("c"))
    with open(os.path.join(directory, "nodeready_run.py"), "wb") as module:
        module.write(text)
    with open(os.path.join(directory, "sitecustomize.py"), "w", encoding="utf-8") as site:
        site.write(_SITE.replace("{number}", str(int(number))))


def remove_own_rank() -> None:
    """Remove our rank from our own /proc/PID/environ, so that only the program counts as the rank.

    The environment lies between two addresses in our own memory (proc(5), env_start and env_end).
    If the kernel does not show the addresses, nothing is removed.
    """
    names = tuple(name.encode() + b"=" for name in (*RANKS, "LOCAL_RANK"))
    try:
        import ctypes

        with open("/proc/self/stat", "rb") as stat_file:
            words = stat_file.read().rpartition(b")")[2].split()
        start, end = int(words[47]), int(words[48])
        with open("/proc/self/environ", "rb") as environ_file:
            block = environ_file.read()
        if not start or end - start != len(block):
            return
        address = start
        for entry in block.split(b"\0"):
            if entry.startswith(names):
                ctypes.memset(address, 0, len(entry))
            address += len(entry) + 1
    except (ImportError, OSError, ValueError, IndexError):
        return


# --- In the job: the module `nodeready_run`.


def install_hooks(number: int) -> None:
    """Make this Python of the job write the stacks of all threads on a signal; 0: no signal."""
    if number and sys.stderr is not None:
        import faulthandler

        faulthandler.register(number, file=sys.stderr, all_threads=True)


def printflock(*values: Any, **options: Any) -> None:
    """`print` whose output, even of several lines, no other rank's output interrupts.

    from nodeready_run import printflock as print
    """
    file = options.pop("file", None) or sys.stdout
    options.pop("flush", None)
    text = io.StringIO()
    print(*values, file=text, **options)
    try:
        fd = file.fileno()
    except (AttributeError, OSError, ValueError):
        print(text.getvalue(), file=file, end="", flush=True)
        return
    data = text.getvalue().encode(getattr(file, "encoding", None) or "utf-8", "replace")
    with PipeLock(fd):
        file.flush()
        # The header makes the supervisor that reads fd write the block without interruption.
        is_read = _stream_id(fd) in os.environ.get(_STREAMS, "").split(",")
        is_block = is_read and 0 < len(data) <= _MAX_BLOCK_BYTES
        write_all(fd, (_BLOCK_MARK + b"%d\n" % len(data) if is_block else b"") + data)


def _stream_id(fd: int) -> str:
    status = os.fstat(fd)
    return f"{status.st_dev}:{status.st_ino}"


# --- In the job: the debugger of one rank.

_NO_SIGNAL = 0x4000  # MSG_NOSIGNAL of send(2): SIGPIPE may have its default action
#: The variable with the rank to debug and the directory of its socket, ``RANK:DIRECTORY``.
DEBUG = "NODEREADY_RUN_DEBUG"
#: Interrupts the main thread (libraries do not use it); seconds until a main thread is in C.
_DEBUG_SIGNAL, _HANG_S = signal.SIGRTMIN + 9, 2.0


def install_debugger() -> None:
    """Let `nodeready stacks --attach` debug this Python, if it is the program of that rank."""
    rank, _, directory = os.environ[DEBUG].partition(":")
    own_rank = rank_of(os.environ)
    variable = next((name for name in RANKS if os.environ.get(name) == own_rank), "")
    if not variable:
        return
    # The file says that a Python has its rank by this variable. Its lock, which a fork does not
    # inherit (fcntl(2)), belongs to the rank's program, and not to what that program starts.
    lock = os.open(f"{directory}/{variable}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with suppress(BlockingIOError, PermissionError):
        if own_rank == rank:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            RankDebugger(rank, directory, variable)
            return
    os.close(lock)


class RankDebugger:
    """Lets one user at a time debug the main thread, by a UNIX socket in a private directory."""

    def __init__(self, rank: str, directory: str, variable: str) -> None:
        import _thread
        import queue
        import socket

        # The files of what a launcher has started: it has its rank by another variable.
        self._started = [f"{directory}/{name}" for name in RANKS[: RANKS.index(variable)]]
        # A signal's handler may use this queue at any moment.
        self._rank, self._offers, self._empty = rank, queue.SimpleQueue[Any](), queue.Empty
        self._terminal: DebuggerTerminal | None = None
        self._is_waiting = False
        self._main_thread = _thread.get_ident()
        with suppress(FileNotFoundError):
            os.unlink(f"{directory}/socket")  # of an ended process, or of the launcher
        self._socket = socket.socket(socket.AF_UNIX)
        parent = os.open(directory, _DIRECTORY)  # the path of a socket is short (unix(7))
        self._socket.bind(f"/proc/self/fd/{parent}/socket")
        os.close(parent)
        self._socket.listen()
        self._excepthook = sys.excepthook
        sys.breakpointhook, sys.excepthook = self._break, self._examine
        signal.signal(_DEBUG_SIGNAL, self._interrupt)
        os.register_at_fork(after_in_child=self._leave_fork)
        _thread.start_new_thread(self._serve, ())

    def _leave_fork(self) -> None:
        self._socket.close()
        sys.settrace(None)
        sys.breakpointhook, sys.excepthook = sys.__breakpointhook__, self._excepthook

    def _serve(self) -> None:
        import socket

        while True:
            client, _ = self._socket.accept()
            peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            is_busy = self._terminal is not None and not self._terminal.is_gone()
            if is_busy or struct.unpack("3i", peer)[1] != os.geteuid():
                with suppress(OSError):
                    client.sendall(b"busy: another debugger, or another user\n", _NO_SIGNAL)
                client.close()
                continue
            self._terminal = DebuggerTerminal(client)
            self._offers.put(self._terminal)
            if self._is_waiting:
                continue
            signal.pthread_kill(self._main_thread, _DEBUG_SIGNAL)
            time.sleep(_HANG_S)
            with suppress(self._empty):
                terminal = self._offers.get_nowait()
                frame = sys._current_frames()[self._main_thread]
                reason = "its main thread is in C: look at variables; nothing can be stepped"
                debug(terminal, frame, None, reason, can_step=False)

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        with suppress(self._empty):
            if not self._is_waiting:
                debug(self._offers.get_nowait(), frame, None, "interrupted")

    def _break(self, *_: object, **__: object) -> None:
        frame = sys._getframe(1)
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        self._wait(frame, None, f"breakpoint() at {place}")

    def _examine(self, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        self._excepthook(kind, error, traceback)
        is_launcher = any(map(os.path.exists, self._started))
        if traceback is not None and issubclass(kind, Exception) and not is_launcher:
            self._wait(None, traceback, f"{kind.__name__}, which ends the program")

    def _wait(self, frame: FrameType | None, traceback: Any, reason: str) -> None:
        """Wait for a debugger to connect, then debug this frame or the traceback."""
        terminal = self._terminal
        if terminal is None or terminal.is_gone():
            self._is_waiting = True
            text = f"nodeready run: rank {self._rank} waits for a debugger: {reason}"
            os.write(2, f"{text} (nodeready stacks --attach {self._rank})\n".encode())
            terminal = self._offers.get()
            self._is_waiting = False
        debug(terminal, frame, traceback, reason)


class DebuggerTerminal(io.TextIOBase):
    """The connection to the user of a debugger, as pdb's input and output."""

    def __init__(self, client: Any) -> None:
        self._client, self._lines = client, client.makefile("rb")

    def readline(self, _: int | None = -1) -> str:  # type: ignore[override]
        return str(self._lines.readline(), "utf-8", "replace")

    def write(self, text: str) -> int:
        self._client.sendall(text.encode("utf-8", "backslashreplace"), _NO_SIGNAL)
        return len(text)

    def is_gone(self) -> bool:
        """Whether the user is no longer connected."""
        poll = select.poll()
        poll.register(self._client, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        with suppress(OSError):
            self._client.shutdown(2)  # SHUT_RDWR: a fork may have the descriptor


def debug(
    terminal: Any, frame: FrameType | None, traceback: Any, reason: str, can_step: bool = True
) -> None:
    """Let the user debug a frame, or the traceback. Raises nothing into the job."""
    try:
        import pdb

        class RankPdb(pdb.Pdb):
            """A pdb that neither ends the job nor uses its streams."""

            def interaction(self, *arguments: Any) -> None:
                try:
                    super().interaction(*arguments)
                except Exception:  # noqa: BLE001 - the connection is lost
                    self.do_detach("")

            def trace_dispatch(self, frame: FrameType, event: str, argument: Any) -> Any:
                if terminal.is_gone():
                    self.do_detach("")
                    return None
                return super().trace_dispatch(frame, event, argument)

            def do_detach(self, arg: str) -> bool | None:
                """Detach: the program continues."""
                self.clear_all_breaks()
                self.set_continue()
                terminal.close()
                return True

            do_q = do_quit = do_exit = do_EOF = do_detach
            do_interact = do_detach  # it would read the standard input of the rank

        # This module is no part of the program: nothing stops in it.
        debugger = RankPdb("tab", terminal, terminal, [__name__], nosigint=True, readrc=False)
        debugger.message(f"process {os.getpid()}: {reason}. q or Ctrl-D detaches.")
        debugger.reset()
        caller = frame if can_step else None
        while caller is not None:
            caller.f_trace, debugger.botframe = debugger.trace_dispatch, caller
            caller = caller.f_back
        debugger.interaction(frame, traceback)
        if frame is None or not can_step:
            debugger.do_detach("")
        elif debugger.stoplineno >= 0 or debugger.breaks:
            sys.settrace(debugger.trace_dispatch)
    except Exception as error:  # noqa: BLE001
        with suppress(OSError):
            terminal.write(f"no debugger: {error!r}\n")
        terminal.close()


# --- The supervisor.

#: How `nodeready watch` is run: before the 10 minutes of NCCL's timeout are over, and before the 8
#: of its heartbeat monitor (pytorch's ProcessGroupNCCL.hpp).
_WATCH = ("--once", "--wait", "10m", "--interval", "30s", "--confirm", "7m")


class RankSupervisor:
    """One child, its output and its signals."""

    def __init__(self, options: Any) -> None:
        self._options, self._environment = options, dict(os.environ)
        self._node, self._rank = node_name(self._environment), rank_of(self._environment)
        name = f"{self._node}:{self._rank}" if self._rank else self._node
        self._prefix = f"[{name}] ".encode(errors="surrogateescape")
        self._log = RankLogFile(self._complain)
        self._channels: list[OutputChannel] = []
        self._child: Any = None
        self._watch: Any = None
        self._signal_probe: SignalProbe | None = None
        self._wake = os.pipe()
        self._command: list[str] = options.command

    def _complain(self, text: str) -> None:
        line = f"nodeready run: {text}\n".encode(errors="surrogateescape")
        with suppress(OSError):
            write_all(2, self._prefix + line)

    def run(self) -> int:
        """Run the child. Returns its status in the form of a shell."""
        import shutil

        if status := self._prepare_gpus():
            return status
        directory, lock = "", -1
        try:
            try:
                directory, lock = private_directory("nodeready-run-")
                prepare(directory, self._options.signal)
                path = self._environment.get("PYTHONPATH")
                self._environment["PYTHONPATH"] = directory + (os.pathsep + path if path else "")
            except OSError as error:
                self._complain(f"no signal for stacks: {error.strerror}: {error.filename}")
            if directory and self._options.debug_rank is not None:
                self._environment[DEBUG] = f"{self._options.debug_rank}:{directory}"
                self._environment["PYTHONBREAKPOINT"] = "0"  # of the other ranks
            self._prepare_environment()
            status = self._supervise()
        finally:
            if directory:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(lock)
        return status

    def _prepare_gpus(self) -> int:
        """Apply the options for GPUs. Returns 0, or the exit status if one is not possible."""
        import shutil

        options, environment = self._options, self._environment
        if options.on_cpu:
            environment.update(NO_GPU)
        if options.sync_cuda:
            versions = torch_versions(find_torch(options.command[0], environment))
            is_cuda = "hip" not in versions if versions.keys() & {"cuda", "hip"} else None
            hazard = sync_hazard(versions.get("__version__", ""), versions.get("nccl", ""))
            if hazard and is_cuda:
                self._complain(f"--sync-cuda: {hazard}")
                return NOT_RUN
            environment.update(sync_variables(is_cuda))
        if options.sanitizer:
            toolkit = environment.get("CUDA_HOME", "/usr/local/cuda")
            path = f"{environment.get('PATH', '')}:{toolkit}/bin"
            sanitizer = shutil.which("compute-sanitizer", path=path)
            if sanitizer is None:
                advice = "install CUDA's toolkit, and put its bin into PATH"
                self._complain(f"--sanitizer: compute-sanitizer is not found: {advice}")
                return NOT_FOUND
            # PyTorch's own allocator would hide an access beyond a tensor.
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
            self._command = [sanitizer, "--target-processes", "all", *options.command]
        return 0

    def _start_watch(self) -> None:
        """Start `nodeready watch` beside rank 0, whose end ends it."""
        import shutil
        import subprocess

        job, path = job_of(os.environ), os.environ.get("PATH", "")
        program = shutil.which("nodeready", path=f"{os.path.dirname(sys.executable)}:{path}")
        if not job or program is None:
            names = "SLURM_JOB_ID, TORCHELASTIC_RUN_ID, or MASTER_ADDR and MASTER_PORT"
            reason = "nodeready is not in PATH" if job else f"the job has no name: set {names}"
            self._complain(f"no watch: {reason}")
            return
        is_spread = os.environ.get("SLURM_JOB_NUM_NODES", "1") != "1"
        transport = ["--via", "srun"] if is_spread else ["--local"]
        words = [program, "watch", *transport, "--job", job, *_WATCH]
        ranks = (*RANKS, "LOCAL_RANK")  # it is no rank itself
        environment = {name: text for name, text in os.environ.items() if name not in ranks}
        # Not our own stream: what it starts would keep that open after our end.
        source, end = os.pipe()
        os.set_blocking(source, False)
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": end, "stderr": end}
        try:
            log = RankLogFile(self._complain)
            self._channels.append(OutputChannel(source, 2, self._prefix, log))
            how |= {"env": environment, "preexec_fn": _end_with_parent}
            self._watch = subprocess.Popen(words, **how)
        except OSError as error:
            self._complain(f"no watch: {program}: {error.strerror}")
        os.close(end)

    def _prepare_environment(self) -> None:
        """Set limits and variables, and open the log."""
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
        except (OSError, ValueError) as error:
            self._complain(f"the limit of core files stays: {error}")
        # Output before a hang must not stay in the rank's buffer.
        self._environment.setdefault("PYTHONUNBUFFERED", "1")
        self._environment.setdefault("PYTHONFAULTHANDLER", "1")
        log_dir = self._options.log_dir
        if log_dir:
            stem = f"{self._node}-rank{self._rank}" if self._rank else self._node
            self._log.open(log_dir, stem, restart_of(self._environment))
        if torch := find_torch(self._options.command[0], self._environment):
            # PyTorch appends the rank. All ranks of a start share a directory, as PyTorch's
            # analyser (torchfrtrace) needs it. Each start has its own: no dump is overwritten.
            dumps = ""
            if self._log.path:
                path = os.path.join(log_dir, f"recorder.{self._log.number}")
                with suppress(OSError):
                    os.makedirs(path, exist_ok=True)
                    dumps = path
            self._environment.update(recorder_variables(torch, self._environment, dumps))

    def _streams(self) -> tuple[int, int]:
        """The child's standard output and error: terminals if ours are terminals, else pipes. Both
        are the same if ours are the same.
        """
        ends: list[int] = []
        stream_ids: list[str] = []
        for target in (1, 2):
            try:
                os.fstat(target)
            except OSError:
                ends.append(-1)
                continue
            if target == 2 and ends[0] >= 0 and _stream_id(1) == _stream_id(2):
                ends.append(ends[0])
                continue
            if os.isatty(target):
                import pty
                import tty

                source, end = pty.openpty()
                tty.setraw(end)
                _copy_terminal_size(source, target)
            else:
                source, end = os.pipe()
            os.set_blocking(source, False)
            stream_ids.append(_stream_id(end))
            self._channels.append(OutputChannel(source, target, self._prefix, self._log))
            ends.append(end)
        self._environment[_STREAMS] = ",".join(stream_ids)
        return ends[0], ends[1]

    def _supervise(self) -> int:
        import subprocess

        out, error = self._streams()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        forwarded = forwarded_signals()
        for number in forwarded:
            signal.signal(number, self._forward)
        signal.signal(signal.SIGCHLD, self._wake_up)
        signal.signal(signal.SIGWINCH, self._resize)
        os.set_blocking(self._wake[1], False)
        os.set_blocking(self._wake[0], False)

        def restore_signals() -> None:
            _end_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGWINCH, signal.SIG_DFL)
            for number in forwarded:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

        how: dict[str, Any] = {"env": self._environment, "close_fds": False}
        how |= {"stdout": None if out < 0 else out, "stderr": None if error < 0 else error}
        how |= {"preexec_fn": restore_signals}
        try:
            self._child = subprocess.Popen(self._command, **how)
        except OSError as problem:
            # Popen names the working directory if that is missing.
            self._complain(f"{problem.filename or self._command[0]}: {problem.strerror}")
            return NOT_FOUND if isinstance(problem, FileNotFoundError) else NOT_RUN
        finally:
            for end in {out, error} - {-1}:
                os.close(end)
            if self._child is None:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        remove_own_rank()
        self._signal_probe = SignalProbe()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if self._options.watch and self._rank in ("", "0"):
            self._start_watch()
        try:
            status = self._relay()
        finally:
            self._signal_probe.end()
            # The child has ended: from now on a signal is for us.
            for number in forwarded:
                signal.signal(number, signal.SIG_DFL)
        for channel in self._channels:
            channel.end()
        return 128 - status if status < 0 else status

    def _forward(self, number: int, _: FrameType | None) -> None:
        if self._child is None or self._child.poll() is not None:
            return
        if self._signal_probe is None or not self._signal_probe.has(number):
            with suppress(OSError):
                self._child.send_signal(number)

    def _wake_up(self, _: int, __: FrameType | None) -> None:
        with suppress(OSError):
            os.write(self._wake[1], b".")

    def _resize(self, _: int, __: FrameType | None) -> None:
        for channel in self._channels:
            channel.resize()

    def _relay(self) -> int:
        """Copy the output until the child has ended. Returns its status in the form of Popen."""
        quiet_since = ended = 0.0
        expected: dict[OutputChannel, int] = {}
        while True:
            status = self._child.poll()
            now_s = time.monotonic()
            sources = {c.source: c for c in self._channels if c.source >= 0}
            if status is not None:
                if not ended:
                    ended = now_s
                    expected = {channel: channel.expected_bytes() for channel in sources.values()}
                is_behind = any(c.read_bytes < expected[c] for c in sources.values())
                is_late = now_s - ended > DRAIN_S or now_s - (quiet_since or now_s) > SILENCE_S
                if not sources or (is_late and not is_behind):
                    return int(status)
                timeout_s = SILENCE_S / 4
            else:
                is_unfinished = any(channel.unfinished for channel in self._channels)
                timeout_s = UNFINISHED_S / 4 if is_unfinished else 60.0
            poll = select.poll()
            for source in (*sources, self._wake[0]):
                poll.register(source, select.POLLIN)
            busy = False
            for fd, _ in poll.poll(timeout_s * 1000):
                if fd == self._wake[0]:
                    os.read(fd, 4096)
                elif fd in sources:
                    busy = True
                    sources[fd].read()
            for channel in sources.values():
                if channel.source >= 0:
                    channel.overdue()
            now_s = time.monotonic()
            quiet_since = 0.0 if busy or status is None else quiet_since or now_s


def _copy_terminal_size(source: int, target: int) -> None:
    with suppress(OSError):
        size = fcntl.ioctl(target, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(source, termios.TIOCSWINSZ, size)


def signal_number(text: str) -> int:
    """The number of ``URG``, ``SIGURG`` or ``23``; 0 for ``none``.

    Raises ValueError for a signal that a program cannot handle.
    """
    name = text.upper()
    name = name[3:] if name.startswith("SIG") else name
    if name == "NONE":
        return 0
    number = int(name) if name.isdigit() else int(getattr(signal, "SIG" + name, 0))
    valid = {int(number) for number in signal.valid_signals()} - {
        signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE,
        signal.SIGILL, signal.SIGABRT,
    }  # fmt: skip
    if number not in valid:
        raise ValueError(f"{text} is no signal to ask for stacks: URG, USR2, a number, or none")
    return number


def arguments(words: Sequence[str] | None = None) -> Any:
    """The options and the command. Raises SystemExit for a usage error."""
    import argparse

    usage = "%(prog)s [OPTIONS] COMMAND ..."
    about = "Start COMMAND, one rank of a job, so that its hang can be debugged."
    parser = argparse.ArgumentParser("nodeready run", usage, about, allow_abbrev=False)
    text = "keep its output in DIR/NODE-rankN.RESTART.log, and the flight recorder's dumps"
    parser.add_argument("--log-dir", metavar="DIR", default="", help=text)
    text = "every Python of it writes its stacks on this signal; none: leave all alone (URG)"
    parser.add_argument("--signal", metavar="NAME", default="URG", help=text)
    text = "rank that nodeready stacks can debug"
    parser.add_argument("--debug-rank", metavar="N", type=int, help=text)
    for name, text in (
        ("--sync-cuda", "each launch waits for its kernel, so that an error has the right stack"),
        ("--on-cpu", "hide all GPUs, so that the program runs on the CPU"),
        ("--sanitizer", "run it under compute-sanitizer"),
        ("--watch", "nodeready watch keeps the evidence of a hang"),
    ):
        parser.add_argument(name, action="store_true", help=text)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.command = options.command[options.command[:1] == ["--"] :]
    if not options.command:
        parser.error("no command: nodeready run python train.py")
    try:
        options.signal = signal_number(options.signal)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(words: Sequence[str] | None = None) -> int:
    return RankSupervisor(arguments(words)).run()


if __name__ == "__main__":
    sys.exit(main())

"""The processes that a program on a node starts and watches, and that certainly end.

Only these processes are ever signalled, traced or waited for; and of ended jobs, those that a
person has ended (agent/leftovers.py). `ProcessSupervisor` holds all processes of one run;
`ForkedWorker` does work that may hang in the kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nodeready.agent import proc
from nodeready.agent.users_file import Rights, walked
from nodeready.core.exit_codes import handle_signals


def hold_streams() -> None:
    """Open 0, 1 and 2 if a profile closed them: one of our files would get such a number."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(number)


def bug_text(problem: BaseException) -> str:
    """An unexpected exception in one line, with its place."""
    place = traceback.extract_tb(problem.__traceback__)[-1]
    position = f"{os.path.basename(place.filename)}:{place.lineno}"
    text = f"internal error at {position}: {type(problem).__name__}: {problem}"
    return " ".join(text.split())[:300]


# --- Ending processes with all that they started, also when this process is killed.


def _process_stat(pid: int) -> tuple[int, int, int]:
    """Parent, session and start time of a process. Raises OSError, ValueError, IndexError."""
    _, fields = proc.stat_fields(f"/proc/{pid}/stat")
    return int(fields[1]), int(fields[3]), int(fields[19])


def send_signal(pid: int, start: int, number: int = signal.SIGKILL) -> None:
    """Signal the process with this pid and this start in ticks since boot. Raises OSError."""
    handle = -1
    # Missing in some Pythons and before Linux 5.3. Then the pid may be reused before the signal.
    with contextlib.suppress(AttributeError, OSError):
        handle = os.pidfd_open(pid)
    try:
        if _process_stat(pid)[2] != start:
            return
        if handle < 0:
            os.kill(pid, number)
        else:
            # The signal reaches the process that had the pid when the handle was opened.
            signal.pidfd_send_signal(handle, number)
    finally:
        if handle >= 0:
            os.close(handle)


def end_all(pids: set[int]) -> None:
    """Kill these processes and all that they started, also in other sessions.

    su puts a login into a new session, and does not end the session when su is killed. The user
    can end the login's processes at any moment, and other processes may get their pids.
    """
    sessions = set(pids)
    # Twice: a process that started during the first turn is in one of the same sessions.
    for _ in range(2 if pids else 0):
        processes: dict[int, tuple[int, int, int]] = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, ValueError, IndexError):
                processes[int(name)] = _process_stat(int(name))
        family = {pid for pid, (_, session, _) in processes.items() if session in sessions}
        children = family
        while children:
            children = {pid for pid, (parent, _, _) in processes.items() if parent in family}
            children -= family
            family |= children
            sessions |= {processes[pid][1] for pid in children}
        for pid in family - {os.getpid()}:
            with contextlib.suppress(OSError, ValueError, IndexError):
                send_signal(pid, processes[pid][2])


_OVER = "over"  # the last word to the watchdog, from a program that ends by itself


class Watchdog:
    """A process that ends the processes that we started when we are killed. It serves only for
    SIGKILL: our handlers get every other signal.
    """

    def __init__(self, after_kill: Callable[[], object] = lambda: None) -> None:
        """Fork the watchdog, which is only possible before any thread is started.
        after_kill: called by the watchdog when we were killed and our processes have ended
        """
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._write)
                _run_watchdog(read, after_kill)
            finally:
                os._exit(0)
        os.close(read)

    def _write_line(self, word: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._write, f"{word}\n".encode())

    def add(self, pid: int) -> None:
        """Watch this process, which was started in a new session."""
        self._write_line(f"+{pid}")

    def remove(self, pid: int) -> None:
        """Forget this process, which has ended."""
        self._write_line(f"-{pid}")

    def close(self) -> None:
        """End the watchdog: every process has ended."""
        self._write_line(_OVER)
        with contextlib.suppress(OSError):
            os.close(self._write)
        with contextlib.suppress(OSError):
            os.waitpid(self._pid, 0)


def _run_watchdog(read: int, after_kill: Callable[[], object]) -> None:
    """The watchdog's process: it reads to the end of the pipe, then ends what still runs."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The reader of our output must see its end when we end.
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    text = b""
    while data := os.read(read, 65536):
        text += data
    pids: set[int] = set()
    words = text.decode("ascii").split()
    for word in words:
        if word != _OVER:
            (pids.add if word[0] == "+" else pids.discard)(int(word[1:]))
    end_all(pids)
    if _OVER not in words:
        after_kill()


# --- The processes of one run.

KEPT_BYTES = 256 * 1024  # bytes of a tool's output that are kept; the rest is read and dropped

_STARTING_S = 1.0  # seconds for a program that starts while everything ends; it takes milliseconds

FRAME = "nodeready_canary"  # the frame that a stack of a canary must show

# A canary answers each byte of a pipe that only we hold, so it ends when we end. The kernel kills
# a stopped canary then (PR_SET_PDEATHSIG). No canary lives longer than its alarm.
_CANARY = f"""
import os, signal, sys
signal.alarm(int(sys.argv[2]))
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
except Exception:
    pass
def {FRAME}():
    os.write(1, b"ready")
    while os.read(0, 1):
        os.write(1, b".")
{FRAME}()
"""

# Variables that a Python may need to be found and to load its libraries.
_CANARY_VARIABLES = {"PATH", "LC_ALL", "LD_LIBRARY_PATH"}

#: Gets a process, the stream (1: output, 2: errors), and the data that the process wrote to it.
OutputHandler = Callable[["subprocess.Popen[bytes]", int, bytes], None]
#: The loader's error about a stale /etc/ld.so.preload, which every program then prints.
_PRELOAD = re.compile(r"^ERROR: ld\.so: object '.*\n?", re.M)


@dataclass(frozen=True)
class Ended:
    rc: int | None  # its exit status, negative for a signal; None: it reached its limit
    out: str
    err: str
    seconds: float

    @property
    def first(self) -> str:
        """The first line of its errors, else of its output."""
        rows = [row.strip() for row in (self.err + "\n" + self.out).splitlines() if row.strip()]
        return rows[0][:200] if rows else ""


@dataclass(frozen=True)
class Status:
    state: str  # its letter in /proc/PID/stat; "": the process has ended
    tracer: int  # the pid of its tracer; 0: none


def status(pid: int) -> Status:
    try:
        values = proc.status_fields(f"/proc/{pid}/status")
    except OSError:
        return Status("", 0)
    return Status(values["State"].split()[0], int(values["TracerPid"]))


def changeable_by_root_only(program: str) -> bool:
    """Whether only root can change this program, and each directory and link in its path. For an
    ordinary user it is True, because the program then has no rights of root.
    """
    if os.geteuid():
        return True
    try:
        for _, status in walked(program):
            # In a sticky directory such as /tmp, users cannot move root's files.
            is_open = stat.S_IMODE(status.st_mode) & 0o1002 == stat.S_IWOTH
            if status.st_uid or (is_open and not stat.S_ISLNK(status.st_mode)):
                return False
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and not status.st_mode & stat.S_IWGRP


def responds(canary: subprocess.Popen[bytes]) -> bool:
    """Whether a canary runs: it answers a byte within two seconds."""
    assert canary.stdin is not None
    assert canary.stdout is not None
    try:
        canary.stdin.write(b".")
        canary.stdin.flush()
        ready = select.select([canary.stdout], [], [], 2)[0]
        return bool(ready) and os.read(canary.stdout.fileno(), 1) == b"."
    except (OSError, ValueError):  # it has ended, or another thread ended it
        return False


class ProcessSupervisor:
    """Starts the processes of one run, and ends them all. Use it as a context manager.

    It is created before any thread is started.

    tag:        marks the processes, so that an interrupt finds them
    limit_s:    seconds until all must have ended
    after_kill: called by the watchdog when this process was killed and all others have ended
    grace_s:    seconds that a program has to end by itself after SIGTERM, before it is killed
    """

    def __init__(
        self,
        tag: str,
        limit_s: float,
        after_kill: Callable[[], object] = lambda: None,
        grace_s: float = 0,
    ) -> None:
        self.tag, self._grace_s = tag, grace_s
        self.deadline = time.monotonic() + limit_s
        self._started: list[subprocess.Popen[bytes]] = []
        # Reentrant: a signal's handler may need the lock that the interrupted code holds.
        self._lock = threading.RLock()
        self._starting, self._over = 0, False
        self._watchdog = Watchdog(after_kill)
        self._cleanups: list[Callable[[], object]] = []

    def __enter__(self) -> ProcessSupervisor:
        return self

    def __exit__(self, *problem: object) -> None:
        self.end()
        self._watchdog.close()

    @property
    def left_s(self) -> float:
        """Seconds until everything must have ended; at least 0.2."""
        return max(0.2, self.deadline - time.monotonic())

    def start(self, argv: Sequence[str], **how: object) -> subprocess.Popen[bytes]:
        """Start a program in a new session, so that it can be ended with its children. Raises
        OSError if it cannot be started.
        """
        pipe = subprocess.PIPE
        settings = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "cwd": "/", **how}
        with self._lock:
            if self._over:
                raise OSError("ended")
            self._starting += 1
        try:
            # Without the lock: a program on a file system that hangs must not block other threads.
            process = subprocess.Popen(argv, start_new_session=True, **settings)  # type: ignore[call-overload]
            self._watchdog.add(process.pid)
            with self._lock:
                self._started.append(process)
        finally:
            with self._lock:
                self._starting -= 1
        return process  # type: ignore[no-any-return]

    def run(
        self,
        argv: Sequence[str],
        limit_s: float,
        on_output: OutputHandler | None = None,
        has_begun: Any = None,
        **how: object,
    ) -> Ended:
        """Run a program to its end, or end it after ``limit_s`` seconds.

        on_output: gets its output (1) and its errors (2) as they come
        has_begun: seconds, and a function that tells whether the program has begun; a program
                   that has not begun after these seconds is ended

        Raises OSError if it cannot be started.
        """
        began = time.monotonic()
        process = self.start(argv, **how)
        limit_s = min(limit_s, self.left_s)
        first_s = min(limit_s, has_begun[0]) if has_begun else limit_s
        out, err, is_complete = _read(process, first_s, on_output)
        if not is_complete and first_s < limit_s and has_begun[1]():
            more_out, more_err, is_complete = _read(process, limit_s - first_s, on_output)
            out, err = out + more_out, err + more_err
        rc: int | None = None
        if is_complete:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rc = process.wait(timeout=1)
        if rc is None:
            self._terminate([process])
            end_all({process.pid})
        self.stop(process)
        return Ended(rc, out, _PRELOAD.sub("", err), time.monotonic() - began)

    def canary(self, rights: Rights | None = None) -> subprocess.Popen[bytes]:
        """A Python that waits in the function FRAME, a sibling of the process that inspects it.

        rights: of the canary, if we are root; None: our own

        Raises OSError if it does not start.
        """
        seconds = str(int(self.left_s) + 2)
        argv = [sys.executable, "-I", "-S", "-B", "-c", _CANARY, self.tag, seconds]
        how: dict[str, object] = {}
        if rights is not None:
            # The user can read the canary's core, so it gets none of our environment.
            how = {"user": rights.uid, "group": rights.gid, "extra_groups": rights.groups}
            how["env"] = {name: os.environ[name] for name in _CANARY_VARIABLES & os.environ.keys()}
        process = self.start(argv, stdin=subprocess.PIPE, **how)
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], min(10, self.left_s))
        if not ready or os.read(process.stdout.fileno(), 5) != b"ready":
            self.stop(process)
            raise OSError(f"{sys.executable} does not run")
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """End this process and all that it started; a process in state D is left behind."""
        # The signals come before the wait: afterwards another process may have the pid.
        if process.returncode is None:
            for number in (signal.SIGKILL, signal.SIGCONT):
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with self._lock:
            if process in self._started:
                self._started.remove(process)
                self._watchdog.remove(process.pid)

    def at_end(self, cleanup: Callable[[], object]) -> None:
        """Call this function when everything ends. It removes files; a second call is harmless."""
        self._cleanups.append(cleanup)

    def end_on_signals(self, before: Callable[[], object] = lambda: None) -> None:
        """From now on TERM, INT and HUP end everything; the exit status is 128 + the signal."""

        def leave(number: int, frame: object) -> None:
            before()
            self.end()
            os._exit(128 + number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, leave)

    def _terminate(self, processes: Iterable[subprocess.Popen[bytes]]) -> None:
        """Ask these processes to end, if they have a time for that, and wait so long. A process
        that ends keeps its pid, by which the processes that it started are found.
        """
        running = [process for process in processes if process.returncode is None]
        running = running if self._grace_s else []
        until = time.monotonic() + self._grace_s
        for process in running:
            # Not process.terminate(), which waits for one that has ended, and so frees its pid.
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGTERM)
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        for process in running:
            with contextlib.suppress(ChildProcessError):
                while os.waitid(os.P_PID, process.pid, how) is None and time.monotonic() < until:
                    time.sleep(0.05)

    def kill(self) -> None:
        """Kill all running processes. Each caller sees the end of its process."""
        end_all({process.pid for process in [*self._started] if process.returncode is None})

    def end(self) -> None:
        """End everything. No process can be started afterwards."""
        self._over = True
        # A process that another thread starts now is not in the list yet.
        until = time.monotonic() + _STARTING_S
        while self._starting and time.monotonic() < until:
            time.sleep(0.01)
        started = list(self._started)
        self._terminate(started)
        self.kill()
        for process in started:
            self.stop(process)
        for cleanup in self._cleanups:
            with contextlib.suppress(Exception):
                cleanup()


def _read(
    process: subprocess.Popen[bytes], limit_s: float, on_output: OutputHandler | None
) -> tuple[str, str, bool]:
    """Both outputs, each at most KEPT_BYTES, and whether both streams ended within the limit."""
    assert process.stdout is not None
    assert process.stderr is not None
    streams = {process.stdout.fileno(): 1, process.stderr.fileno(): 2}
    outputs = {1: bytearray(), 2: bytearray()}
    open_fds = set(streams)
    until = time.monotonic() + limit_s
    while open_fds and (remaining_s := until - time.monotonic()) > 0:
        ready, _, _ = select.select(list(open_fds), [], [], remaining_s)
        for fd in ready:
            data, stream = os.read(fd, 65536), streams[fd]
            if not data:
                open_fds.discard(fd)
            elif on_output is not None:
                on_output(process, stream, data)
            outputs[stream] += data[: max(0, KEPT_BYTES - len(outputs[stream]))]
    out, err = (bytes(output).decode("utf-8", "replace") for output in outputs.values())
    return out, err, not open_fds


# --- Work that may hang forever, in a fork that is then left behind.

Send = Callable[[Any], None]  # sends plain data to the process that made the fork

_MAX_MESSAGE_BYTES = 64 << 20  # maximum of a message; after a longer one a fork is not read


class ForkedWorker:
    """A fork that does ``work(send)``; `messages` yields what the work sends.

    A thread that hangs in the kernel would keep its process from ending; a fork is left behind.

    limit_s: seconds after which it certainly ends, unless it hangs in the kernel
    keep:    descriptors that stay open in addition to the pipe
    """

    def __init__(
        self, work: Callable[[Send], None], limit_s: float, keep: Iterable[int] = ()
    ) -> None:
        self.pipe, write = os.pipe()
        self._partial = b""
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _work(work, write, limit_s, keep)
            finally:
                os._exit(1)
        os.close(write)

    def read(self) -> list[Any] | None:
        """The messages in the pipe, which must be ready; None: the fork has ended."""
        data = os.read(self.pipe, 1 << 16)
        if not data or len(self._partial) > _MAX_MESSAGE_BYTES:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def messages(self, patience_s: float, deadline: float) -> Iterator[Any]:
        """Each message of the fork until it ends; None after a silence, and at the deadline.
        patience_s: seconds of a silence; deadline: a moment of time.monotonic()
        """
        while True:
            wait_s = min(patience_s, deadline - time.monotonic())
            if wait_s <= 0 or not select.select([self.pipe], [], [], wait_s)[0]:
                yield None
                continue
            messages = self.read()
            if messages is None:
                return
            yield from messages

    def end(self) -> None:
        """End the fork; one that hangs in the kernel is left behind."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        until = time.monotonic() + 0.5
        # In a process with gevent, gevent takes the status of every child.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0 and time.monotonic() < until:
                time.sleep(0.001)
        os.close(self.pipe)


def _work(work: Callable[[Send], None], pipe: int, limit_s: float, keep: Iterable[int]) -> None:
    """The fork's process. It closes all inherited files, whose end others may wait for."""
    handle_signals(signal.SIG_DFL)
    for number in (signal.SIGALRM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in {0, 1, 2} - {pipe}:
        os.dup2(null, stream)
    begin = 3
    for open_number in sorted({*keep, pipe}):
        os.closerange(begin, open_number)
        begin = max(begin, open_number + 1)
    os.closerange(begin, max(begin, 1024))

    def send(data: Any) -> None:
        text = json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n"
        while text:
            text = text[os.write(pipe, text) :]

    work(send)
    os._exit(0)

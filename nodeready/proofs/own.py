"""The processes that the proofs start, each certain to end.

Only what was started here is ever touched: signalled, traced, waited for.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nodeready.proofs.watch import Watch, end_all

#: Output of a tool that is kept; the rest is read and dropped.
KEPT_BYTES = 256 * 1024

#: Seconds for a program to start, while everything is ended: it is there in milliseconds.
_STARTING_S = 1.0

#: The frame that a stack of a canary must show.
FRAME = "nodeready_canary"

# It answers each byte of a pipe that only we hold: when we die, however that comes, it ends, too;
# when it is stopped then, the kernel kills it (PR_SET_PDEATHSIG). Never longer than its alarm.
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

#: Gets each piece that a process wrote to its output, 1, or to 2.
Heard = Callable[["subprocess.Popen[bytes]", int, bytes], None]


@dataclass(frozen=True)
class Ended:
    """How a tool ended. rc: its exit status, negative for a signal; None: ended by its limit."""

    rc: int | None
    out: str
    err: str
    seconds: float

    @property
    def first(self) -> str:
        """The first line of what it complained about."""
        rows = [row.strip() for row in (self.err + "\n" + self.out).splitlines() if row.strip()]
        return rows[0][:200] if rows else ""


@dataclass(frozen=True)
class Status:
    """The state of a process: its letter in /proc/PID/stat ("" when it is gone), its tracer."""

    state: str
    tracer: int


def status(pid: int) -> Status:
    """What /proc says of a process."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            values = dict(row.split(":", 1) for row in file if ":" in row)
    except OSError:
        return Status("", 0)
    return Status(values["State"].split()[0], int(values["TracerPid"]))


def answers(canary: subprocess.Popen[bytes]) -> bool:
    """Whether a canary goes on: whether it does, within two seconds, what it is told."""
    assert canary.stdin is not None
    assert canary.stdout is not None
    try:
        canary.stdin.write(b".")
        canary.stdin.flush()
        if not select.select([canary.stdout], [], [], 2)[0]:
            return False
        return os.read(canary.stdout.fileno(), 1) == b"."
    except (OSError, ValueError):  # it is gone, or ended by us meanwhile
        return False


class Own:
    """All processes of one run. Use as a context manager: leaving it ends every one.

    To be made before any thread is started.
    """

    def __init__(self, tag: str, limit_s: float) -> None:
        self.tag = tag
        self.deadline = time.monotonic() + limit_s
        self._started: list[subprocess.Popen[bytes]] = []
        # A signal's handler may come while we hold it.
        self._lock = threading.RLock()
        self._starting, self._over = 0, False
        self._watch = Watch()
        self._tidy: list[Callable[[], object]] = []

    def __enter__(self) -> Own:
        return self

    def __exit__(self, *problem: object) -> None:
        self.end()
        self._watch.close()

    @property
    def left_s(self) -> float:
        """Seconds until everything must have ended; at least a little."""
        return max(0.2, self.deadline - time.monotonic())

    def start(self, argv: Sequence[str], **how: object) -> subprocess.Popen[bytes]:
        """Start a program in a session of its own, so that it can be ended with all it started.

        Raises OSError when it cannot be started.
        """
        given = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **how,
        }
        with self._lock:
            if self._over:
                raise OSError("ended")
            self._starting += 1
        try:
            # Without the lock: a program on a file system that hangs holds up nobody else.
            process = subprocess.Popen(argv, start_new_session=True, **given)  # type: ignore[call-overload]
            self._watch.add(process.pid)
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
        heard: Heard | None = None,
        **how: object,
    ) -> Ended:
        """Run a program to its end, or end it after ``limit_s`` seconds; never longer.

        heard: gets each piece of its output (1) and complaints (2) as it comes. Raises OSError
        when it cannot be started.
        """
        began = time.monotonic()
        process = self.start(argv, **how)
        out, err, whole = _read(process, min(limit_s, self.left_s), heard)
        rc: int | None = None
        if whole:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rc = process.wait(timeout=1)
        if rc is None:
            end_all({process.pid})
        self.stop(process)
        return Ended(rc, out, err, time.monotonic() - began)

    def canary(self, uid: int | None = None) -> subprocess.Popen[bytes]:
        """A Python that waits in the function FRAME, a sibling of whoever looks at it.

        uid: whose it is, where we are root; else ours. Raises OSError when it does not come up.
        """
        seconds = str(int(self.left_s) + 2)
        argv = [sys.executable, "-I", "-S", "-B", "-c", _CANARY, self.tag, seconds]
        process = self.start(argv, stdin=subprocess.PIPE, user=uid, cwd="/")
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], min(10, self.left_s))
        if not ready or os.read(process.stdout.fileno(), 5) != b"ready":
            self.stop(process)
            raise OSError(f"{sys.executable} does not run")
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """End a process of ours and all that it started; one in state D is left behind."""
        # Before it is waited for: afterwards its number may be another's.
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
                self._watch.remove(process.pid)

    def at_end(self, tidy: Callable[[], object]) -> None:
        """Have this called when everything ends: it removes files, and can be called twice."""
        self._tidy.append(tidy)

    def end(self) -> None:
        """End everything; nothing is started any more."""
        self._over = True
        # What another thread is just starting is nobody's yet.
        until = time.monotonic() + _STARTING_S
        while self._starting and time.monotonic() < until:
            time.sleep(0.01)
        started = list(self._started)
        end_all({process.pid for process in started if process.returncode is None})
        for process in started:
            self.stop(process)
        for tidy in self._tidy:
            with contextlib.suppress(Exception):
                tidy()


def _read(
    process: subprocess.Popen[bytes],
    limit_s: float,
    heard: Heard | None,
) -> tuple[str, str, bool]:
    """Both outputs, each at most KEPT_BYTES, and whether that was all before the time was over."""
    streams = {s.fileno(): bytearray() for s in (process.stdout, process.stderr) if s is not None}
    open_ = set(streams)
    until = time.monotonic() + limit_s
    while open_:
        left = until - time.monotonic()
        ready = select.select(list(open_), [], [], max(0.0, left))[0] if left > 0 else []
        if not ready:
            break
        for number in ready:
            piece = os.read(number, 65536)
            error = process.stderr is not None and number == process.stderr.fileno()
            if not piece:
                open_.discard(number)
            elif heard is not None:
                heard(process, 2 if error else 1, piece)
            streams[number] += piece[: max(0, KEPT_BYTES - len(streams[number]))]
    texts = [bytes(kept).decode("utf-8", "replace") for kept in streams.values()]
    return (*[*texts, "", ""][:2], not open_)  # type: ignore[return-value]

"""Work in a process of its own, with hard ceilings of time and memory."""

import os
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest

#: Of CPU time and memory: far above what an answer takes, far below what takes a machine down.
SECONDS, MEMORY_BYTES = 30, 1 << 30


class Ended(NamedTuple):
    """status: of the process, 0 when all is well. said: the exception that ended it.

    grown_bytes: how much its memory grew at most
    """

    status: int
    said: str
    grown_bytes: int


def _status(word: str) -> int:
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith(f"{word}:"))


def alone(
    work: Callable[[], object], seconds: int = SECONDS, memory_bytes: int = MEMORY_BYTES
) -> Ended:
    """Do it in a fork, which is ended at the limit of time and gets no more memory than that."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as grown:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                signal.signal(signal.SIGPROF, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_PROF, seconds)
                most = _status("VmSize") + memory_bytes
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
                Path("/proc/self/clear_refs").write_text("5")
                before = _status("VmRSS")
                work()
                grown.write(str(max(0, _status("VmHWM") - before)).encode())
                grown.flush()
                status = 0
            except BaseException as problem:  # noqa: BLE001 - it ends here, in words
                words = [*traceback.format_exception(problem), *getattr(problem, "__notes__", ())]
                out.write("\n".join(words).encode("utf-8", "backslashreplace"))
                out.flush()
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        out.seek(0)
        grown.seek(0)
        said = out.read().decode("utf-8", "replace")
        return Ended(status, said, int(grown.read() or 0))


def bounded(work: Callable[[], object], seconds: int = SECONDS) -> None:
    """Do it in this process, which is quicker, with the ceiling of time alone."""

    def end(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"took more than {seconds} s of CPU time")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        work()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def well(work: Callable[[], object], seconds: int = SECONDS) -> None:
    """Do it in a fork, and fail with the error of the work or with the ceiling that ended it."""
    ended = alone(work, seconds)
    what = "ended by its limit of time" if ended.status == signal.SIGPROF else "failed"
    assert ended.status == 0, f"{what}\n{ended.said[-4000:]}"


#: effort -> how the work is done
DO = {"short": bounded, "long": well}

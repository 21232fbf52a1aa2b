"""Run one command and write its cost: wall time, the CPU time of all its processes, and the memory
of the largest one.

    python timed.py RESULT -- COMMAND...

It is a separate process, so that children which outlive the command (open ssh connections) become
its own and count, too, and the caller's other children do not. It ends them: the next run starts
cold. It needs the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
#: Seconds after SIGTERM until the processes that the command left behind are killed.
PATIENCE_S = 2.0


def _children() -> list[int]:
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                if int(stat[stat.rindex(")") + 2 :].split()[1]) == os.getpid():
                    pids.append(int(entry.name))
    return pids


def _end_children() -> None:
    """End the processes that the command left behind, and count their CPU time."""
    deadline = time.monotonic() + PATIENCE_S
    while strays := _children():
        for pid in strays:
            number = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.02)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def main(result: str, command: list[str]) -> int:
    """Run the command with our own streams. Returns its exit status."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    status = 143
    try:
        started = time.monotonic()
        status = subprocess.call(command)
        wall_s = time.monotonic() - started
    finally:
        _end_children()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    cost = {"wall_s": wall_s, "cpu_s": cpu_s, "memory_mib": used.ru_maxrss / 1024}
    Path(result).write_text(json.dumps(cost))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[3:]))

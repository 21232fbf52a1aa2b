"""Run one command and write down what it cost: wall time, and the CPU time of all it started.

    python timed.py RESULT -- COMMAND...

A process of its own, so that children which outlive the command (ssh connections kept open) come
back to it and are counted too, and the caller's other children are not. They are ended: the next
run starts cold. Standard library alone.
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

#: linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
#: Seconds for what the command left behind to end by itself after SIGTERM.
PATIENCE_S = 2.0


def _children() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                if int(stat[stat.rindex(")") + 2 :].split()[1]) == os.getpid():
                    found.append(int(entry.name))
    return found


def _end_strays() -> int:
    """End what the command left behind; how many processes that were."""
    ended, deadline = 0, time.monotonic() + PATIENCE_S
    while strays := _children():
        for pid in strays:
            last = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, last)
        time.sleep(0.02)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                ended += 1
    return ended


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
        wall = time.monotonic() - started
    finally:
        strays = _end_strays()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cost = {"status": status, "wall_s": wall, "cpu_s": used.ru_utime + used.ru_stime}
    Path(result).write_text(json.dumps({**cost, "strays": strays}))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[3:]))

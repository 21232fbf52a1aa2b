"""The processes of a lab: recognised by what they are, never by a number alone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

from nodeready.lab.boot import MARK
from nodeready.lab.state import LabError

# A killed init takes its node along; the kernel needs milliseconds, a loaded machine more.
DEATH_S = 20.0


def detach() -> None:
    """Cut this process off from who started it: session, terminal, streams, directory."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.chdir("/")


def started_at(pid: int) -> int | None:
    """When this process began, in clock ticks since boot; None when it is gone or a zombie.

    With the pid it identifies a process: pids are used again (proc(5), stat, field 22).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def of_lab(directory: Path, names: Collection[str] = ()) -> list[int]:
    """Every process that belongs to the lab in this directory: inits and half-started nodes.

    With `names`, the inits of these nodes alone.
    """
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = Path("/proc", entry, "cmdline").read_bytes().decode(errors="replace")
            if _belongs(words.split("\0"), str(directory), names):
                found.append(int(entry))
    return found


def _belongs(words: list[str], directory: str, names: Collection[str]) -> bool:
    if words[:2] == ["sh", "-c"] and words[3:5] == [MARK, directory]:
        return not names or words[5] in names
    return not names and words[1:4] == ["-m", "nodeready.lab.boot", directory]


def end_all(directory: Path, names: Collection[str] = ()) -> None:
    """Kill every process of the lab (or of these nodes), and wait until none is left.

    A process may fork while we look, so only a look that finds nothing ends it. Raises LabError
    when one does not end.
    """
    deadline = time.monotonic() + DEATH_S
    while found := [pid for pid in of_lab(directory, names) if started_at(pid) is not None]:
        if time.monotonic() > deadline:
            raise LabError(
                f"process {found[0]} of the lab does not end; look at /proc/{found[0]}/stack"
            )
        for pid in found:
            end(pid, wait_s=0.0)
        time.sleep(0.01)


def end(pid: int, wait_s: float = DEATH_S, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Kill this process, do something, and wait at most this long until it has ended."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        meanwhile()
        if wait_s:
            select.select([handle], [], [], wait_s)
    finally:
        os.close(handle)

"""A command on this machine that is waited for until a deadline, and never longer."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable

#: Bytes of an answer that are kept. The node caps its own; this holds when that fails.
MAX_BYTES = 16 << 20
#: Seconds for what was asked to end before it is made to.
PATIENCE_S = 2.0
#: A prolog of Slurm's has no PATH.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Child:
    """A line of shell.command() that runs in a session of its own. Leave it by `end`."""

    def __init__(self, line: str) -> None:
        environment = {**os.environ, "PATH": f"{_PATH}:{os.environ.get('PATH', '')}".rstrip(":")}
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env=environment,
        )
        assert self._process.stdout is not None
        self._out = self._process.stdout
        self._said = bytearray()
        #: Whether all of its output is there.
        self.whole = False

    @property
    def text(self) -> str:
        """What it has said so far."""
        return self._said.decode("utf-8", "surrogateescape")

    def fileno(self) -> int:
        return self._out.fileno()

    def read(self) -> None:
        """Take what is there; waits when nothing is."""
        piece = os.read(self.fileno(), 1 << 16)
        self._said += piece
        if not piece or len(self._said) > MAX_BYTES:
            self.whole = True

    def end(self) -> None:
        """End what is left of it, without waiting for what no signal ends (state D)."""
        asked = time.monotonic() + PATIENCE_S
        number = signal.SIGTERM
        while not self.whole and (pids := self._left()):
            if number is not signal.SIGKILL:
                _signal(pids, number)
                number = signal.SIGCONT
            if time.monotonic() > asked:
                _signal(pids, signal.SIGKILL)
                break
            time.sleep(0.02)
        self._out.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)

    def _left(self) -> list[int]:
        """The processes of its session that have not ended.

        Until it is waited for its number is nobody else's.
        """
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                        words = file.read().rpartition(")")[2].split()
                    if int(words[3]) == self._process.pid and words[0] not in "ZX":
                        found.append(int(name))
        return found


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def gather(children: Iterable[Child], deadline: float) -> None:
    """Read what these say until they have said all, or until this moment of time.monotonic()."""
    open_ = list(children)
    while open_ and (left := deadline - time.monotonic()) > 0:
        for child in select.select(open_, [], [], left)[0]:
            child.read()
        open_ = [child for child in open_ if not child.whole]

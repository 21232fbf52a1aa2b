"""Ending processes of ours for certain: with all that they started, and when we are killed."""

from __future__ import annotations

import contextlib
import os
import signal


def end_all(pids: set[int]) -> None:
    """Kill these processes of ours and all that they started, in sessions of their own, too.

    su puts a login into a session of its own, and when su is killed, it tells nobody.
    """
    sessions = set(pids)
    # Twice: what was started while we looked is in one of the same sessions.
    for _ in range(2 if pids else 0):
        known: dict[int, tuple[int, int]] = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    words = file.read().rpartition(")")[2].split()
                known[int(name)] = (int(words[1]), int(words[3]))
        found = {pid for pid, (_, session) in known.items() if session in sessions}
        while more := {pid for pid, (parent, _) in known.items() if parent in found} - found:
            found |= more
            sessions |= {known[pid][1] for pid in more}
        for pid in found - {os.getpid()}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


class Watch:
    """A process beside us that knows what we started, and ends it when we are gone.

    Only SIGKILL needs it: of everything else we hear ourselves.
    """

    def __init__(self) -> None:
        """Before any thread is started: it is a fork of ours."""
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._write)
                _wait(read)
            finally:
                os._exit(0)
        os.close(read)

    def _tell(self, word: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._write, word.encode())

    def add(self, pid: int) -> None:
        """We started this one, in a session of its own."""
        self._tell(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """That one has ended."""
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """Everything has ended."""
        with contextlib.suppress(OSError):
            os.close(self._write)
        with contextlib.suppress(OSError):
            os.waitpid(self._pid, 0)


def _wait(read: int) -> None:
    """The life of the process beside us."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Whoever reads our output must see it end with us.
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    text = b""
    while piece := os.read(read, 65536):
        text += piece
    pids: set[int] = set()
    for word in text.decode("ascii").split():
        (pids.add if word[0] == "+" else pids.discard)(int(word[1:]))
    end_all(pids)

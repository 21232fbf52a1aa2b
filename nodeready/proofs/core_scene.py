"""A shell of our own to crash, and everything that its crash can leave on the disk."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import time

from nodeready.proofs import core_file, core_pattern
from nodeready.proofs.attempt import first_number
from nodeready.proofs.core_file import Found, Mark
from nodeready.proofs.own import Own
from nodeready.proofs.seen import DUMP_S

_UP_S = 10
# The PID namespace of the host (PROC_PID_INIT_INO): there, %P is the number that we know.
_HOST_PIDS = "pid:[4026531836]"


class Scene:
    """A sleeping /bin/sh, and where its core may be.

    home:  a directory of its own, which it works in: where the core lies when the pattern is
           relative, or not the kernel's; "": none can be made
    """

    def __init__(self, own: Own, pattern: str) -> None:
        self.own = own
        self.pattern = pattern
        self.home = ""
        self.pid = 0
        self.program = "/bin/sh"
        self.mark = Mark(os.urandom(8).hex(), os.geteuid(), time.time())
        self._uses_pid = bool(first_number("/proc/sys/kernel/core_uses_pid"))
        self._values: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: float | None = None

    def begin(self) -> None:
        """Raises OSError when no shell comes up."""
        self.home = _private(self.mark.word)
        # It ends by itself when we do: its input is a pipe of ours.
        argv = ["/bin/sh", "-c", "echo; read x; :", self.own.tag, self.mark.word]
        process = self.own.start(argv, stdin=subprocess.PIPE, cwd=self.home or "/")
        self._process, self.pid = process, process.pid
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], min(_UP_S, self.own.left_s))
        if not ready or not os.read(process.stdout.fileno(), 1):
            raise OSError("/bin/sh does not run")
        with contextlib.suppress(OSError):
            self.program = os.readlink(f"/proc/{self.pid}/exe")
        self._values = self._specifiers()

    def _specifiers(self) -> dict[str, str]:
        pid = str(self.pid)
        limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="surrogateescape") as file:
            comm = file.read().rstrip("\n")
        found = {
            "p": pid, "i": pid, "u": str(os.getuid()), "g": str(os.getgid()), "d": "1",
            "s": str(int(signal.SIGSEGV)), "h": os.uname().nodename, "e": comm,
            "E": self.program, "c": str(limit % 2**64),
        }  # fmt: skip
        with contextlib.suppress(OSError):
            if os.readlink("/proc/self/ns/pid") == _HOST_PIDS:
                found.update(P=pid, I=pid)
        return found

    def crash(self) -> bool | None:
        """Whether the kernel says that it dumped; None when it is still at it."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        os.kill(self.pid, signal.SIGSEGV)
        until = time.monotonic() + min(DUMP_S, self.own.left_s)
        # Popen's own wait() drops the bit that says so.
        while (seen := os.waitid(os.P_PID, self.pid, how)) is None:
            if time.monotonic() > until:
                return None
            time.sleep(0.02)
        self._ended = time.time()
        return seen.si_code == os.CLD_DUMPED

    def expected(self, second: int | None = None) -> str:
        """The path that the pattern gives, expanded; second: of the crash."""
        values = self._values if second is None else {**self._values, "t": str(second)}
        path = core_pattern.expand(self.pattern, values, uses_pid=self._uses_pid)
        return os.path.join(self.home or "/", path)

    def cores(self) -> list[Found]:
        """Every core of the canary's that is there."""
        found: list[Found | None] = []
        if self.home:
            with contextlib.suppress(OSError):
                paths = [entry.path for entry in os.scandir(self.home)]
                found = [core_file.look(path, self.mark, named=True) for path in paths]
        if self._values and self.pattern and not core_pattern.program(self.pattern):
            named = core_pattern.names_process(self.pattern, self._values, uses_pid=self._uses_pid)
            until = self._ended or time.time()
            # A second more on both sides: the kernel's coarse clock is a little behind.
            seconds = range(int(self.mark.since) - 1, int(until) + 2)
            for path in dict.fromkeys(self.expected(second) for second in seconds):
                for name in core_pattern.existing(path):
                    # A number alone is the host's only where we have the host's numbers.
                    ours = named and "P" in self._values
                    found.append(core_file.look(name, self.mark, named=ours))
        return [one for one in found if one is not None]

    def tidy(self) -> str:
        """End the canary, remove its cores; returns what is left and why. Harmless twice."""
        if self._process is not None:
            self.own.stop(self._process)
        problems = [(core.path, core_file.remove(core)) for core in self.cores()]
        if self.home:
            with contextlib.suppress(OSError):
                os.rmdir(self.home)
        return "; ".join(f"{core_pattern.shown(path)}: {why}" for path, why in problems if why)


def _private(word: str) -> str:
    """A new directory for this user alone; "" when none can be made."""
    import tempfile

    for parent in ("/tmp", "/var/tmp", "/dev/shm"):
        with contextlib.suppress(OSError):
            return tempfile.mkdtemp(prefix=f"nodeready-{word}-", dir=parent)
    return ""

"""Work that may hang for good, in a fork beside this process that is left behind when it does."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

#: Takes plain data to the process that listens.
Tell = Callable[[Any], None]


class Aside:
    """A fork that does ``work(tell)``; `hear` gives what it tells.

    limit_s: seconds after which it ends for certain, unless it hangs in the kernel
    """

    def __init__(self, work: Callable[[Tell], None], limit_s: float) -> None:
        self._pipe, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _work(work, write, limit_s)
            finally:
                os._exit(1)
        os.close(write)

    def hear(self, patience_s: float, deadline: float) -> Iterator[Any]:
        """What it tells, until it ends; None when it was silent for so long, and at the deadline.

        deadline: a moment of time.monotonic()
        """
        kept = b""
        while True:
            left = min(patience_s, deadline - time.monotonic())
            if left <= 0 or not select.select([self._pipe], [], [], left)[0]:
                yield None
                continue
            piece = os.read(self._pipe, 1 << 16)
            if not piece:
                return
            *rows, kept = (kept + piece).split(b"\n")
            for row in rows:
                yield json.loads(row)

    def end(self) -> None:
        """End it; what hangs in the kernel is left behind."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        until = time.monotonic() + 0.5
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0 and time.monotonic() < until:
            time.sleep(0.01)
        os.close(self._pipe)


def _work(work: Callable[[Tell], None], pipe: int, limit_s: float) -> None:
    """The life of the fork. It holds nothing open by which somebody waits for its end."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in {0, 1, 2} - {pipe}:
        os.dup2(null, stream)
    os.closerange(3, pipe)
    os.closerange(max(3, pipe + 1), 1024)

    def tell(data: Any) -> None:
        text = json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n"
        while text:
            text = text[os.write(pipe, text) :]

    work(tell)
    os._exit(0)

"""Ctrl-C and SIGTERM under gevent: always a KeyboardInterrupt in the command itself.

Python runs a signal's handler wherever it happens to be: in the work on some node, or in gevent's
loop, which would print a traceback. The command's own greenlet is the one that must hear of it.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

import gevent
from gevent import hub

from nodeready.cli.exits import INTERRUPTED

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def hear() -> None:
    """From here on, a signal interrupts the calling greenlet; a second one ends the process."""
    command = gevent.getcurrent()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        for name in SIGNALS:
            signal.signal(name, _leave)
        if gevent.getcurrent() is command:
            raise KeyboardInterrupt
        hub.get_hub().loop.run_callback(command.throw, KeyboardInterrupt())

    for name in SIGNALS:
        signal.signal(name, interrupt)


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)

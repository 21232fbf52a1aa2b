"""How a command ends: the exit codes, the error that means 2, and signals."""

from __future__ import annotations

import signal
from types import FrameType

import click

from nodeready.exit_codes import (
    CHECK,
    FAILED,
    INTERRUPTED,
    OK,
    UNREACHABLE,
    USAGE,
    exit_code,
    leave,
)

__all__ = [
    "CHECK",
    "FAILED",
    "INTERRUPTED",
    "OK",
    "UNREACHABLE",
    "USAGE",
    "Refused",
    "exit_code",
]


class Refused(click.ClickException):
    """An inventory, policy or file of the user's that cannot be used: its words, and exit 2.

    Unlike click.UsageError, no advice to read the command's --help follows.
    """

    exit_code = USAGE


# --- Ctrl-C and SIGTERM under gevent: always a KeyboardInterrupt in the command's own greenlet.
#
# A SIGINT that was ignored at the start stays ignored: a shell starts a script's background jobs
# like that, so that Ctrl-C ends the script alone. SIGTERM ends the command.
#
# Python runs a signal's handler in whatever greenlet runs: in the work on some node, or in the
# loop of gevent, which would print a traceback.

#
# Before that, in a command's own imports and its reading of what it was given, a signal ends the
# process at once (exit_codes.leave_on_signals).

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def interrupt_on_signals() -> None:
    """From here on, a signal interrupts the calling greenlet; a second one ends the process."""
    import gevent
    from gevent import hub

    command = gevent.getcurrent()
    handled = [name for name in SIGNALS if signal.getsignal(name) is not signal.SIG_IGN]

    def interrupt(signum: int, frame: FrameType | None) -> None:
        for name in handled:
            signal.signal(name, leave)
        if gevent.getcurrent() is command:
            raise KeyboardInterrupt
        hub.get_hub().loop.run_callback(command.throw, KeyboardInterrupt())

    for name in handled:
        signal.signal(name, interrupt)


def raise_on_signals() -> None:
    """From here on, a signal is a KeyboardInterrupt: for commands that do not use gevent."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)

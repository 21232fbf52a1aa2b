"""How every command ends, on the control machine and on a node: its exit code, and at a signal.

The exit code is decided in one place.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

OK, FAILED, USAGE, CHECK, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130
#: Ctrl-C and its like; SIGHUP is a terminal's end. What was ignored at the start stays ignored: a
#: shell starts a script's background jobs without SIGINT, so that Ctrl-C ends the script alone;
#: nohup starts without SIGHUP what is to outlive its terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_code(
    *,
    interrupted: bool = False,
    usage: bool = False,
    failed: bool = False,
    unreachable: bool = False,
    check: bool = False,
) -> int:
    """The exit code of a run: the code of the first of these that happened in the run.

    interrupted: 130, Ctrl-C, SIGTERM or SIGHUP
    usage:       2, a wrong argument, a bad policy, zero nodes or zero checks selected
    failed:      1, the tool or an operation failed
    unreachable: 4, a node could not be reached
    check:       3, a check failed or could not be observed, or --check found changes to make
    """
    for happened, code in (
        (interrupted, INTERRUPTED),
        (usage, USAGE),
        (failed, FAILED),
        (unreachable, UNREACHABLE),
        (check, CHECK),
    ):
        if happened:
            return code
    return OK


def leave_on_signals() -> None:
    """From here on, Ctrl-C and SIGTERM end the process at once and in silence, as interrupted.

    For the time in which there is nothing to tidy up: a KeyboardInterrupt in the middle of an
    import shows as a traceback.
    """
    for name in SIGNALS:
        if signal.getsignal(name) is not signal.SIG_IGN:
            signal.signal(name, leave)


def leave(signum: int, frame: FrameType | None) -> None:
    """The handler of a signal that ends the process at once."""
    os._exit(INTERRUPTED)


def raise_on_signals() -> None:
    """From here on, a signal is a KeyboardInterrupt: for commands that do not use gevent."""
    for name in SIGNALS:
        if signal.getsignal(name) is not signal.SIG_IGN:
            signal.signal(name, signal.default_int_handler)


def ignore_signals() -> None:
    """From here on, Ctrl-C and SIGTERM are too late: the exit code stands, the process goes.

    Python's own end would give them back to the kernel, and the code would be the signal's.
    """
    for name in SIGNALS:
        signal.signal(name, signal.SIG_IGN)

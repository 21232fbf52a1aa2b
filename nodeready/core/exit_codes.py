"""How every command ends, on the control machine and on a node: its exit code, and at a signal.

The exit code is decided in one place.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

TYPE_CHECKING = False  # typing takes a third of the time of --version
if TYPE_CHECKING:
    from typing import Any

OK, FAILED, USAGE, CHECK, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130
#: The signals that end a command. An ignored SIGINT or SIGHUP stays ignored: a shell ignores
#: SIGINT for a script's background jobs, so that Ctrl-C ends only the script, and nohup ignores
#: SIGHUP for a command that shall outlive its terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Refused(Exception):
    """The command cannot run as it was given: it ends with the message and this exit code."""

    def __init__(self, message: str, exit_code: int = USAGE) -> None:
        super().__init__(message)
        self.message, self.exit_code = message, exit_code


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


def handle_signals(handler: Any) -> None:
    """Set the handler of SIGNALS, except where SIGINT or SIGHUP is ignored.

    handler: `leave` during imports, where a KeyboardInterrupt would show a traceback;
             `signal.default_int_handler` for a KeyboardInterrupt; `signal.SIG_IGN` once the exit
             code is known, because a signal during Python's own end would replace it
    """
    for number in SIGNALS:
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def leave(signum: int, frame: FrameType | None) -> None:
    """The handler of a signal that ends the process at once."""
    os._exit(INTERRUPTED)

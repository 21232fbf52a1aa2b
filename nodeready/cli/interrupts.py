"""Ctrl-C and SIGTERM under gevent: always a KeyboardInterrupt in the command's own greenlet.

Python runs a signal's handler in the current greenlet, which may be the work on a node, or
gevent's loop, which would print a traceback. So the handler raises the exception in the command's
greenlet. Before `interrupt_on_signals`, while a command is imported and reads its arguments, a
signal ends the process at once (exit_codes.leave).
"""

from __future__ import annotations

from types import FrameType

from nodeready.core.exit_codes import handle_signals, leave


def interrupt_on_signals() -> None:
    """From here on, a signal interrupts the calling greenlet; a second one ends the process."""
    import gevent
    from gevent import hub

    command = gevent.getcurrent()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        handle_signals(leave)
        if gevent.getcurrent() is command:
            raise KeyboardInterrupt
        hub.get_hub().loop.run_callback(command.throw, KeyboardInterrupt())

    handle_signals(interrupt)

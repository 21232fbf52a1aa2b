"""The start on the node: a Python that is too old gets a line that says so.

Python 2.7 and 3.6 must be able to read this file, and no other.
"""
# ruff: noqa: UP031, UP036

import sys

if sys.version_info < (3, 9):
    sys.stderr.write(
        "nodeready needs Python 3.9 or newer; this is %s (%s)\n"
        % (".".join(str(part) for part in sys.version_info[:3]), sys.executable)
    )
    sys.exit(1)

if __name__ == "__main__":
    import signal

    from nodeready.exit_codes import handle_signals, leave

    # An import that a signal interrupts would show as a traceback.
    handle_signals(leave)
    from nodeready.healthcheck.main import main

    code = main()
    handle_signals(signal.SIG_IGN)
    sys.exit(code)

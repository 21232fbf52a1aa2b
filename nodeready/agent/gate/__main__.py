"""The start of the node's own program: a Python that is too old prints one line and exits.

Only this file must also be valid in Python 2.7 and 3.6.
"""
# ruff: noqa: UP031, UP036

import sys

if sys.version_info < (3, 9):
    sys.stderr.write(
        "nodeready needs Python 3.9 or newer; this is %s (%s)\n"
        % (".".join(str(part) for part in sys.version_info[:3]), sys.executable)
    )
    sys.exit(1)

if __name__ == "__main__" and sys.argv[1:2] == ["run"]:
    # Nothing else is imported: the supervisor of a rank lives as long as the job.
    from nodeready.agent.run import main as supervise

    sys.exit(supervise(sys.argv[2:]))

if __name__ == "__main__":
    import signal

    from nodeready.core.exit_codes import handle_signals, leave

    # Python would print a traceback for an import that a signal interrupts.
    handle_signals(leave)
    from nodeready.agent.gate.main import main

    code = main()
    handle_signals(signal.SIG_IGN)
    sys.exit(code)

"""The start of the command, also as `python -m nodeready`: a signal ends it quietly."""

import signal
import sys

from nodeready import __version__
from nodeready.core.exit_codes import handle_signals, leave


def main() -> None:
    """Run the command line; ends the process with the documented exit code."""
    handle_signals(leave)
    if sys.argv[1:] == ["--version"]:
        # As click says it, whose import takes ten times as long.
        print(f"nodeready, version {__version__}")
        return
    from nodeready.cli import main as run

    try:
        run()
    finally:
        handle_signals(signal.SIG_IGN)


if __name__ == "__main__":
    main()

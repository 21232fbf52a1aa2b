"""The start of the command, also as `python -m nodeready`: a signal ends it quietly."""

from nodeready.exit_codes import ignore_signals, leave_on_signals


def main() -> None:
    """Run the command line; ends the process with the documented exit code."""
    leave_on_signals()
    from nodeready.cli import main as run

    try:
        run()
    finally:
        ignore_signals()


if __name__ == "__main__":
    main()

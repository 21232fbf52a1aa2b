"""Ctrl-C when the command was started with SIGINT ignored, as a script's shell starts it."""

import subprocess
import sys

import pytest

HUNG_UP = """
import os, signal, time
from nodeready.cli import interrupt_on_signals
interrupt_on_signals()
try:
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(0)
    print("goes on")
except KeyboardInterrupt:
    print("ended")
"""


@pytest.mark.parametrize(("start", "said"), [("trap '' HUP", "goes on"), ("trap - HUP", "ended")])
def test_a_terminal_that_is_closed_ends_a_command_unless_it_was_to_outlive_it(start, said):
    argv = ["sh", "-c", f'{start}; exec "$@"', "sh", sys.executable, "-c", HUNG_UP]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split("\n")[0] == said, done


HEARS = {
    "the command": "from nodeready.cli import interrupt_on_signals as hear; hear()",
    "the program on the node": (
        "from nodeready.agent.gate import main; main.exit_codes.handle_signals(main._terminate)"
    ),
}
WHAT = """
import os, signal, time
{hears}
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)
    print("ended", flush=True)
"""


@pytest.mark.parametrize("which", HEARS)
@pytest.mark.parametrize(
    ("start", "said"),
    [("trap '' INT", ["goes on", "ended"]), ("trap - INT", [])],
    ids=["in the background", "in the foreground"],
)
def test_ctrl_c_stays_ignored_and_sigterm_ends(start, said, which):
    code = WHAT.format(hears=HEARS[which])
    done = subprocess.run(
        ["sh", "-c", f'{start}; exec "$@"', "sh", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == said, done
    assert (done.returncode == 0) is bool(said), done

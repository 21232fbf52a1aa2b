"""Ctrl-C, a closed terminal and SIGTERM, as a script's shell or nohup has started the command."""

import subprocess
import sys

import pytest

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
    os.kill(os.getpid(), signal.SIG{signal})
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
@pytest.mark.parametrize(("signal", "ignored", "said"), [
    pytest.param("INT", "'' INT", ["goes on", "ended"], id="in the background"),
    pytest.param("INT", "- INT", [], id="in the foreground"),
    pytest.param("HUP", "'' HUP", ["goes on"], id="to outlive the terminal"),
    pytest.param("HUP", "- HUP", [], id="on a terminal"),
])  # fmt: skip
def test_an_ignored_signal_stays_ignored_and_sigterm_ends(signal, ignored, said, which):
    """A second signal, where it is not ignored, ends what the first one has interrupted."""
    code = WHAT.format(hears=HEARS[which], signal=signal)
    done = subprocess.run(
        ["sh", "-c", f'trap {ignored}; exec "$@"', "sh", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == said, done
    assert (done.returncode == 0) is ("ended" in said), done

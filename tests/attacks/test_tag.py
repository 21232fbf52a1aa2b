"""The word that marks a run's processes ends nobody else's: everybody can read it."""

from __future__ import annotations

from nodeready import shell
from tests.command import wait_for

_TAG = "nodeready:0123456789ab"
#: As a daemon that runs a program of hers in its own process group (a mail server's ~/.forward).
_DAEMON = """
exec setsid sh -c '
    setpriv --reuid=4001 --regid=4001 --clear-groups sh /home/mallory/forward &
    sleep 601; :' >/dev/null 2>&1 </dev/null &
"""


def test_a_process_that_bears_the_tag_takes_no_service_with_it(fresh_node, mallory):
    def running(what: str) -> bool:
        return fresh_node.enter(["pgrep", "-f", what], check=False).returncode == 0

    mallory.run(f"echo \"exec sh -c 'sleep 600; :' {_TAG}\" >forward")
    fresh_node.enter(["sh", "-c", _DAEMON])
    fresh_node.enter(["sh", "-c", f"setsid sh -c 'sleep 602; :' {_TAG} >/dev/null 2>&1 &"])
    wait_for(lambda: all(map(running, ("sleep 600", "sleep 601", "sleep 602"))))
    script = f"{shell.library('end')}nr_end '[n]odeready:0123456789ab'"
    line, stdin = shell.command(script, 5, "nodeready:end")
    fresh_node.run(line, input=stdin)
    # What root's run started is ended; a service that had her process for a child is not.
    wait_for(lambda: not running("^sleep 602"))
    assert running("^sleep 601")

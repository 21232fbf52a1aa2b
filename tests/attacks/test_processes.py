"""What an ordinary user can do to root's processes and those started as her, and they to hers."""

from __future__ import annotations

from nodeready.core import shell
from tests.builders.proof import configured, line, put_py_spy
from tests.command import kernel_cores, wait_for

_SECRET = "token-of-roots-1f0c"

#: She ends each canary so that it leaves a core, which is hers, and keeps what /proc says of it.
_CRASHES = r"""
import glob, os, signal, time
seen = {os.getpid()}
open("waits", "w").close()
while True:
    for path in glob.glob("/proc/[0-9]*"):
        pid = int(path[6:])
        try:
            if pid in seen or b"nodeready_canary" not in open(f"{path}/cmdline", "rb").read():
                continue
            seen.add(pid)
            with open("status", "a") as log:
                log.writelines(row for row in open(f"{path}/status") if row[:3] in ("Gid", "Gro"))
            os.kill(pid, signal.SIGSEGV)
        except OSError:
            pass
    time.sleep(0.01)
"""


def test_a_canary_of_hers_has_neither_roots_environment_nor_roots_groups(mallory):
    node = mallory.node
    put_py_spy(node)
    # A canary works in /.
    cores = kernel_cores(node, "/")
    mallory.start("sh", "-c", 'cd; exec python3 -c "$0"', _CRASHES)
    wait_for(lambda: mallory.run("test -e waits", check=False).returncode == 0)
    command = line(configured(user="mallory", wanted=("attach",)))
    roots = f"export NODEREADY_TEST={_SECRET}; ulimit -c unlimited; {command.line}"
    node.run(roots, input=command.stdin, check=False)
    wait_for(lambda: mallory.run(f"ls {cores}", check=False).returncode == 0)
    assert mallory.run(f"grep -la {_SECRET} {cores}", check=False).stdout == ""
    groups = set(mallory.run("cat status").stdout.split())
    assert groups <= {"Gid:", "Groups:", "4001"}


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

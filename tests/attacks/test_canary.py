"""What root starts as the job's user, to look into it, has nothing of root's."""

from __future__ import annotations

from tests.attacks.conftest import Person
from tests.builders.proof import configured, line, put_py_spy
from tests.command import wait_for

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


def test_a_canary_of_hers_has_neither_roots_environment_nor_roots_groups(mallory: Person) -> None:
    node = mallory.node
    put_py_spy(node)
    # The kernel's pattern is this machine's: a core lies where the program works.
    node.enter(["chmod", "1777", "/"])
    mallory.start("sh", "-c", 'cd; exec python3 -c "$0"', _CRASHES)
    wait_for(lambda: mallory.run("test -e waits", check=False).returncode == 0)
    command = line(configured(user="mallory", wanted=("attach",)))
    roots = f"export NODEREADY_TEST={_SECRET}; ulimit -c unlimited; {command.line}"
    node.run(roots, input=command.stdin, check=False)
    wait_for(lambda: mallory.run("ls /core*", check=False).returncode == 0)
    assert mallory.run(f"grep -la {_SECRET} /core*", check=False).stdout == ""
    groups = set(mallory.run("cat status").stdout.split())
    assert groups <= {"Gid:", "Groups:", "4001"}

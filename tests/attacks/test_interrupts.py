"""Ended at any moment, a command leaves nothing half-written and nothing of its own.

By default some moments are tried; NODEREADY_KILLS says how many, in each of the tests.
"""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.command import ours, wait_for
from tests.paths import ROOT

TIMES = int(os.environ.get("NODEREADY_KILLS", "3"))
SEED = 20

#: The names of all modules that Python imports, in their order, to a file; before the one that AT
#: names, the process gets the signal NUMBER.
_AT = """
import os, sys
class Names:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == os.environ.get("AT"):
            os.kill(os.getpid(), int(os.environ["NUMBER"]))
        if "NAMES" in os.environ:
            with open(os.environ["NAMES"], "a") as file:
                file.write(name + "\\n")
sys.meta_path.insert(0, Names)
"""
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def test_an_interrupt_during_the_imports_is_silent(tmp_path):
    """Also before the command's own handlers stand, and of the program on a node."""
    (tmp_path / "sitecustomize.py").write_text(_AT)
    program = tmp_path / "nodeready.pyz"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "HOME": str(tmp_path)}
    argv = [sys.executable, "-m", "nodeready", "bundle", "-o", str(program)]
    subprocess.run(argv, env=environment, check=True, capture_output=True, cwd=tmp_path)
    chosen = random.Random(SEED)
    for words in (
        ["-m", "nodeready", "audit", "no-such-inventory.py"],
        ["-m", "nodeready", "explain", "ptrace.scope"],
        [str(program), "audit", "--only", "no.such"],
    ):
        command = [sys.executable, *words]
        names = tmp_path / "names"
        names.unlink(missing_ok=True)
        subprocess.run(
            command, env={**environment, "NAMES": str(names)}, check=False, capture_output=True
        )
        imported = list(dict.fromkeys(names.read_text().split()))
        # From the first module of the command itself on: until then, Python starts.
        first = "nodeready.cli" if "-m" in words else "nodeready.agent.gate.main"
        imported = imported[imported.index(first) + 1 :]
        for name in [imported[0], *chosen.sample(imported, min(TIMES, len(imported)))]:
            number = chosen.choice(INTERRUPTS)
            more = {"AT": name, "NUMBER": str(int(number))}
            done = subprocess.run(
                command, env={**environment, **more}, check=False, capture_output=True, text=True
            )
            assert done.returncode == 130, (name, number, done)
            assert done.stderr.strip() in ("", "nodeready: interrupted"), (name, number, done)


#: What a deploy of these subjects writes on a node, once it has come to its end.
_WRITTEN = """
find /etc /usr/local -xdev -newer /run/before -type f -exec sha256sum {} +
"""
SUBJECTS = {"deploy": "ptrace,limits,core_dumps,pdsh", "the gate's program": "gate"}


def files(node) -> dict[str, str]:
    """Path -> digest of what was written since /run/before."""
    rows = (line.split(None, 1) for line in node.enter(["sh", "-c", _WRITTEN]).stdout.splitlines())
    return {path: digest for digest, path in rows}


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["killed", "interrupted"])
@pytest.mark.parametrize("what", SUBJECTS)
def test_a_deploy_that_is(how, what, fresh_node, fleet, tool):
    """Nothing half-written, nothing left, and the next run converges."""
    where = fleet([fresh_node], gate=True, lock_wait_s=30)
    words = ("deploy", where, "--yes", "--only", SUBJECTS[what])
    fresh_node.enter(["touch", "-d", "-1 hour", "/run/before"])
    before = files(fresh_node)
    fresh_node.enter(["touch", "/run/before"])
    began = time.monotonic()
    tool(*words, status=0)
    lasted = time.monotonic() - began
    whole = files(fresh_node)
    assert whole, "a deploy that writes nothing shows nothing"
    chosen = random.Random(f"{SEED} {how} {what}")
    for number in range(TIMES):
        undo = 'sysctl -qw kernel.yama.ptrace_scope=1; rm -f -- "$@"'
        fresh_node.enter(["sh", "-c", undo, "sh", *(path for path in whole if path not in before)])
        running = tool.start(*words)
        time.sleep(chosen.uniform(0.2, 1) * lasted)
        on_node = how == "killed" and number % 2
        if on_node:
            fresh_node.enter(["pkill", "-KILL", "-f", "nodeready:"], check=False)
        elif running.poll() is None:
            kills = (signal.SIGKILL,) if how == "killed" else INTERRUPTS
            running.send_signal(chosen.choice(kills))
        ended = tool.end(running)
        # 1, 3: a step or a look was killed on the node; 0: it had come to its end.
        fine = (0, 1, 3, 4) if on_node else (0, -9) if how == "killed" else (0, 130)
        assert ended.status in fine, (number, ended)
        wait_for(lambda: not [line for line in ours(fresh_node) if ".nodeready." not in line])
        for path, digest in files(fresh_node).items():
            if "/.nodeready." not in path:
                assert digest in (whole.get(path), before.get(path)), (number, path, ended)
        if number % 3 != 2 and number != TIMES - 1:
            # The next one finds what this one left.
            continue
        tool(*words, status=0)
        assert files(fresh_node) == whole, number
        assert ours(fresh_node) == [], number

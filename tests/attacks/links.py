"""What a user of a machine plants where root writes, as plain scripts for any machine.

The same list runs on nodes of the lab and in the virtual machine, whose kernel can be told not to
protect root from links, pipes and files of others (protected_symlinks, protected_fifos,
protected_regular: proc_sys_fs(5)).
"""

import base64
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nodeready.core.policy import Policy, as_data
from nodeready.fleet.transport import bundle
from nodeready.runs.deploy.actions import Action, MakeDirectory, RemoveFile, StepChange, WriteFile
from tests.cases import read, read_data
from tests.paths import PACKAGE

#: Runs a shell script as root; its standard input is the second word.
Root = Callable[[str, str], "subprocess.CompletedProcess[str]"]

PROGRAM = "/root/nodeready.pyz"
#: An ordinary user, whether the machine knows her name or not.
MALLORY = 4001

#: What root has: a file and a directory that nobody else may change, a sticky directory for all,
#: an exporter's directory, and a link of root's into it.
_GROUNDS = read_data(__file__, "grounds.sh")
_STATE = read_data(__file__, "roots.sh")


@dataclass(frozen=True)
class Attack:
    """One thing that somebody plants."""

    name: str
    plant: str  # her script
    root: str  # root's command
    told: str  # what it says about it on standard error
    intact: str = ":"  # a command whose output stays the same, beside what root has
    # the same writing without a look at the machine, where that would take minutes
    brief: str = ""


def change(*actions: Action) -> str:
    return StepChange("attack.links", (), actions).script("attack", "root@test", 0)


def _report(path: str) -> str:
    return f"timeout 60 python3 -I -S {PROGRAM} audit --only ptrace -o {path} </dev/null"


def _record(textfile: str) -> str:
    policy = json.dumps({**as_data(Policy()), "gate_textfile": textfile})
    write = f"printf %s {shlex.quote(policy)} >/root/policy.json"
    return (
        f"{write}; timeout 60 python3 -I -S {PROGRAM} record --policy /root/policy.json </dev/null"
    )


def _brief(path: str) -> str:
    words = f"""
import sys
from pathlib import Path
sys.path.insert(0, "/root/alone")
from files import write_atomically
try:
    write_atomically(Path({path!r}), ["new"])
except OSError as error:
    sys.exit(f"{{error.strerror}}: {{error.filename}}")
"""
    return f"timeout 60 python3 -I -S -c {shlex.quote(words)} </dev/null"


def _ours(path: str) -> WriteFile:
    return WriteFile(path, b"ours\n", None, owned=True)


#: What root does -> the script of it, for a path.
_COMMANDS: dict[str, Callable[[str], str]] = {
    "report": _report,
    "record": _record,
    "directory": lambda path: change(MakeDirectory(path, "1777")),
    "write": lambda path: change(_ours(path)),
    "remove": lambda path: change(RemoveFile(path)),
}


def _attack(name: str, plant: str, root: list[str], told: str, intact: str = ":") -> Attack:
    kind, path = root
    brief = _brief(path) if kind in ("report", "record") else ""
    return Attack(name, plant, _COMMANDS[kind](path), told, intact, brief)


ATTACKS = [_attack(**row) for row in read(Path(__file__).with_name("links.json"))]

#: She exchanges a directory and a link to root's (renameat2, RENAME_EXCHANGE), as fast as she can.
SWAP = """
import ctypes, os, sys
os.makedirs("/srv/prom/sub", exist_ok=True)
os.symlink("/root/dir", "/srv/prom/link")
libc = ctypes.CDLL(None)
while True:
    libc.renameat2(-100, b"/srv/prom/sub", -100, b"/srv/prom/link", 2)
"""
#: In a directory of root's that her group may write to, she puts a link in the place of every file
#: that root is about to write.
HUNT = """
import os
at = "/srv/team"
while True:
    for name in os.listdir(at):
        if name.startswith(".nodeready."):
            try:
                os.unlink(f"{at}/{name}")
                os.symlink("/root/victim", f"{at}/{name}")
            except OSError:
                pass
"""
HUNTED = f"""
    i=0; while [ $i -lt 60 ]; do i=$((i + 1)); ({change(_ours("/srv/team/site.conf"))}); done
"""
#: Root's commands meanwhile, each of them often.
UNDER_SWAP = {
    "the textfile": r"""
        python3 -I -c 'import sys; from pathlib import Path
sys.path.insert(0, "/root/nodeready.pyz")
from nodeready.core.files import write_atomically
for _ in range(1000):
    try: write_atomically(Path("/srv/prom/sub/planted"), ["x"])
    except OSError: pass'
    """,
    "a change": f"""
        i=0; while [ $i -lt 60 ]; do i=$((i + 1)); (
        {change(MakeDirectory("/srv/prom/sub", "1777"))}
        ); ( {change(RemoveFile("/srv/prom/sub/nodeready.prom"))} ); done
    """,
}


class Machine:
    """A machine on which root and mallory work. program: whether root has the whole of it there"""

    def __init__(self, root: Root, program: bool = True) -> None:
        self.root = root
        self.done(f"id mallory >/dev/null 2>&1 || useradd -m -u {MALLORY} mallory")
        self.done("umask 077; mkdir -p /root/alone; cat >/root/alone/files.py", _alone())
        if program:
            self.done(f"umask 077; base64 -d >{PROGRAM}", _program())

    def done(self, script: str, given: str = "") -> str:
        """Root's script, to its end: what it printed. Raises AssertionError when it fails."""
        done = self.root(script, given)
        assert done.returncode == 0, (script, done.stdout, done.stderr)
        return done.stdout

    def fresh(self) -> None:
        self.done(_GROUNDS)

    def state(self) -> str:
        return self.done(_STATE)


def _alone() -> str:
    return (PACKAGE / "core/files.py").read_text()


def _program() -> str:
    return base64.b64encode(bundle.program()).decode()


def attack(machine: Machine, one: Attack, brief: bool = False) -> str:
    """Plant it and run root's command, in one script. Returns what root's command said.

    Raises AssertionError when something of root's changed, or something of hers that must not.
    """
    become = f"setpriv --reuid={MALLORY} --regid={MALLORY} --clear-groups --"
    command = one.brief if brief and one.brief else one.root
    printed = machine.done(f"""
({_GROUNDS}) || exit 1
cd /
{become} sh -c {shlex.quote(one.plant)} || exit 1
({_STATE}
{one.intact})
echo =====
({command}
) 2>&1
echo "===== $?"
({_STATE}
{one.intact})
exit 0
""")
    before, said, after = re.split(r"=====.*\n", printed)
    assert after == before, (one.name, printed)
    assert "\n===== 124\n" not in printed, (one.name, "it waited", printed)
    return said

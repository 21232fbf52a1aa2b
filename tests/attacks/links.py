"""What a user of a machine plants where root writes, as plain scripts for any machine.

The same list runs on nodes of the lab and in the virtual machine, whose kernel can be told not to
protect root from links, pipes and files of others (protected_symlinks, protected_fifos,
protected_regular: proc_sys_fs(5)).
"""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from nodeready.deploy.actions import Action, Change, Directory, RemoveFile, WriteFile
from nodeready.policy import Policy
from nodeready.policy.load import as_data
from nodeready.transport import bundle

#: Runs a shell script as root; its standard input is the second word.
Root = Callable[[str, str], "subprocess.CompletedProcess[str]"]

PROGRAM = "/root/nodeready.pyz"
#: An ordinary user, whether the machine knows her name or not.
MALLORY = 4001

#: What root has: a file and a directory that nobody else may change, a sticky directory for all,
#: an exporter's directory, and a link of root's into it.
_GROUNDS = f"""
rm -rf /root/victim /root/dir /scratch /srv/prom /etc/site.d
umask 022
echo precious >/root/victim; chmod 600 /root/victim
mkdir -m 700 /root/dir; echo precious >/root/dir/nodeready.prom
mkdir -m 1777 /scratch; mkdir -p /srv; mkdir /srv/prom; chown {MALLORY}:{MALLORY} /srv/prom
ln -s /srv/prom /etc/site.d
"""
_STATE = """
stat -c '%n %F %a %u %g %s' /root/victim /root/dir; sha256sum /root/victim
find /root/dir -mindepth 1 | sort; cat /root/dir/*
"""


@dataclass(frozen=True)
class Attack:
    """One thing that somebody plants.

    plant:   her script
    root:    root's command
    told:    what it says about it on standard error
    intact:  a command whose output stays the same, beside what root has
    """

    name: str
    plant: str
    root: str
    told: str
    intact: str = ":"


def change(*actions: Action) -> str:
    """A change of a deploy, as it runs on a node."""
    return Change("attack.links", (), actions).script("attack", "root@test", 0)


def _report(path: str) -> str:
    return f"timeout 60 python3 -I {PROGRAM} audit --only ptrace -o {path} </dev/null"


def _record(textfile: str) -> str:
    policy = json.dumps({**as_data(Policy()), "gate_textfile": textfile})
    write = f"printf %s {shlex.quote(policy)} >/root/policy.json"
    return f"{write}; timeout 60 python3 -I {PROGRAM} record --policy /root/policy.json </dev/null"


def _ours(path: str) -> WriteFile:
    return WriteFile(path, b"ours\n", None, owned=True)


ATTACKS = (
    Attack(
        "a link where root's report goes",
        "ln -s /root/victim /scratch/report",
        _report("/scratch/report"),
        "a link of mallory: not followed: /scratch/report",
    ),
    Attack(
        "a link above root's report",
        "ln -s /root/dir /scratch/reports",
        _report("/scratch/reports/report"),
        "a link of mallory: not followed: /scratch/reports",
    ),
    Attack(
        "a pipe where root's report goes",
        "mkfifo /scratch/report; (timeout 30 cat /scratch/report >/scratch/caught) "
        ">/dev/null 2>&1 &",
        _report("/scratch/report"),
        "a pipe of mallory: not followed: /scratch/report",
        "cat /scratch/caught",
    ),
    Attack(
        "a file where root's report goes",
        "echo hers >/scratch/report; chmod 666 /scratch/report",
        _report("/scratch/report"),
        "a file of mallory: not followed: /scratch/report",
        "cat /scratch/report",
    ),
    Attack(
        "a link for the exporter's file",
        "ln -s /root/victim /srv/prom/nodeready.prom",
        _record("/srv/prom/nodeready.prom"),
        "a link of mallory: not followed: /srv/prom/nodeready.prom",
    ),
    Attack(
        "a link above the exporter's file",
        "ln -s /root/dir /srv/prom/sub",
        _record("/srv/prom/sub/nodeready.prom"),
        "a link of mallory: not followed: /srv/prom/sub",
    ),
    Attack(
        "a pipe for the exporter's file",
        "mkfifo /srv/prom/nodeready.prom",
        _record("/srv/prom/nodeready.prom"),
        "a pipe of mallory: not followed: /srv/prom/nodeready.prom",
    ),
    Attack(
        "a setuid file for the exporter's file",
        "echo >/srv/prom/nodeready.prom; chmod 6777 /srv/prom/nodeready.prom",
        _record("/srv/prom/nodeready.prom"),
        "",
        "find /srv/prom -user 0 -perm /6022",
    ),
    Attack(
        "a link for the core directory",
        "ln -s /root/dir /scratch/cores",
        change(Directory("/scratch/cores", "1777")),
        "/scratch/cores: a link of mallory: not followed",
    ),
    Attack(
        "a directory of hers for the core directory",
        "mkdir -m 700 /scratch/cores",
        change(Directory("/scratch/cores", "1777")),
        "/scratch/cores: a directory of mallory: not changed",
        "stat -c '%a %u' /scratch/cores",
    ),
    Attack(
        "a link that root's own link leads to",
        "ln -s /root/victim /srv/prom/site.conf",
        change(_ours("/etc/site.d/site.conf")),
        "/etc/site.d/site.conf: /srv/prom/site.conf: a link of mallory: not followed",
    ),
    Attack(
        "a file of hers that a change would keep as hers",
        "echo hers >/scratch/site.conf",
        change(_ours("/scratch/site.conf")),
        "/scratch/site.conf: /scratch, a directory of root: others can write there",
        "cat /scratch/site.conf",
    ),
    Attack(
        "a link above a file that root removes",
        "ln -s /root/dir /srv/prom/sub",
        change(RemoveFile("/srv/prom/sub/nodeready.prom")),
        "/srv/prom/sub: a link of mallory: not followed",
    ),
)

#: She exchanges a directory and a link to root's (renameat2, RENAME_EXCHANGE), as fast as she can.
SWAP = """
import ctypes, os, sys
os.makedirs("/srv/prom/sub", exist_ok=True)
os.symlink("/root/dir", "/srv/prom/link")
libc = ctypes.CDLL(None)
while True:
    libc.renameat2(-100, b"/srv/prom/sub", -100, b"/srv/prom/link", 2)
"""
#: Root's commands meanwhile, each of them often.
UNDER_SWAP = {
    "the textfile": r"""
        python3 -I -c 'import sys; from pathlib import Path
sys.path.insert(0, "/root/nodeready.pyz")
from nodeready.files import write_atomically
for _ in range(1000):
    try: write_atomically(Path("/srv/prom/sub/planted"), ["x"])
    except OSError: pass'
    """,
    "a change": f"""
        i=0; while [ $i -lt 60 ]; do i=$((i + 1)); (
        {change(Directory("/srv/prom/sub", "1777"))}
        ); ( {change(RemoveFile("/srv/prom/sub/nodeready.prom"))} ); done
    """,
}


class Machine:
    """A machine on which root and mallory work."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.root(f"umask 077; base64 -d >{PROGRAM}", _program())
        self.root(f"id mallory 2>/dev/null || useradd -m -u {MALLORY} mallory", "")

    def mallory(self, script: str) -> None:
        """Her script, to its end."""
        become = f"setpriv --reuid={MALLORY} --regid={MALLORY} --clear-groups --"
        done = self.root(f"cd /; {become} sh -c {shlex.quote(script)}", "")
        assert done.returncode == 0, done.stderr

    def state(self, more: str = ":") -> str:
        """What root has, and what this command prints."""
        return self.root(f"{_STATE}\n{more}", "").stdout

    def fresh(self) -> None:
        """The grounds as they are before she comes."""
        done = self.root(_GROUNDS, "")
        assert done.returncode == 0, done.stderr


def _program() -> str:
    return base64.b64encode(bundle.program()).decode()


def attack(machine: Machine, one: Attack) -> str:
    """Plant it and run root's command. Returns what root's command said on standard error.

    Raises AssertionError when something of root's changed, or something of hers that must not.
    """
    machine.fresh()
    machine.mallory(one.plant)
    before = machine.state(one.intact)
    done = machine.root(one.root, "")
    after = machine.state(one.intact)
    assert after == before, (one.name, before, after, done.stdout, done.stderr)
    assert done.returncode != 124, (one.name, done.stdout, done.stderr)
    return done.stderr

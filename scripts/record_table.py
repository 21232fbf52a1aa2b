"""The commands that `record.py` records, on the nodes that they need.

A lane is a function: it starts a lab, calls its `Lane` with the name and the words of each
command, and breaks nodes in between. Lanes run beside each other, the commands of one in order.
The lab of a lane is ended after it.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from record import Lane

LABS = Path("/run/nodeready/lab")
INVENTORY = "inventories/lab.py"
PROFILES = ("cpu", "h100", "a100", "mi300x")
FORMATS = ("table", "json", "junit", "prometheus", "nagios")
COMMANDS = (
    "audit",
    "bundle",
    "completion",
    "cores",
    "deploy",
    "env",
    "explain",
    "lab",
    "lab up",
    "lab down",
    "lab status",
    "learn",
    "ready",
    "stacks",
    "tail",
)

#: Ranks of a job that hangs: where is told by its argument.
TRAIN = """\
import os, sys, time
def stand():
    open("/run/job/at-" + os.environ["RANK"], "w").close()
    time.sleep(3600)
def all_reduce():
    stand()
def load_batch():
    stand()
def train():
    globals()[sys.argv[1]]()
train()
"""
#: What `py-spy dump` prints, collected from two nodes.
DUMP = """\
Process {pid}: /usr/bin/python3 train.py --rank {rank}
Python v3.11.2 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
    {leaf} (train.py:{line})
    train (train.py:40)
    <module> (train.py:44)
"""
CRASH = """
set -eu
mkdir -p -m 1777 /var/crash
mkdir -m 777 /var/crash/now
cd /var/crash/now
ulimit -c unlimited
env -i RANK={rank} SLURM_JOB_ID=88 PATH=/usr/bin:/bin \
    /usr/bin/python3 -c 'import ctypes; ctypes.string_at(0)' & pid=$!
wait $pid || :
mv core* /var/crash/core.python3.$pid.$(uname -n).{time}
rmdir /var/crash/now
echo $pid
"""


def static(lane: Lane) -> None:
    """What needs no node: help, explanations, mistakes."""
    lane("help", "--help")
    lane("version", "--version")
    lane("nothing")
    for command in COMMANDS:
        lane(f"help.{command.replace(' ', '-')}", *command.split(), "--help")
    for shell in ("bash", "zsh", "fish"):
        lane(f"completion.{shell}", "completion", shell)
    lane("explain", "explain")
    listed = lane.checked([lane.recorder.python, "-m", "nodeready", "explain"])
    checks = sorted(set(re.findall(r"\b[a-z_]+\.[a-z_]+\b", listed)))
    subjects = sorted({check.partition(".")[0] for check in checks})
    lane("explain.every-check", "explain", *checks)
    lane("explain.every-subject", "explain", *subjects)
    lane("explain.color", "explain", "ptrace.scope", "--color", "always")
    lane("explain.unknown", "explain", "ptrace.scop")
    lane("lab.faults", "lab", "up", "--fault", "list")
    lane("lab.bad-fault", "lab", "up", "--name", "rec-none", "--fault", "nosuch")
    lane("lab.bad-profile", "lab", "up", "--name", "rec-none", "--profile", "nosuch")
    lane("lab.bad-name", "lab", "up", "--name", "9")
    lane("lab.down-none", "lab", "down", "--name", "rec-none")
    texts(lane)
    mistakes(lane)
    lane("bundle.default", "bundle", "-o", "{out}/nodeready.pyz")


def mistakes(lane: Lane) -> None:
    """What a user can have wrong, before any node is asked."""
    two = lane.tmp / "two.py"
    two.write_text("gpu = ['gpu001', 'gpu002']\nlogin = ['login1']\n")
    inventories = {
        "empty": "lab = []\n",
        "syntax": "a = 1\nlab = [\n",
        "raises": "lab = [1 / 0]\n",
    }
    for name, text in inventories.items():
        (lane.tmp / f"{name}.py").write_text(text)
        lane(f"mistake.inventory-{name}", "audit", f"{{tmp}}/{name}.py")
    policies = {
        "misspelt": "ptrace_scop = 0\n",
        "several": "ptrace_scope = 7\ncore_pattern = 'core'\n",
        "fails": "x = undefined\n",
        "waiver": "waivers = {'ptrace.scop': 'until Monday'}\n",
    }
    for name, text in policies.items():
        place = lane.tmp / name
        (place / "group_data").mkdir(parents=True)
        (place / "inventory.py").write_text(two.read_text())
        (place / "group_data" / "all.py").write_text(text)
        for command in ("audit", "deploy", "bundle"):
            lane(f"mistake.policy-{name}.{command}", command, f"{{tmp}}/{name}/inventory.py")
    (lane.tmp / "twice.hosts").write_text("gpu001 slots=8\ngpu001 slots=4 max=x\n")
    wrong: dict[str, tuple[str, ...]] = {
        "command": ("adit",),
        "no-inventory": ("audit", "nosuch.py"),
        "no-argument": ("audit",),
        "two-arguments": ("deploy", "a", "b"),
        "directory": ("audit", "inventories"),
        "hostfile": ("audit", "{tmp}/twice.hosts"),
        "nodeset": ("audit", "gpu[1-"),
        "lab-not-running": ("audit", INVENTORY),
        "limit-unknown": ("audit", "{tmp}/two.py", "--limit", "gpu001,gpu02"),
        "limit-none": ("audit", "{tmp}/two.py", "--limit", ""),
        "limit-broken": ("audit", "{tmp}/two.py", "--limit", "gpu[1-"),
        "limit-last-failed": ("audit", "{tmp}/two.py", "--limit", "@last-failed"),
        "only-unknown": ("audit", "{tmp}/two.py", "--only", "ptrace.scop"),
        "only-none": ("audit", "{tmp}/two.py", "--only", ","),
        "zero-checks": ("audit", "{tmp}/two.py", "--only", "ptrace", "--skip", "ptrace"),
        "format": ("audit", "{tmp}/two.py", "--format", "xml"),
        "output": ("audit", "{tmp}/two.py", "-o", "/no/such/file"),
        "fail-on": ("audit", "{tmp}/two.py", "--fail-on", "never"),
        "timeout": ("audit", "{tmp}/two.py", "--timeout", "0"),
        "ssh-key": ("audit", "{tmp}/two.py", "--ssh-key", "nosuch"),
        "deploy-only": ("deploy", "{tmp}/two.py", "--only", "ptrase"),
        "deploy-option": ("deploy", "--nosuch"),
        "ready-ports": ("ready", "{tmp}/two.py", "--ports", "30-20"),
        "ready-user": ("ready", "{tmp}/two.py", "--user", "-x"),
        "ready-needed": ("ready", "{tmp}/two.py", "--nodes-needed", "9"),
        "ready-nothing": ("ready",),
        "ready-local-limit": ("ready", "--local", "--limit", "a"),
        "ready-hostfile-format": ("ready", "{tmp}/two.py", "--hostfile-format", "x"),
        "env-ports": ("env", "{tmp}/two.py", "--ports", "x"),
        "env-format": ("env", "{tmp}/two.py", "--format", "table"),
        "learn-exists": ("learn", "{tmp}/two.py", "-o", "{tmp}/two.py"),
        "bundle-output": ("bundle", "-o", "/no/such/file"),
        "bundle-two-policies": ("bundle", "{tmp}/two.py", "--limit", "nosuch"),
        "cores-since": ("cores", "{tmp}/two.py", "--since", "yesterday"),
        "cores-gcore": ("cores", "{tmp}/two.py", "--gcore", "1"),
        "cores-gcore-two": ("cores", "{tmp}/two.py", "--gcore", "4711", "--yes"),
        "cores-nothing": ("cores",),
        "tail-relative": ("tail", "{tmp}/two.py", "log/*"),
        "tail-grep": ("tail", "{tmp}/two.py", "/x", "--grep", "("),
        "tail-newer": ("tail", "{tmp}/two.py", "/x", "--newer", "soon"),
        "tail-nothing": ("tail",),
        "stacks-nothing": ("stacks",),
        "stacks-two": ("stacks", "@local", "--local"),
        "stacks-match": ("stacks", "--local", "--match", "("),
        "stacks-pid": ("stacks", "--local", "--pid", "0"),
        "stacks-timeout": ("stacks", "--local", "--timeout", "5"),
        "stacks-srun": ("stacks", "--via", "srun"),
        "stacks-srun-nodes": ("stacks", "--via", "srun", "--job", "1", "gpu001"),
        "stacks-from": ("stacks", "--from", "nosuch"),
        "stacks-from-none": ("stacks", "--from", "{tmp}/misspelt"),
        "stacks-from-text": ("stacks", "--from", "{tmp}/two.py"),
        "stacks-output": ("stacks", "--local", "-o", "{tmp}/two.py"),
    }
    for name, words in wrong.items():
        env = {"NODEREADY_LAB": "rec-none"} if name == "lab-not-running" else None
        lane(f"mistake.{name}", *words, env=env)
    lane("mistake.variable", "audit", "{tmp}/two.py", env={"NODEREADY_FORMAT": "xml"})
    for name, text in {"broken": "limit =\n", "unknown": "[deplyo]\nlimit = 'x'\n"}.items():
        place = lane.tmp / f"home-config-{name}" / ".config" / "nodeready"
        place.mkdir(parents=True)
        (place / "config.toml").write_text(text)
        lane(f"mistake.config-{name}", "audit", "{tmp}/two.py", home=f"config-{name}")
    place = lane.tmp / "home-config-good" / ".config" / "nodeready"
    place.mkdir(parents=True)
    (place / "config.toml").write_text("[audit]\nonly = 'ptrase'\n")
    lane("config.only", "audit", "{tmp}/two.py", home="config-good")
    lane("inventory.away", "audit", "{tmp}/two.py", "--ssh-user", "nobody")


def texts(lane: Lane) -> None:
    """What py-spy dump printed, collected by somebody else."""
    dumps = lane.tmp / "dumps"
    dumps.mkdir()
    for rank in range(4):
        leaf, line = ("load_batch", 12) if rank == 2 else ("all_reduce", 30)
        text = DUMP.format(pid=100 + rank, rank=rank, leaf=leaf, line=line)
        (dumps / f"gpu00{rank + 1}.txt").write_text(text)
    for form in ("table", "json", "html", "speedscope"):
        lane(f"stacks-from-texts.{form}", "stacks", "--from", "{tmp}/dumps", "--format", form)


def profile(kind: str) -> Callable[[Lane], None]:
    """An audit in all its forms, and what else depends on a node's hardware."""

    def run(lane: Lane) -> None:
        lane.up("--nodes", "3", "--profile", kind)
        for form in FORMATS:
            lane(f"audit.{form}", "audit", INVENTORY, "--format", form)
        lane("audit.quiet", "audit", INVENTORY, "-q")
        lane("audit.verbose", "audit", INVENTORY, "-v", "--limit", lane.node(1))
        lane("audit.only", "audit", INVENTORY, "--only", "gpus,nics.link,ptrace.scope", "-v")
        lane("audit.only-good", "audit", INVENTORY, "--only", "host,gpus,rdma,nics")
        lane("audit.only-good-quiet", "audit", INVENTORY, "--only", "host,gpus,rdma,nics", "-q")
        lane("audit.skip", "audit", INVENTORY, "--skip", "limits,ssh_client,ptrace.scope")
        lane("audit.fail-on", "audit", INVENTORY, "--only", "host,gpus,nics", "--fail-on", "warn")
        lane("audit.limit", "audit", INVENTORY, "--limit", lane.node(2))
        lane("audit.color", "audit", INVENTORY, "--only", "ptrace,host", "--color", "always")
        for form in ("json", "table"):
            out = ("-o", f"{{out}}/report.{form}")
            lane(f"audit.output-{form}", "audit", INVENTORY, "--format", form, *out)
        lane("audit.twice-1", "audit", INVENTORY, "--only", "nics,rdma", home="twice")
        lane("audit.twice-2", "audit", INVENTORY, "--only", "nics,rdma", "-v", home="twice")
        for form in ("sh", "json"):
            lane(f"env.{form}", "env", INVENTORY, "--format", form)
        lane("env.verbose", "env", INVENTORY, "-v", "--ports", "29600-29700")
        lane("env.output", "env", INVENTORY, "-o", "{out}/job.env")
        lane("learn", "learn", INVENTORY)
        lane("learn.output", "learn", INVENTORY, "--limit", lane.node(1), "-o", "{out}/kind.py")
        faults(lane, kind)

    return run


def faults(lane: Lane, kind: str) -> None:
    """Each fault of the lab on the last of three nodes, on one of the profiles that have it."""
    listed = lane.checked(
        [lane.recorder.python, "-m", "nodeready", "lab", "up", "--fault", "list"]
    )
    rows = [row.split() for row in listed.splitlines()[1:]]
    both = 0
    for fault, profiles, *_about in rows:
        if profiles == "h100,a100":
            both += 1
            where = ("h100", "a100")[both % 2]
        else:
            where = "cpu" if profiles == "all" else profiles.split(",")[0]
        if where != kind or not lane.recorder.wanted(f"{lane.name}.fault.{fault}.table"):
            continue
        lane.up("--nodes", "3", "--fault", fault)
        lane(f"fault.{fault}.table", "audit", INVENTORY)
        lane(f"fault.{fault}.json", "audit", INVENTORY, "--format", "json")


def deployed(lane: Lane) -> None:
    """A deploy, from the first look to the node's own program; then nodes that are away."""
    lane("lab.up", "lab", "up", "--name", f"rec{os.getpid():07d}deploy", "--nodes", "3")
    lane.up("--nodes", "3")
    lane("check", "deploy", INVENTORY, "--check")
    lane("check-diff", "deploy", INVENTORY, "--check", "--diff")
    lane("check-quiet", "deploy", INVENTORY, "--check", "-q")
    lane("check-only", "deploy", INVENTORY, "--check", "--only", "ptrace,limits", "-v", sort=True)
    lane("check-color", "deploy", INVENTORY, "--check", "--diff", "--color", "always")
    lane("nobody-to-ask", "deploy", INVENTORY)
    lane("only", "deploy", INVENTORY, "--only", "ptrace", "--yes", "--diff")
    lane("first", "deploy", INVENTORY, "--yes", home="deploy")
    lane("second", "deploy", INVENTORY, "--yes", home="deploy")
    lane("third-quiet", "deploy", INVENTORY, "--yes", "-q")
    lane("third-check", "deploy", INVENTORY, "--check", "--diff", "-v", sort=True)
    new = "-xdev -newer /etc/hostname -type f ! -name hosts"
    find = f"find /etc /usr/local /opt {new} -printf '%p %m %u:%g %s\\n'"
    sizes = [(r"(/etc/ssh/ssh_known_hosts .*) \d+$", r"\1 SIZE"), (r"(pyz .*) \d+$", r"\1 SIZE")]
    lane("files", argv=[*lane.inside(1), "sh", "-c", find], sort=True, more=sizes)
    show = "cd /etc; cat sysctl.d/*nodeready* security/limits.d/*nodeready* 2>&1; pdsh -V 2>&1"
    lane("contents", argv=[*lane.inside(1), "sh", "-c", show])
    for form in ("table", "json", "nagios"):
        lane(f"audit.{form}", "audit", INVENTORY, "--format", form)
    lane("audit.quiet", "audit", INVENTORY, "-q")
    ready(lane)
    bundle(lane)
    lane.on(2, "sysctl -w kernel.yama.ptrace_scope=1; rm /etc/security/limits.d/*nodeready*")
    lane("drifted.audit", "audit", INVENTORY)
    lane("drifted.deploy", "deploy", INVENTORY, "--yes", "--diff")
    away(lane)
    lane("lab.down", "lab", "down", "--name", lane.lab)
    lane("lab.down-again", "lab", "down", "--name", lane.lab)


#: How long the proofs took, and the ports that they happened to take.
PROVED = (
    (r"\b(in|after|within) \d+(\.\d+)? (s|ms)\b", r"\1 S s"),
    (r"\b\d+(\.\d+)? ms\b", "S ms"),
)


def ready(lane: Lane) -> None:
    """Go and no-go of nodes that were deployed."""
    for form in FORMATS:
        lane(f"ready.{form}", "ready", INVENTORY, "--format", form, more=PROVED)
    lane("ready.quiet", "ready", INVENTORY, "-q", more=PROVED)
    one = ("--limit", lane.node(1))
    lane("ready.user", "ready", INVENTORY, "--user", "ml", more=PROVED)
    lane("ready.verbose", "ready", INVENTORY, "--user", "ml", "-v", *one, more=PROVED)
    lane("ready.nobody", "ready", INVENTORY, "--user", "nosuch", more=PROVED)
    for form in ("hostfile", "list", "exclude"):
        words = ("--hostfile-format", form, "--hostfile-out", "{out}/hosts")
        lane(f"ready.hosts-{form}", "ready", INVENTORY, "--only", "ptrace,host", *words)
    words = ("--hostfile-format", "exclude", "--hostfile-out", "{out}/hosts", "--gpus", "8")
    lane("ready.hosts-none", "ready", INVENTORY, "--only", "gpus", *words)
    lane("ready.mesh", "ready", INVENTORY, "--only", "proof.mesh", "--full-mesh", more=PROVED)
    lane("ready.needed", "ready", INVENTORY, "--skip", "proof", "--nodes-needed", "2")
    lane("ready.too-many", "ready", INVENTORY, "--skip", "proof", "--nodes-needed", "9")
    lane("ready.output", "ready", INVENTORY, "--skip", "proof", "-o", "{out}/ready.txt")


def bundle(lane: Lane) -> None:
    """The node's own program, made here and used there."""
    lane("bundle", "bundle", INVENTORY, "-o", "{out}/nodeready.pyz")
    made = lane.tmp / "nodeready.pyz"
    named = ["env", f"NODEREADY_LAB={lane.lab}", lane.recorder.python, "-m", "nodeready"]
    lane.checked([*named, "bundle", INVENTORY, "-o", str(made)])
    pack = f"nsenter -t {lane.pid(1)} -m -- sh -c 'mkdir -p /opt/rec; cat >/opt/rec/nodeready.pyz'"
    lane.checked(["sh", "-c", f"{pack} <{shlex.quote(str(made))}"])
    own = [*lane.inside(1), "env", "-i", "/usr/bin/python3", "-I", "/opt/rec/nodeready.pyz"]
    lane("pyz.help", argv=[*own, "--help"])
    for command in ("audit", "ready", "record", "prolog", "healthcheck"):
        lane(f"pyz.help-{command}", argv=[*own, command, "--help"])
    for form in FORMATS:
        lane(f"pyz.audit-{form}", argv=[*own, "audit", "--format", form])
    lane("pyz.audit-only", argv=[*own, "audit", "--only", "ptrace,host"])
    lane("pyz.audit-mistake", argv=[*own, "audit", "--only", "ptrase"])
    lane("pyz.mistake", argv=[*own, "adit"])
    lane("pyz.ready", argv=[*own, "ready"], more=PROVED)
    lane("pyz.ready-json", argv=[*own, "ready", "--format", "json"], more=PROVED)
    lane("pyz.prolog-alone", argv=[*own, "prolog"])
    lane("pyz.record", argv=[*own, "record"])
    verdict = [*lane.inside(1), "cat", "/run/nodeready/verdict.json"]
    stamped = [
        (r'"time": ?\d[\d.]*', '"time": T'),
        (r'"policy_digest": ?"\w+"', '"policy_digest": D'),
    ]
    lane("pyz.verdict", argv=verdict, more=stamped)
    lane("pyz.prolog", argv=[*own, "prolog"])
    lane("pyz.healthcheck", argv=[*own, "healthcheck"])
    lane.on(1, "sysctl -qw kernel.yama.ptrace_scope=2")
    for number, command in enumerate(("prolog", "record", "prolog", "healthcheck")):
        lane(f"pyz.bad-{number}-{command}", argv=[*own, command])
    lane("pyz.bad-verdict", argv=verdict, more=stamped)
    lane.on(1, "sysctl -qw kernel.yama.ptrace_scope=0")
    lane.write(1, "/etc/nodeready/policy.json", '{"ptrace_scope": 9}')
    for command in ("audit", "record", "prolog"):
        lane(f"pyz.policy-{command}", argv=[*own, command])
    lane.on(1, "rm /etc/nodeready/policy.json")


def away(lane: Lane) -> None:
    """A node that refuses connections, and one without power."""
    lane.on(2, "kill $(cat /run/sshd.pid)")
    os.kill(lane.pid(3), signal.SIGKILL)
    for form in FORMATS:
        lane(f"away.audit-{form}", "audit", INVENTORY, "--only", "host,ptrace", "--format", form)
    lane("away.audit-quiet", "audit", INVENTORY, "--only", "host", "-q", home="away")
    lane("away.audit-last", "audit", INVENTORY, "--only", "host", "--limit", "@last-failed")
    lane("away.deploy-check", "deploy", INVENTORY, "--check")
    lane("away.deploy", "deploy", INVENTORY, "--yes", home="away")
    lane("away.deploy-last", "deploy", INVENTORY, "--yes", "--limit", "@last-failed", home="away")
    lane("away.ready", "ready", INVENTORY, "--skip", "proof")
    lane("away.env", "env", INVENTORY)
    lane("away.learn", "learn", INVENTORY)
    lane("away.tail", "tail", INVENTORY, "/var/log/nosuch*")
    lane("away.cores", "cores", INVENTORY)
    lane("away.stacks", "stacks", INVENTORY, "--interval", "0.3")
    mine = r"^(?!.*rec\w+deploy|nodeready).*\n?"
    lane("away.lab-status", "lab", "status", more=[(mine, ""), (r" +", " ")])
    lane("away.lab-up", "lab", "up", "--name", lane.lab)


def pyinfra(lane: Lane) -> None:
    """The same deploy through pyinfra's own command."""
    lane.up("--nodes", "2")
    own = [str(lane.recorder.checkout / ".venv/bin/pyinfra")]
    lane("one", argv=[*own, "-y", "--limit", lane.node(1), INVENTORY, "deploy.py"])
    # Several nodes write in any order.
    lane("dry", argv=[*own, "--dry", INVENTORY, "deploy.py"], sort=True)
    lane("first", argv=[*own, "-y", INVENTORY, "deploy.py"], sort=True)
    lane("second", argv=[*own, "-y", INVENTORY, "deploy.py"], sort=True)
    lane("audit", "audit", INVENTORY)
    lane("deploy", "deploy", INVENTORY, "--yes")


def stacks(lane: Lane) -> None:
    """A job that hangs: two ranks on each of three nodes."""
    lane.up("--nodes", "3")
    named = ["env", f"NODEREADY_LAB={lane.lab}", lane.recorder.python, "-m", "nodeready"]
    lane.checked([*named, "deploy", INVENTORY, "--only", "debug_tools", "--yes"])
    ranks: dict[int, str] = {}

    def start(rank: int, where: str = "all_reduce") -> None:
        number, at = rank // 2 + 1, f"/run/job/at-{rank}"
        words = (
            f"RANK={rank} LOCAL_RANK={rank % 2} WORLD_SIZE=6 "
            f"MASTER_ADDR={lane.node(1)} MASTER_PORT=29500"
        )
        run = f"setsid env -i {words} /usr/bin/python3 /run/job/train.py {where}"
        wait = f"for i in $(seq 300); do [ -e {at} ] && break; sleep 0.1; done"
        script = f"rm -f {at}; {run} </dev/null >/dev/null 2>&1 & p=$!; sleep 0.2; {wait}; echo $p"
        ranks[rank] = lane.on(number, script).strip()
        lane.pids.append(ranks[rank])

    def tell(rank: int, sign: str) -> None:
        lane.on(rank // 2 + 1, f"kill -{sign} {ranks[rank]}; sleep 0.3")

    for number in (1, 2, 3):
        lane.write(number, "/run/job/train.py", TRAIN)
    for rank in range(6):
        start(rank, "load_batch" if rank == 3 else "all_reduce")
    quick = ("stacks", INVENTORY, "--interval", "0.3")
    for form in ("table", "json", "html", "speedscope"):
        lane(form, *quick, "--format", form)
    lane("verbose", *quick, "-v")
    lane("quiet", *quick, "-q")
    lane("all-threads", *quick, "--all-threads", "--samples", "1")
    lane("native", *quick, "--native")
    lane("native-json", *quick, "--native", "--format", "json")
    lane("kept", *quick, "-o", "{tmp}/kept")
    if (lane.tmp / "kept").is_dir():
        listed = "for f in *; do echo $f $(stat -c %a $f); done; cat *"
        lane("kept-files", argv=["sh", "-c", f"cd {{tmp}}/kept; {listed}".format(tmp=lane.tmp)])
        for form in ("table", "json", "html", "speedscope"):
            lane(f"from.{form}", "stacks", "--from", "{tmp}/kept", "--format", form)
    lane("job", *quick, "--job", f"{lane.node(1)}:29500", "--limit", lane.node(1))
    lane("job-none", *quick, "--job", "4711")
    lane("match", *quick, "--match", "load_[b]atch")
    lane("match-none", *quick, "--match", "nothing like it")
    lane("pid", *quick, "--pid", ranks[4], "--limit", lane.node(3))
    tell(5, "KILL")
    tell(2, "STOP")
    lane("missing", *quick)
    lane("missing-json", *quick, "--format", "json")
    tell(2, "CONT")
    lane.on(1, "mv /usr/local/bin/py-spy /usr/local/bin/py-spy.away")
    lane("no-py-spy", *quick)
    lane("no-py-spy-json", *quick, "--format", "json")
    lane.on(3, "kill $(cat /run/sshd.pid)")
    lane("away", *quick)
    lane("away-json", *quick, "--format", "json")
    lane.on(3, "/usr/sbin/sshd")
    for rank in (0, 1, 2, 3, 4):
        tell(rank, "KILL")
    lane("no-rank", *quick)


def logs(lane: Lane) -> None:
    """`tail` and `cores`: logs and crashes of a job on three nodes."""
    lane.up("--nodes", "3")
    for number in (1, 2, 3):
        for rank in (2 * number - 2, 2 * number - 1):
            who = f"{lane.node(number)} [rank{rank}]"
            steps = [f"2026-03-01 12:00:{n:02},{rank}00 {who}: step {n}\n" for n in range(30)]
            text = "".join(steps)
            lane.write(number, f"/var/log/train/rank_{rank}.log", text)
    lane.write(3, "/var/log/train/rank_4.log", "step 1\n 10%|#\r 20%|##\rNCCL error\n")
    # The file that was written last is shown as the example.
    now = int(time.time())
    for rank in range(6):
        when = now - (7530 if rank == 1 else 30 - 2 * rank)
        lane.on(rank // 2 + 1, f"touch -d @{when} /var/log/train/rank_{rank}.log")
    lane.on(1, "mkfifo /var/log/train/rank_9.log")
    where = ("tail", INVENTORY, "/var/log/train/rank_*.log")
    for form in ("table", "json"):
        lane(f"tail.{form}", *where, "--format", form)
    lane("tail.one", *where, "-n", "1")
    lane("tail.verbose", *where, "-n", "1", "-v")
    lane("tail.quiet", *where, "-q")
    lane("tail.grep", *where, "--grep", r"step 1\d", "-n", "2")
    lane("tail.newer", *where, "--newer", "1h", "-n", "1")
    lane("tail.since", *where, "--since", "1h", "-n", "1")
    lane("tail.max-files", *where, "--max-files", "1", "-n", "1")
    lane("tail.limit", *where, "--limit", lane.node(2), "-o", "{out}/tail.txt")
    lane("tail.none", "tail", INVENTORY, "/var/log/nosuch/*")
    lane("tail.user", *where, "--ssh-user", "ml", "-n", "1")

    lane("cores.none", "cores", INVENTORY)
    for number in (1, 2, 3):
        pattern = "/var/crash/core.%e.%P.%h.%t"
        lane.on(number, f"echo {pattern} >/proc/sys/kernel/core_pattern")
    for number, rank, when in ((1, 0, 1001), (2, 1, 1000), (2, 2, 1002)):
        script = CRASH.format(rank=rank, time=when)
        lane.pids.append(lane.on(number, script).split()[-1])
    lane.on(3, "mkdir -p -m 1777 /var/crash; echo nothing >/var/crash/core.text.9010.x.5")
    size = ((r'("(size|size_bytes|bytes)":\s*)\d+', r"\1SIZE"), (r"\b\d+(\.\d+)? MB\b", "SIZE MB"))
    for form in ("table", "json"):
        lane(f"cores.{form}", "cores", INVENTORY, "--format", form, more=size)
    lane("cores.verbose", "cores", INVENTORY, "-v", more=size)
    lane(
        "cores.output", "cores", INVENTORY, "--limit", lane.node(1), "-o", "{out}/cores", more=size
    )
    lane("cores.job", "cores", INVENTORY, "--job", "88", "--limit", lane.node(1), more=size)
    lane("cores.job-none", "cores", INVENTORY, "--job", "89")
    lane("cores.since", "cores", INVENTORY, "--since", "2h", "-q", more=size)
    lane("cores.since-none", "cores", INVENTORY, "--since", "2100-01-01")
    lane("cores.user", "cores", INVENTORY, "--ssh-user", "ml", more=size)
    started = lane.on(3, "setsid sleep 3600 </dev/null >/dev/null 2>&1 & echo $!").strip()
    lane.pids.append(started)
    gcore = ("cores", INVENTORY, "--limit", lane.node(3), "--gcore", started)
    lane("cores.gcore-nobody-to-ask", *gcore)
    lane("cores.gcore", *gcore, "--yes", more=size)
    lane("cores.gcore-gone", *gcore[:-1], "99999", "--yes")


def slurm(lane: Lane) -> None:
    """The gate on nodes with GPUs and a real Slurm, and a job of it that hangs."""
    lane.up("--nodes", "2", "--profile", "h100", "--slurm")
    conf = LABS / lane.lab / "slurm.conf"
    (lane.tmp / "gate").mkdir()
    (lane.tmp / "gate" / "inventory.py").write_text(
        f"import runpy\nlab = runpy.run_path({INVENTORY!r})['lab']\n"
        "lab[1].update(gate=True, gate_drain=True)\n"
    )
    where = "{tmp}/gate/inventory.py"
    lane("check", "deploy", where, "--check", "--diff", "--only", "gate")
    lane("deploy", "deploy", where, "--yes")
    lane("again", "deploy", where, "--yes")
    # What is in them depends on the modules.
    sizes = [(r"^(.*\.pyz .*) \d+$", r"\1 SIZE")]
    found = "find /etc /usr/local -xdev -name '*nodeready*' -printf '%p %m %u:%g %s\\n'"
    lane("files", argv=[*lane.inside(1), "sh", "-c", found], sort=True, more=sizes)
    lane("audit", "audit", where, "--only", "gate", "--format", "json")
    prolog = (
        "p=$(find /usr/local -path '*nodeready*' -name '*prolog*' -type f | head -1); cat $p; $p"
    )
    lane("prolog", argv=[*lane.inside(1), "sh", "-c", prolog])
    pyz = "p=$(find /usr/local -name nodeready.pyz -type f | head -1); exec /usr/bin/python3 -I $p"
    states = ["sinfo", "-N", "-h", "-o", "%N %T %E"]
    slurm_env = {"SLURM_CONF": str(conf)}
    lane.on(1, "sysctl -qw kernel.yama.ptrace_scope=2")
    lane("drains", argv=[*lane.inside(1), "sh", "-c", f"{pyz} healthcheck"])
    # A node that has just been asked may have a star: it has not answered yet.
    star = [(r"\* ", " ")]
    lane("drains-state", argv=states, env=slurm_env, more=star)
    lane.on(1, "sysctl -qw kernel.yama.ptrace_scope=0")
    lane("resumes", argv=[*lane.inside(1), "sh", "-c", f"{pyz} healthcheck"])
    lane("resumes-state", argv=states, env=slurm_env, more=star)

    for number in (1, 2):
        lane.write(number, "/run/job/train.py", TRAIN.replace('"RANK"', '"SLURM_PROCID"'))
        lane.on(number, "chmod 1777 /run/job")
    place = "[ $SLURM_PROCID = 2 ] && w=load_batch || w=all_reduce"
    ranks = f"{place}; /usr/bin/python3 /run/job/train.py $w; :"
    words = ["--parsable", "-N2", "--ntasks-per-node=2", "-D", "/tmp", "-o", "/dev/null"]
    wrap = f"srun --ntasks-per-node=2 sh -c {shlex.quote(ranks)}"
    as_user = ["setpriv", "--reuid=ml", "--regid=ml", "--init-groups"]
    begin = [*lane.inside(1), *as_user]
    job = lane.checked([*begin, "sbatch", *words, "--wrap", wrap]).strip()
    lane.on(1, "for i in $(seq 300); do [ -e /run/job/at-1 ] && break; sleep 0.1; done")
    lane.on(2, "for i in $(seq 300); do [ -e /run/job/at-3 ] && break; sleep 0.1; done; sleep 1")
    tools = lane.tmp / "bin"
    tools.mkdir()
    for name in ("srun", "squeue", "scontrol"):
        path = tools / name
        path.write_text(f'#!/bin/sh\nexec {shlex.join([*begin, name])} "$@"\n')
        path.chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}"}
    for form in ("table", "json"):
        words = ["--via", "srun", "--job", job, "--interval", "0.3", "--format", form]
        lane(f"stacks.{form}", "stacks", *words, env=env)
    lane("stacks.no-job", "stacks", "--via", "srun", "--job", "999999", env=env)


def local(lane: Lane) -> None:
    """This machine, without any connection: only what does not depend on how it is set up."""
    path = {"PATH": f"{lane.recorder.checkout / '.venv/bin'}:{os.environ['PATH']}"}
    lane("audit", "audit", "@local", "--only", "ptrace", "--format", "json")
    lane("ready", "ready", "--local", "--only", "ptrace,proof.strace", more=PROVED)
    for rank in range(3):
        (lane.tmp / f"rank_{rank}.log").write_text(f"step {30 + (rank == 1)}\n")
    own = [(lane.tmp.parent.name, "TMPNAME"), (rf"\b{os.uname().nodename}\b", "HOST")]
    lane("tail", "tail", "--local", "{tmp}/rank_*.log", more=own)
    program = lane.tmp / "train.py"
    program.write_text(TRAIN.replace("/run/job", str(lane.tmp)))
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": lane.tmp.parent.name}
    env = {**os.environ, **job, "MASTER_PORT": "29500"}
    rank_0 = subprocess.Popen(["/usr/bin/python3", program, "all_reduce"], env=env)
    try:
        for _ in range(300):
            if (lane.tmp / "at-0").exists():
                break
            time.sleep(0.1)
        lane.pids.append(str(rank_0.pid))
        words = ("--local", "--job", f"{lane.tmp.parent.name}:29500", "--interval", "0.3")
        lane("stacks", "stacks", *words, env=path, more=own)
    finally:
        rank_0.kill()
        rank_0.wait()


LANES: dict[str, Callable[[Lane], None]] = {
    # The longest ones first.
    "deploy": deployed,
    "static": static,
    "cpu": profile("cpu"),
    "stacks": stacks,
    "h100": profile("h100"),
    "logs": logs,
    "a100": profile("a100"),
    "mi300x": profile("mi300x"),
    "pyinfra": pyinfra,
    "slurm": slurm,
    "local": local,
}

"""Slurm on a lab: the files of its machines, and the running Slurm.

The controller is a machine of the lab beside its nodes, so that Slurm's daemons see the nodes'
users and files, and this machine's /etc/slurm, /etc/munge and services do not change. It is no
node of the lab, and in no inventory.
"""

from __future__ import annotations

import base64
import re
import secrets
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from nodeready.lab import freezer, processes, state
from nodeready.lab.boot import STASH
from nodeready.lab.processes import Content
from nodeready.lab.programs import Done, environment, run
from nodeready.lab.state import LabError, LabState, NodeState, SlurmState

CONF = "/etc/slurm/slurm.conf"
SCRIPT = f"{STASH}/slurm"

# The addresses of a lab end with 510; its nodes are the first 500.
CONTROLLER_NUMBER = 509

# Each daemon, and its port (slurm.conf(5), SlurmctldPort and SlurmdPort) as /proc/net/tcp has it.
_SLURMCTLD = ("slurmctld", "1AA1")
_SLURMD = ("slurmd", "1AA2")

# Settings for a lab that differ from Slurm's defaults: few cores, and tests that wait for seconds.
_SETTINGS = {
    "SlurmUser": "root",
    "StateSaveLocation": "/var/lib/slurm/slurmctld",
    "SlurmdSpoolDir": "/var/lib/slurm/slurmd",
    "SlurmctldPidFile": "/run/slurmctld.pid",
    "SlurmdPidFile": "/run/slurmd.pid",
    "SlurmctldLogFile": "/var/log/slurm/slurmctld.log",
    "SlurmdLogFile": "/var/log/slurm/slurmd.log",
    "MailProg": "/bin/true",
    "MpiDefault": "none",
    "TaskPlugin": "task/none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CPU",
    "SlurmdParameters": "config_overrides",
    "ReturnToService": "2",
    "SlurmdTimeout": "15",
    "KillWait": "5",
    "UnkillableStepTimeout": "20",
    "SchedulerParameters": "sched_interval=2,bf_interval=2",
}
_CGROUP_CONF = f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={freezer.CGROUP_ROOT}\n"
# Jobs use these numbers rather than those of this machine (config_overrides).
_NODE = "CPUs=4 RealMemory=4096"

# Settings that may have several lines.
_REPEATED = {"nodename", "partitionname", "downnodes", "nodeset"}

_SETTING = re.compile(r"([A-Za-z]+)=[^\n]*")

# Starts the daemons, or restarts Slurm's. After a restart the daemon is no child of process 1, and
# has to join the group itself. A fault may make the root read-only, which needs mounts for
# directories with open files. The limits are those of Debian's slurmd.service.
_SCRIPT = """\
daemon={daemon}
cd /
if [ -e {root}/freezer/cgroup.procs ]; then echo $$ >{root}/freezer/cgroup.procs; fi
if ! munge -n >/dev/null 2>&1; then
    install -d -o munge -g munge -m 755 /run/munge
    install -d -o munge -g munge -m 700 /var/lib/munge /var/log/munge
    install -d -m 755 /var/lib/slurm/slurmctld /var/lib/slurm/slurmd /var/log/slurm
    chown munge:munge /etc/munge /etc/munge/munge.key
    if [ -e {stash}/fault ]; then
        for dir in /run /var/log /var/lib/munge /var/lib/slurm; do mount --bind $dir $dir; done
    fi
    setpriv --reuid=munge --regid=munge --clear-groups munged
fi
if pid=$(cat /run/$daemon.pid 2>/dev/null) && kill "$pid" 2>/dev/null; then
    i=0
    while kill -0 "$pid" 2>/dev/null; do
        if [ $((i += 1)) = 1500 ]; then echo "$daemon does not end" >&2; exit 1; fi
        sleep 0.02
    done
fi
ulimit -Sc 0 || :
ulimit -n 131072 2>/dev/null || :
ulimit -l unlimited 2>/dev/null || :
ulimit -s unlimited 2>/dev/null || :
$daemon
i=0
while ! grep -q ':{port} 00000000:0000 0A' /proc/net/tcp; do
    if [ $((i += 1)) = 1500 ]; then
        echo "$daemon does not listen: $(tail -n 1 /var/log/slurm/$daemon.log)" >&2
        exit 1
    fi
    sleep 0.02
done
"""


def new_slurm(controller: NodeState) -> SlurmState:
    """A Slurm with this controller and a new key."""
    key = base64.b64encode(secrets.token_bytes(128)).decode()
    return SlurmState(controller, key, freezer.is_available(), [])


def checked(lines: Sequence[str]) -> list[str]:
    """Lines for slurm.conf. Raises LabError for a line without a setting."""
    for line in lines:
        if not _SETTING.fullmatch(line):
            raise LabError(f"{line!r} is no line of slurm.conf: it takes Name=value")
    return list(lines)


def conf(lab: LabState, slurm: SlurmState) -> str:
    """slurm.conf, one for all machines; the lab's own lines replace those of the same name."""
    tracking = "proctrack/cgroup" if slurm.freezer else "proctrack/linuxproc"
    settings = {
        "ClusterName": lab.name,
        "SlurmctldHost": f"{slurm.controller.name}({slurm.controller.address})",
        **_SETTINGS,
        "ProctrackType": tracking,
    }
    replaced = {line.partition("=")[0].lower() for line in slurm.lines} - _REPEATED
    lines = [f"{name}={value}" for name, value in settings.items() if name.lower() not in replaced]
    lines += slurm.lines
    lines += [f"NodeName={node.name} NodeAddr={node.address} {_NODE}" for node in lab.nodes]
    lines += ["PartitionName=batch Nodes=ALL Default=YES"]
    return "\n".join([*lines, ""])


def client_conf(lab: LabState, slurm: SlurmState) -> str:
    """slurm.conf for the commands of this machine: they use the munged of the controller."""
    socket = f"/proc/{slurm.controller.pid}/root/run/munge/munge.socket.2"
    return conf(lab, slurm) + f"AuthInfo=socket={socket}\n"


def files(lab: LabState, machine: NodeState) -> dict[str, Content]:
    """A machine's files for Slurm, at every start; none in a lab without it."""
    slurm = lab.slurm
    if slurm is None:
        return {}
    daemon, port = _SLURMCTLD if machine is slurm.controller else _SLURMD
    script = _SCRIPT.format(daemon=daemon, port=port, root=freezer.CGROUP_ROOT, stash=STASH)
    return {
        CONF: conf(lab, slurm),
        "/etc/slurm/cgroup.conf": _CGROUP_CONF,
        "/etc/munge/munge.key": (base64.b64decode(slurm.key), 0o400),
        SCRIPT: script,
    }


def group(lab: LabState, node: NodeState) -> str:
    """The node's group of the freezer, or ""."""
    if lab.slurm is None or not lab.slurm.freezer or node is lab.slurm.controller:
        return ""
    return freezer.group_path(lab.name, node.name)


# --- The running Slurm: its commands, new nodes, new settings.

# A node registers within a moment; the rest is for a machine that is loaded.
READY_S = 60.0


def _slurm_of(lab: LabState) -> SlurmState:
    """The lab's Slurm. Raises LabError without one."""
    if lab.slurm is None:
        raise LabError(
            f"the lab {lab.name} has no Slurm; start one that has: nodeready lab up --slurm"
        )
    return lab.slurm


def client_conf_path(lab: str) -> Path:
    """The slurm.conf of this lab for the commands of this machine."""
    return state.directory(lab) / "slurm.conf"


def run_command(lab: LabState, argv: Sequence[str], timeout: float = 60) -> Done:
    """Run one of Slurm's commands of this machine on the lab. Raises LabError."""
    _slurm_of(lab)
    # Variables of a job or of its user are not about the lab.
    env = {name: value for name, value in environment().items() if not _is_slurms(name)}
    env["SLURM_CONF"] = str(client_conf_path(lab.name))
    return run(argv, timeout=timeout, env=env)


def wait_until_known(lab: LabState, started: Collection[NodeState]) -> None:
    """Wait until Slurm knows these machines, which have just started. Raises LabError."""
    if lab.slurm is None:
        return
    state.write(client_conf_path(lab.name), client_conf(lab, lab.slurm))
    # A node with a fault may never answer.
    waiting = {node.name for node in started if node in lab.nodes and not node.fault}
    deadline = time.monotonic() + READY_S
    while waiting:
        done = run_command(lab, ["sinfo", "-h", "-a", "-N", "-o", "%N %T"])
        if done.returncode:
            return  # the controller was stopped: the nodes wait for it
        words = (line.split() for line in done.stdout.splitlines())
        # The asterisk: it does not answer, or has not yet (sinfo(1)).
        waiting -= {
            name for name, node_state in words if node_state.strip("*") == node_state != "unknown"
        }
        if waiting and time.monotonic() > deadline:
            raise LabError(
                f"Slurm gets no answer from {min(waiting)}; see /var/log/slurm there and on "
                f"{lab.slurm.controller.name}"
            )
        time.sleep(0.05)


def configure(lab: LabState, lines: Sequence[str]) -> None:
    """Add these lines to slurm.conf. Raises LabError when Slurm refuses them; it keeps the old."""
    slurm = _slurm_of(lab)
    old, slurm.lines = slurm.lines, checked(lines)
    try:
        spread(lab)
    except LabError:
        slurm.lines = old
        spread(lab)
        raise
    finally:
        state.save(lab)


def spread(lab: LabState) -> None:
    """Give slurm.conf to all running machines, and restart Slurm there. Raises LabError."""
    if lab.slurm is None:
        return
    alive = [machine for machine in lab.machines() if processes.is_alive(machine)]
    controller = lab.slurm.controller
    state.write(client_conf_path(lab.name), client_conf(lab, lab.slurm))
    content = conf(lab, lab.slurm)
    for machine in alive:
        processes.enter(machine.pid, ["sh", "-c", f"cat >{CONF}"], content)
    # A slurmctld takes new nodes only when it starts, and the daemons reread the file at a time of
    # their own: a restart is complete when this returns.
    for machine in sorted(alive, key=lambda machine: machine is not controller):
        _restart(machine)
    if controller in alive:
        wait_until_known(lab, [machine for machine in alive if machine is not controller])


def _restart(machine: NodeState) -> None:
    """Restart its daemon, as process 1 would; jobs continue."""
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    argv = ["nsenter", "-t", "1", "-C", "env", "-i", path, "sh", "-e", SCRIPT]
    done = processes.enter(machine.pid, argv)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit {done.returncode}").splitlines()[0]
        raise LabError(f"{machine.name}: Slurm does not start: {reason}")


def _is_slurms(name: str) -> bool:
    return name.startswith(("SLURM", "SBATCH_", "SINFO_", "SQUEUE_", "SALLOC_"))

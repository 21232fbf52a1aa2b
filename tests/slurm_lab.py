"""A lab with a real Slurm: slurmd on its nodes, slurmctld on one more machine.

    lab = start("mine", nodes=3)               # returns when all nodes are registered
    lab.slurm_run("scontrol", "show", "node")  # from this machine, as root
    lab.nodes[0].run("srun -N2 hostname", user="ml")
    lab.slurm_configure("PrologEpilogTimeout=20")
    end("mine")

Slurm's daemons are this machine's packages, with the lab's own configuration and key: this
machine's /etc/slurm, /etc/munge and services do not change. A node that restarts has no slurmd.
"""

import io
import os
import secrets
import shutil
import subprocess
import tarfile
import time

from nodeready.lab import Lab, LabError, LabNode, LabUnavailable, down, image, state
from nodeready.lab.host import Done, environment, run
from nodeready.lab.processes import Files, nsenter
from nodeready.lab.state import LabState
from tests.cases import read_data

CONF = "/etc/slurm/slurm.conf"
PROGRAMS = ("slurmctld", "slurmd", "sinfo", "munged")

# A node registers within a moment; the rest is for a machine that is loaded.
READY_S = 60.0

# Each daemon, and its port (slurm.conf(5), SlurmctldPort and SlurmdPort) as /proc/net/tcp has it.
_SLURMCTLD = ("slurmctld", "1AA1")
_SLURMD = ("slurmd", "1AA2")

# Settings for a lab that differ from Slurm's defaults: few cores, and tests that wait for seconds.
_SETTINGS = read_data(__file__, "slurm.conf").splitlines()
# Jobs use these numbers rather than those of this machine (config_overrides).
_NODE = "CPUs=4 RealMemory=4096"

# Settings that may have several lines.
_REPEATED = {"nodename", "partitionname", "downnodes", "nodeset"}

# Starts a daemon, or restarts Slurm's; jobs continue. The node's processes of Slurm are in one
# group of the freezer (v1), which is the root of the node's own mount and of the paths in /proc
# (cgroup_namespaces(7)). Slurm kills a whole job by the groups below it. A daemon has neither the
# capabilities that a node lacks nor the limits and variables of the tests; its limits are those
# of Debian's slurmd.service.
_START = read_data(__file__, "slurm_start.sh")

# A lab's group is above those of its nodes. A process that has just ended may be in its group for
# a moment more.
_REMOVE_GROUPS = read_data(__file__, "slurm_remove_groups.sh")


class SlurmLab(Lab):
    """The nodes of Slurm; the lab's last machine is Slurm's controller, and none of `nodes`."""

    def __init__(self, lab_state: LabState) -> None:
        super().__init__(lab_state)
        self.slurm_conf = self.directory / "slurm.conf"
        self.has_freezer = has_freezer()
        self._munge_key = secrets.token_bytes(128)

    @property
    def nodes(self) -> list[LabNode]:
        return super().nodes[:-1]

    @property
    def controller(self) -> LabNode:
        return super().nodes[-1]

    def slurm_run(self, *argv: str) -> Done:
        """Run one of Slurm's commands of this machine, as root. Raises LabError if it fails."""
        # Variables of a job or of its user are not about the lab.
        slurms = ("SLURM", "SBATCH_", "SINFO_", "SQUEUE_", "SALLOC_")
        env = {k: v for k, v in environment().items() if not k.startswith(slurms)}
        done = run(argv, env={**env, "SLURM_CONF": str(self.slurm_conf)})
        if done.returncode:
            raise LabError(f"{argv[0]}: exit {done.returncode}: {done.stderr.strip()}")
        return done

    def slurm_configure(self, *lines: str) -> None:
        """Start Slurm with these lines of slurm.conf, or restart it; jobs continue.

        They replace the lines of the call before, and the lab's settings of the same names.
        Raises LabError when Slurm does not start.
        """
        conf = self._conf(lines)
        # The commands of this machine use the munged of the controller.
        socket = f"/proc/{self.controller.pid}/root/run/munge/munge.socket.2"
        state.write(self.slurm_conf, f"{conf}AuthInfo=socket={socket}\n")
        files = self._files(conf)
        for machine in (self.controller, *self.nodes):
            self._start(machine, files)
        self._wait_until_known()

    def _conf(self, lines: tuple[str, ...]) -> str:
        """slurm.conf, one for all machines."""
        proctrack = "cgroup" if self.has_freezer else "linuxproc"
        settings = [
            f"ClusterName={self.name}",
            f"SlurmctldHost={self.controller.name}({self.controller.address})",
            f"ProctrackType=proctrack/{proctrack}",
            *_SETTINGS,
        ]
        replaced = {line.partition("=")[0].lower() for line in lines} - _REPEATED
        rows = [row for row in settings if row.partition("=")[0].lower() not in replaced]
        nodes = [f"NodeName={node.name} NodeAddr={node.address} {_NODE}" for node in self.nodes]
        return "\n".join([*rows, *lines, *nodes, "PartitionName=batch Nodes=ALL Default=YES", ""])

    def _files(self, conf: str) -> bytes:
        """A tar archive of a machine's files for Slurm, with the programs that a node lacks."""
        cgroup_conf = b"CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n"
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for path in filter(os.path.lexists, image.SLURM):
                tar.add(path)
            for path, content, mode in (
                (CONF, conf.encode(), 0o644),
                ("/etc/slurm/cgroup.conf", cgroup_conf, 0o644),
                ("/etc/munge/munge.key", self._munge_key, 0o400),
            ):
                entry = tarfile.TarInfo(path[1:])
                entry.size, entry.mode = len(content), mode
                tar.addfile(entry, io.BytesIO(content))
        return archive.getvalue()

    def _start(self, machine: LabNode, files: bytes) -> None:
        is_controller = machine.name == self.controller.name
        daemon, port = _SLURMCTLD if is_controller else _SLURMD
        has_group = self.has_freezer and not is_controller
        group = f"{group_path(self.name)}/{machine.name}" if has_group else ""
        variables = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "daemon": daemon,
            "port": port,
            "group": group,
        }
        words = [f"{key}={value}" for key, value in variables.items()]
        argv = [*nsenter(machine.pid), "env", "-i", *words, "sh", "-ec", _START]
        done = subprocess.run(argv, input=files, capture_output=True, timeout=120, check=False)
        if done.returncode:
            raise LabError(f"{machine.name}: Slurm does not start: {done.stderr.decode()}")

    def _wait_until_known(self) -> None:
        """Wait until Slurm knows the state of all nodes. Raises LabError."""
        waiting = {node.name for node in self.nodes}
        deadline = time.monotonic() + READY_S
        while waiting:
            rows = self.slurm_run("sinfo", "-h", "-a", "-N", "-o", "%N %T").stdout.splitlines()
            # The asterisk: it does not answer, or has not yet (sinfo(1)).
            waiting -= {
                name
                for name, node_state in map(str.split, rows)
                if node_state.strip("*") == node_state != "unknown"
            }
            if waiting and time.monotonic() > deadline:
                raise LabError(f"Slurm gets no answer from {min(waiting)}")
            time.sleep(0.05)


def start(name: str, nodes: int, files: Files | None = None) -> SlurmLab:
    """A lab of this many nodes that Slurm knows. Raises LabUnavailable without Slurm here."""
    path = environment()["PATH"]
    if missing := [program for program in PROGRAMS if not shutil.which(program, path=path)]:
        raise LabUnavailable(f"no Slurm here: not installed: {', '.join(missing)}")
    try:
        lab = SlurmLab(Lab.up(name, nodes + 1, files=files).state)
        lab.slurm_configure()
    except BaseException:
        end(name)
        raise
    return lab


def end(name: str) -> None:
    """End the lab of this name, with its groups of the freezer. Raises LabError."""
    down(name)
    words = ["unshare", "--mount", "sh", "-c", _REMOVE_GROUPS, "sh", group_path(name)]
    if run(words).returncode:
        raise LabError(f"the cgroup {group_path(name)} (v1, freezer) cannot be removed")


def group_path(name: str) -> str:
    return f"/nodeready-lab-{name}"


def has_freezer() -> bool:
    """Whether nodes can have the v1 freezer here."""
    mount = "mount -t cgroup -o freezer freezer /mnt"
    mounted = os.path.isdir("/sys/fs/cgroup") and run(["unshare", "--mount", "sh", "-c", mount])
    return bool(mounted and mounted.returncode == 0)

"""A lab's nodes for a benchmark, the contenders on them, and the cost of one probe to a node."""

from __future__ import annotations

import base64
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import timed
from benchmarks.command import ROOT, BenchmarkError, Budget, Rows, say
from nodeready.core import shell
from nodeready.core.base import Section
from nodeready.core.policy import Policy
from nodeready.core.probe_script import make_script
from nodeready.lab import Lab, LabNode
from nodeready.lab.host import reachable_limits
from nodeready.lab.image import USER
from nodeready.subjects import snapshot
from tests import slurm_lab

# --- A lab of plain ssh nodes for contenders, and the cost of one run of a command against it.

#: At this level sshd logs every command and file transfer that a client starts. Container images
#: forbid apt its cache of packages, which real nodes have: without it, Ansible's apt module alone
#: costs a second.
FILES = {
    "/etc/ssh/sshd_config.d/benchmark.conf": "LogLevel VERBOSE\n",
    "/etc/apt/apt.conf.d/docker-clean": "",
}


class Cluster:
    """A running lab. directory: for the benchmark's files, removed at the end"""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        self.size = len(lab.nodes)

    def reset(self) -> None:
        """Restart every node with its original disk."""
        self.lab.restart(self.lab.nodes, keep_disk=False, files=FILES)

    def traffic(self) -> list[tuple[int, int]]:
        """What the sshd of each node has counted since it started: its connections, and the
        commands and file transfers, each a round trip at least.
        """
        logs = [node.log.read_text(errors="replace") for node in self.lab.nodes]
        words = "Accepted publickey for ", "\nStarting session: "
        return [(log.count(words[0]), f"\n{log}".count(words[1])) for log in logs]

    def pyinfra_inventory(self, stem: str, data: dict[str, Any]) -> Path:
        """The path of an inventory file, which holds only constants."""
        path = self.directory / f"{stem}.py"
        path.write_text(f"bench = ({self.lab.inventory_data()!r}, {data!r})\n")
        return path

    def ansible_inventory(self, data: dict[str, Any]) -> Path:
        """The same nodes for Ansible."""
        hosts = {}
        for name, login in self.lab.inventory_data():
            options = f"-o UserKnownHostsFile={login['ssh_known_hosts_file']}"
            hosts[name] = {
                "ansible_host": login["ssh_hostname"],
                "ansible_user": login["ssh_user"],
                "ansible_ssh_private_key_file": login["ssh_key"],
                "ansible_ssh_common_args": f"{options} -o StrictHostKeyChecking=yes",
            }
        path = self.directory / "inventory.yml"
        # JSON is YAML.
        path.write_text(json.dumps({"all": {"hosts": hosts, "vars": data}}, indent=1))
        return path


@contextmanager
def cluster(
    size: int, name: str, *, profile: str = "cpu", slurm: bool = False
) -> Iterator[Cluster]:
    """A lab of this many nodes (slurm: with a real Slurm), removed at the end."""
    slurm_lab.end(name)
    try:
        with tempfile.TemporaryDirectory(prefix="nr-bench-") as directory:
            started = slurm_lab.start(name, size, FILES) if slurm else None
            yield Cluster(started or Lab.up(name, size, profile, FILES), Path(directory))
    finally:
        slurm_lab.end(name)


@dataclass(frozen=True)
class Sample:
    wall_s: float  # from start to exit
    cpu_s: float  # user and system time on the control machine, all processes of the run
    node_cpu_s: float  # the rest of this machine's CPU time: of all nodes
    memory_mib: float  # of the largest process on the control machine
    sessions: float  # commands and file transfers, per node
    logins: float  # connections, per node
    most_logins: float  # connections to the node with most of them


class Samples(dict[str, list[Sample]]):
    """The samples of each contender, by its name."""

    def median(self, name: str) -> Sample:
        """The median of each value by itself."""
        return Sample(*map(statistics.median, zip(*map(astuple, self[name]), strict=True)))

    def ratio(self, name: str, unit: str) -> float:
        """A contender's wall time by another's."""
        return self.median(name).wall_s / self.median(unit).wall_s


def sample_rows(
    samples: Samples, unit: str, letter: str, size: int,
    ratios: tuple[str, Mapping[str, float]] | None = None,
) -> Rows:  # fmt: skip
    """The table of contenders on a cluster of ``size`` nodes: medians, and ratios to ``unit``.
    letter: the unit's name in the head. ratios: a further column: its head, and the ratio by
    contender
    """
    head = [
        *("", "runs", "wall", f"÷ {letter}", "CPU/node here", "on it", "memory", "commands"),
        *("logins", "most", *([ratios[0]] if ratios else [])),
    ]
    rows = [head]
    for name, runs in samples.items():
        sample = samples.median(name)
        costs_ms = (seconds / size * 1000 for seconds in (sample.cpu_s, sample.node_cpu_s))
        row = [name, str(len(runs)), f"{sample.wall_s:.2f} s", f"{samples.ratio(name, unit):.2f}"]
        row += (f"{cost_ms:.1f} ms" for cost_ms in costs_ms)
        row += (f"{sample.memory_mib:.0f} MiB", f"{sample.sessions:.4g}", f"{sample.logins:.4g}")
        row.append(f"{sample.most_logins:.0f}")
        if ratios:
            row.append(f"{ratios[1][name]:.2f}" if name in ratios[1] else "")
        rows.append(row)
    return rows


def run_budgets(
    case: str, samples: Samples, name: str, size: int, both_ms: float
) -> Iterator[Budget]:
    """The limits that the design sets for a run beyond E, and beside the same probe.

    both_ms: CPU time a node, the control machine's included
    """
    unit, sample = samples.median(EXEC), samples.median(name)
    here_s, there_s = sample.cpu_s - unit.cpu_s, sample.node_cpu_s - unit.node_cpu_s
    ratio = samples.ratio(name, PROBE)
    yield Budget(f"{case}: wall ÷ the same probe by pyinfra", 1.05, ratio)
    yield Budget(f"{case}: commands per node", 1, sample.sessions)
    limits = ("here", 10, here_s), ("on the node", both_ms - 10, there_s)
    for side, limit_ms, seconds in (*limits, ("both", both_ms, here_s + there_s)):
        cost_ms = seconds / size * 1000
        yield Budget(f"{case}: CPU a node beyond E, {side}", limit_ms, cost_ms, " ms")


# --- The commands that are compared, and the cost of one probe to a node.
# A contender does the same on every node of an inventory.

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
#: Names of contenders; the budgets use some of them.
EXEC, AUDIT = "pyinfra exec -- true (E)", "nodeready audit"
NODEREADY, PYINFRA = "nodeready deploy", "pyinfra deploy.py"
PROBE = "pyinfra exec -- the same probe"
STOCK, ANSIBLE = "stock pyinfra operations", "Ansible playbook"


@dataclass(frozen=True)
class Contender:
    name: str
    argv: Sequence[str | Path]
    pattern: str = ""  # matches the output of a successful run
    good: tuple[int, ...] = (0,)  # the exit statuses of a successful run
    environment: Mapping[str, str] = field(default_factory=dict)  # beside PATH and HOME
    cwd: Path = ROOT  # its directory, from which pyinfra imports modules

    def run(self, cluster: Cluster, *, matches: bool = True) -> Sample:
        """Run it once. Raises BenchmarkError for another exit status or output. Its output goes to
        a file: a terminal or a pipe that is read slowly would be measured too. matches: whether
        the output must match the pattern, else it must not
        """
        result, log = cluster.directory / "cost.json", cluster.directory / "output"
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        before = cluster.traffic()
        busy_s, own_s = _busy_s(), time.process_time()
        argv = [*map(str, self.argv)]
        with log.open("wb") as output, subprocess.Popen(
            [sys.executable, "-S", timed.__file__, str(result), "--", *argv],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=self.cwd,
            env={**inherited, "LC_ALL": "C.UTF-8", "TERM": "dumb", **self.environment},
        ) as process:  # fmt: skip
            try:
                status = process.wait()
            except BaseException:
                process.terminate()
                raise
        # Processes that end after the answer count, too.
        time.sleep(0.1)
        busy_s, own_s = _busy_s() - busy_s, time.process_time() - own_s
        text = log.read_text(errors="replace")
        if status not in self.good or bool(re.search(self.pattern, text)) != matches:
            tail = "\n".join(text.splitlines()[-40:])
            raise BenchmarkError(f"{' '.join(argv)}: exit {status}, not what is measured:\n{tail}")
        cost = json.loads(result.read_text())
        pairs = zip(before, cluster.traffic(), strict=True)
        logins, sessions = zip(*((b[0] - a[0], b[1] - a[1]) for a, b in pairs), strict=True)
        means = sum(sessions) / cluster.size, sum(logins) / cluster.size
        cpu_s, node_cpu_s = cost["cpu_s"], busy_s - own_s - cost["cpu_s"]
        costs = cost["wall_s"], cpu_s, node_cpu_s, cost["memory_mib"]
        sample = Sample(*costs, *means, max(logins))
        say(f"  {self.name}: {sample.wall_s:.2f} s, CPU {cpu_s:.2f} s, nodes {node_cpu_s:.2f} s")
        return sample


def in_turns(cluster: Cluster, contenders: Sequence[Contender], turns: int) -> Samples:
    """The samples of each contender. Ansible, which takes minutes, runs once."""
    samples = Samples({contender.name: [] for contender in contenders})
    for turn in range(turns):
        for contender in contenders:
            if turn == 0 or "Ansible" not in contender.name:
                samples[contender.name].append(contender.run(cluster))
    return samples


def pyinfra_exec(name: str, inventory: Path, command: str, pattern: str = "") -> Contender:
    """One command on every node, by pyinfra."""
    return Contender(name, [BIN / "pyinfra", inventory, "exec", "--", command], pattern)


def yardstick(inventory: Path) -> Contender:
    """E: `true` on every node, by the engine that nodeready uses."""
    return pyinfra_exec(EXEC, inventory, "true")


def probe_command(
    policy: Policy, nonce: str = "benchmark", sections: Sequence[Section] | None = None
) -> shell.ShellCommand:
    """The shell command of the probe, and its input. sections: None: all"""
    if sections is None:
        sections = snapshot.sections(snapshot.probes())
    return shell.command(make_script(sections, policy, nonce), 60, "nodeready:benchmark")


def probe(inventory: Path, policy: Policy) -> Contender:
    """E with the work of nodeready's probe on the nodes, which share this machine's cores."""
    line, stdin = probe_command(policy)
    # pyinfra's `exec` gives a command no input: the script is in the command line here.
    packed = base64.b64encode(stdin.encode()).decode("ascii")
    return pyinfra_exec(PROBE, inventory, f"echo {packed}|base64 -d|{line} >/dev/null")


def audit(name: str, inventory: Path, *words: str, **environment: str) -> Contender:
    argv = [str(BIN / "nodeready"), "audit", str(inventory), *words]
    return Contender(name, argv, "", (0, 3), environment)


def clush(name: str, login: str, nodes: str, fan_out: int, **environment: str) -> Contender:
    words = ["-S", "-f", str(fan_out), "-o", login, "-w", nodes, "true"]
    return Contender(name, [BIN / "clush", *words], environment=environment)


def policy_data(host_pattern: str) -> dict[str, Any]:
    """The policy that all contenders of a deploy set, for nodes with such names: the defaults, and
    a value where those do nothing.
    """
    return {
        **reachable_limits(),
        "pdshrc_users": (USER,),
        "pdshrc_path": ("/opt/train/bin",),
        "ssh_client_hosts": (host_pattern,),
    }


def _by_hand(data: dict[str, Any]) -> dict[str, Any]:
    """The same data for contenders without a policy: every value of it, with a prefix."""
    policy = Policy(**data)
    values = {f"nr_{name}": getattr(policy, name) for name in policy.__dataclass_fields__}
    return {
        **{name: list(v) if isinstance(v, tuple) else v for name, v in values.items()},
        "nr_core_directory": str(Path(policy.core_pattern).parent),
        "nr_py_spy": str(BIN / "py-spy"),
    }


# pyinfra's last line of results: operations, and of them changed, attempted, without change.
_PYINFRA_NOTHING = r"(?m)^\s*Grand total\s+\d+\s+-\s+-\s+\d+\s*$"


def deploys(cluster: Cluster, commands: Path | None) -> list[Contender]:
    """The contenders of a deploy, nodeready first. Their pattern: a run that changed nothing.
    commands: the directory of Ansible's; None: without Ansible
    """
    data = policy_data(f"{cluster.lab.name}*")
    values = _by_hand(data)
    inventory = cluster.pyinfra_inventory("inventory", data)
    by_hand = cluster.pyinfra_inventory("stock", values)
    stock, no_change, pyinfra = HERE / "stock", _PYINFRA_NOTHING, BIN / "pyinfra"
    nodeready = str(BIN / "nodeready"), "deploy", str(inventory), "--yes"
    good = r"(?m)^0 changed .* 0 failed, 0 unreachable"
    playbook, unchanged = HERE / "ansible" / "playbook.yml", r"(?s)\A(?!.*changed=[1-9])"
    ansible = ANSIBLE, cluster, commands, values, "ansible-playbook", playbook
    return [
        Contender(NODEREADY, nodeready, good, (0, 3)),
        Contender(PYINFRA, [pyinfra, inventory, ROOT / "deploy.py", "-y"], no_change),
        Contender(STOCK, [pyinfra, by_hand, stock / "deploy.py", "-y"], no_change, cwd=stock),
        *_ansible(*ansible, pattern=unchanged),
    ]


def _ansible(
    name: str, cluster: Cluster, commands: Path | None, data: dict[str, Any], program: str,
    *words: str | Path, pattern: str = "",
) -> list[Contender]:  # fmt: skip
    """A run of Ansible, with its words after the inventory: pipelining, a fork per node, no facts
    gathered unless asked for. [] without Ansible.
    """
    if commands is None:
        return []
    scratch = cluster.directory
    settings = {
        "ANSIBLE_HOME": str(scratch / "ansible"),
        "ANSIBLE_FORKS": str(cluster.size),
        "ANSIBLE_PIPELINING": "true",
        "ANSIBLE_GATHERING": "explicit",
        # The nodes' interpreter is given: looking for it would cost a round trip.
        "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3",
        # The path of a socket is at most 108 bytes long.
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(scratch / "cp"),
        "ANSIBLE_NOCOLOR": "1",
        "PATH": f"{commands}:{os.environ['PATH']}",
    }
    argv = commands / program, "-i", cluster.ansible_inventory(data), *words
    return [Contender(name, argv, pattern, environment=settings)]


def ansible_setup(cluster: Cluster, commands: Path | None) -> list[Contender]:
    """Ansible's own facts of every node, without those of other programs; [] without Ansible."""
    words = "all", "-m", "setup", "-a", "gather_subset=!facter,!ohai"
    return _ansible("Ansible setup", cluster, commands, {}, "ansible", *words)


# --- The processes of one probe on a node.

_TRACE = "/tmp/nodeready-benchmark-trace"
# strace splits a call in two when another process makes one meanwhile.
_STARTED = re.compile(r"(?m)^\d+\s+(?:<\.\.\. )?(?:clone3?|v?fork)\b(?!.*CLONE_THREAD).*= \d+$")


def probe_budget(nodes: Cluster, data: dict[str, Any]) -> Budget:
    """The limit that the design sets for the processes of one probe by this policy."""
    # The least of three: a probe reads a process that waits for a disk twice: two processes more.
    count = processes_of(nodes.lab.nodes[0], probe_command(Policy(**data)), 3)
    return Budget("one probe: processes started", 30, count)


def processes_of(node: LabNode, command: shell.ShellCommand, times: int) -> int:
    """How many processes the command starts on a node: the least of these times."""
    argv = ["strace", "-f", "-qq", "-e", "trace=clone,clone3,fork,vfork", "-o", _TRACE]
    counts = []
    for _ in range(times):
        node.enter([*argv, "sh", "-c", command.line], command.stdin)
        counts.append(len(_STARTED.findall(node.read(_TRACE))))
    return min(counts)


def _busy_s() -> float:
    """CPU seconds of this machine so far."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    # user, nice, system, irq, softirq (proc_stat(5)); the remaining times are no work.
    return sum(int(words[number]) for number in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK")

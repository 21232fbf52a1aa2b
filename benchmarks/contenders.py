"""The commands that are compared, and the cost of one probe to a node.

A contender does the same on every node of an inventory.
"""

from __future__ import annotations

import base64
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cluster import Cluster, Sample, run, say
from benchmarks.report import Budget
from nodeready.core import shell
from nodeready.core.policy import Policy
from nodeready.core.probe_script import make_script
from nodeready.lab.host import reachable_limits
from nodeready.lab.image import USER
from nodeready.subjects import snapshot

ROOT = Path(__file__).parent.parent
HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
#: Names of contenders; the budgets use some of them.
EXEC, AUDIT = "pyinfra exec -- true (E)", "nodeready audit"
NODEREADY, PYINFRA = "nodeready deploy", "pyinfra deploy.py"
PROBE = "pyinfra exec -- the same probe"
STOCK, ANSIBLE = "stock pyinfra operations", "Ansible playbook"
#: Ansible has a virtual environment here: it must not share versions with pyinfra.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "nodeready")


@dataclass(frozen=True)
class Contender:
    """A command to measure."""

    name: str
    argv: Sequence[str]
    pattern: str = ""  # matches the output of a successful run
    good: tuple[int, ...] = (0,)  # the exit statuses of a successful run
    environment: Mapping[str, str] = field(default_factory=dict)  # beside PATH and HOME
    cwd: Path = ROOT  # its directory, from which pyinfra imports modules

    def run(self, cluster: Cluster, *, matches: bool = True) -> Sample:
        """Run it once. Raises BenchmarkError for another exit status or output.

        matches: whether the output must match the pattern, else it must not
        """
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environment = {**inherited, "LC_ALL": "C.UTF-8", "TERM": "dumb", **self.environment}

        def accept(status: int, output: str) -> bool:
            is_found = re.search(self.pattern, output) is not None
            return status in self.good and is_found == matches

        sample = run(cluster, self.argv, environment, accept, self.cwd)
        say(f"  {self.name}: {sample.wall_s:.2f} s, CPU {sample.cpu_s:.2f} s")
        return sample


def in_turns(
    cluster: Cluster, contenders: Sequence[Contender], turns: int
) -> dict[str, list[Sample]]:
    """The samples of each contender, by name. Ansible, which takes minutes, runs once."""
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for turn in range(turns):
        for contender in contenders:
            if turn == 0 or "Ansible" not in contender.name:
                samples[contender.name].append(contender.run(cluster))
    return samples


def pyinfra_exec(name: str, inventory: Path, command: str, pattern: str = "") -> Contender:
    """One command on every node, by pyinfra."""
    argv = [str(BIN / "pyinfra"), str(inventory), "exec", "--", command]
    return Contender(name, argv, pattern)


def yardstick(inventory: Path) -> Contender:
    """E: `true` on every node, by the engine that nodeready uses."""
    return pyinfra_exec(EXEC, inventory, "true")


def probe_command(policy: Policy, nonce: str = "benchmark") -> tuple[str, str]:
    """The shell command of the probe, and its input."""
    script = make_script(snapshot.sections(snapshot.probes()), policy, nonce)
    return shell.command(script, 60, "nodeready:benchmark")


def probe(inventory: Path, policy: Policy) -> Contender:
    """E with the work of nodeready's probe on the nodes, which share this machine's cores."""
    line, stdin = probe_command(policy)
    # pyinfra's `exec` gives a command no input: the script is in the command line here.
    packed = base64.b64encode(stdin.encode()).decode("ascii")
    return pyinfra_exec(PROBE, inventory, f"echo {packed}|base64 -d|{line} >/dev/null")


def audit(name: str, inventory: Path, *words: str, **environment: str) -> Contender:
    """`nodeready audit` with these options."""
    argv = [str(BIN / "nodeready"), "audit", str(inventory), *words]
    return Contender(name, argv, "", (0, 3), environment)


def clush(name: str, login: str, nodes: str, fan_out: int, **environment: str) -> Contender:
    """`true` on every node, by ClusterShell's command."""
    words = ["-S", "-f", str(fan_out), "-o", login, "-w", nodes, "true"]
    return Contender(name, [str(BIN / "clush"), *words], environment=environment)


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


def deploys(cluster: Cluster, ansible_commands: Path | None) -> list[Contender]:
    """The contenders of a deploy, nodeready first. Their pattern: a run that changed nothing."""
    data = policy_data(f"{cluster.lab.name}*")
    values = _by_hand(data)
    inventory = str(cluster.pyinfra_inventory("inventory", data))
    by_hand = str(cluster.pyinfra_inventory("stock", values))
    pyinfra, stock = str(BIN / "pyinfra"), HERE / "stock"
    argv = [str(BIN / "nodeready"), "deploy", inventory, "--yes"]
    contenders = [
        Contender(NODEREADY, argv, r"(?m)^0 changed .* 0 failed, 0 unreachable", (0, 3)),
        Contender(PYINFRA, [pyinfra, inventory, str(ROOT / "deploy.py"), "-y"], _PYINFRA_NOTHING),
        Contender(
            STOCK, [pyinfra, by_hand, str(stock / "deploy.py"), "-y"], _PYINFRA_NOTHING, cwd=stock
        ),
    ]
    if ansible_commands is not None:
        settings = _ansible_settings(ansible_commands, cluster)
        argv = [str(ansible_commands / "ansible-playbook"), "-i"]
        argv += [str(cluster.ansible_inventory(values)), str(HERE / "ansible" / "playbook.yml")]
        unchanged = r"(?s)\A(?!.*changed=[1-9])"
        contenders.append(Contender(ANSIBLE, argv, unchanged, environment=settings))
    return contenders


def ansible_environment() -> Path:
    """The directory of Ansible's commands; the first call installs them from PyPI."""
    directory = _CACHE / f"ansible-py{sys.version_info[0]}{sys.version_info[1]}"
    commands = directory / "bin"
    if not (commands / "ansible-playbook").exists():
        print(f"installing ansible-core into {directory}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        pip = [str(commands / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--disable-pip-version-check", "ansible-core"], check=True)
    return commands


def ansible_version(commands: Path) -> str:
    """``ansible-core 2.19.14``."""
    code = "from importlib.metadata import version; print(version('ansible-core'))"
    done = subprocess.run(
        [str(commands / "python"), "-c", code], capture_output=True, text=True, check=True
    )
    return f"ansible-core {done.stdout.strip()}"


def _ansible_settings(commands: Path, cluster: Cluster) -> dict[str, str]:
    """Pipelining, a fork per node, no facts gathered unless asked for."""
    scratch = cluster.directory
    return {
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


def ansible_setup(cluster: Cluster, commands: Path | None) -> list[Contender]:
    """Ansible's own facts of every node, without those of other programs; [] without Ansible."""
    if commands is None:
        return []
    inventory = cluster.ansible_inventory({})
    argv = [str(commands / "ansible"), "-i", str(inventory), "all", "-m", "setup"]
    argv += ["-a", "gather_subset=!facter,!ohai"]
    settings = _ansible_settings(commands, cluster)
    return [Contender("Ansible setup", argv, environment=settings)]


# --- The cost of one probe to a node: the processes that it starts, and its CPU time.

#: Turns whose median is taken.
TURNS = 7
#: Probes whose processes are counted. The smallest count is taken: a probe reads a process that
#: waits for a disk twice, which starts two more.
TRACES = 3
_TRACE = "/tmp/nodeready-benchmark-trace"
# strace splits a call in two when another process makes one meanwhile.
_STARTED = re.compile(r"(?m)^\d+\s+(?:<\.\.\. )?(?:clone3?|v?fork)\b(?!.*CLONE_THREAD).*= \d+$")


def probe_budgets(nodes: Cluster, data: dict[str, Any]) -> list[Budget]:
    """The limits that the design sets for one probe by this policy.

    Its CPU time is that of all nodes during an audit, less that of `true`. That of a shell's own
    children (getrusage(2), RUSAGE_CHILDREN) lacks processes that outlive their parent.
    """
    inventory = nodes.pyinfra_inventory("inventory", data)
    unit, probed = yardstick(inventory), audit(AUDIT, inventory)
    beyond_s = [_node_cpu_s(nodes, probed) - _node_cpu_s(nodes, unit) for _ in range(TURNS)]
    line, stdin = probe_command(Policy(**data))
    argv = ["strace", "-f", "-qq", "-e", "trace=clone,clone3,fork,vfork", "-o", _TRACE]
    node, counts = nodes.lab.nodes[0], []
    for _ in range(TRACES):
        node.enter([*argv, "sh", "-c", line], stdin)
        counts.append(len(_STARTED.findall(node.read(_TRACE))))
    cpu_ms = statistics.median(beyond_s) / nodes.size * 1000
    return [
        Budget("one probe: processes started", 48, min(counts)),
        Budget("one probe beyond `true`, a node: CPU", 54, cpu_ms, " ms"),
    ]


def _node_cpu_s(nodes: Cluster, contender: Contender) -> float:
    """CPU seconds of this machine during a run, less those of the command and of this process."""
    before, own_before = _busy_s(), time.process_time()
    sample = contender.run(nodes)
    # Processes that end after the answer count, too.
    time.sleep(0.1)
    return _busy_s() - before - sample.cpu_s - (time.process_time() - own_before)


def _busy_s() -> float:
    """CPU seconds of this machine so far."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    # user, nice, system, irq, softirq (proc_stat(5)); the remaining times are no work.
    return sum(int(words[number]) for number in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK")

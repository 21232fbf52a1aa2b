"""The commands that are compared: each does the same on every node of an inventory."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cluster import Cluster
from benchmarks.measure import Sample, run, say
from benchmarks.settings import by_hand, policy_data
from nodeready.core import shell
from nodeready.core.policy import Policy
from nodeready.core.probe_script import make_script
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
    """A command to measure.

    pattern:     matches the output of a successful run
    good:        the exit statuses of a successful run
    environment: of the command, beside PATH and HOME
    cwd:         its directory, from which pyinfra imports modules
    """

    name: str
    argv: Sequence[str]
    pattern: str = ""
    good: tuple[int, ...] = (0,)
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: Path = ROOT

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


def probe(inventory: Path, policy: Policy) -> Contender:
    """E with the work of nodeready's probe on the nodes, which share this machine's cores."""
    script = make_script(snapshot.sections(snapshot.probes()), policy, "benchmark")
    line, stdin = shell.command(script, 60, "nodeready:benchmark")
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


def nodeready(inventory: Path) -> Contender:
    """The product's own command."""
    argv = [str(BIN / "nodeready"), "deploy", str(inventory), "--yes"]
    return Contender(NODEREADY, argv, r"(?m)^0 changed .* 0 failed, 0 unreachable", (0, 3))


# pyinfra's last line of results: operations, and of them changed, attempted, without change.
_PYINFRA_NOTHING = r"(?m)^\s*Grand total\s+\d+\s+-\s+-\s+\d+\s*$"


def pyinfra(inventory: Path) -> Contender:
    """The same operations by pyinfra's command."""
    argv = [str(BIN / "pyinfra"), str(inventory), str(ROOT / "deploy.py"), "-y"]
    return Contender(PYINFRA, argv, _PYINFRA_NOTHING)


def stock(inventory: Path) -> Contender:
    """The same settings as pyinfra's own operations."""
    argv = [str(BIN / "pyinfra"), str(inventory), str(HERE / "stock" / "deploy.py"), "-y"]
    return Contender(STOCK, argv, _PYINFRA_NOTHING, cwd=HERE / "stock")


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


def _ansible_settings(commands: Path, forks: int, scratch: Path) -> dict[str, str]:
    """Pipelining, a fork per node, no facts gathered unless asked for."""
    return {
        "ANSIBLE_HOME": str(scratch / "ansible"),
        "ANSIBLE_FORKS": str(forks),
        "ANSIBLE_PIPELINING": "true",
        "ANSIBLE_GATHERING": "explicit",
        # The nodes' interpreter is given: looking for it would cost a round trip.
        "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3",
        # The path of a socket is at most 108 bytes long.
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(scratch / "cp"),
        "ANSIBLE_NOCOLOR": "1",
        "PATH": f"{commands}:{os.environ['PATH']}",
    }


def ansible(inventory: Path, commands: Path, forks: int, scratch: Path) -> Contender:
    """The same settings as a playbook."""
    environment = _ansible_settings(commands, forks, scratch)
    argv = [str(commands / "ansible-playbook"), "-i", str(inventory)]
    argv.append(str(HERE / "ansible" / "playbook.yml"))
    return Contender(ANSIBLE, argv, r"(?s)\A(?!.*changed=[1-9])", (0,), environment)


def ansible_setup(cluster: Cluster, commands: Path | None) -> list[Contender]:
    """Ansible's own facts of every node, without those of other programs; [] without Ansible."""
    if commands is None:
        return []
    inventory = cluster.ansible_inventory({})
    argv = [str(commands / "ansible"), "-i", str(inventory), "all", "-m", "setup"]
    argv += ["-a", "gather_subset=!facter,!ohai"]
    settings = _ansible_settings(commands, cluster.size, cluster.directory)
    return [Contender("Ansible setup", argv, environment=settings)]


def deploys(cluster: Cluster, ansible_commands: Path | None) -> list[Contender]:
    """The contenders of a deploy, nodeready first. Their pattern: a run that changed nothing."""
    data = policy_data(f"{cluster.lab.name}*")
    values = by_hand(data, BIN / "py-spy")
    contenders = [
        nodeready(cluster.pyinfra_inventory("inventory", data)),
        pyinfra(cluster.pyinfra_inventory("inventory", data)),
        stock(cluster.pyinfra_inventory("stock", values)),
    ]
    if ansible_commands is not None:
        inventory = cluster.ansible_inventory(values)
        contenders.append(ansible(inventory, ansible_commands, cluster.size, cluster.directory))
    return contenders

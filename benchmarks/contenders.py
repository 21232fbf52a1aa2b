"""What is compared: each a command that sets the same on every node of an inventory."""

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
from benchmarks.measure import Sample, run
from benchmarks.settings import by_hand, policy_data
from nodeready import shell
from nodeready.policy import Policy
from nodeready.subjects import snapshot
from nodeready.subjects.snapshot import make_script

ROOT = Path(__file__).parent.parent
HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
#: Names of the contenders that a budget speaks of.
EXEC, NODEREADY, PYINFRA = "pyinfra exec -- true (E)", "nodeready deploy", "pyinfra deploy.py"
LOOK = "pyinfra exec -- the same look"
STOCK, ANSIBLE = "stock pyinfra operations", "Ansible playbook"
#: Below it, Ansible gets an environment of its own: it must not share versions with pyinfra.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "nodeready")


@dataclass(frozen=True)
class Contender:
    """One way to do the job.

    argv:        the command, the same for the first deploy and for one with nothing to do
    unchanged:   pattern of the output of a run that changed nothing
    good:        exit statuses of a run that did its work
    environment: of the command, beside PATH and HOME
    cwd:         where it runs; pyinfra imports modules from there
    """

    name: str
    argv: Sequence[str]
    unchanged: str
    good: tuple[int, ...] = (0,)
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: Path = ROOT

    def environ(self) -> dict[str, str]:
        """The whole environment: nothing of the caller's that could make runs differ."""
        keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return {**keep, "LC_ALL": "C.UTF-8", "TERM": "dumb", **self.environment}

    def run(self, cluster: Cluster) -> Sample:
        """Run it once. Raises BenchmarkError unless its exit status is a good one."""
        return run(
            cluster, self.argv, self.environ(), lambda status, _: status in self.good, self.cwd
        )

    def did_nothing(self, output: str) -> bool:
        """Whether this output is that of a run that changed nothing."""
        return re.search(self.unchanged, output) is not None


def yardstick(inventory: Path) -> Contender:
    """E: one command on every node, by the engine that we use."""
    argv = [str(BIN / "pyinfra"), str(inventory), "exec", "--", "true"]
    return Contender(EXEC, argv, r"Disconnecting")


def look(inventory: Path, policy: Policy) -> Contender:
    """E with the work of nodeready's look on the nodes: they share this machine's cores."""
    script = make_script(snapshot.sections(snapshot.probes()), policy, "benchmark")
    made = shell.command(script, 60, "nodeready:benchmark")
    # pyinfra's `exec` gives a command no input: the script is in the command line here.
    packed = base64.b64encode(made.stdin.encode()).decode("ascii")
    command = f"echo {packed}|base64 -d|{made.line} >/dev/null"
    argv = [str(BIN / "pyinfra"), str(inventory), "exec", "--", command]
    return Contender(LOOK, argv, r"Disconnecting")


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
    """Where Ansible's commands are; installed from PyPI when it is the first time."""
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


def ansible_setup(inventory: Path, commands: Path, forks: int, scratch: Path) -> Contender:
    """Ansible's own facts of every node, without those of other programs."""
    argv = [str(commands / "ansible"), "-i", str(inventory), "all", "-m", "setup"]
    argv += ["-a", "gather_subset=!facter,!ohai"]
    return Contender(
        "Ansible setup", argv, "", environment=_ansible_settings(commands, forks, scratch)
    )


def contenders(cluster: Cluster, ansible_commands: Path | None) -> list[Contender]:
    """All of them, nodeready first, with inventories of this cluster."""
    data = policy_data(f"{cluster.lab.name}*")
    same = by_hand(data, BIN / "py-spy")
    made = [
        nodeready(cluster.pyinfra_inventory("inventory", data)),
        pyinfra(cluster.pyinfra_inventory("inventory", data)),
        stock(cluster.pyinfra_inventory("stock", same)),
    ]
    if ansible_commands is not None:
        inventory = cluster.ansible_inventory(same)
        made.append(ansible(inventory, ansible_commands, cluster.size, cluster.directory))
    return made

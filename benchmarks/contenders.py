"""What the benchmarks share: the report of a run, the lab's nodes, and the contenders on them."""

from __future__ import annotations

import base64
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import timed
from nodeready.core import shell
from nodeready.core.base import Section
from nodeready.core.policy import Policy
from nodeready.core.probe_script import make_script
from nodeready.lab import Lab, LabNode
from nodeready.lab.host import reachable_limits
from nodeready.lab.image import USER
from nodeready.subjects import snapshot
from tests import slurm_lab

Rows = Sequence[Sequence[str]]  # a table; its first row is the head
_WIDTH = 98


class BenchmarkError(Exception):
    """A run failed, or did not do what is measured."""


@dataclass(frozen=True)
class BenchmarkReport:
    title: str
    tables: Sequence[tuple[str, Rows]]  # (heading, rows); the heading may be ""
    remark: str = ""  # follows the machine's description
    note: str = ""  # explains the columns, below the tables

    def text(self, about: str) -> str:
        parts = [
            "\n".join(
                [*filter(None, [heading]), *("  ".join(row).rstrip() for row in _padded(rows))]
            )
            for heading, rows in self.tables
        ]
        return "\n\n".join([*parts, f"{about} {self.remark}".rstrip()])

    def markdown(self, command: str, about: str) -> str:
        """The report for the document, with the command that measures it again."""
        parts = [f"## {self.title}", f"```\n{command}\n```", _filled(f"{about} {self.remark}")]
        for heading, rows in self.tables:
            # Padded, so that the source reads as a table, too.
            head, *body = _padded(rows)
            rule = ["-" * len(head[0]), *("-" * (len(cell) - 1) + ":" for cell in head[1:])]
            parts += [f"### {heading}"] if heading else []
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body)))
        return "\n\n".join(filter(None, [*parts, _filled(self.note)]))


@dataclass(frozen=True)
class Budget:
    """A limit that the design sets, and the measured value."""

    name: str
    limit: float
    measured: float
    unit: str = ""
    is_maximum: bool = True  # the value must be at most the limit; otherwise at least

    def row(self) -> tuple[str, ...]:
        sign = 1 if self.is_maximum else -1
        number = f"{self.measured:.2f}".rstrip("0").rstrip(".")
        return (
            self.name,
            f"{'≤' if self.is_maximum else '≥'} {self.limit:g}{self.unit}",
            f"{number}{self.unit}",
            "met" if sign * self.measured <= sign * self.limit else "missed",
        )


def budget_rows(budgets: Iterable[Budget]) -> Rows:
    return [("", "budget", "measured", ""), *(budget.row() for budget in budgets)]


def _filled(text: str) -> str:
    return textwrap.fill(text.strip(), _WIDTH)


def _padded(rows: Rows) -> list[list[str]]:
    """The cells in columns of one width: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


def replace_block(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the markers of ``name`` in a document; append them when missing."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    content = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
    block = f"{begin}\n\n{text.strip()}\n\n{end}"
    if begin in content and end in content:
        content = content.split(begin)[0] + block + content.split(end, 1)[1]
    else:
        content = f"{content.rstrip()}\n\n{block}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def machine() -> str:
    """One line: processors, memory, kernel, system, Python."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    kernel = ".".join(platform.release().split("-")[0].split(".")[:2])
    system = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return (
        f"{len(os.sched_getaffinity(0))} cores ({next(models, platform.machine())}), "
        f"{memory:.0f} GiB, {system}, Linux {kernel}, Python {platform.python_version()}"
    )


def sshd() -> str:
    """The version of the nodes' ssh server."""
    words = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=False).stderr
    return words.partition(",")[0].strip().replace("_", " ")


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
        return [
            (
                log.count("Accepted publickey for "),
                len(re.findall(r"^Starting session: ", log, re.M)),
            )
            for log in logs
        ]

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


def median(samples: Sequence[Sample]) -> Sample:
    """The median of each value by itself."""
    return Sample(*map(statistics.median, zip(*map(astuple, samples), strict=True)))


def sample_rows(
    samples: Mapping[str, Sequence[Sample]],
    unit: str,
    letter: str,
    size: int,
    ratios: tuple[str, Mapping[str, float]] | None = None,
) -> Rows:
    """The table of contenders on a cluster of ``size`` nodes: medians, and ratios to ``unit``.

    letter: the unit's name in the head
    ratios: a further column: its head, and the ratio by contender
    """
    unit_s = median(samples[unit]).wall_s
    head = ("", "runs", "wall", f"÷ {letter}", "CPU/node here", "on it", "memory", "commands")
    rows = []
    for name, runs in samples.items():
        sample = median(runs)
        row = (
            name,
            str(len(runs)),
            f"{sample.wall_s:.2f} s",
            f"{sample.wall_s / unit_s:.2f}",
            f"{sample.cpu_s / size * 1000:.1f} ms",
            f"{sample.node_cpu_s / size * 1000:.1f} ms",
            f"{sample.memory_mib:.0f} MiB",
            f"{sample.sessions:.4g}",
            f"{sample.logins:.4g}",
            f"{sample.most_logins:.0f}",
        )
        ratio = ratios[1].get(name) if ratios else None
        rows.append((*row, *([f"{ratio:.2f}" if ratio else ""] if ratios else [])))
    return [(*head, "logins", "most", *([ratios[0]] if ratios else [])), *rows]


def run_budgets(
    case: str, samples: Mapping[str, Sequence[Sample]], name: str, size: int, both_ms: float
) -> Iterator[Budget]:
    """The limits that the design sets for a run beyond E, and beside the same probe.

    both_ms: CPU time a node, the control machine's included
    """
    unit, sample = median(samples[EXEC]), median(samples[name])
    here_s, there_s = sample.cpu_s - unit.cpu_s, sample.node_cpu_s - unit.node_cpu_s
    probe_s = median(samples[PROBE]).wall_s
    yield Budget(f"{case}: wall ÷ the same probe by pyinfra", 1.05, sample.wall_s / probe_s)
    yield Budget(f"{case}: commands per node", 1, sample.sessions)
    for side, limit_ms, seconds in (
        ("here", 10, here_s), ("on the node", both_ms - 10, there_s),
        ("both", both_ms, here_s + there_s),
    ):  # fmt: skip
        yield Budget(
            f"{case}: CPU a node beyond E, {side}", limit_ms, seconds / size * 1000, " ms"
        )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- The commands that are compared, and the cost of one probe to a node.
# A contender does the same on every node of an inventory.

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
    name: str
    argv: Sequence[str]
    pattern: str = ""  # matches the output of a successful run
    good: tuple[int, ...] = (0,)  # the exit statuses of a successful run
    environment: Mapping[str, str] = field(default_factory=dict)  # beside PATH and HOME
    cwd: Path = ROOT  # its directory, from which pyinfra imports modules

    def run(self, cluster: Cluster, *, matches: bool = True) -> Sample:
        """Run it once. Raises BenchmarkError for another exit status or output.

        Its output goes to a file: a terminal or a pipe that is read slowly would be measured too.

        matches: whether the output must match the pattern, else it must not
        """
        result, log = cluster.directory / "cost.json", cluster.directory / "output"
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        before = cluster.traffic()
        busy_s, own_s = _busy_s(), time.process_time()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-S", str(Path(timed.__file__)), str(result), "--", *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**inherited, "LC_ALL": "C.UTF-8", "TERM": "dumb", **self.environment},
                cwd=self.cwd,
            )
            try:
                status = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
        # Processes that end after the answer count, too.
        time.sleep(0.1)
        busy_s, own_s = _busy_s() - busy_s, time.process_time() - own_s
        text = log.read_text(errors="replace")
        is_found = re.search(self.pattern, text) is not None
        if status not in self.good or is_found != matches:
            tail = "\n".join(text.splitlines()[-40:])
            argv = " ".join(self.argv)
            raise BenchmarkError(f"{argv}: exit {status}, not what is measured:\n{tail}")
        cost = json.loads(result.read_text())
        pairs = zip(before, cluster.traffic(), strict=True)
        counts = [(later[0] - first[0], later[1] - first[1]) for first, later in pairs]
        logins, sessions = zip(*counts, strict=True)
        means = sum(sessions) / cluster.size, sum(logins) / cluster.size
        cpu_s, node_cpu_s = cost["cpu_s"], busy_s - own_s - cost["cpu_s"]
        costs = cost["wall_s"], cpu_s, node_cpu_s, cost["memory_mib"]
        sample = Sample(*costs, *means, max(logins))
        say(f"  {self.name}: {sample.wall_s:.2f} s, CPU {cpu_s:.2f} s, nodes {node_cpu_s:.2f} s")
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


# --- The processes of one probe on a node.

#: Probes whose processes are counted. The smallest count is taken: a probe reads a process that
#: waits for a disk twice, which starts two more.
TRACES = 3
_TRACE = "/tmp/nodeready-benchmark-trace"
# strace splits a call in two when another process makes one meanwhile.
_STARTED = re.compile(r"(?m)^\d+\s+(?:<\.\.\. )?(?:clone3?|v?fork)\b(?!.*CLONE_THREAD).*= \d+$")


def probe_budget(nodes: Cluster, data: dict[str, Any]) -> Budget:
    """The limit that the design sets for the processes of one probe by this policy."""
    count = processes_of(nodes.lab.nodes[0], probe_command(Policy(**data)), TRACES)
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

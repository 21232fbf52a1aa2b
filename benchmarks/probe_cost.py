"""`benchmarks/run probe_cost`: what one look costs a node, in processes and in CPU time.

The CPU time is that of the whole machine, while many nodes are looked at side by side by the way
of an audit, beyond that of as many `true`. What a shell's own children have used
(getrusage(2), RUSAGE_CHILDREN) is less: processes that outlive who started them are nobody's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import command, table
from benchmarks.cluster import cluster
from benchmarks.measure import BenchmarkError
from nodeready import shell
from nodeready.lab import Lab, Node
from nodeready.policy import Policy
from nodeready.subjects import snapshot
from nodeready.subjects.registry import LOOKED_AT
from nodeready.subjects.snapshot import make_script

#: Turns whose median is taken, each with all scripts, one after the other.
TURNS = 7
#: Looks whose processes are counted. The fewest count: where a process of the node waits for a
#: disk just then, the look looks once more, which costs two.
TRACES = 3
#: At most so many nodes are looked at side by side: more change nothing.
MOST = 32

#: Where the kernel counts the CPU time of a group of processes (cgroups v1): the nodes' own, on a
#: machine that others use as well.
_CPUACCT = Path("/sys/fs/cgroup/cpuacct")
_TRACE = "/tmp/nodeready-benchmark-trace"
_NOTHING, _EMPTY, _ALL = "true", "no section", "the look"
# strace cuts a call in two when another process does something meanwhile.
_STARTED = re.compile(r"(?m)^\d+\s+(?:<\.\.\. )?(?:clone3?|v?fork)\b(?!.*CLONE_THREAD).*= \d+$")
_PROGRAM = re.compile(r"(?m)^\d+\s+(?:<\.\.\. )?execve\b.*= 0$")


@dataclass(frozen=True)
class ProbeCost:
    """One look at one node. cpu_s: of the whole machine, beyond `true`, a node's part."""

    processes: int
    programs: int
    cpu_s: float


def probe_cost(lab: Lab, policy: Policy) -> ProbeCost:
    """Look at the nodes of a lab as `nodeready audit` and `deploy` do."""
    script = _script(policy)
    used = _used(lab, {_NOTHING: ":", _ALL: script})
    return ProbeCost(*_counted(lab.nodes[0], script), used[_ALL] - used[_NOTHING])


def _script(policy: Policy, subjects: tuple[str, ...] | None = None) -> str:
    return make_script(snapshot.sections(snapshot.probes(subjects)), policy, "benchmark")


def _counted(node: Node, script: str) -> tuple[int, int]:
    """Processes and programs that the script starts, without ssh."""
    line, stdin = shell.command(script, 60, "nodeready:benchmark")
    calls = "trace=clone,clone3,fork,vfork,execve"
    counts = []
    for _ in range(TRACES):
        node.enter(["strace", "-f", "-qq", "-e", calls, "-o", _TRACE, "sh", "-c", line], stdin)
        trace = node.read(_TRACE)
        counts.append((len(_STARTED.findall(trace)), len(_PROGRAM.findall(trace))))
    return min(counts)


def _used(lab: Lab, scripts: Mapping[str, str]) -> dict[str, float]:
    """CPU seconds of each script on one node. In a process of its own, for gevent's patches."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.probe_cost", "--measure", lab.name],
        input=json.dumps(scripts),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    if done.returncode:
        raise BenchmarkError(f"the look's cost: {done.stderr.strip()[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def _grouped(lab: Lab) -> Iterator[Path | None]:
    """A group of the nodes' processes and of all that they start; None: the kernel has none."""
    if not _CPUACCT.is_dir():
        yield None
        return
    group = _CPUACCT / f"nodeready-benchmark-{os.getpid()}"
    group.mkdir()
    spaces = {os.readlink(f"/proc/{node.pid}/ns/pid") for node in lab.nodes}
    try:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if os.readlink(entry / "ns/pid") in spaces:
                        (group / "cgroup.procs").write_text(entry.name)
        yield group
    finally:
        while left := (group / "cgroup.procs").read_text().split():
            for pid in left:
                with contextlib.suppress(OSError):
                    (_CPUACCT / "cgroup.procs").write_text(pid)
        group.rmdir()


def _cpu_s(group: Path | None) -> float:
    """CPU seconds of the nodes so far: of their group, or of this machine without ourselves."""
    if group is not None:
        return int((group / "cpuacct.usage").read_text()) / 1e9
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    # user, nice, system, irq, softirq (proc_stat(5)); the others are not work.
    busy = sum(int(words[number]) for number in (1, 2, 3, 6, 7))
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def _measure_all(name: str) -> dict[str, float]:
    """The medians of all scripts, which come as JSON on standard input, run over ssh."""
    from gevent import monkey

    monkey.patch_all()
    from pyinfra.api import Inventory

    from nodeready.transport.base import Request
    from nodeready.transport.ssh import Fleet

    scripts: dict[str, str] = json.load(sys.stdin)
    lab = Lab.load(name)
    assert lab is not None
    inventory = Inventory((lab.inventory_data()[:MOST], {}))
    used: dict[str, list[float]] = {kind: [] for kind in scripts}
    with Fleet(inventory, list(inventory)) as fleet, _grouped(lab) as group:

        def run(script: str) -> None:
            for node, answer in fleet.ask([Request(one, script, 60) for one in fleet.nodes]):
                if not answer.ok:
                    raise SystemExit(f"{node}: {answer.reason()}")

        for script in scripts.values():
            run(script)
        for _ in range(TURNS):
            for kind, script in scripts.items():
                before = _cpu_s(group)
                run(script)
                # What ended with the answer, and after it.
                time.sleep(0.1)
                used[kind].append(_cpu_s(group) - before)
    return {kind: statistics.median(found) / len(fleet.nodes) for kind, found in used.items()}


@dataclass
class Report:
    """By number of nodes: CPU seconds of each script on one node; processes of each, on one."""

    sizes: dict[int, dict[str, float]] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)
    command: str = ""
    about: str = ""

    def rows(self) -> list[tuple[str, ...]]:
        """A row for the whole look, one for each subject beyond a look at none."""
        head = ("CPU of a node beyond", "processes", *(f"{size} nodes" for size in self.sizes))
        found = [head]
        for kind in self.processes:
            base = _NOTHING if kind in (_ALL, _EMPTY) else _EMPTY
            found.append(
                (
                    f"{kind}, beyond {'`true`' if base == _NOTHING else base}",
                    f"{self.processes[kind] - (self.processes[base] if base == _EMPTY else 0)}",
                    *(f"{(one[kind] - one[base]) * 1000:.1f} ms" for one in self.sizes.values()),
                )
            )
        return found

    def text(self) -> str:
        return f"{table.aligned(self.rows())}\n\n{self.about}"

    def markdown(self) -> str:
        about = textwrap.fill(self.about, 98)
        return (
            f"## The look, on the node\n\n```\n{self.command}\n```\n\n{about}\n\n"
            f"{table.markdown(self.rows())}"
        )


def _measure(given: argparse.Namespace, ansible: Path | None) -> Report:
    policy, made = Policy(), Report()
    scripts = {_ALL: _script(policy), _EMPTY: _script(policy, ())}
    scripts.update({name: _script(policy, (name,)) for name in LOOKED_AT})
    for size in given.nodes:
        with (
            tempfile.TemporaryDirectory(prefix="nr-bench-") as scratch,
            cluster(size, Path(scratch), given.name) as nodes,
        ):
            made.sizes[size] = _used(nodes.lab, {_NOTHING: ":", **scripts})
            if not made.processes:
                node = nodes.lab.nodes[0]
                made.processes = {kind: _counted(node, one)[0] for kind, one in scripts.items()}
    return made


def main() -> int:
    """The command."""
    parser = command.options("probe_cost", __doc__, "16,32", 1)
    return command.main("probe_cost", parser, _measure, ("paramiko",))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(_measure_all(sys.argv[2])))
        sys.exit(0)
    sys.exit(main())

"""The cost of one probe to a node: the processes that it starts, and its CPU time.

The CPU time is that of all the nodes' processes during an audit, less that of `true`. That of a
shell's own children (getrusage(2), RUSAGE_CHILDREN) lacks processes that outlive their parent.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import Cluster
from benchmarks.contenders import Contender
from benchmarks.report import Budget
from nodeready.core import shell
from nodeready.core.policy import Policy
from nodeready.core.probe_script import make_script
from nodeready.lab import LabNode
from nodeready.subjects import snapshot

#: Turns whose median is taken.
TURNS = 7
#: Probes whose processes are counted. The smallest count is taken: a probe reads a process that
#: waits for a disk twice, which starts two more.
TRACES = 3

#: Where the kernel counts the CPU time of a group of processes (cgroups v1).
_CPUACCT = Path("/sys/fs/cgroup/cpuacct")
_TRACE = "/tmp/nodeready-benchmark-trace"
# strace splits a call in two when another process makes one meanwhile.
_STARTED = re.compile(r"(?m)^\d+\s+(?:<\.\.\. )?(?:clone3?|v?fork)\b(?!.*CLONE_THREAD).*= \d+$")


@dataclass(frozen=True)
class ProbeCost:
    """The cost of one probe to one node. cpu_s: beyond `true`."""

    processes: int
    cpu_s: float

    def budgets(self) -> list[Budget]:
        """The limits that the design sets."""
        return [
            Budget("one probe: processes started", 48, self.processes),
            Budget("one probe beyond `true`, a node: CPU", 54, self.cpu_s * 1000, " ms"),
        ]


def probe_cost(nodes: Cluster, audit: Contender, unit: Contender, policy: Policy) -> ProbeCost:
    """The cost of the probe of ``audit``; ``unit`` is `true` on the same nodes."""
    beyond = []
    with _cpu_group(nodes) as group:
        for _ in range(TURNS):
            cpu_s = {
                contender.name: _cpu_of_run(nodes, contender, group) for contender in (unit, audit)
            }
            beyond.append(cpu_s[audit.name] - cpu_s[unit.name])
    cpu_s_per_node = statistics.median(beyond) / nodes.size
    return ProbeCost(_count_processes(nodes.lab.nodes[0], policy), cpu_s_per_node)


def _count_processes(node: LabNode, policy: Policy) -> int:
    """The number of processes that the probe starts, without ssh."""
    script = make_script(snapshot.sections(snapshot.probes()), policy, "benchmark")
    line, stdin = shell.command(script, 60, "nodeready:benchmark")
    calls = "trace=clone,clone3,fork,vfork"
    counts = []
    for _ in range(TRACES):
        node.enter(["strace", "-f", "-qq", "-e", calls, "-o", _TRACE, "sh", "-c", line], stdin)
        counts.append(len(_STARTED.findall(node.read(_TRACE))))
    return min(counts)


@contextlib.contextmanager
def _cpu_group(nodes: Cluster) -> Iterator[Path | None]:
    """A cgroup of the nodes' processes and their children; None where the kernel has none."""
    if not _CPUACCT.is_dir():
        yield None
        return
    group = _CPUACCT / f"nodeready-benchmark-{os.getpid()}"
    group.mkdir()
    namespaces = {os.readlink(f"/proc/{node.pid}/ns/pid") for node in nodes.lab.nodes}
    try:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if os.readlink(entry / "ns/pid") in namespaces:
                        (group / "cgroup.procs").write_text(entry.name)
        yield group
    finally:
        while pids := (group / "cgroup.procs").read_text().split():
            for pid in pids:
                with contextlib.suppress(OSError):
                    (_CPUACCT / "cgroup.procs").write_text(pid)
        group.rmdir()


def _cpu_of_run(nodes: Cluster, contender: Contender, group: Path | None) -> float:
    """CPU seconds of the nodes during a run; without a group, of the machine less the command."""
    before, own_before = _cpu_s(group), time.process_time()
    sample = contender.run(nodes)
    # Processes that end after the answer count, too.
    time.sleep(0.1)
    used = _cpu_s(group) - before
    return used if group else used - sample.cpu_s - (time.process_time() - own_before)


def _cpu_s(group: Path | None) -> float:
    """CPU seconds so far, of the group or of this machine."""
    if group is not None:
        return int((group / "cpuacct.usage").read_text()) / 1e9
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    # user, nice, system, irq, softirq (proc_stat(5)); the remaining times are no work.
    busy = sum(int(words[number]) for number in (1, 2, 3, 6, 7))
    return busy / os.sysconf("SC_CLK_TCK")

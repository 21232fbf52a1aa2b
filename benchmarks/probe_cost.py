"""What one look costs a node: processes started and CPU time, for all subjects together."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass

from nodeready import shell
from nodeready.lab import Node
from nodeready.policy import Policy
from nodeready.subjects import snapshot
from nodeready.subjects.snapshot import make_script

#: Looks whose median is taken; the first ones also fill the node's caches.
LOOKS = 9
#: Looks whose processes are counted. The fewest count: a process that waits for a disk just then is
#: looked at once more, which costs two.
TRACES = 3

_TRACE = "/tmp/nodeready-benchmark-trace"
_CPU = """\
import resource, subprocess, sys
subprocess.run(["sh", "-c", sys.argv[1]], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
"""
# strace cuts a call in two when another process does something meanwhile.
_STARTED = re.compile(r"(?m)^\d+\s+(?:<\.\.\. )?(?:clone3?|v?fork)\b(?!.*CLONE_THREAD).*= \d+$")
_PROGRAM = re.compile(r"(?m)^\d+\s+(?:<\.\.\. )?execve\b.*= 0$")


@dataclass(frozen=True)
class ProbeCost:
    """One look at one node. cpu_s: user and system time of all its processes, median."""

    processes: int
    programs: int
    cpu_s: float


def probe_cost(node: Node, policy: Policy) -> ProbeCost:
    """Look at a node of the lab, without ssh, as `nodeready audit` and `deploy` do."""
    script = make_script(snapshot.sections(snapshot.probes()), policy, "benchmark")
    line, stdin = shell.command(script, 60, "nodeready:benchmark")
    calls = "trace=clone,clone3,fork,vfork,execve"
    counts = []
    for _ in range(TRACES):
        node.enter(["strace", "-f", "-qq", "-e", calls, "-o", _TRACE, "sh", "-c", line], stdin)
        trace = node.read(_TRACE)
        counts.append((len(_STARTED.findall(trace)), len(_PROGRAM.findall(trace))))
    looks = [
        float(node.enter(["/usr/bin/python3", "-c", _CPU, line], stdin).stdout)
        for _ in range(LOOKS)
    ]
    return ProbeCost(*min(counts), statistics.median(looks))

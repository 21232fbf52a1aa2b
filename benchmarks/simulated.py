"""Thousands of nodes' answers, judged and rendered by a process of its own on one core.

The answers are those of one real look at a lab node, with another name for each node and every
hundredth node with another driver, kernel or setting, so that there is something to report.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import BenchmarkError
from nodeready import shell
from nodeready.audit import peers as outliers
from nodeready.audit.document import Audit, NodeReport
from nodeready.lab import Lab, down
from nodeready.policy import Policy
from nodeready.reports import json_report, junit, monitoring
from nodeready.reports.table import show_audit
from nodeready.subjects import snapshot
from nodeready.subjects.registry import SUBJECTS

NONCE = "0" * 16
FORMATS = {
    "json": json_report.audit,
    "junit": junit.render,
    "nagios": monitoring.nagios,
    "prometheus": monitoring.prometheus,
}


@dataclass(frozen=True)
class Simulated:
    """What so many answers cost. Seconds of wall time; render: all formats, one after another."""

    profile: str
    nodes: int
    read_s: float
    judge_s: float
    compare_s: float
    render_s: dict[str, float]
    peak_mb: float

    @property
    def judged_and_rendered_s(self) -> float:
        """Judging, comparing, and the slowest of the formats: a run renders one."""
        return self.judge_s + self.compare_s + max(self.render_s.values())

    def row(self) -> tuple[str, ...]:
        render = ", ".join(f"{name} {value:.1f}" for name, value in self.render_s.items())
        total = self.read_s + self.judge_s + self.compare_s + max(self.render_s.values())
        return (
            f"{self.nodes} ({self.profile})",
            f"{self.read_s:.1f} s",
            f"{self.judge_s:.1f} s",
            f"{self.compare_s:.1f} s",
            f"{render} s",
            f"{total:.1f} s",
            f"{self.peak_mb:.0f} MiB",
        )


def simulate(profile: str, nodes: int, name: str) -> Simulated:
    """Take one answer of a lab node of this profile, and measure in a process of its own."""
    command = shell.command(
        snapshot.make_script(snapshot.sections(snapshot.probes()), Policy(), NONCE),
        60,
        "nodeready:benchmark",
    )
    down(name)
    try:
        answer = (
            Lab.up(name, nodes=1, profile=profile)
            .nodes[0]
            .run(command.line, input=command.stdin)
            .stdout
        )
    finally:
        down(name)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.simulated", profile, str(nodes)],
        input=answer,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    if done.returncode != 0:
        raise BenchmarkError(f"simulated answers: {done.stderr.strip()[-2000:]}")
    return Simulated(**json.loads(done.stdout))


def _measure(profile: str, nodes: int, answer: str) -> Simulated:
    policy, odd = Policy(), Policy(ptrace_scope=1, timezone="Mars/Olympus", shm_min_mb=1 << 29)
    chosen = snapshot.probes()
    started = time.perf_counter()
    seen = [snapshot.read(answer, chosen, policy, NONCE) for _ in range(nodes)]
    read = time.perf_counter()
    judged = [
        snapshot.judge(one, policy if number % 100 else odd) for number, one in enumerate(seen)
    ]
    reports = tuple(
        NodeReport.of(f"gpu{number:05}", results, snapshot=one, seconds=1.0)
        for number, (one, results) in enumerate(zip(seen, judged, strict=True))
    )
    done = time.perf_counter()
    audit = Audit(
        "2026-01-01T00:00:00Z",
        "2026-01-01T00:00:10Z",
        "0" * 16,
        reports,
        outliers.find(reports, SUBJECTS),
    )
    compared = time.perf_counter()
    render: dict[str, float] = {}
    with open(os.devnull, "w", encoding="utf-8") as out:
        for name, make in FORMATS.items():
            begun = time.perf_counter()
            out.writelines(make(audit))
            render[name] = time.perf_counter() - begun
        begun = time.perf_counter()
        out.writelines(f"{line.plain}\n" for line in show_audit(audit))
        render["table"] = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Simulated(profile, nodes, read - started, done - read, compared - done, render, peak)


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    result = _measure(sys.argv[1], int(sys.argv[2]), sys.stdin.read())
    print(json.dumps(result.__dict__))

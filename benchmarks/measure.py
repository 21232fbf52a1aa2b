"""One run of one command: its cost on the control machine, and its traffic to the nodes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from benchmarks import timed
from benchmarks.cluster import Cluster
from benchmarks.report import Rows


class BenchmarkError(Exception):
    """A run failed, or did not do what is measured."""


@dataclass(frozen=True)
class Sample:
    """The cost of one run, or the medians of several.

    wall_s:      from start to exit
    cpu_s:       user and system time on the control machine, all processes of the run
    sessions:    commands and file transfers, per node
    logins:      connections, per node
    most_logins: connections to the node with most of them
    """

    wall_s: float
    cpu_s: float
    sessions: float
    logins: float
    most_logins: float


def run(
    cluster: Cluster,
    argv: Sequence[str],
    environment: Mapping[str, str],
    accept: Callable[[int, str], bool],
    cwd: Path,
) -> Sample:
    """Run a command against the cluster. Raises BenchmarkError unless ``accept(status, output)``.

    Its output goes to a file: a terminal or a pipe that is read slowly would be measured too.
    """
    result, log = cluster.directory / "cost.json", cluster.directory / "output"
    before = cluster.traffic()
    wrapper = [sys.executable, "-S", str(Path(timed.__file__)), str(result), "--"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*wrapper, *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=cwd,
        )
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    text = log.read_text(errors="replace")
    if not accept(status, text):
        tail = "\n".join(text.splitlines()[-40:])
        raise BenchmarkError(f"{' '.join(argv)}: exit {status}, not what is measured:\n{tail}")
    cost, after = json.loads(result.read_text()), cluster.traffic()
    logins = [later - earlier for earlier, later in zip(before.logins, after.logins, strict=True)]
    sessions = sum(after.sessions) - sum(before.sessions)
    return Sample(
        cost["wall_s"],
        cost["cpu_s"],
        sessions / cluster.size,
        sum(logins) / cluster.size,
        max(logins),
    )


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
    head = ("", "runs", "wall", f"÷ {letter}", "CPU", "CPU/node", "commands", "logins", "most")
    rows = []
    for name, runs in samples.items():
        sample = median(runs)
        row = (
            name,
            str(len(runs)),
            f"{sample.wall_s:.2f} s",
            f"{sample.wall_s / unit_s:.2f}",
            f"{sample.cpu_s:.2f} s",
            f"{sample.cpu_s / size * 1000:.1f} ms",
            f"{sample.sessions:.4g}",
            f"{sample.logins:.4g}",
            f"{sample.most_logins:.0f}",
        )
        ratio = ratios[1].get(name) if ratios else None
        rows.append((*row, *([f"{ratio:.2f}" if ratio else ""] if ratios else [])))
    return [(*head, *([ratios[0]] if ratios else [])), *rows]


def say(text: str) -> None:
    """Print progress beside the result."""
    print(text, file=sys.stderr, flush=True)

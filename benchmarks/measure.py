"""One run of one contender: what it cost here, and what the nodes saw of it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import timed
from benchmarks.cluster import Cluster


class BenchmarkError(Exception):
    """A run did not do what is measured; the text says which and why."""


@dataclass(frozen=True)
class Sample:
    """The cost of one run, or the medians of several.

    wall_s:   from start to exit
    cpu_s:    user and system time on the control machine, all processes of the run
    sessions: commands and file transfers, per node
    logins:   connections, per node
    """

    wall_s: float
    cpu_s: float
    sessions: float
    logins: float


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
    said = log.read_text(errors="replace")
    if not accept(status, said):
        tail = "\n".join(said.splitlines()[-40:])
        raise BenchmarkError(f"{' '.join(argv)}: exit {status}, not what is measured:\n{tail}")
    cost, after = json.loads(result.read_text()), cluster.traffic()
    return Sample(
        cost["wall_s"],
        cost["cpu_s"],
        (after.sessions - before.sessions) / cluster.size,
        (after.connections - before.connections) / cluster.size,
    )


def median(samples: Sequence[Sample]) -> Sample:
    """Each value's median, by itself."""
    return Sample(
        *(
            statistics.median(getattr(sample, name) for sample in samples)
            for name in ("wall_s", "cpu_s", "sessions", "logins")
        )
    )

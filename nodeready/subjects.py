"""The subjects: the probe and the judge of each, under one name, in the order of the reports."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

from nodeready.checks import core_dumps, ptrace
from nodeready.policy import Policy
from nodeready.probes import core_dumps as core_dumps_probe
from nodeready.probes import ours
from nodeready.probes import ptrace as ptrace_probe
from nodeready.probes.base import Probe
from nodeready.results import Result

Judge = Callable[[Any, Policy], List[Result]]

#: subject -> (probe, judge)
SUBJECTS: Dict[str, Tuple[Probe, Judge]] = {
    "ptrace": (ptrace_probe.PROBE, ptrace.judge),
    "core_dumps": (core_dumps_probe.PROBE, core_dumps.judge),
}

#: The probes of a snapshot: the subjects', and the one that reads the files of ours.
PROBES: Tuple[Probe, ...] = (*(probe for probe, _ in SUBJECTS.values()), ours.PROBE)

"""The subjects: the probe and the judge of each, under one name, in the order of the reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nodeready.checks import core_dumps, debug_tools, iommu, limits, pdsh, ptrace, ssh_client
from nodeready.policy import Policy
from nodeready.probes import core_dumps as core_dumps_probe
from nodeready.probes import debug_tools as debug_tools_probe
from nodeready.probes import iommu as iommu_probe
from nodeready.probes import limits as limits_probe
from nodeready.probes import ours
from nodeready.probes import pdsh as pdsh_probe
from nodeready.probes import ptrace as ptrace_probe
from nodeready.probes import ssh_client as ssh_client_probe
from nodeready.probes.base import Probe
from nodeready.results import Result

Judge = Callable[[Any, Policy], list[Result]]

#: subject -> (probe, judge)
SUBJECTS: dict[str, tuple[Probe, Judge]] = {
    "ptrace": (ptrace_probe.PROBE, ptrace.judge),
    "core_dumps": (core_dumps_probe.PROBE, core_dumps.judge),
    "limits": (limits_probe.PROBE, limits.judge),
    "ssh_client": (ssh_client_probe.PROBE, ssh_client.judge),
    "pdsh": (pdsh_probe.PROBE, pdsh.judge),
    "iommu": (iommu_probe.PROBE, iommu.judge),
    "debug_tools": (debug_tools_probe.PROBE, debug_tools.judge),
}

#: The probes of a snapshot: the subjects', and the one that reads the files of ours.
PROBES: tuple[Probe, ...] = (*(probe for probe, _ in SUBJECTS.values()), ours.PROBE)

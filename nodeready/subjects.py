"""The subjects: the probe, the checks and the comparable facts of each, under one name.

Their order is that of the reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nodeready.checks import (
    core_dumps,
    debug_tools,
    gate,
    gpus,
    host,
    iommu,
    limits,
    nics,
    pdsh,
    ports,
    ptrace,
    rdma,
    ssh_client,
)
from nodeready.policy import Policy
from nodeready.probes import core_dumps as core_dumps_probe
from nodeready.probes import debug_tools as debug_tools_probe
from nodeready.probes import gate as gate_probe
from nodeready.probes import gpus as gpus_probe
from nodeready.probes import host as host_probe
from nodeready.probes import host_facts, ours
from nodeready.probes import iommu as iommu_probe
from nodeready.probes import limits as limits_probe
from nodeready.probes import nics as nics_probe
from nodeready.probes import pdsh as pdsh_probe
from nodeready.probes import ports as ports_probe
from nodeready.probes import ptrace as ptrace_probe
from nodeready.probes import rdma as rdma_probe
from nodeready.probes import ssh_client as ssh_client_probe
from nodeready.probes.base import Probe
from nodeready.results import Result

Check = Callable[[Any, Policy], Result]


def _nothing(seen: Any) -> Mapping[str, Any]:
    return {}


def _proofs() -> tuple[Check, ...]:
    # All that proves comes along with them: an audit on the node starts without it.
    from nodeready.checks import proof

    return proof.CHECKS


@dataclass(frozen=True)
class Subject:
    """One subject in all rooms.

    probe:    how it is observed; None: by acting, before a job (nodeready/proofs)
    load:     gives the checks
    compared: what the nodes of a group should have in common: fact -> number or text. The fact's
              name is relative to the subject (``driver``, ``eth0.mtu``); a value that could not be
              observed is left out
    learned:  the policy that this node would fit: key of Policy -> value as group_data holds it
    """

    name: str
    probe: Probe | None
    load: Callable[[], tuple[Check, ...]]
    compared: Callable[[Any], Mapping[str, Any]] = _nothing
    learned: Callable[[Any], Mapping[str, Any]] = _nothing

    @property
    def checks(self) -> tuple[Check, ...]:
        """Pure functions (observed, policy) -> Result; the id is ``SUBJECT.FUNCTION``."""
        return self.load()

    def ids(self) -> list[str]:
        """The ids of its checks."""
        return [f"{self.name}.{check.__name__}" for check in self.checks]


_ALL = (
    Subject("ptrace", ptrace_probe.PROBE, lambda: ptrace.CHECKS),
    Subject("core_dumps", core_dumps_probe.PROBE, lambda: core_dumps.CHECKS),
    Subject("limits", limits_probe.PROBE, lambda: limits.CHECKS),
    Subject("ssh_client", ssh_client_probe.PROBE, lambda: ssh_client.CHECKS),
    Subject("pdsh", pdsh_probe.PROBE, lambda: pdsh.CHECKS),
    Subject("iommu", iommu_probe.PROBE, lambda: iommu.CHECKS),
    Subject("debug_tools", debug_tools_probe.PROBE, lambda: debug_tools.CHECKS),
    Subject("gate", gate_probe.PROBE, lambda: gate.CHECKS),
    Subject(
        "gpus", gpus_probe.PROBE, lambda: gpus.CHECKS, gpus_probe.compared, gpus_probe.learned
    ),
    Subject(
        "nics", nics_probe.PROBE, lambda: nics.CHECKS, nics_probe.compared, nics_probe.learned
    ),
    Subject(
        "rdma", rdma_probe.PROBE, lambda: rdma.CHECKS, rdma_probe.compared, rdma_probe.learned
    ),
    Subject("ports", ports_probe.PROBE, lambda: ports.CHECKS, ports_probe.compared),
    Subject(
        "host", host_probe.PROBE, lambda: host.CHECKS, host_facts.compared, host_facts.learned
    ),
    Subject("proof", None, _proofs),
)

SUBJECTS: dict[str, Subject] = {subject.name: subject for subject in _ALL}

#: The subjects that a look observes. The others are proved by acting.
LOOKED_AT = tuple(subject.name for subject in _ALL if subject.probe)

#: The subjects that operations change; the others are only looked at.
CHANGED = ("ptrace", "core_dumps", "limits", "ssh_client", "pdsh", "iommu", "debug_tools", "gate")

#: The subjects from which a policy can be learnt.
LEARNED = tuple(subject.name for subject in _ALL if subject.learned is not _nothing)

#: What stands for a subject that could not be observed: ``SUBJECT.observed``.
OBSERVED = "observed"

#: The probes of a snapshot: the subjects', and the one that reads the files of ours.
PROBES: tuple[Probe, ...] = (*(s.probe for s in _ALL if s.probe), ours.PROBE)


def check_ids() -> list[str]:
    """The id of every check, in the order of the reports."""
    return [check for subject in _ALL for check in subject.ids()]

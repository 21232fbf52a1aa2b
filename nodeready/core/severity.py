"""What a failed check costs a job, and the ladder of actions that repairs it.

The status of a result says how sure a finding is, as the severities of NVIDIA's Health Validation,
DCGM and gpud do. The severity here says what is lost: two failures of one status can stop a job
for days or differ from the policy without harm.

The actions are those of NVIDIA's Xid catalog (RESTART_APP, RESET_GPU, RESTART_BM, CONTACT_SUPPORT,
CHECK_MECHANICALS), of its Health Validation (reset_gpu, then service_required) and of gpud
(REBOOT_SYSTEM, HARDWARE_INSPECTION), with those for software and cables, which these lack.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

LOSES_JOB, SLOWS_JOB = "loses_job", "slows_job"
HIDES_CAUSE, DRIFTS = "hides_cause", "drifts"
#: Severity -> its meaning; the worst first.
SEVERITIES = {
    LOSES_JOB: "a job on the node does not start, dies, hangs or computes wrong",
    SLOWS_JOB: "a job runs, and slows down all its ranks",
    HIDES_CAUSE: "a job runs, but its hang or crash cannot be debugged",
    DRIFTS: "the node differs from the policy, without harm to a job today",
}

#: Action -> its meaning; the mildest first, which is the order of every ladder.
ACTIONS = {
    "deploy": "`nodeready deploy`",
    "monitor": "nothing yet; the next action if it comes back",
    "inspect": "find the cause first: the logs, the fans, a longer test",
    "clean_up": "end the processes or remove the files that hold a port, memory or space",
    "configure": "change a setting by hand: of the node, its firmware, a switch, the policy",
    "install": "install or update a package, a driver, a kernel or a firmware",
    "restart_service": "restart a service",
    "reset_gpu": "drain the node, then reset the GPU",
    "reload_driver": "drain the node, then unload and load the driver",
    "reboot": "drain the node, then reboot",
    "power_cycle": "drain the node, then switch its power off and on",
    "reseat": "reseat a cable, a transceiver or a card; replace a cable or a transceiver",
    "replace": "drain the node and replace the part: a case with the vendor (RMA)",
}
#: The actions that take the node, or a part of it, out of service.
DISRUPTIVE = tuple(ACTIONS)[list(ACTIONS).index("restart_service") :]
#: The actions that need a source: hands, or a vendor's word.
HARDWARE = ("reset_gpu", "power_cycle", "reseat", "replace")

# --- The sources of ladders with hardware.

XID_CATALOG = "NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors)"
GUIDELINES = "NVIDIA's GPU debug guidelines (docs.nvidia.com/deploy/gpu-debug-guidelines)"
VALIDATION = "NVIDIA's Health Validation (docs.nvidia.com/health-validation/reference/checks)"
MEMORY_ERRORS = "NVIDIA's memory error management (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt)"
RETIREMENT = "NVIDIA's dynamic page retirement (docs.nvidia.com/deploy/dynamic-page-retirement)"
FABRIC = (
    "NVIDIA's Fabric Manager guide (docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide)"
)
AMDGPU_RAS = "the kernel's amdgpu RAS support (docs.kernel.org/gpu/amdgpu/ras.html)"
LINK_ERRORS = "OpenFabrics Alliance, overview of error counters: reseat cable and card"
LEMONS = "the removal of lemon nodes at Meta (arXiv 2410.21680)"
CABLES = "Cornelis, diagnosing bad cables: reseat, swap, replace"


class Cost(NamedTuple):
    """What a failure costs, and what repairs it."""

    severity: str  # one of SEVERITIES
    actions: tuple[str, ...]  # some of ACTIONS, in their order: each if the previous did not help
    source: str = ""  # who names these actions; "" for software, where the check itself knows

    def since(self, action: str) -> tuple[str, ...]:
        """The ladder from this action on, for a finding that needs no milder one."""
        return self.actions[self.actions.index(action) :]


def _cost(severity: str, *actions: str, source: str = "") -> Cost:
    return Cost(severity, actions, source)


loses_job = partial(_cost, LOSES_JOB)
slows_job = partial(_cost, SLOWS_JOB)
hides_cause = partial(_cost, HIDES_CAUSE)
drifts = partial(_cost, DRIFTS)


def severity_rank(severity: str) -> int:
    """Its place in the order of SEVERITIES; "" is first, because it can be the worst."""
    return list(SEVERITIES).index(severity) if severity else -1


def ladder_text(cost: Cost) -> str:
    """``reset GPU, then reboot, then replace (SOURCE)``."""
    text = ", then ".join(map(words, cost.actions))
    return f"{text} ({cost.source})" if cost.source else text


def words(name: str) -> str:
    """A severity or an action in words.

    >>> words("reset_gpu")
    'reset GPU'
    """
    return name.replace("_", " ").replace("gpu", "GPU")

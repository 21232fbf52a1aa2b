"""CHANGE a node: each operation makes the checks pass that name the operation in ``fixed_by``.

An operation does not judge: it asks the check. A line per subject that has operations.
STEPS is the order in which `nodeready deploy` runs them: the registry's order of subjects, and
within a subject the order of its STEPS; `nodeready.deploys` takes the same for pyinfra.
"""

from __future__ import annotations

from nodeready.operations import core_dumps as core_dumps
from nodeready.operations import debug_tools as debug_tools
from nodeready.operations import gate as gate
from nodeready.operations import iommu as iommu
from nodeready.operations import limits as limits
from nodeready.operations import pdsh as pdsh
from nodeready.operations import ptrace as ptrace
from nodeready.operations import ssh_client as ssh_client
from nodeready.runs.deploy.step import DeployStep
from nodeready.subjects.registry import CHANGED

STEPS: tuple[DeployStep, ...] = tuple(step for name in CHANGED for step in globals()[name].STEPS)

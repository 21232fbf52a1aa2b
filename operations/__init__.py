"""The operations: each makes the checks of its subject pass.

STEPS is the order in which `nodeready deploy` runs them; deploy.py lists the same for pyinfra.
What needs the network comes last, so that a package mirror that is down stops nothing else.
"""

from __future__ import annotations

from nodeready.operations import (
    core_dumps,
    debug_tools,
    gate,
    iommu,
    limits,
    pdsh,
    ptrace,
    ssh_client,
)
from nodeready.operations.step import Step

__all__ = [
    "STEPS",
    "core_dumps",
    "debug_tools",
    "gate",
    "iommu",
    "limits",
    "pdsh",
    "ptrace",
    "ssh_client",
]

STEPS: tuple[Step, ...] = (
    ptrace.selinux,
    ptrace.scope,
    core_dumps.rewriters,
    core_dumps.directory,
    core_dumps.pattern,
    core_dumps.size,
    limits.logins,
    limits.services,
    limits.restart,
    ssh_client.known_hosts,
    ssh_client.options,
    # Behind the options: "yes" goes before the keys that it needs.
    ssh_client.leftover,
    pdsh.rcmd,
    pdsh.pdshrc,
    iommu.args,
    debug_tools.py_spy,
    debug_tools.packages,
    # Last: the node begins to judge itself when everything else is in place.
    gate.leftover,
    gate.program,
    gate.timer,
    gate.slurm,
)

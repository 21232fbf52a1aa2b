"""The operations: each makes the checks of its subject pass.

STEPS is the order in which `nodeready deploy` runs them; deploy.py lists the same for pyinfra.
What needs the network comes last, so that a package mirror that is down stops nothing else.
"""

from __future__ import annotations

from nodeready.operations import core_dumps, ptrace
from nodeready.operations.step import Step

STEPS: tuple[Step, ...] = (
    ptrace.selinux,
    ptrace.scope,
    core_dumps.rewriters,
    core_dumps.directory,
    core_dumps.pattern,
    core_dumps.size,
)

"""`healthcheck`: what `record` does and, where the policy says so, the node's drain in Slurm."""

from __future__ import annotations

import sys
import syslog
import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from nodeready import exit_codes
from nodeready.local import drain, gate
from nodeready.local.verdict import Verdict

if TYPE_CHECKING:
    from nodeready.policy import Policy

#: Seconds for all that Slurm is asked and told. It ends a health check after 60.
_SLURM_S = 2 * drain.SCONTROL_S


def arguments(parser: ArgumentParser) -> None:
    """No options of its own."""


def tell(found: Verdict, until: float) -> str:
    """Have Slurm give this node jobs or not, by its verdict; in the log of the node, too.

    until: time.monotonic() at which Slurm must have answered
    Returns why Slurm could not be told, or "".
    """
    try:
        told = drain.settle(found.reasons, found.go, until)
    except drain.DrainError as error:
        syslog.syslog(syslog.LOG_WARNING, f"nodeready: {error}")
        return str(error)
    if told:
        syslog.syslog(syslog.LOG_NOTICE, f"nodeready: scontrol update {told}")
    return ""


def run(policy: Policy, given: Namespace) -> int:
    """Audit, keep the verdict, tell Slurm. Returns the audit's exit code, 1 when a part failed."""
    from nodeready.local import here
    from nodeready.selection import select

    left = max(0.5, policy.gate_budget_s - (time.monotonic() - gate.BEGAN))
    found, problems = gate.keep(here.audit(policy, select(subjects=here.SEEN), left), policy)
    if policy.gate_drain:
        problem = tell(found, time.monotonic() + _SLURM_S)
        problems += [problem] if problem else []
    print(gate.told(found.go, found.reasons))
    for problem in problems:
        print(f"nodeready: {problem}", file=sys.stderr)
    return exit_codes.exit_code(failed=bool(problems), check=not found.go)

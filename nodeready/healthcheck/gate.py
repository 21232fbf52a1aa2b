"""`record` and `prolog`: the timer keeps a verdict, and a job's prolog asks for it."""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nodeready import exit_codes
from nodeready.healthcheck import verdict
from nodeready.healthcheck.verdict import Verdict
from nodeready.policy import Policy
from nodeready.policy.load import digest
from nodeready.text import sanitise

if TYPE_CHECKING:
    from nodeready.audit.document import Audit

#: Characters of all reasons together: a log has them on one line.
_LENGTH = 1000
#: Seconds of the prolog's budget that are for scontrol, at most a fourth of it.
_SLURM_S = 2.5
#: Seconds that scontrol may take beyond the budget; the prolog's program ends us 2 s after it.
_LATE_S = 1.0
#: When this process began to work, by time.monotonic(): the budget counts from here.
BEGAN = time.monotonic()


def arguments(parser: ArgumentParser) -> None:
    """No options of their own."""


def told(go: bool, reasons: Iterable[str]) -> str:
    """A verdict on one line."""

    return "nodeready: go" if go else sanitise(f"nodeready: no-go: {'; '.join(reasons)}", _LENGTH)


def judged(audit: Audit, policy: Policy) -> Verdict:
    """The verdict that an audit of this machine comes to."""
    from nodeready.audit import document as readiness

    (node,) = audit.nodes
    return Verdict(
        time.time(),
        verdict.boot_id(),
        digest([policy]),
        readiness.go(node.results),
        tuple(readiness.reasons(node.results)),
    )


def keep(audit: Audit, policy: Policy) -> tuple[Verdict, list[str]]:
    """Keep the verdict and the metrics of an audit. Returns it, and what could not be written."""
    from nodeready.healthcheck import audit as report

    found, problems = judged(audit, policy), []
    try:
        verdict.write(found)
    except OSError as error:
        problems.append(_problem(error, verdict.PATH))
    textfile = policy.gate_textfile
    if textfile and os.path.isdir(os.path.dirname(textfile)):
        try:
            report.write(report.of_audit(audit, "prometheus"), textfile)
        except OSError as error:
            problems.append(_problem(error, textfile))
    return found, problems


def _problem(error: OSError, path: str) -> str:
    return f"{error.strerror or error}: {error.filename or path}"


def record(policy: Policy, given: Namespace) -> int:
    """Audit, and keep the verdict and the Prometheus textfile. Returns the audit's exit code."""
    from nodeready.healthcheck import here
    from nodeready.subjects.selection import select

    audit = here.audit(policy, select(subjects=here.SEEN))
    found, problems = keep(audit, policy)
    print(told(found.go, found.reasons))
    for problem in problems:
        print(f"nodeready: {problem}", file=sys.stderr)
    return exit_codes.exit_code(failed=bool(problems), check=not found.go)


def prolog(policy: Policy, given: Namespace) -> int:
    """Answer from a fresh verdict, else from a look within the budget: 0 for go, 3 for no-go.

    A no-go is looked at again: the node may have been repaired since, and a job's failed prolog
    costs more than a look.
    """
    found = verdict.read(digest([policy]), policy.gate_max_age_s)
    if found is None or not found.go:
        from nodeready.healthcheck import here
        from nodeready.subjects.selection import select

        left = max(0.5, policy.gate_budget_s - (time.monotonic() - BEGAN))
        # What is left for Slurm when the look takes all the time that it has.
        slurm_s = min(_SLURM_S, left / 4) if policy.gate_drain else 0.0
        found = judged(here.audit(policy, select(subjects=here.SEEN), left - slurm_s), policy)
    if policy.gate_drain and not found.go:
        from nodeready.healthcheck.drain import tell

        pass

        # Slurm itself drains a node whose prolog fails, and the first reason stays: ours says why.
        # Never for a node that is ready: a large job would ask slurmctld once for every node.
        problem = tell(found, BEGAN + policy.gate_budget_s + _LATE_S)
        if problem:
            print(f"nodeready: {problem}", file=sys.stderr)
    print(told(found.go, found.reasons))
    return exit_codes.exit_code(check=not found.go)

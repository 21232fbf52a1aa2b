"""`audit` and `ready` on the node: what differs from the policy here, and go or no-go for a job.

Neither changes the node. A file is written for `--output` alone.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nodeready.policy import Policy
from nodeready.policy.fields import port_range
from nodeready.policy.policy import PolicyError, check_settings
from nodeready.reports.registry import Options, find, names

if TYPE_CHECKING:
    from nodeready.audit.document import Audit, Ready

#: The formats of an audit, and those of a go or no-go.
AUDIT, READY = names("audit", on_node=True), names("ready", on_node=True)


# --- `audit`: what differs from the policy on this node.


def arguments(parser: ArgumentParser) -> None:
    """The options of `audit`."""
    from nodeready.healthcheck.here import LIMIT_S

    parser.add_argument("--format", choices=AUDIT, default="table")
    parser.add_argument("-o", "--output", metavar="FILE", help="whole or not at all")
    parser.add_argument("--only", metavar="CHECK,...", help="only these checks or subjects")
    parser.add_argument("--skip", metavar="CHECK,...", help="not these")
    parser.add_argument(
        "--fail-on", choices=("fail", "warn"), default="fail", help="what makes the exit status 3"
    )
    parser.add_argument(
        "--timeout", type=int, default=LIMIT_S, metavar="S", help="seconds; default %(default)s"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="nothing when all is well")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="every check")


def run(policy: Policy, given: Namespace) -> int:
    """`audit`. Returns the exit code. Raises PolicyError for a selection without a check."""
    from nodeready.audit.document import audit_code
    from nodeready.healthcheck import here
    from nodeready.subjects.registry import SelectionError, select

    try:
        chosen = select(given.only, given.skip, here.SEEN)
    except SelectionError as error:
        raise PolicyError([str(error)]) from None
    found = here.audit(policy, chosen, max(1, given.timeout))
    code = audit_code(found, given.fail_on)
    if code or not given.quiet or given.output or given.format != "table":
        write(of_audit(found, given.format, given.verbose), given.output)
    if given.format == "nagios":
        from nodeready.reports import nagios

        return nagios.state(found)
    return code


# --- `ready`: go or no-go, proven by acting, within a budget.


def ready_arguments(parser: ArgumentParser) -> None:
    """The options of `ready`."""
    parser.add_argument("--user", metavar="NAME", help="prove it as this user: whose job will run")
    parser.add_argument("--ports", metavar="FIRST-LAST", help="the ports on which the job meets")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs that there must be")
    parser.add_argument(
        "--budget", type=int, default=60, metavar="S", help="seconds for all; default %(default)s"
    )
    parser.add_argument("--no-proofs", action="store_true", help="only look")
    parser.add_argument("--format", choices=READY, default="table")
    parser.add_argument("-o", "--output", metavar="FILE", help="whole or not at all")
    parser.add_argument("-q", "--quiet", action="store_true", help="nothing when it is ready")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="every check")


def _changed(policy: Policy, given: Namespace) -> Policy:
    """The policy, changed by the options. Raises PolicyError for a value that is none."""
    said: dict[str, tuple[str, Any]] = {}
    if given.ports is not None:
        try:
            said["port_range"] = ("--ports", port_range(given.ports))
        except ValueError as error:
            raise PolicyError([f"--ports {given.ports}: {error}"]) from None
    if given.gpus is not None:
        said["gpu_count"] = ("--gpus", given.gpus)
    if given.user is not None:
        said["job_user"] = ("--user", given.user)
    for key, (option, value) in said.items():
        policy = replace(policy, **check_settings({key: value}, option))
    return policy


def run_ready(policy: Policy, given: Namespace) -> int:
    """`ready`. Returns the exit code. Raises PolicyError for an option that is wrong."""
    from nodeready.audit.document import ready_code
    from nodeready.healthcheck import here
    from nodeready.subjects.registry import select

    policy = _changed(policy, given)
    chosen = select(subjects=here.SEEN if given.no_proofs else (*here.SEEN, "proof"))
    found = here.ready(policy, chosen, max(1, given.budget), proofs=not given.no_proofs)
    code = ready_code(found)
    if code or not given.quiet or given.output or given.format != "table":
        write(of_ready(found, given.format, given.verbose), given.output)
    return code


# --- The report: the same formats as on the control machine.


def of_audit(audit: Audit, form: str, verbose: int = 0) -> Iterator[str]:
    """The report of an audit in this format, in pieces."""
    return find("audit", form).render(audit, Options(verbose))


def of_ready(ready: Ready, form: str, verbose: int = 0) -> Iterator[str]:
    """The report of a go or no-go in this format, in pieces."""
    return find("ready", form).render(ready, Options(verbose))


def write(pieces: Iterable[str], output: str | None) -> None:
    """Write a report to a file, whole or not at all, or to standard output. Raises OSError."""
    if output is None:
        sys.stdout.writelines(pieces)
        return
    from pathlib import Path

    from nodeready.files import write_atomically

    write_atomically(Path(output), pieces)

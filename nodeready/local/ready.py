"""`ready` on the node: go or no-go, proven by acting, within a budget."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import Any

from nodeready.local import report
from nodeready.policy import Policy
from nodeready.policy.fields import port_range
from nodeready.policy.load import PolicyError, check_settings


def arguments(parser: ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--user", metavar="NAME", help="prove it as this user: whose job will run")
    parser.add_argument("--ports", metavar="FIRST-LAST", help="the ports on which the job meets")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs that there must be")
    parser.add_argument(
        "--budget", type=int, default=60, metavar="S", help="seconds for all; default %(default)s"
    )
    parser.add_argument("--no-proofs", action="store_true", help="only look")
    parser.add_argument("--format", choices=report.READY, default="table")
    parser.add_argument("-o", "--output", metavar="FILE", help="whole or not at all")
    parser.add_argument("-q", "--quiet", action="store_true", help="nothing when it is ready")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="every check")


def _changed(policy: Policy, given: Namespace) -> Policy:
    """The policy with what the options say. Raises PolicyError."""
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


def run(policy: Policy, given: Namespace) -> int:
    """The command. Returns the exit code."""
    from nodeready import exit_codes
    from nodeready.local import here
    from nodeready.selection import select

    policy = _changed(policy, given)
    chosen = select(subjects=here.SEEN if given.no_proofs else (*here.SEEN, "proof"))
    found = here.ready(policy, chosen, max(1, given.budget), proofs=not given.no_proofs)
    code = exit_codes.ready_code(found)
    if code or not given.quiet or given.output or given.format != "table":
        report.write(report.of_ready(found, given.format, given.verbose), given.output)
    return code

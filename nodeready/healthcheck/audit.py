"""`audit` on the node: what differs from the policy here. Writes nothing to the node."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nodeready.policy import Policy
from nodeready.policy.fields import port_range
from nodeready.policy.load import PolicyError, check_settings
from nodeready.reports.registry import Options, find, names

# --- A report of this machine, written where it is wanted.

if TYPE_CHECKING:
    from nodeready.audit.document import Audit, Ready

#: The forms of an audit, and those of a go or no-go.
AUDIT, READY = names("audit", on_node=True), names("ready", on_node=True)


def of_audit(audit: Audit, form: str, verbose: int = 0) -> Iterator[str]:
    """The report in pieces, the same as from outside."""
    return find("audit", form).render(audit, Options(verbose))


def of_ready(ready: Ready, form: str, verbose: int = 0) -> Iterator[str]:
    """The same for a go or no-go."""
    return find("ready", form).render(ready, Options(verbose))


def write(pieces: Iterable[str], output: str | None) -> None:
    """To a file, whole or not at all, or to standard output. Raises OSError."""
    if output is None:
        sys.stdout.writelines(pieces)
        return
    from pathlib import Path

    from nodeready.files import write_atomically

    write_atomically(Path(output), pieces)


def arguments(parser: ArgumentParser) -> None:
    """The options of the command."""
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
    """The command. Returns the exit code. Raises PolicyError for a selection of nothing, too."""
    from nodeready.audit.document import audit_code
    from nodeready.healthcheck import here
    from nodeready.subjects.selection import SelectionError, select

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


# --- `ready` on the node: go or no-go, proven by acting, within a budget.


def ready_arguments(parser: ArgumentParser) -> None:
    """The options of the command."""
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


def run_ready(policy: Policy, given: Namespace) -> int:
    """The command. Returns the exit code."""
    from nodeready.audit.document import ready_code
    from nodeready.healthcheck import here
    from nodeready.subjects.selection import select

    policy = _changed(policy, given)
    chosen = select(subjects=here.SEEN if given.no_proofs else (*here.SEEN, "proof"))
    found = here.ready(policy, chosen, max(1, given.budget), proofs=not given.no_proofs)
    code = ready_code(found)
    if code or not given.quiet or given.output or given.format != "table":
        write(of_ready(found, given.format, given.verbose), given.output)
    return code

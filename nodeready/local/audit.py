"""`audit` on the node: what differs from the policy here. Writes nothing to the node."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from nodeready.local import report
from nodeready.policy import Policy
from nodeready.policy.load import PolicyError


def arguments(parser: ArgumentParser) -> None:
    """The options of the command."""
    from nodeready.local.here import LIMIT_S

    parser.add_argument("--format", choices=report.AUDIT, default="table")
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
    from nodeready import exit_codes
    from nodeready.local import here
    from nodeready.selection import SelectionError, select

    try:
        chosen = select(given.only, given.skip, here.SEEN)
    except SelectionError as error:
        raise PolicyError([str(error)]) from None
    found = here.audit(policy, chosen, max(1, given.timeout))
    code = exit_codes.audit_code(found, given.fail_on)
    if code or not given.quiet or given.output or given.format != "table":
        report.write(report.of_audit(found, given.format, given.verbose), given.output)
    return exit_codes.nagios_code(found) if given.format == "nagios" else code

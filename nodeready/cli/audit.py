"""`nodeready audit`: look at every node, judge it, change nothing."""

from __future__ import annotations

from typing import Any

import click

from nodeready import auditing
from nodeready.audit import FAILED, UNREACHABLE, now
from nodeready.cli.exits import Refused, audit_code, nagios_code
from nodeready.cli.options import common, option, report
from nodeready.cli.output import refuse_unwritable, show
from nodeready.cli.start import Common, gather, open_session, remember_failed
from nodeready.reports.registry import Options, names
from nodeready.reports.text import nodes
from nodeready.selection import SelectionError, select
from nodeready.transports.answer import PROBE_TIMEOUT_S

#: The statuses of the nodes that ``--limit @last-failed`` means.
FAILING = (UNREACHABLE, FAILED, "fail", "warn", "unknown")


@click.command()
@click.argument("inventory")
@report(*names("audit"))
@option("--only", metavar="CHECK,...", help="Only these checks or subjects: gpus,nics.mtu.")
@option("--skip", metavar="CHECK,...", help="Not these.")
@option(
    "--fail-on",
    type=click.Choice(["fail", "warn"]),
    default="fail",
    help="What makes the exit status 3; 'warn': warnings and outliers, too.",
)
@option(
    "--timeout",
    type=click.IntRange(1, 3600),
    default=PROBE_TIMEOUT_S,
    metavar="S",
    help="Seconds for the look at one node, once it is connected.",
)
@common
def audit(
    inventory: str,
    *,
    format: str,
    output: str | None,
    only: str | None,
    skip: str | None,
    fail_on: str,
    timeout: int,
    **shared: Any,
) -> int:
    """Say for every node of INVENTORY what differs from the policy. Never writes to a node.

    \b
    Examples:
      nodeready audit @local
      nodeready audit inventories/prod.py --only ptrace,gpus.ecc_errors
      nodeready audit 'gpu[001-064]' --format json -o audit.json
      nodeready audit inventories/prod.py -q --fail-on warn        # from cron
      nodeready audit inventories/prod.py --format prometheus \\
          -o /var/lib/prometheus/node-exporter/nodeready.prom
    """
    options = Common(**shared)
    try:
        selection = select(only, skip)
    except SelectionError as error:
        raise Refused(str(error)) from None
    refuse_unwritable(output)
    screen = options.screen()
    started = now()
    with open_session(inventory, options, auditing.looked_at(selection), timeout) as session:
        try:
            gather(session, screen)
        except KeyboardInterrupt:
            session.interrupted = True
            session.end_remote()
            missing = [node.name for node in session.nodes if not (node.reached or node.error)]
            screen.say(f"interrupted: the results are partial; not {nodes(missing)}")
        auditing.with_peers(session.nodes)
        problem = auditing.with_history(session.nodes)
        if problem and screen.verbose:
            screen.say(problem)
        session.judge()
        found = auditing.report(session, selection, started, complete=not session.interrupted)
    code = audit_code(found, fail_on)
    failing = [node.name for node in found.nodes if node.status in FAILING]
    show(
        *("audit", format, found, screen),
        output=output,
        silent=screen.quiet and not failing,
        options=Options(fail_on=fail_on),
    )
    remember_failed(failing)
    return nagios_code(found) if format == "nagios" else code

"""`nodeready audit`: look at every node, judge it, change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import click

from nodeready import auditing
from nodeready.audit import FAILED, UNREACHABLE, Audit, now
from nodeready.cli.exits import Refused, audit_code, nagios_code
from nodeready.cli.options import common, option, report
from nodeready.cli.output import deliver, refuse_unwritable
from nodeready.cli.start import Common, gather, open_session, remember_failed
from nodeready.reports import json_report, junit, nagios, prometheus
from nodeready.reports.table import show_audit
from nodeready.reports.text import nodes
from nodeready.selection import SelectionError, select
from nodeready.transports.answer import PROBE_TIMEOUT_S

#: format -> the text that it makes of an audit, in pieces
FORMATS: dict[str, Callable[[Audit], Iterator[str]]] = {
    "json": json_report.render,
    "prometheus": prometheus.render,
    "nagios": nagios.render,
}


#: The statuses of the nodes that ``--limit @last-failed`` means.
FAILING = (UNREACHABLE, FAILED, "fail", "warn", "unknown")


def _text(audit: Audit, form: str, fail_on: str, verbose: int) -> Iterator[str]:
    """The report as a file holds it, in pieces."""
    if form == "table":
        return (f"{line.plain}\n" for line in show_audit(audit, verbose))
    return junit.render(audit, fail_on) if form == "junit" else FORMATS[form](audit)


@click.command()
@click.argument("inventory")
@report("table", "junit", *FORMATS)
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
    if output is not None or format != "table":
        deliver(_text(found, format, fail_on, screen.verbose), output)
    elif failing or not screen.quiet:
        screen.show(show_audit(found, screen.verbose, screen.width))
    remember_failed(failing)
    return nagios_code(found) if format == "nagios" else code

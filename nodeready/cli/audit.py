"""`nodeready audit`: look at every node, judge it, change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from nodeready import auditing, fleet
from nodeready.audit import FAILED, UNREACHABLE, Audit, now
from nodeready.cli.exits import Refused, audit_code, nagios_code
from nodeready.cli.options import common, option
from nodeready.cli.output import refuse_unwritable
from nodeready.cli.screen import Screen
from nodeready.cli.start import Common, Nodes, look, over_ssh, remember_failed
from nodeready.files import write_atomically
from nodeready.fleet import FleetContext
from nodeready.reports import json_report, junit, nagios, prometheus
from nodeready.reports.table import show_audit
from nodeready.reports.text import nodes as folded
from nodeready.selection import Selection, SelectionError, select
from nodeready.transport.base import INTERRUPTED
from nodeready.transport.look import PROBE_TIMEOUT_S, Look

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


def say_partial(screen: Screen, looks: Iterable[Look]) -> None:
    """Which nodes an interrupt left out."""
    missing = [one.name for one in looks if not (one.reached or one.error)]
    screen.say(f"interrupted: the results are partial; not {folded(missing)}")


def document(
    nodes: Nodes, screen: Screen, selection: Selection, looks: list[Look], started: str
) -> Audit:
    """The audit of what was seen: completed by what all nodes tell, judged, and compared."""
    context = FleetContext(nodes.policies)
    if all(one.kind != INTERRUPTED for one in looks):
        context = fleet.completed(nodes.carrier, nodes.policies, looks, nodes.all)
    context = auditing.combined(context, looks)
    problem = auditing.remember(looks, context)
    if problem and screen.verbose:
        screen.say(problem)
    return auditing.report(
        fleet.judged(looks, context),
        selection,
        started,
        nodes.all,
        nodes.policies,
        complete=not nodes.carrier.interrupted,
    )


@click.command()
@click.argument("inventory")
@option(
    "--format",
    type=click.Choice(["table", "junit", *FORMATS]),
    default="table",
    help="A table for people, or a form for machines.",
)
@option("-o", "--output", metavar="FILE", help="Write the report to FILE, whole or not at all.")
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
    nodes = over_ssh(inventory, options)
    with nodes.carrier:
        seen = look(nodes, screen, auditing.looked_at(selection), timeout)
        if nodes.carrier.interrupted:
            say_partial(screen, seen)
        found = document(nodes, screen, selection, seen, started)
    code = audit_code(found, fail_on)
    failing = [node.name for node in found.nodes if node.status in FAILING]
    text = _text(found, format, fail_on, screen.verbose)
    if output is not None:
        write_atomically(Path(output), text)
    elif format != "table":
        for piece in text:
            click.echo(piece, nl=False)
    elif failing or not screen.quiet:
        screen.show(show_audit(found, screen.verbose, screen.width))
    remember_failed(failing)
    return nagios_code(found) if format == "nagios" else code

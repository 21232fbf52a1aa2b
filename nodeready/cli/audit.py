"""`nodeready audit` and `learn`: look at every node, and judge it, or tell what most nodes share.

Neither changes anything."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from nodeready.audit.document import FAILED, UNREACHABLE, Audit, audit_code
from nodeready.audit.peers import majority, render
from nodeready.audit.run import audit_of, combined, looked_at, remember
from nodeready.cli.options import Refused, common, option, output_file, report
from nodeready.cli.screen import Screen, refuse_unwritable, show
from nodeready.cli.start import Common, Nodes, look, over_ssh, remember_failed
from nodeready.exit_codes import exit_code
from nodeready.files import write_atomically
from nodeready.reports.nagios import state as nagios_code
from nodeready.reports.plan import show_errors
from nodeready.reports.registry import Options, names
from nodeready.reports.text import nodes as folded
from nodeready.subjects.registry import LEARNED, Selection, SelectionError, select
from nodeready.text import now
from nodeready.transport.base import INTERRUPTED
from nodeready.transport.look import PROBE_TIMEOUT_S, Look

#: The statuses of the nodes that ``--limit @last-failed`` means.
FAILING = (UNREACHABLE, FAILED, "fail", "warn", "unknown")


def say_partial(screen: Screen, looks: Iterable[Look]) -> None:
    """Which nodes an interrupt left out."""
    missing = [one.name for one in looks if not (one.reached or one.error)]
    screen.say(f"interrupted: the results are partial; not {folded(missing)}")


def document(
    nodes: Nodes, screen: Screen, selection: Selection, looks: list[Look], started: str
) -> Audit:
    """The audit of these looks: completed by what all nodes tell, judged, and compared."""
    from nodeready.subjects.context import FleetContext, judged
    from nodeready.transport.ssh import fleet_context

    context = FleetContext(nodes.policies)
    if all(one.kind != INTERRUPTED for one in looks):
        context = fleet_context(nodes.carrier, nodes.policies, looks, nodes.all)
    context = combined(context, looks, nodes.carrier.met())
    problem = remember(looks, context)
    if problem and screen.verbose:
        screen.say(problem)
    return audit_of(
        judged(looks, context),
        selection,
        started,
        nodes.all,
        nodes.policies,
        complete=not nodes.carrier.interrupted,
    )


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
    nodes = over_ssh(inventory, options)
    with nodes.carrier:
        seen = look(nodes, screen, looked_at(selection), timeout)
        if nodes.carrier.interrupted:
            say_partial(screen, seen)
        found = document(nodes, screen, selection, seen, started)
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


@click.command()
@click.argument("inventory")
@output_file("Write it to FILE, which must not exist yet.")
@option("--force", is_flag=True, help="Replace FILE when it exists.")
@common
def learn(inventory: str, output: str | None, force: bool, **shared: Any) -> int:
    """Write what most nodes of INVENTORY have in common as a group_data file to review.

    GPU model and count, driver, VBIOS, NIC names and speeds, RDMA ports, kernel, mounts: each
    with the number of nodes that agree, and the names of those that do not. Never writes to a
    node. Learn each kind of node by itself.

    \b
    Examples:
      nodeready learn inventories/prod.py --limit h100 -o inventories/group_data/h100.py
      nodeready learn 'gpu[001-064]'
    """
    options = Common(**shared)
    if output is not None and Path(output).exists() and not force:
        raise Refused(f"{output} exists: choose another name, or --force to replace it")
    screen = options.screen()
    nodes = over_ssh(inventory, options)
    with nodes.carrier:
        looks = look(nodes, screen, LEARNED)
        if nodes.carrier.interrupted:
            raise KeyboardInterrupt
        seen = {one.name: one.snapshot for one in looks if one.snapshot and not one.error}
        screen.tell(show_errors(looks))
        if seen:
            text = render(majority(seen), list(seen), now())
            if output is None:
                click.echo(text, nl=False)
            else:
                write_atomically(Path(output), [text])
                screen.note(f"{output}: review it before you use it")
        return exit_code(
            failed=any(one.error and not one.unreachable for one in looks),
            unreachable=any(one.unreachable for one in looks),
        )

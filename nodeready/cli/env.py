"""`nodeready env`: the exports that the nodes' facts suggest."""

from __future__ import annotations

from typing import Any

import click

from nodeready.audit.run import combined
from nodeready.cli.options import common, format_option, option, output_file, read_ports
from nodeready.cli.screen import refuse_unwritable, show
from nodeready.cli.start import Common, Nodes, look, over_ssh
from nodeready.exit_codes import exit_code
from nodeready.ready.job_env import SUBJECTS, Environment, grouped, variables
from nodeready.reports import exports
from nodeready.reports.plan import show_errors
from nodeready.reports.registry import names
from nodeready.text import now
from nodeready.transport.look import Look


def _found(looks: list[Look], nodes: Nodes, taken: str) -> Environment:
    from nodeready.subjects.context import FleetContext

    declared = nodes.policies
    context = combined(FleetContext(declared), looks, nodes.carrier.met())
    seen = {
        one.name: context.completed(one.name, one.snapshot)
        for one in looks
        if one.snapshot and not one.error
    }
    return Environment(
        taken,
        tuple(seen),
        grouped({one.name: one.error for one in looks if one.error}),
        variables(seen, {name: declared[name] for name in seen}) if seen else (),
    )


@click.command()
@click.argument("inventory")
# Its output is evaluated by shells: NODEREADY_FORMAT=json of the other commands is not for it.
@format_option(*names("env"), help="Lines for a shell, or a form for programs.", general=False)
@output_file("Write them to FILE, whole or not at all.")
@option(
    "--ports",
    metavar="FIRST-LAST",
    help="Choose MASTER_PORT from these, not from the policy's port_range.",
)
@common
def env(
    inventory: str, *, format: str, output: str | None, ports: str | None, **shared: Any
) -> int:
    """Print the exports for a job on the nodes of INVENTORY, each with its reason.

    NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, NCCL_IB_HCA, PDSH_RCMD_TYPE and MASTER_PORT, as the
    nodes' networks, adapters and ports suggest. What the nodes do not agree on is not exported:
    comments say who has what, and the exit status is 3. Never writes to a node.

    \b
    Examples:
      eval "$(nodeready env 'gpu[001-064]')"
      nodeready env inventories/prod.py --limit h100 -o job.env
      nodeready env inventories/prod.py --ports 29600-29700 --format json
    """
    options = Common(**shared)
    given = {} if ports is None else {"port_range": read_ports(ports)}
    refuse_unwritable(output)
    screen = options.screen()
    taken = now()
    nodes = over_ssh(inventory, options, given)
    with nodes.carrier:
        looks = look(nodes, screen, SUBJECTS)
        if nodes.carrier.interrupted:
            screen.say("interrupted: nothing is exported")
            return exit_code(interrupted=True)
        found = _found(looks, nodes, taken)
        screen.tell(show_errors(looks))
    if found.nodes:
        show("env", format, found, screen, output=output)
    for line in exports.troubles(found):
        screen.say(line)
    return exit_code(
        failed=any(one.error and not one.unreachable for one in looks),
        unreachable=any(one.unreachable for one in looks),
        check=not all(one.settled for one in found.variables),
    )

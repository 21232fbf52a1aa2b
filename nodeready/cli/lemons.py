"""`nodeready lemons`: the nodes and GPUs that fail far more often than their peers."""

from __future__ import annotations

import time
from dataclasses import replace

from nodeready.cli.options import (
    Refused,
    command,
    inventory_argument,
    limit_option,
    report_options,
    screen_options,
    since_option,
    trust_option,
)


@command()
@inventory_argument
@limit_option("Show these nodes and their GPUs alone: gpu[001-064], a group.")
@since_option("incidents")
@trust_option
@report_options("lemons")
@screen_options
def lemons(
    inventory: str | None,
    *,
    limit: str | None,
    since: str | None,
    trust_inventory: bool,
    format: str,
    output: tuple[str, ...],
    color: str,
    quiet: bool,
    verbose: int,
) -> int:
    """List the nodes and GPUs that fail far more often than their peers. Contacts no node.

    The looks of the last 90 days are read: findings that hardware can cause, nodes that did not
    answer, suspects of smoke tests, causes of dead jobs that root or two users saw. A GPU is known
    by its serial number. Without INVENTORY: every node of the memory.

    \b
    Examples:
      nodeready lemons
      nodeready lemons inventories/prod.py --since 2026-10-01
      nodeready lemons -v --format json -o lemons.json
    """
    # Imported only here, so that --help is quick.
    from nodeready.cli.kept_looks import DAYS, open_memory
    from nodeready.cli.outputs import read_outputs
    from nodeready.cli.screen import Screen
    from nodeready.cli.targets import TargetOptions, load_targets
    from nodeready.cli.values import epoch_seconds, past
    from nodeready.runs.memory.lemons import find_lemons, lemons_code

    outputs = read_outputs("lemons", format, output)
    screen = Screen(color, quiet, verbose)
    now_s = time.time()
    since_s = past(since, epoch_seconds) or now_s - DAYS * 86400
    if inventory is None and limit is not None:
        raise Refused("--limit: needs an INVENTORY")
    with open_memory() as memory:
        peers = shown = set(memory.names())
        if inventory is not None:
            options = TargetOptions(trust_inventory=trust_inventory)
            peers = shown = peers & load_targets(inventory, options)[2].keys()
            if limit is not None:
                shown = peers & load_targets(inventory, replace(options, limit=limit))[2].keys()
        # Without a node there is no fleet.
        document = find_lemons(memory, peers if shown else (), since_s, now_s)
    units = (unit for unit in document.units if not shown.isdisjoint((unit.node, *unit.nodes)))
    document = replace(document, units=tuple(units))
    outputs.show(document, screen, silent=screen.quiet and not document.lemons)
    return lemons_code(document)

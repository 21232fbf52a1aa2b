"""`nodeready learn`: what most nodes share, as a policy to review."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from nodeready.cli.conversations import keep_gaps, probe_nodes
from nodeready.cli.default_inventory import require_inventory
from nodeready.cli.options import (
    Refused,
    command,
    inventory_argument,
    option,
    output_file,
    srun_job_option,
    transport_options,
)
from nodeready.cli.targets import TargetOptions, select_targets
from nodeready.core.files import write_atomically
from nodeready.core.outcome import gaps_code, gaps_of
from nodeready.core.text import utc_now
from nodeready.reports.table_layout import show_gaps
from nodeready.runs.audit.learned import majority, render
from nodeready.subjects.registry import LEARNED


@command()
@inventory_argument
@output_file("Write the policy to FILE, which must not exist yet.")
@option("--force", is_flag=True, help="Replace FILE when it exists.")
@srun_job_option
@transport_options
def learn(
    inventory: str | None, output: str | None, force: bool, job: str | None, **shared: Any
) -> int:
    """Write the values that most nodes of INVENTORY share as a group_data file to review.

    GPU model and count, driver, VBIOS, NIC names and speeds, RDMA ports, kernel, mounts: each
    with the number of nodes that agree, and the names of those that do not. Never writes to a
    node. Run it once for each kind of node, with --limit.

    \b
    Examples:
      nodeready learn inventories/prod.py --limit h100 -o inventories/group_data/h100.py
      nodeready learn 'gpu[001-064]'
    """
    options = TargetOptions(**shared)
    inventory = require_inventory(inventory, options)
    if output is not None and Path(output).exists() and not force:
        raise Refused(f"{output} exists: choose another name, or --force to replace it")
    screen = options.screen()
    nodes = select_targets(inventory, options, job=job, tell=screen.note)
    with nodes.transport:
        outcomes = probe_nodes(nodes, screen, LEARNED)
        if nodes.transport.interrupted:
            raise KeyboardInterrupt
        snapshots = {outcome.node: outcome.value for outcome in outcomes if outcome.value}
        gaps = gaps_of(outcomes)
        screen.show_on_stderr(show_gaps(gaps))
        keep_gaps(nodes, screen, gaps)
        if snapshots:
            text = render(majority(snapshots), list(snapshots), utc_now())
            if output is None:
                click.echo(text, nl=False)
            else:
                write_atomically(Path(output), [text])
                screen.note(f"{output}: review it before you use it")
        return gaps_code(gaps, complete=True)

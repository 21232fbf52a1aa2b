"""`nodeready learn`: what most nodes share, as a policy to review."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from nodeready.cli.defaults import require_inventory
from nodeready.cli.options import ScreenOptions, command, inventory_argument, output_file
from nodeready.core.exit_codes import Refused
from nodeready.core.files import write_atomically
from nodeready.core.outcome import gaps_code
from nodeready.reports.table_layout import show_gaps
from nodeready.runs.audit.learned import run
from nodeready.runs.options import LearnOptions, flag


@dataclass(kw_only=True)
class LearnWords(ScreenOptions, LearnOptions):
    output: str | None = output_file("Write the policy to FILE, which must not exist yet.")
    force: bool = flag("--force", "Replace FILE when it exists.")


@command(LearnWords)
@inventory_argument
def learn(inventory: str | None, options: LearnWords) -> int:
    """Write the values that most nodes of INVENTORY share as a group_data file to review.

    GPU model and count, driver, VBIOS, NIC names and speeds, RDMA ports, kernel, mounts: each
    with the number of nodes that agree, and the names of those that do not. Never writes to a
    node. Run it once for each kind of node, with --limit.

    \b
    Examples:
      nodeready learn inventories/prod.py --limit h100 -o inventories/group_data/h100.py
      nodeready learn 'gpu[001-064]'
    """
    inventory, output = require_inventory(inventory, options), options.output
    if output is not None and Path(output).exists() and not options.force:
        raise Refused(f"{output} exists: choose another name, or --force to replace it")
    screen = options.screen()
    text, gaps = run(inventory, options, screen)
    screen.show_on_stderr(show_gaps(gaps))
    if text and output is None:
        click.echo(text, nl=False)
    elif text:
        write_atomically(Path(str(output)), [text])
        screen.note(f"{output}: review it before you use it")
    return gaps_code(gaps, complete=True)

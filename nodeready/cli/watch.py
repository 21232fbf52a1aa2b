"""`nodeready watch`: probe a job every minute, and keep its evidence when it hangs."""

from __future__ import annotations

from dataclasses import dataclass

import click

from nodeready.cli.defaults import find_inventory
from nodeready.cli.incident import render
from nodeready.cli.options import ScreenOptions, command, inventory_argument
from nodeready.core.text import sanitise
from nodeready.reports.registry import find_format
from nodeready.reports.table_layout import show_gaps
from nodeready.runs.options import WatchOptions


@dataclass(kw_only=True)
class WatchWords(ScreenOptions, WatchOptions):
    pass


@command(WatchWords)
@inventory_argument
def watch(inventory: str | None, options: WatchWords) -> int:
    """Watch a job, and keep its evidence when it hangs. It ends with the job.

    Every snapshot reads counters of /proc and takes no stack: CPU time, voluntary switches, bytes,
    ports, logs. When at least two of these show for --confirm seconds that nothing moves, and none
    shows a movement, an incident is taken and COMMAND is run, without a shell. Its environment has
    NODEREADY_INCIDENT (the directory), NODEREADY_JOB and NODEREADY_VERDICT.

    \b
    Examples:
      nodeready watch inventories/prod.py --job 4711 -o /var/tmp/hangs
      nodeready watch inventories/prod.py --job 4711 --then '/usr/local/bin/page oncall'
      nodeready watch --via srun --job 4711 --once
    """
    from nodeready.runs.watcher import run

    elsewhere = options.local or options.via != "ssh"
    inventory = find_inventory(inventory, options, elsewhere=elsewhere)
    screen, write_facts = options.screen(), find_format("audit", "json").write_facts
    watching = run(inventory, options, screen, render, write_facts)
    while True:
        try:
            event = next(watching)
        except StopIteration as end:
            code: int = end.value
            return code
        if isinstance(event, str):
            click.echo(sanitise(event))
        else:
            screen.show_on_stderr(show_gaps(event))

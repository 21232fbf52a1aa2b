"""`nodeready incident` and `watch`: the evidence of a hung job, on request and by itself."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import click

from nodeready.agent.secrets import redact, redacted
from nodeready.cli.options import (
    ScreenOptions,
    command,
    find_inventory,
    format_option,
    inventory_argument,
)
from nodeready.cli.screen import show
from nodeready.core.text import sanitise
from nodeready.reports.registry import FORMATS, Options, find_format
from nodeready.runs.incident import incident_code
from nodeready.runs.options import IncidentOptions, WatchOptions


@dataclass(kw_only=True)
class IncidentWords(ScreenOptions, IncidentOptions):
    format: str = format_option("incident", help="Output format of the index.", general=False)


def render(kind: str, document: Any) -> dict[str, Iterable[str]]:
    """File extension -> the text of the document in that format; of an audit, without secrets."""
    options = Options(verbose=1)
    if kind == "audit":
        data = json.loads("".join(find_format("audit", "json").render(document)))
        table = find_format("audit", "table").render(document, options)
        lines, text = (redact("", line) for line in table), json.dumps(redacted(data), indent=1)
        return {".json": [text, "\n"], ".txt": lines}
    return {form.extension: form.render(document, options) for form in FORMATS[kind].values()}


@command(IncidentWords)
@inventory_argument
def incident(inventory: str | None, options: IncidentWords) -> int:
    """Keep the evidence of a job that hangs in one archive. Changes nothing on the nodes.

    The stacks of all ranks in every form, all witnesses, the ends of the job's logs, backtraces of
    its cores, and the audit of its nodes: in a new directory and one archive, without secrets. If
    a part fails, the index names it, and the remaining parts are still kept.

    \b
    Examples:
      nodeready incident inventories/prod.py --job 4711 -o hang-4711
      nodeready incident --via srun --job 4711 -o hang-4711   # no ssh, no root
      nodeready incident --local --job 4711 -o hang-4711
      nodeready stacks --from hang-4711/stacks
    """
    from nodeready.runs.collector import run

    elsewhere = options.local or options.via != "ssh"
    inventory = find_inventory(inventory, options, elsewhere=elsewhere)
    screen, write_facts = options.screen(), find_format("audit", "json").write_facts
    document = run(inventory, options, screen, render, write_facts)
    code = incident_code(document)
    shown, silent = Options(inventory=options.words(inventory)), screen.quiet and not code
    show("incident", options.format, document, screen, silent=silent, options=shown)
    return code


# --- `nodeready watch`: probe a job every minute, and keep its evidence when it hangs.


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
      nodeready watch prod.py --job 4711 --progress 'step +[0-9]+' --confirm 6m
      nodeready watch --via srun --job 4711 --once
    """
    from nodeready.reports.lines import show_gaps
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

"""`nodeready history`: what earlier looks have shown of a node or a part."""

from __future__ import annotations

import click

from nodeready.cli.options import (
    Refused,
    candidates_of,
    color_option,
    command,
    report_options,
    since_option,
)
from nodeready.core.policy.fields import closest_word


@command()
@click.argument("name", required=False, shell_complete=candidates_of("remembered"))
@since_option("what happened")
@report_options("history")
@color_option
@click.option("-v", "--verbose", count=True, show_default=False, help="More detail.")
def history(
    name: str | None,
    *,
    since: str | None,
    format: str,
    output: tuple[str, ...],
    color: str,
    verbose: int,
) -> int:
    """Show the life of a node or of a GPU, from the looks that were kept. Contacts no node.

    NAME is a node, or the serial number or UUID of a GPU, or the GUID of an RDMA adapter, wherever
    it was moved. A node's life has its statuses with the checks that caused them, reboots,
    versions, replaced parts, settings, events, and its jobs where Slurm's accounting has them.
    Without NAME: the looks.

    \b
    Examples:
      nodeready history
      nodeready history gpu004
      nodeready history gpu004 --since 7d --format json
      nodeready history 1650522003820
    """
    from nodeready.cli.kept_looks import open_memory
    from nodeready.cli.outputs import read_outputs
    from nodeready.cli.screen import Screen
    from nodeready.cli.values import epoch_seconds, past
    from nodeready.runs.memory.history import read_history

    outputs = read_outputs("history", format, output)
    since_s = past(since, epoch_seconds)
    with open_memory() as memory:
        document = read_history(memory, name or "", since_s)
        names = [] if document else memory.names()
    if document is None:
        close = closest_word(str(name), names)
        hint = f"did you mean {close}?" if close else "nodeready history lists the looks"
        raise Refused(f"history {name}: no look has seen such a node or part; {hint}")
    outputs.show(document, Screen(color, verbose=verbose))
    return 0

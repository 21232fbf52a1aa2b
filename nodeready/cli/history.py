"""`nodeready history`: what earlier looks have shown of a node or a part."""

from __future__ import annotations

from dataclasses import dataclass

import click

from nodeready.cli.options import (
    candidates_of,
    color_option,
    command,
    format_option,
    report_files,
    verbose_option,
)
from nodeready.core.exit_codes import Refused
from nodeready.core.settings import closest_word
from nodeready.runs.options import since
from nodeready.runs.values import epoch_seconds


@dataclass(kw_only=True)
class HistoryWords:
    since_s: float = since("what happened", epoch_seconds)
    format: str = format_option("history")
    output: tuple[str, ...] = report_files()
    color: str = color_option()
    verbose: int = verbose_option("More detail.")


@command(HistoryWords)
@click.argument("name", required=False, shell_complete=candidates_of("remembered"))
def history(name: str | None, options: HistoryWords) -> int:
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
    from nodeready.cli.outputs import read_outputs
    from nodeready.cli.screen import Screen
    from nodeready.runs.memory.history import read_history
    from nodeready.runs.memory.kept_looks import open_memory

    outputs = read_outputs("history", options)
    with open_memory() as memory:
        document = read_history(memory, name or "", options.since_s)
        names = [] if document else memory.names()
    if document is None:
        close = closest_word(str(name), names)
        hint = f"did you mean {close}?" if close else "nodeready history lists the looks"
        raise Refused(f"history {name}: no look has seen such a node or part; {hint}")
    outputs.show(document, Screen(options.color, verbose=options.verbose))
    return 0

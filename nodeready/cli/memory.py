"""`nodeready diff`, `history` and `lemons`: what earlier looks have shown."""

from __future__ import annotations

from dataclasses import dataclass

import click

from nodeready.cli.options import (
    ReportOptions,
    candidates_of,
    color_option,
    command,
    format_option,
    inventory_argument,
    report_files,
    require_inventory,
    verbose_option,
)
from nodeready.core.exit_codes import Refused
from nodeready.runs.options import DiffOptions, LemonsOptions, flag, since
from nodeready.runs.values import epoch_seconds


@dataclass(kw_only=True)
class DiffWords(ReportOptions, DiffOptions):
    format: str = format_option("diff")
    is_strict: bool = flag(
        "--exit-code", "Exit with 3 when there is a difference.", key="is_strict", general=False
    )


@command(DiffWords)
@click.argument("sides", nargs=-1, metavar="[INVENTORY | A.json B.json]")
def diff(sides: tuple[str, ...], options: DiffWords) -> int:
    """Report what changed on the nodes of INVENTORY, or between two files. Never writes to a node.

    What changed on the failing nodes and not on healthy nodes comes first. The nodes are asked as
    by an audit, and compared with what the memory has kept. Without an option, the last two looks
    are compared, and no node is asked.

    \b
    Examples:
      nodeready diff prod.py
      nodeready diff prod.py --since yesterday
      nodeready diff prod.py --since last-good
      nodeready diff prod.py --since 2026-11-02 --until 2026-11-09
      nodeready diff prod.py --limit gpu007 --against gpu001
      nodeready diff prod.py --against inventories/group_data/h100.py
      nodeready diff monday.json today.json          # of audit or ready, --format json
    """
    from nodeready.runs.memory.command import diff_files, run
    from nodeready.runs.memory.diff import diff_code

    outputs, screen = options.outputs("diff"), options.screen()
    if len(sides) == 2 and not (options.since or options.until or options.against):
        document = diff_files(*sides)
    elif len(sides) > 1:
        forms = "one INVENTORY, or two files without --since, --until and --against"
        raise Refused(f"compares {forms}: nodeready diff monday.json today.json")
    else:
        inventory = require_inventory(sides[0] if sides else None, options)
        document = run(inventory, options, screen)
    outputs.show(document, screen, silent=screen.quiet and not document.changes)
    return diff_code(document, is_strict=options.is_strict)


# --- `nodeready history`: what earlier looks have shown of a node or a part.


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
    from nodeready.cli.screen import Screen, read_outputs
    from nodeready.core.settings import closest_word
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


# --- `nodeready lemons`: the nodes and GPUs that fail far more often than their peers.


@dataclass(kw_only=True)
class LemonsWords(ReportOptions, LemonsOptions):
    format: str = format_option("lemons")


@command(LemonsWords)
@inventory_argument
def lemons(inventory: str | None, options: LemonsWords) -> int:
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
    from nodeready.runs.memory.kept_looks import kept_lemons
    from nodeready.runs.memory.lemons import lemons_code

    outputs, screen = options.outputs("lemons"), options.screen()
    document = kept_lemons(inventory, options, screen)
    outputs.show(document, screen, silent=screen.quiet and not document.lemons)
    return lemons_code(document)

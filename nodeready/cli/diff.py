"""`nodeready diff`: what changed on the nodes, and what the failing nodes have in common.

Its run is imported only when the command runs, so that --help and completion are quick.
"""

from __future__ import annotations

from dataclasses import dataclass

import click

from nodeready.cli.defaults import require_inventory
from nodeready.cli.options import ScreenOptions, command, format_option, report_files
from nodeready.core.exit_codes import Refused
from nodeready.runs.options import DiffOptions, flag


@dataclass(kw_only=True)
class DiffWords(ScreenOptions, DiffOptions):
    format: str = format_option("diff")
    output: tuple[str, ...] = report_files()
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
    from nodeready.cli.outputs import read_outputs
    from nodeready.runs.memory.command import diff_files, run
    from nodeready.runs.memory.diff import diff_code

    outputs, screen = read_outputs("diff", options), options.screen()
    if len(sides) == 2 and not (options.since or options.until or options.against):
        document = diff_files(*sides)
    elif len(sides) > 1:
        raise Refused(
            "compares one INVENTORY, or two files without --since, --until and --against: "
            "nodeready diff monday.json today.json"
        )
    else:
        inventory = require_inventory(sides[0] if sides else None, options)
        document = run(inventory, options, screen)
    outputs.show(document, screen, silent=screen.quiet and not document.changes)
    return diff_code(document, is_strict=options.is_strict)

"""`nodeready waivers`: each waiver of the policy, its end, and what it hides now."""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.cli.defaults import require_inventory
from nodeready.cli.options import (
    ScreenOptions,
    command,
    format_option,
    inventory_argument,
    report_files,
)
from nodeready.cli.outputs import read_outputs
from nodeready.runs.options import WaiversOptions


@dataclass(kw_only=True)
class WaiversWords(ScreenOptions, WaiversOptions):
    format: str = format_option("waivers")
    output: tuple[str, ...] = report_files()


@command(WaiversWords)
@inventory_argument
def waivers(inventory: str | None, options: WaiversWords) -> int:
    """List the waivers of INVENTORY, their ends, and the findings that they hide now.

    A waiver that has expired, that concerns no node of the inventory, or that hides nothing is a
    mistake (exit status 3). Only the waived checks are made. Never writes to a node.

    \b
    Examples:
      nodeready waivers inventories/prod.py
      nodeready waivers inventories/prod.py --offline
      nodeready waivers inventories/prod.py --format json -o waivers.json
    """
    from nodeready.runs.audit.waiver_list import MISTAKES, run, waivers_code

    inventory = require_inventory(inventory, options)
    outputs, screen = read_outputs("waivers", options), options.screen()
    document = run(inventory, options, screen)
    has_mistakes = any(row.state in MISTAKES for row in document.waivers)
    silent = screen.quiet and not has_mistakes and not document.gaps
    outputs.show(document, screen, silent=silent)
    return waivers_code(document)

"""`nodeready lemons`: the nodes and GPUs that fail far more often than their peers."""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.cli.options import (
    ScreenOptions,
    command,
    format_option,
    inventory_argument,
    report_files,
)
from nodeready.runs.options import LemonsOptions


@dataclass(kw_only=True)
class LemonsWords(ScreenOptions, LemonsOptions):
    format: str = format_option("lemons")
    output: tuple[str, ...] = report_files()


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
    from nodeready.cli.outputs import read_outputs
    from nodeready.runs.memory.kept_looks import kept_lemons
    from nodeready.runs.memory.lemons import lemons_code

    outputs, screen = read_outputs("lemons", options), options.screen()
    document = kept_lemons(inventory, options, screen)
    outputs.show(document, screen, silent=screen.quiet and not document.lemons)
    return lemons_code(document)

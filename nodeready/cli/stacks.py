"""`nodeready stacks`: which rank holds up a job, and where every rank stands, grouped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nodeready.cli.options import (
    ScreenOptions,
    command,
    find_inventory,
    format_option,
    inventory_argument,
)
from nodeready.core.exit_codes import Refused
from nodeready.reports.registry import FORMATS, Options
from nodeready.runs.options import StacksOptions


@dataclass(kw_only=True)
class StacksWords(ScreenOptions, StacksOptions):
    format: str = format_option("stacks", general=False)


def kept_forms(kind: str, document: Any) -> dict[str, Iterable[str]]:
    """The files of a document beside its traces: a table is for the terminal."""
    forms = [form for form in FORMATS[kind].values() if not form.styled]
    return {form.extension: form.render(document) for form in forms}


def stacks_inventory(inventory: str | None, options: StacksWords) -> str | None:
    """INVENTORY, or the default one where nothing else names the nodes. Raises Refused."""
    by_job = options.via != "ssh" and options.job is not None
    elsewhere = options.local or options.source is not None or by_job
    return find_inventory(inventory, options, elsewhere=elsewhere)


@command(StacksWords)
@inventory_argument
def stacks(inventory: str | None, options: StacksWords) -> int:
    """Show which rank holds up a job, and where every rank stands. Changes nothing.

    Ranks are found by their environment (RANK, SLURM_PROCID, ...) on all nodes at once. Their
    state in the kernel is read first, then py-spy runs, which stops nothing (but see --native).

    \b
    Examples:
      nodeready stacks inventories/prod.py --job 4711
      nodeready stacks 'gpu[001-064]' -o hang-2026-11-21
      nodeready stacks --via srun --job 4711          # no ssh, no root
      nodeready stacks --local --match train.py
      nodeready stacks --from hang-2026-11-21 --format html >hang.html
      nodeready stacks inventories/prod.py --job 4711 --check
    """
    from nodeready.cli.screen import show
    from nodeready.runs.stacks.command import check, run
    from nodeready.runs.stacks.debuggable import debuggable_code
    from nodeready.runs.stacks.document import stacks_code

    inventory = stacks_inventory(inventory, options)
    screen, form = options.screen(), options.format
    if options.check:
        if form not in FORMATS["debuggable"]:
            raise Refused(f"--check: --format {' or '.join(FORMATS['debuggable'])}, not {form}")
        checked = check(inventory, options, screen)
        code = debuggable_code(checked)
        show("debuggable", form, checked, screen, silent=screen.quiet and not code)
        return code
    document = run(inventory, options, screen, kept_forms)
    code = stacks_code(document)
    is_well = not code and document.verdict is not None and document.verdict.kind == "not-stuck"
    shown = Options(inventory=options.words(inventory))
    show("stacks", form, document, screen, silent=screen.quiet and is_well, options=shown)
    return code

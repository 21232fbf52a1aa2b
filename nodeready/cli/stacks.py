"""`nodeready stacks`, `jobs` and `tail`: what runs where, where it stands, and its last lines."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import click

from nodeready.cli.options import (
    ReportOptions,
    ScreenOptions,
    candidates_of,
    command,
    find_inventory,
    format_option,
    inventory_argument,
)
from nodeready.core.exit_codes import OK, Refused
from nodeready.core.text import sanitise
from nodeready.reports.registry import FORMATS, Options
from nodeready.runs.options import JobsOptions, StacksOptions, TailOptions


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


def read_typed() -> bytes:
    """What was typed; b"": its end."""
    select.select([0], [], [])  # gevent's: the connection goes on
    return os.read(0, 65536)


def write_plain(text: str) -> None:
    """Show a rank's text. Control characters are shown as escapes."""
    click.echo("\n".join(sanitise(line, len(text)) for line in text.split("\n")), nl=False)


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
      nodeready stacks inventories/prod.py --job 4711 --slow 60s
      nodeready stacks inventories/prod.py --job 4711 --check
      nodeready stacks inventories/prod.py --job 4711 --attach 3
    """
    from nodeready.cli.screen import show
    from nodeready.runs.stacks.command import attach, check, run
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
    if options.attach is not None:
        attach(inventory, options, options.attach, screen, (read_typed, write_plain))
        return OK
    document = run(inventory, options, screen, kept_forms)
    code = stacks_code(document)
    kind = document.verdict.kind if document.verdict else ""
    is_well = not code and kind in ("not-stuck", "even")
    shown = Options(inventory=options.words(inventory))
    show("stacks", form, document, screen, silent=screen.quiet and is_well, options=shown)
    return code


# --- `nodeready jobs` and `tail`: what runs where, and the last lines of every rank.


@dataclass(kw_only=True)
class JobsWords(ReportOptions, JobsOptions):
    format: str = format_option("jobs")


@command(JobsWords)
@inventory_argument
def jobs(inventory: str | None, options: JobsWords) -> int:
    """List the jobs on the nodes of INVENTORY: their users, ranks and nodes. Changes nothing.

    Jobs are found as `nodeready stacks` finds their ranks: Slurm's, torchrun's, mpirun's, and jobs
    without a launcher. Other commands take the name of a job as `--job`. Without root, only your
    own jobs are seen.

    \b
    Examples:
      nodeready jobs inventories/prod.py
      nodeready jobs 'gpu[001-064]' --user ada --sudo
      nodeready jobs --local -v
    """
    from nodeready.runs.jobs import jobs_code, run

    inventory = find_inventory(inventory, options, elsewhere=options.local or bool(options.job))
    outputs, screen = options.outputs("jobs"), options.screen()
    document = run(inventory, options, screen)
    outputs.show(document, screen, silent=screen.quiet and not document.jobs)
    return jobs_code(document)


# --- `nodeready tail`: the last lines of every rank's log, over all nodes, grouped when equal.


@dataclass(kw_only=True)
class TailWords(ReportOptions, TailOptions):
    format: str = format_option("tail", general=False)


@command(TailWords)
@click.argument(
    "words", nargs=-1, metavar="[INVENTORY] PATTERN", shell_complete=candidates_of("inventories")
)
def tail(words: tuple[str, ...], options: TailWords) -> int:
    """Show the last lines of all files that match PATTERN on the nodes of INVENTORY.

    Files with equal lines are shown once, the odd one out first; times, ranks, process numbers,
    addresses and the node's name count as equal. Files that were last written more than a minute
    before most files come first. A file with lines of many ranks counts as a file for each rank;
    the prefixes of launchers are recognised. The messages of PyTorch's watchdogs follow, the rank
    with the least progress first. PATTERN is an absolute path with *, ?, [...] and **,
    quoted so that the nodes expand it, and not your shell. Reads only, at most the last 256 KB of
    a file, or 16 MB of a file of many ranks.

    \b
    Examples:
      nodeready tail inventories/prod.py '/var/log/train/rank_*.log'
      nodeready tail 'gpu[001-064]' '~/logs/**/*.err' -n 1 --newer 2h
      nodeready tail inventories/prod.py '/scratch/trace*' --grep backward
      nodeready tail login1 '/scratch/slurm-4711.out' -n 1 --rank 0-7
      nodeready tail --local '/tmp/torchelastic_*/**/stderr.log'
    """
    from nodeready.core.outcome import gaps_code
    from nodeready.runs.tail import run

    local = options.local
    if len(words) == 1 and not local and (default := find_inventory(None, options)):
        words = (default, *words)
    expected_count = 1 if local else 2
    if len(words) < expected_count:
        raise click.UsageError("Missing PATTERN." if local else "Missing INVENTORY or PATTERN.")
    if len(words) > expected_count:
        count = len(words) - expected_count + 1
        raise Refused(f"{count} PATTERNs: quote it, so that the nodes expand it")
    outputs, screen = options.outputs("tail"), options.screen()
    document = run(None if local else words[0], words[-1], options, screen)
    outputs.show(document, screen, mode=0o600)
    return gaps_code(document.gaps, complete=document.complete, check=not document.has_all_files)

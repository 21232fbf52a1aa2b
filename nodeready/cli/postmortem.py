"""`nodeready postmortem` and `cores`: a job and programs that have died."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nodeready.cli.options import (
    ReportOptions,
    ScreenOptions,
    command,
    find_inventory,
    format_option,
    inventory_argument,
)
from nodeready.core.exit_codes import INTERRUPTED as INTERRUPTED_CODE
from nodeready.core.exit_codes import OK, Refused, exit_code
from nodeready.core.files import write_atomically
from nodeready.core.text import counted, sanitise
from nodeready.runs.options import CoresOptions, PostmortemOptions, flag
from nodeready.runs.user_files import output_directory

if TYPE_CHECKING:
    from nodeready.agent.cores.gcore import Preview
    from nodeready.cli.screen import Screen
    from nodeready.runs.cores import Cores


@dataclass(kw_only=True)
class PostmortemWords(ReportOptions, PostmortemOptions):
    format: str = format_option("postmortem", general=False)


@command(PostmortemWords)
@inventory_argument
def postmortem(inventory: str | None, options: PostmortemWords) -> int:
    """Show who failed first in a job that has died, of what, and who only lost a peer.

    Reads the beginning and the end of the logs, torchrun's error files, the kernel's log and
    Slurm's records. An error of a rank's own outranks every lost connection; equal failures are
    shown once. Reads only. Exit status 3: the cause is unclear, or evidence is missing.

    \b
    Examples:
      nodeready postmortem inventories/prod.py --job 4711
      nodeready postmortem 'gpu[001-064]' --logs '/scratch/logs/4711/**'
      nodeready postmortem --local --logs '/tmp/torchelastic_*/**'
      nodeready postmortem --from crash-4711
    """
    # Imported only here, because it imports pyinfra, and --help must be quick.
    from nodeready.runs.postmortem.command import run
    from nodeready.runs.postmortem.document import postmortem_code

    outputs = options.outputs("postmortem")
    if options.source is None:
        by_job = options.via != "ssh" and options.job is not None
        inventory = find_inventory(inventory, options, elsewhere=options.local or by_job)
    elif options.local or options.job or options.patterns or inventory is not None:
        raise Refused("--from: asks no node; remove INVENTORY, --local, --job and --logs")
    screen = options.screen()
    document = run(inventory, options, screen)
    outputs.show(document, screen, mode=0o600)
    return postmortem_code(document)


# --- `nodeready cores`: core files of all nodes, and where each program crashed.

_MODE = 0o600  # mode of every file: gdb's output has arguments of functions


@dataclass(kw_only=True)
class CoresWords(ScreenOptions, CoresOptions):
    format: str = format_option("cores")
    yes: bool = flag("--yes", "Do not ask before --gcore pauses the process.")


def _write(cores: Cores, path: Path) -> None:
    """Write a text per core, then the document that names them."""
    from nodeready.reports.registry import find_format

    for crash in cores.crashes:
        if crash.text_file:
            write_atomically(path / crash.text_file, [crash.text], _MODE)
    write_atomically(path / "cores.json", find_format("cores", "json").render(cores), _MODE)


def _dump(inventory: str | None, options: CoresWords, screen: Screen) -> int:
    """Take a core of a live process, after a preview and a confirmation. Returns the exit code."""
    from nodeready.core.outcome import INTERRUPTED
    from nodeready.reports.triage_tables import size
    from nodeready.runs.cores import DumpError, dump

    def confirm(preview: Preview) -> bool:
        text = (
            f"pid {preview.pid} ({preview.command or 'no command line'}, user {preview.user}): "
            f"{size(preview.size_bytes)} to {preview.path}"
        )
        if options.yes:
            screen.note(f"{text}; the process is paused meanwhile")
            return True
        if not sys.stdin.isatty():
            raise Refused(
                "--gcore pauses the process while its memory is written: confirm with --yes"
            )
        screen.say(text)
        return click.confirm("The process is paused meanwhile. Take the core?", err=True)

    try:
        dumped = dump(inventory, options, screen, confirm)
    except DumpError as problem:
        gap = problem.gap
        if gap and gap.kind == INTERRUPTED:
            return INTERRUPTED_CODE
        screen.say(f"--gcore {options.pid}: {problem}")
        is_unreached = gap is not None and gap.is_unreached
        return exit_code(failed=not is_unreached, unreachable=is_unreached)
    if dumped is None:
        screen.say("nothing was done")
        return OK
    preview, taken = dumped
    is_running = taken.state not in ("", "T", "t")
    ended = "is stopped: kill -CONT" if taken.state else "has ended"
    after = "goes on" if is_running else ended
    if taken.continued:
        after += " (it had been left stopped, and was sent SIGCONT)"
    if taken.error:
        screen.say(f"--gcore {preview.pid}: {taken.error}; pid {preview.pid} {after}")
        return exit_code(failed=True)
    screen.note(f"{size(taken.size_bytes)} in {taken.seconds} s; pid {preview.pid} {after}")
    click.echo(sanitise(taken.path))
    return exit_code(failed=not is_running)


@command(CoresWords)
@inventory_argument
def cores(inventory: str | None, options: CoresWords) -> int:
    """Find the core files of every node of INVENTORY and show where each program crashed.

    Equal crashes are shown once, the first to crash first. gdb runs on the nodes, gently, and only
    text comes back. A core on a shared file system is read once.

    \b
    Examples:
      nodeready cores inventories/prod.py --since 2h
      nodeready cores 'gpu[001-064]' --job 4711 -o crash-4711
      nodeready cores --local
      nodeready cores inventories/prod.py --limit gpu007 --gcore 12345
    """
    from nodeready.cli.screen import show
    from nodeready.reports.registry import find_format
    from nodeready.reports.triage_tables import summary
    from nodeready.runs.cores import cores_code, run

    by_job = options.via != "ssh" and options.job is not None
    inventory = find_inventory(inventory, options, elsewhere=options.local or by_job)
    screen = options.screen()
    if options.pid is not None:
        return _dump(inventory, options, screen)
    path = None
    if options.output is not None:
        path = output_directory(Path(options.output), "cores.json")
    cores = run(inventory, options, screen)
    if path is not None:
        _write(cores, path)
        count = sum(1 for crash in cores.crashes if crash.text)
        screen.note(f"{path}: cores.json, and {counted(count, 'backtrace')}")
    has_findings = bool(cores.crashes or cores.gaps or cores.notes)
    if find_format("cores", options.format).styled and not (
        has_findings or cores.unlisted or not cores.complete
    ):
        screen.note(summary(cores))
    else:
        show("cores", options.format, cores, screen, silent=screen.quiet and not has_findings)
    return cores_code(cores)

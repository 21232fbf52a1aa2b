"""`nodeready cores`: core files of all nodes, and where each program crashed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from nodeready.cli.conversations import ask_with_progress, keep_gaps
from nodeready.cli.default_inventory import find_inventory
from nodeready.cli.options import (
    Refused,
    command,
    format_option,
    inventory_argument,
    local_option,
    option,
    output_directory,
    since_option,
    transport_options,
)
from nodeready.cli.screen import Screen, show
from nodeready.cli.targets import (
    TargetOptions,
    local_policy,
    local_targets,
    targets_of_ended_job,
)
from nodeready.cli.values import past, seconds_ago
from nodeready.core.exit_codes import INTERRUPTED as INTERRUPTED_CODE
from nodeready.core.exit_codes import OK, exit_code
from nodeready.core.files import own_directory, write_atomically
from nodeready.core.outcome import INTERRUPTED
from nodeready.core.text import counted, sanitise
from nodeready.reports.registry import find_format
from nodeready.reports.triage_tables import size, summary
from nodeready.runs.cores import CoreDumper, Cores, DumpError, collect_cores, cores_code

#: Mode of every file: gdb's output has arguments of functions.
_MODE = 0o600


def _make_directory(name: str) -> Path:
    """Make the directory of ``-o``. Raises Refused."""
    path = Path(name)
    if path.exists() and not path.is_dir():
        raise Refused(f"-o {name}: is no directory")
    try:
        own_directory(path, "cores.json")
    except OSError as problem:
        raise Refused(f"-o {problem.filename}: {problem.strerror}") from None
    return path


def _write(cores: Cores, path: Path) -> None:
    """Write a text per core, then the document that names them."""
    for crash, name in zip(cores.crashes, cores.file_names, strict=True):
        if crash.text:
            write_atomically(path / name, [crash.text], _MODE)
    write_atomically(path / "cores.json", find_format("cores", "json").render(cores), _MODE)


def _dump(dumper: CoreDumper, screen: Screen, yes: bool) -> int:
    """Take a core of a live process, after a preview and a confirmation. Returns the exit code."""
    try:
        preview = dumper.preview()
        text = (
            f"pid {preview.pid} ({preview.command or 'no command line'}, user {preview.user}): "
            f"{size(preview.size_bytes)} to {preview.path}"
        )
        if not yes and not sys.stdin.isatty():
            raise Refused(
                "--gcore pauses the process while its memory is written: confirm with --yes"
            )
        if not yes:
            screen.say(text)
            if not click.confirm("The process is paused meanwhile. Take the core?", err=True):
                screen.say("nothing was done")
                return OK
        else:
            screen.note(f"{text}; the process is paused meanwhile")
        taken = dumper.take(preview)
    except DumpError as problem:
        gap = problem.gap
        if gap and gap.kind == INTERRUPTED:
            return INTERRUPTED_CODE
        screen.say(f"--gcore {dumper.pid}: {problem}")
        is_unreached = gap is not None and gap.is_unreached
        return exit_code(failed=not is_unreached, unreachable=is_unreached)
    is_running = taken.state not in ("", "T", "t")
    after = (
        "goes on" if is_running else "has ended" if not taken.state else "is stopped: kill -CONT"
    )
    if taken.continued:
        after += " (it had been left stopped, and was sent SIGCONT)"
    if taken.error:
        screen.say(f"--gcore {preview.pid}: {taken.error}; pid {preview.pid} {after}")
        return exit_code(failed=True)
    screen.note(f"{size(taken.size_bytes)} in {taken.seconds} s; pid {preview.pid} {after}")
    click.echo(sanitise(taken.path))
    return exit_code(failed=not is_running)


@command()
@inventory_argument
@local_option
@since_option("cores written")
@option("--job", metavar="ID", help="Only this job: of Slurm, torchrun, or ADDRESS:PORT.")
@option(
    "--gcore",
    "pid",
    type=click.IntRange(2),
    metavar="PID",
    help="Dump this live process first (pauses it).",
)
@output_directory("Write each backtrace to DIR/NODE-PID.txt, and DIR/cores.json.")
@format_option("cores")
@option("--yes", is_flag=True, help="Do not ask before --gcore pauses the process.")
@transport_options
def cores(
    inventory: str | None,
    *,
    local: bool,
    since: str | None,
    job: str | None,
    pid: int | None,
    output: str | None,
    format: str,
    yes: bool,
    **shared: Any,
) -> int:
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
    options, seconds = TargetOptions(**shared), past(since, seconds_ago)
    by_job = options.via != "ssh" and job is not None
    inventory = find_inventory(inventory, options, elsewhere=local or by_job)
    if options.via == "ssh" and local == (inventory is not None):
        raise Refused("give either an INVENTORY or --local")
    if local and options.via != "ssh":
        raise Refused(f"--via {options.via}: cannot be combined with --local")
    if local and options.limit is not None:
        raise Refused("--limit: cannot be combined with --local")
    screen = options.screen()
    nodes = (
        local_targets(local_policy(options))
        if local
        else targets_of_ended_job(inventory, options, job, screen)
    )
    with nodes.transport as transport:
        ask = ask_with_progress(transport, screen)
        if pid is not None:
            if len(nodes.policies) != 1:
                raise Refused(f"--gcore {pid}: choose one node with --limit, or --local")
            if output is not None and inventory is not None:
                raise Refused(
                    "-o: with --gcore only for --local; a node keeps the core in its own directory"
                )
            directory = str(_make_directory(output).resolve()) if output is not None else ""
            ((name, policy),) = nodes.policies.items()
            dumper = CoreDumper(ask, transport.tag, name, policy, pid, directory)
            return _dump(dumper, screen, yes)
        path = _make_directory(output) if output is not None else None
        cores = collect_cores(ask, transport.tag, nodes.policies, seconds, job or "")
    if path is not None:
        _write(cores, path)
        count = sum(1 for crash in cores.crashes if crash.text)
        screen.note(f"{path}: cores.json, and {counted(count, 'backtrace')}")
    has_findings = bool(cores.crashes or cores.gaps or cores.notes)
    if find_format("cores", format).styled and not (
        has_findings or cores.unlisted or not cores.complete
    ):
        screen.note(summary(cores))
    else:
        show("cores", format, cores, screen, silent=screen.quiet and not has_findings)
    unread = (crash.location.reader for crash in cores.unread)
    keep_gaps(nodes, screen, cores.gaps, complete=cores.complete, further=unread)
    return cores_code(cores)

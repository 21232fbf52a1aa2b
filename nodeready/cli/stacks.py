"""`nodeready stacks`: which rank holds up a job, and where every rank stands, grouped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from nodeready.agent.stacks.program import StacksConfig
from nodeready.cli.conversations import ask_with_progress, keep_gaps
from nodeready.cli.default_inventory import find_inventory
from nodeready.cli.jobs import IF_ENDED, running_lines
from nodeready.cli.options import (
    Refused,
    command,
    format_option,
    inventory_argument,
    local_option,
    option,
    output_directory,
    span_option,
    timeout_option,
    transport_options,
)
from nodeready.cli.screen import Screen, show
from nodeready.cli.targets import TargetOptions, Targets, local_targets, select_targets
from nodeready.core.policy import Policy
from nodeready.core.text import utc_now
from nodeready.reports.registry import FORMATS, Options
from nodeready.runs.stacks import archive, debuggable, group
from nodeready.runs.stacks.collect import (
    LONGER_S,
    Captured,
    SearchError,
    capture,
    no_ranks_reason,
    program_config,
    unwind,
    with_launchers,
)
from nodeready.runs.stacks.document import Stacks, stacks_code
from nodeready.runs.stacks.trace import TraceError


def _refuse_unclear_source(
    inventory: str | None, local: bool, source: str | None, options: TargetOptions
) -> None:
    """Raise Refused unless the options name exactly one source of stacks."""
    if options.via == "ssh" and sum((inventory is not None, local, source is not None)) != 1:
        raise Refused("give one of: an INVENTORY, --local, --from DIR, or --via srun --job ID")
    if options.via != "ssh" and (local or source):
        raise Refused(f"--via {options.via}: cannot be combined with --local or --from")
    if options.limit is not None and inventory is None:
        raise Refused("--limit: selects from an INVENTORY, and there is none")


def _group_traces(
    captured: Captured, all_threads: bool, started: str, directory: Path | None
) -> Stacks:
    traces = captured.traces()
    if directory is not None:
        traces = archive.keep_traces(directory, traces)
    return group.group(
        traces,
        captured.gaps,
        all_threads=all_threads,
        started=started,
        finished=utc_now(),
        complete=captured.complete,
    )


def _explain_missing_ranks(nodes: Targets, captured: Captured, screen: Screen) -> None:
    """Print why no rank was found, and which jobs run. Raises Refused if all nodes say so."""
    running = running_lines(nodes, screen) if captured.config.job and captured.complete else []
    if running:
        captured.instead.clear()
    ended = [IF_ENDED] if captured.config.job and captured.complete else []
    lines = [no_ranks_reason(captured), *running, *ended]
    if not captured.gaps:
        raise Refused("\n".join(lines))
    for line in lines:
        screen.say(line)


def _capture_stacks(
    nodes: Targets,
    config: StacksConfig,
    screen: Screen,
    *,
    native: bool,
    all_threads: bool,
    directory: Path | None,
) -> tuple[Stacks, int]:
    """The stacks of the job, with --native after a second round; and the exit code."""
    started = utc_now()
    captured = _capture(nodes, config, screen)
    native = native and captured.complete
    stacks = _group_traces(captured, all_threads, started, None if native else directory)
    if native:
        for problem in unwind(captured, ask_with_progress(nodes.transport, screen), stacks):
            screen.say(problem)
        stacks = _group_traces(captured, all_threads, started, directory)
    stacks = with_launchers(stacks, captured)
    keep_gaps(nodes, screen, stacks.gaps, complete=captured.complete)
    if not stacks.processes and len(captured.gaps) < len(captured.nodes):
        _explain_missing_ranks(nodes, captured, screen)
    return stacks, stacks_code(stacks)


def _refuse_with_check(source: str | None, form: str, output: str | None) -> None:
    """Raise Refused for options that --check does not use."""
    if source is not None:
        raise Refused("--check: needs a running job; remove --from")
    if form not in FORMATS["debuggable"]:
        raise Refused(f"--check: --format {' or '.join(FORMATS['debuggable'])}, not {form}")
    if output is not None:
        raise Refused("--check: keeps no stacks; remove -o")


def _check_job(nodes: Targets, config: StacksConfig, screen: Screen, form: str) -> int:
    """Show how debuggable the job is. Returns the exit code."""
    started = utc_now()
    config = replace(config, check=True, samples=1)
    captured = _capture(nodes, config, screen)
    document = debuggable.judge(
        captured.traces(),
        captured.gaps,
        started=started,
        finished=utc_now(),
        complete=captured.complete,
    )
    keep_gaps(nodes, screen, document.gaps, complete=captured.complete)
    if not document.findings and not document.gaps:
        _explain_missing_ranks(nodes, captured, screen)
    code = debuggable.debuggable_code(document)
    show("debuggable", form, document, screen, silent=screen.quiet and not code)
    return code


def _read_archive(source: str, all_threads: bool, directory: Path | None) -> tuple[Stacks, int]:
    """The stacks of an earlier capture, grouped again; and the exit code."""
    try:
        traces, gaps = archive.read(Path(source))
        if directory is not None:
            traces = archive.keep_traces(directory, traces)
        stacks = group.group(traces, gaps, all_threads=all_threads)
    except TraceError as problem:
        raise Refused(f"--from {problem}") from None
    if not stacks.processes and not stacks.gaps:
        raise Refused(f"--from {source}: no ranks in it")
    return stacks, stacks_code(stacks)


def _excluding_options(pids: Sequence[int], options: TargetOptions) -> str:
    """The given options that leave ranks out, which are then not missing; "": none."""
    is_given = {"--pid": bool(pids), "--limit": options.limit is not None}
    return " and ".join(name for name in is_given if is_given[name])


def _is_any_given(*names: str) -> bool:
    """Whether one of these options was given."""
    context = click.get_current_context()
    return any(context.get_parameter_source(name) != ParameterSource.DEFAULT for name in names)


def _make_directory(output: str | None) -> Path | None:
    """Make the directory of ``-o``, before any node is contacted. Raises Refused."""
    if output is None:
        return None
    directory = Path(output)
    try:
        archive.prepare(directory)
    except archive.ForeignStacksDirectory as problem:
        raise Refused(f"-o {problem}") from None
    except OSError as problem:
        raise Refused(f"-o {problem.filename}: {problem.strerror}") from None
    return directory


def _targets(
    inventory: str | None,
    local: bool,
    options: TargetOptions,
    config: StacksConfig,
    screen: Screen,
) -> tuple[Targets, StacksConfig]:
    """The nodes, and the search for their ranks, with the number of the Slurm job."""
    if local:
        nodes = local_targets(Policy())
    else:
        uses_srun = options.via == "srun" or inventory is None
        job = config.job if uses_srun and config.job else None
        nodes = select_targets(inventory, options, job=job, tell=screen.note)
    return nodes, replace(config, job=nodes.job or config.job, tag=nodes.transport.tag)


def _capture(nodes: Targets, config: StacksConfig, screen: Screen) -> Captured:
    """Capture the traces of all ranks."""
    from nodeready.fleet.inventory.slurm import job_placement

    names = nodes.transport.nodes
    # Slurm's record of the job tells whose ranks they are. --user and --pid already say it.
    placement = None if config.user or config.pids else job_placement(config.job, names)
    return capture(ask_with_progress(nodes.transport, screen), names, config, placement)


@command()
@inventory_argument
@local_option
@option(
    "--from",
    "source",
    metavar="DIR",
    help="Read what -o DIR kept, or texts of py-spy dump (*.txt, *.out, or one file).",
)
@option("--job", metavar="ID", help="Only this job: of Slurm, torchrun, or ADDRESS:PORT.")
@option("--user", metavar="NAME", help="Only ranks of this user.")
@option(
    *("--pid", "pids"),
    type=click.IntRange(1),
    multiple=True,
    metavar="P",
    help="Only this process; may be repeated.",
)
@option("--match", metavar="PATTERN", help="Only processes whose command line matches PATTERN.")
@option(
    "--native", is_flag=True, help="Also C and C++ frames of some ranks; pauses each for seconds."
)
@option("--locals", is_flag=True, help="Also variables of the innermost calls, without secrets.")
@option("--dump", is_flag=True, help="Have the ranks write PyTorch's flight recorder now.")
@option(
    "--ras", is_flag=True, help="Ask NCCL's RAS port even in versions in which that crashed jobs."
)
@option(
    "--check", is_flag=True, help="Check whether this running job can be debugged; exit 3 if not."
)
@option("--all-threads", is_flag=True, help="Group by the stacks of all threads.")
@option("--samples", type=click.IntRange(1, 100), default=2, metavar="N", help="Samples per rank.")
@span_option(
    "--interval",
    minimum_s=0.1,
    maximum_s=60,
    default="2s",
    help="Time between two samples.",
)
@timeout_option()
@output_directory("Keep the traces and every form of the result.", general=False)
@format_option("stacks", general=False)
@transport_options
def stacks(
    inventory: str | None,
    *,
    local: bool,
    source: str | None,
    job: str | None,
    user: str | None,
    pids: tuple[int, ...],
    match: str | None,
    native: bool,
    locals: bool,
    dump: bool,
    ras: bool,
    check: bool,
    all_threads: bool,
    samples: int,
    interval: float,
    timeout: int,
    output: str | None,
    format: str,
    **shared: Any,
) -> int:
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
    options = TargetOptions(**shared)
    by_job = options.via != "ssh" and job is not None
    elsewhere = local or source is not None or by_job
    inventory = find_inventory(inventory, options, elsewhere=elsewhere)
    _refuse_unclear_source(inventory, local, source, options)
    try:
        config = program_config(
            timeout,
            job=job or "",
            pids=pids,
            match=match or "",
            user=user or "",
            samples=samples,
            interval_s=interval,
            locals=locals,
            dump=dump,
            ras=ras,
            part=_excluding_options(pids, options),
            longer_s=0.0 if _is_any_given("samples", "interval") else LONGER_S,
        )
    except SearchError as problem:
        raise Refused(str(problem)) from None
    screen = options.screen()
    if check:
        _refuse_with_check(source, format, output)
        targets, config = _targets(inventory, local, options, config, screen)
        with targets.transport:
            return _check_job(targets, config, screen, format)
    if source is not None and (native or locals or dump or ras):
        raise Refused("--from: asks no node; remove --native, --locals, --dump and --ras")
    directory = _make_directory(output)
    if source is not None:
        document, code = _read_archive(source, all_threads, directory)
    else:
        targets, config = _targets(inventory, local, options, config, screen)
        with targets.transport:
            document, code = _capture_stacks(
                targets,
                config,
                screen,
                native=native,
                all_threads=all_threads,
                directory=directory,
            )
    if directory is not None:
        # A table is for the terminal; every other form is kept.
        forms = [form for form in FORMATS["stacks"].values() if not form.styled]
        texts = {f"stacks{form.extension}": form.render(document) for form in forms}
        archive.write(directory, document, texts)
        screen.note(f"{directory}: the traces, and {', '.join(texts)}")
    is_well = not code and document.verdict is not None and document.verdict.kind == "not-stuck"
    shown = Options(inventory=options.words(inventory))
    show("stacks", format, document, screen, silent=screen.quiet and is_well, options=shown)
    return code

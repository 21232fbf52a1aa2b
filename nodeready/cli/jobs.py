"""`nodeready jobs`: what runs where: the jobs of the nodes, and the ranks that were found."""

from __future__ import annotations

from typing import Any

from nodeready.cli.conversations import ask_with_progress, keep_gaps
from nodeready.cli.default_inventory import find_inventory
from nodeready.cli.options import (
    Refused,
    command,
    inventory_argument,
    local_option,
    option,
    report_options,
    srun_job_option,
    transport_options,
)
from nodeready.cli.outputs import read_outputs
from nodeready.cli.screen import Screen
from nodeready.cli.targets import TargetOptions, Targets, local_targets, select_targets
from nodeready.core.outcome import node_gaps
from nodeready.core.policy import Policy
from nodeready.core.text import counted, utc_now
from nodeready.reports.jobs_table import summary
from nodeready.runs.jobs import Jobs, jobs_code, running_jobs
from nodeready.runs.stacks.collect import capture, program_config

#: Seconds for one node, after it is connected: no stack is taken.
_TIMEOUT_S = 30
#: The advice where no process of a named job was found.
IF_ENDED = "if it has ended: nodeready postmortem shows who failed first"
#: Maximum jobs that are named where another job was asked for.
_MAX_LINES = 5


def find_jobs(nodes: Targets, screen: Screen, user: str = "") -> Jobs:
    """The jobs of the nodes, found as `nodeready stacks` finds them."""
    started = utc_now()
    config = program_config(_TIMEOUT_S, user=user, samples=0)
    captured = capture(ask_with_progress(nodes.transport, screen), nodes.transport.nodes, config)
    jobs = running_jobs(captured.traces())
    answered = tuple(name for name in captured.nodes if name not in captured.gaps)
    return Jobs(started, utc_now(), answered, jobs, node_gaps(captured.gaps), captured.complete)


def running_lines(nodes: Targets, screen: Screen) -> list[str]:
    """The jobs that run on the nodes, a line each; []: none, or they could not be asked."""
    document = find_jobs(nodes, screen)
    lines = [f"running: {summary(job)}" for job in document.jobs[:_MAX_LINES]]
    if len(document.jobs) > len(lines):
        unlisted = counted(len(document.jobs) - len(lines), "more job")
        lines.append(f"running: {unlisted}: nodeready jobs")
    return lines


@command()
@inventory_argument
@local_option
@option("--user", metavar="NAME", help="Only jobs of this user.")
@report_options("jobs")
@srun_job_option
@transport_options
def jobs(
    inventory: str | None,
    *,
    local: bool,
    user: str | None,
    format: str,
    output: tuple[str, ...],
    job: str | None,
    **shared: Any,
) -> int:
    """List the jobs on the nodes of INVENTORY: their users, ranks and nodes. Changes nothing.

    Jobs are found as `nodeready stacks` finds their ranks: Slurm's, torchrun's, mpirun's, and jobs
    without a launcher. The name of a job is what `--job` of the other commands takes. Without
    root, only your own jobs are seen.

    \b
    Examples:
      nodeready jobs inventories/prod.py
      nodeready jobs 'gpu[001-064]' --user ada --sudo
      nodeready jobs --local -v
    """
    options = TargetOptions(**shared)
    inventory = find_inventory(inventory, options, elsewhere=local or bool(job))
    if options.via == "ssh" and local == (inventory is not None):
        raise Refused("give either an INVENTORY or --local")
    if local and (options.via != "ssh" or options.limit is not None):
        raise Refused("--local: cannot be combined with --via or --limit")
    outputs = read_outputs("jobs", format, output)
    screen = options.screen()
    if local:
        nodes = local_targets(Policy(), sudo=options.sudo)
    else:
        nodes = select_targets(inventory, options, job=job, tell=screen.note)
    with nodes.transport:
        document = find_jobs(nodes, screen, user or "")
    silent = screen.quiet and not document.jobs
    keep_gaps(nodes, screen, document.gaps, complete=document.complete)
    outputs.show(document, screen, silent=silent)
    return jobs_code(document)

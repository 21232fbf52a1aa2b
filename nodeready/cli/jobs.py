"""`nodeready jobs`: the jobs of the nodes, and where their ranks run."""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.cli.defaults import find_inventory
from nodeready.cli.options import (
    ScreenOptions,
    command,
    format_option,
    inventory_argument,
    report_files,
)
from nodeready.runs.options import JobsOptions


@dataclass(kw_only=True)
class JobsWords(ScreenOptions, JobsOptions):
    format: str = format_option("jobs")
    output: tuple[str, ...] = report_files()


@command(JobsWords)
@inventory_argument
def jobs(inventory: str | None, options: JobsWords) -> int:
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
    from nodeready.cli.outputs import read_outputs
    from nodeready.runs.jobs import jobs_code, run

    inventory = find_inventory(inventory, options, elsewhere=options.local or bool(options.job))
    outputs, screen = read_outputs("jobs", options), options.screen()
    document = run(inventory, options, screen)
    outputs.show(document, screen, silent=screen.quiet and not document.jobs)
    return jobs_code(document)

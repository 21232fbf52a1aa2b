"""`nodeready ready`: prove which nodes are ready for a job.

`ready_run` is imported only when the command runs, so that --help and completion are quick.
"""

from __future__ import annotations

from typing import Any

import click

from nodeready.cli.options import (
    command,
    hostfile_options,
    inventory_argument,
    local_option,
    only_option,
    option,
    report_options,
    skip_option,
    span_option,
    srun_job_option,
    transport_options,
)


@command()
@inventory_argument
@local_option
@span_option(
    "--budget",
    minimum_s=1,
    maximum_s=3600,
    is_whole=True,
    default="60s",
    help="Maximum time in all.",
)
@option("--user", metavar="NAME", help="Run the proofs as this user, who will run the job.")
@option("--ports", metavar="FIRST-LAST", help="Port range of the job.")
@option("--gpus", type=click.IntRange(0, 64), metavar="N", help="GPUs that every node must have.")
@option(
    "--nodes-needed",
    type=click.IntRange(1),
    metavar="N",
    help="Exit 0 when at least N nodes are ready; default: all nodes.",
)
@span_option(
    "--wait",
    "wait_s",
    minimum_s=0,
    maximum_s=7 * 86400,
    is_whole=True,
    default=0,
    show_default=False,
    help="Repeat until enough nodes are ready, for at most this time.",
)
@hostfile_options("ready")
@option("--full-mesh", is_flag=True, help="Connect every pair of nodes, not a sample of them.")
@only_option("Only these checks or subjects: proof,gpus.present.")
@skip_option
@report_options("ready")
@srun_job_option
@transport_options
def ready(inventory: str | None, **options: Any) -> int:
    """Prove for every node of INVENTORY whether a job may start: go or no-go.

    The audit, and these proofs: as the job's user, nodeready takes stacks and makes a core; ssh
    and pdsh work between nodes; the nodes connect over the job's ports. nodeready touches only its
    own processes, files and listeners. A check without a result within the budget is unknown:
    no-go.

    \b
    Examples:
      nodeready ready inventories/prod.py --user ada
      nodeready ready 'gpu[001-064]' --gpus 8 --nodes-needed 60 --hostfile-out job.hosts
      nodeready ready inventories/prod.py --hostfile-out bad --hostfile-format exclude
      nodeready ready inventories/prod.py --only proof.mesh --full-mesh
      nodeready ready inventories/prod.py --wait 600 && sbatch job.sh
      nodeready ready --local
    """
    from nodeready.cli.ready_run import run_ready

    return run_ready(inventory, **options)

"""`nodeready audit`: what differs from the policy, on every node. Never changes a node.

`audit_run` is imported only when the command runs, so that --help and completion are quick.
"""

from __future__ import annotations

from typing import Any

import click

from nodeready.cli.options import (
    command,
    inventory_argument,
    only_option,
    option,
    report_options,
    skip_option,
    span_option,
    srun_job_option,
    timeout_option,
    transport_options,
)


@command()
@inventory_argument
@report_options("audit")
@only_option("Only these checks or subjects: gpus,nics.mtu.")
@skip_option
@option(
    "--fail-on",
    type=click.Choice(["fail", "warn"]),
    default="fail",
    help="Lowest status that exits with 3; 'warn' includes warnings and outliers.",
)
@timeout_option("Maximum time per node, after it is connected; with --recorded, for DIR.")
@option(
    "--recorded",
    metavar="DIR",
    help="Each node's last gate verdict, from a directory that the nodes share; no connection.",
    general=False,
)
@span_option(
    "--watch",
    "every",
    minimum_s=1,
    maximum_s=86400,
    general=False,
    help="Repeat after this time until Ctrl-C, and print what changes.",
)
@srun_job_option
@transport_options
def audit(inventory: str | None, **options: Any) -> int:
    """Report what differs from the policy on every node of INVENTORY. Never writes to a node.

    \b
    Examples:
      nodeready audit @local
      nodeready audit inventories/prod.py --only ptrace,gpus.ecc_errors
      nodeready audit 'gpu[001-064]' --format json -o audit.json
      nodeready audit inventories/prod.py -q --fail-on warn        # from cron
      nodeready audit inventories/prod.py --format prometheus \\
          -o /var/lib/prometheus/node-exporter/nodeready.prom
      nodeready audit inventories/prod.py --watch 60
      nodeready audit inventories/prod.py --recorded /shared/nodeready
    """
    from nodeready.cli.audit_run import run_audit

    return run_audit(inventory, **options)

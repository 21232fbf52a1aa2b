"""`nodeready diff`: what changed on the nodes, and what the failing nodes have in common.

`diff_run` is imported only when the command runs, so that --help and completion are quick.
"""

from __future__ import annotations

from typing import Any

import click

from nodeready.cli.options import (
    command,
    option,
    report_options,
    srun_job_option,
    timeout_option,
    transport_options,
)


@command()
@click.argument("sides", nargs=-1, metavar="[INVENTORY | A.json B.json]")
@option(
    "--since",
    metavar="WHEN",
    help="Compare with then: yesterday, 3d, a date, the number of a look, or last-good.",
    general=False,
)
@option(
    "--until", metavar="WHEN", help="With --since: the later look; ask no node.", general=False
)
@option(
    "--against",
    metavar="NODE|GROUP|FILE",
    help="Compare with a node, with most nodes of a group, or with a file of learn.",
    general=False,
)
@report_options("diff")
@option(
    "--exit-code",
    "is_strict",
    is_flag=True,
    help="Exit with 3 when there is a difference.",
    general=False,
)
@timeout_option()
@srun_job_option
@transport_options
def diff(
    sides: tuple[str, ...],
    **options: Any,
) -> int:
    """Report what changed on the nodes of INVENTORY, or between two files. Never writes to a node.

    What changed on the failing nodes and not on healthy nodes comes first. The nodes are asked as
    by an audit, and compared with what the memory has kept. Without an option, the last two looks
    are compared, and no node is asked.

    \b
    Examples:
      nodeready diff prod.py
      nodeready diff prod.py --since yesterday
      nodeready diff prod.py --since last-good
      nodeready diff prod.py --since 2026-11-02 --until 2026-11-09
      nodeready diff prod.py --limit gpu007 --against gpu001
      nodeready diff prod.py --against inventories/group_data/h100.py
      nodeready diff monday.json today.json          # of audit or ready, --format json
    """
    from nodeready.cli.diff_run import run_diff

    return run_diff(sides, **options)

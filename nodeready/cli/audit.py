"""`nodeready audit`: look at every node, judge it, change nothing."""

from __future__ import annotations

from typing import Any

import click

from nodeready.cli.exits import exit_code
from nodeready.cli.options import common, option
from nodeready.cli.start import Common, gather, open_session, remember_failed, subjects
from nodeready.reports.plan import show_errors
from nodeready.reports.table import show_table
from nodeready.reports.text import nodes
from nodeready.snapshot import judge


@click.command()
@click.argument("inventory")
@option("--only", metavar="SUBJECT,...", help="Only these subjects, e.g. ptrace,limits.")
@common
def audit(inventory: str, only: str | None, **shared: Any) -> int:
    """Say for every node of INVENTORY what differs from the policy. Never writes to a node.

    \b
    Examples:
      nodeready audit @local
      nodeready audit inventories/prod.py --only ptrace,core_dumps
    """
    options = Common(**shared)
    chosen = subjects(only)
    screen = options.screen()
    with open_session(inventory, options) as session:
        try:
            gather(session, screen)
        except KeyboardInterrupt:
            session.interrupted = True
            session.end_remote()
            missing = [node.name for node in session.nodes if not (node.reached or node.error)]
            screen.say(f"interrupted: the results are partial; not {nodes(missing)}")
        for node in session.nodes:
            if node.snapshot is not None:
                node.results = judge(node.snapshot, node.policy, chosen)
        bad = [n.name for n in session.nodes if n.error or any(r.bad for r in n.results)]
        if bad or not screen.quiet:
            screen.show(show_table(session.nodes))
            screen.show(show_errors(session.nodes))
        remember_failed(bad)
        return exit_code(
            interrupted=session.interrupted,
            failed=any(n.error and not n.unreachable for n in session.nodes),
            unreachable=any(n.unreachable for n in session.nodes),
            check=any(r.status in ("fail", "unknown") for n in session.nodes for r in n.results),
        )

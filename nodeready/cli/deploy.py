"""`nodeready deploy`: probe every node, show the plan, run it, probe again."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import click

from nodeready.cli.defaults import require_inventory
from nodeready.cli.options import ScreenOptions, command, format_option, inventory_argument
from nodeready.core.exit_codes import Refused
from nodeready.core.text import counted
from nodeready.runs.options import DeployOptions, opt


@dataclass(kw_only=True)
class DeployWords(ScreenOptions, DeployOptions):
    diff: bool = opt("--diff", "Show the differences of the files.", default=False)
    format: str = format_option("deploy", general=False)
    yes: bool = opt("--yes, -y", "Do not ask before the first change.", default=False)


@command(DeployWords)
@inventory_argument
def deploy(inventory: str | None, options: DeployWords) -> int:
    """Configure every node of INVENTORY by the policy.

    Probes all nodes at once, prints what would change on each node and why, asks on a terminal,
    makes only these changes, and probes again. Never reboots; restarts only services that the
    policy names.

    \b
    Examples:
      nodeready deploy inventories/prod.py --check --diff
      nodeready deploy 'gpu[001-064]' --only ptrace,limits --yes
      nodeready deploy inventories/prod.py --limit @last-failed --yes
      nodeready deploy inventories/prod.py --check --format json
    """
    from nodeready.cli.screen import show
    from nodeready.reports.deploy_table import show_plan
    from nodeready.reports.lines import node_set
    from nodeready.reports.registry import Options, find_format
    from nodeready.runs.deploy.command import nodes_to_retry, run, undone
    from nodeready.runs.deploy.document import Deploy, deploy_code

    inventory = require_inventory(inventory, options)
    screen, is_declined = options.screen(), False
    shown = Options(diff=options.diff, quiet=options.quiet, inventory=options.words(inventory))
    is_styled = find_format("deploy", options.format).styled

    def confirm(plan: Deploy) -> bool | None:
        """Show the plan to a person, who has to confirm the changes, unless --yes."""
        nonlocal is_declined
        changes = sum(len(node.changes) for node in plan.nodes)
        asks = changes > 0 and not options.yes
        fitted = replace(shown, verbose=screen.verbose, width=screen.width, lines=screen.lines)
        if is_styled:
            if not screen.quiet:
                screen.show(show_plan(plan.nodes, fitted))
        elif asks and sys.stdin.isatty():
            screen.show_on_stderr(show_plan(plan.nodes, fitted))
        if not asks:
            return True
        if not sys.stdin.isatty():
            raise Refused("no terminal to ask on: add --yes, or --check to only look")
        planned = sum(node.planned for node in plan.nodes)
        question = f"Make {counted(changes, 'change')} on {counted(planned, 'node')}?"
        try:
            is_declined = not click.confirm(question, err=True)
        except click.Abort:
            screen.err.print()
            return None
        if is_declined:
            screen.say("nothing was changed")
        return not is_declined

    document = run(inventory, options, screen, confirm)
    # A person has seen the plan already. A program gets it now.
    if not (is_declined and is_styled):
        show("deploy", options.format, document, screen, options=shown)
    changed = [node for node in document.nodes if node.outcome is not None]
    if not document.complete and not changed:
        screen.say("nothing was changed")
    elif not document.complete:
        names = undone(document.nodes)
        screen.say(
            f"partial: {len(changed) - len(names)} of {len(changed)} nodes were completed"
            + (f"; not {node_set(names)} (--limit @last-failed)" if names else "")
        )
    elif not document.check and nodes_to_retry(document.nodes):
        screen.say("retry failed nodes: --limit @last-failed")
    return deploy_code(document)

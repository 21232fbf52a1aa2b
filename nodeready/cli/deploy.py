"""`nodeready deploy` and `bundle`: what comes onto the nodes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nodeready.cli.options import (
    ScreenOptions,
    command,
    format_option,
    inventory_argument,
    output_file,
    require_inventory,
)
from nodeready.core.exit_codes import OK, Refused
from nodeready.core.files import write_atomically
from nodeready.core.shell import join
from nodeready.core.text import counted
from nodeready.runs.options import ConnectionOptions, DeployOptions, limit, opt, trust

if TYPE_CHECKING:
    from nodeready.cli.screen import Screen
    from nodeready.core.policy import Policy
    from nodeready.runs.deploy.document import Deploy


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
    policy names. With --batch it changes one node first, then waves, until too many nodes fail.
    --undo puts back what deploys have replaced, and removes what they have added.

    \b
    Examples:
      nodeready deploy inventories/prod.py --check --diff
      nodeready deploy 'gpu[001-064]' --only ptrace,limits --yes
      nodeready deploy inventories/prod.py --batch 10% --max-fail 1 --yes
      nodeready deploy inventories/prod.py --limit @last-failed --yes
      nodeready deploy inventories/prod.py --undo --check --diff
      nodeready deploy inventories/prod.py --check --format json
    """
    from nodeready.cli.screen import show
    from nodeready.reports.deploy_table import show_plan
    from nodeready.reports.registry import Options, find_format
    from nodeready.runs.deploy.command import run
    from nodeready.runs.deploy.document import deploy_code

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
        verb = "Take back" if options.undo else "Make"
        question = f"{verb} {counted(changes, 'change')} on {counted(planned, 'node')}?"
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
    _say_rest(screen, document, options, inventory)
    return deploy_code(document)


def _say_rest(screen: Screen, document: Deploy, options: DeployWords, inventory: str) -> None:
    """Say which nodes were not completed, or not begun, and how to continue."""
    from nodeready.reports.lines import node_set
    from nodeready.runs.deploy.command import nodes_to_retry, undone

    changed = [node for node in document.nodes if node.outcome is not None]
    if not document.complete and not changed:
        screen.say("nothing was changed")
    elif not document.complete:
        names = undone(document.nodes)
        remaining = f"; not {node_set(names)} (--limit @last-failed)" if names else ""
        done = f"{len(changed) - len(names)} of {len(changed)} nodes were completed"
        screen.say(f"partial: {done}{remaining}")
    elif not document.check and nodes_to_retry(document.nodes) and not document.stopped:
        screen.say("retry failed nodes: --limit @last-failed")
    if not document.untouched or options.batch is None:
        return
    if document.stopped:
        screen.say(document.stopped)
    untouched = node_set(document.untouched, 1_000_000)
    size = options.batch if isinstance(options.batch, int) else f"{options.batch:.0%}"
    further = ["--batch", str(size), *(["--undo"] if options.undo else [])]
    further += ["--max-fail", str(options.max_fail)] if options.max_fail else []
    further += ["--only", str(options.only)] if options.only else []
    words = f"{replace(options, limit=untouched).words(inventory)} {join(further)}"
    screen.say(f"untouched: {untouched}; continue: nodeready deploy {words}")
    screen.say("failed and untouched nodes: --limit @last-failed")


# --- `nodeready bundle`: the node's own program as one file.


def _common_policy(policies: Mapping[str, Policy]) -> Policy:
    """The policy that all of these nodes have. Raises Refused, with the keys, if they differ."""
    from nodeready.core.policy import as_data
    from nodeready.reports.lines import grouped, node_set

    if len({*policies.values()}) == 1:
        return next(iter(policies.values()))
    data = {name: as_data(policy) for name, policy in policies.items()}
    differences = []
    for key in next(iter(data.values())):
        values = grouped((repr(settings[key]), name) for name, settings in data.items())
        if len(values) > 1:
            texts = (f"{node_set(names)}: {value}" for value, names in values)
            differences.append(f"{key} ({', '.join(texts)})")
    text = f"a bundle has one policy, and these nodes differ: {'; '.join(differences)}"
    raise Refused(f"{text}: choose by --limit")


@dataclass(kw_only=True)
class BundleWords:
    output: str = output_file("File of the program.", default="nodeready.pyz")
    limit: str | None = limit("The policy of these nodes: gpu[001-004], a group.")
    trust_inventory: bool = trust()


@command(BundleWords)
@inventory_argument
def bundle(inventory: str | None, options: BundleWords) -> int:
    """Write the node's own program: one file that needs only Python 3.9 on the node.

    The program audits the node on which it runs, proves it, keeps a verdict and answers a job's
    prolog. It judges by the policy of INVENTORY, or by the default policy. The same version and
    policy make the same bytes. No node is contacted.

    \b
    Examples:
      nodeready bundle inventories/prod.py --limit h100 -o nodeready.pyz
      scp nodeready.pyz gpu001: && ssh gpu001 ./nodeready.pyz audit
    """
    from nodeready.cli.screen import Screen, refuse_unwritable
    from nodeready.core.policy import Policy, digest
    from nodeready.fleet.transport.bundle import build
    from nodeready.runs.targets import load_targets

    output = options.output
    refuse_unwritable(output)
    policy, source = None, "the default policy"
    if inventory is not None:
        targeted = ConnectionOptions(limit=options.limit, trust_inventory=options.trust_inventory)
        _, _, policies = load_targets(inventory, targeted, Screen().note)
        policy = _common_policy(policies)
        source = f"the policy of {counted(len(policies), 'node')}"
    elif options.limit is not None:
        raise Refused("--limit: needs an INVENTORY")
    program = build(policy)
    write_atomically(Path(output), [program], 0o755)
    policy_digest = digest([policy or Policy()])
    text = f"{output}: {len(program) / 1e6:.1f} MB, {source} ({policy_digest})"
    click.echo(f"nodeready: {text}", err=True)
    return OK

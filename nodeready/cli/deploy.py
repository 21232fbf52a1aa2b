"""`nodeready deploy`: plan from one look at every node, show it, run it, look again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import click

from nodeready import execution, fleet
from nodeready.cli.exits import Refused, exit_code
from nodeready.cli.options import common, option
from nodeready.cli.screen import Screen
from nodeready.cli.start import Common, Nodes, hold, look, over_ssh, remember_failed, subjects
from nodeready.execution import Outcome
from nodeready.fleet import FleetContext, Judged
from nodeready.planning import Plan, plan
from nodeready.reports.plan import show_errors, show_left, show_outcomes, show_plan
from nodeready.reports.text import counted
from nodeready.reports.text import nodes as folded
from nodeready.transport.look import PROBE_TIMEOUT_S

_STOPPING = "interrupted: ending what runs on the nodes (again: leave at once)"


@click.command()
@click.argument("inventory")
@option("--check", is_flag=True, help="Only show what would change; write nothing anywhere.")
@option("--diff", is_flag=True, help="Show the files' differences.")
@option("--only", metavar="SUBJECT,...", help="Only these subjects, e.g. ptrace,limits.")
@option("--yes", "-y", is_flag=True, help="Do not ask before the first change.")
@common
def deploy(
    inventory: str, check: bool, diff: bool, only: str | None, yes: bool, **shared: Any
) -> int:
    """Make every node of INVENTORY as the policy wants it.

    Looks at all nodes at once, prints per node what would change and why, asks on a terminal,
    changes only that, and looks again. Never reboots; restarts only services that the policy
    names.

    \b
    Examples:
      nodeready deploy inventories/prod.py --check --diff
      nodeready deploy 'gpu[001-064]' --only ptrace,limits --yes
      nodeready deploy inventories/prod.py --limit @last-failed --yes
    """
    options = Common(**shared)
    chosen = subjects(only)
    screen = options.screen()
    nodes = over_ssh(inventory, options)
    with nodes.carrier:
        return _deploy(nodes, screen, chosen, check=check, diff=diff, yes=yes)


def _deploy(
    nodes: Nodes, screen: Screen, chosen: tuple[str, ...], *, check: bool, diff: bool, yes: bool
) -> int:
    """The whole command. Returns the exit code."""
    looks = look(nodes, screen, chosen, PROBE_TIMEOUT_S, _STOPPING)
    context = FleetContext(nodes.policies)
    if not nodes.carrier.interrupted:
        context = fleet.completed(nodes.carrier, nodes.policies, looks, nodes.all)
    if nodes.carrier.interrupted:
        return _nothing_done(screen)
    judged = {one.name: one for one in fleet.judged(looks, context)}
    plans = _plans(judged, chosen)
    if check or not screen.quiet:
        screen.show(show_plan(judged, plans, diff))
    if check:
        screen.show(show_left(judged.values()))
        screen.show(show_errors(judged.values()))
        _count_check(screen, judged.values(), plans)
        failing = any(r.status == "fail" for node in judged.values() for r in node.results)
        return _code(judged.values(), (), check=bool(plans) or failing)
    if any(made.changes for made in plans.values()) and not yes:
        agreed = _agreed(screen, plans)
        if not agreed:
            screen.say("nothing was changed")
            return _code(judged.values(), (), check=True, interrupted=agreed is None)
    found = hold(
        nodes.carrier,
        screen,
        "changing",
        lambda name: execution.changing(
            judged[name], plans[name], nodes.carrier.run, chosen, PROBE_TIMEOUT_S
        ),
        plans,
        stopping=_STOPPING,
    )
    outcomes = {
        name: execution.of(judged[name], plans[name].refused, found[name]) for name in plans
    }
    if nodes.carrier.interrupted:
        return _partial(screen, outcomes)
    return _finish(screen, {**judged, **{n: o.node for n, o in outcomes.items()}}, outcomes)


def _plans(judged: Mapping[str, Judged], chosen: tuple[str, ...]) -> dict[str, Plan]:
    """The plans of the nodes that need one."""
    plans = {
        name: plan(node.snapshot, node.policy, node.results, chosen)
        for name, node in judged.items()
        if node.snapshot is not None and not node.error
    }
    return {name: made for name, made in plans.items() if made.changes or made.refused}


def _agreed(screen: Screen, plans: Mapping[str, Plan]) -> bool | None:
    """Whether somebody wants the changes; None: interrupted."""
    changes = sum(len(made.changes) for made in plans.values())
    if not sys.stdin.isatty():
        raise Refused("no terminal to ask on: add --yes, or --check to only look")
    question = f"Make {counted(changes, 'change')} on {counted(len(plans), 'node')}?"
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        screen.err.print()
        return None


def _nothing_done(screen: Screen) -> int:
    screen.say("nothing was changed")
    return exit_code(interrupted=True)


def _partial(screen: Screen, outcomes: Mapping[str, Outcome]) -> int:
    """Ctrl-C or SIGTERM: no new work, remote commands ended, what was done is shown."""
    screen.show(show_outcomes(outcomes))
    undone = [name for name, outcome in outcomes.items() if not outcome.complete]
    remember_failed(undone)
    screen.say(
        f"partial: {len(outcomes) - len(undone)} of {len(outcomes)} nodes were completed"
        + (f"; not {folded(undone)} (--limit @last-failed)" if undone else "")
    )
    return exit_code(interrupted=True)


def _finish(screen: Screen, judged: Mapping[str, Judged], outcomes: Mapping[str, Outcome]) -> int:
    nodes = judged.values()
    screen.show(show_outcomes(outcomes))
    screen.show(show_errors(nodes))
    if not screen.quiet or _code(nodes, outcomes.values()):
        screen.show(show_left(nodes))
    changed = sum(bool(o.done) for o in outcomes.values())
    steps = sum(len(o.done) for o in outcomes.values())
    failed = _failed(nodes, outcomes.values())
    lost = [node for node in nodes if node.unreachable]
    words = Counter(_word(node, outcomes) for node in nodes)
    remember_failed([*failed, *(node.name for node in lost)])
    if not screen.quiet:
        screen.out.print(
            f"{changed} changed ({counted(steps, 'change')}), {words['ok']} ok, "
            f"{len(failed)} failed, {len(lost)} unreachable"
            + "".join(f", {words[w]} {w}" for w in ("unknown", "for a person") if words[w])
        )
    if failed or lost:
        screen.say("again on these alone: --limit @last-failed")
    failing = any(r.status in ("fail", "unknown") for node in nodes for r in node.results)
    return _code(nodes, outcomes.values(), check=failing)


def _failed(nodes: Iterable[Judged], outcomes: Iterable[Outcome]) -> list[str]:
    """The nodes on which something failed that is not the connection."""
    steps = [o.node.name for o in outcomes if o.failed or o.left]
    looks = [node.name for node in nodes if node.error and not node.unreachable]
    return list(dict.fromkeys([*steps, *looks]))


def _word(node: Judged, planned: Iterable[str]) -> str:
    """The one word for a node that counts it. planned: the nodes that had a plan"""
    if node.error:
        return "unreachable" if node.unreachable else "failed"
    if node.name in planned:
        return "to change"
    if any(result.status == "unknown" for result in node.results):
        return "unknown"
    return "for a person" if any(result.bad for result in node.results) else "ok"


def _count_check(screen: Screen, nodes: Iterable[Judged], plans: Mapping[str, Plan]) -> None:
    counts = Counter(_word(node, plans) for node in nodes)
    for word in ("failed", "for a person"):
        if not counts[word]:
            del counts[word]
    words = dict.fromkeys(("to change", "ok", "unknown", "unreachable", *counts))
    screen.out.print(", ".join(f"{counts[word]} {word}" for word in words))


def _code(
    nodes: Iterable[Judged],
    outcomes: Iterable[Outcome],
    *,
    check: bool = False,
    interrupted: bool = False,
) -> int:
    nodes = list(nodes)
    return exit_code(
        interrupted=interrupted,
        failed=bool(_failed(nodes, outcomes)),
        unreachable=any(node.unreachable for node in nodes),
        check=check or any(r.status == "unknown" for node in nodes for r in node.results),
    )

"""`nodeready deploy`: plan from one look at every node, show it, run it, look again."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from nodeready.cli.exits import Refused, exit_code
from nodeready.cli.options import common, option
from nodeready.cli.start import Common, gather, open_session, remember_failed
from nodeready.reports.plan import show_errors, show_left, show_outcomes, show_plan
from nodeready.reports.text import counted, nodes
from nodeready.selection import SelectionError, select_whole
from nodeready.subjects import CHANGED

if TYPE_CHECKING:
    from nodeready.cli.screen import Screen
    from nodeready.execution import Outcome
    from nodeready.planning import Plan
    from nodeready.session import NodeRun, Session


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
    try:
        chosen = select_whole(only, CHANGED)
    except SelectionError as error:
        raise Refused(str(error)) from None
    screen = options.screen()
    with open_session(inventory, options, chosen) as session:
        job = _Deploy(session, screen, chosen)
        try:
            return job.run(check, diff, yes)
        except KeyboardInterrupt:
            return job.interrupt()


class _Deploy:
    """One run of the command: what it planned and what became of it."""

    def __init__(self, session: Session, screen: Screen, chosen: tuple[str, ...]) -> None:
        self.session, self.screen, self.chosen = session, screen, chosen
        self.plans: dict[str, Plan] = {}
        self.outcomes: dict[str, Outcome] = {}

    def run(self, check: bool, diff: bool, yes: bool) -> int:
        """The whole command. Returns the exit code."""
        from nodeready.execution import Outcome
        from nodeready.execution import deploy as run_plans
        from nodeready.planning import plan

        session, screen = self.session, self.screen
        gather(session, screen)
        session.judge()
        runs = {node.name: node for node in session.nodes}
        for node in session.nodes:
            if node.snapshot is not None and not node.error:
                made = plan(node.snapshot, node.policy, self.chosen)
                if made.changes or made.refused:
                    self.plans[node.name] = made
        if check or not screen.quiet:
            screen.show(show_plan(runs, self.plans, diff))
        if check:
            screen.show(show_left(self.session.nodes))
            screen.show(show_errors(session.nodes))
            self._count_check()
            failing = any(r.status == "fail" for n in session.nodes for r in n.results)
            return self._code(check=bool(self.plans) or failing)
        if any(made.changes for made in self.plans.values()) and not yes and not self._agreed():
            screen.say("nothing was changed")
            return self._code(check=True)
        self.outcomes = {
            name: Outcome(runs[name], failed=dict(made.refused))
            for name, made in self.plans.items()
        }
        with screen.progress("changing", list(self.plans)) as done:
            run_plans(session, self.plans, self.chosen, done, self.outcomes)
        return self._finish()

    def interrupt(self) -> int:
        """Ctrl-C or SIGTERM: no new work, remote commands ended, what was done is shown."""
        self.session.interrupted = True
        self.screen.say("interrupted: ending what runs on the nodes (again: leave at once)")
        self.session.end_remote()
        self.screen.show(show_outcomes(self.outcomes))
        undone = [name for name in self.plans if not self._complete(name)]
        if not self.outcomes:
            self.screen.say("nothing was changed")
            return exit_code(interrupted=True)
        remember_failed(undone)
        self.screen.say(
            f"partial: {len(self.plans) - len(undone)} of {len(self.plans)} nodes were completed"
            + (f"; not {nodes(undone)} (--limit @last-failed)" if undone else "")
        )
        return exit_code(interrupted=True)

    def _complete(self, name: str) -> bool:
        return name in self.outcomes and self.outcomes[name].complete

    def _agreed(self) -> bool:
        changes = sum(len(made.changes) for made in self.plans.values())
        if not sys.stdin.isatty():
            raise Refused("no terminal to ask on: add --yes, or --check to only look")
        question = f"Make {counted(changes, 'change')} on {counted(len(self.plans), 'node')}?"
        try:
            return click.confirm(question, err=True)
        except click.Abort:
            self.screen.err.print()
            self.session.interrupted = True
            return False

    def _finish(self) -> int:
        screen = self.screen
        screen.show(show_outcomes(self.outcomes))
        screen.show(show_errors(self.session.nodes))
        judged = self.session.nodes
        if not screen.quiet or self._code():
            screen.show(show_left(judged))
        changed = sum(bool(o.done) for o in self.outcomes.values())
        steps = sum(len(o.done) for o in self.outcomes.values())
        failed = self._failed()
        lost = [n for n in self.session.nodes if n.unreachable]
        words = Counter(self._word(node) for node in judged)
        remember_failed([*failed, *(n.name for n in lost)])
        if not screen.quiet:
            screen.out.print(
                f"{changed} changed ({counted(steps, 'change')}), {words['ok']} ok, "
                f"{len(failed)} failed, {len(lost)} unreachable"
                + "".join(f", {words[w]} {w}" for w in ("unknown", "for a person") if words[w])
            )
        if failed or lost:
            screen.say("again on these alone: --limit @last-failed")
        return self._code(
            check=any(r.status in ("fail", "unknown") for n in judged for r in n.results)
        )

    def _failed(self) -> list[str]:
        """The nodes on which something failed that is not the connection."""
        steps = [o.node.name for o in self.outcomes.values() if o.failed or o.left]
        looks = [n.name for n in self.session.nodes if n.error and not n.unreachable]
        return list(dict.fromkeys([*steps, *looks]))

    def _word(self, node: NodeRun) -> str:
        """The one word for a node that counts it."""
        if node.error:
            return "unreachable" if node.unreachable else "failed"
        if node.name in self.plans:
            return "to change"
        if any(result.status == "unknown" for result in node.results):
            return "unknown"
        return "for a person" if any(result.bad for result in node.results) else "ok"

    def _count_check(self) -> None:
        counts = Counter(self._word(node) for node in self.session.nodes)
        for word in ("failed", "for a person"):
            if not counts[word]:
                del counts[word]
        words = dict.fromkeys(("to change", "ok", "unknown", "unreachable", *counts))
        self.screen.out.print(", ".join(f"{counts[word]} {word}" for word in words))

    def _code(self, check: bool = False) -> int:
        session = self.session
        return exit_code(
            interrupted=session.interrupted,
            failed=bool(self._failed()),
            unreachable=any(n.unreachable for n in session.nodes),
            check=check or any(r.status == "unknown" for n in session.nodes for r in n.results),
        )

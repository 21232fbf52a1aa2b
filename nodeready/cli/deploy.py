"""`nodeready deploy`: plan from one look at every node, show it, run it, look again."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from nodeready.audit import NOT_LOOKED_AT, now
from nodeready.cli.exits import Refused, deploy_code
from nodeready.cli.options import common, option
from nodeready.cli.output import show
from nodeready.cli.start import Common, gather, open_session, remember_failed
from nodeready.deploy.document import Deploy, Node
from nodeready.deploy.document import Outcome as Became
from nodeready.reports.plan import show_plan
from nodeready.reports.registry import Options, find, names
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
@option(
    "--format",
    type=click.Choice(names("deploy")),
    default="table",
    # Not NODEREADY_FORMAT, which is audit's and has other values.
    envvar="NODEREADY_DEPLOY_FORMAT",
    help="A table for people, or a form for machines.",
)
@option("--yes", "-y", is_flag=True, help="Do not ask before the first change.")
@common
def deploy(
    inventory: str,
    *,
    check: bool,
    diff: bool,
    only: str | None,
    format: str,
    yes: bool,
    **shared: Any,
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
      nodeready deploy inventories/prod.py --check --format json
    """
    options = Common(**shared)
    try:
        chosen = select_whole(only, CHANGED)
    except SelectionError as error:
        raise Refused(str(error)) from None
    screen = options.screen()
    with open_session(inventory, options, chosen) as session:
        job = _Deploy(session, screen, chosen, format, check=check, diff=diff)
        try:
            return job.run(yes)
        except KeyboardInterrupt:
            return job.interrupt()


class _Deploy:
    """One run of the command: what it planned and what became of it.

    check: only the plan is wanted, or somebody said no
    nodes: the document's, by name, as far as they were looked at
    """

    def __init__(
        self,
        session: Session,
        screen: Screen,
        chosen: tuple[str, ...],
        form: str,
        *,
        check: bool,
        diff: bool,
    ) -> None:
        self.session, self.screen, self.chosen = session, screen, chosen
        self.form, self.check, self.options = form, check, Options(diff=diff, quiet=screen.quiet)
        self.started = now()
        self.nodes: dict[str, Node] = {}
        self.plans: dict[str, Plan] = {}
        self.outcomes: dict[str, Outcome] = {}

    def run(self, yes: bool) -> int:
        """The whole command. Returns the exit code."""
        from nodeready.execution import Outcome
        from nodeready.execution import deploy as run_plans
        from nodeready.planning import plan

        session, screen = self.session, self.screen
        gather(session, screen)
        session.judge()
        runs = {node.name: node for node in session.nodes}
        for node in session.nodes:
            made = Plan()
            if node.snapshot is not None and not node.error:
                made = plan(node.snapshot, node.policy, self.chosen)
            self.nodes[node.name] = Node.of(node.name, made, node.results)
            if self.nodes[node.name].planned:
                self.plans[node.name] = made
        if self.check:
            return self._report()
        asks = any(made.changes for made in self.plans.values()) and not yes
        if find("deploy", self.form).styled:
            if not screen.quiet:
                screen.show(show_plan(self.nodes.values(), self.options))
        elif asks and sys.stdin.isatty():
            screen.tell(show_plan(self.nodes.values(), self.options))
        if asks and not self._agreed():
            screen.say("nothing was changed")
            return self._declined()
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
        code = self._report()
        undone = [name for name in self.plans if not self._complete(name)]
        if not self.outcomes:
            self.screen.say("nothing was changed")
            return code
        remember_failed(undone)
        self.screen.say(
            f"partial: {len(self.plans) - len(undone)} of {len(self.plans)} nodes were completed"
            + (f"; not {nodes(undone)} (--limit @last-failed)" if undone else "")
        )
        return code

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

    def _node(self, run: NodeRun) -> Node:
        """A node of the document as it is known by now."""
        error = run.error or ("" if run.reached else NOT_LOOKED_AT)
        node = replace(
            self.nodes.get(run.name, Node(run.name)), error=error, unreachable=run.unreachable
        )
        one = self.outcomes.get(run.name)
        if one is not None:
            became = Became(
                tuple(one.done), dict(one.failed), one.cut, tuple(one.left), one.complete
            )
            node = replace(node, outcome=became)
        return node.judged(run.results)

    def _document(self) -> Deploy:
        found = tuple(map(self._node, self.session.nodes))
        whole = not self.session.interrupted
        return Deploy(self.started, now(), self.check, self.chosen, found, whole)

    def _report(self) -> int:
        made = self._document()
        show("deploy", self.form, made, self.screen, options=self.options)
        return deploy_code(made)

    def _declined(self) -> int:
        """Somebody said no: a person has seen the plan, a program gets it."""
        self.check = True
        made = self._document()
        if not find("deploy", self.form).styled:
            show("deploy", self.form, made, self.screen, options=self.options)
        return deploy_code(made)

    def _finish(self) -> int:
        code = self._report()
        lost = [n.name for n in self.session.nodes if n.unreachable]
        failed = [n.name for n in map(self._node, self.session.nodes) if n.failed]
        remember_failed([*failed, *lost])
        if failed or lost:
            self.screen.say("again on these alone: --limit @last-failed")
        return code

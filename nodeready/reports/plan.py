"""The plan of a deploy, and what it did: nodes with the same plan are shown once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from nodeready.actions import Change
from nodeready.execution import Outcome
from nodeready.fleet import Judged
from nodeready.planning import Plan
from nodeready.reports.text import STYLES, Line, counted, grouped, line, nodes, told
from nodeready.results import Result
from nodeready.transport.look import Look


def _why(change: Change, results: Iterable[Result]) -> Iterator[Line]:
    for result in results:
        if result.check in change.fixes:
            yield line("  ", (f"{result.check:<26}", STYLES["change"]), f" {told(result)}")


def _key(node: Judged, plan: Plan) -> tuple[object, ...]:
    whys = tuple(
        (result.check, told(result))
        for change in plan.changes
        for result in node.results
        if result.check in change.fixes
    )
    texts = tuple(action.describe() for change in plan.changes for action in change.actions)
    diffs = tuple(change.diff() for change in plan.changes)
    return (whys, texts, diffs, tuple(plan.refused.items()))


def show_plan(runs: Mapping[str, Judged], plans: Mapping[str, Plan], diff: bool) -> Iterator[Line]:
    """Per group of nodes with the same plan: what would change, why, and the files' diffs."""
    for _, names in grouped((_key(runs[name], plans[name]), name) for name in plans):
        plan, node = plans[names[0]], runs[names[0]]
        count = counted(len(plan.changes), "change")
        yield line((nodes(names), "bold"), f": {count}")
        for change in plan.changes:
            yield from _why(change, node.results)
            for action in change.actions:
                yield line(("    + ", STYLES["change"]), action.describe())
            if diff:
                for row in change.diff().splitlines():
                    style = {"+": "green", "-": "red", "@": "cyan"}.get(row[:1], "")
                    yield line("      ", (row, style))
        for step, reason in plan.refused.items():
            yield line("  ", (f"{step:<26}", STYLES["fail"]), f" cannot be planned: {reason}")


def show_left(runs: Iterable[Judged]) -> Iterator[Line]:
    """What no operation of ours repairs: a reboot, a restart, somebody's line, an unknown."""
    rows = grouped(
        ((result.status, result.check, told(result), result.fix), node.name)
        for node in runs
        for result in node.results
        if result.bad and not result.fixable
    )
    if rows:
        yield line(("for a person:", "bold"))
    for (status, check, text, fix), names in rows:
        yield line("  ", (f"{status:<8}", STYLES[status]), f"{check}  {nodes(names)}")
        yield line(f"          {text}")
        if fix:
            yield line("          fix: ", (fix, "bold"))


def show_errors(runs: Iterable[Judged | Look]) -> Iterator[Line]:
    """The nodes that could not be looked at, with why; equal reasons share a line."""
    for (unreachable, error), names in grouped(
        ((node.unreachable, node.error), node.name) for node in runs if node.error
    ):
        word = "unreachable" if unreachable else "failed"
        yield line((f"{word:<12}", STYLES["fail"]), f"{nodes(names)}: {error}")


def show_outcomes(outcomes: Mapping[str, Outcome]) -> Iterator[Line]:
    """What was done, node sets folded; failures first, with the step and why."""
    failures = grouped(
        ((step, why), name) for name, o in outcomes.items() for step, why in o.failed.items()
    )
    for (step, why), names in failures:
        yield line((f"{'failed':<12}", STYLES["fail"]), f"{nodes(names)}: {step}: {why}")
    for name, outcome in outcomes.items():
        if outcome.cut and not outcome.node.error:
            yield line((f"{'partial':<12}", STYLES["warn"]), f"{name}: stopped in {outcome.cut}")
    left = grouped(
        ((result.check, told(result)), name)
        for name, outcome in outcomes.items()
        for result in outcome.left
        if not outcome.failed
    )
    for (check, text), names in left:
        yield line((f"{'not fixed':<12}", STYLES["fail"]), f"{nodes(names)}: {check}: {text}")
    for steps, names in grouped((tuple(o.done), name) for name, o in outcomes.items() if o.done):
        yield line((f"{'changed':<12}", STYLES["changed"]), f"{nodes(names)}: {', '.join(steps)}")

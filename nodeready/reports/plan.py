"""A deploy on a terminal: its plan and its outcome, nodes with the same plan shown once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from nodeready.deploy.document import Deploy, Node
from nodeready.reports.registry import PLAIN, STYLES, Line, Options, grouped, line, nodes, told
from nodeready.text import counted


class Missed(Protocol):
    """A node, and why it could not be looked at, if it could not."""

    @property
    def name(self) -> str: ...

    @property
    def error(self) -> str: ...

    @property
    def unreachable(self) -> bool: ...


def _key(node: Node) -> tuple[object, ...]:
    """Equal keys: plans that read the same."""
    whys = tuple((result.check, told(result)) for one in node.changes for result in one.checks)
    texts = tuple(action.text for one in node.changes for action in one.actions)
    diffs = tuple(one.diff for one in node.changes)
    return (whys, texts, diffs, tuple(node.refused.items()))


def show_plan(found: Iterable[Node], options: Options = PLAIN) -> Iterator[Line]:
    """Per group of nodes with the same plan: what would change, why, and the files' diffs."""
    planned = {node.name: node for node in found if node.planned}
    for _, names in grouped((_key(node), name) for name, node in planned.items()):
        node = planned[names[0]]
        yield line((nodes(names), "bold"), f": {counted(len(node.changes), 'change')}")
        for change in node.changes:
            for result in change.checks:
                yield line("  ", (f"{result.check:<26}", STYLES["change"]), f" {told(result)}")
            for action in change.actions:
                yield line(("    + ", STYLES["change"]), action.text)
            for row in change.diff if options.diff else ():
                style = {"+": "green", "-": "red", "@": "cyan"}.get(row[:1], "")
                yield line("      ", (row, style))
        for step, reason in node.refused.items():
            yield line("  ", (f"{step:<26}", STYLES["fail"]), f" cannot be planned: {reason}")


def show_left(found: Iterable[Node]) -> Iterator[Line]:
    """The results that no step of the run repairs: a reboot, a restart, a file of somebody."""
    rows = grouped(
        ((result.status, result.check, told(result), result.fix), node.name)
        for node in found
        for result in node.for_a_person
    )
    if rows:
        yield line(("for a person:", "bold"))
    for (status, check, text, fix), names in rows:
        yield line("  ", (f"{status:<8}", STYLES[status]), f"{check}  {nodes(names)}")
        yield line(f"          {text}")
        if fix:
            yield line("          fix: ", (fix, "bold"))


def show_errors(found: Iterable[Missed]) -> Iterator[Line]:
    """The nodes that could not be looked at, nodes with the same reason on one line."""
    for (unreachable, error), names in grouped(
        ((node.unreachable, node.error), node.name) for node in found if node.error
    ):
        word = "unreachable" if unreachable else "failed"
        yield line((f"{word:<12}", STYLES["fail"]), f"{nodes(names)}: {error}")


def show_outcomes(found: Iterable[Node]) -> Iterator[Line]:
    """The outcomes, node sets folded: failed steps first, each with its reason."""
    done = [(node, node.outcome) for node in found if node.outcome is not None]
    failures = grouped(
        ((step, why), node.name) for node, one in done for step, why in one.failed.items()
    )
    for (step, why), names in failures:
        yield line((f"{'failed':<12}", STYLES["fail"]), f"{nodes(names)}: {step}: {why}")
    for node, one in done:
        if one.cut and not node.error:
            yield line((f"{'partial':<12}", STYLES["warn"]), f"{node.name}: stopped in {one.cut}")
    left = grouped(
        ((result.check, told(result)), node.name)
        for node, one in done
        if not one.failed
        for result in one.left
    )
    for (check, text), names in left:
        yield line((f"{'not fixed':<12}", STYLES["fail"]), f"{nodes(names)}: {check}: {text}")
    for steps, names in grouped((one.done, node.name) for node, one in done if one.done):
        yield line((f"{'changed':<12}", STYLES["changed"]), f"{nodes(names)}: {', '.join(steps)}")


def _word(node: Node) -> str:
    """The word under which a node is counted; "to change" for every node with a plan."""
    if node.planned and not node.error:
        return "to change"
    return node.status.replace("-", " ")


def _planned(deploy: Deploy, options: Options) -> Iterator[Line]:
    yield from show_plan(deploy.nodes, options)
    yield from show_left(deploy.nodes)
    yield from show_errors(deploy.nodes)
    counts = Counter(map(_word, deploy.nodes))
    always = ("to change", "ok", "unknown", "unreachable")
    rest = [word for word in ("failed", "for a person") if counts[word]]
    words = [*always, *sorted(rest, key=list(counts).index)]
    yield line(", ".join(f"{counts[word]} {word}" for word in words))


def _result(deploy: Deploy, options: Options) -> Iterator[Line]:
    yield from show_outcomes(deploy.nodes)
    if not deploy.complete:
        return
    yield from show_errors(deploy.nodes)
    yield from show_left(deploy.nodes)
    if options.quiet:
        return
    failed = sum(node.failed for node in deploy.nodes)
    lost = sum(node.unreachable for node in deploy.nodes)
    done = [node.outcome.done for node in deploy.nodes if node.outcome]
    words = Counter(map(_word, deploy.nodes))
    rest = (f", {words[word]} {word}" for word in ("unknown", "for a person") if words[word])
    yield line(
        f"{sum(map(bool, done))} changed ({counted(sum(map(len, done)), 'change')}), "
        f"{words['ok']} ok, {failed} failed, {lost} unreachable{''.join(rest)}"
    )


def show(deploy: Deploy, options: Options = PLAIN) -> Iterator[Line]:
    """The plan, after ``--check``; else the outcome, and what is left for a person.

    After an interrupt only the outcome so far is shown. With ``diff`` the plan has the files'
    differences. With ``quiet``, what was changed, what failed and what is left for a person is
    shown, and nothing where all is well.
    """
    only = deploy.check and deploy.complete
    return _planned(deploy, options) if only else _result(deploy, options)

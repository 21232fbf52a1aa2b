"""`nodeready diff`: what changed on the nodes, and what the failing nodes have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from nodeready.cli.options import Refused, command, option, report_options, transport_options
from nodeready.cli.outputs import read_outputs
from nodeready.cli.targets import TargetOptions
from nodeready.memory.changes import changes
from nodeready.memory.diff import Diff, NodeChanges, Side, compare, diff_code
from nodeready.memory.documents import AuditFile, DocumentError
from nodeready.memory.look import NodeLook


def _pair(before: NodeLook, after: NodeLook) -> NodeChanges:
    return NodeChanges.of(before, after, changes(before, after))


def _of_files(before: str, after: str) -> Diff:
    """The differences of two files. Raises Refused."""
    try:
        old, new = AuditFile.read(Path(before)), AuditFile.read(Path(after))
        old_names, new_names = {*old.names}, {*new.names}
        return compare(
            (_pair(old.look(name), new.look(name)) for name in new.names if name in old_names),
            Side(before, old.started),
            Side(after, new.started),
            only_before=tuple(name for name in old.names if name not in new_names),
            only_after=tuple(name for name in new.names if name not in old_names),
        )
    except DocumentError as error:
        raise Refused(str(error)) from None


@command()
@click.argument("sides", nargs=-1, metavar="[INVENTORY | A.json B.json]")
@report_options("diff")
@option("--exit-code", is_flag=True, help="Exit with 3 when there is a difference.")
@transport_options
def diff(
    sides: tuple[str, ...], format: str, output: tuple[str, ...], exit_code: bool, **shared: Any
) -> int:
    """Report what changed on the nodes. Never writes to a node.

    \b
    Examples:
      nodeready diff monday.json today.json          # of audit or ready, --format json
    """
    options = TargetOptions(**shared)
    outputs = read_outputs("diff", format, output)
    screen = options.screen()
    if len(sides) != 2:
        raise Refused("name two files of audit or ready, made with --format json")
    document = _of_files(*sides)
    outputs.show(document, screen, silent=screen.quiet and not document.changes)
    return diff_code(document, is_strict=exit_code)

"""The nodes that failed in the last run, kept for ``--limit @last-failed``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

from nodeready.core.files import private_file, state_directory, write_atomically

#: The word in ``--limit`` that stands for these nodes.
LAST_FAILED = "@last-failed"


def _state_file() -> Path:
    return state_directory() / "last-failed"


@dataclass(frozen=True)
class FailedNode:
    """A node that failed in its last run."""

    name: str
    lost: bool = False  # the command could not reach it, and so no check has failed on it
    inventory: str = ""  # the inventory file of that run; "": the command line listed the nodes

    @classmethod
    def parse(cls, row: str) -> FailedNode:
        """A row of the state file, as `__str__` writes it."""
        name, lost, inventory = (*row.split("\t", 2), "", "")[:3]
        return cls(name, bool(lost), inventory)

    def __str__(self) -> str:
        lost = "lost" if self.lost else ""
        return "\t".join((self.name, lost, self.inventory)).rstrip("\t")


def load_failed() -> list[FailedNode]:
    """The nodes of the state file; none where it cannot be read."""
    try:
        path = private_file(_state_file(), make=False)
        rows = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    return [FailedNode.parse(row) for row in rows if row]


def save_failed(
    failed: Iterable[str], reached: Set[str], inventory: str, *, is_whole: bool, lost: bool
) -> None:
    """Update the state file with the result of a run; a write error is ignored.

    The rows of nodes that were not contacted stay, so that a run with --limit or an interrupted
    run forgets no node. A run over a whole inventory forgets the nodes that have left that
    inventory.

    failed:    names of the nodes that failed in this run
    reached:   names of the nodes that the run contacted
    inventory: the inventory file; "": the command line listed the nodes
    is_whole:  every node of the inventory was contacted
    lost:      the command only collects: ``failed`` are the nodes that it could not reach, and
               only the rows of lost nodes are replaced
    """
    rows = [
        node
        for node in load_failed()
        if (lost and not node.lost)
        or not (node.name in reached or (is_whole and node.inventory == inventory))
    ]
    names = {node.name for node in rows}
    rows += [
        FailedNode(name, lost, inventory) for name in dict.fromkeys(failed) if name not in names
    ]
    with contextlib.suppress(OSError):
        path = private_file(_state_file(), make=True)
        write_atomically(path, [f"{node}\n" for node in rows], 0o600)

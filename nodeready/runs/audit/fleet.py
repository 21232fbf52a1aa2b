"""The subjects and groups of the nodes of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nodeready.subjects.registry import COUNTING, CheckSelection

if TYPE_CHECKING:
    from pyinfra.api import Inventory


def probed_subjects(selection: CheckSelection) -> tuple[str, ...]:
    subjects = selection.subjects
    has_counters = any(subject in COUNTING for subject in subjects)
    return tuple(dict.fromkeys((*subjects, "host"))) if has_counters else subjects


def distinguishing_groups(inventory: Inventory, name: str, total: int) -> tuple[str, ...]:
    """The node's groups, without those that contain all nodes of the inventory."""
    groups = inventory.get_host(name).groups
    return tuple(group for group in groups if len(inventory.get_group(group)) < total)

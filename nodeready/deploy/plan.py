"""What a deploy would do: per node the changes that its failing checks ask for. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nodeready.deploy.actions import Change, PlanError
from nodeready.operations import STEPS
from nodeready.policy import Policy
from nodeready.subjects.result import Result
from nodeready.subjects.snapshot import Snapshot


@dataclass(frozen=True)
class Plan:
    """The changes for one node in order, and the steps that could not be planned, with why."""

    changes: tuple[Change, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)


def plan(
    seen: Snapshot,
    want: Policy,
    results: Iterable[Result],
    subjects: Iterable[str] | None = None,
) -> Plan:
    """The plan for a node that looks like ``seen`` and was judged; ``subjects`` limits it (None:
    all).
    """
    results = tuple(results)
    chosen = None if subjects is None else set(subjects)
    changes: list[Change] = []
    refused: dict[str, str] = {}
    for step in STEPS:
        if chosen is not None and step.subject not in chosen:
            continue
        try:
            change = step.plan(seen, want, results)
        except PlanError as error:
            refused[step.name] = str(error)
            continue
        except Exception as error:  # noqa: BLE001 - a fact that nobody foresaw costs this step
            refused[step.name] = f"internal error: {type(error).__name__}: {error}"
            continue
        if change is not None:
            changes.append(change)
    return Plan(tuple(changes), refused)

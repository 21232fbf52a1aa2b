"""The results of a snapshot's checks."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import replace

from nodeready.core.base import Unknown
from nodeready.core.fleet import ALONE, FleetFacts
from nodeready.core.own_files import Refusal
from nodeready.core.policy import Policy
from nodeready.core.result import ADMIN, Result
from nodeready.core.text import utc_now
from nodeready.core.waivers import waive
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.snapshot import Snapshot, unparsable


def judge(
    snapshot: Snapshot,
    policy: Policy,
    fleet: FleetFacts = ALONE,
    subjects: Iterable[str] | None = None,
) -> list[Result]:
    """The results of all checks of these subjects (None: all that were observed), after waivers.

    A subject that is Unknown gives one ``unknown`` result, with the reason and the evidence.
    """
    results: list[Result] = []
    for name, subject in SUBJECTS.items():
        if name not in snapshot.subjects or (subjects is not None and name not in subjects):
            continue
        observation = snapshot[name]
        if isinstance(observation, Unknown):
            reason, evidence = observation.reason, observation.evidence
            reason += f": {evidence}" if evidence else ""
            page = subject.observed
            results.append(page.rated(Result(page.id, "unknown", actual=reason)))
            continue
        for check in (*subject.checks, *subject.policy_checks(policy)):
            try:
                result = check(observation, policy, fleet)
                if result.fixable:
                    writes = check.writes
                    patterns = subject.files if writes is None else writes(observation, policy)
                    result = _with_refusal(result, snapshot.refused, patterns)
                results.append(result)
            except Exception as error:  # noqa: BLE001 - a node's answer must never end the run
                results.append(check.rated(check.unknown(unparsable(error))))
    return waive(results, policy, utc_now()[:10])


def _with_refusal(
    result: Result, refused: Mapping[str, Refusal], patterns: Iterable[str]
) -> Result:
    """The fixable result, or an administrator's task where a deploy may not write the files."""
    for path, refusal in refused.items():
        for pattern in patterns:
            parent = pattern.rpartition("/")[0]
            if fnmatch.fnmatchcase(path, pattern) or _holds(path, parent):
                actual = f"{result.actual}; {path}: {refusal.reason}"
                fix = f"{refusal.remedy}, then {result.fix}"
                actions = ("configure", *result.actions)
                return replace(result, actual=actual, fix=fix, owner=ADMIN, actions=actions)
    return result


def _holds(directory: str, parent: str) -> bool:
    """Whether a directory matches the pattern ``parent``, or contains it."""
    depth = directory.rstrip("/").count("/")
    start = "/".join(parent.split("/")[: depth + 1])
    return directory == "/" or fnmatch.fnmatchcase(directory, start)

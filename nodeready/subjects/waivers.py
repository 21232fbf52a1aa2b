"""Waivers: findings that the policy accepts. They are always listed, and never fail a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nodeready.policy import Policy
from nodeready.policy.fields import closest_word
from nodeready.subjects.result import Result

#: The only statuses that can be waived: a value that was not observed cannot be accepted.
WAIVABLE = ("fail", "warn")


def waive(results: Iterable[Result], policy: Policy) -> list[Result]:
    """``results`` with the findings that the policy waives as ``waived``.

    A waived result keeps what was expected and found; its ``fix`` is the reason of the waiver.
    """
    reasons = dict(policy.waivers)
    return [
        replace(result, status="waived", fix=f"waived: {reasons[result.check]}", owner="")
        if result.check in reasons and result.status in WAIVABLE
        else result
        for result in results
    ]


def waiver_problems(policy: Policy, ids: Iterable[str]) -> list[str]:
    """The waivers of checks that are not in ``ids``, a line each.

    A waiver without a finding is accepted: the finding was repaired.
    """
    check_ids = list(ids)
    return [
        f"waivers: {check!r}: {_waiver_problem(check, check_ids)}"
        for check, _ in policy.waivers
        if check not in check_ids
    ]


def _waiver_problem(check: str, check_ids: list[str]) -> str:
    subject, _, name = check.partition(".")
    same = [check_id for check_id in check_ids if check_id.startswith(f"{subject}.")]
    if same and name == "observed":
        return "what could not be observed cannot be waived"
    close = closest_word(check, check_ids)
    if close:
        return f"no such check; did you mean {close}?"
    return f"no such check; there are {', '.join(same)}" if same else "no such check"

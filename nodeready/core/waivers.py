"""Waivers: findings that the policy accepts. They are always listed, and never fail a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nodeready.core.policy import Policy
from nodeready.core.policy.fields import closest_word
from nodeready.core.policy.waivers import ENDING_DAYS, Waiver
from nodeready.core.result import ADMIN, Result

#: The only statuses that can be waived: a value that was not observed cannot be accepted.
WAIVABLE = ("fail", "warn")


def waive(results: Iterable[Result], policy: Policy, today: str) -> list[Result]:
    """``results`` with the findings that the policy waives as ``waived``.

    A waived result keeps what was expected and found; its ``fix`` is the reason of the waiver. In
    the last ENDING_DAYS of the waiver it is a warning, and after them the finding counts again.
    No text depends on the day within one of these states.

    today: ``2027-01-31``, UTC
    """
    waiver_of = last_ending(policy.waivers)
    return [
        _waived(result, waiver_of[result.check], today)
        if result.check in waiver_of and result.status in WAIVABLE
        else result
        for result in results
    ]


def last_ending(waivers: Iterable[Waiver]) -> dict[str, Waiver]:
    """Check -> the waiver that counts: of several, the one that ends last."""
    ordered = sorted(waivers, key=lambda waiver: waiver.until or "9999-12-31")
    return {waiver.check: waiver for waiver in ordered}


def _waived(result: Result, waiver: Waiver, today: str) -> Result:
    days_left = waiver.days_left(today)
    if days_left is None or days_left > ENDING_DAYS:
        return replace(result, status="waived", fix=waiver_text(waiver), owner="", actions=())
    if days_left >= 0:
        fix = f"{waiver_text(waiver)}; it ends within {ENDING_DAYS} days: extend or remove it"
        return replace(result, status="warn", fix=fix, owner=ADMIN, actions=())
    owner = f" of {waiver.owner}" if waiver.owner else ""
    actual = f"{result.actual}; the waiver{owner} expired after {waiver.until}"
    return replace(result, actual=actual)


def waiver_text(waiver: Waiver) -> str:
    """``waived until 2027-01-31 (ana): ticket 4711``."""
    until = f" until {waiver.until}" if waiver.until else ""
    owner = f" ({waiver.owner})" if waiver.owner else ""
    return f"waived{until}{owner}: {waiver.reason}"


def waiver_problems(policy: Policy, ids: Iterable[str]) -> list[str]:
    """The waivers of checks that are not in ``ids``, a line each.

    A waiver without a finding is accepted: the finding was repaired.
    """
    check_ids = list(ids)
    return [
        f"waivers: {check!r}: {_waiver_problem(check, check_ids)}"
        for check in dict.fromkeys(waiver.check for waiver in policy.waivers)
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

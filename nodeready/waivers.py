"""Waivers: findings that the policy knows and accepts: always listed, and they fail nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nodeready.policy import Policy
from nodeready.policy.spelling import closest
from nodeready.results import Result

#: The only statuses that can be waived: what was not observed cannot have been accepted.
WAIVABLE = ("fail", "warn")
_WORD = "waived: "


def waive(results: Iterable[Result], policy: Policy) -> list[Result]:
    """``results`` with the findings that the policy waives as ``waived``.

    What was expected and found stays; ``fix`` becomes the reason. Nobody has to repair it.
    """
    reasons = dict(policy.waivers)
    return [
        replace(result, status="waived", fix=f"{_WORD}{reasons[result.check]}", owner="")
        if result.check in reasons and result.status in WAIVABLE
        else result
        for result in results
    ]


def reason(result: Result) -> str:
    """Why a waived result was waived."""
    return result.fix.removeprefix(_WORD)


def problems(policy: Policy, ids: Iterable[str]) -> list[str]:
    """What is wrong with the policy's waivers, a line each: checks that are none of ``ids``.

    A waiver without a finding is no problem: that is how it should end.
    """
    known = list(ids)
    return [
        f"waivers: {check!r}: {_meant(check, known)}"
        for check, _ in policy.waivers
        if check not in known
    ]


def _meant(check: str, known: list[str]) -> str:
    subject, _, name = check.partition(".")
    same = [one for one in known if one.startswith(f"{subject}.")]
    if same and name == "observed":
        return "what could not be observed cannot be waived"
    close = closest(check, known)
    if close:
        return f"no such check; did you mean {close}?"
    return f"no such check; there are {', '.join(same)}" if same else "no such check"

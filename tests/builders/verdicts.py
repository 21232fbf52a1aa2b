"""What a row of cases expects of a check: `"fail": "0 for * hard"`, the status and its words."""

from typing import Any

from nodeready.core.policy import Policy
from nodeready.core.result import Result

STATUSES = ("ok", "warn", "fail", "na", "unknown")


def policy_of(case: dict[str, Any]) -> Policy:
    settings = case.get("policy", {})
    return Policy(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})


def assert_says(result: Result, verdict: str) -> None:
    """The verdict is "fail: 0 for * hard": the status, and words of the actual value."""
    status, _, words = verdict.partition(": ")
    assert (result.status, words in result.actual) == (status, True), result


def assert_verdict(result: Result, case: dict[str, Any]) -> None:
    """The result has the status of the case, and its actual value the words beside it."""
    (status,) = (name for name in STATUSES if name in case)
    assert result.status == status
    assert case[status] in result.actual

"""Results of a check by its id, as `Check.ok` and its other methods make them."""

from __future__ import annotations

from nodeready.core.result import ADMIN, NODEREADY, Result


def ok(check: str, expected: str = "", actual: str = "", source: str = "") -> Result:
    return Result(check, "ok", expected, actual or expected, source)


def na(check: str, reason: str) -> Result:
    return Result(check, "na", actual=reason)


def unknown(check: str, reason: str) -> Result:
    return Result(check, "unknown", actual=reason)


def fail(
    check: str,
    expected: str,
    actual: str,
    source: str = "",
    fix: str = "",
    *,
    actions: tuple[str, ...] = (),
    status: str = "fail",
) -> Result:
    return Result(check, status, expected, actual, source, fix, ADMIN, actions=actions)


def warn(
    check: str,
    expected: str,
    actual: str,
    source: str = "",
    fix: str = "",
    *,
    actions: tuple[str, ...] = (),
) -> Result:
    return fail(check, expected, actual, source, fix, actions=actions, status="warn")


def fixable(
    check: str,
    expected: str,
    actual: str,
    source: str = "",
    fix: str = "",
    *,
    status: str = "fail",
) -> Result:
    fix = fix or f"nodeready deploy INVENTORY --only {check.partition('.')[0]}"
    return Result(check, status, expected, actual, source, fix, NODEREADY)

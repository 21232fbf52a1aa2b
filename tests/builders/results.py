"""Results of a check by its id, as `Check.ok` and its other methods make them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nodeready.core.result import ADMIN, NODEREADY, Result


def ok(check: str, expected: str = "", actual: str = "", source: str = "") -> Result:
    return Result(check, "ok", expected, actual or expected, source)


def na(check: str, reason: str) -> Result:
    return Result(check, "na", actual=reason)


def unknown(check: str, reason: str) -> Result:
    return Result(check, "unknown", actual=reason)


def fail(
    check: str, expected: str, actual: str, source: str = "", fix: str = "", **more: Any
) -> Result:
    """more: status, actions"""
    return Result(check, more.pop("status", "fail"), expected, actual, source, fix, ADMIN, **more)


def warn(*words: str, **more: Any) -> Result:
    return fail(*words, **more, status="warn")


def fixable(check: str, *words: str, fix: str = "", **more: Any) -> Result:
    """words: expected, actual, source"""
    fix = fix or f"nodeready deploy INVENTORY --only {check.partition('.')[0]}"
    return replace(fail(check, *words, fix=fix, **more), owner=NODEREADY)

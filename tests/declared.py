"""What a check declares is held against what it does, whenever a test lets it judge."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any

import pytest

from nodeready.policy import Policy
from nodeready.subjects.result import ADMIN, DEPLOY, PERSON, Check, Result

_KEYS = frozenset(field.name for field in fields(Policy))


@lru_cache(maxsize=8)
def _recording(kind: type) -> type:
    """A Policy, or Expected, whose instances keep which of their settings were asked for."""

    def asked(self: Any, name: str) -> Any:
        if name in _KEYS:
            object.__getattribute__(self, "__dict__").setdefault("asked", set()).add(name)
        return object.__getattribute__(self, name)

    return type(f"Recording{kind.__name__}", (kind,), {"__getattribute__": asked, "of": kind})


def _recorded(want: Policy) -> Any:
    kind = _recording(getattr(type(want), "of", type(want)))
    made = object.__new__(kind)
    made.__dict__.update(vars(want), asked=set())
    return made


def wrong(check: Check, asked: frozenset[str], result: Result) -> list[str]:
    """What this check did and does not declare."""
    found = [f"reads {key}" for key in sorted(asked - set(check.settings))]
    whos = {act.who for act in check.acts}
    if result.check != check.id:
        found.append(f"gives the result {result.check}")
    if result.fixable and not check.fixed_by and DEPLOY not in whos:
        found.append("says that a deploy repairs it")
    if result.owner == ADMIN and result.fix and PERSON not in whos:
        found.append(f"asks a person: {result.fix}")
    return found


def judged(check: Check, seen: Any, want: Policy) -> Result:
    """The check's result. The test fails, whatever it asks for, when the check does what it does
    not declare."""
    recorded = _recorded(want)
    result = check.judge(seen, recorded)
    asked = recorded.__dict__["asked"]
    if "of" in vars(type(want)):
        # One check asks another: what that reads decides this one, too.
        want.__dict__["asked"].update(asked)
    found = wrong(check, frozenset(asked), result)
    if found:
        # Not an exception: a mistake in a check becomes a result elsewhere.
        pytest.fail(f"{check.id} {', and '.join(found)}, and does not declare it")
    return result

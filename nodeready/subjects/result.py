"""Result: what one check says about one node, for checks, reports and operations alike.

Beside it, the functions that make a Result of each status, and the words for a long list in one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

#: The statuses, worst first. ``unknown`` never counts as ok: it stands above ``waived``.
STATUSES: tuple[str, ...] = ("fail", "warn", "unknown", "waived", "ok", "na")

#: The owner of a Result that one of our operations repairs.
NODEREADY = "nodeready"
#: The owner of a Result that only a person can repair: a reboot, a restart, somebody's file.
ADMIN = "admin"


@dataclass(frozen=True)
class Result:
    """One judgement.

    check:    stable dotted id, ``subject.noun``; an id never changes its meaning
    status:   one of STATUSES
    expected: what the policy asks for, in words or as a value
    actual:   what was observed; live and next-boot value where the two can differ; of ``na`` and
              ``unknown`` the reason
    source:   where the actual value comes from (``/etc/sysctl.d/10-ptrace.conf:3``), or ""
    fix:      what repairs it: an operation of ours, a command, a person's act; or ""; of
              ``waived`` the reason
    owner:    who repairs it: ``nodeready`` where ``nodeready deploy`` does, else ``admin``, a
              person; "" when ok
    """

    check: Annotated[str, {"pattern": r"^[a-z0-9_]+\.[a-z0-9_]+$"}]
    status: Annotated[str, {"enum": STATUSES}]
    expected: str = ""
    actual: str = ""
    source: str = ""
    fix: str = ""
    owner: Annotated[str, {"enum": (NODEREADY, ADMIN, "")}] = ""

    @property
    def bad(self) -> bool:
        """Whether something has to be done or looked at: not ok and not ``na``."""
        return self.status not in ("ok", "na", "waived")

    @property
    def fixable(self) -> bool:
        """Whether ``nodeready deploy`` repairs it."""
        return self.status in ("fail", "warn") and self.owner == NODEREADY


# Thousands of healthy nodes have the same results: equal results are one object.
@lru_cache(maxsize=4096)
def ok(check: str, expected: str = "", actual: str = "", source: str = "") -> Result:
    """The value is as the policy wants it; ``actual`` defaults to ``expected``."""
    return Result(check, "ok", expected, actual or expected, source)


@lru_cache(maxsize=4096)
def na(check: str, reason: str) -> Result:
    """The check does not apply to this node, for ``reason``."""
    return Result(check, "na", actual=reason)


def unknown(check: str, reason: str) -> Result:
    """The value could not be observed, for ``reason``."""
    return Result(check, "unknown", actual=reason)


def fixable(
    check: str,
    expected: str,
    actual: str,
    source: str = "",
    fix: str = "",
    *,
    status: str = "fail",
) -> Result:
    """A failure that ``nodeready deploy`` repairs; with ``status`` ``warn``, it stops no job."""
    command = f"nodeready deploy INVENTORY --only {check.partition('.')[0]}"
    return Result(check, status, expected, actual, source, fix or command, NODEREADY)


def fail(check: str, expected: str, actual: str, source: str = "", fix: str = "") -> Result:
    """A failure that only a person can repair, by ``fix``."""
    return Result(check, "fail", expected, actual, source, fix, ADMIN)


def warn(check: str, expected: str, actual: str, source: str = "", fix: str = "") -> Result:
    """Something that a person should do or know, by ``fix``, but that stops no job."""
    return Result(check, "warn", expected, actual, source, fix, ADMIN)


def worst(results: Iterable[Result]) -> str:
    """The worst status among ``results``, in the order of STATUSES; ``na`` for no results."""
    statuses = {result.status for result in results}
    for status in STATUSES:
        if status in statuses:
            return status
    return "na"


def some(texts: Iterable[str], joint: str = "; ", most: int = 4) -> str:
    """The first ``most`` texts and how many more there are: ``a; b; c; d and 3 more``."""
    listed = list(texts)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return joint.join(listed[:most]) + more

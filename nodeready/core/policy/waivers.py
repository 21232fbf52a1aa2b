"""A waiver: the policy accepts the finding of one check, for a reason and until a day."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nodeready.core.policy.fields import LINE, Invalid, SettingKind, suggestion, value_text

#: Days before the end of a waiver in which its finding is a warning: the owner has two weeks to
#: repair it or to extend the waiver, before the finding can stop a job.
ENDING_DAYS = 14
KEYS = ("reason", "owner", "until", "nodes")


@dataclass(frozen=True, order=True)
class Waiver:
    """One waiver."""

    check: str  # the id of the check
    reason: str  # why its finding is accepted
    owner: str = ""  # who answers for the waiver; "": not named
    until: str = ""  # the last day on which it holds, ``2027-01-31``, UTC; "": it does not end
    nodes: str = ""  # the node set to which it is restricted; "": all nodes that have the policy

    def days_left(self, today: str) -> int | None:
        """Days until the last day, negative after it; None: it does not end."""
        if not self.until:
            return None
        # Imported late: few waivers end, and the program on a node starts often.
        from datetime import date

        return (date.fromisoformat(self.until) - date.fromisoformat(today)).days

    def setting(self) -> Any:
        """The waiver as group_data declares it: its reason, or a dict."""
        values = {key: getattr(self, key) for key in KEYS if getattr(self, key)}
        return self.reason if [*values] == ["reason"] else values


def _checked(value: Any) -> tuple[Waiver, ...]:
    if value == ():
        return ()
    if not isinstance(value, Mapping):
        raise Invalid("must map check ids to reasons: {'nics.mtu': 'why'}")
    waivers: list[Waiver] = []
    for check, declared in value.items():
        if not re.fullmatch(r"[a-z_]+\.[a-z0-9_]+", LINE.check(check)):
            raise Invalid(f"{check!r} is no check id")
        rows = declared if isinstance(declared, (list, tuple)) and declared else [declared]
        waivers += [_waiver(check, row) for row in rows]
    return tuple(sorted({*waivers}))


def _waiver(check: str, declared: Any) -> Waiver:
    values = declared if isinstance(declared, Mapping) else {"reason": declared}
    for key, value in values.items():
        if key not in KEYS:
            hint = suggestion(key, KEYS)
            raise Invalid(f"{check!r} has the unknown key {value_text(key)}: {hint}")
        try:
            LINE.check(value)
        except Invalid as error:
            raise Invalid(f"{check!r}: {key} {error}") from None
    if not values.get("reason", "").strip():
        raise Invalid(f"{check!r} needs a reason")
    if "until" in values:
        # Imported late, as above.
        from datetime import date

        until = values["until"]
        try:
            is_day = re.fullmatch(r"\d{4}-\d\d-\d\d", until, re.ASCII) and date.fromisoformat(
                until
            )
        except ValueError:
            is_day = None
        if not is_day:
            raise Invalid(f"{check!r}: until must be a day, YYYY-MM-DD")
    if "nodes" in values and not values["nodes"].strip():
        raise Invalid(f"{check!r}: nodes names no node")
    return Waiver(check, **values)


def _plain(waivers: tuple[Waiver, ...]) -> dict[str, Any]:
    settings: dict[str, list[Any]] = {}
    for waiver in waivers:
        settings.setdefault(waiver.check, []).append(waiver.setting())
    return {check: rows if len(rows) > 1 else rows[0] for check, rows in settings.items()}


WAIVERS = SettingKind(
    _checked,
    "check ids and reasons: `{'ID': 'WHY'}`, or a dict with `reason`, `owner`, `until`, `nodes`, "
    "or a list of such dicts",
    _plain,
)

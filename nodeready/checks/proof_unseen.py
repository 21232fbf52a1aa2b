"""What a proof says of which nothing was seen."""

from __future__ import annotations

from nodeready.probes.base import Unknown
from nodeready.proofs.proved import Proved
from nodeready.proofs.seen import User
from nodeready.results import Result, na, unknown


def unseen(check: str, seen: Proved, *fields: str) -> Result | None:
    """The result of a check that rests on these fields of `Proved`; None: all were seen."""
    if isinstance(seen.user, User) and seen.user.error:
        return na(check, "no session: see proof.user")
    for name in fields:
        value = getattr(seen, name)
        if value is None:
            return na(check, "not proved")
        if isinstance(value, Unknown):
            evidence = f": {value.evidence}" if value.evidence else ""
            return unknown(check, f"{value.reason}{evidence}")
    return None

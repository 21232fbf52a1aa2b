"""Why a connection between two nodes was none, in words. Pure: from what the first of them saw."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from nodeready.proofs.mesh import (
    FOREIGN,
    IN_A_ROW,
    REFUSED,
    SILENT,
    SKIPPED,
    TIMEOUT,
    UNREACHABLE,
    Round,
    Try,
)

_DROPPED = "timed out: dropped"
_CAUSES = {
    # Our listener is there: it was not the kernel behind it that refused.
    REFUSED: "refused: rejected on the way",
    TIMEOUT: _DROPPED,
    FOREIGN: "another program answers",
    SILENT: "connected, then silence: another program answers, or the node hangs",
}


def address(text: str) -> str:
    """An address as we write it; "" for what is none."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""


def of_port(one: Try, skipped: bool) -> str:
    """Why this connection was none.

    skipped: others were not tried because the first ones timed out; those stand for all
    """
    if skipped and one.outcome in (TIMEOUT, SKIPPED):
        return f"{_DROPPED}; the first {IN_A_ROW} ports stand for all"
    if one.outcome == UNREACHABLE:
        return f"unreachable: {one.said}"
    return _CAUSES.get(one.outcome) or one.said or "failed"


def of_name(source: str, seen: Round, owner: Mapping[str, str]) -> str:
    """Why the target's name led to no address of its own.

    owner: address -> the node that has it; "": several have
    """
    target = seen.target
    addresses = [one for one in map(address, seen.resolved) if one]
    if not addresses:
        return f"{target} does not resolve ({seen.error or 'no address'})"
    first = addresses[0]
    whose = owner.get(first)
    if ipaddress.ip_address(first).is_loopback:
        why = "which is loopback"
    elif whose == source:
        why = f"which is {source}'s own"
    elif whose:
        why = f"which is {whose}'s"
    elif whose == "":
        why = "which several nodes have"
    else:
        why = f"which is not {target}'s"
    return f"{target} resolves to {first}, {why}"

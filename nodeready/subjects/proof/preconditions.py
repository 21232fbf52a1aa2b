"""Shared by the checks of proofs: observations, further sessions, PAM's services."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from nodeready.core.base import Unknown
from nodeready.core.result import Result, na, unknown
from nodeready.subjects.proof.facts import Proved, SessionProof
from nodeready.subjects.proof.session_facts import SESSION_NAMES, Logins, Service, User

_T = TypeVar("_T")

#: The command for a fix by another subject's deploy; the subject's name follows it.
DEPLOY_ONLY = "nodeready deploy INVENTORY --only"


def observation(check: str, observed: Proved, field: str, kind: type[_T]) -> _T | Result:
    """The observation in this field of `Proved`, or the result of a check without it."""
    if isinstance(observed.user, User) and observed.user.error:
        return na(check, "no session: see proof.user")
    value = getattr(observed, field)
    if isinstance(value, Unknown):
        return unknown_result(check, value)
    return value if isinstance(value, kind) else na(check, "not proved")


def unknown_result(check: str, missing: Unknown) -> Result:
    """The result of a check whose observation is unknown: the reason, and its evidence."""
    evidence = f": {missing.evidence}" if missing.evidence else ""
    return unknown(check, f"{missing.reason}{evidence}")


def other_sessions(observed: Proved) -> Iterator[tuple[str, SessionProof]]:
    """The user's further sessions that run a shell, each with its name in a result."""
    sessions = {"ssh": observed.ssh, "shell": observed.shell, "login": observed.login}
    for name, session in sessions.items():
        if isinstance(session, SessionProof):
            yield SESSION_NAMES[name], session


def pam_service(observed: Proved, name: str) -> Service | None:
    """The PAM stack of this kind of session; None: not seen."""
    services = observed.logins.services if isinstance(observed.logins, Logins) else ()
    return next((service for service in services if service.name == name and service.path), None)

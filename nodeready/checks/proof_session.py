"""Judge the session in which the proofs ran: whose it is, and its limits."""

from __future__ import annotations

from nodeready.checks.proof_unseen import unseen
from nodeready.policy import Policy
from nodeready.proofs.proved import Proved
from nodeready.results import Result, ok


def user(seen: Proved, want: Policy) -> Result:
    """The proofs ran in a session of the job's user."""
    return unseen("proof.user", seen, "user") or ok("proof.user", "a session")


def limits(seen: Proved, want: Policy) -> Result:
    """A new session of the job's user has the policy's limits."""
    return unseen("proof.limits", seen, "limits") or ok("proof.limits", "as the policy has them")

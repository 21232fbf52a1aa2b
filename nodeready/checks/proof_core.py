"""Judge whether a crash in the job's user's session leaves a core that gdb can read."""

from __future__ import annotations

from nodeready.policy import Policy
from nodeready.proofs.core import Core
from nodeready.proofs.proved import Proved
from nodeready.results import Result, na


def limited(core: Core) -> bool:
    """Whether the session's core limit is why there is no whole core."""
    return False


def core(seen: Proved, want: Policy) -> Result:
    """A crash in the job's user's session leaves a whole core where the policy says."""
    return na("proof.core", "not proved")


def backtrace(seen: Proved, want: Policy) -> Result:
    """The debugger gdb reads a backtrace from the core that a crash left."""
    return na("proof.backtrace", "not proved")

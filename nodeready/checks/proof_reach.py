"""Judge whether the job's user gets from node to node without being asked anything."""

from __future__ import annotations

from nodeready.policy import Policy
from nodeready.proofs.proved import Proved
from nodeready.results import Result, na


def ssh(seen: Proved, want: Policy) -> Result:
    """The job's user logs in by ssh to other nodes, and from them to this one, unasked."""
    return na("proof.ssh", "not proved")


def pdsh(seen: Proved, want: Policy) -> Result:
    """pdsh gets an answer from every node that ssh reaches."""
    return na("proof.pdsh", "not proved")

"""Judge whether the job's user can look into a process that hangs: py-spy, gdb, strace."""

from __future__ import annotations

from nodeready.checks.proof_unseen import unseen
from nodeready.policy import Policy
from nodeready.proofs.proved import Proved
from nodeready.results import Result, ok


def attach(seen: Proved, want: Policy) -> Result:
    """py-spy shows the stack of a process of the same user."""
    return unseen("proof.attach", seen, "attach") or ok("proof.attach", "a stack")


def attach_nonblocking(seen: Proved, want: Policy) -> Result:
    """py-spy shows a stack without pausing its target, as it must for one in state D."""
    return unseen("proof.attach_nonblocking", seen, "attach") or ok("proof.attach", "a stack")


def attach_native(seen: Proved, want: Policy) -> Result:
    """py-spy shows the frames of C libraries too: where NCCL or CUDA hangs."""
    return unseen("proof.attach_native", seen, "attach") or ok("proof.attach", "a stack")


def gdb(seen: Proved, want: Policy) -> Result:
    """gdb attaches to a process of the same user, and leaves it running."""
    return unseen("proof.gdb", seen, "tracers") or ok("proof.gdb", "a backtrace")


def strace(seen: Proved, want: Policy) -> Result:
    """strace attaches to a process of the same user, and leaves it running."""
    return unseen("proof.strace", seen, "tracers") or ok("proof.strace", "system calls")

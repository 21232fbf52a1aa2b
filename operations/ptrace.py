"""Let py-spy, gdb and strace attach to processes of the same user."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.core.policy import Policy
from nodeready.runs.deploy.actions import Action, RunCommand, sysctl_dropin
from nodeready.runs.deploy.pyinfra import step
from nodeready.subjects.ptrace.facts import KEY, Ptrace
from nodeready.subjects.snapshot import Snapshot

_COMMENT = (
    "0: py-spy, gdb and strace attach to processes of the same user without sudo. "
    "1: only to what they",
    "have started themselves, and with sudo to all.",
    "The leading dash: a kernel without Yama has no such key, and that is no error.",
)


@step()
def scope(snapshot: Snapshot, policy: Policy) -> Iterator[Action]:
    """Set kernel.yama.ptrace_scope now and for the next boot."""
    ptrace: Ptrace = snapshot["ptrace"]
    value = str(policy.ptrace_scope)
    yield from sysctl_dropin(snapshot, "ptrace", f"-{KEY}", value, ptrace.boot, *_COMMENT)
    if ptrace.live not in (policy.ptrace_scope, 3):
        yield RunCommand(("sysctl", "-w", f"{KEY}={policy.ptrace_scope}"))


@step()
def selinux(snapshot: Snapshot, policy: Policy) -> Iterator[Action]:
    """Switch SELinux's deny_ptrace off, now and for the next boot."""
    yield RunCommand(("setsebool", "-P", "deny_ptrace", "off"))


STEPS = (selinux, scope)

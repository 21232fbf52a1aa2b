"""Let py-spy, gdb and strace attach to processes of the same user."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.core.policy import Policy
from nodeready.runs.deploy.actions import Action, RunCommand, sysctl_dropin
from nodeready.runs.deploy.step import step
from nodeready.subjects.ptrace.facts import KEY, Ptrace
from nodeready.subjects.snapshot import Snapshot


@step()
def scope(snapshot: Snapshot, policy: Policy) -> Iterator[Action]:
    """Set kernel.yama.ptrace_scope now and for the next boot."""
    ptrace: Ptrace = snapshot["ptrace"]
    yield from sysctl_dropin(snapshot, "ptrace", KEY, str(policy.ptrace_scope), ptrace.boot)
    if ptrace.live not in (policy.ptrace_scope, 3):
        yield RunCommand(("sysctl", "-w", f"{KEY}={policy.ptrace_scope}"))


@step()
def selinux(snapshot: Snapshot, policy: Policy) -> Iterator[Action]:
    """Switch SELinux's deny_ptrace off, now and for the next boot."""
    yield RunCommand(("setsebool", "-P", "deny_ptrace", "off"))


STEPS = (selinux, scope)

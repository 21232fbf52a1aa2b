"""Judge who may attach: py-spy, gdb and strace must work for the job's user without sudo."""

from __future__ import annotations

from nodeready.core.policy import Policy
from nodeready.core.result import FactKinds, Result, Subject, check
from nodeready.core.severity import hides_cause
from nodeready.core.sysctl import contradicted, sets
from nodeready.subjects.ptrace.facts import KEY, PROBE, Ptrace


def _scope_files(observed: Ptrace, policy: Policy) -> tuple[str, ...]:
    winner = observed.boot.winner
    is_right = winner is not None and sets(winner.value, str(policy.ptrace_scope))
    return () if is_right else ("/etc/sysctl.d/*nodeready-ptrace.conf",)


@check("ptrace.scope", hides_cause("deploy", "configure", "reboot"), settings=("ptrace_scope",),
       fixed_by="ptrace.scope", writes=_scope_files, fix=(
    "remove the line SOURCE, then nodeready deploy INVENTORY --only ptrace",
    "systemctl unmask systemd-sysctl.service, then nodeready deploy INVENTORY --only ptrace",
    "reboot the node",
))  # fmt: skip
def scope(observed: Ptrace, policy: Policy) -> Result:
    """Yama's ptrace_scope, live and at the next boot, is the policy's.

    Scope 1 allows only a parent to attach, so py-spy in another shell is refused. Scope 2 needs
    CAP_SYS_PTRACE. Scope 3 forbids attaching to all users, and cannot be lowered before a reboot
    (Documentation/admin-guide/LSM/Yama.rst). A kernel without Yama has the classic rules.
    """
    expected = str(policy.ptrace_scope)
    if observed.live is None:
        return scope.na("no Yama in this kernel: the classic rules apply")
    winner, source = observed.boot.winner, observed.boot.source
    actual, check = observed.boot.text(observed.live), scope.expecting(expected)
    is_boot_wrong = winner is None or not sets(winner.value, expected)
    is_live_wrong = observed.live not in (policy.ptrace_scope, 3)
    if is_boot_wrong and observed.boot.remedy:
        # The next boot would lose a value that is only live.
        return check.held(actual, source, observed.boot.remedy)
    if is_boot_wrong or is_live_wrong:
        return check.fixable(actual, source)
    if observed.live == 3:
        text, actions = f"{actual}: reboot needed", ("reboot",)
        return check.fail(text, source, "reboot the node", actions=actions)
    return check.ok(str(observed.live), source)


@check("ptrace.sysctl_conf", hides_cause("configure"), settings=("ptrace_scope",),
       fix="remove the line WHERE")  # fmt: skip
def sysctl_conf(observed: Ptrace, policy: Policy) -> Result:
    """No line of /etc/sysctl.conf contradicts the policy.

    ``sysctl --system``, run by hand or by a package's script, reads that file after all others,
    and would set the line's value until the next boot.
    """
    if observed.live is None:
        return sysctl_conf.na("no Yama in this kernel: the classic rules apply")
    return contradicted(sysctl_conf, KEY, observed.boot, str(policy.ptrace_scope))


@check("ptrace.selinux", hides_cause("deploy"), fixed_by="ptrace.selinux",
       writes=lambda observed, policy: (), expects="off")  # fmt: skip
def selinux(observed: Ptrace, policy: Policy) -> Result:
    """SELinux's deny_ptrace is off where SELinux enforces: it stops even root's debugger."""
    if observed.deny_ptrace is None:
        return selinux.na("no SELinux deny_ptrace on this node")
    if observed.deny_ptrace:
        return selinux.fixable("on", "/sys/fs/selinux/booleans/deny_ptrace")
    return selinux.ok()


SUBJECT = Subject(
    "ptrace", __doc__, checks=(scope, sysctl_conf, selinux), probe=PROBE,
    files=("/etc/sysctl.d/*nodeready*.conf",), kinds=FactKinds(volatile="where last_name"),
)  # fmt: skip

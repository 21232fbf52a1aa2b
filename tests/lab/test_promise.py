"""The promise of ``fixable``, both ways: deploy repairs what is called so, and nothing else.

Each node has one state for each of a few checks. Where the audit says fixable, a deploy makes the
check pass. Where it does not, a deploy leaves the check alone, and the step that repairs the check
would not have made it pass either: it is run all the same, and fails or changes nothing.
"""

from __future__ import annotations

import pytest

from nodeready import shell
from nodeready.deploy.actions import Change
from nodeready.operations import STEPS
from nodeready.policy import Policy
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.snapshot import judge
from tests.helpers import apply, observe, on, plan
from tests.lab.rows import rows

# Values below the usual hard limits: a machine that runs the lab may not be allowed to raise them.
POLICY = Policy(limit_memlock="1024", limit_nofile=4096)
CHOSEN = ("ptrace", "core_dumps", "limits")
SYSCTL_D, OURS = "/etc/sysctl.d", "/etc/sysctl.d/99-zz-nodeready-ptrace.conf"
CORES, LIMITS_D = "/var/crash", "/etc/security/limits.d"
LIMITS = f"{LIMITS_D}/zz-nodeready.conf"
UNITS = "/etc/systemd/system"
SLURMD = (
    "mkdir -p /usr/lib/systemd/system; "
    "printf '[Service]\\nExecStart=/x\\n' >/usr/lib/systemd/system/slurmd.service"
)
APPORT = "mkdir -p /usr/lib/systemd/system; echo '[Unit]' >/usr/lib/systemd/system/apport.service"
READ_ONLY = "mount --bind {0} {0}; mount -o remount,ro,bind {0}"

# A node: check -> what makes the state, and whether the audit calls it fixable.
NODES = {
    "nothing yet": {
        "ptrace.scope": (":", True),
        "core_dumps.directory": (f"rm -rf {CORES}", True),
        "core_dumps.rewriters": (APPORT, True),
        "limits.core": (":", True),
        "limits.services": (SLURMD, True),
    },
    "by hand": {
        "ptrace.scope": (f"echo kernel.yama.ptrace_scope=2 >{OURS}", True),
        "core_dumps.directory": (f"mkdir -p {CORES}; chmod 755 {CORES}", True),
        "core_dumps.retention": ("echo 'd /var/crash 0755' >/etc/tmpfiles.d/crash.conf", True),
        "limits.core": (f"echo '* - core 0' >{LIMITS}; ln {LIMITS} {LIMITS_D}/other", True),
        "limits.services": (
            f"{SLURMD}; mkdir -p {UNITS}/slurmd.service.d; "
            f"echo x >{UNITS}/slurmd.service.d/zz-nodeready.conf",
            True,
        ),
    },
    "links to files and directories": {
        "ptrace.scope": (f"mv {SYSCTL_D} /srv/sysctl.d; ln -s /srv/sysctl.d {SYSCTL_D}", True),
        "core_dumps.directory": (
            f"rm -rf {CORES}; mkdir /srv/cores; chmod 755 /srv/cores; ln -s /srv/cores {CORES}",
            True,
        ),
        "limits.core": (f"echo '* - core 0' >/srv/l; ln -s /srv/l {LIMITS}", True),
    },
    "directories that are gone": {
        "ptrace.scope": (f"rm -rf {SYSCTL_D}", True),
        "core_dumps.directory": (f"mkdir -p {CORES}; chmod 777 {CORES}", True),
        "limits.core": (f"rm -rf {LIMITS_D}", True),
    },
    "links to /dev/null": {
        "ptrace.scope": (f"ln -s /dev/null {OURS}", False),
        "core_dumps.directory": (f"rm -rf {CORES}; ln -s /dev/null {CORES}", False),
        "core_dumps.rewriters": (f"{APPORT}; echo '[Unit]' >{UNITS}/apport.service", False),
        "limits.core": (f"ln -s /dev/null {LIMITS}", False),
        "limits.services": (
            f"{SLURMD}; mkdir -p {UNITS}/slurmd.service.d; "
            f"ln -s /dev/null {UNITS}/slurmd.service.d/zz-nodeready.conf",
            False,
        ),
    },
    "links to nowhere, and a unit that is a link": {
        "ptrace.scope": (f"ln -s /srv/nothing {OURS}", False),
        "core_dumps.directory": (f"rm -rf {CORES}; ln -s /srv/nothing {CORES}", False),
        "core_dumps.rewriters": (
            f"{APPORT}; ln -s /usr/lib/systemd/system/apport.service {UNITS}/apport.service",
            False,
        ),
        "core_dumps.retention": (
            "ln -s /srv/nothing /etc/tmpfiles.d/00-nodeready-cores.conf", False,
        ),
        "limits.core": (f"rm -rf {LIMITS_D}; ln -s /srv/nothing {LIMITS_D}", False),
    },
    "files and directories in each other's place": {
        "ptrace.scope": (f"mkdir {OURS}", False),
        "core_dumps.directory": (f"rm -rf {CORES}; echo >{CORES}", False),
        "limits.core": (f"rm -rf {LIMITS_D}; echo >{LIMITS_D}", False),
        "limits.services": (f"{SLURMD}; echo >{UNITS}/slurmd.service.d", False),
    },
    "read-only": {
        "ptrace.scope": (READ_ONLY.format(SYSCTL_D), False),
        "core_dumps.pattern": (":", False),
        "core_dumps.directory": (
            f"mkdir -p {CORES}; chmod 755 {CORES}; {READ_ONLY.format(CORES)}", False,
        ),
        "limits.core": (READ_ONLY.format(LIMITS_D), False),
        "limits.services": (f"{SLURMD}; {READ_ONLY.format(UNITS)}", False),
    },
    "others' directories": {
        "ptrace.scope": (f"chown ml {SYSCTL_D}", False),
        "core_dumps.directory": (f"mkdir -p {CORES}; chmod 755 {CORES}; chown ml {CORES}", False),
        "limits.core": (f"chmod 777 {LIMITS_D}", False),
    },
    "read before and behind": {
        "ptrace.scope": (f"echo kernel.yama.ptrace_scope=1 >{SYSCTL_D}/~last.conf", False),
        "core_dumps.pattern": (f"echo 'kernel.core_*=core' >{SYSCTL_D}/~glob.conf", True),
        "core_dumps.directory": ("mkdir -p /var/crash; chmod 1777 /var/crash; chmod 700 /var",
                                 False),
        "limits.core": (f"echo 'root -' >{LIMITS_D}/a.conf", False),
    },
    "immutable": {
        "ptrace.scope": (
            f"mount -t tmpfs none {SYSCTL_D}; echo >{OURS}; chattr +i {OURS}", False,
        ),
        "core_dumps.directory": (
            f"mkdir -p {CORES}; mount -t tmpfs -o mode=755 none {CORES}; chattr +i {CORES}", False,
        ),
        "limits.core": (f"mount -t tmpfs none {LIMITS_D}; chattr +i {LIMITS_D}", False),
    },
}  # fmt: skip


def results(seen):
    return {result.check: result for result in judge(seen, POLICY)}


def forced(seen, check):
    """The change that the check's step would make, whether the check asks for it or not."""
    page = next(one for subject in SUBJECTS.values() for one in subject.checks if one.id == check)
    (step,) = [one for one in STEPS if one.name == page.fixed_by]
    return Change(step.name, (check,), tuple(step.act(seen, POLICY)), step.touches, step.timeout_s)


@pytest.mark.parametrize(
    "name",
    rows(
        NODES, "nothing yet", "by hand", "links to nowhere, and a unit that is a link", "read-only"
    ),
)
def test_what_is_called_fixable_is_what_a_deploy_repairs(fresh_node, name):
    states = NODES[name]
    for make, _ in states.values():
        fresh_node.enter(["sh", "-ec", make])
    run = on(fresh_node)
    seen = observe(run, POLICY, CHOSEN)
    before = results(seen)
    told = {check: (before[check].bad, before[check].fixable) for check in states}
    assert told == {check: (True, fixable) for check, (_, fixable) in states.items()}

    steps = [step for step in STEPS if step.subject in CHOSEN]
    apply(run, plan(seen, POLICY, steps))
    again = observe(run, POLICY, CHOSEN)
    after = results(again)
    left = {check: after[check].bad for check in states}
    assert left == {check: not fixable for check, (_, fixable) in states.items()}
    assert not any(result.fixable for result in after.values())
    if not any(left.values()):
        return
    for check in (check for check, bad in left.items() if bad):
        assert after[check].fix, check
        change = forced(again, check)
        run(*shell.command(change.script("test", "root@test", 5), 60, "nodeready:test"))
    last = results(observe(run, POLICY, CHOSEN))
    assert {check: last[check].bad for check in states} == left

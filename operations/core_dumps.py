"""Make a crash leave a whole core file where the policy says."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.core.policy import Policy
from nodeready.core.templates import render
from nodeready.runs.deploy import actions
from nodeready.runs.deploy.pyinfra import step
from nodeready.subjects.core_dumps import checks
from nodeready.subjects.core_dumps.checks import packaged, retention_rule
from nodeready.subjects.core_dumps.facts import KEY, REWRITERS, CoreDumps, core_directory
from nodeready.subjects.snapshot import Snapshot

TMPFILES = "/etc/tmpfiles.d/00-nodeready-cores.conf"
COREDUMP_CONF = "/etc/systemd/coredump.conf.d/zz-nodeready.conf"


@step()
def rewriters(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Stop, disable and mask the services that rewrite core_pattern when they start."""
    cores: CoreDumps = snapshot["core_dumps"]
    for unit in (unit for unit in REWRITERS if unit in cores.rewriters):
        if cores.systemd:
            yield actions.RunCommand(("systemctl", "disable", "--now", unit), f"stop {unit}")
        yield actions.RunCommand(("systemctl", "mask", unit), f"mask {unit}")


@step()
def directory(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Make the core directory, now and at boot, with a rule that removes old cores."""
    cores: CoreDumps = snapshot["core_dumps"]
    content = render("core_dumps/tmpfiles.conf.j2", rule=retention_rule(policy))
    yield from actions.own_file(snapshot, TMPFILES, content)
    # Only the rule may be missing, or only a person may be able to repair the directory.
    if checks.directory(cores, policy).fixable:
        yield actions.MakeDirectory(core_directory(policy), "1777")


@step()
def pattern(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Set kernel.core_pattern now and for the next boot."""
    cores: CoreDumps = snapshot["core_dumps"]
    if policy.core_handler == "path":
        core_pattern = policy.core_pattern
        comment = "Crashed processes leave their core file here; see core(5)."
        words = KEY, core_pattern, cores.boot, comment
        yield from actions.sysctl_dropin(snapshot, "core_dumps", *words)
    else:
        # The package's own file sets the pattern; nodeready's file would override it.
        core_pattern = packaged(cores) or cores.live
        for path, content in actions.own_variants(
            snapshot, actions.SYSCTL_D, actions.sysctl_name("core_dumps")
        ):
            yield actions.RemoveFile(path, content)
    if cores.live != core_pattern:
        yield actions.RunCommand(("sysctl", "-w", f"{KEY}={core_pattern}"))


@step()
def size(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Let systemd-coredump keep cores of any size."""
    yield from actions.own_file(snapshot, COREDUMP_CONF, render("core_dumps/coredump.conf.j2"))


STEPS = (rewriters, directory, pattern, size)

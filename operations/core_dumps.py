"""Make a crash leave a whole core file where the policy says."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.deploy.actions import Action, MakeDirectory, RemoveFile, RunCommand
from nodeready.deploy.step import (
    SYSCTL_D,
    others_of,
    own_file,
    step,
    sysctl_dropin,
    sysctl_name,
)
from nodeready.policy import Policy
from nodeready.subjects.core_dumps import checks
from nodeready.subjects.core_dumps.checks import packaged, retention_rule
from nodeready.subjects.core_dumps.facts import KEY, REWRITERS, CoreDumps, core_directory
from nodeready.subjects.snapshot import Snapshot
from nodeready.subjects.templates import render

TMPFILES = "/etc/tmpfiles.d/00-nodeready-cores.conf"
COREDUMP_CONF = "/etc/systemd/coredump.conf.d/zz-nodeready.conf"


@step()
def rewriters(seen: Snapshot, want: Policy) -> Iterator[Action]:
    """Stop, disable and mask the services that rewrite core_pattern when they start."""
    cores: CoreDumps = seen["core_dumps"]
    for unit in (unit for unit in REWRITERS if unit in cores.rewriters):
        if cores.systemd:
            yield RunCommand(("systemctl", "disable", "--now", unit), f"stop {unit}")
        yield RunCommand(("systemctl", "mask", unit), f"mask {unit}")


@step()
def directory(seen: Snapshot, want: Policy) -> Iterator[Action]:
    """Make the core directory, now and at boot, with a rule that removes old cores."""
    cores: CoreDumps = seen["core_dumps"]
    content = render("core_dumps/tmpfiles.conf.j2", rule=retention_rule(want))
    yield from own_file(seen, TMPFILES, content)
    # The rule alone may be missing, beside a directory that only a person can repair.
    if checks.directory(cores, want).fixable:
        yield MakeDirectory(core_directory(want), "1777")


@step()
def pattern(seen: Snapshot, want: Policy) -> Iterator[Action]:
    """Set kernel.core_pattern now and for the next boot."""
    cores: CoreDumps = seen["core_dumps"]
    if want.core_handler == "path":
        wanted = want.core_pattern
        yield from sysctl_dropin(seen, "core_dumps", KEY, wanted, cores.boot)
    else:
        # The package's own file sets the pattern; ours would hide it.
        wanted = packaged(cores) or cores.live
        for path, content in others_of(seen, SYSCTL_D, sysctl_name("core_dumps")):
            yield RemoveFile(path, content)
    if cores.live != wanted:
        yield RunCommand(("sysctl", "-w", f"{KEY}={wanted}"))


@step()
def size(seen: Snapshot, want: Policy) -> Iterator[Action]:
    """Let systemd-coredump keep cores of any size."""
    yield from own_file(seen, COREDUMP_CONF, render("core_dumps/coredump.conf.j2"))


STEPS = (rewriters, directory, pattern, size)

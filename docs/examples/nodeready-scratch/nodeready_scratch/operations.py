"""Make the scratch directory."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.deploy.actions import Action, RunCommand
from nodeready.deploy.own_files import own_file
from nodeready.deploy.step import step
from nodeready.policy import Policy
from nodeready.subjects.snapshot import Snapshot
from nodeready.subjects.templates import render
from nodeready_scratch.checks import MODE
from nodeready_scratch.facts import DIRECTORY


@step()
def directory(snapshot: Snapshot, policy: Policy) -> Iterator[Action]:
    """Make /scratch with mode 1777, now and at each boot."""
    content = render("scratch/tmpfiles.conf.j2", directory=DIRECTORY, mode=MODE)
    yield from own_file(snapshot, "/etc/tmpfiles.d/nodeready-scratch.conf", content)
    yield RunCommand(("install", "-d", "-m", MODE, DIRECTORY))


STEPS = (directory,)

"""What a deploy.py calls: `from nodeready.deploys import debuggable`, then `debuggable()`."""

from __future__ import annotations

from pyinfra.api import deploy

from nodeready.operations import STEPS


@deploy("nodeready")
def debuggable() -> None:
    """Make every node debuggable: all operations, in the order of `nodeready deploy`."""
    for step in STEPS:
        step()

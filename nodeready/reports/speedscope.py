"""The stacks as speedscope reads them: https://www.speedscope.app/file-format-schema.json."""

from __future__ import annotations

from nodeready.stacks import Stacks


def render(stacks: Stacks) -> str:
    """The whole document."""
    raise NotImplementedError

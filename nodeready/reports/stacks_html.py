"""The stacks as one HTML page that needs nothing beside itself."""

from __future__ import annotations

from nodeready.stacks import Stacks


def render(stacks: Stacks) -> str:
    """The whole page."""
    return f"<!doctype html><title>{len(stacks.groups)} groups</title>"

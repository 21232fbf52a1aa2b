"""The command as a user runs it."""

from __future__ import annotations

from tests.command import fleet, tool

__all__ = ["fleet", "tool"]

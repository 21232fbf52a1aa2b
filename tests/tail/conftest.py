"""The command, and inventories of lab nodes for it."""

from __future__ import annotations

from tests.command import fleet, tool

__all__ = ["fleet", "tool"]

"""Nodes, and a home for the command."""

from tests.command import fleet, tool

__all__ = ["fleet", "tool"]

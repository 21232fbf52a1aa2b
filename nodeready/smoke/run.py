"""The smoke test of all nodes, until one deadline: the search's rounds, over open channels."""

from __future__ import annotations

"""nodeready: makes every node of a GPU cluster debuggable before the job starts."""

from __future__ import annotations

__version__ = "0.1.0"

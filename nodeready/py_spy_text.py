"""What ``py-spy dump`` prints, as pdsh or srun collected it, as raw traces."""

from __future__ import annotations

from typing import Any


def parse(text: str, name: str) -> list[dict[str, Any]]:
    """The raw traces, ``nodeready.trace/1``, one per node."""
    raise NotImplementedError

"""The labs on this machine (``nodeready lab up``), as the files that they leave name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: The directory of the labs, as `nodeready.lab.state` has it, and the file of a lab's nodes there.
ROOT = Path("/run/nodeready/lab")
INVENTORY = "inventory.json"


def lab_names() -> list[str]:
    """The labs with nodes; none for users other than root, who cannot list them."""
    try:
        return sorted(path.parent.name for path in ROOT.glob(f"*/{INVENTORY}"))
    except OSError:
        return []


def file_of(name: str) -> Path:
    return ROOT / name / INVENTORY


def read(name: str) -> dict[str, dict[str, Any]]:
    """The nodes of a lab, each with its data. Raises OSError, or ValueError for a damaged file."""
    nodes: dict[str, dict[str, Any]] = json.loads(file_of(name).read_text())
    return nodes

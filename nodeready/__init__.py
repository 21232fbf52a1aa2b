"""nodeready: makes every node of a GPU cluster debuggable before the job starts."""

from __future__ import annotations

import sys
from typing import Any

__version__ = "0.1.0"


class _Renamed:
    """Finds a module by the name that inventories of earlier checkouts import it by."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of ``nodeready.nodesets``; None for every other module."""
        if name != "nodeready.nodesets":
            return None
        import importlib.util

        return importlib.util.find_spec("nodeready.inventory.nodeset")


sys.meta_path.append(_Renamed)

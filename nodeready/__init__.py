"""nodeready: makes every node of a GPU cluster debuggable before the job starts."""

from __future__ import annotations

import sys

# `python -m nodeready` puts the current directory in front of the path: whosever that is, nothing
# is imported from it, unless the package itself lies there (a checkout). What Python imports
# before this line is its own in 3.11 and newer (frozen modules).
if sys.argv[:1] == ["-m"] and sys.path and not __file__.startswith(f"{sys.path[0]}/"):
    del sys.path[0]

from typing import Any

__version__ = "0.1.0"


#: What inventories and `pyinfra INVENTORY fact` call by a name of its own: that name -> the
#: module.
_NAMES = {
    "nodeready.nodesets": "nodeready.inventory.nodeset",
    "nodeready.facts": "nodeready.deploy.pyinfra",
}


class _Named:
    """Finds the modules of _NAMES."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of the module that has this name; None for every other."""
        if name not in _NAMES:
            return None
        import importlib.util

        return importlib.util.find_spec(_NAMES[name])


sys.meta_path.append(_Named)

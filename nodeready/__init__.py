"""nodeready: makes every node of a GPU cluster debuggable before the job starts."""

from __future__ import annotations

import sys

# `python -m nodeready` puts the current directory, which any user may own, first in the path:
# nothing is imported from it unless it holds the package itself (a checkout). Before this line,
# Python 3.11 and newer imports only its own frozen modules.
if sys.argv[:1] == ["-m"] and sys.path and not __file__.startswith(f"{sys.path[0]}/"):
    del sys.path[0]

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nodeready.api import Error, audit, deploy, ready, stacks

__all__ = ["Error", "audit", "deploy", "ready", "stacks"]

__version__ = "0.2.0"


class _Nodeready(ModuleType):
    """This module. `audit`, `deploy` and `ready` are functions of `nodeready.api`, also after the
    import of a module of the package of the same name, which Python would bind here.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        # By its name, because nodes have no such module, and get what this one imports.
        return getattr(importlib.import_module("nodeready.api"), name)


sys.modules[__name__].__class__ = _Nodeready

"""nodeready: makes every node of a GPU cluster debuggable before the job starts."""

from __future__ import annotations

import sys

# `python -m nodeready` puts the current directory, which any user may own, first in the path:
# nothing is imported from it unless it holds the package itself (a checkout). Before this line,
# Python 3.11 and newer imports only its own frozen modules.
if sys.argv[:1] == ["-m"] and sys.path and not __file__.startswith(f"{sys.path[0]}/"):
    del sys.path[0]

import importlib

TYPE_CHECKING = False  # typing's, which takes a third of the time of --version
if TYPE_CHECKING:
    from typing import Any

    from nodeready.api import Error, audit, deploy, ready, stacks, watch_audit

__all__ = ["Error", "audit", "deploy", "ready", "stacks", "watch_audit"]

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """The commands as functions, imported when they are used: a node has no `nodeready.api`."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("nodeready.api"), name)

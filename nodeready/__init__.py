"""nodeready: makes every node of a GPU cluster debuggable before the job starts."""

from __future__ import annotations

import sys

# `python -m nodeready` puts the current directory, which any user may own, first in the path:
# nothing is imported from it unless it holds the package itself (a checkout). Before this line,
# Python 3.11 and newer imports only its own frozen modules.
if sys.argv[:1] == ["-m"] and sys.path and not __file__.startswith(f"{sys.path[0]}/"):
    del sys.path[0]

__version__ = "0.2.0"

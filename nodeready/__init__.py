"""nodeready: makes every node of a GPU cluster debuggable before the job starts."""

from __future__ import annotations

import sys

# `python -m nodeready` puts the current directory in front of the path: whosever that is, nothing
# is imported from it, unless the package itself lies there (a checkout). What Python imports
# before this line is its own in 3.11 and newer (frozen modules).
if sys.argv[:1] == ["-m"] and sys.path and not __file__.startswith(f"{sys.path[0]}/"):
    del sys.path[0]

__version__ = "0.1.0"

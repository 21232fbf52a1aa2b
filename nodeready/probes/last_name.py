"""Directories in which the last file by name wins: can a file of ours be the last?

Ours begin with as many z's as it takes (``name_after``). A few names sort behind any of those.
"""

from __future__ import annotations

#: A file name has at most 255 bytes (limits.h, NAME_MAX); ours needs room behind its z's.
_MOST_ZS = 200


def beatable(name: str) -> bool:
    """Whether some number of z's sorts behind ``name``: not behind ``~x.conf``, ``zz{.conf``."""
    rest = name.lstrip("z")
    return len(name) - len(rest) < _MOST_ZS and rest[:1] <= "z"

"""/usr/local/bin/nodeready-run: `nodeready run` as one file that needs only a node's Python."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from typing import Any

import nodeready
from nodeready.core.pythons import OLDEST, PYTHONS

RUN = "/usr/local/bin/nodeready-run"

# For sh, the first lines start the first new enough Python; for Python, they are a part of the
# module's docstring.
_HEAD = f'''#!/bin/sh
""":"
# Written by nodeready; the next deploy overwrites it.
for name in {" ".join(PYTHONS)}; do
    if "$name" -I -S -c 'import sys; sys.exit(sys.version_info < {OLDEST})' 2>/dev/null; then
        exec "$name" -I -S "$0" "$@"
    fi
done
echo 'nodeready run: no Python {OLDEST[0]}.{OLDEST[1]} or newer' >&2
exit 127
""" \\
'''


@lru_cache(maxsize=1)
def content() -> bytes:
    """The file's bytes, on the control machine and in a node's own program."""
    assert nodeready.__file__ is not None
    path = os.path.join(os.path.dirname(nodeready.__file__), "agent", "run.py")
    # The loader also reads from a zip file.
    loader: Any = nodeready.__loader__
    data: bytes = loader.get_data(path)
    return _HEAD.encode() + data


@lru_cache(maxsize=1)
def digest() -> str:
    """The sha256 of the file."""
    return hashlib.sha256(content()).hexdigest()

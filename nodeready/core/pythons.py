"""The Pythons of a node: which of them is new enough for nodeready's programs there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

#: Where a Python of 3.9 or newer may be: the platform's own interpreter is often older. Every
#: program on a node is started by the first of these that is new enough.
PYTHONS = (
    "python3", "python3.13", "python3.12", "python3.11", "python3.10", "python3.9",
    "/usr/libexec/platform-python",
)  # fmt: skip
OLDEST = (3, 9)
#: Package manager -> the package of a newer Python beside the distribution's own: in RHEL 8 (3.6),
#: in Ubuntu 20.04 (3.8), in SLES 15 (3.6).
PACKAGES = {
    "apt-get": "python3.9",
    "zypper": "python311",
    "dnf": "python3.11",
    "yum": "python3.11",
}

# A Python that is new enough also prints the magic number of its compiled code.
_ABOUT = (
    'import sys; new = sys.version_info >= (3, 9); print("%d.%d" % sys.version_info[:2], '
    '*([__import__("_frozen_importlib_external").MAGIC_NUMBER.hex()] if new else []))'
)
#: Prints ``python=NAME VERSION [MAGIC]`` for each Python, up to the first that is new enough. The
#: sections in one shell share its answer: a Python costs as much as all their other processes.
SCRIPT = rf"""
    if [ -z "${{nr_pythons:-}}" ]; then
        nr_pythons=$(for nr_name in {" ".join(PYTHONS)}; do
            if ! command -v "$nr_name" >/dev/null 2>&1; then continue; fi
            nr_said=$("$nr_name" -ISBc '{_ABOUT}' 2>/dev/null)
            nr_say python "$nr_name ${{nr_said:-?}}"
            case $nr_said in *' '*) break ;; esac
        done)
    fi
    printf '%s\n' "$nr_pythons"
"""


class NodePython(NamedTuple):
    """The Python for nodeready's programs."""

    name: str = ""  # as one of PYTHONS; "": there is none
    old: str = ""  # without a new enough Python: the first one, with its version; "": none at all
    magic: str = ""  # the magic number of its compiled code; "": unknown


def parse_pythons(rows: Iterable[str]) -> NodePython:
    """The Python of the rows, without ``python=``."""
    old = ""
    for row in rows:
        name, _, answer = row.partition(" ")
        version, _, magic = answer.partition(" ")
        match = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", version)
        if name in PYTHONS and match and (int(match[1]), int(match[2])) >= OLDEST:
            return NodePython(name, "", magic if re.fullmatch(r"[0-9a-f]{8}", magic) else "")
        old = old or (f"{name} is {version}" if match else f"{name} does not run")
    return NodePython(old=old)

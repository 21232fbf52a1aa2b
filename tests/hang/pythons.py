"""The Pythons that have torch: the newest, and Debian's.

`scripts/setup.sh test` makes `.venv-torch/py3.N` for every Python 3.N that it finds from 3.10 to
3.13, at least for one. NODEREADY_TORCH names others, with colons between.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.paths import ROOT

#: All on the newest torch, and a few on each other Python, take minutes of two cores: in CI, and
#: with NODEREADY_HANGS=all.
ALL = os.environ.get("NODEREADY_HANGS") == "all"

_DEBIAN = Path("/usr/bin/python3")
_DEBIAN_TORCH = Path("/usr/lib/python3/dist-packages/torch/__init__.py")


@dataclass(frozen=True)
class Python:
    """name: `py3.11`, or `debian`"""

    path: str
    name: str

    def has(self, module: str) -> bool:
        """Whether it can import this, by its folder."""
        folder = Path(self.path).parent.parent
        return any(folder.glob(f"lib/python3.*/site-packages/{module}/__init__.py"))

    @property
    def debian(self) -> bool:
        return self.name == "debian"


DEBIAN = Python(str(_DEBIAN), "debian")


def _named(path: Path) -> Python | None:
    """The Python of an environment, by the folder of its packages; None: it has no torch."""
    for packages in sorted(path.parent.parent.glob("lib/python3.*/site-packages/torch")):
        version = re.search(r"python(3\.[0-9]+)", str(packages))
        if version and path.exists():
            return Python(str(path), f"py{version[1]}")
    return None


@functools.cache
def found() -> tuple[Python, ...]:
    """The one to try everything on, then the others, Debian's last."""
    if "NODEREADY_TORCH" in os.environ:
        paths = [Path(path) for path in os.environ["NODEREADY_TORCH"].split(":") if path]
    else:
        paths = sorted(ROOT.glob(".venv-torch/py3.*/bin/python"), reverse=True)
    named = [python for path in paths if (python := _named(path))]
    return (*named, *([DEBIAN] if _DEBIAN_TORCH.exists() else ()))


def needed() -> None:
    """Skip where there is no new torch; in CI that is a failure."""
    if any(not python.debian for python in found()):
        return
    reason = "no new torch in .venv-torch (scripts/setup.sh test), and NODEREADY_TORCH names none"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)

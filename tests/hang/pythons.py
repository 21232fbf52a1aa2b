"""The Pythons that have torch: the newest, and Debian's.

`scripts/setup.sh all` makes `.venv-torch/py3.N` for every Python 3.N that it finds from 3.10 to
3.13, at least for one. NODEREADY_TORCH names others, with colons between.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from tests.paths import ROOT

_DEBIAN_TORCH = Path("/usr/lib/python3/dist-packages/torch/__init__.py")


@dataclass(frozen=True)
class Python:
    """name: `py3.11`, or `debian`"""

    path: str
    name: str

    def has(self, module: str) -> bool:
        """Whether it can import this, by its folder."""
        folder = Path(self.path).parent.parent
        return any(folder.glob(f"lib/python3*/*-packages/{module}/__init__.py"))

    @property
    def debian(self) -> bool:
        return self.name == "debian"


DEBIAN = Python("/usr/bin/python3", "debian")


def _environment(path: Path) -> Python | None:
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
    environments = [python for path in paths if (python := _environment(path))]
    return (*environments, *([DEBIAN] if _DEBIAN_TORCH.exists() else ()))


def needed(python: Python | None = None) -> Python:
    """The Python of a row; None: the newest. Skip where there is none; without any torch, in CI,
    that is a failure.
    """
    if python or (found() and not found()[0].debian):
        return python or found()[0]
    missing("no new torch in .venv-torch (scripts/setup.sh all), and NODEREADY_TORCH names none",
            in_ci=not found())  # fmt: skip


def missing(reason: str, *, in_ci: bool) -> NoReturn:
    """Skip; or fail, where CI must have it."""
    if in_ci and os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)

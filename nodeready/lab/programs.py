"""The programs that a lab's commands run on this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

Done = subprocess.CompletedProcess[str]


def environment() -> dict[str, str]:
    """The environment, with the administrator's programs on the path also after a plain `su`."""
    path = os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"
    return {**os.environ, "PATH": path, "LC_ALL": "C"}


def run(
    argv: Sequence[str],
    data: str = "",
    timeout: float | None = 60,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> Done:
    """Run a program; its output is text, with surrogates for invalid bytes."""
    return subprocess.run(
        argv,
        input=data,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=timeout,
        check=False,
        env=env or environment(),
        cwd=cwd,
    )

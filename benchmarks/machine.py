"""The machine and the versions that numbers belong to. No host names, no paths."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path


def describe() -> str:
    """One line: processors, memory, kernel, system, Python."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    kernel = ".".join(platform.release().split("-")[0].split(".")[:2])
    system = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return (
        f"{len(os.sched_getaffinity(0))} cores ({model}), {memory:.0f} GiB, {system}, "
        f"Linux {kernel}, Python {platform.python_version()}"
    )


def versions(*names: str) -> str:
    """The installed versions of these distributions."""
    return ", ".join(f"{name} {version(name)}" for name in names)


def sshd() -> str:
    """The version of the nodes' ssh server."""
    words = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=False).stderr
    return words.partition(",")[0].strip().replace("_", " ")


def today() -> str:
    """The date of the numbers, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")

"""A node as the two sections of the probe print it: a healthy one, and what differs from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from nodeready.policy import Policy
from nodeready.subjects.base import Output
from nodeready.subjects.host import checks
from nodeready.subjects.host import facts as host
from nodeready.subjects.host.facts import Host
from tests.builders import judging
from tests.builders.printed import grep_lines

POLICY = Policy()
FILES: Mapping[str, str] = json.loads(Path(__file__).with_name("host_files.json").read_text())
TRACKING = """\
Reference ID    : 0A000001 (10.0.0.1)
Stratum         : 3
System time     : 0.000123456 seconds slow of NTP time
Last offset     : -0.000012345 seconds
Root delay      : 0.000500000 seconds
Root dispersion : 0.001200000 seconds
Leap status     : Normal
"""
PACKAGES = """\
packages=dpkg
Package: libc6
Status: install ok installed
Source: glibc
Version: 2.35-0ubuntu3.8
--
Package: gdb
Status: deinstall ok config-files
Version: 12.1
packages=end
"""
COUNTS = "zombies=0\nunseen=0\n"
PROCESSES = f"processes=1\n{COUNTS}processes=end\n"
MOUNTS = """\
mounts=begin
asked=/
asked=/dev/shm
nr_fs=4096 1000000 600000 550000 65536 60000 /
nr_fs=4096 262144 262144 262144 262144 262143 /dev/shm
mounts=local
asked=/home
nr_fs=1048576 1000000 200 200 0 0 /home
mounts=end
"""


def clock(name: str, text: str, rc: int = 0) -> str:
    return f"clock={name}\n{text}\nclock_rc={rc}\n"


def node(
    files: Mapping[str, str] | None = None,
    *printed: str,
    clock_text: str = clock("chronyc", TRACKING),
    packages: str = PACKAGES,
    processes: str = PROCESSES,
    mounts: str = MOUNTS,
    slow_rc: int | None = 0,
    sysctl: str = "",
    policy: Policy = POLICY,
) -> Host:
    """The observation of a node with these files and slow answers instead of the healthy ones."""
    first = "\n".join(("localtime=/usr/share/zoneinfo/Etc/UTC", *printed))
    text = f"{first}\n{grep_lines({**FILES, **(files or {})})}"
    slow = packages + clock_text + processes + mounts
    outputs = {
        "host": Output(text, 0),
        "host_slow": Output(slow, slow_rc),
        "sysctl": Output(sysctl, 0),
    }
    return host.parse(outputs, policy)


judged = partial(judging.by_name, checks)
wrong = partial(judging.wrong, checks)

"""A node as the two sections of the probe print it: a healthy one, and what differs from it."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from nodeready.core.base import Output
from nodeready.core.policy import Policy
from nodeready.subjects.host import checks
from nodeready.subjects.host import facts as host
from nodeready.subjects.host.facts import Host
from tests.builders import judging
from tests.builders.printed import grep_lines

POLICY = Policy()
_HEALTHY = json.loads(Path(__file__).with_suffix(".json").read_text())
FILES: Mapping[str, str] = _HEALTHY["files"]
TRACKING, PACKAGES, MOUNTS = (_HEALTHY[name] for name in ("tracking", "packages", "mounts"))
COUNTS = "zombies=0\nunseen=0\n"
PROCESSES = f"processes=1\n{COUNTS}processes=end\n"


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
        "host": Output(text, 0), "host_slow": Output(slow, slow_rc), "sysctl": Output(sysctl, 0),
    }  # fmt: skip
    return host.parse(outputs, policy)


judged = partial(judging.by_name, checks)
wrong = partial(judging.wrong, checks)

"""Tools of the system, such as nvidia-smi and dmesg, which run as root under a limit."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from nodeready.agent.runtime import Ended, ProcessSupervisor, changeable_by_root_only

#: Directories of tools; ROCm, and NVIDIA in containers, have separate ones.
_PATH = (
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/rocm/bin"
    ":/usr/local/nvidia/bin"
)
#: Maximum bytes of a tool's output; the last ones are kept.
_MAX_OUTPUT_BYTES = 8 << 20


def tool_path(name: str) -> str:
    """The path of a tool; "": it is missing, or a user other than root could change it."""
    path = shutil.which(name, path=_PATH)
    return path if path and changeable_by_root_only(path) else ""


@dataclass
class _OutputTail:
    """The last bytes of a tool's output."""

    data: bytearray = field(default_factory=bytearray)

    def __call__(self, process: object, stream: int, data: bytes) -> None:
        if stream == 1:
            self.data += data
            if len(self.data) > 2 * _MAX_OUTPUT_BYTES:
                del self.data[:-_MAX_OUTPUT_BYTES]


def run_tool(
    supervisor: ProcessSupervisor, argv: Sequence[str], limit_s: float
) -> tuple[Ended, str]:
    """How a tool ended, and the end of its output. Raises OSError."""
    tail = _OutputTail()
    ended = supervisor.run(
        argv, max(0.2, limit_s), tail, env={**os.environ, "LC_ALL": "C", "PATH": _PATH}
    )
    return ended, bytes(tail.data[-_MAX_OUTPUT_BYTES:]).decode("utf-8", "replace")


#: Seconds of a limit that are reserved for ending a tool and reading its output.
_SPARE_S = 0.5


def tool_deadline(supervisor: ProcessSupervisor, limit_s: float) -> float:
    limit_s = max(limit_s / 2, limit_s - _SPARE_S)
    return min(supervisor.deadline, time.monotonic() + limit_s)

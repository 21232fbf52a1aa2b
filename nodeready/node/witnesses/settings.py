"""What a running process has for whoever debugs it: versions, limits, places, variables.

Asked by ``stacks --check`` alone. What it means is for `nodeready.triage.stacks.debuggable`.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nodeready.node.users_file import with_rights
from nodeready.node.witnesses import flight_recorder, nccl_ras

# --- PyTorch's versions: since when a variable has which name and default.
#
# Sources: torch/csrc/distributed/c10d/FlightRecorder.hpp and ProcessGroupNCCL.hpp of 2.2, 2.14 and
# 2.15; pytorch pull requests 152563 (names), 143446 (dumps) and 172843 (the same default of 2,000
# entries everywhere); NVIDIA/nvidia-resiliency-ext pull request 163.

#: The first version with a recorder; the first in which its variables are TORCH_FR_*; from when on
#: it is certainly on, and dumps on a timeout, without any variable.
RECORDER, RECORDER_RENAMED, RECORDER_ON = (2, 2), (2, 8), (2, 11)


def release(version: str) -> tuple[int, int] | None:
    """Major and minor number of ``2.15.0+cu132``; None: not known."""
    words = version.split(".")[:2]
    if len(words) == 2 and all(word.isdecimal() and len(word) < 5 for word in words):
        return int(words[0]), int(words[1])
    return None


def buffer_variable(torch: tuple[int, int] | None) -> str:
    """The name of the variable that has the recorder's size: the old one where nobody knows."""
    new = torch is not None and torch >= RECORDER_RENAMED
    return "TORCH_FR_BUFFER_SIZE" if new else "TORCH_NCCL_TRACE_BUFFER_SIZE"


# --- What one process has.

#: Variables that are told; no other leaves the node.
VARIABLES = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "NCCL_RAS_ENABLE",
    "NCCL_DEBUG",
    "PYTHONFAULTHANDLER",
    "CUDA_ENABLE_USER_TRIGGERED_COREDUMP",
)
#: Characters of a value that are told.
_MOST = 200


@dataclass(frozen=True)
class Settings:
    """One process.

    torch:       its version; "": not loaded, or not known
    nccl:        its version; "": not known; None: not loaded
    cuda:        it has loaded the driver of NVIDIA's GPUs
    core_bytes:  its soft limit of a core; -1: none; None: not known
    core_place:  what the kernel does with a core (kernel.core_pattern)
    core_wrong:  why a core would not be written there; "": nothing is known against it
    dump_place:  where its flight recorder writes, without the rank; "": its rank is not known
    dump_wrong:  why it cannot write there; "": it can
    variables:   of VARIABLES that it has, (name, value)
    """

    torch: str = ""
    nccl: str | None = None
    cuda: bool = False
    core_bytes: int | None = None
    core_place: str = ""
    core_wrong: str = ""
    dump_place: str = ""
    dump_wrong: str = ""
    variables: tuple[tuple[str, str], ...] = ()


def observe(pid: int, uid: int, rank: int | None, environment: Mapping[str, str]) -> Settings:
    """The settings of a process. environment: of the process, `processes.KEYS` alone.

    For a fork (`nodeready.node.stacks.processes.each`): a file system may never answer.
    """
    pattern = _first("/proc/sys/kernel/core_pattern").strip()
    soft = _core_limit(_first(f"/proc/{pid}/limits"))
    torch, nccl, cuda, place, wrong, core = "", None, False, "", "", ""
    with contextlib.suppress(OSError), with_rights(nccl_ras.rights(pid, uid)):
        maps = list(_files(pid))
        torch, nccl = _torch(pid, maps), nccl_ras.library([pid])
        cuda = any(re.search(r"/libcuda\.so(\.|$)", path) for path in maps)
        if rank is not None:
            place = flight_recorder.places(uid, rank, environment)[0].removesuffix(str(rank))
            given = place in environment.values()
            wrong = _unwritable(pid, os.path.dirname(place) or ".", may_make=not given)
        core = _core_wrong(pid, pattern)
    told = ((name, environment[name][:_MOST]) for name in VARIABLES if name in environment)
    return Settings(
        torch, nccl, cuda, soft, pattern[:_MOST], core, place[:_MOST], wrong, tuple(told)
    )


def _first(path: str, most: int = 65536) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return bytes(file.read(most)).decode("utf-8", "replace")
    except OSError:
        return ""


def _files(pid: int) -> Iterator[str]:
    """The files that a process has mapped. Raises OSError."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        for row in file.read(16 << 20).splitlines():
            words = row.split(maxsplit=5)
            if len(words) == 6 and words[5].startswith("/"):
                yield words[5]


_TORCH = re.compile(r"(/.*/torch)/(?:_C\.[^/]*\.so|lib/libtorch[^/]*\.so[^/]*)$")
_VERSION = re.compile(r"^__version__ *= *['\"]([0-9][0-9A-Za-z.+]{0,40})['\"]", re.M)


def _torch(pid: int, maps: list[str]) -> str:
    """The version of PyTorch, by the file that it keeps it in (torch/version.py)."""
    found = dict.fromkeys(match[1] for path in maps if (match := _TORCH.search(path)))
    for directory in found:
        with contextlib.suppress(OSError):
            number = os.open(f"/proc/{pid}/root{directory}/version.py", os.O_PATH | os.O_CLOEXEC)
            try:
                if stat.S_ISREG(os.fstat(number).st_mode):
                    match = _VERSION.search(_first(f"/proc/self/fd/{number}", 4096))
                    if match:
                        return match[1]
            finally:
                os.close(number)
    return ""


def _core_limit(text: str) -> int | None:
    """The soft limit of a core in /proc/PID/limits (proc(5))."""
    row = re.search(r"^Max core file size +(\S+) ", text, re.M)
    if row is None:
        return None
    return -1 if row[1] == "unlimited" else int(row[1]) if row[1].isdecimal() else None


def _core_wrong(pid: int, pattern: str) -> str:
    """Why a core would not land where the pattern sends it (core(5))."""
    if not pattern:
        return "the kernel has no pattern for cores"
    if pattern.startswith("|"):
        program = pattern[1:].split()[:1]
        if not program or not os.access(program[0], os.X_OK, effective_ids=True):
            return f"there is no program {' '.join(program)}"[:_MOST]
        return f"{program[0]} drops it" if program[0].endswith("/false") else ""
    directory = os.path.dirname(pattern)
    if "%" in directory:
        return ""
    return _unwritable(pid, directory or ".", may_make=False)


def _unwritable(pid: int, directory: str, *, may_make: bool) -> str:
    """Why this process cannot write into a directory; "": it can. With its user's rights.

    may_make: whoever writes there makes the directory where it is missing
    """
    within = f"/proc/{pid}/root" if directory.startswith("/") else f"/proc/{pid}/cwd/"
    at = directory
    while may_make and at not in ("/", "", ".") and not os.path.exists(within + at):
        at = os.path.dirname(at)
    path = within + at
    if not os.path.isdir(path):
        return f"there is no directory {at}"[:_MOST]
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        return f"its user cannot write into {at}"[:_MOST]
    return ""

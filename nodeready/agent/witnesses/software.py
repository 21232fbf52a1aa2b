"""The versions of PyTorch, NCCL and the driver in a process, and where its NCCL comes from."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from nodeready.agent.stacks import processes
from nodeready.agent.users_file import opened_path, with_rights
from nodeready.agent.witnesses import nccl_ras

_TORCH = re.compile(r"(/.*/torch)/(?:_C\.[^/]*\.so|lib/libtorch[^/]*\.so[^/]*)$")
_VERSION = re.compile(r"^__version__ *= *['\"]([0-9][0-9A-Za-z.+]{0,40})['\"]", re.M)
#: The library has the driver's version in its name, also that of the compatibility package.
_DRIVER = re.compile(r"/libcuda\.so\.(\d{3}\.\d{1,4}(?:\.\d{1,4})?)$")


class RankSoftware(NamedTuple):
    """As the fields of `EnvironmentFacts` of these names."""

    nccl: str | None = ""
    torch: str = ""
    driver: str = ""
    nccl_path: str = ""
    nccl_by: str = ""
    nccl_own: str = ""


def observe(pid: int, uid: int, nccl: str | None = None) -> RankSoftware:
    """The software of a process. Call this in a fork: a file system may never answer.
    nccl: its version, if it is known; None: the library is searched for it, up to 64 MB"""
    with contextlib.suppress(OSError), with_rights(nccl_ras.rights(pid, uid)):
        maps = list(mapped_files(pid))
        nccl_path = next(filter(nccl_ras.LIBRARY.search, maps), "")
        environment = _loader_variables(processes.environment_bytes(pid) or b"")
        return RankSoftware(
            nccl_ras.library([pid], uid) if nccl is None else nccl,
            torch_version(pid, uid, maps),
            next((match[1] for path in maps if (match := _DRIVER.search(path))), ""),
            nccl_path[:_MAX_PATH],
            _brought_by(nccl_path, environment),
            _own_nccl(pid, uid, maps),
        )
    return RankSoftware()


#: Maximum characters of a path.
_MAX_PATH = 200
_LOADER = re.compile(rb"(?:^|\0)(LD_PRELOAD|LD_LIBRARY_PATH)=([^\0]*)")


def _loader_variables(data: bytes) -> dict[str, list[str]]:
    """The paths in the variables of the loader (ld.so(8)), in an environment."""
    return {
        os.fsdecode(name): re.split(
            "[:; ]" if name == b"LD_PRELOAD" else "[:;]", os.fsdecode(text)
        )
        for name, text in _LOADER.findall(data)
    }


def _brought_by(path: str, variables: Mapping[str, Sequence[str]]) -> str:
    """The variable by which the loader found a library; "": by none of them."""
    for name, place in (("LD_PRELOAD", path), ("LD_LIBRARY_PATH", os.path.dirname(path))):
        words = [word for word in variables.get(name, ()) if word.startswith("/")]
        if path and place in {*words, *map(os.path.realpath, words)}:
            return name
    return ""


def mapped_files(pid: int) -> Iterator[str]:
    """The files that a process has mapped. Raises OSError."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        for row in file.read(16 << 20).splitlines():
            words = row.split(maxsplit=5)
            if len(words) == 6 and words[5].startswith("/"):
                yield words[5]


def _torch_directories(maps: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(match[1] for path in maps if (match := _TORCH.search(path))))


def torch_version(pid: int, uid: int, maps: Sequence[str]) -> str:
    """The version of PyTorch that its torch/version.py names; "": not found."""
    for directory in _torch_directories(maps):
        path = f"{directory}/version.py"
        with contextlib.suppress(OSError), opened_path(pid, uid, path) as (number, _):
            if match := _VERSION.search(os.read(number, 4096).decode("utf-8", "replace")):
                return match[1]
    return ""


def _own_nccl(pid: int, uid: int, maps: Sequence[str]) -> str:
    """The version of the NCCL that was installed with PyTorch; "": not known."""
    for directory in _torch_directories(maps):
        if version := nccl_ras.packaged_version(pid, uid, os.path.dirname(directory)):
            return version
    return ""

"""The versions of PyTorch, NCCL and the driver in a process, and where its NCCL comes from."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nodeready.agent.stacks import processes
from nodeready.agent.users_file import held_path, opened_path, rights_of_job, with_rights

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
    """The software of a process; for a fork. nccl: its version; None: search up to 64 MB for it"""
    with contextlib.suppress(OSError), with_rights(rights_of_job(pid, uid)):
        maps = [path for path, _ in mapped_files(pid)]
        nccl_path = next(filter(LIBRARY.search, maps), "")
        environment = _loader_variables(processes.environment_bytes(pid) or b"")
        places = map(os.path.dirname, _torch_directories(maps))
        own_nccl = (packaged_version(pid, uid, place) for place in places)
        return RankSoftware(
            library([pid], uid) if nccl is None else nccl, torch_version(pid, uid, maps),
            next((match[1] for path in maps if (match := _DRIVER.search(path))), ""),
            nccl_path[:_MAX_PATH], _brought_by(nccl_path, environment),
            next(filter(None, own_nccl), ""),
        )  # fmt: skip
    return RankSoftware()


#: Maximum characters of a path.
_MAX_PATH = 200
_LOADER = re.compile(rb"(?:^|\0)(LD_PRELOAD|LD_LIBRARY_PATH)=([^\0]*)")


def _loader_variables(data: bytes) -> dict[str, list[str]]:
    """The paths in the variables of the loader (ld.so(8)), in an environment."""
    rows = [tuple(map(os.fsdecode, row)) for row in _LOADER.findall(data)]
    ends = {"LD_PRELOAD": "[:; ]", "LD_LIBRARY_PATH": "[:;]"}
    return {name: re.split(ends[name], text) for name, text in rows}


def _brought_by(path: str, variables: Mapping[str, Sequence[str]]) -> str:
    """The variable by which the loader found a library; "": by none of them."""
    for name, place in (("LD_PRELOAD", path), ("LD_LIBRARY_PATH", os.path.dirname(path))):
        words = [word for word in variables.get(name, ()) if word.startswith("/")]
        if path and place in {*words, *map(os.path.realpath, words)}:
            return name
    return ""


def mapped_files(pid: int) -> Iterator[tuple[str, str]]:
    """The files that a process has mapped, each with its inode. Raises OSError."""
    # Read as bytes: after rights are given up, a codec may not be importable.
    with open(f"/proc/{pid}/maps", "rb") as file:
        text = file.read(16 << 20).decode("utf-8", "replace")
    for row in text.splitlines():
        words = row.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith("/"):
            yield words[5], words[4]


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


# --- The NCCL in a process, and its version.

#: Bytes of a library that are searched for its version: it stands before the code for the GPUs.
_SEARCHED_BYTES, _CHUNK = 64 << 20, 1 << 20
NO_NCCL = "no rank here has loaded NCCL"
LIBRARY = re.compile(r"/lib(nccl|rccl)\.so(?:\.[0-9.]+)?$")
_STRING = re.compile(rb"[NR]CCL version (2\.[0-9]{1,3}\.[0-9]{1,3})[^0-9.]")
_NAMED = re.compile(r"\.so\.(2\.[0-9]{1,3}\.[0-9]{1,3})$")
_DISTRIBUTION = re.compile(
    r"nvidia_nccl_cu[0-9]+-(2\.[0-9]{1,3}\.[0-9]{1,3})(?:\.\w+)?\.dist-info"
)
#: The library of a torch that was linked with its own NCCL.
_INSIDE = re.compile(r"/libtorch_(cuda|hip)\.so$")


class NoNccl(Exception):
    """Why there is no NCCL, one line."""


def numbers(version: str) -> tuple[int, ...] | None:
    """``2.30.7`` as comparable numbers; None: not known."""
    return tuple(map(int, version.split("."))) if version else None


def library(pids: Iterable[int], uid: int) -> str | None:
    """The lowest version of NCCL in a user's processes; "": not known; None: no NCCL is loaded. It
    runs with the user's rights, because it opens the mapped files. Raises OSError.
    """
    try:
        return find_library(pids, uid)
    except NoNccl:
        return None


def find_library(pids: Iterable[int], uid: int) -> str:
    """As `library`; raises NoNccl if no process has loaded NCCL."""
    version_by_file: dict[tuple[str, str], str] = {}
    is_linked_in = has_unread = False
    for pid in pids:
        try:
            files = list(mapped_files(pid))
        except OSError:
            has_unread = True
            continue
        is_linked_in |= any(_INSIDE.search(path) for path, _ in files)
        for path, inode in files:
            is_library = LIBRARY.search(path.replace(" (deleted)", ""))
            if is_library and (path, inode) not in version_by_file:
                version_by_file[path, inode] = _version(pid, uid, path, inode)
    if not version_by_file and not is_linked_in:
        raise NoNccl("the processes cannot be read" if has_unread else NO_NCCL)
    # An unknown version comes first.
    return min(version_by_file.values(), key=lambda version: numbers(version) or (), default="")


def _version(pid: int, uid: int, path: str, inode: str) -> str:
    """A library's version, by the mapped file, else by its name or package; "": not known."""
    with contextlib.suppress(OSError), held_path(pid, uid, path) as (number, file_stat):
        if not stat.S_ISREG(file_stat.st_mode) or str(file_stat.st_ino) != inode:
            return ""
        with open(f"/proc/self/fd/{number}", "rb", buffering=0) as file:
            if version := _find_version(file):
                return version
    if named := _NAMED.search(path):
        return named[1]
    # site-packages/nvidia/nccl/lib/libnccl.so.2
    return packaged_version(pid, uid, path.rsplit("/", 4)[0] or "/")


def packaged_version(pid: int, uid: int, packages: str) -> str:
    """The version of the NCCL package in a site-packages, or ""."""
    with contextlib.suppress(OSError), held_path(pid, uid, packages) as (site, _):
        for name in os.listdir(f"/proc/self/fd/{site}"):
            if match := _DISTRIBUTION.fullmatch(name):
                return match[1]
    return ""


def _find_version(file: Any) -> str:
    tail = b""
    for _ in range(_SEARCHED_BYTES // _CHUNK):
        if not (chunk := file.read(_CHUNK)):
            break
        if match := _STRING.search(tail + chunk):
            return match[1].decode("ascii")
        tail = chunk[-64:]
    return ""

"""The faults of nodes by name: `nodeready lab up --profile h100 --fault ib-half-rate`.

The first start without a fault removes its changes from the node's disk. Each fault is a table
`[GROUP.NAME]` of faults.toml. To add one, add a table there, and a row to the table of
tests/lab/faults/test_fault_table.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nodeready.lab import image, processes
from nodeready.lab.boot import STASH
from nodeready.lab.hardware import Hardware, read_toml
from nodeready.lab.host import environment
from nodeready.lab.processes import Content
from nodeready.lab.profiles import PROFILES
from nodeready.lab.state import LabError

# --- A fault as data.

#: Group of faults, in the order of faults.toml -> its title, and the profiles of its faults that
#: name none.
GROUPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    group: (row["title"], tuple(row.get("profiles", PROFILES)))
    for group, row in read_toml("fault_groups").items()
}


@dataclass(frozen=True)
class Fault:
    """A fault of a node; faults.toml describes the fields that are not listed here."""

    name: str
    group: str  # a key of `GROUPS`
    about: str
    profiles: tuple[str, ...]
    hardware: Mapping[str, Any] = field(default_factory=dict)
    gone: Sequence[str] = ()
    start: str = ""  # its changes on the disk are undone at the next start
    programs: Sequence[Sequence[str]] = ()
    needs: Sequence[str] = ()


def _numbered(value: Any) -> Any:
    """The value with numbers for keys that are digits: TOML has only text."""
    if not isinstance(value, dict):
        return value
    return {int(key) if key.isdigit() else key: _numbered(inner) for key, inner in value.items()}


def _read() -> Iterator[Fault]:
    """The faults of faults.toml. Raises KeyError for an unknown group, TypeError for a field."""
    for group, faults in read_toml("faults").items():
        for name, row in faults.items():
            row["profiles"] = tuple(row.get("profiles", GROUPS[group][1]))
            row["hardware"] = _numbered(row.get("hardware", {}))
            yield Fault(name, group, **row)


# --- All faults by name, and how a node gets one.

FAULTS: dict[str, Fault] = {fault.name: fault for fault in _read()}


def find(name: str, profile: str) -> Fault:
    """The fault of this name. Raises LabError if a node of the profile cannot have it."""
    fault = FAULTS.get(name)
    if fault is None:
        raise LabError(f"no fault {name!r}; see `nodeready lab up --fault list`")
    if profile not in fault.profiles:
        raise LabError(
            f"a node of profile {profile} cannot have the fault {name}; "
            f"there it is: --profile {' or '.join(fault.profiles)}"
        )
    path = environment()["PATH"]
    if missing := [program for program in fault.needs if not shutil.which(program, path=path)]:
        raise LabError(f"the fault {name} needs {', '.join(missing)}, which is not installed here")
    return fault


def changes(name: str, profile: str) -> tuple[dict[str, Content], list[str]]:
    """The files that this fault changes, and those that it removes. Raises LabError."""
    fault = find(name, profile)
    files: dict[str, Content] = {}
    gone = list(fault.gone)
    if fault.hardware:
        healthy, broken = PROFILES[profile].hardware, PROFILES[profile].make(**fault.hardware)
        # The paths that only a healthy node has.
        lost = _paths(healthy) - _paths(broken)
        gone += sorted(path for path in lost if str(Path(path).parent) not in lost)
        gone += healthy.devices.keys() - broken.devices.keys()
        old = _files(healthy)
        files |= {path: text for path, text in _files(broken).items() if old.get(path) != text}
    if fault.start:
        files[f"{STASH}/fault"] = fault.start
    return files, gone


def _paths(hardware: Hardware) -> set[str]:
    """Everything below its trees and its files, with the directories that lead there."""
    paths = set(hardware.files)
    for tree, contents in hardware.trees.items():
        top = Path(STASH + tree)
        paths.add(str(top))
        for name in contents:
            path = top / name
            paths.add(str(path))
            paths |= {str(parent) for parent in path.parents if top in parent.parents}
    if hardware.start:
        paths.add(f"{STASH}/start")
    return paths


def _files(hardware: Hardware) -> dict[str, Content]:
    """All its files by their path on a node; those over the kernel's are below STASH."""
    files: dict[str, Content] = {
        f"{STASH}{tree}/{path}": content
        for tree, contents in hardware.trees.items()
        for path, content in contents.items()
        if isinstance(content, str)
    }
    for path, file in hardware.files.items():
        files[path] = (file.content, file.mode)
    for key, value in hardware.sysctls.items():
        files[f"{STASH}/proc/sys/{key}"] = f"{value}\n"
    files[f"{STASH}/kernel.log"] = image.kernel_log(*hardware.kernel_log)
    if hardware.start:
        files[f"{STASH}/start"] = hardware.start
    return files


def start_programs(name: str, pid: int) -> None:
    """Start the programs of this fault on the node. Raises LabError."""
    for module, *words in FAULTS[name].programs:
        done = processes.module(f"nodeready.lab.{module}", str(pid), *words)
        if done.returncode:
            raise LabError(f"the fault {name}: {done.stderr.strip()}")

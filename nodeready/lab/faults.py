"""What can be wrong with a node, by name: `nodeready lab up --profile h100 --fault ib-half-rate`.

A fault is data, and the node's disk is without it again at the first start without the fault. The
faults are in faults.toml beside this module, a table for each, `[GROUP.NAME]`. To add one, add a
table there, and a row to the table of tests/lab/faults/test_fault_table.py.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nodeready.lab import image, processes
from nodeready.lab.boot import STASH
from nodeready.lab.hardware import Hardware
from nodeready.lab.processes import Content
from nodeready.lab.profiles import PROFILES
from nodeready.lab.state import LabError, environment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# --- A fault as data.

#: All profiles.
ALL = tuple(PROFILES)

#: What the faults are of, in the order of faults.toml: the words for it, and the profiles that
#: have such faults, where a fault names none itself.
GROUPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "nvidia": ("NVIDIA's GPUs and their links", ("h100", "a100")),
    "amd": ("AMD's GPUs and their links", ("mi300x",)),
    "rdma": ("InfiniBand and RoCE ports", ("h100", "a100")),
    "nics": ("Interfaces and routes", ALL),
    "ports": ("TCP ports and the packet filter", ALL),
    "host": ("The host: clock, mounts, processes", ALL),
    "ptrace": ("Who may attach", ALL),
    "cores": ("Core dumps", ALL),
    "limits": ("Limits", ALL),
    "session": ("Logins of a job's user", ALL),
    "ssh": ("ssh between the nodes", ALL),
    "pdsh": ("pdsh", ALL),
    "tools": ("Debugging tools", ALL),
    "iommu": ("Kernel arguments", ALL),
    "gate": ("The node's own check", ALL),
}


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a node.

    group:    what it is of (`GROUPS`)
    about:    what is wrong, in one line
    profiles: the kinds of node that can have it
    hardware: what its hardware has instead: arguments of the function that makes the profile's
    gone:     files and directories that are missing
    start:    shell text that root runs on the node before its sshd; what it changes on the disk is
              taken back at the next start
    programs: modules of nodeready.lab to run beside, each with its words after the node's pid
    needs:    programs that this machine must have
    """

    name: str
    group: str
    about: str
    profiles: tuple[str, ...]
    hardware: Mapping[str, Any] = field(default_factory=dict)
    gone: tuple[str, ...] = ()
    start: str = ""
    programs: tuple[tuple[str, ...], ...] = ()
    needs: tuple[str, ...] = ()


def _numbered(value: Any) -> Any:
    """The same value, where a key that is a number is one: TOML has only text."""
    if not isinstance(value, dict):
        return value
    return {int(key) if key.isdigit() else key: _numbered(inner) for key, inner in value.items()}


def _read() -> Iterator[Fault]:
    """The faults of faults.toml. Raises KeyError for a group, TypeError for a field unknown."""
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for group, faults in data.items():
        for name, row in faults.items():
            yield Fault(
                name=name,
                group=group,
                about=row.pop("about"),
                profiles=tuple(row.pop("profiles", GROUPS[group][1])),
                hardware=_numbered(row.pop("hardware", {})),
                gone=tuple(row.pop("gone", ())),
                programs=tuple(tuple(words) for words in row.pop("programs", ())),
                needs=tuple(row.pop("needs", ())),
                **row,
            )


# --- All faults by name, and how a node gets one.

FAULTS: dict[str, Fault] = {fault.name: fault for fault in _read()}


def find(name: str, profile: str) -> Fault:
    """The fault of this name. Raises LabError where a node of the profile cannot have it."""
    fault = FAULTS.get(name)
    if fault is None:
        raise LabError(f"no fault {name!r}; see `nodeready lab up --fault list`")
    if profile not in fault.profiles:
        raise LabError(
            f"a node of profile {profile} cannot have the fault {name}; "
            f"there it is: --profile {' or '.join(fault.profiles)}"
        )
    path = environment()["PATH"]
    if missing := [one for one in fault.needs if not shutil.which(one, path=path)]:
        raise LabError(f"the fault {name} needs {', '.join(missing)}, which is not installed here")
    return fault


def changes(name: str, profile: str) -> tuple[dict[str, Content], list[str]]:
    """The files of a node with this fault, and what it does not have. Raises LabError."""
    fault = find(name, profile)
    files: dict[str, Content] = {}
    gone = list(fault.gone)
    if fault.hardware:
        kind = PROFILES[profile]
        made = kind.make(**fault.hardware)
        gone += _lost(kind.hardware, made)
        healthy, broken = _shown(kind.hardware), _shown(made)
        files |= {path: text for path, text in broken.items() if healthy.get(path) != text}
    if fault.start:
        files[f"{STASH}/fault"] = fault.start
    return files, gone


def _lost(healthy: Hardware, broken: Hardware) -> Iterator[str]:
    """What only a healthy node has: its directories, files and links, and its device files."""
    had, has = _paths(healthy), _paths(broken)
    yield from sorted(path for path in had - has if str(Path(path).parent) not in had - has)
    yield from healthy.devices.keys() - broken.devices.keys()


def _paths(hardware: Hardware) -> set[str]:
    """Everything below its trees and its files, with the directories that lead there."""
    found = set(hardware.files)
    for tree, contents in hardware.trees.items():
        top = Path(STASH + tree)
        found.add(str(top))
        for path in contents:
            inner = top / path
            found |= {str(inner), *(str(one) for one in inner.parents if top in one.parents)}
    if hardware.start:
        found.add(f"{STASH}/start")
    return found


def _shown(hardware: Hardware) -> dict[str, Content]:
    """All its files by their path on a node, below STASH where they are laid over the kernel's."""
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

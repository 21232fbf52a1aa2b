"""What can be wrong with a node, by name: `nodeready lab up --profile h100 --fault ib-half-rate`.

A fault is data, and nothing of it is on the node's disk: it comes back at every start of the
node, and is gone at the first start without it. To add one, add a `Fault` to one of the modules
below, and a row to the table of tests/faults/test_fault_table.py.

nvidia_faults, amd_faults   of the GPUs
network_faults              of interfaces, InfiniBand ports, TCP ports
host_faults                 of mounts, the clock, processes
"""

from __future__ import annotations

import shutil

from nodeready.lab import amd_faults, helper, host_faults, kernel, network_faults, nvidia_faults
from nodeready.lab.assemble import STASH
from nodeready.lab.errors import LabError
from nodeready.lab.fault import Fault
from nodeready.lab.hardware import Hardware
from nodeready.lab.helper import Content
from nodeready.lab.needs import environment
from nodeready.lab.profiles import PROFILES

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for faults in (
        nvidia_faults.FAULTS,
        amd_faults.FAULTS,
        network_faults.FAULTS,
        host_faults.FAULTS,
    )
    for fault in faults
}


def find(name: str, profile: str) -> Fault:
    """The fault of this name. Raises LabError where a node of the profile cannot have it."""
    fault = FAULTS.get(name)
    if fault is None:
        raise LabError(f"no fault {name!r}; there are: {', '.join(FAULTS)}")
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
        healthy, broken = _shown(kind.hardware), _shown(kind.make(**fault.hardware))
        gone += [path for path in healthy if path not in broken]
        files |= {path: text for path, text in broken.items() if healthy.get(path) != text}
    if fault.start:
        files[f"{STASH}/fault"] = fault.start
    return files, gone


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
    files[f"{STASH}/kernel.log"] = kernel.kernel_log(*hardware.kernel_log)
    files[f"{STASH}/start"] = hardware.start
    return files


def act(name: str, pid: int) -> None:
    """Start what this fault needs beside the node's files. Raises LabError."""
    for module, *words in FAULTS[name].programs:
        done = helper.module(f"nodeready.lab.{module}", str(pid), *words)
        if done.returncode:
            raise LabError(f"the fault {name}: {done.stderr.strip()}")

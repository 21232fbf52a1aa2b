"""What a node has for itself of /proc and /sys, and of the kernel's log.

It lies below STASH in the lab's layer; nodeready.lab.assemble lays it over the real ones.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nodeready.lab.assemble import REAL_SYS, STASH
from nodeready.lab.fresh import DMESG, KERNEL_DEFAULTS, KERNEL_LOG
from nodeready.lab.hardware import Tree
from nodeready.lab.layer import Image
from nodeready.lab.profiles import Profile

# A node shows none of these of this machine.
_HIDDEN = ("/sys/class/infiniband", "/sys/class/infiniband_verbs")


def build(image: Image, profile: Profile) -> None:
    """Write it to the layer."""
    hardware = profile.hardware
    image.directory(STASH, 0o755)
    image.file(f"{STASH}/proc/cmdline", profile.cmdline + "\n", 0o444)
    for path, content in _sysctls().items():
        image.file(f"{STASH}/proc/sys/{path}", content)
    for path, value in hardware.sysctls.items():
        image.file(f"{STASH}/proc/sys/{path}", f"{value}\n")
    image.directory(f"{STASH}/proc/sys/net", 0o555)
    for path, tree in trees(profile).items():
        image.tree(STASH + path, tree)
    for target in targets(profile):
        if target not in trees(profile):
            _complete(image, target)
    if hardware.start:
        image.file(f"{STASH}/start", hardware.start)
    # The kernel's log is one for the whole machine.
    image.file("/usr/bin/dmesg", DMESG, 0o755)
    image.file(f"{STASH}/kernel.log", kernel_log(*hardware.kernel_log))


def kernel_log(*more: tuple[float, str]) -> str:
    """What dmesg prints on a node: what any kernel says when it boots, and more."""
    return "".join(f"[{at:12.6f}] {text}\n" for at, text in sorted([*KERNEL_LOG, *more]))


def trees(profile: Profile) -> dict[str, Tree]:
    """What is laid over directories of /sys and /proc, by path."""
    over: dict[str, Tree] = {path: {} for path in _HIDDEN if os.path.isdir(path)}
    return {**over, **profile.hardware.trees}


def targets(profile: Profile) -> list[str]:
    """The directories of this machine that are hidden: each tree, or what there is above it.

    Without a directory above it in /proc, a tree is left out: nothing can be added there.
    """
    found = set()
    for tree in trees(profile):
        target = tree
        while not os.path.isdir(target):
            target = os.path.dirname(target)
        found.add(target)
    return sorted(found - {"/proc", "/sys"})


def _complete(image: Image, target: str) -> None:
    """A directory that is hidden only to add to it: links to all else that it really has.

    The kernel lets nobody add to /sys, so what is above the addition is replaced.
    """
    image.directory(REAL_SYS)
    for name in os.listdir(target):
        image.link(f"{STASH}{target}/{name}", f"{REAL_SYS}{target.removeprefix('/sys')}/{name}")


def _sysctls() -> dict[str, str]:
    """This machine's /proc/sys without `net`, as text by path; write-only keys are empty."""
    values: dict[str, str] = {}
    device = os.stat("/proc/sys").st_dev
    for directory, inner, files in os.walk("/proc/sys"):
        if directory == "/proc/sys":
            inner.remove("net")
        inner[:] = [d for d in inner if os.stat(f"{directory}/{d}").st_dev == device]
        for name in files:
            path = Path(directory, name)
            try:
                readable = path.stat().st_mode & stat.S_IROTH
                content = path.read_bytes().decode(errors="replace") if readable else ""
            except OSError:
                continue
            values[str(path.relative_to("/proc/sys"))] = content
    values.update({path: f"{value}\n" for path, value in KERNEL_DEFAULTS.items()})
    return values

"""Ending a lab, whatever state it is in: whole, half made, or left by a killed command."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from nodeready.lab import freezer, network, processes, state, syscalls
from nodeready.lab.errors import LabError


def down(name: str) -> bool:
    """End the lab of this name, or what is left of one; was there anything?

    Raises LabError when something of it cannot be ended.
    """
    directory = state.directory(name)
    if not directory.exists():
        return False
    with state.locked(directory):
        remove(directory)
    return True


def remove(directory: Path) -> None:
    """Leave nothing of the lab; its lock is ours."""
    clean(directory)
    shutil.rmtree(directory)
    remove_empty(directory)


def remove_empty(directory: Path) -> None:
    """Remove the lab's directory if nothing is in it, and those above if this was the last."""
    for path in (directory, state.ROOT, state.ROOT.parent):
        with contextlib.suppress(OSError):
            path.rmdir()


def clean(directory: Path) -> None:
    """End all processes of the lab, and empty its directory."""
    groups = freezer.group(directory.name)
    with contextlib.suppress(LabError):
        known = state.load(directory.name)
        if known:
            network.delete_interface(known.index)
        if not known or not known.slurm:
            groups = ""
    if groups:
        for pid in processes.of_lab(directory):
            processes.end(pid, wait_s=0.0)
        freezer.thaw(groups)
    processes.end_all(directory)
    if groups:
        freezer.remove(groups)
    fs = directory / "fs"
    while os.path.ismount(fs):
        _unmount(fs)
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _unmount(fs: Path) -> None:
    """Unmount, waiting for dead nodes to let go; somebody's open file only delays the end."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            syscalls.umount(str(fs))
            return
        time.sleep(0.01)
    syscalls.umount(str(fs), syscalls.DETACH)

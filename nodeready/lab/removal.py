"""Ends a lab in any state: whole, half made, or left by a killed command."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from nodeready.lab import network, processes, state, syscalls
from nodeready.lab.state import LabError


def down(name: str) -> bool:
    """End the lab of this name, or what remains of one; returns whether anything existed.

    Raises LabError when a part of it cannot be ended.
    """
    directory = state.directory(name)
    if not directory.exists():
        return False
    with state.locked(directory):
        remove(directory)
    return True


def remove(directory: Path) -> None:
    """Remove everything of the lab; this process holds its lock."""
    clean(directory)
    shutil.rmtree(directory)
    remove_empty(directory)


def remove_empty(directory: Path) -> None:
    """Remove the lab's directory if it is empty, and those above if it was the last."""
    with contextlib.suppress(OSError):
        directory.rmdir()
    if not state.names():
        network.restore_neighbour_limit()
    for path in (state.ROOT, state.ROOT.parent):
        with contextlib.suppress(OSError):
            path.rmdir()


def clean(directory: Path) -> None:
    """End all processes of the lab, and empty its directory."""
    with contextlib.suppress(LabError):
        if lab := state.load(directory.name):
            network.delete_interface(lab.index)
    processes.end_all(directory)
    fs = directory / "fs"
    while os.path.ismount(fs):
        _unmount(fs)
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _unmount(fs: Path) -> None:
    """Unmount, when the kernel has released dead nodes; an open file only delays the end."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            syscalls.umount(str(fs))
            return
        time.sleep(0.01)
    syscalls.umount(str(fs), syscalls.DETACH)

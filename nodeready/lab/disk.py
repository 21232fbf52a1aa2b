"""A node's disk: the upper layers of its overlays, and what a fault changes on them.

All writes of a node are in these layers, a few hundred files. Before a node starts with a fault,
the layers are copied; when the fault is in place, its changes are noted. At the next start each
path that is still as the fault made it gets its old content. So a fault may break any file, a
deploy may repair it, and other writes in the meantime stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from nodeready.lab import state
from nodeready.lab.boot import STASH
from nodeready.lab.processes import Files, encoded
from nodeready.lab.programs import run
from nodeready.lab.state import LabState, NodeState


class NodeDisk:
    """The disk of a node, while the node is off or starting."""

    def __init__(self, lab: LabState, node: NodeState) -> None:
        self.node = node
        self.home = state.directory(lab.name) / "fs" / "nodes" / node.name
        self._copy, self._note = self.home / "before", self.home / "fault.json"

    @property
    def layers(self) -> Path:
        """The directory of its upper layers; `generation` counts the disks."""
        return self.home / f"g{self.node.generation}"

    def prepare(self, keep: bool) -> None:
        """Make it empty, or remove what does not survive a power cycle."""
        if keep:
            self._undo_fault()
            for directory in (STASH, "/run", "/tmp", "/dev"):
                shutil.rmtree(self.layers / f"upper0{directory}", ignore_errors=True)
        elif self.layers.exists():
            # The kernel may still hold the old one: never use it again.
            shutil.rmtree(self.layers, ignore_errors=True)
            self.node.generation += 1
        self.home.mkdir(exist_ok=True)
        shutil.rmtree(self._copy, ignore_errors=True)

    def copy(self, files: Files) -> None:
        """Copy it before a fault, with the files that the node gets at its start."""
        self._copy.mkdir()
        for layer in self.layers.glob("upper*"):
            _copy(layer, self._copy / layer.name)
        for name, item in files.items():
            path = self._copy / "upper0" / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            data, mode = encoded(item)
            path.write_bytes(data)
            path.chmod(mode)

    def note_fault(self, is_new: bool) -> None:
        """Note how the fault has left the paths that it changed. is_new: the disk was empty."""
        if is_new:
            for directory in self._copy.glob("upper*/**/"):
                if (target := self.layers / directory.relative_to(self._copy)).is_dir():
                    _copy_owner(directory, target)
        before, after = _states(self._copy), _states(self.layers)
        changes = {
            path: after.get(path)
            for path in before.keys() | after.keys()
            if before.get(path) != after.get(path)
        }
        state.write(self._note, json.dumps(changes))

    def _undo_fault(self) -> None:
        """Undo what the fault of the last start has changed, where nothing else has since."""
        if not self._note.exists():
            return
        states, noted = _states(self.layers), json.loads(self._note.read_text())
        paths = sorted(path for path, entry in noted.items() if states.get(path) == entry)
        # The deepest first: a directory that the fault made goes when it is empty.
        for path in reversed(paths):
            current, old = self.layers / path, self._copy / path
            if current.is_dir() and not current.is_symlink():
                with contextlib.suppress(OSError):
                    current.rmdir()
            else:
                # Another file may have the place of a removed directory.
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    current.unlink()
                if os.path.lexists(old) and current.parent.is_dir() and not old.is_dir():
                    _copy(old, current)
        for path in paths:
            current, old = self.layers / path, self._copy / path
            if not os.path.lexists(current) and os.path.lexists(old):
                _copy(old, current)
            elif current.is_dir() and old.is_dir():
                _copy_owner(old, current)
        self._note.unlink()


def _states(disk: Path) -> dict[str, list[Any]]:
    """Each path of the disk's upper layers, with the values that differ after a change."""
    states = {}
    for layer in disk.glob("upper*"):
        for path in layer.rglob("*"):
            status = path.lstat()
            entry: list[Any] = [status.st_mode, status.st_uid, status.st_gid]
            if stat.S_ISDIR(status.st_mode):
                entry.append("trusted.overlay.opaque" in os.listxattr(path))
            else:
                entry += [status.st_rdev, status.st_size, status.st_mtime_ns]
            states[str(path.relative_to(disk))] = entry
    return states


def _copy(source: Path, target: Path) -> None:
    """Copy with all attributes: some say what of the layers below is hidden (overlayfs)."""
    run(["cp", "-a", "-T", str(source), str(target)]).check_returncode()


def _copy_owner(source: Path, target: Path) -> None:
    shutil.copystat(source, target)
    status = source.stat()
    os.chown(target, status.st_uid, status.st_gid)

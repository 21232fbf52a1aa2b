"""The lock file for which a rank polls, and the process that has it.

A library without a call of the kernel's that waits for the lock looks again and again (torch's
FileBaton, filelock). The path is a variable of the rank's innermost calls (`py_spy.LOCK`). A lock
that is the file itself lasts until the file is removed, even after its maker has been killed; the
makers known keep it open.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nodeready.agent import users_file
from nodeready.agent.proc import list_directory, parse_mounts
from nodeready.agent.stacks import processes, waits
from nodeready.agent.stacks.descendants import StackTarget
from nodeready.agent.stacks.processes import HANGS, contents, probe_each

#: The end of a wait for a file that is older than the rank, and that no process has open.
LEFT = ", left by an ended process"
#: File systems whose files only processes of this node can have open.
_LOCAL = frozenset(
    ["ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"]
)
#: Seconds to a second look at a file without a holder: it may pass from one process to another.
_AGAIN_S = 0.3


class _LockFile(NamedTuple):
    """What the file system tells of a lock file."""

    path: str
    kind: str  # of its file system; "": not known
    device: int
    inode: int
    owner: int
    age_s: float  # since it was last written

    @property
    def key(self) -> tuple[int, int]:
        return self.device, self.inode


def _probe(pid: int, path: str) -> list[Any] | None:
    """The fields of `_LockFile` for this path of a process, with the rights of its user; None: it
    has no such file. It may hang with the file system: for a fork.
    """
    with contextlib.suppress(OSError, KeyError, ValueError):
        path = os.path.join(os.readlink(f"/proc/{pid}/cwd"), path)
        rights = users_file.rights_of_process(pid) if os.geteuid() == 0 else None
        with users_file.with_rights(rights):
            status = os.stat(f"/proc/{pid}/root{path}")
        device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
        mounts = parse_mounts(contents(f"/proc/{pid}/mountinfo"))
        kind = next((mount.kind for mount in mounts if mount.device == device), "")
        age_s = time.time() - status.st_mtime
        return [path, kind, status.st_dev, status.st_ino, status.st_uid, age_s]
    return None


def _open_files(pid: int, names: Mapping[str, str]) -> list[tuple[int, int]]:
    """Device and inode of the files with these names that a process has open."""
    keys = []
    for number in list_directory(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.path.basename(os.readlink(f"/proc/{pid}/fd/{number}")) in names:
                status = os.stat(f"/proc/{pid}/fd/{number}")
                keys.append((status.st_dev, status.st_ino))
    return keys


def _holders(
    files: Mapping[int, _LockFile], deadline: float
) -> dict[tuple[int, int], list[int]] | None:
    """The processes that have each file open; None: not all processes were searched in time.

    Of a file that the kernel locks, that is the process with the lock; the rest waits.
    """
    names = {os.path.basename(file.path): "" for file in files.values()}
    pids = processes.pids()
    answers = probe_each(lambda pid: _open_files(pid, names), pids, deadline)
    holders = defaultdict(list)
    for pid, keys in answers.items():
        for key in keys if keys is not HANGS else ():
            holders[tuple(key)].append(pid)
    is_complete = all(answers.get(pid, HANGS) is not HANGS for pid in pids)
    return holders if is_complete else None


def observe(
    targets: Sequence[StackTarget],
    calls: dict[tuple[int, int], tuple[waits.WaitCall, str]],
    deadline: float,
) -> None:
    """Give the calls of targets that poll for a lock file its holders, and the phrase for it.
    calls: as of `waits.observe`; changed here
    """
    paths = {
        target.pid: target.dumps[-1].lock_file
        for target in targets
        if (target.pid, target.thread) in calls and target.dumps and target.dumps[-1].lock_file
    }
    if not paths:
        return
    rows = probe_each(lambda pid: _probe(pid, paths[pid]), list(paths), deadline)
    files = {pid: _LockFile(*row) for pid, row in rows.items() if row and row is not HANGS}
    holders = _holders(files, deadline)
    if holders is not None and any(file.key not in holders for file in files.values()):
        time.sleep(_AGAIN_S)
        holders = _holders(files, deadline)
    locks = contents("/proc/locks")
    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    for target in targets:
        file = files.get(target.pid)
        if file is None or holders is None:
            continue
        pids = holders.get(file.key, [])
        lockers = waits.lockers(locks, file.inode)
        known = [pid for pid in pids if pid in lockers] or [
            pid for pid in pids if pid not in files
        ]
        text = f"lock of {file.path}" + (f" ({file.kind})" if file.kind else "")
        if known:
            text += f", held by pid {waits.process_title(known[0])}"
        elif pids == [target.pid]:
            text += ", which it has open itself"
        elif not pids and os.geteuid() in (0, file.owner):
            # A file of a server may be open on another node.
            is_older = file.age_s > uptime_s - target.rank.process.start_s
            is_left = is_older and file.kind in _LOCAL
            text += LEFT if is_left else ", which no process of this node has open"
        key = target.pid, target.thread
        calls[key] = replace(calls[key][0], holders=tuple(known)), text

"""The lock file for which a rank polls, and the processes that have it open.

Its path is a variable of the rank's innermost calls (`py_spy.LOCK`). The lock of torch's FileBaton
and of filelock's SoftFileLock is the file itself: its maker has it open, and if the maker is
killed, the file remains. Without such a variable it is a file that a rank between two tries has
open and that another process has locked for writing, as a database's (SQLite's "File Locking").
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from nodeready.agent import users_file
from nodeready.agent.proc import list_directory, parse_mounts
from nodeready.agent.stacks import processes, waits
from nodeready.agent.stacks.descendants import StackTarget
from nodeready.agent.stacks.processes import HANGS, contents, probe_each

#: The end of a wait for a file of an ended process, if makers of such files keep them open.
LEFT = ", older than the process and open in none"
#: File systems whose files no other node has open.
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay")
#: System calls of a pause between two tries.
_PAUSES = ("sleep", "select", "poll")
#: Seconds between two searches, in which a file may pass from one process to another.
_AGAIN_S = 0.3


def _probe(target: StackTarget) -> list[Any] | None:
    """The path, device and inode of a target's lock file, and whether it is older than the target
    and all processes that may have it open are visible; None: there is no such file. For a fork.
    """
    root, path = f"/proc/{target.pid}/root", target.dumps[-1].lock_file
    with contextlib.suppress(OSError, LookupError, ValueError):
        path = os.path.join(os.readlink(f"/proc/{target.pid}/cwd"), path)
        rights = users_file.rights_of_process(target.pid) if os.geteuid() == 0 else None
        with users_file.with_rights(rights):
            file = os.open(root + path, os.O_PATH)
        status, about = os.stat(file), contents(f"/proc/self/fdinfo/{file}")
        # Not by its device: in an overlay a file has the device of its layer (kernel.org,
        # filesystems/overlayfs), which is no mount of the process.
        number = about.partition("mnt_id:")[2].split()[0]
        mounts = parse_mounts(contents(f"/proc/{target.pid}/mountinfo"))
        is_local = any(row.number == number and row.kind in _LOCAL for row in mounts)
        started = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + target.facts[-1].start_s
        is_visible = is_local and os.geteuid() in (0, status.st_uid)
        return [path, status.st_dev, status.st_ino, is_visible and status.st_mtime < started]
    return None


def _probe_open(pid: int, locked: Collection[tuple[int, int]]) -> list[Any] | None:
    """As `_probe`, of an open file that another has locked (`waits.write_locked`); for a fork."""
    inodes = {inode for inode, owner in locked if owner != pid}
    for number in list_directory(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/{pid}/fd/{number}")
            if status.st_ino in inodes and stat.S_ISREG(status.st_mode):
                path = os.readlink(f"/proc/{pid}/fd/{number}")
                return [path, status.st_dev, status.st_ino, False]
    return None


def _open_files(pid: int, names: Collection[str]) -> list[tuple[int, int]]:
    """Device and inode of the files with these names that a process has open."""
    files = []
    for number in list_directory(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.path.basename(os.readlink(f"/proc/{pid}/fd/{number}")) in names:
                status = os.stat(f"/proc/{pid}/fd/{number}")
                files.append((status.st_dev, status.st_ino))
    return files


def observe(
    targets: Sequence[StackTarget],
    calls: dict[tuple[int, int], tuple[waits.WaitCall, str]],
    deadline: float,
) -> None:
    """Set holders and phrase of calls that poll for lock files. calls: see `waits.observe`"""
    locked = waits.write_locked(contents("/proc/locks"))
    polling: dict[int, StackTarget] = {}
    for target in targets:
        call, _ = calls.get((target.pid, target.thread), (None, ""))
        is_pause = call and call.verb in _PAUSES and not call.objects
        if call and (target.dumps[-1].lock_file or (locked and is_pause)):
            polling[target.pid] = target

    def probe(pid: int) -> list[Any] | None:
        has_path = polling[pid].dumps[-1].lock_file
        return _probe(polling[pid]) if has_path else _probe_open(pid, locked)

    answers = probe_each(probe, list(polling), deadline)
    files = {pid: row for pid, row in answers.items() if row and row is not HANGS}
    names = {os.path.basename(path) for path, *_ in files.values()}
    openers: dict[tuple[int, int], dict[int, None]] = defaultdict(dict)
    for _ in range(2 if files else 0):
        pids = processes.pids()
        answers = probe_each(lambda pid: _open_files(pid, names), pids, deadline)
        if len(answers) < len(pids) or HANGS in answers.values():
            return
        for pid, keys in answers.items():
            for key in keys:
                openers[tuple(key)][pid] = None
        time.sleep(_AGAIN_S)
    locks = contents("/proc/locks")
    for pid, (path, device, inode, is_old) in files.items():
        pids = list(openers[device, inode])
        # Those that wait for a lock of the kernel's may have the file open, too.
        holders = [opener for opener in pids if opener in waits.lockers(locks, inode)]
        if polling[pid].dumps[-1].lock_file:
            holders = holders or [opener for opener in pids if opener not in files]
        elif not holders or pid in holders:
            continue
        end = f", held by pid {waits.process_title(holders[0])}" if holders else ""
        key = pid, polling[pid].thread
        text = f"lock of {path}{LEFT if is_old and not pids else end}"
        calls[key] = replace(calls[key][0], holders=tuple(holders)), text

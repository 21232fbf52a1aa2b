"""The core of our canary in systemd-coredump's store: coredumpctl(1), systemd-coredump(8)."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import time
from dataclasses import dataclass

from nodeready.proofs.attempt import environment
from nodeready.proofs.core_file import Mark
from nodeready.proofs.own import Own

_STORE = "/var/lib/systemd/coredump"
# The kernel does not wait for the handler, which takes a backtrace of its own first.
_KEEP_S = 15
_STORAGE = re.compile(r"^\s*Storage: (/\S+|journal|none)(?: \((.*)\))?\s*$", re.M)


@dataclass(frozen=True)
class Kept:
    """What systemd-coredump has of the canary.

    path: its file, or "journal"; "": nothing
    said: why there is no copy that gdb could read; "": there is one
    """

    path: str = ""
    said: str = ""


def kept(own: Own, pid: int, mark: Mark, home: str) -> Kept:
    """Wait for the canary's core, and copy it to ``home``/core.

    The stored file stays, for systemd-tmpfiles: only root may remove it.
    """
    until = time.monotonic() + min(_KEEP_S, own.left_s / 2)
    while True:
        path, said = _entry(own, pid, mark)
        if path or time.monotonic() > until:
            break
        time.sleep(0.3)
    if not path:
        return Kept(_stored(pid, mark), said)
    if path == "none" or said == "missing":
        return Kept("", f"coredumpctl: Storage: {path} {said}".rstrip())
    return Kept(path, _copy(own, pid, home))


def _entry(own: Own, pid: int, mark: Mark) -> tuple[str, str]:
    """Where the journal says that the core is, and how it is there; else "", and why not."""
    argv = ["coredumpctl", "--no-pager", "-1", "info", str(pid)]
    try:
        info = own.run(argv, 5, env=environment())
    except OSError as problem:
        return "", f"coredumpctl: {problem.strerror}"
    # An earlier process had the same number, and another command line.
    match = _STORAGE.search(info.out) if mark.word in info.out else None
    return (match[1], match[2] or "") if match else ("", f"coredumpctl: {info.first}")


def _copy(own: Own, pid: int, home: str) -> str:
    """Why there is no copy; "": there is one."""
    if not home:
        return "no directory for a copy of the core"
    argv = ["coredumpctl", "--no-pager", "-o", os.path.join(home, "core"), "dump", str(pid)]
    ended = own.run(argv, own.left_s, env=environment())
    return "" if ended.rc == 0 else f"coredumpctl: {ended.first or 'no answer'}"


def _stored(pid: int, mark: Mark) -> str:
    """The file of a journal that this user may not read: core.COMM.UID.BOOT.PID.TIME."""
    for path in glob.glob(f"{_STORE}/core.*.{mark.uid}.*.{pid}.*"):
        with contextlib.suppress(OSError):
            if os.lstat(path).st_mtime >= mark.since - 2:
                return path
    return ""

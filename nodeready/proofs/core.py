"""Prove that a crash leaves a core: crash a shell of our own, read its core, remove it."""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
from dataclasses import replace

from nodeready.proofs import core_pattern, core_store
from nodeready.proofs.attempt import environment
from nodeready.proofs.config import Config
from nodeready.proofs.core_scene import Scene
from nodeready.proofs.own import Own
from nodeready.proofs.seen import PROGRAM, REPORTERS, Core, Directory

_PATTERN = "/proc/sys/kernel/core_pattern"
_GDB_S = 60


def _directory(path: str) -> Directory | None:
    """The directory as this user finds it; None: its name is not known."""
    if core_pattern.UNKNOWN in path:
        return None
    shown = core_pattern.shown(path)
    try:
        mode = os.stat(os.path.join(path, "")).st_mode
        room = os.statvfs(path)
    except OSError as problem:
        return Directory(shown, problem.strerror or str(problem))
    return Directory(
        shown,
        mode=mode & 0o7777,
        writable=os.access(path, os.W_OK | os.X_OK),
        read_only=bool(room.f_flag & os.ST_RDONLY),
        free_bytes=room.f_bavail * room.f_frsize,
        free_files=room.f_favail if room.f_files else None,
    )


def _backtrace(own: Own, gdb: str, program: str, path: str) -> tuple[int, str]:
    """How many frames gdb reads from a core, and what it said when there is none."""
    argv = [gdb, "-batch", "-nx", "-ex", "bt", program, path]
    ended = own.run(argv, _GDB_S, env=environment())
    if ended.rc is None:
        return 0, f"no answer in {ended.seconds:.0f} s"
    frames = len(re.findall(r"^#[0-9]+ ", ended.out, re.M))
    return frames, "" if frames else ended.first or f"exit status {ended.rc}"


def _before(scene: Scene) -> Core:
    """What can be seen before the crash."""
    handler = core_pattern.program(scene.pattern)
    limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
    expected = "" if handler else core_pattern.shown(scene.expected())
    # With no second in it, the path is what a crash would replace (fs/coredump.c unlinks it).
    there = not handler and scene.pattern and os.path.lexists(scene.expected())
    return Core(
        pattern=core_pattern.shown(scene.pattern),
        handler=core_pattern.shown(handler),
        handler_there=not handler or os.access(handler, os.X_OK),
        skipped=f"{expected} is there, and a crash would replace it" if there else "",
        # Of a process that is not, these files are root's, though not their directory.
        dumpable=os.stat(f"/proc/{scene.pid}/environ").st_uid == os.geteuid(),
        limit_bytes=None if limit == resource.RLIM_INFINITY else limit,
        expected=expected,
        gdb=shutil.which("gdb") or "",
    )


def _after(scene: Scene, seen: Core) -> Core:
    """Crash it, and see what is on the disk, where it stays."""
    seen = replace(seen, dumped=scene.crash())
    if not seen.handler:
        seen = replace(seen, directory=_directory(os.path.dirname(scene.expected())))
    elif os.path.basename(seen.handler) == PROGRAM and seen.dumped:
        kept = core_store.kept(scene.own, scene.pid, scene.mark, scene.home)
        seen = replace(seen, path=core_pattern.shown(kept.path), gdb_said=kept.said)
    found = scene.cores()
    if not found:
        return seen
    core = found[-1]
    at_home = os.path.dirname(core.path) == scene.home
    relative = not seen.handler and not os.path.isabs(scene.pattern)
    seen = replace(
        seen,
        path=seen.path or core_pattern.shown(core.path),
        stray=at_home and not relative and not seen.path,
        size_bytes=core.size_bytes,
        whole_bytes=core.whole_bytes,
    )
    if seen.gdb and core.size_bytes >= (core.whole_bytes or sys.maxsize):
        frames, said = _backtrace(scene.own, seen.gdb, scene.program, core.path)
        seen = replace(seen, frames=frames, gdb_said=said)
    return seen


def prove(own: Own, config: Config) -> Core:
    """Crash a canary and see what is left of it."""
    with open(_PATTERN, encoding="utf-8", errors="surrogateescape") as file:
        pattern = file.read().rstrip("\n")
    handler = core_pattern.program(pattern)
    if os.path.basename(handler) in REPORTERS:
        shown = core_pattern.shown(handler)
        why = f"{shown} reports each crash to somebody, so nothing was crashed"
        return Core(core_pattern.shown(pattern), shown, skipped=why)
    scene = Scene(own, pattern)
    own.at_end(scene.tidy)
    try:
        scene.begin()
        seen = _before(scene)
        seen = seen if seen.skipped else _after(scene, seen)
    finally:
        left = scene.tidy()
    return replace(seen, left=left)

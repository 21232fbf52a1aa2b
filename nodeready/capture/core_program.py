"""The program on the node: list the cores, or read some of them with gdb.

It only reads. Each answer is a line (`proofs/wire.py`) as soon as it is there, so that a core that
takes too long costs itself.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pwd
import resource
import shutil
import signal
import time
import zlib
from dataclasses import dataclass, replace

from nodeready.capture import backtrace, cores
from nodeready.capture.core_reader import NoCore, Reader, open_regular
from nodeready.capture.core_seen import Core, Done
from nodeready.proofs import core_pattern, wire
from nodeready.proofs.own import Own

#: Younger than this, a core that is too short may still be written.
_FRESH_S = 120
_GDB_MISSING = "gdb is not installed (nodeready deploy installs it)"


@dataclass(frozen=True)
class Config:
    """What the program has to do.

    nonce:    random word with which each of its lines begins
    tag:      ``nodeready:RUN``
    limit_s:  seconds after which it must have ended
    patterns: of the policy: where else cores may lie
    since_s:  only those of the last so many seconds; 0: all
    wanted:   the cores to read, as (path, inode, modified_ns, size_bytes); (): list them
    job:      read only those of this job; "": all
    most:     read no more than so many
    """

    nonce: str
    tag: str
    limit_s: int
    patterns: tuple[str, ...] = ()
    since_s: float = 0
    wanted: tuple[tuple[str, int, int, int], ...] = ()
    job: str = ""
    most: int = 20


def main(config: Config) -> None:
    """List, or read what is wanted."""
    with contextlib.suppress(OSError):
        os.nice(19)
    # gdb itself may crash: no core of that.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if not config.wanted:
        found = cores.listing(config.patterns, config.since_s)
        print(wire.line(config.nonce, "listing", found), flush=True)
        return
    own = Own(config.tag, config.limit_s)

    def leave(number: int, frame: object) -> None:
        own.end()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    with own:
        _read_all(own, config)


def _read_all(own: Own, config: Config) -> None:
    read = left = unknown = 0
    for number, wanted in enumerate(config.wanted):
        if read == config.most:
            left = len(config.wanted) - number
            break
        seen = _read(own, config, number, wanted)
        if not config.job or seen.job == config.job:
            read += 1
            print(wire.line(config.nonce, "core", seen), flush=True)
        elif not seen.job:
            unknown += 1
    print(wire.line(config.nonce, "done", Done(read, left, unknown)), flush=True)


def _read(own: Own, config: Config, number: int, wanted: tuple[str, int, int, int]) -> Core:
    """One core, whatever is wrong with it."""
    path, began = wanted[0], time.monotonic()
    seen = Core(number)
    try:
        owner = os.lstat(path).st_uid
        file = open_regular(path, owner)
    except OSError as problem:
        return replace(seen, unread=_denied(problem))
    try:
        known = os.fstat(file)
        if (known.st_ino, known.st_mtime_ns, known.st_size) != wanted[1:]:
            return replace(seen, unread="it has changed since it was listed: still being written?")
        core = Reader(file)
        seen = _told(seen, core)
        if config.job and seen.job != config.job:
            return seen
        seen = _backtrace(own, seen, core, known)
    except NoCore as problem:
        seen = replace(seen, unread=_compressed(path) or str(problem))
    except OSError as problem:
        seen = replace(seen, unread=problem.strerror or str(problem))
    finally:
        os.close(file)
    return replace(seen, seconds=round(time.monotonic() - began, 3))


def _denied(problem: OSError) -> str:
    if isinstance(problem, PermissionError):
        return "not permitted to read it: it is another user's (its owner or root may: --sudo)"
    if isinstance(problem, FileNotFoundError):
        return "it was removed since it was listed"
    return problem.strerror or str(problem)


def _compressed(path: str) -> str:
    if not path.endswith((".zst", ".lz4", ".xz")):
        return ""
    tool = "" if shutil.which("coredumpctl") else ", which is not installed,"
    return f"it is compressed: coredumpctl{tool} unpacks it (coredumpctl dump PID -o FILE)"


def _told(seen: Core, core: Reader) -> Core:
    """With what its notes tell."""
    notes = core.notes
    rank, job = core.rank()
    user = ""
    if notes.uid is not None:
        with contextlib.suppress(KeyError, OverflowError):
            user = pwd.getpwuid(notes.uid).pw_name
    return replace(
        seen,
        whole_bytes=core.whole_bytes,
        pid=notes.pid,
        signal=notes.signal,
        uid=notes.uid,
        user=user,
        comm=notes.comm,
        program=core.notes.executable()[1],
        command=notes.command,
        threads=notes.threads,
        rank=rank,
        job=job,
    )


def _backtrace(own: Own, seen: Core, core: Reader, known: os.stat_result) -> Core:
    """With gdb's backtrace, or why there is none."""
    short = core.whole_bytes is None or known.st_size < core.whole_bytes
    cut_off = ""
    if short:
        of = "" if core.whole_bytes is None else f" of {core.whole_bytes}"
        cut_off = f"it is cut off at {known.st_size}{of} bytes"
        if time.time() - known.st_mtime < _FRESH_S:
            cut_off += ", or still being written"
    gdb = backtrace.find_gdb()
    if not gdb:
        return replace(seen, unread="; ".join(filter(None, (cut_off, _GDB_MISSING))))
    if own.left_s < 1:
        return replace(seen, unread="not read: the time was over")
    text, error, warning, cut = backtrace.take(own, gdb, core, known.st_uid)
    packed = base64.b64encode(zlib.compress(text.encode("utf-8"))).decode("ascii") if text else ""
    doubts = "; ".join(filter(None, (cut_off, warning)))
    if error:
        why = "; ".join(filter(None, (cut_off, error, warning)))
        return replace(seen, unread=core_pattern.shown(why))
    return replace(seen, text=packed, warning=doubts, cut=cut)

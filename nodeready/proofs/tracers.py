"""Prove that gdb and strace attach to a process, and that it goes on when they have left."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Callable

from nodeready.proofs.attempt import attempt, complaint, guards
from nodeready.proofs.config import Config
from nodeready.proofs.own import Ended, Own, answers, status
from nodeready.proofs.seen import Attempt, Tracers

# gdb reads the symbols of Python and of all its libraries first.
_GDB_LIMIT_S, _STRACE_LIMIT_S = 20, 10


def _no_backtrace(ended: Ended) -> str:
    # gdb ends well whatever became of the process that it was to attach to.
    if re.search(r"^#0 ", ended.out, re.MULTILINE):
        return ""
    return complaint(ended)


def _no_calls(ended: Ended) -> str:
    # Interrupted, it ends by that signal, or by its number, or with 0: by its version.
    if "attached" in ended.err and "read(0," in ended.err:
        return ""
    return complaint(ended)


def _gdb(own: Own, canary: subprocess.Popen[bytes]) -> Attempt | None:
    # One that gdb attaches to in state D stays stopped for good when gdb is killed.
    if status(canary.pid).state == "D":
        return None
    argv = [shutil.which("gdb") or "", "-nx", "-batch", "-p", str(canary.pid), "-ex", "bt"]
    return attempt(own, canary, argv, _GDB_LIMIT_S, wrong=_no_backtrace)


def _strace(own: Own, canary: subprocess.Popen[bytes]) -> Attempt | None:
    text = bytearray()
    told: list[bytes] = []

    def heard(process: subprocess.Popen[bytes], stream: int, piece: bytes) -> None:
        """Let the canary make system calls under its eyes, then interrupt it: so it detaches."""
        text.extend(piece[:4096])
        if not told and b"attached" in text:
            told.append(b"go on")
            answers(canary)
        if len(told) == 1 and b"read(0," in text:
            told.append(b"leave")
            process.send_signal(signal.SIGINT)

    argv = [shutil.which("strace") or "", "-p", str(canary.pid)]
    return attempt(own, canary, argv, _STRACE_LIMIT_S, wrong=_no_calls, heard=heard)


def _try(
    own: Own, tool: str, on: Callable[[Own, subprocess.Popen[bytes]], Attempt | None]
) -> Attempt | None:
    """A tool on a canary of its own. Raises OSError when none comes up."""
    if not shutil.which(tool):
        return Attempt("")
    if own.left_s < 1:
        return None
    canary = own.canary()
    try:
        return on(own, canary)
    finally:
        own.stop(canary)


def prove(own: Own, config: Config) -> Tracers:
    """One after the other, each on a canary of its own: what gdb leaves is not strace's fault."""
    gdb = None
    try:
        gdb = _try(own, "gdb", _gdb)
        return Tracers(guards(), "", gdb, _try(own, "strace", _strace))
    except OSError as problem:
        return Tracers(guards(), str(problem), gdb, None)

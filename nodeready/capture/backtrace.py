"""Ask gdb where the threads of one core stood."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess

from nodeready.capture.core_reader import Reader, program_problem
from nodeready.proofs.attempt import environment
from nodeready.proofs.own import Own

#: Seconds for one core.
LIMIT_S = 60
FRAMES, THREADS = 200, 500
#: Characters of gdb's words that are kept.
TEXT = 1 << 20
#: The headings in gdb's text; `nodeready/backtraces.py` reads it by them.
CRASHED, EVERY, PYTHON = "== the thread of the signal", "== every thread", "== Python"

# A frame whose function is known.
_NAMED = re.compile(r"^#[0-9]+ +(?:0x[0-9a-f]+ in |(?!0x))[^?\s]", re.M)

# What gdb says of most cores, whatever is wrong with them.
_NOISE = ("Undefined command", "warning: Unexpected size of section")


def find_gdb() -> str:
    """gdb's path; "": it is not installed."""
    return shutil.which("gdb") or ""


def rights(owner: int) -> dict[str, object]:
    """How gdb is started: root does not read what a user can write, but lets that user read it."""
    if os.geteuid() != 0 or owner == 0:
        return {}
    try:
        known = pwd.getpwuid(owner)
        groups = os.getgrouplist(known.pw_name, known.pw_gid)
        return {"user": owner, "group": known.pw_gid, "extra_groups": groups}
    except KeyError:
        return {"user": owner, "group": owner, "extra_groups": []}


def command(gdb: str, program: str, core: str, threads: int) -> list[str]:
    """gdb in batch; it reads no start-up file and asks nobody anything."""
    said = [f"set backtrace limit {FRAMES}", "set print elements 100", "set print repeats 10"]
    last = max(1, min(threads, THREADS))
    asked = [
        *(f"echo \\n{CRASHED}\\n", "bt"),
        *(f"echo \\n{EVERY}\\n", f"thread apply 1-{last} bt"),
        *(f"echo \\n{PYTHON}\\n", "py-bt"),
    ]
    words = [gdb, "-batch", "-nx", "-iex", "set width 0", "-iex", "set height 0"]
    for line in (*said, *asked):
        words += ["-ex", line]
    words += [
        f"--core={core}",
        *([f"--exec={program}", f"--symbols={program}"] if program else ()),
    ]
    quiet = shutil.which("ionice")
    return [quiet, "-c", "3", "-t", *words] if quiet else words


class _Kept:
    """What gdb says, as far as it is kept."""

    def __init__(self) -> None:
        self.out, self.more = bytearray(), False

    def hear(self, process: subprocess.Popen[bytes], stream: int, piece: bytes) -> None:
        if stream == 1:
            self.more = self.more or len(self.out) + len(piece) > TEXT
            self.out += piece[: max(0, TEXT - len(self.out))]


def take(own: Own, gdb: str, core: Reader, owner: int) -> tuple[str, str, str, bool]:
    """gdb's text, why there is none, what is doubtful about it, and whether it is cut.

    core:  it is handed to gdb as an open file: no name that somebody can change meanwhile
    owner: user id of its file, with whose rights gdb runs
    """
    address, program = core.notes.executable()
    warning = program_problem(program, core.build_id(address) if address else "")
    path = "" if warning else program
    argv = command(gdb, path, f"/proc/self/fd/{core.number}", core.notes.threads)
    kept = _Kept()
    limit_s = min(LIMIT_S, own.left_s)
    how: dict[str, object] = {"pass_fds": (core.number,), "env": environment(), "cwd": "/"}
    try:
        ended = own.run(argv, limit_s, kept.hear, **how, **rights(owner))
    except OSError as problem:
        return "", f"{gdb}: {problem.strerror or problem}", warning, False
    text = bytes(kept.out).decode("utf-8", "replace")
    if _NAMED.search(text):
        if ended.rc is None:
            kept.more = True
            warning = warning or f"gdb was ended after {limit_s:.0f} s: not every thread is there"
        return text, "", warning, kept.more
    if ended.rc is None:
        return "", f"gdb had no backtrace after {limit_s:.0f} s and was ended", warning, False
    rows = [row.strip() for row in ended.err.splitlines() if row.strip()]
    said = [row for row in rows if not row.startswith(_NOISE)]
    why = "gdb finds no function in it" + (f": {said[-1][:200]}" if said else "")
    return "", why, warning, False

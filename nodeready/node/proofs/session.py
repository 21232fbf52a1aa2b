"""A new session of the job's user on the node, through PAM as every login, and its limits."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass

from nodeready.node.proofs.attach import first_number
from nodeready.node.runtime import KEPT_BYTES, Ended, Supervisor
from nodeready.subjects.proof.facts import Config, Limit, SessionLimits

ITEMS = {
    "core": resource.RLIMIT_CORE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
}
# Bit of CAP_SYS_RESOURCE (capabilities(7)): without it nobody may raise a hard limit.
_CAP_SYS_RESOURCE = 1 << 24


def limits_of(pid: int) -> tuple[Limit, ...]:
    """The limits of a process, in the order of ITEMS. Raises OSError, ValueError, KeyError.

    From /proc, which everybody may read: prlimit() asks for the right to trace the process.
    """
    names = {"core": "Max core file size", "memlock": "Max locked memory"}
    names["nofile"] = "Max open files"
    with open(f"/proc/{pid}/limits", encoding="ascii", errors="replace") as file:
        rows = {row[:25].strip(): row[25:].split() for row in file}
    values = [rows[names[item]][:2] for item in ITEMS]
    return tuple(
        Limit(*(-1 if value == "unlimited" else int(value) for value in pair)) for pair in values
    )


def _before() -> tuple[Limit, ...]:
    """The limits of the su that opened this session: they come from PAM, before any profile."""
    pid = os.getppid()
    try:
        for _up in range(4):
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            if name == "su":
                return limits_of(pid)
            pid = int(rest.split()[1])
    except (OSError, ValueError, KeyError, IndexError):
        pass
    return ()


def _ceiling() -> tuple[int, ...]:
    """sshd's hard limits, or process 1's, where nobody may raise them."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        sets = dict(row.split(":", 1) for row in file if row.startswith("Cap"))
    if int(sets["CapBnd"], 16) & _CAP_SYS_RESOURCE:
        return ()
    try:
        return tuple(limit.hard for limit in limits_of(first_number("/run/sshd.pid") or 1))
    except (OSError, ValueError, KeyError):
        return ()


def prove(supervisor: Supervisor, config: Config) -> SessionLimits:
    """The limits of this session, after PAM and the user's profile. It only looks."""
    core, memlock, nofile = (Limit(*resource.getrlimit(number)) for number in ITEMS.values())
    nr_open = first_number("/proc/sys/fs/nr_open")
    return SessionLimits(core, memlock, nofile, _before(), _ceiling(), nr_open)


@dataclass(frozen=True)
class Broken:
    """In place of an observation: the exception of ours that ended the proof."""

    broken: str


def run(
    supervisor: Supervisor,
    user: str,
    made: Callable[[int], tuple[str, str]],
    line: Callable[[str], None],
) -> Ended:
    """Run a program in a new session of this user, as root; its standard input stays open.

    made: gives the script, and the program's text, which is read at the given file descriptor
    line: gets each line of its output as it comes

    Through ``su -``: sudo sets the core limit of what it runs to 0 (since 1.9.9), and setpriv
    gives no limits at all. When we came through sudo ourselves, the limit goes back to what it was
    before.
    """
    _undo_sudo()
    # The session's standard input: its end tells the program that we are gone.
    read, write = os.pipe()
    # The program's text has a pipe of its own: a profile may read the standard input.
    text, source = os.pipe()
    try:
        script, told = made(text)
        threading.Thread(target=_tell, args=(source, told.encode()), daemon=True).start()
        kept = bytearray()

        def on_output(_: object, stream: int, piece: bytes) -> None:
            if stream == 1:
                *rows, rest = bytes(kept + piece).split(b"\n")
                kept[:] = rest[-KEPT_BYTES:]
                for row in rows:
                    line(row.decode("utf-8", "replace"))

        argv = ["su", "-", user, "-s", "/bin/sh", "-c", script]
        # A second is left to end what hangs, and to say so.
        limit_s = supervisor.left_s - 1
        return supervisor.run(argv, limit_s, on_output, stdin=read, pass_fds=(text,))
    except OSError as problem:
        return Ended(127, "", f"su: {problem.strerror}", 0.0)
    finally:
        for number in (read, write, text):
            os.close(number)


def _tell(number: int, text: bytes) -> None:
    """Write all of it, as fast as it is read; a reader that is gone is its own trouble."""
    with contextlib.suppress(OSError), os.fdopen(number, "wb") as file:
        file.write(text)


def _undo_sudo() -> None:
    """Give ourselves the core limit of whoever called sudo, in place of sudo's 0."""
    caller = _above_sudo() if "SUDO_UID" in os.environ else None
    if caller is not None:
        # Where it cannot be raised, the check of the limits tells.
        with contextlib.suppress(OSError, ValueError, KeyError):
            core = limits_of(caller)[0]
            resource.setrlimit(resource.RLIMIT_CORE, (core.soft, core.hard))


def _above_sudo() -> int | None:
    """The first of our ancestors that sudo did not start; None: there is none.

    With use_pty, sudo is two processes, and sets its own core limit to 0, too.
    """
    pid, below = os.getppid(), False
    with contextlib.suppress(OSError, ValueError, IndexError):
        for _up in range(32):
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            if below and name != "sudo":
                return pid
            below = below or name == "sudo"
            pid = int(rest.split()[1])
    return None

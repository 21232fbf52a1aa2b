"""A new session of the job's user on the node, as a login or a job gets one: through PAM."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass

from nodeready.proofs import limits
from nodeready.proofs.own import KEPT_BYTES, Ended, Own


@dataclass(frozen=True)
class Broken:
    """A proof that ended with an exception of ours: its words."""

    broken: str


def run(
    own: Own, user: str, made: Callable[[int], tuple[str, str]], line: Callable[[str], None]
) -> Ended:
    """Run a program in a new session of this user, as root; its standard input stays open.

    made: the script and the program's text, which is read at this file descriptor
    line: gets each line of its output as it comes

    Through ``su -``: sudo sets the core limit of what it runs to 0 (since 1.9.9), and setpriv
    gives no limits at all. When we came through sudo ourselves, the limit goes back to what it was
    before.
    """
    _undo_sudo()
    # su's own environment is the user's; our input is the pipe that tells it when we are gone.
    read, write = os.pipe()
    # Not over that input: a profile may read it.
    text, source = os.pipe()
    try:
        script, told = made(text)
        threading.Thread(target=_tell, args=(source, told.encode()), daemon=True).start()
        kept = bytearray()

        def heard(_: object, stream: int, piece: bytes) -> None:
            if stream == 1:
                *rows, rest = bytes(kept + piece).split(b"\n")
                kept[:] = rest[-KEPT_BYTES:]
                for row in rows:
                    line(row.decode("utf-8", "replace"))

        argv = ["su", "-", user, "-s", "/bin/sh", "-c", script]
        # A second is left to end what hangs, and to say so.
        limit_s = own.left_s - 1
        return own.run(argv, limit_s, heard, stdin=read, pass_fds=(text,))
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
            core = limits.of(caller)[0]
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

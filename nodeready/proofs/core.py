"""Prove that a crash leaves a core: crash a shell of our own, find its file, read it, remove it.

Only that one file is ever removed: one that holds our canary's words, or that bears its number.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import secrets
import select
import shutil
import signal
import stat
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nodeready.proofs.config import Config
from nodeready.proofs.own import Own

_KERNEL = Path("/proc/sys/kernel")
#: Handlers that keep a report, for which somebody is told, where we could not remove it.
_REPORTERS = ("apport", "abrt-hook-ccpp")
_SYSTEMD = "systemd-coredump"
_STORE = "/var/lib/systemd/coredump"
#: Seconds for a handler to put the core away: the kernel does not wait for it.
_KEEP_S = 10
_DUMP_S, _GDB_S = 10, 60
#: The head of a core, with the command line of what crashed (NT_PRPSINFO).
_HEAD_BYTES = 65536
_UNKNOWN = "\0"


@dataclass(frozen=True)
class Directory:
    """Where the core was to be written.

    mode:       permission bits; None: there is no such directory
    writable:   for the user
    free_bytes: what the user may still write there; None: not known
    free_files: files that can still be made there; None: the file system has no such number
    """

    path: str
    mode: int | None
    writable: bool
    read_only: bool
    free_bytes: int | None
    free_files: int | None


@dataclass(frozen=True)
class Core:
    """What the crash of a sleeping /bin/sh left.

    pattern:        kernel.core_pattern as this session sees it
    handler:        the program that the pattern pipes to; "": it names a file
    handler_there:  that program exists
    skipped:        why nothing was crashed; "": something was
    dumped:         the kernel says that it wrote a core (WCOREDUMP), whole or not, or piped it
    dumpable:       the canary was; False: fs.suid_dumpable or an unreadable /bin/sh
    limit_bytes:    the session's soft core limit; None: unlimited
    expected:       the path that the pattern gives, ``*`` for what only the kernel knows
    path:           where the core was found; "": nowhere
    stray:          the core lay in the canary's working directory, not where the pattern says
    size_bytes:     of the file found
    whole_bytes:    what its own headers say that it should have; None: it has none
    directory:      of ``expected``; None for a handler
    frames:         of the backtrace that gdb read from it
    gdb:            gdb's path; "": not installed
    gdb_said:       what gdb (or coredumpctl) complained about
    left:           the path that could not be removed, and why; "": nothing is left
    """

    pattern: str
    handler: str
    handler_there: bool
    skipped: str
    dumped: bool
    dumpable: bool
    limit_bytes: int | None
    expected: str
    path: str
    stray: bool
    size_bytes: int
    whole_bytes: int | None
    directory: Directory | None
    frames: int
    gdb: str
    gdb_said: str
    left: str


def prove(own: Own, config: Config) -> Core:
    """Crash a canary and see what is left of it."""
    raise NotImplementedError

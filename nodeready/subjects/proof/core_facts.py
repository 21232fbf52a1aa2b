"""The core of a canary that crashed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nodeready.core import wire

#: Seconds that the kernel may take to write the core of a shell, some 400 kB.
DUMP_S = 10
#: The program of core_pattern that keeps cores in its own store.
PROGRAM = "systemd-coredump"
#: The programs of core_pattern that store crash reports and notify a person.
REPORTERS = ("apport", "abrt-hook-ccpp")
#: Bytes of a core limit below which the kernel writes no core: most machines' ELF_EXEC_PAGESIZE.
MIN_CORE_LIMIT = 4096
#: Minimum bytes of a core of /bin/sh, where the core's headers do not give its size.
SHELL_CORE_BYTES = 65536


@dataclass(frozen=True)
class CoreDirectory:
    """The directory in which the core was to be written."""

    path: wire.Path
    error: wire.Line = ""  # why the path cannot be used as a directory; "": it can
    mode: wire.Count = 0  # permission bits
    writable: bool = False  # for the user
    read_only: bool = False
    free_bytes: wire.Number = 0  # bytes that the user may still write there
    # files that can still be made there; None: the file system does not count files
    free_files: wire.Number | None = None


@dataclass(frozen=True)
class ProvedCore:
    """The core of a crashed canary, a sleeping /bin/sh."""

    JSON_KEYS: ClassVar = {"leftover": "left"}

    pattern: wire.Path  # kernel.core_pattern in the session
    handler: wire.Path = ""  # the program to which the pattern pipes; "": the pattern names a file
    handler_there: bool = True  # that program exists
    skipped: wire.Line = ""  # why the canary was not crashed; "": it was
    # the kernel says that it wrote a core, whole or not, or piped one (WCOREDUMP); None: it had
    # not finished after ``dump_s`` seconds
    dumped: bool | None = False
    dump_s: wire.Count = DUMP_S
    dumpable: bool = True  # the canary was dumpable; False: its user may not read /bin/sh
    limit_bytes: wire.Number | None = None  # the session's soft core limit; None: unlimited
    # the path by the pattern, with ``*`` for a part that only the kernel knows
    expected: wire.Path = ""
    path: wire.Path = ""  # of the core that was found; "": none was found
    # the core was in the working directory, which is not the pattern's directory
    stray: bool = False
    size_bytes: wire.Number = 0  # of the core that was found
    # the size that the core's own headers give; None: they give none
    whole_bytes: int | None = None
    # of ``expected``; None for a handler, or when only the kernel knows its name
    directory: CoreDirectory | None = None
    gdb: wire.Path = ""  # gdb's path; "": not installed
    gdb_said: str = ""  # the error of gdb or coredumpctl
    frames: wire.Count = 0  # of the backtrace that gdb read from the core
    leftover: str = ""  # the files that could not be removed, and why; "": none

    @property
    def is_complete(self) -> bool:
        """Whether there is a core, and its headers name no missing part."""
        if self.whole_bytes is None:
            return bool(self.path) and self.handler != "" and not self.stray
        return bool(self.path) and self.size_bytes >= self.whole_bytes

    @property
    def is_cut_by_limit(self) -> bool:
        """Whether the session's core limit is the reason that there is no complete core.

        The kernel applies the limit when it writes a file, and not when it pipes a core.
        systemd-coredump applies it as upstream builds the program (RHEL, SLES).
        """
        limit = self.limit_bytes
        if limit is None or self.skipped or self.dumped is None or self.is_complete:
            return False
        if self.handler and self.dumped:
            by_systemd = self.handler.endswith(f"/{PROGRAM}")
            return by_systemd and not self.path and limit < MIN_CORE_LIMIT
        if not self.dumped:
            return not self.handler and limit < MIN_CORE_LIMIT
        return bool(self.path) and limit < (self.whole_bytes or SHELL_CORE_BYTES)

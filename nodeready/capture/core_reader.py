"""One core file, opened once: its header, its notes, and pieces of its memory.

What the file is, is decided on the open file: its name may be another file's a moment later.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from nodeready.capture import core_notes
from nodeready.capture.core_notes import NoCore, Notes, Segment
from nodeready.proofs import core_file

#: Bytes of notes that are read: a thread has 3 to 11 kB of them.
_NOTES_BYTES = 16 << 20
#: Bytes of an ELF file in which its build id stands.
_IMAGE_BYTES = 4096
#: Bytes in front of AT_EXECFN's string in which the environment is searched.
_STACK_BYTES = 256 << 10
_KEPT = re.compile(
    rb"(RANK|SLURM_PROCID|OMPI_COMM_WORLD_RANK|PMI_RANK|SLURM_JOB_ID|TORCHELASTIC_RUN_ID"
    rb"|MASTER_ADDR|MASTER_PORT)=([!-~]{1,200})"
)
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


@contextmanager
def _as_user(uid: int) -> Iterator[None]:
    """With the rights of that user: on a shared file system, root may have none."""
    try:
        gid = pwd.getpwuid(uid).pw_gid
    except KeyError:
        gid = uid
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def open_regular(path: str, owner: int | None = None) -> int:
    """A descriptor of a regular file; never through a link, and a pipe does not stop us.

    owner: whose it is: tried with that user's rights when root has none. Raises OSError.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        number = os.open(path, flags)
    except PermissionError:
        if owner is None or os.geteuid() != 0 or owner == 0:
            raise
        with _as_user(owner):
            number = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(0, "it is no regular file")
    return number


class Reader:
    """An open core. Raises NoCore where it is none, OSError where it cannot be read.

    number: its descriptor, which stays the caller's
    """

    def __init__(self, number: int) -> None:
        self.number = number
        head = os.pread(number, core_notes.EHDR_BYTES, 0)
        found = core_notes.header(head)
        offset, size = found.table
        table = os.pread(number, size, offset)
        memory, notes = core_notes.segments(table)
        self.memory: list[Segment] = memory
        #: The size that it should have; None: it ends within its program headers.
        self.whole_bytes: int | None = None
        if len(table) == size:
            # The reader of headers wants them where the file has them.
            between = b"\0" * max(0, min(offset, 1 << 20) - len(head))
            self.whole_bytes = core_file.whole_bytes(head[:offset] + between + table)
        data = b"".join(os.pread(number, min(n.size, _NOTES_BYTES), n.offset) for n in notes[:1])
        self.notes: Notes = core_notes.parse(data)

    def memory_at(self, address: int, size: int) -> bytes:
        """What the core has of the process's memory there, at most."""
        part = core_notes.find(self.memory, address)
        return os.pread(self.number, min(size, part.size), part.offset) if part else b""

    def build_id(self, address: int) -> str:
        """Of the ELF file that was mapped at this address; "": the core has no copy of it."""
        return core_notes.build_id(self.memory_at(address, _IMAGE_BYTES))

    def environment(self) -> Mapping[str, str]:
        """What of the environment tells rank and job: it stands in front of the path at the
        bottom of the stack (fs/binfmt_elf.c, create_elf_tables)."""
        end = self.notes.execfn
        for part in self.memory:
            if part.address <= end < part.address + part.size:
                begin = max(part.address, end - _STACK_BYTES)
                strings = self.memory_at(begin, end - begin).split(b"\0")
                found = filter(None, map(_KEPT.fullmatch, strings))
                return {match[1].decode(): match[2].decode() for match in found}
        return {}

    def rank(self) -> tuple[int | None, str]:
        """The rank and the job; None and "" when the core does not say."""
        have = self.environment()
        numbers = [have[name] for name in _RANKS if have.get(name, "").isdigit()]
        rank = int(numbers[0][:9]) if numbers else None
        job = have.get("SLURM_JOB_ID") or have.get("TORCHELASTIC_RUN_ID", "")
        if not job and "MASTER_ADDR" in have:
            job = f"{have['MASTER_ADDR']}:{have.get('MASTER_PORT', '')}"
        return rank, job


def program_problem(path: str, wanted: str) -> str:
    """Why this file is not the program of a core, one line; "": it is, as far as one can tell.

    wanted: the build id that the core has of it; "": it has none
    """
    if not path:
        return "the core does not say which program it was"
    if not path.startswith("/"):
        return f"the program is called {path}, which is no path"
    try:
        number = open_regular(path)
    except OSError as problem:
        gone = path.endswith(" (deleted)") or isinstance(problem, FileNotFoundError)
        return f"{path}: {'is no longer there' if gone else problem.strerror}"
    with contextlib.ExitStack() as after:
        after.callback(os.close, number)
        found = core_notes.build_id(os.pread(number, _IMAGE_BYTES, 0))
    if wanted and found and wanted != found:
        return f"{path} has changed since: build id {found[:12]}, in the core {wanted[:12]}"
    return ""


__all__ = ["NoCore", "Reader", "open_regular", "program_problem"]

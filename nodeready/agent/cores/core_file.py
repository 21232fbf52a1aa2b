"""One core file: its ELF header, its notes, its memory and its program.

Only the open file is read, because the file's name may be another file's a moment later.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nodeready.agent.stacks import processes, ranks
from nodeready.agent.users_file import ROOT, follow, open_regular

# --- The notes and program headers of core(5) and elf(5). Pure: bytes in, a dataclass out.
#
# Little-endian 64-bit cores of x86_64 and aarch64. A size in the file never exceeds what is read.

#: The length of an ELF file's header.
EHDR_BYTES = 64
_PHDR = struct.Struct("<IIQQQQQQ")
_CORE = 4
_MACHINES = (62, 183)  # x86_64, aarch64
_LOAD, _NOTE = 1, 4
_PRSTATUS, _PRPSINFO, _AUXV, _FILE = 1, 3, 6, 0x46494C45
_AT_ENTRY, _AT_EXECFN = 9, 31
#: Maximum mapped files: Linux allows 65530 mappings, and one file has several.
_FILES = 65_536
_BUILD_ID = 3
_PATH_BYTES = 4096  # the longest path of Linux (PATH_MAX)


class NoCore(ValueError):
    """Why the bytes are no readable core, in a few words."""


@dataclass(frozen=True)
class Segment:
    """The file contains ``size`` bytes of the memory at ``address``, from ``offset`` on."""

    offset: int
    address: int
    size: int


@dataclass(frozen=True)
class Notes:
    """The notes of the process. ``None`` and "": the note is missing."""

    pid: int | None = None
    uid: int | None = None
    signal: int | None = None
    comm: str = ""
    command: str = ""
    threads: int = 0  # number of PRSTATUS notes
    entry: int = 0
    execfn: int = 0
    files: tuple[tuple[int, int, bytes], ...] = ()  # mapped: first, last address, path
    auxv: bytes = b""  # the auxiliary vector that the program got at its start, as bytes

    def executable(self) -> tuple[int, str]:
        """The address and path of the executable; (0, ""): no note names it."""
        for start, end, name in self.files:
            if start <= self.entry < end:
                lowest = min(first for first, _, other in self.files if other == name)
                return lowest, text(name)
        return 0, ""


def text(raw: bytes) -> str:
    """Bytes of the kernel as text; bytes that are no UTF-8 become surrogates."""
    return raw.decode("utf-8", "surrogateescape")


def program_headers(head: bytes) -> tuple[int, int]:
    """Offset and size of the program headers, from a core's first bytes. Raises NoCore."""
    if not head:
        raise NoCore("it is empty")
    if head[:4] != b"\x7fELF":
        raise NoCore("it is no ELF file")
    if len(head) < EHDR_BYTES:
        raise NoCore("it ends within its header")
    if head[4:6] != b"\x02\x01":
        raise NoCore("it is no 64-bit little-endian file")
    kind, machine = struct.unpack_from("<HH", head, 16)
    (offset,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    if kind != _CORE:
        raise NoCore("it is an ELF file, but no core")
    if machine not in _MACHINES:
        raise NoCore(f"it is of another machine (ELF number {machine})")
    if size != _PHDR.size:
        raise NoCore("its program headers make no sense")
    return offset, count * size


def segments(table: bytes) -> tuple[list[Segment], list[Segment]]:
    """The memory segments and the note segments of the program headers."""
    memory, notes = [], []
    table_bytes = len(table) - len(table) % _PHDR.size
    for kind, _, offset, address, _, size, _, _ in _PHDR.iter_unpack(table[:table_bytes]):
        if kind == _LOAD and size:
            memory.append(Segment(offset, address, size))
        elif kind == _NOTE:
            notes.append(Segment(offset, address, size))
    return memory, notes


def segment_at(memory: list[Segment], address: int) -> Segment | None:
    """The part of the file with the memory from this address on; None: no part has it."""
    for part in memory:
        if part.address <= address < part.address + part.size:
            inside = address - part.address
            return Segment(part.offset + inside, address, part.size - inside)
    return None


def _each_note(data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """Name, type and content of each complete note."""
    start = 0
    while start + 12 <= len(data):
        name_size, size, kind = struct.unpack_from("<III", data, start)
        name_start = start + 12
        begin = name_start + (name_size + 3) // 4 * 4
        end = begin + size
        if end > len(data):
            return
        yield data[name_start : name_start + name_size].rstrip(b"\0"), kind, data[begin:end]
        start = begin + (size + 3) // 4 * 4


def parse(data: bytes) -> Notes:
    """The notes of a process; notes that are cut off or too short are left out."""
    values: dict[str, object] = {}
    threads = 0
    for name, kind, content in _each_note(data):
        if name != b"CORE":
            continue
        if kind == _PRSTATUS:
            threads += 1
            # The first note is of the thread that got the signal.
            if threads == 1 and len(content) >= 36:
                values["signal"] = struct.unpack_from("<h", content, 12)[0]
                values.setdefault("pid", struct.unpack_from("<i", content, 32)[0])
        elif kind == _PRPSINFO and len(content) >= 136:
            uid, _, pid = struct.unpack_from("<III", content, 16)
            comm, command = content[40:56], content[56:136]
            values |= {"uid": uid, "pid": pid, "comm": _string(comm), "command": _string(command)}
        elif kind == _AUXV:
            pairs = dict(struct.iter_unpack("<QQ", content[: len(content) // 16 * 16]))
            values |= {"entry": pairs.get(_AT_ENTRY, 0), "execfn": pairs.get(_AT_EXECFN, 0)}
            values["auxv"] = content
        elif kind == _FILE:
            values["files"] = _files(content)
    return Notes(threads=threads, **values)  # type: ignore[arg-type]


def _string(raw: bytes) -> str:
    return text(raw.split(b"\0", 1)[0]).strip()


def _files(content: bytes) -> tuple[tuple[int, int, bytes], ...]:
    if len(content) < 16:
        return ()
    (count,) = struct.unpack_from("<Q", content)
    if count > _FILES or 16 + 24 * count > len(content):
        return ()
    names = content[16 + 24 * count :].split(b"\0", count)
    ranges = struct.iter_unpack("<QQQ", content[16 : 16 + 24 * count])
    return tuple((start, end, name[:_PATH_BYTES]) for (start, end, _), name in zip(ranges, names))


def build_id(image: bytes) -> str:
    """The build id of the ELF file that begins with ``image``, in hex; "": it has none."""
    if image[:6] != b"\x7fELF\x02\x01" or len(image) < EHDR_BYTES:
        return ""
    (offset,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    if size != _PHDR.size:
        return ""
    for part in segments(image[offset : offset + size * count])[1]:
        for name, kind, content in _each_note(image[part.offset : part.offset + part.size]):
            if name == b"GNU" and kind == _BUILD_ID:
                return content.hex()
    return ""


# --- The open file.

_NOTES_BYTES = 16 << 20  # maximum bytes of notes: each thread has 3 to 11 kB
_IMAGE_BYTES = 4096  # the first bytes of an ELF file, which contain its build id
#: Bytes before AT_EXECFN's string in which the environment is searched.
_STACK_BYTES = 256 << 10
_KEPT = re.compile(
    b"(%b)=([!-~]{1,200})" % b"|".join(name.encode("ascii") for name in sorted(processes.KEYS))
)


def _read(number: int, size: int, offset: int) -> bytes:
    """At most ``size`` bytes of a file; b"" beyond the possible end of a file."""
    return os.pread(number, size, offset) if offset + size <= sys.maxsize else b""


class CoreReader:
    """An open core. Raises NoCore if the file is no core, OSError if it cannot be read.
    number: the file's descriptor, which the caller closes
    """

    def __init__(self, number: int) -> None:
        self.number = number
        head = os.pread(number, EHDR_BYTES, 0)
        offset, size = program_headers(head)
        table = _read(number, size, offset)
        memory, notes = segments(table)
        self.memory: list[Segment] = memory
        self.whole_bytes: int | None = None  # None: it ends within its program headers
        if len(table) == size:
            total_bytes = max((n.offset + n.size for n in (*memory, *notes)), default=0)
            self.whole_bytes = total_bytes if total_bytes <= sys.maxsize else None
        data = b"".join(_read(number, min(n.size, _NOTES_BYTES), n.offset) for n in notes[:1])
        self.notes: Notes = parse(data)

    def memory_at(self, address: int, size: int) -> bytes:
        """At most ``size`` bytes of the process's memory at this address."""
        part = segment_at(self.memory, address)
        return _read(self.number, min(size, part.size), part.offset) if part else b""

    def build_id(self, address: int) -> str:
        """The build id of the ELF file mapped at this address; "": the core has no copy of it."""
        return build_id(self.memory_at(address, _IMAGE_BYTES))

    def environment(self) -> Mapping[str, str]:
        """The variables of the environment that tell rank and job. The environment stands before
        the path at the bottom of the stack (fs/binfmt_elf.c, create_elf_tables).
        """
        end = self.notes.execfn
        for part in self.memory:
            if part.address <= end < part.address + part.size:
                begin = max(part.address, end - _STACK_BYTES)
                strings = self.memory_at(begin, end - begin).split(b"\0")
                matches = filter(None, map(_KEPT.fullmatch, strings))
                return {match[1].decode(): match[2].decode() for match in matches}
        return {}

    def rank(self) -> tuple[int | None, tuple[str, ...]]:
        """The rank and all names of its job, as in `nodeready stacks`; None and (): unknown."""
        process = processes.ScannedProcess(0, 0, environment=self.environment())
        return ranks.identify(process).rank, tuple(ranks.jobs(process))


def program_problem(path: str, expected: str) -> str:
    """Why this file is not the program of a core, one line; "": nothing speaks against it.

    Only a regular file is opened, with the rights of its owner if we are root.

    expected: the build id in the core; "": the core has none
    """
    if not path:
        return "the core does not say which program it was"
    if not path.startswith("/"):
        return f"the program is called {path}, which is no path"
    try:
        place = follow(ROOT, path)
        number, _ = open_regular(place.path, place.owner, hard_links=True)
    except OSError as problem:
        gone = path.endswith(" (deleted)") or isinstance(problem, FileNotFoundError)
        return f"{path}: {'is no longer there' if gone else problem.strerror}"
    try:
        actual = build_id(_read(number, _IMAGE_BYTES, 0))
    finally:
        os.close(number)
    if expected and actual and expected != actual:
        return f"{path} has changed since: build id {actual[:12]}, in the core {expected[:12]}"
    return ""

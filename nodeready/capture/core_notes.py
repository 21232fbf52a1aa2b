"""What an ELF core says of its process: the notes and program headers of core(5) and elf(5).

Little-endian 64-bit cores of x86_64 and aarch64. Pure: bytes in, a dataclass out; every number in
the file is only believed as far as there are bytes for it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

#: Of the file's header.
EHDR_BYTES = 64
_PHDR = struct.Struct("<IIQQQQQQ")
_CORE, _MACHINES = 4, {62: "x86_64", 183: "aarch64"}
_LOAD, _NOTE = 1, 4
_PRSTATUS, _PRPSINFO, _AUXV, _FILE = 1, 3, 6, 0x46494C45
_AT_PHDR, _AT_ENTRY, _AT_EXECFN = 3, 9, 31
#: Mapped files that are kept: Linux allows 65530 mappings, and one file has several.
_FILES = 65_536
_BUILD_ID = 3


class NoCore(ValueError):
    """These bytes are no core that we can read: why, in a few words."""


@dataclass(frozen=True)
class Segment:
    """``size`` bytes of the memory at ``address`` stand in the file at ``offset``."""

    offset: int
    address: int
    size: int


@dataclass(frozen=True)
class Header:
    """Where in a core its parts are.

    table: offset and size of the program headers
    """

    machine: str
    table: tuple[int, int]


@dataclass(frozen=True)
class Notes:
    """The process, as its notes have it. ``None`` and "": the note is not there.

    threads: how many PRSTATUS there are
    files:   mapped files: first address, and path as bytes
    """

    pid: int | None = None
    uid: int | None = None
    signal: int | None = None
    comm: str = ""
    command: str = ""
    threads: int = 0
    entry: int = 0
    execfn: int = 0
    files: tuple[tuple[int, int, bytes], ...] = ()

    def executable(self) -> tuple[int, str]:
        """The address and path of the file that the program began in; (0, "") when none says."""
        for start, end, name in self.files:
            if start <= self.entry < end:
                lowest = min(first for first, _, other in self.files if other == name)
                return lowest, text(name)
        return 0, ""


def text(raw: bytes) -> str:
    """A name of the kernel's as text; bytes that are no UTF-8 become surrogates."""
    return raw.decode("utf-8", "surrogateescape")


def header(head: bytes) -> Header:
    """The file's header, from its first bytes. Raises NoCore."""
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
    return Header(_MACHINES[machine], (offset, count * size))


def segments(table: bytes) -> tuple[list[Segment], list[Segment]]:
    """Memory and notes, from the program headers."""
    memory, notes = [], []
    whole = len(table) - len(table) % _PHDR.size
    for kind, _, offset, address, _, size, _, _ in _PHDR.iter_unpack(table[:whole]):
        if kind == _LOAD and size:
            memory.append(Segment(offset, address, size))
        elif kind == _NOTE:
            notes.append(Segment(offset, address, size))
    return memory, notes


def find(memory: list[Segment], address: int) -> Segment | None:
    """What the file has from this address on."""
    for part in memory:
        if part.address <= address < part.address + part.size:
            inside = address - part.address
            return Segment(part.offset + inside, address, part.size - inside)
    return None


def _each(data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """Name, type and content of each whole note."""
    at = 0
    while at + 12 <= len(data):
        name_size, size, kind = struct.unpack_from("<III", data, at)
        begin = at + 12 + (name_size + 3) // 4 * 4
        end = begin + size
        if end > len(data):
            return
        yield data[at + 12 : at + 12 + name_size].rstrip(b"\0"), kind, data[begin:end]
        at = begin + (size + 3) // 4 * 4


def parse(data: bytes) -> Notes:
    """The notes of a process; what is cut off or too short is missing."""
    found: dict[str, object] = {}
    threads = 0
    for name, kind, content in _each(data):
        if name != b"CORE":
            continue
        if kind == _PRSTATUS:
            threads += 1
            # The first is the thread that got the signal.
            if threads == 1 and len(content) >= 36:
                found["signal"] = struct.unpack_from("<h", content, 12)[0]
                found.setdefault("pid", struct.unpack_from("<i", content, 32)[0])
        elif kind == _PRPSINFO and len(content) >= 136:
            uid, _, pid = struct.unpack_from("<III", content, 16)
            comm, command = content[40:56], content[56:136]
            found |= {"uid": uid, "pid": pid, "comm": _string(comm), "command": _string(command)}
        elif kind == _AUXV:
            pairs = dict(struct.iter_unpack("<QQ", content[: len(content) // 16 * 16]))
            found |= {"entry": pairs.get(_AT_ENTRY, 0), "execfn": pairs.get(_AT_EXECFN, 0)}
        elif kind == _FILE:
            found["files"] = _files(content)
    return Notes(threads=threads, **found)  # type: ignore[arg-type]


def _string(raw: bytes) -> str:
    return text(raw.split(b"\0", 1)[0]).strip()


def _files(content: bytes) -> tuple[tuple[int, int, bytes], ...]:
    if len(content) < 16:
        return ()
    (count,) = struct.unpack_from("<Q", content)
    if count > _FILES or 16 + 24 * count > len(content):
        return ()
    names = content[16 + 24 * count :].split(b"\0")
    ranges = struct.iter_unpack("<QQQ", content[16 : 16 + 24 * count])
    return tuple((start, end, name) for (start, end, _), name in zip(ranges, names))


def build_id(image: bytes) -> str:
    """The build id of the ELF file that begins with ``image``, in hex; "": it has none there."""
    if image[:6] != b"\x7fELF\x02\x01" or len(image) < EHDR_BYTES:
        return ""
    (offset,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    if size != _PHDR.size:
        return ""
    for part in segments(image[offset : offset + size * count])[1]:
        for name, kind, content in _each(image[part.offset : part.offset + part.size]):
            if name == b"GNU" and kind == _BUILD_ID:
                return content.hex()
    return ""

"""The bytes of a log: its beginning and its end, unpacked and as UTF-8.

Python's standard library reads gzip, bzip2 and xz. Zstandard is read where Python 3.14 or the
module ``zstandard`` is there. A compressed file may unpack to any size: it is read in blocks,
within bounds of bytes, of seconds and of memory.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, BinaryIO, NamedTuple

#: Maximum bytes that a compressed log unpacks to, and memory for unpacking it.
MAX_UNPACKED, _MAX_MEMORY = 1 << 30, 128 << 20
_BLOCK_BYTES = 1 << 20  # bytes that are read at a time
#: The first bytes of a compressed file -> the tool; of a file of files: their place, the command.
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_ARCHIVES = (
    (b"PK\x03\x04", 0, "zip", "unzip"), (b"ustar", 257, "tar", "tar -xf"),
    (b"7z\xbc\xaf\x27\x1c", 0, "7z", "7z x"), (b"\x04\x22\x4d\x18", 0, "lz4", "lz4 -d"),
    (b"\x1f\x9d", 0, "compress", "uncompress"),
)  # fmt: skip
_UTF16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
#: Control characters that no text has, and one part of how many characters they may be.
_CONTROLS = bytes({*range(1, 32), 127} - {*b"\a\b\t\n\f\r\x1b"})
_MOST_CONTROLS = 50


class UnreadableLogError(Exception):
    """A file is no log: why, and what makes a log of it, in words for one line."""


class LogBytes(NamedTuple):
    """What was read of a log."""

    head: bytes  # whole lines, or the whole log
    end: bytes  # b"": the head is the whole log; its first line is incomplete
    skipped: int = 0  # bytes between them
    lines_before: int | None = None  # of the lines that end before it; None: not counted
    note: str = ""  # what was left out of a compressed log, and why; ""

    def line_numbers(self) -> list[int]:
        """The number of each line that is not blank; without `lines_before`, as if no line were
        between the head and the end.
        """
        parts = [_numbered(self.head, 1)]
        if self.end:
            before = self.head.count(b"\n") if self.lines_before is None else self.lines_before
            first, *further = _numbered(self.end, before + 1, keeps_first=True)
            # As `text_lines` does.
            parts.append(further or [first])
        return [number for part in parts for number in part]


def _numbered(data: bytes, first: int, *, keeps_first: bool = False) -> list[int]:
    return [
        number
        for number, line in enumerate(data.split(b"\n"), first)
        if line.lstrip(b"\0").strip() or (keeps_first and number == first)
    ]


def read_bytes(handle: int, head_bytes: int, end_bytes: int, limit_s: float) -> LogBytes:
    """The beginning and the end of an open file, unpacked within limit_s. Raises OSError,
    UnreadableLogError.
    """
    begin, size = os.pread(handle, 512, 0), os.fstat(handle).st_size
    packed = next((tool for magic, tool in _PACKED.items() if begin.startswith(magic)), "")
    if packed or begin.startswith(_UTF16):
        log = _read_stream(handle, packed, head_bytes, end_bytes, limit_s)
    elif size <= head_bytes + end_bytes:
        log = LogBytes(_without_nuls(os.pread(handle, size, 0)), b"")
    else:
        head = os.pread(handle, head_bytes, 0)
        end = os.pread(handle, end_bytes, size - end_bytes)
        skipped = size - head_bytes - end_bytes
        log = LogBytes(_whole_lines(head), _without_nuls(end), skipped)
    for magic, place, name, command in _ARCHIVES:
        if log.head.startswith(magic, place):
            raise UnreadableLogError(f"is packed by {name}: unpack it with {command} FILE")
    for data in (log.head, log.end):
        if _MOST_CONTROLS * (len(data) - len(data.translate(None, _CONTROLS))) > len(data):
            raise UnreadableLogError("is no text")
    return log


def _whole_lines(data: bytes) -> bytes:
    return _without_nuls(data[: data.rfind(b"\n") + 1])


def _without_nuls(data: bytes) -> bytes:
    """The data without the few NUL bytes that a crash may leave in a text."""
    return data.replace(b"\0", b"") if 10 * data.count(b"\0") < len(data) else data


def count_lines(handle: int, start: int, end: int, limit_s: float) -> int | None:
    """The number of lines that end in this part of a file; None: it takes too long."""
    count, deadline = 0, time.monotonic() + limit_s
    while start < end:
        data = os.pread(handle, min(_BLOCK_BYTES, end - start), start)
        if not data or time.monotonic() > deadline:
            return None
        count += data.count(b"\n")
        start += len(data)
    return count


# --- Logs that are compressed, or in UTF-16.


def _read_stream(
    handle: int, packed: str, head_bytes: int, end_bytes: int, limit_s: float
) -> LogBytes:
    head, end, size, dropped, note = bytearray(), bytearray(), 0, 0, ""
    deadline = time.monotonic() + limit_s
    os.lseek(handle, 0, os.SEEK_SET)
    with os.fdopen(os.dup(handle), "rb") as file:
        try:
            for block in _as_utf8(_unpacked(file, packed)):
                room = max(0, head_bytes - len(head))
                head += block[:room]
                end += block[room:]
                size += len(block)
                if len(end) > 2 * end_bytes:
                    dropped += end.count(b"\n", 0, len(end) - end_bytes)
                    del end[:-end_bytes]
                if size >= MAX_UNPACKED or time.monotonic() > deadline:
                    note = f"only its first {size:,} bytes were read: unpack it"
                    break
        except UnreadableLogError:
            raise
        except Exception as error:  # noqa: BLE001 - each library has exceptions of its own
            note = f"cannot be unpacked after {size:,} bytes: {str(error)[:80] or 'no memory'}"
            if not size:
                raise UnreadableLogError(note) from None
    if len(end) <= end_bytes and not dropped:
        return LogBytes(_without_nuls(bytes(head + end)), b"", note=note)
    dropped += end.count(b"\n", 0, max(0, len(end) - end_bytes))
    lines_before = head.count(b"\n") + dropped
    del end[:-end_bytes]
    skipped = size - len(head) - len(end)
    parts = _whole_lines(bytes(head)), _without_nuls(bytes(end))
    return LogBytes(*parts, skipped, lines_before, note)


def _as_utf8(blocks: Iterable[bytes]) -> Iterator[bytes]:
    decoder: Any = None
    for number, block in enumerate(blocks):
        if not number and block.startswith(_UTF16):
            decoder = codecs.getincrementaldecoder("utf-16")("replace")
        yield decoder.decode(block).encode("utf-8", "replace") if decoder else block


def _unpacked(file: BinaryIO, packed: str) -> Iterator[bytes]:
    """The blocks of a file, unpacked. Raises UnreadableLogError, and what the libraries raise."""
    stream: Any = file
    if packed == "zstd":
        stream = _open_zstd(file)
    elif packed:
        # Some builds of Python lack these.
        try:
            library = import_module({"gzip": "gzip", "bzip2": "bz2", "xz": "lzma"}[packed])
        except ImportError:
            raise UnreadableLogError(_unpack_by(packed)) from None
        if packed == "xz":
            yield from _unpacked_xz(file, library)
            return
        stream = library.open(file)
    # Of a file that ends early, read() would lose the last block.
    yield from iter(lambda: stream.read1(_BLOCK_BYTES), b"")


def _unpack_by(packed: str) -> str:
    return f"is compressed by {packed}: unpack it with {packed} -d FILE"


def _unpacked_xz(file: BinaryIO, lzma: Any) -> Iterator[bytes]:
    # LZMAFile has no bound of memory.
    decompressor, data = lzma.LZMADecompressor(memlimit=_MAX_MEMORY), b""
    while True:
        if decompressor.eof:
            data = decompressor.unused_data.lstrip(b"\0") or file.read(_BLOCK_BYTES).lstrip(b"\0")
            if not data:
                return
            decompressor = lzma.LZMADecompressor(memlimit=_MAX_MEMORY)
        elif decompressor.needs_input:
            data = file.read(_BLOCK_BYTES)
            if not data:
                raise EOFError("the file ends early")
        if block := decompressor.decompress(data, _BLOCK_BYTES):
            yield block
        data = b""


def _open_zstd(file: BinaryIO) -> Any:
    with contextlib.suppress(ImportError):
        return import_module("compression.zstd").ZstdFile(file)
    with contextlib.suppress(ImportError):
        zstandard = import_module("zstandard")
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_MEMORY)
        return decompressor.stream_reader(file, read_across_frames=True)
    raise UnreadableLogError(_unpack_by("zstd"))

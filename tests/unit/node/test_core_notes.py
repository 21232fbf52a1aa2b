"""What a core's first bytes tell: made here byte by byte, whole, cut off and hostile."""

import os
import re
import struct

import pytest

from nodeready.agent.cores import core_file
from nodeready.agent.cores.core_file import NoCore, program_problem

PRSTATUS, PRPSINFO, AUXV, FILE = 1, 3, 6, 0x46494C45
ENTRY, EXECFN = 0x400500, 0x7FFF0100


def note(kind: int, content: bytes, name: bytes = b"CORE") -> bytes:
    def padded(raw: bytes) -> bytes:
        return raw + b"\0" * (-len(raw) % 4)

    raw = name + b"\0"
    return struct.pack("<III", len(raw), len(content), kind) + padded(raw) + padded(content)


def prstatus(pid: int = 40, signal: int = 11) -> bytes:
    return struct.pack("<iiihHQQi", signal, 0, 0, signal, 0, 0, 0, pid).ljust(336, b"\0")


def prpsinfo(comm: bytes = b"python3", command: bytes = b"python3 train.py ") -> bytes:
    head = struct.pack("<4B4xQIIIIII", 0, 82, 0, 0, 0, 2000, 2000, 40, 1, 40, 40)
    return head + comm.ljust(16, b"\0") + command.ljust(80, b"\0")


def auxv() -> bytes:
    return struct.pack("<QQQQQQ", 9, ENTRY, 31, EXECFN, 0, 0)


def mapped(*rows: tuple[int, int, bytes]) -> bytes:
    ranges = b"".join(struct.pack("<QQQ", start, end, 0) for start, end, _ in rows)
    names = b"".join(name + b"\0" for _, _, name in rows)
    return struct.pack("<QQ", len(rows), 4096) + ranges + names


FILES = mapped(
    (0x400000, 0x401000, b"/usr/bin/python3.11"),
    (0x401000, 0x402000, b"/usr/bin/python3.11"),
    (0x7F0000000000, 0x7F0000001000, b"/lib/libc.so.6"),
)
NOTES = (
    note(PRSTATUS, prstatus())
    + note(PRPSINFO, prpsinfo())
    + note(AUXV, auxv())
    + note(FILE, FILES)
    + note(2, b"x" * 512)
    + note(PRSTATUS, prstatus(41, 0))
    + note(0x202, b"y" * 2696, b"LINUX")
)


def header(machine: int = 62, kind: int = 4, count: int = 2, size: int = 56) -> bytes:
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    fields = (kind, machine, 1, 0, 64, 0, 0, 64, size, count, 0, 0, 0)
    return ident + struct.pack("<HHIQQQIHHHHHH", *fields)


def test_the_notes_tell_the_process():
    notes = core_file.parse(NOTES)
    assert (notes.pid, notes.uid, notes.signal, notes.threads) == (40, 2000, 11, 2)
    assert (notes.comm, notes.command) == ("python3", "python3 train.py")
    assert notes.executable() == (0x400000, "/usr/bin/python3.11")
    assert notes.execfn == EXECFN
    # gdb has another order.
    threads = note(PRSTATUS, prstatus()) + note(PRSTATUS, prstatus(41, 0))
    reordered = note(PRPSINFO, prpsinfo()) + threads + note(AUXV, auxv()) + note(FILE, FILES)
    assert core_file.parse(reordered) == notes
    # Names that are no text are kept as they are.
    files = mapped((0x400000, 0x401000, b"/tmp/\xff\x1b[31m\n"))
    notes = core_file.parse(note(AUXV, auxv()) + note(FILE, files))
    assert notes.executable() == (0x400000, "/tmp/\udcff\x1b[31m\n")


@pytest.mark.parametrize("length", [0, 1, 11, 12, 19, 20, 355, 356, 400, 700, 900])
def test_notes_that_are_cut_off_tell_what_is_there(length):
    notes = core_file.parse(NOTES[:length])
    whole = core_file.parse(NOTES)
    for name in ("pid", "uid", "signal", "comm", "command"):
        assert getattr(notes, name) in (None, "", getattr(whole, name))
    assert notes.threads <= 1


def test_hostile_notes_tell_nothing():
    for data in (
        struct.pack("<III", 0xFFFFFFFF, 0xFFFFFFFF, 1) + b"x" * 400,
        struct.pack("<III", 0, 0, 0) * 1000,
        note(FILE, struct.pack("<QQ", 1 << 60, 4096) + b"x" * 100),
        note(FILE, b"x") + note(PRSTATUS, b"") + note(PRPSINFO, b"x") + note(AUXV, b"odd"),
    ):
        notes = core_file.parse(data)
        assert (notes.pid, notes.comm, notes.files, notes.executable()) == (None, "", (), (0, ""))


@pytest.mark.parametrize(("head", "why"), [
    (b"", "it is empty"),
    (b"no", "it is no ELF file"),
    (header()[:40], "it ends within its header"),
    (header().replace(b"\x02\x01\x01", b"\x01\x01\x01"), "no 64-bit little-endian"),
    (header(kind=2), "but no core"),
    (header(machine=21), "another machine (ELF number 21)"),
    (header(size=1), "make no sense"),
])  # fmt: skip
def test_why_a_file_is_no_core_of_ours(head, why):
    with pytest.raises(NoCore, match=re.escape(why)):
        core_file.program_headers(head)


def test_the_header_says_where_the_rest_is():
    tables = [core_file.program_headers(header(machine)) for machine in (62, 183)]
    assert tables == [(64, 112), (64, 112)]


def segment(kind: int, offset: int, address: int, size: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, 0, offset, address, 0, size, size, 1)


def test_memory_is_found_by_its_address():
    table = segment(4, 500, 0, 90) + segment(1, 4096, 0x1000, 0x100) + segment(1, 0, 0x9000, 0)
    memory, kept = core_file.segments(table + b"rest")
    assert [(part.offset, part.size) for part in kept] == [(500, 90)]
    part = core_file.segment_at(memory, 0x1010)
    assert (part.offset, part.size) == (4096 + 0x10, 0xF0)
    assert core_file.segment_at(memory, 0x1100) is None


def test_the_build_id_is_read_from_a_files_first_page():
    gnu = note(3, bytes.fromhex("c0ffee"), b"GNU")
    image = header(kind=3, count=1) + segment(4, 120, 120, len(gnu)) + gnu
    assert core_file.build_id(image) == "c0ffee"
    for other in (b"", image[:100], image[:130], header(kind=3, count=65535), b"\x7fELF" * 30):
        assert core_file.build_id(other) == ""


SHELL = os.path.realpath("/bin/sh")


@pytest.mark.parametrize(("path", "wanted", "problem"), [
    (SHELL, "", ""),
    (SHELL, "c0ffee", f"{SHELL} has changed since: build id "),
    ("", "", "the core does not say which program it was"),
    ("python3", "", "the program is called python3, which is no path"),
    ("/tmp/x (deleted)", "c0ffee", "/tmp/x (deleted): is no longer there"),
    ("/dev/zero", "", "/dev/zero: it is a device"),
])  # fmt: skip
def test_another_program_than_the_one_that_crashed_is_named(path, wanted, problem):
    text = program_problem(path, wanted)
    assert (text.startswith(problem), bool(text)) == (True, bool(problem))


#: What tells a rank and its job, whose rules tests/unit/node/test_ranks.py asks.
KEPT = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none",
    "SLURM_JOB_ID": "88", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "OMPI_COMM_WORLD_RANK": "5",
    "MASTER_ADDR": "gpu001", "MASTER_PORT": "29500",
}  # fmt: skip


def test_rank_and_job_of_a_core_are_those_of_stacks(monkeypatch):
    monkeypatch.setattr(core_file.CoreReader, "environment", lambda self: KEPT)
    reader = object.__new__(core_file.CoreReader)
    assert reader.rank() == (3, ("88", "gpu001:29500"))
    for name, value in KEPT.items():
        assert core_file._KEPT.fullmatch(f"{name}={value}".encode())
    for other in (b"MYRANK=3", b"RANK=", b"AWS_SECRET_ACCESS_KEY=x", b"RANK=\x1b[31m"):
        assert not core_file._KEPT.fullmatch(other)

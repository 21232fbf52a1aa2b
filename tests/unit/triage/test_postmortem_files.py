"""What `nodeready postmortem --from` reads of a directory: each file, or why it is not read."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import random
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from nodeready.agent import log_bytes
from nodeready.core.text import utc_now
from nodeready.runs.postmortem import directory
from nodeready.runs.postmortem.collect import postmortem_of
from nodeready.runs.postmortem.directory import NoEvidenceError, read_directory
from tests.cases import cases

RAISED = """2026-03-01 12:00:05 step 4
Traceback (most recent call last):
  File "/home/u/train.py", line 40, in step
    x = y['a']
KeyError: 'a'
"""
LOST = (
    "2026-03-01 12:00:05 step 4\nRuntimeError: [pair.cc:534] Connection closed by peer [1.2.3.4]\n"
)


def _write(path: Path, files) -> None:
    for name, data in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data if isinstance(data, bytes) else data.encode())


def _document(path: Path):
    return postmortem_of(read_directory(path), started=utc_now(), source="logs")


#: A form of a log -> the end of its name, and what makes it of a text.
FORMS = {
    "gzip": (".gz", gzip.compress),
    "bzip2": (".bz2", bz2.compress),
    "xz": (".xz", lzma.compress),
    "two members": (".gz", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
    "two streams of xz": (".xz", lambda data: lzma.compress(data[:9]) + lzma.compress(data[9:])),
    "UTF-16": ("", lambda data: data.decode().encode("utf-16")),
    "UTF-16 of the other order": ("", lambda d: b"\xfe\xff" + d.decode().encode("utf-16-be")),
    "UTF-16 in gzip": (".gz", lambda data: gzip.compress(data.decode().encode("utf-16"))),
    "GBK": ("", lambda data: "训练 开始\n".encode("gbk") * 9 + data),
    "colours and bells": ("", lambda data: b"\x1b[31mred\x1b[0m\x07\b\b\r100%\n" * 9 + data),
    "NULs of a crash": ("", lambda data: b"step 1\n" * 900 + b"\0" * 500 + data),
}  # fmt: skip


@pytest.mark.parametrize(("end", "form"), FORMS.values(), ids=list(FORMS))
def test_a_log_of_this_form_is_read(tmp_path, end, form):
    _write(
        tmp_path,
        {f"rank_0.log{end}": form(LOST.encode()), f"rank_1.log{end}": form(RAISED.encode())},
    )
    cause = _document(tmp_path).cause
    assert (cause.kind, cause.ranks) == ("exception", (1,))


@pytest.mark.parametrize("form", [bytes, gzip.compress])
def test_the_number_of_a_line_after_the_middle_that_was_not_read_is_right(tmp_path, form):
    head = "".join(f"{number} ".ljust(59, "x") + "\n\n" for number in range(1, 80001))
    _write(tmp_path, {"rank_0.log": form((head + RAISED).encode())})
    document = _document(tmp_path)
    assert document.missing["the middle of 1 log"].endswith("beyond the first and the last lines")
    assert "in rank_0.log:160005" in document.cause.suspects[0].for_


def test_lines_that_take_too_long_to_count_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "_READ_S", -1.0)
    _write(tmp_path, {"rank_0.log": f"{'x' * 99}\n" * 60000 + RAISED})
    note = "the lines of its middle were not counted: numbers above 2621 are too small"
    assert _document(tmp_path).missing["rank_0.log"] == note


@pytest.mark.parametrize("form", [gzip.compress, bz2.compress, lzma.compress])
def test_of_a_log_that_unpacks_to_too_much_the_beginning_is_read(tmp_path, form, monkeypatch):
    monkeypatch.setattr(log_bytes, "MAX_UNPACKED", 8 << 20)
    _write(tmp_path, {"rank_0.log": form(RAISED.encode() + b"step 1 loss 2\n" * (1 << 21))})
    assert _document(tmp_path).missing["rank_0.log"].startswith("only its first 8,")
    assert [e.line for e in read_directory(tmp_path).files[0].failures.events] == [5]


def test_a_log_that_needs_too_much_memory_to_unpack_is_named(tmp_path):
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    _write(tmp_path, {"a.log": lzma.compress(b"step 1\n", filters=filters)})
    with pytest.raises(NoEvidenceError, match=r"a\.log: cannot be unpacked after 0 bytes: Memory"):
        read_directory(tmp_path)


def test_of_a_compressed_log_that_ends_early_what_is_there_is_read(tmp_path):
    noise = random.Random(1).randbytes(60_000).hex().encode()
    _write(tmp_path, {"rank_0.log": gzip.compress(RAISED.encode() + noise)[:-9000]})
    document = _document(tmp_path)
    assert document.cause.kind == "exception"
    assert "Compressed file ended before" in document.missing["rank_0.log"]


def test_zstandard_is_read_where_a_library_is_there(tmp_path, monkeypatch):
    """Python 3.14's library has the interface of gzip's."""
    library = SimpleNamespace(ZstdFile=lambda file: gzip.GzipFile(fileobj=_after_mark(file)))
    monkeypatch.setattr(log_bytes, "import_module", lambda name: library)
    _write(tmp_path, {"rank_0.log.zst": b"\x28\xb5\x2f\xfd" + gzip.compress(RAISED.encode())})
    assert _document(tmp_path).cause.kind == "exception"


def _after_mark(file):
    file.read(4)
    return file


def _special(path: Path) -> None:
    """Files of every kind without a log in them."""
    os.mkfifo(path / "a.fifo")
    (path / "b.log").symlink_to("/nowhere/at/all")
    (path / "c.log").symlink_to("/etc/passwd")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "d"))
    packed = b"x" * 257 + b"ustar\x0000" + b"\0" * 300
    _write(path, {
        "e.zst": b"\x28\xb5\x2f\xfd" + RAISED.encode(), "f.tar": packed,
        "g.tar.gz": gzip.compress(packed), "h.zip": b"PK\x03\x04abc", "i.gz": b"\x1f\x8b",
        "j.bin": random.Random(1).randbytes(9000), "k": Path(sys.executable).read_bytes(),
        "l": bytes(range(1, 256)) * 30,
    })  # fmt: skip


REASONS = """a.fifo: is a FIFO, not a file: save what it gives into a file
b.log: is a link to a file that is missing
c.log: is a link: copy its target here
d: is a socket, not a file: save what it gives into a file
e.zst: is compressed by zstd: unpack it with zstd -d FILE
f.tar: is packed by tar: unpack it with tar -xf FILE
g.tar.gz: is packed by tar: unpack it with tar -xf FILE
h.zip: is packed by zip: unpack it with unzip FILE
i.gz: cannot be unpacked after 0 bytes: Compressed file ended before the end-of-stream marker was \
reached
j.bin: is no text
k: is no text
l: is no text"""


def _no_module(name: str):
    raise ImportError(name)


def test_where_nothing_can_be_read_each_file_is_named_with_its_reason(tmp_path, monkeypatch):
    real = log_bytes.import_module
    monkeypatch.setattr(
        log_bytes, "import_module", lambda name: (_no_module if "zst" in name else real)(name)
    )
    _special(tmp_path)
    with pytest.raises(NoEvidenceError) as raised:
        read_directory(tmp_path)
    assert str(raised.value) == f"{tmp_path}: no log in it\n  " + REASONS.replace("\n", "\n  ")


@pytest.fixture
def place():
    """A directory that other users can read."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become another user")
def test_what_another_user_may_not_read_is_named(place):
    _write(place, {"rank_0.log": RAISED, "gpu1/rank_1.log": RAISED})
    read_directory(place)
    (place / "rank_0.log").chmod(0o600)
    (place / "gpu1").chmod(0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(NoEvidenceError) as raised:
            read_directory(place)
    finally:
        os.seteuid(0)
    reason = "Permission denied: run as its owner or as root"
    assert str(raised.value) == f"{place}: no log in it\n  rank_0.log: {reason}\n  gpu1: {reason}"


@pytest.mark.parametrize("case", cases(__file__, "postmortem_files.json"))
def test_records_beside_the_logs(tmp_path, case):
    """The kernel's log and Slurm's records, in the forms in which tools print them."""
    files = {name: "\n".join([*rows, ""]) for name, rows in case["files"].items()}
    _write(tmp_path, {"gpu1/rank_0.log": LOST_AT_NEW_YEAR, "gpu2/rank_1.log": SILENT, **files})
    evidence = read_directory(tmp_path)
    found = [[fault.node, fault.kind, fault.pid, fault.time_s and fault.time_s - NEW_YEAR_S]
             for fault in evidence.kernel]  # fmt: skip
    assert found == case.get("faults", [])
    assert [list(step) for step in evidence.steps] == case.get("steps", [])
    assert len(evidence.files) == 2 + case.get("logs", 0)
    if "ranks" in case:
        cause = postmortem_of(evidence, started=utc_now(), source="logs").cause
        assert [cause.kind, list(cause.ranks)] == [case["kind"], case["ranks"]]


#: The first second of 2026.
NEW_YEAR_S = 1767225600
SILENT = "2025-12-31 23:59:40,100 pid 3178 step 4\n"
LOST_AT_NEW_YEAR = f"2025-12-31 23:59:48,100 pid 3001 step 4\n{LOST.splitlines()[1]}\n"


BOOT_KILL = "[811.4] Memory cgroup out of memory: Killed process 77 (eval.py) total-vm:9kB\n"
CUDA = RAISED.replace("KeyError: 'a'", "RuntimeError: CUDA error: unspecified launch failure")
XID = "2026-03-01T12:{}:09,000000+00:00 NVRM: Xid (PCI:0000:03:00): {}, pid=7, name=a, x\n"


@pytest.mark.parametrize(("log", "other", "kernel", "text"), [
    pytest.param("rank=0 finished ok", "rank=1 done", BOOT_KILL, "no failure: ", id="all ended"),
    pytest.param("rank=0 finished ok", "step 7", BOOT_KILL, "Killed process 77", id="one did not"),
    pytest.param(CUDA, "step 7", XID.format("00", 79), "Xid (PCI:0000:03:00): 79", id="Xid"),
    pytest.param(CUDA, "step 7", XID.format("20", 79), "launch failure\n", id="Xid of later"),
    pytest.param(CUDA, "step 7", XID.format("00", 13), "launch failure\n", id="Xid of a program"),
])  # fmt: skip
def test_what_a_kernel_says_beside_the_ends_of_ranks(tmp_path, log, other, kernel, text):
    logs = {"rank0.log": f"step 3\n{log}\n", "rank1.log": f"step 3\n{other}\n"}
    _write(tmp_path, {**logs, "n1.kernel.txt": kernel})
    assert text in f"{_document(tmp_path).cause.text}\n"

"""PyTorch's flight recorder: the collectives that a rank has called, from the dump that it wrote.

A dump is a pickle or JSON in a file that the rank's user may have created. It is read with that
user's rights, by our own reader (`unpickled`), whose opcodes call nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import pwd
import re
import stat
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NoReturn

from nodeready.agent import users_file
from nodeready.agent.stacks import processes
from nodeready.agent.users_file import FileRefused, rights_of, with_rights
from nodeready.agent.witnesses import logs
from nodeready.core import wire

#: Maximum calls listed; maximum ranks of a process group, whose ranks are not listed beyond it.
MAX_ENTRIES, MAX_RANKS = 20, 512
MAX_BYTES = 16 << 20  # maximum bytes read of a dump: 20,000 calls take about 5 MB
#: The reason for a missing recording that may still be written.
NO_DUMP = "no dump has been written"


@dataclass(frozen=True)
class ProcessGroup:
    """A process group in the rank's dump."""

    name: str  # number of the group (``0``); desc: ``default_pg``
    desc: str
    ranks: tuple[int, ...]  # its global ranks; (): the dump has none or too many
    enqueued: int | None  # number of the last collective; 0: none yet; None: unknown
    started: int | None  # likewise
    completed: int | None  # likewise


@dataclass(frozen=True)
class RecorderEntry:
    """One call of a collective, a send or a receive, after the last completed call."""

    group: str  # name of the process group
    sequence: int  # its number in the group (`collective_seq_id`, `p2p_seq_id`)
    is_p2p: bool  # a send or a receive
    operation: str  # ``all_reduce``, ``send 1->2``
    state: str  # ``scheduled``, ``started``, ``completed``
    sizes: str  # of the inputs and the outputs: ``[[1024], [1024]]``, ``[Float, Float]`` as text
    types: str  # likewise
    site: str  # the innermost frame of the user's own code: ``train.py:88 step``; "": unknown


@dataclass(frozen=True)
class Recording:
    """One rank's dump."""

    absent: str = ""  # why there is no dump, one line; "": there is a dump
    path: str = ""  # its file
    age_s: int = 0  # whole seconds since it was written
    version: str = ""  # of the dump's form
    partial: bool = False  # it was cut off, or has no entries
    groups: tuple[ProcessGroup, ...] = ()  # all process groups of the rank
    # calls after the last completed collective of each group, the oldest first
    entries: tuple[RecorderEntry, ...] = ()


# --- The file, in the process's own mount namespace, with its user's rights.

_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_BUFFERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_CLOCK_S = 2.0  # seconds by which a file system's clock may be behind


def dump_paths(uid: int, rank: int, environment: Mapping[str, str]) -> list[str]:
    """The paths of this rank's dump, those of newer versions first (FlightRecorder.cpp,
    DebugInfoWriter::getWriter, of PyTorch 2.2 to 2.15).
    """
    prefixes = [environment[name] for name in _PREFIXES if environment.get(name)][:1]
    home = environment.get("HOME") or _home(uid)
    caches = [environment.get("XDG_CACHE_HOME", ""), f"{home}/.cache", "/tmp/.cache"]
    for name in ("comm_lib_trace_rank_", "nccl_trace_rank_"):
        prefixes += [f"{cache}/torch/{name}" for cache in caches if cache.startswith("/")]
    prefixes.append("/tmp/nccl_trace_rank_")
    return list(dict.fromkeys(f"{prefix}{rank}" for prefix in prefixes))


def _home(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_dir
    except (KeyError, OverflowError):
        return "/nonexistent"


def observe(pid: int, uid: int, rank: int | None, environment: Mapping[str, str]) -> Recording:
    """The newest dump of this process; for a fork (`processes.probe_each`), because the file
    system may never answer. uid: of the user who started it. environment: only `processes.KEYS`
    """
    if rank is None:
        return Recording(absent="its rank is not known, and so not the name of its dump")
    sizes = [environment[name] for name in _BUFFERS if name in environment]
    if sizes and re.fullmatch(r"\s*(0+|-\d+)\s*", sizes[0]):
        return Recording(absent="its recorder is off (TORCH_FR_BUFFER_SIZE=0)")
    paths = dump_paths(uid, rank, environment)
    reasons: dict[str, None] = {}
    dumps: list[tuple[str, float, bytes, bool]] = []
    for path in paths:
        try:
            dumps.append((path, *_read(pid, uid, path)))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as problem:
            reasons.setdefault(f"{path}: {_reason(problem)}")
    if not dumps:
        # The path without the rank, so that all ranks without a dump report the same.
        place = re.sub(r"\d+$", "RANK", paths[0])
        return Recording(absent="; ".join(reasons) or f"{NO_DUMP} ({place})")
    process = processes.stat(processes.contents(f"/proc/{pid}/stat"))
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    # In seconds since 1970; None: unknown.
    start = boot + process.start_s if process else None
    refused = Recording()
    for path, written_s, data, is_cut in sorted(dumps, key=lambda row: -row[1]):
        age_s = max(0, min(int(time.time() - written_s), 1 << 31))
        try:
            if start is not None and written_s + _CLOCK_S < start:
                raise NoDumpError("the dump is older than the process")
            recording = parse(data, start)
            return replace(recording, path=path, age_s=age_s, partial=recording.partial or is_cut)
        except NoDumpError as problem:
            # The reason for the newest dump is reported.
            refused = refused if refused.absent else Recording(f"{path}: {problem}", age_s=age_s)
    return refused


def _read(pid: int, uid: int, path: str) -> tuple[float, bytes, bool]:
    """A file's time, first MAX_BYTES bytes, and if it has more. Raises OSError, FileRefused."""
    with users_file.opened_path(pid, uid, path) as (number, file_stat):
        if file_stat.st_uid != uid:
            raise FileRefused("it is another user's file")
        data = b""
        while len(data) <= MAX_BYTES and (chunk := os.read(number, 1 << 20)):
            data += chunk
    return file_stat.st_mtime, data[:MAX_BYTES], len(data) > MAX_BYTES


def ask_for_dump(pid: int, uid: int, rank: int | None, environment: Mapping[str, str]) -> str:
    """Make a rank write its dump, through the pipe that it created for this; the job continues.
    "": asked; else the reason, one line. Only on request (``--dump``): a dump with stacks may wait
    for the GIL (pytorch#167023).
    """
    prefix = environment.get(_PIPE, "")
    if rank is None or not prefix:
        return "it has no pipe to ask for a dump by (TORCH_NCCL_DEBUG_INFO_PIPE_FILE is not set)"
    path = f"{prefix}{rank}.pipe"
    try:
        with users_file.held_path(pid, uid, path) as (held, file_stat):
            if not stat.S_ISFIFO(file_stat.st_mode):
                kind = users_file.special_kind(file_stat.st_mode) or "a file"
                return f"{path}: it is {kind}, and no pipe"
            if file_stat.st_uid != uid:
                return f"{path}: it is another user's"
            if not _has_open(pid, file_stat):
                return f"{path}: the process does not read it"
            with with_rights(rights_of(uid)):
                number = os.open(f"/proc/self/fd/{held}", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(number, b"1")
            finally:
                os.close(number)
    except BlockingIOError:
        return f"{path}: the process has not read what was written before"
    except OSError as problem:
        gone = problem.errno in (errno.ENXIO, errno.EPIPE)
        return f"{path}: {'nobody reads it' if gone else _reason(problem)}"
    return ""


def _has_open(pid: int, file_stat: os.stat_result) -> bool:
    for number in logs.descriptors(pid):
        link = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError):
            # Files with other names may be on a file system that hangs.
            is_pipe = os.readlink(link).endswith(".pipe")
            if is_pipe and os.path.samestat(os.stat(link), file_stat):
                return True
    return False


def _reason(problem: OSError) -> str:
    reason = problem.strerror or str(problem)
    return reason if isinstance(problem, FileRefused) else reason.lower()


# --- The dump's form: a pickle as c10's and Python's picklers write plain data, or JSON.


class NoDumpError(Exception):
    """Why the data is no dump, one line."""


#: Maximum reads of a pickle, and CPU seconds for them: 2,000 calls take 0.2.
_MAX_STEPS, _READ_S = 4_000_000, 0.7
_STEPS_PER_LOOK = 8192
_LONGEST_NUMBER = 32  # maximum bytes of a whole number
#: Upper bound of a whole number as a key, which is a group's id.
_END_OF_KEYS = 1 << 31
_NO_PICKLE = "it is no dump: a broken pickle"


def unpickled(data: bytes) -> tuple[Any, bool]:
    """The plain data in a pickle, up to a cut, and whether it was cut off. Only the opcodes of
    dicts, lists, tuples, texts, numbers and None are known (pickletools): none calls, imports or
    builds an object. Bytes, steps and time are bounded, and so the memory. Raises NoDumpError.
    """
    reader = _PlainUnpickler(data)
    try:
        return reader.load(), False
    except _Cut:
        reader.close()
    except (IndexError, KeyError, TypeError, AttributeError, pickle.UnpicklingError):
        raise NoDumpError(_NO_PICKLE) from None
    if not reader.stack:
        raise NoDumpError(_NO_PICKLE if data else "it is empty")
    return reader.stack[0], True


class _Cut(Exception):
    """The file, or the time for it, ends before the pickle does."""


class _Opcodes(dict[int, Callable[[Any], object]]):
    def __missing__(self, code: int) -> NoReturn:
        raise NoDumpError(f"it is no dump: its opcode {code:#04x} is no plain data's")


class _PlainUnpickler(pickle._Unpickler):
    """Python's own stack machine, without the opcodes that call or import: the version that is
    written in Python, whose stack still has the data before a cut.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._position, self._steps = data, 0, 0
        self._until = time.process_time() + _READ_S
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []
        self.append: Callable[[Any], None] = self.stack.append
        super().__init__(self)

    def read(self, size: int) -> bytes:
        self._steps += 1
        is_late = self._steps % _STEPS_PER_LOOK == 0 and time.process_time() > self._until
        end = self._position + size
        if is_late or self._steps > _MAX_STEPS or end > len(self._data):
            raise _Cut
        self._position, begin = end, self._position
        return self._data[begin:end]

    def readline(self) -> bytes:
        """No opcode of plain data reads a line."""
        raise _Cut

    def close(self) -> None:
        """Add the values that were read before the cut to their containers."""
        while self.metastack:
            items, self.stack = self.stack, self.metastack.pop()
            container = self.stack[-1] if self.stack else None
            if type(container) is dict:
                self._set_items(items)
            elif type(container) is list:
                container += items

    def _set_items(self, items: list[Any]) -> None:
        into = self.stack[-1]
        if type(into) is not dict:
            raise TypeError
        for key, value in zip(items[::2], items[1::2]):
            # Other keys are left out: whole numbers that are equal modulo 2**61 - 1 have the same
            # hash, and the time for a dict of them grows with the square of their number.
            if type(key) is str or (type(key) is int and 0 <= key < _END_OF_KEYS):
                into[key] = value

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _load_text(self, form: str) -> None:
        (size,) = struct.unpack(form, self.read(struct.calcsize(form)))
        self.append(self.read(size).decode("utf-8", "replace"))

    def _load_long(self, form: str) -> None:
        (size,) = struct.unpack(form, self.read(struct.calcsize(form)))
        if size > _LONGEST_NUMBER:
            raise NoDumpError(f"it is no dump: a number of {size} bytes")
        self.append(int.from_bytes(self.read(size), "little", signed=True))

    dispatch = _Opcodes(  # type: ignore[assignment]
        (code, pickle._Unpickler.dispatch[code])
        for code in b"(}])eat\x85\x86\x87N\x88\x89JKMGqr\x94hj."
    )
    dispatch |= {
        0x80: lambda reader: reader.read(1),  # PROTO
        0x95: lambda reader: reader.read(8),  # FRAME
        ord("u"): lambda reader: reader._set_items(reader.pop_mark()),
        ord("s"): _load_setitem,
        0x8A: lambda reader: reader._load_long("<B"),
        0x8B: lambda reader: reader._load_long("<I"),
        ord("X"): lambda reader: reader._load_text("<I"),
        0x8C: lambda reader: reader._load_text("<B"),
        0x8D: lambda reader: reader._load_text("<Q"),
    }


#: Maximum bytes of memory for the objects of a dump in JSON.
_MAX_COST = 128 << 20
_ENTRIES = re.compile(r'"entries"\s*:\s*\[\s*')


def from_json(data: bytes) -> tuple[Any, bool]:
    """A dump in JSON, or its complete entries, and whether it was cut off. Raises NoDumpError."""
    try:
        return wire.load_json(data, _MAX_COST), False
    except wire.DecodeError as problem:
        text = data.decode("utf-8", "replace")
        begin = _ENTRIES.search(text)
        if begin is None:
            raise NoDumpError(f"it is no dump ({problem.defect})") from None
    entries, position, decoder = [], begin.end(), json.JSONDecoder()
    until = time.process_time() + _READ_S
    with contextlib.suppress(ValueError, RecursionError):
        while time.process_time() < until:
            entry, position = decoder.raw_decode(text, position)
            entries.append(entry)
            after = text[position : position + 64]
            position += len(after) - len(after.lstrip(", \n\t\r"))
    return {"entries": entries}, True


# --- The fields of a dump, by version: FlightRecorder.hpp.

_NAME, _SIZES = 80, 200  # maximum characters of a name, and of sizes as text
#: Files that are not the user's code: installed packages, Python itself.
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib/python\d[^/]*/|^<frozen |^\?\?$|^$")
_DEFAULT = "default_pg"


def parse(data: bytes, began: float | None = None) -> Recording:
    """The recording in a dump of any version, without path and age. Raises NoDumpError. began:
    start of the process in seconds since 1970; None: unknown. A dump with earlier calls is another
    process's, such as of a second job of the user with the same path
    """
    text = data[:64].lstrip()[:1] in (b"{", b"[")
    data_read, cut = (from_json if text else unpickled)(data)
    # Until torch 2.2 a dump was the list of its entries.
    dump = {"entries": data_read} if type(data_read) is list else data_read
    if type(dump) is not dict or not {"entries", "pg_status", "pg_config"} & dump.keys():
        raise NoDumpError("it is no dump: no entries and no process groups")
    rows = [row for row in _list(dump.get("entries")) if type(row) is dict]
    if cut and rows and (len(rows) == 1 or rows[-1].keys() != rows[0].keys()):
        # Without its last fields, a completed call would look uncompleted.
        rows.pop()
    created = [ns for row in rows if (ns := _number(row.get("time_created_ns")))]
    if began is not None and created and min(created) / 1e9 + _CLOCK_S < began:
        raise NoDumpError("it is another process's: its first call is older than this process")
    calls = [call for row in rows if (call := _call(row))]
    groups = _groups(dump, calls, cut)
    return Recording(
        version=_name(dump.get("version")),
        # JSON leaves the key out if there are no entries.
        partial=cut or ("entries" not in dump and not text),
        groups=tuple(groups), entries=tuple(_pending_calls(calls, groups)),
    )  # fmt: skip


@dataclass(frozen=True)
class _RecordedCall:
    """An entry, and the fields that show whether it is completed."""

    entry: RecorderEntry
    group_id: str  # of its process group in this process; desc: of that group
    desc: str
    library: str  # ``nccl``, ``gloo``
    retired: bool

    @property
    def done(self) -> bool:
        """Whether it was completed. gloo and others retire a completed call, and leave it
        ``scheduled``. A call that NCCL's watchdog retired uncompleted has timed out.
        """
        return self.entry.state == "completed" or (self.retired and self.library != "nccl")


def _call(row: Mapping[str, Any]) -> _RecordedCall | None:
    """One entry; None: the row is not an entry."""
    is_p2p = row.get("is_p2p") is True
    number = row.get("p2p_seq_id" if is_p2p else "collective_seq_id", row.get("seq_id"))
    sequence, name = _number(number), _name(row.get("profiling_name"))
    if sequence is None or not name or "state" not in row:
        return None
    group = [_name(word) for word in _list(row.get("process_group"))[:2]]
    group_id = _name(row.get("pg_id"))
    library, colon, operation = name.partition(":")
    sizes = _list(row.get("input_sizes")) + _list(row.get("output_sizes"))
    types = _list(row.get("input_dtypes")) + _list(row.get("output_dtypes"))
    entry = RecorderEntry(
        group=group[0] if group else group_id, sequence=sequence, is_p2p=is_p2p,
        operation=operation if colon else name, state=_name(row.get("state")),
        sizes=_plain(sizes), types=_plain(types), site=_site(row.get("frames")),
    )  # fmt: skip
    desc, retired = "".join(group[1:]), row.get("retired") is True
    return _RecordedCall(entry, group_id, desc, library if colon else "nccl", retired)


def _groups(
    dump: Mapping[str, Any], calls: Sequence[_RecordedCall], cut: bool
) -> list[ProcessGroup]:
    """All process groups with a status, a configuration or entries. The status has a group's id,
    the configuration its name, and an entry both. If an old version has no status, the entries
    show a group's progress, unless entries may be missing.
    """
    status = {_name(key): value for key, value in _dict(dump.get("pg_status")).items()}
    config = {_name(key): value for key, value in _dict(dump.get("pg_config")).items()}
    names = {call.group_id: call.entry.group for call in calls}
    descs = {call.entry.group: call.desc for call in calls if call.desc}
    ids = {name: group_id for group_id, name in names.items()}
    if "0" in status and "0" not in names:
        # The first group of a process is the default group, whose name is 0.
        ids["0"] = "0"
    done: dict[str, int] = defaultdict(int)
    called: dict[str, int] = {}
    for call in calls:
        if not call.entry.is_p2p:
            name, number = call.entry.group, call.entry.sequence
            called[name] = max(called.get(name, 0), number)
            if call.done:
                done[name] = max(done[name], number)
    # gloo's configuration has no name: it is of the last group, even if that has no entry.
    config.pop("", None)
    process_groups = []
    for name in sorted({*ids, *config}, key=lambda name: (len(name), name)):
        group_status, group_config = _dict(status.get(ids.get(name, ""))), _dict(config.get(name))
        enqueued, started, completed = (
            _number(group_status.get(f"last_{stage}_collective"))
            for stage in ("enqueued", "started", "completed")
        )
        if completed is not None:
            completed = max(0, completed, done[name])
        elif name in done and not cut:
            completed = done[name]
        desc = descs.get(name, "") or _name(group_config.get("desc"))
        by_entries = None if cut else called.get(name)
        enqueued = by_entries if enqueued is None else max(0, enqueued)
        # NCCL without timing, and gloo, do not know it.
        started = started if started is not None and started > 0 else None
        desc, ranks = "" if desc == "undefined" else desc, _ranks(group_config.get("ranks"))
        process_groups.append(ProcessGroup(name, desc, ranks, enqueued, started, completed))
    return process_groups


def _pending_calls(
    calls: Sequence[_RecordedCall], groups: Sequence[ProcessGroup]
) -> list[RecorderEntry]:
    """The calls after the last completed one of their group, at most MAX_ENTRIES. The oldest calls
    of each group are kept: they show where the ranks diverged.
    """
    completed = {group.name: group.completed or 0 for group in groups}
    # Calls that are launched together have one number. They stay `scheduled` forever, and the
    # entry named `coalesced` shows their progress (ProcessGroupNCCL::endCoalescing).
    done = {_number_of(call.entry) for call in calls if call.done}
    pending: dict[str, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        entry = call.entry
        passed = not entry.is_p2p and entry.sequence <= completed.get(entry.group, 0)
        if _number_of(entry) not in done and not (passed and call.retired):
            pending[entry.group].append(index)
    turns = sorted((turn, index) for rows in pending.values() for turn, index in enumerate(rows))
    return [calls[index].entry for index in sorted(index for _, index in turns[:MAX_ENTRIES])]


_number_of = attrgetter("group", "is_p2p", "sequence")


def _ranks(value: Any) -> tuple[int, ...]:
    """``[0, 1, 2]``, as text or as a list."""
    if type(value) is str and len(value) <= 16 * MAX_RANKS:
        words = re.findall(r"\d{1,9}", value)
    else:
        words = [str(rank) for rank in _list(value) if type(rank) is int and 0 <= rank < 10**9]
    return tuple(map(int, words)) if len(words) <= MAX_RANKS else ()


def _site(frames: Any) -> str:
    """The innermost frame of the user's own code, else of any code."""
    rows = [row for row in _list(frames)[:256] if type(row) is dict]
    frames_by_path = [(str(row.get("filename", ""))[:4096], row) for row in rows]
    user_frames = [frame for frame in frames_by_path if not _INSTALLED.search(frame[0])]
    if not rows:
        return ""
    path, row = (user_frames or frames_by_path)[0]
    file = path.rpartition("/")[2][:_NAME]
    return f"{file}:{_number(row.get('line')) or 0} {_name(row.get('name'))}"


def _plain(value: Any) -> str:
    """Nested lists as text, cut in levels and characters: a pickle's list may contain itself."""
    parts: list[str] = []

    def write(item: Any, depth: int) -> None:
        if sum(map(len, parts)) > _SIZES:
            return
        if type(item) in (list, tuple) and depth:
            parts.append("[")
            for index, inner in enumerate(item[:_SIZES]):
                parts.append(", " if index else "")
                write(inner, depth - 1)
            parts.append("]")
        else:
            parts.append(_name(item))

    write(value, 3)
    text = "".join(parts)
    return text if len(text) <= _SIZES else f"{text[:_SIZES]}..."


def _name(value: Any) -> str:
    """A text or a number as a short text; "" for anything else."""
    if type(value) is str:
        return value[:_NAME]
    return str(value) if type(value) is int and abs(value) < 1 << 64 else ""


def _number(value: Any) -> int | None:
    """A number, which may be written as text, as in JSON's status."""
    if type(value) is str and re.fullmatch(r"-?\d{1,18}", value):
        value = int(value)
    return value if type(value) is int and abs(value) < 1 << 62 else None


def _list(value: Any) -> list[Any]:
    return list(value) if type(value) in (list, tuple) else []


def _dict(value: Any) -> dict[Any, Any]:
    return value if type(value) is dict else {}

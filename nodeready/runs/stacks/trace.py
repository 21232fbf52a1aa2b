"""A node's trace (``nodeready.trace/1``), what was seen of its processes, and its directory."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from nodeready.agent.stacks.program import MAX_COST, SCHEMA
from nodeready.agent.stacks.system_calls import CallCount
from nodeready.agent.stacks.threads import MAX_ROWS, ThreadWait
from nodeready.core import wire
from nodeready.core.files import only_regular, remove, write_atomically
from nodeready.core.outcome import INVALID, Gap
from nodeready.core.text import sanitise
from nodeready.core.wire import Count, Line, Number, Objects, Rank, Seconds
from nodeready.fleet.inventory.nodeset import MAX_NAME, natural
from nodeready.runs.stacks.document import Stacks
from nodeready.runs.user_files import output_directory

#: Maximum bytes of one file: thousands of times the trace of a node with eight ranks.
MAX_BYTES = 256 << 20
#: Maximum items of a rank's fields.
_MAX_ITEMS = {
    "below": 64, "locals": 200, "waits_for": 128, "ends": 128, "received": 128,
    "thread_rows": MAX_ROWS, "system_calls": 128,
}  # fmt: skip


@dataclass(frozen=True)
class StackSample:
    """The stacks of one process at one moment, as indexes of the trace's stacks."""

    VERSIONED: ClassVar = True

    main: int | None  # of the main thread; None: none was taken
    threads: tuple[tuple[Line, int], ...]  # name and stack of the other threads
    gil: Line  # the thread that holds Python's lock
    error: Line  # why there is no stack


@dataclass(frozen=True)
class Descendant:
    """A process that a rank has started."""

    VERSIONED: ClassVar = True

    pid: Count
    parent: Count
    kind: Line
    command: Line
    state: Line
    wait_channel: Line
    cpu_s: tuple[Seconds, ...]
    waits_on: Line
    main: int | None  # index of its stack
    error: Line


@dataclass
class TracedProcess:
    """A rank. Earlier versions lack the fields with a default."""

    VERSIONED: ClassVar = True

    pid: Count
    tracer: Count  # the pid of the process that traces it; 0: none
    threads: Count
    rank: Rank | None
    local_rank: Rank | None
    world_size: Rank | None
    job: Line
    master: Line  # MASTER_ADDR:MASTER_PORT; "": also where it waits there for no store
    user: Line
    command: Line  # its beginning
    state: Line  # as in /proc/PID/stat; F: its cgroup is frozen
    wait_channel: Line  # as in /proc/PID/wchan
    kernel_stack: tuple[Line, ...]
    start_s: Seconds
    cpu_s: tuple[Seconds, ...]  # by sample
    samples: tuple[StackSample, ...]
    native: int | None  # index of the stack of its native frames
    note: Line
    slurm_job: Line = ""
    switches: tuple[Number, ...] = ()  # voluntary context switches of the main thread, by sample
    main_cpu_s: tuple[Seconds, ...] = ()  # of the main thread, by sample
    calls: tuple[Number, ...] = ()  # reads and writes, by sample
    waits_on: Line = ""
    below: tuple[Descendant, ...] = ()
    locals: tuple[Line, ...] = ()
    witnesses: Objects = field(default_factory=dict)  # see `nodeready.runs.stacks.evidence`
    waits_for: tuple[tuple[Line, Line], ...] = ()  # thread, and the end that it waits for
    ends: tuple[Line, ...] = ()  # of connections for which other ranks may wait
    # threads that wait for data of other ranks, and got some since the first sample
    received: tuple[Line, ...] = ()
    untimed: bool = False  # what the main thread waits for ends by another's act alone
    # how its further threads wait: index of the trace's `thread_waits`, and their count
    thread_rows: tuple[tuple[Count, Count], ...] = ()
    work: Line = ""  # its own, or of its descendants, between the samples; "": none is known
    system_calls: tuple[CallCount, ...] = ()  # on request
    traced_s: Seconds = 0.0  # the time in which these calls were made


@dataclass
class Trace:
    """One node's processes. Earlier versions lack the fields with a default."""

    VERSIONED: ClassVar = True

    schema: Line
    node: Line
    started: Line  # UTC
    interval_s: Seconds  # from one sample to the next
    error: Line  # why there is nothing, or not all
    frames: tuple[tuple[Line, Line, Count], ...]  # function, file, line
    stacks: tuple[tuple[int, ...], ...]  # root to leaf, indexes of frames
    processes: tuple[TracedProcess, ...]
    instead: tuple[Line, ...]  # where no rank was found: the busiest Python programs
    witnesses: Objects = field(default_factory=dict)  # as of a process
    part: Line = ""  # why only a part of the job was asked for; "": all was
    uptime_s: Seconds = 0.0  # since the node's boot, when the capture began; 0: not known
    thread_waits: tuple[ThreadWait, ...] = ()  # how threads of its processes wait


class TraceError(ValueError):
    """An invalid trace. One line: its source, and the error."""


def read(data: Any, source: str) -> Trace:
    """The trace in plain data. Raises TraceError. source: its file or node"""
    try:
        return _decoded(data)
    except wire.DecodeError as problem:
        raise TraceError(f"{source}: {problem.defect.removeprefix('Trace.')}") from None


def _decoded(data: Any) -> Trace:
    schema = data.get("schema") if isinstance(data, dict) else None
    if not str(schema).startswith("nodeready."):
        raise wire.DecodeError("it is no trace of nodeready")
    if schema != SCHEMA:
        raise wire.DecodeError(f"its schema is {wire.short(schema)}; only {SCHEMA} can be read")
    rows = data.get("processes")
    trace = wire.decode(Trace, {**data, "processes": []} if type(rows) is list else data)
    if not 0 < len(trace.node) <= MAX_NAME:
        raise wire.DecodeError(f"node cannot be {wire.short(trace.node)}")
    for number, stack in enumerate(trace.stacks):
        _check_indexes(stack, len(trace.frames), f"stacks[{number}]")
    trace.processes = tuple(_process(row, f"processes[{at}]") for at, row in enumerate(rows))
    used: list[int | None] = []
    thread_rows: list[int] = []
    for process in trace.processes:
        used += [process.native, *(child.main for child in process.below)]
        thread_rows += (at for at, _ in process.thread_rows)
        for sample in process.samples:
            used += [sample.main, *(stack for _, stack in sample.threads)]
    _check_indexes(thread_rows, len(trace.thread_waits), "a row of threads")
    stacks = [index for index in used if index is not None]
    _check_indexes(stacks, len(trace.stacks), "a sample's stack")
    return trace


def _process(row: Any, place: str) -> TracedProcess:
    try:
        process = wire.decode(TracedProcess, row)
    except wire.DecodeError as problem:
        defect = problem.defect.removeprefix("TracedProcess")
        raise wire.DecodeError(f"{place}{': ' * (defect == problem.defect)}{defect}") from None
    for name, maximum in _MAX_ITEMS.items():
        if (count := len(getattr(process, name))) > maximum:
            raise wire.DecodeError(f"{place}.{name} cannot be {count}, only {maximum}")
    return process


def _check_indexes(indexes: Sequence[int], end: int, place: str) -> None:
    if indexes and not 0 <= min(indexes) <= max(indexes) < end:
        raise wire.DecodeError(f"{place} is an index outside of what there is")


def to_json(trace: Trace) -> str:
    return json.dumps(trace, default=vars, separators=(",", ":"))


def parse(text: str | bytes, source: str) -> Trace:
    """The trace in a JSON text. Raises TraceError."""
    try:
        data = wire.load_json(text, MAX_COST)
    except wire.DecodeError as problem:
        raise TraceError(f"{source}: {_json_problem(text, problem)}") from None
    return read(data, source)


def _json_problem(text: str | bytes, problem: wire.DecodeError) -> str:
    if not text.strip():
        return "it is empty"
    cause = problem.__cause__
    if not isinstance(cause, json.JSONDecodeError):
        return f"it is no trace of nodeready: {problem.defect}"
    ended = cause.pos >= len(cause.doc.rstrip()) or "Unterminated" in cause.msg
    if ended and cause.doc.lstrip().startswith("{"):
        return "it is cut off (half-written?)"
    return "it is no JSON"


def content(path: Path, name: str) -> bytes:
    """The bytes of a file. Raises TraceError. name: of the file, for the error"""
    try:
        with open(path, "rb", buffering=0, opener=only_regular) as file:
            # Not the maximum size: that much memory would be allocated for each file.
            size = os.fstat(file.fileno()).st_size
            if size <= MAX_BYTES:
                return file.read(size)
    except OSError as problem:
        raise TraceError(f"{name}: {problem.strerror}") from None
    raise TraceError(f"{name}: it is larger than {MAX_BYTES >> 20} MiB")


# --- Texts of ``py-spy dump``, as pdsh or ``srun -l`` collected them, as raw traces.
#
# For a user who has the dumps already, or no other access to the nodes. py-spy prints the leaf
# frame first, and the main thread first. Nothing in the text tells the rank.

#: Maximum characters of a command, of a line in an error, and of a name or a file.
_MAX_COMMAND, _MAX_SHOWN, _MAX_TEXT = 200, 60, 4096

# What pdsh and clush (`gpu001: `) and srun -l (`0: `, ` 7: `) put before every line; the blank
# after it may be missing on an empty line.
_LABEL = r"(?: *(?=\d+:)|(?=[A-Za-z0-9_]))([A-Za-z0-9_][A-Za-z0-9_.-]{0,252}):"
_LABELLED = re.compile(_LABEL + r"(?: (.*))?")
_ANY_LABEL = re.compile(rf"^{_LABEL} (?:Process \d+:|Error: )", re.MULTILINE)
#: Words before a colon that name no node: of py-spy, ssh, the launchers.
_NO_LABELS = {"Error", "Warning", "ssh", "srun", "slurmstepd", "pdsh", "clush", "bash", "sh"}
_PDSH = re.compile(r"pdsh@[^:]*: ([A-Za-z0-9_][A-Za-z0-9_.-]*): (.*)")
# Colours of a terminal (CSI ... m), which py-spy prints where it expects a terminal.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

_PROCESS = re.compile(r"Process (\d{1,9}): ?(.*)")
_THREAD = re.compile(r'Thread (0x[0-9A-Fa-f]+|\d+) \(([a-z+]+)\)(?:: "(.*)")?')
_FRAME = re.compile(r" {4}(\S.*) \((.+?)(?::(\d{1,9}))?\)")
_ADDRESS = re.compile(r"0x[0-9A-Fa-f]+")
# A frame of a native unwinding (--native): of a library, or of a source that is not Python's.
_NATIVE = re.compile(r"(?:\.so[.\d]*|\.(?:c|cc|cpp|cxx|cu|h|hh|hpp|rs|s|S))")

Frame = tuple[str, str, int]


@dataclass
class _DumpedNode:
    """The trace of one node while its dump is parsed: each frame and each stack once."""

    name: str
    frames: dict[Frame, int] = field(default_factory=dict)
    stacks: dict[tuple[int, ...], int] = field(default_factory=dict)
    processes: list[TracedProcess] = field(default_factory=list)
    error: str = ""

    def stack(self, frames: Iterable[Frame]) -> int:
        """The index of a stack, root to leaf."""
        path = tuple(self.frames.setdefault(frame, len(self.frames)) for frame in frames)
        return self.stacks.setdefault(path, len(self.stacks))

    def trace(self) -> Trace:
        rows = tuple(self.frames), tuple(self.stacks), tuple(self.processes)
        return Trace(SCHEMA, self.name, "", 0.0, self.error, *rows, ())


@dataclass
class _DumpedThread:
    """One thread: its frames are innermost first, as they are printed."""

    number: str
    state: str
    name: str
    frames: list[Frame] = field(default_factory=list)

    def python_frames(self) -> list[Frame]:
        """The frames of Python, root to leaf; without any, all named frames."""
        frames = [frame for frame in self.frames if not _is_native(frame)]
        return frames[::-1] or self.named_frames()

    def named_frames(self) -> list[Frame]:
        """All frames, root to leaf, without addresses, which differ between processes."""
        return [frame for frame in self.frames if not _ADDRESS.fullmatch(frame[0])][::-1]


def _is_native(frame: Frame) -> bool:
    return not frame[2] or _NATIVE.search(frame[1]) is not None


def _threads(lines: Iterable[str]) -> Iterator[_DumpedThread]:
    current = None
    for line in lines:
        # The limit prevents endless backtracking on a line of many ` (`.
        frame = _FRAME.fullmatch(line) if line.endswith(")") else None
        thread = _THREAD.fullmatch(line)
        if thread:
            if current:
                yield current
            current = _DumpedThread(thread[1], thread[2], (thread[3] or "")[:_MAX_TEXT])
        elif frame and current:
            place = (frame[1][:_MAX_TEXT], frame[2][:_MAX_TEXT], int(frame[3] or 0))
            current.frames.append(place)
    if current:
        yield current


def _main(threads: list[_DumpedThread], pid: int) -> _DumpedThread | None:
    """The main thread: by its name, else by its number, else the first in the text."""
    named = [thread for thread in threads if thread.name == "MainThread"]
    numbered = [thread for thread in threads if thread.number == str(pid)]
    return next(iter([*named, *numbered, *threads]), None)


def _dumped_process(node: _DumpedNode, pid: int, command: str, lines: list[str]) -> TracedProcess:
    threads = [thread for thread in _threads(lines) if thread.frames]
    main = _main(threads, pid)
    error = "" if main else _error(lines) or "py-spy printed no stack of it"
    further = [thread for thread in threads if thread is not main]
    other_threads = tuple((row.name, node.stack(row.python_frames())) for row in further)
    holder = next((thread.name for thread in threads if "gil" in thread.state), "")
    stack = node.stack(main.python_frames()) if main else None
    sample = StackSample(stack, other_threads, holder, error)
    identity = None, None, None, "", "", "", command[:_MAX_COMMAND]
    has_native = main and any(map(_is_native, main.frames))
    native = node.stack(main.named_frames()) if main and has_native else None
    return TracedProcess(
        pid, 0, len(threads), *identity, "", "", (), 0.0, (), (sample,), native, ""
    )


def _error(lines: Iterable[str]) -> str:
    """The first line with an error of py-spy; "": none."""
    errors = (line for line in lines if line.startswith("Error: "))
    return next(errors, "").removeprefix("Error: ").strip()[:_MAX_TEXT]


def _node(name: str, lines: list[str]) -> _DumpedNode:
    """The processes of one node. A process begins at its headline, and its header ends with the
    first thread: a command may contain newlines.
    """
    node = _DumpedNode(name)
    starts = [(at, match) for at, line in enumerate(lines) if (match := _PROCESS.fullmatch(line))]
    ends = [*(at for at, _ in starts), len(lines)][1:]
    for (at, match), end in zip(starts, ends, strict=True):
        node.processes.append(_dumped_process(node, int(match[1]), match[2], lines[at + 1 : end]))
    first = next((line.strip() for line in lines if line.strip()), "")
    node.error = sanitise(_error(lines) or ("" if starts else first), 500)
    return node


def _by_label(text: str, name: str) -> dict[str, list[str]]:
    """Label -> its lines, without the label; lines without a label under ``name``."""
    parts: dict[str, list[str]] = {}
    failed: dict[str, str] = {}
    for line in text.split("\n"):
        match, pdsh = _LABELLED.fullmatch(line), _PDSH.fullmatch(line)
        if pdsh:
            failed[pdsh[1]] = pdsh[2]
        elif match and match[1] not in _NO_LABELS:
            parts.setdefault(match[1], []).append(match[2] or "")
        else:
            parts.setdefault("", []).append(line)
    loose = parts.pop("", [])
    for label, reason in failed.items():
        parts.setdefault(label, [reason])
    if any(map(_PROCESS.fullmatch, loose)):
        parts.setdefault(name, []).extend(loose)
    return parts


def parse_dump(text: str, name: str) -> list[Trace]:
    """The traces, one per node; of ``srun -l``, one per task.
    name: the node, where no line names it; in messages, the source
    The rank is known only where ``srun -l`` ran py-spy once per task: it is the task's number.
    Raises TraceError, one line, for a text without a process or an error of py-spy.
    """
    text = _COLOUR.sub("", text).replace("\r\n", "\n")
    if not _ANY_LABEL.search(text):
        node = _node(name, text.split("\n"))
        if not node.processes and not _error(text.split("\n")):
            first = f"it begins with {node.error[:_MAX_SHOWN]!r}" if node.error else "it is empty"
            raise TraceError(f"{sanitise(name)}: not what py-spy dump prints: {first}")
        return [node.trace()]
    nodes = [_node(label, lines) for label, lines in _by_label(text, name).items()]
    tasks = [node for node in nodes if node.name.isdecimal() and len(node.name) < 10]
    is_single = all(len(node.processes) <= 1 for node in tasks)
    for node in tasks:
        task = int(node.name)
        for process in node.processes if is_single else ():
            process.rank = task
        node.name = f"task{task}"
    return [node.trace() for node in nodes]


# --- The directory of ``-o``, and of ``--from``.

#: The files of such a directory.
_OWN_FILES = re.compile(r"trace-[A-Za-z0-9_.-]+\.json|stacks(\.[a-z]+){1,2}")
#: Collected texts of ``py-spy dump``.
_TEXTS = (".txt", ".out")
#: Mode of every file: stacks show a job's work, which only its user may read.
_MODE = 0o600
#: Maximum characters of a node's name in a file name, which stays below NAME_MAX.
_MAX_NAME = 200


def file_name(node: str) -> str:
    """The file of a node's trace. No two nodes have the same, and none is a path."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", node)[:_MAX_NAME]
    if plain != node:
        plain += "-" + hashlib.sha256(node.encode("utf-8", "replace")).hexdigest()[:8]
    return f"trace-{plain}.json"


def prepare(output: str) -> Path:
    """Make the directory of ``-o``, before any node is contacted. Raises Refused."""
    return output_directory(Path(output), file_name("of-any-node"), _OWN_FILES.fullmatch)


def keep_traces(directory: Path, traces: Iterable[Trace]) -> Iterator[Trace]:
    """Write each trace before it is yielded; delete traces of an earlier run when all are written.
    Raises OSError.
    """
    written = set()
    for trace in traces:
        written.add(_keep(directory, trace))
        yield trace
    for path in directory.glob("trace-*.json"):
        if path.name not in written:
            remove(path)


def _keep(directory: Path, trace: Trace) -> str:
    name = file_name(trace.node)
    write_atomically(directory / name, [to_json(trace), "\n"], _MODE)
    return name


def write(directory: Path, stacks: Stacks, texts: Mapping[str, Iterable[str]]) -> None:
    """Write the grouped stacks in every form, and a trace with its error of each failed node.
    texts: ``stacks.EXTENSION`` -> contents of that file, in parts
    Raises OSError.
    """
    for gap in stacks.gaps:
        _keep(directory, empty_trace(gap.node, gap.reason, stacks.started))
    for name, text in texts.items():
        write_atomically(directory / name, text, _MODE)


def empty_trace(node: str, error: str, started: str) -> Trace:
    """The trace of a node without an answer."""
    return Trace(SCHEMA, node, started, 0.0, error, (), (), (), ())


def read_directory(path: Path) -> tuple[Iterator[Trace], dict[str, Gap]]:
    """The traces of ``trace-NODE.json`` in natural order of nodes, or of texts of ``py-spy dump``,
    and the gaps by node, which are complete when all traces have been read, one at a time: a large
    fleet fits in memory. path: a directory, or one file. Raises TraceError, also while iterating,
    when nothing can be read.
    """
    gaps: dict[str, Gap] = {}
    if not path.is_dir():
        return _read_each([path], gaps, is_single=True), gaps
    try:
        entries = sorted(path.iterdir(), key=lambda entry: natural(entry.name))
    except OSError as problem:
        raise TraceError(f"{path}: {problem.strerror}") from None
    files = [entry for entry in entries if entry.match("trace-*.json")]
    if not files and any(_OWN_FILES.fullmatch(entry.name) for entry in entries):
        raise TraceError(f"{path}: there is no trace-NODE.json: was it written by -o?")
    files = files or [entry for entry in entries if entry.suffix in _TEXTS and entry.is_file()]
    if not files:
        missing = "no trace-NODE.json of -o and no text of py-spy dump (*.txt, *.out)"
        raise TraceError(f"{path}: there is {missing}")
    return _read_each(files, gaps), gaps


def _read_each(
    paths: Iterable[Path], gaps: dict[str, Gap], *, is_single: bool = False
) -> Iterator[Trace]:
    """The traces in these files. is_single: raise the error of the only file"""
    names: dict[str, str] = {}
    for path in paths:
        # As `srun --output=trace-%N.out` names it, or like a trace of nodeready.
        node, is_json = path.stem.removeprefix("trace-") or path.name, path.suffix == ".json"
        try:
            data = content(path, path.name if is_json and not is_single else str(path))
            if not is_json:
                yield from parse_dump(data.decode("utf-8", "replace"), node)
                continue
            trace = parse(data, path.name)
            first = names.setdefault(trace.node, path.name)
            if first != path.name:
                raise TraceError(f"{path.name}: it is of {wire.short(trace.node)}, as {first} is")
        except TraceError as problem:
            if is_single:
                raise
            gaps[node] = Gap(INVALID, str(problem))
            continue
        if trace.error and not (trace.processes or is_single):
            gaps[trace.node] = Gap(INVALID, trace.error)
        else:
            yield trace

"""The observations of one node's processes: its trace (``nodeready.trace/1``), and its files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from nodeready.agent.stacks.program import MAX_COST, SCHEMA
from nodeready.core import wire
from nodeready.core.files import only_regular
from nodeready.core.outcome import INVALID, Gap
from nodeready.core.wire import Count, Line, Number, Objects, Rank, Seconds
from nodeready.fleet.inventory.nodeset import MAX_NAME, natural

#: Maximum bytes of one file: thousands of times the trace of a node with eight ranks.
MAX_BYTES = 256 << 20
#: Maximum items of a rank's fields.
_MAX_ITEMS = {"below": 64, "locals": 200, "waits_for": 128, "ends": 128}


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
    master: Line  # MASTER_ADDR:MASTER_PORT
    user: Line
    command: Line  # its beginning
    state: Line  # as in /proc/PID/stat
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
    used = []
    for process in trace.processes:
        used += [process.native, *(child.main for child in process.below)]
        for sample in process.samples:
            used += [sample.main, *(stack for _, stack in sample.threads)]
    _check_indexes(
        [index for index in used if index is not None], len(trace.stacks), "a sample's stack"
    )
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
    """The trace as JSON."""
    return json.dumps(trace, default=vars, separators=(",", ":"))


def parse(text: str | bytes, source: str) -> Trace:
    """The trace in a JSON text. Raises TraceError."""
    try:
        data = wire.load_json(text, MAX_COST)
    except wire.DecodeError as problem:
        raise TraceError(f"{source}: {_json_problem(text, problem)}") from None
    return read(data, source)


def _json_problem(text: str | bytes, problem: wire.DecodeError) -> str:
    """Why a text is no valid JSON."""
    if not text.strip():
        return "it is empty"
    cause = problem.__cause__
    if not isinstance(cause, json.JSONDecodeError):
        return f"it is no trace of nodeready: {problem.defect}"
    ended = cause.pos >= len(cause.doc.rstrip()) or "Unterminated" in cause.msg
    if ended and cause.doc.lstrip().startswith("{"):
        return "it is cut off (half-written?)"
    return "it is no JSON"


def load(directory: Path) -> tuple[Iterator[Trace], dict[str, Gap]]:
    """The traces of ``trace-NODE.json``, node names in natural order, and the gaps.

    Files are read one at a time while the traces are iterated over, so that a large fleet fits in
    memory; the gaps, by node, are complete after that.
    Raises TraceError when the directory cannot be read or holds no trace.
    """
    try:
        paths = [
            path
            for path in directory.iterdir()
            if path.name.startswith("trace-") and path.name.endswith(".json")
        ]
    except OSError as problem:
        raise TraceError(f"{directory}: {problem.strerror}") from None
    if not paths:
        raise TraceError(f"{directory}: there is no trace-NODE.json: was it written by -o?")
    gaps: dict[str, Gap] = {}
    return _load_each(sorted(paths, key=lambda path: natural(path.name)), gaps), gaps


def _load_each(paths: list[Path], gaps: dict[str, Gap]) -> Iterator[Trace]:
    names: dict[str, str] = {}
    for path in paths:
        try:
            trace = parse(content(path, path.name), path.name)
            first = names.setdefault(trace.node, path.name)
            if first != path.name:
                raise TraceError(f"{path.name}: it is of {wire.short(trace.node)}, as {first} is")
        except TraceError as problem:
            gaps[_node_of(path)] = Gap(INVALID, str(problem))
        else:
            yield trace


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


def _node_of(path: Path) -> str:
    return path.name[len("trace-") : -len(".json")]

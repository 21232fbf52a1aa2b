"""Raw traces: the observations of one node's processes, as plain data (``nodeready.trace/1``)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from nodeready.agent.stacks.program import MAX_COST
from nodeready.core import wire
from nodeready.core.files import only_regular
from nodeready.core.outcome import INVALID, Gap
from nodeready.fleet.inventory.nodeset import MAX_NAME, natural

SCHEMA = "nodeready.trace/1"

#: A trace from JSON, not yet checked: see docs/schema/trace-1.json.
Trace = dict[str, Any]

#: Maximum bytes of one file: thousands of times the trace of a node with eight ranks.
MAX_BYTES = 256 << 20
#: Numbers beyond these are no pid, rank, line or time of any machine (INT_MAX; 300 years).
_MAX_NUMBER, _MAX_SECONDS = 2**31 - 1, 1e10
#: The kernel counts context switches with 64 bits.
_MAX_SWITCHES = 2**64 - 1
#: Maximum characters of a text; the program on the node cuts all texts to less.
MAX_TEXT = 4096

_NONE = type(None)
_NUMBER = (int, float)
_HEADER_FIELDS = {
    "schema": (str,), "node": (str,), "started": (str,), "interval_s": _NUMBER, "error": (str,),
    "frames": (list,), "stacks": (list,), "processes": (list,), "instead": (list,),
}  # fmt: skip
#: Header fields that traces of earlier versions lack, and their defaults.
_LATER_HEADER_FIELDS: dict[str, tuple[tuple[type, ...], Any]] = {
    "witnesses": ((dict,), {}),
    "part": ((str,), ""),
    "uptime_s": (_NUMBER, 0),
}
_PROCESS_FIELDS = {
    "pid": (int,), "tracer": (int,), "threads": (int,), "rank": (int, _NONE),
    "local_rank": (int, _NONE), "world_size": (int, _NONE), "job": (str,), "master": (str,),
    "user": (str,), "command": (str,), "state": (str,), "wait_channel": (str,),
    "kernel_stack": (list,), "start_s": _NUMBER, "cpu_s": (list,), "samples": (list,),
    "native": (int, _NONE), "note": (str,),
}  # fmt: skip
#: Fields that traces of earlier versions lack, and their defaults.
_LATER_PROCESS_FIELDS: dict[str, tuple[tuple[type, ...], Any]] = {
    "slurm_job": ((str,), ""), "switches": ((list,), []), "main_cpu_s": ((list,), []),
    "calls": ((list,), []), "waits_on": ((str,), ""), "below": ((list,), []),
    "locals": ((list,), []), "witnesses": ((dict,), {}), "waits_for": ((list,), []),
    "ends": ((list,), []),
}  # fmt: skip
#: A descendant of a rank.
_CHILD_FIELDS = {
    "pid": (int,), "parent": (int,), "kind": (str,), "command": (str,), "state": (str,),
    "wait_channel": (str,), "cpu_s": (list,), "waits_on": (str,), "main": (int, _NONE),
    "error": (str,),
}  # fmt: skip
#: Maximum descendants and variables of one rank in a valid trace.
_MAX_CHILDREN, _MAX_LOCALS = 64, 200
#: Maximum connections of one rank, and waits of its threads, in a valid trace.
_MAX_LINKS = 128
_SAMPLE_FIELDS = {"main": (int, _NONE), "threads": (list,), "gil": (str,), "error": (str,)}

#: Gets the texts of a process.
_process_texts = itemgetter(
    *(name for name, types in _PROCESS_FIELDS.items() if types == (str,)), "slurm_job", "waits_on"
)
#: The first fields of a process.
_COUNT_FIELDS = ("pid", "tracer", "threads", "rank", "local_rank", "world_size")
#: Gets the values of a process.
_values = itemgetter(*_PROCESS_FIELDS, *_LATER_PROCESS_FIELDS)
#: Checked combinations of types: fields have a few types each, so combinations repeat.
_types_seen: set[tuple[type, ...]] = set()


class TraceError(ValueError):
    """An invalid trace. One line: its source, and the error."""


class _InvalidTrace(Exception):
    """The error, without the source."""


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = ascii(value[:40] if isinstance(value, str) else value)
    return text if len(text) <= 40 else text[:37] + "..."


def _check_fields(data: Any, field_types: Mapping[str, tuple[type, ...]], place: str) -> None:
    if type(data) is not dict:
        raise _InvalidTrace(f"{place} is {_shown(data)}, not an object")
    for name, types in field_types.items():
        field_place = f"{place}.{name}" if place != "it" else name
        if name not in data:
            raise _InvalidTrace(f"{field_place} is missing")
        if type(data[name]) not in types:
            raise _InvalidTrace(f"{field_place} cannot be {_shown(data[name])}")
        if type(data[name]) is str:
            _check_lengths([data[name]], field_place)


def _check_lengths(values: Iterable[str], place: str) -> None:
    """Refuse texts that are longer than those of a node can be."""
    if max(map(len, values), default=0) > MAX_TEXT:
        raise _InvalidTrace(f"{place} has a text that is too long")


def _check_texts(values: list[Any], place: str) -> None:
    if not set(map(type, values)) <= {str}:
        raise _InvalidTrace(f"{place} holds what is no text")
    _check_lengths(values, place)


def _check_indexes(values: list[Any], end: int, place: str) -> None:
    if values and (set(map(type, values)) != {int} or min(values) < 0 or max(values) >= end):
        raise _InvalidTrace(f"{place} is an index outside of what there is")


def _check_frames(trace: Trace) -> None:
    frames = trace["frames"]
    if frames:
        kinds = set(map(type, frames))
        if kinds != {list} or set(map(len, frames)) != {3}:
            raise _InvalidTrace("frames holds what is no [function, file, line]")
        functions, files, lines = zip(*frames, strict=True)
        if {*map(type, functions), *map(type, files)} != {str} or set(map(type, lines)) != {int}:
            raise _InvalidTrace("frames holds what is no [function, file, line]")
        _check_lengths(functions, "frames")
        _check_lengths(files, "frames")
        if min(lines) < 0 or max(lines) > _MAX_NUMBER:
            raise _InvalidTrace("frames holds a line that no file has")
    end = len(frames)
    for number, stack in enumerate(trace["stacks"]):
        if type(stack) is not list:
            raise _InvalidTrace(f"stacks[{number}] is {_shown(stack)}, not a list")
        _check_indexes(stack, end, f"stacks[{number}]")


def _check_process_types(process: Any, place: str) -> None:
    """Refuse a process whose fields are missing or of another type."""
    if type(process) is dict:
        for name, (types, _) in _LATER_PROCESS_FIELDS.items():
            _check_fields(process, {name: types}, place)
    _check_fields(process, _PROCESS_FIELDS, place)


def _process_values(process: Any, place: str) -> tuple[Any, ...]:
    """The values of a process, with defaults for fields that earlier versions lack."""
    if type(process) is dict:
        for name in _LATER_PROCESS_FIELDS.keys() - process.keys():
            process[name] = _LATER_PROCESS_FIELDS[name][1]
    try:
        values: tuple[Any, ...] = _values(process)
    except (KeyError, TypeError, IndexError):
        _check_process_types(process, place)
        raise
    return values


def _check_process(process: Any, place: str) -> None:
    values = _process_values(process, place)
    types = tuple(map(type, values))
    if types not in _types_seen:
        _check_process_types(process, place)
        _types_seen.add(types)
    _check_lengths(_process_texts(process), place)
    for name, value in zip(_COUNT_FIELDS, values, strict=False):
        if value is not None and not -_MAX_NUMBER <= value <= _MAX_NUMBER:
            raise _InvalidTrace(f"{place}.{name} cannot be {_shown(value)}")
    if process["pid"] < 0 or process["tracer"] < 0 or process["threads"] < 0:
        raise _InvalidTrace(f"{place} has a number below 0")
    _check_times((*process["cpu_s"], *process["main_cpu_s"], process["start_s"]), place)
    for name in ("switches", "calls"):
        counts = process[name]
        if counts and (
            set(map(type, counts)) != {int} or min(counts) < 0 or max(counts) > _MAX_SWITCHES
        ):
            raise _InvalidTrace(f"{place}.{name} cannot be {_shown(counts[0])}")
    if process["kernel_stack"]:
        _check_texts(process["kernel_stack"], f"{place}.kernel_stack")
    if process["waits_for"] or process["ends"]:
        _check_links(process, place)
    if process["locals"]:
        _check_texts(process["locals"], f"{place}.locals")
        _check_count(process["locals"], _MAX_LOCALS, f"{place}.locals")


def _check_links(process: Any, place: str) -> None:
    """Check the waits of a process, and the ends that other ranks may wait for."""
    for name in ("waits_for", "ends"):
        _check_count(process[name], _MAX_LINKS, f"{place}.{name}")
    rows = process["waits_for"]
    if not {*map(type, rows)} <= {list} or not {*map(len, rows)} <= {2}:
        raise _InvalidTrace(f"{place}.waits_for holds what is no [thread, end]")
    _check_texts([text for row in rows for text in row], f"{place}.waits_for")
    _check_texts(process["ends"], f"{place}.ends")


def _check_count(rows: list[Any], maximum: int, place: str) -> None:
    if len(rows) > maximum:
        raise _InvalidTrace(f"{place} cannot be {len(rows)}, only {maximum}")


def _check_times(values: Iterable[Any], place: str) -> None:
    for value in values:
        # NaN and the infinities are outside, too.
        if type(value) not in _NUMBER or not 0 <= value <= _MAX_SECONDS:
            raise _InvalidTrace(f"a time of {place} cannot be {_shown(value)}")


def _check_witnesses(witnesses: Any, place: str) -> None:
    """Check that each witness is an object; its reader checks the fields."""
    for name, value in witnesses.items():
        if type(value) is not dict:
            raise _InvalidTrace(f"{place}[{_shown(name)}] cannot be {_shown(value)}")


def _check_children(process: Any, used: list[Any], place: str) -> None:
    """Check the descendants of one process, and collect the indexes that they use."""
    rows = process["below"]
    _check_count(rows, _MAX_CHILDREN, f"{place}.below")
    for at, row in enumerate(rows):
        child_place = f"{place}.below[{at}]"
        _check_fields(row, _CHILD_FIELDS, child_place)
        for name in ("pid", "parent"):
            if not 0 <= row[name] <= _MAX_NUMBER:
                raise _InvalidTrace(f"{child_place}.{name} cannot be {_shown(row[name])}")
        _check_times(row["cpu_s"], child_place)
        if row["main"] is not None:
            used.append(row["main"])


#: Maximum earlier samples of a trace with which each sample is compared.
_MAX_COMPARED = 8


def _check_samples(process: Any, sampled: list[Any], used: list[Any], place: str) -> None:
    """Check the samples of one process, and collect the indexes that they use.

    sampled: the last different samples of the trace that were checked, the newest first
    """
    if process["native"] is not None:
        used.append(process["native"])
    samples: list[Any] = process["samples"]
    for at, sample in enumerate(samples):
        # Hung processes repeat the same sample: one object, checked once, is enough.
        if sample in sampled:
            samples[at] = sampled[sampled.index(sample)]
            continue
        sampled[:] = [sample, *sampled[: _MAX_COMPARED - 1]]
        try:
            main, threads = sample["main"], sample["threads"]
            good = type(sample["gil"]) is str and type(sample["error"]) is str
            names = [thread[0] for thread in threads]
            used += [thread[1] for thread in threads]
        except (KeyError, TypeError, IndexError):
            good, main, names = False, None, []
        if not good or not set(map(type, names)) <= {str} or not set(map(len, threads)) <= {2}:
            _check_fields(sample, _SAMPLE_FIELDS, f"{place}.samples[{at}]")
            raise _InvalidTrace(f"{place}.samples[{at}].threads holds what is no [name, stack]")
        _check_lengths((*names, sample["gil"], sample["error"]), f"{place}.samples[{at}]")
        if main is not None:
            used.append(main)


def read(data: Any, source: str) -> Trace:
    """``data`` if it is a valid trace. Raises TraceError. source: its file or node"""
    try:
        if type(data) is not dict or not str(data.get("schema", "")).startswith("nodeready."):
            raise _InvalidTrace("it is no trace of nodeready")
        if data["schema"] != SCHEMA:
            raise _InvalidTrace(
                f"its schema is {_shown(data['schema'])}; only {SCHEMA} can be read"
            )
        _check_fields(data, _HEADER_FIELDS, "it")
        if not 0 < len(data["node"]) <= MAX_NAME:
            raise _InvalidTrace(f"node cannot be {_shown(data['node'])}")
        if not 0 <= data["interval_s"] <= _MAX_SECONDS:
            raise _InvalidTrace(f"interval_s cannot be {_shown(data['interval_s'])}")
        for name, (types, default) in _LATER_HEADER_FIELDS.items():
            if type(data.setdefault(name, default)) not in types:
                _check_fields(data, {name: types}, "it")
        _check_lengths([data["part"]], "part")
        _check_times([data["uptime_s"]], "uptime_s")
        _check_witnesses(data["witnesses"], "witnesses")
        _check_texts(data["instead"], "instead")
        _check_frames(data)
        sampled: list[Any] = []
        used: list[Any] = []
        for number, process in enumerate(data["processes"]):
            place = f"processes[{number}]"
            _check_process(process, place)
            _check_samples(process, sampled, used, place)
            if process["witnesses"]:
                _check_witnesses(process["witnesses"], f"{place}.witnesses")
            if process["below"]:
                _check_children(process, used, place)
        _check_indexes(used, len(data["stacks"]), "a sample's stack")
    except _InvalidTrace as wrong:
        raise TraceError(f"{source}: {wrong}") from None
    trace: Trace = data
    return trace


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
            with open(path, "rb", buffering=0, opener=only_regular) as file:
                # Not the maximum size: that much memory would be allocated for each file.
                size = os.fstat(file.fileno()).st_size
                if size > MAX_BYTES:
                    raise TraceError(f"{path.name}: it is larger than {MAX_BYTES >> 20} MiB")
                text = file.read(size)
            trace = parse(text.decode("utf-8"), path.name)
            first = names.setdefault(trace["node"], path.name)
            if first != path.name:
                raise TraceError(f"{path.name}: it is of {_shown(trace['node'])}, as {first} is")
        except UnicodeDecodeError:
            gaps[_node_of(path)] = Gap(INVALID, f"{path.name}: it is no JSON")
        except OSError as problem:
            gaps[_node_of(path)] = Gap(INVALID, f"{path.name}: {problem.strerror}")
        except TraceError as problem:
            gaps[_node_of(path)] = Gap(INVALID, str(problem))
        else:
            yield trace


def _node_of(path: Path) -> str:
    return path.name[len("trace-") : -len(".json")]

"""The directory of one capture: a trace per node, and the grouped stacks in each form."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nodeready.files import write_atomically
from nodeready.triage.stacks import import_py_spy
from nodeready.triage.stacks import trace as traces
from nodeready.triage.stacks.document import Stacks
from nodeready.triage.stacks.trace import SCHEMA, Trace, TraceError

#: What a directory of ours holds.
_OURS = re.compile(r"trace-[A-Za-z0-9_.-]+\.json|stacks(\.[a-z]+){1,2}")
#: Texts of ``py-spy dump``, as they were collected.
_TEXTS = (".txt", ".out")
#: Characters of a node's name in a file's name: with what is around it, less than NAME_MAX.
_MOST = 200


class Foreign(Exception):
    """A directory that holds files of somebody else; one line."""


def file_name(node: str) -> str:
    """The file of a node's trace. No two nodes have the same, and none is a path."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", node)[:_MOST]
    if plain != node:
        plain += "-" + hashlib.sha256(node.encode("utf-8", "replace")).hexdigest()[:8]
    return f"trace-{plain}.json"


def prepare(directory: Path) -> None:
    """Make the directory where it is missing. Raises Foreign for one that is not empty and not
    ours, and OSError."""
    try:
        directory.mkdir()
        return
    except FileExistsError:
        if not directory.is_dir():
            raise Foreign(f"{directory}: is no directory") from None
    others = [path.name for path in directory.iterdir() if not _OURS.fullmatch(path.name)]
    if others:
        raise Foreign(f"{directory}: holds other files ({min(others)}): name a new directory")


def kept(directory: Path, found: Iterable[Trace]) -> Iterator[Trace]:
    """Write each trace before it is handed on; traces of an earlier run go when all are there.

    Raises OSError.
    """
    written = set()
    for trace in found:
        written.add(_keep(directory, trace))
        yield trace
    for path in directory.glob("trace-*.json"):
        if path.name not in written:
            path.unlink()


def _keep(directory: Path, trace: Trace) -> str:
    name = file_name(trace["node"])
    write_atomically(directory / name, [json.dumps(trace, separators=(",", ":")), "\n"])
    return name


def write(directory: Path, stacks: Stacks, texts: Mapping[str, Iterable[str]]) -> None:
    """The grouped stacks in every form, and a trace that tells why for each node without one.

    texts: ``stacks.EXTENSION`` -> what that file holds, in pieces
    Raises OSError.
    """
    for node, error in stacks.errors.items():
        _keep(directory, nothing(node, error, stacks.started))
    for name, text in texts.items():
        write_atomically(directory / name, text)


def nothing(node: str, error: str, started: str) -> Trace:
    """The trace of a node that gave none."""
    empty: dict[str, Any] = {name: [] for name in ("frames", "stacks", "processes", "instead")}
    return {
        "schema": SCHEMA, "node": node, "started": started, "interval_s": 0.0, "error": error,
        **empty,
    }  # fmt: skip


def read(path: Path) -> tuple[Iterator[Trace], dict[str, str]]:
    """What was kept there, or texts of ``py-spy dump``: the traces, and what is wrong with others.

    path: a directory, or one file
    As `traces.load`: the second is complete when the first has been iterated over.
    Raises TraceError, then too, when there is nothing to read.
    """
    if not path.is_dir():
        errors: dict[str, str] = {}
        return _from_texts([path], errors, alone=True), errors
    names = _listed(path)
    texts = sorted(one for one in names if one.suffix in _TEXTS and one.is_file())
    if any(_OURS.fullmatch(one.name) for one in names):
        found, errors = traces.load(path)
        return _without_errors(found, errors), errors
    if not texts:
        raise TraceError(
            f"{path}: there is no trace-NODE.json of -o and no text of py-spy dump (*.txt, *.out)"
        )
    errors = {}
    return _from_texts(texts, errors, alone=False), errors


def _without_errors(found: Iterable[Trace], errors: dict[str, str]) -> Iterator[Trace]:
    for trace in found:
        if trace["error"] and not trace["processes"]:
            errors[trace["node"]] = trace["error"]
        else:
            yield trace


def _listed(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError as problem:
        raise TraceError(f"{path}: {problem.strerror}") from None


def _from_texts(texts: Iterable[Path], errors: dict[str, str], alone: bool) -> Iterator[Trace]:
    """alone: this is all that there is: what is wrong with it is raised."""
    for path in texts:
        try:
            data = _content(path)
            if path.suffix == ".json":
                yield traces.parse(data, path.name)
            else:
                yield from import_py_spy.parse(data.decode("utf-8", "replace"), path.stem)
        except TraceError as problem:
            if alone:
                raise
            errors[path.stem] = str(problem)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(traces.MAX_BYTES + 1)
    except OSError as problem:
        raise TraceError(f"{path}: {problem.strerror}") from None
    if len(data) > traces.MAX_BYTES:
        raise TraceError(f"{path}: it is larger than {traces.MAX_BYTES >> 20} MiB")
    return data

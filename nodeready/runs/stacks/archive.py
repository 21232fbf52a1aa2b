"""The directory of one capture: a trace per node, and the grouped stacks in each form."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from nodeready.agent.stacks.program import SCHEMA
from nodeready.core.files import remove, write_atomically
from nodeready.core.outcome import INVALID, Gap
from nodeready.core.text import sanitise
from nodeready.runs.stacks.document import Stacks
from nodeready.runs.stacks.trace import (
    StackSample,
    Trace,
    TracedProcess,
    TraceError,
    content,
    load,
    parse,
    to_json,
)
from nodeready.runs.user_files import output_directory

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
        """The parsed node."""
        return replace(
            empty_trace(self.name, self.error, ""),
            frames=tuple(self.frames),
            stacks=tuple(self.stacks),
            processes=tuple(self.processes),
        )


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


def _process(node: _DumpedNode, pid: int, command: str, lines: list[str]) -> TracedProcess:
    threads = [thread for thread in _threads(lines) if thread.frames]
    main = _main(threads, pid)
    error = "" if main else _error(lines) or "py-spy printed no stack of it"
    other_threads = tuple(
        (thread.name, node.stack(thread.python_frames()))
        for thread in threads
        if thread is not main
    )
    holder = next((thread for thread in threads if "gil" in thread.state), None)
    sample = StackSample(
        node.stack(main.python_frames()) if main else None,
        other_threads,
        holder.name if holder else "",
        error,
    )
    identity = None, None, None, "", "", "", command[:_MAX_COMMAND]
    native = (
        node.stack(main.named_frames()) if main and any(map(_is_native, main.frames)) else None
    )
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
        node.processes.append(_process(node, int(match[1]), match[2], lines[at + 1 : end]))
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


def read(path: Path) -> tuple[Iterator[Trace], dict[str, Gap]]:
    """The traces of a directory, or of texts of ``py-spy dump``, and the gaps by node.

    path: a directory, or one file
    As in `trace.load`, the gaps are complete when the traces have been iterated over.
    Raises TraceError, also while iterating, when nothing can be read.
    """
    if not path.is_dir():
        gaps: dict[str, Gap] = {}
        return _from_texts([path], gaps, is_single=True), gaps
    entries = _listed(path)
    if any(_OWN_FILES.fullmatch(entry.name) for entry in entries):
        traces, gaps = load(path)
        return _without_gaps(traces, gaps), gaps
    texts = sorted(entry for entry in entries if entry.suffix in _TEXTS and entry.is_file())
    if not texts:
        raise TraceError(
            f"{path}: there is no trace-NODE.json of -o and no text of py-spy dump (*.txt, *.out)"
        )
    gaps = {}
    return _from_texts(texts, gaps, is_single=False), gaps


def _without_gaps(traces: Iterable[Trace], gaps: dict[str, Gap]) -> Iterator[Trace]:
    for trace in traces:
        if trace.error and not trace.processes:
            gaps[trace.node] = Gap(INVALID, trace.error)
        else:
            yield trace


def _listed(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError as problem:
        raise TraceError(f"{path}: {problem.strerror}") from None


def _from_texts(texts: Iterable[Path], gaps: dict[str, Gap], is_single: bool) -> Iterator[Trace]:
    """The traces in texts of py-spy. is_single: raise the error of the only file"""
    for path in texts:
        # As `srun --output=trace-%N.out` names it, or like a trace of nodeready.
        node = path.stem.removeprefix("trace-") or path.name
        try:
            data = content(path, str(path))
            if path.suffix == ".json":
                yield parse(data, path.name)
            else:
                yield from parse_dump(data.decode("utf-8", "replace"), node)
        except TraceError as problem:
            if is_single:
                raise
            gaps[node] = Gap(INVALID, str(problem))

"""The document of `cores`: every core file once, its backtrace, equal crashes grouped.

`run` and `dump` ask the nodes; the rest is pure.
"""

from __future__ import annotations

import re
import signal
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from nodeready.agent.asking import (
    INTERRUPT,
    Answer,
    Asks,
    new_nonce,
    no_answer,
    request,
    rows,
)
from nodeready.agent.cores import gcore, program
from nodeready.agent.cores.gdb import CRASHED, EVERY, PYTHON
from nodeready.agent.cores.program import CoreFile, CoreSummary, Listing, ReadTotals
from nodeready.agent.users_file import by_turns
from nodeready.core import wire
from nodeready.core.base import ProbeError
from nodeready.core.exit_codes import Refused
from nodeready.core.json_types import Count
from nodeready.core.outcome import INTERRUPTED, INVALID, Gap, NodeGaps, gaps_code, node_gaps
from nodeready.core.policy import Policy
from nodeready.core.text import counted, utc_now
from nodeready.runs import targets
from nodeready.runs.options import CoresOptions
from nodeready.runs.targets import Targets, ask_with_progress, keep_gaps
from nodeready.runs.tell import Tell
from nodeready.runs.user_files import output_directory

# --- gdb's backtraces: from its text to frames, and the key of equal crashes.

#: Maximum characters of a name, and of a line in which it is searched.
_NAME_CHARACTERS, _LINE_CHARACTERS = 2000, 20_000
_FRAME = re.compile(r"#[0-9]+ +(?:0x([0-9a-f]+) in )?(.+)")
_SOURCE_LINE = re.compile(r"(.+):([0-9]+)")
# Brackets in a function's name, before its arguments, and operators that look like brackets.
_BRACKET = re.compile(
    r"operator[<>=!+*/%&|^~\[\],-]*(?:\(\))?"
    r"|( ?\()(anonymous namespace\))?|([<{])|([)}]|(?<!-)>)"
)
_THREAD = re.compile(r"Thread ([0-9]+) \((?:Thread 0x[0-9a-f]+ )?\(?LWP ([0-9]+)\)?.*")
# glibc chooses one of these variants by the CPU: on two kinds of nodes, the same crash has two
# names. The pattern must not backtrack: the author of a program chooses the names.
_CPU_VARIANT = re.compile(
    r"(?:_asimd|_sve|_mte)*(?:_(?:sse|avx|evex|erms|rtm|unaligned)[0-9_a-z]*|_asimd|_sve|_mte)\Z"
)
_VARIANT_CHARACTERS = string.ascii_lowercase + string.digits + "_"
#: Functions through which a program ends itself: it crashed in their caller.
_ENDINGS = frozenset(
    (
        "__pthread_kill_implementation", "__pthread_kill_internal", "__GI___pthread_kill",
        "pthread_kill", "__GI_raise", "raise", "__GI_abort", "abort", "kill", "__libc_message",
        "__libc_message_impl", "malloc_printerr", "__GI___fortify_fail", "__fortify_fail",
        "__GI___chk_fail", "__stack_chk_fail", "__assert_fail_base", "__GI___assert_fail",
        "__assert_fail", "__gnu_cxx::__verbose_terminate_handler()", "std::terminate()",
        "__cxxabiv1::__terminate(void (*)())", "__cxa_throw", "__cxa_rethrow",
        "<signal handler called>",
    )
)  # fmt: skip


@dataclass(frozen=True)
class CoreFrame:
    """One call, without addresses and values."""

    JSON: ClassVar = ("function", "file", "line", "library")

    function: str  # ``??`` where gdb has no name
    file: str = ""  # of the source, as gdb has it; "": no debug information
    line: Count = 0  # 0: none
    library: str = ""  # the file name of the shared library; "": the program itself, or not known
    # without a name: the address within its page, wherever the program was loaded
    offset: int = 0

    @property
    def place(self) -> str:
        """``strlen.S:79``, or ``libc.so.6``; "": unknown."""
        if self.file:
            return f"{self.file.rpartition('/')[2]}:{self.line}"
        return self.library


class CoreThread(NamedTuple):
    """One thread: its number in gdb, its id in the kernel, and its frames."""

    number: int
    lwp: int
    frames: tuple[CoreFrame, ...]


class Backtrace(NamedTuple):
    """gdb's backtraces of one core; frames innermost first, as gdb numbers them."""

    crashed: tuple[CoreFrame, ...] = ()  # of the thread that got the signal
    threads: tuple[CoreThread, ...] = ()
    python: tuple[str, ...] = ()  # the lines of ``py-bt``, if gdb has this command


def _function(text: str) -> str:
    """``f`` of ``f (x=1)``: the text before the arguments, which begin at the first `` (`` outside
    of all brackets. C++ has both in names, and operators that look like brackets.
    """
    depth = 0
    for match in _BRACKET.finditer(text):
        opens, anonymous, also_opens, closes = match.groups()
        if opens == " (" and depth == 0 and not anonymous:
            return text[: match.start()]
        if closes:
            depth = max(0, depth - 1)
        elif also_opens or (opens and not anonymous):
            depth += 1
    return text


def _library(text: str) -> tuple[str, str] | None:
    """The text before and after the last `` from `` that a path or a library follows."""
    path_start, last_start = text.rfind(" from /"), text.rfind(" from ")
    name = text[last_start + 6 :]
    is_library = last_start >= 0 and ".so" in name and " " not in name
    start = last_start if is_library else path_start
    return (text[:start], text[start + 6 :]) if start >= 0 else None


def parse_frame(row: str) -> CoreFrame | None:
    """The frame of one line of a backtrace; None: another line."""
    match = _FRAME.fullmatch(row.rstrip())
    if match is None:
        return None
    text, file, line, library = match[2], "", 0, ""
    before, separator, after = text.rpartition(" at ")
    if separator and (place := _SOURCE_LINE.fullmatch(after)):
        text, file, line = before, place[1], int(place[2][:9])
    elif parts := _library(text):
        text, library = parts[0], parts[1].rpartition("/")[2]
    function = _function(text[:_LINE_CHARACTERS])[:_NAME_CHARACTERS]
    offset = int(match[1] or "0", 16) & 0xFFF if function == "??" else 0
    return CoreFrame(function, file[:_NAME_CHARACTERS], line, library[:_NAME_CHARACTERS], offset)


def parse(text: str) -> Backtrace:
    """The backtraces in gdb's output, by the headings of `nodeready.agent.cores.gdb`."""
    section = ""
    crashed: list[CoreFrame] = []
    threads: list[tuple[int, int, list[CoreFrame]]] = []
    python: list[str] = []
    for row in text.splitlines():
        if row in (CRASHED, EVERY, PYTHON):
            section = row
        elif section == PYTHON and row.strip():
            python.append(row)
        elif section == EVERY and (head := _THREAD.match(row)):
            threads.append((int(head[1][:9]), int(head[2][:9]), []))
        elif frame := parse_frame(row):
            if section == CRASHED:
                crashed.append(frame)
            elif section == EVERY and threads:
                threads[-1][2].append(frame)
    by_thread = tuple(CoreThread(number, lwp, tuple(rows)) for number, lwp, rows in threads)
    return Backtrace(tuple(crashed), by_thread, tuple(python))


def crash_key(frames: Iterable[CoreFrame]) -> tuple[CoreFrame, ...]:
    """The frames by which crashes are compared, without glibc's variants for a CPU."""
    names = ((frame, _without_cpu(frame.function)) for frame in frames)
    return tuple(frame if name == frame.function else CoreFrame(name) for frame, name in names)


def _without_cpu(function: str) -> str:
    """``memcpy`` of ``memcpy_avx_unaligned_erms``."""
    match = _CPU_VARIANT.search(function, len(function.rstrip(_VARIANT_CHARACTERS)))
    return function[: match.start()] if match else function


def headline(frames: Sequence[CoreFrame]) -> CoreFrame | None:
    """The frame that names a crash: the first with a name that is not one of _ENDINGS."""
    named = [frame for frame in frames if frame.function != "??"]
    first = named[0] if named else None
    return next((frame for frame in named if frame.function not in _ENDINGS), first)


def crashed_in(frames: Sequence[CoreFrame], top: CoreFrame) -> bool:
    """Whether it crashed in this frame, and not in a nameless one that this frame called."""
    before = frames[: frames.index(top)]
    return all(frame.function in _ENDINGS for frame in before)


# --- The core files, the crashes and their groups.


@dataclass(frozen=True)
class CrashFile:
    """One core file, of one node or on a file system that several nodes share."""

    file: CoreFile
    reader: str  # the node that reads it
    nodes: tuple[str, ...]  # all nodes that see it
    # the node or host that wrote it, by the file's name; "": the name does not tell
    host: str = ""

    @property
    def owner(self) -> int:
        return self.file.owner

    @property
    def modified_ns(self) -> int:
        return self.file.modified_ns


@dataclass(frozen=True)
class Crash:
    """One core file, of one node or on a file system that several nodes share."""

    JSON: ClassVar = (
        *("node", "location.nodes", "location.file.path", "when", "age_s"),
        *("location.file.size_bytes", "core.whole_bytes", "truncated", "signal", "pid"),
        *(f"core.{name}" for name in ("uid", "user", "comm", "program", "command", "threads")),
        *("core.rank", "core.job", "core.unread", "core.warning", "text_file", "backtrace.python"),
    )
    JSON_KEYS: ClassVar = {"location.nodes": "seen_on", "when": "written"}

    location: CrashFile
    core: CoreSummary
    text: str = ""  # gdb's output; "": none
    text_file: str = ""  # file of gdb's output in `-o DIR`; "": no output

    @cached_property
    def backtrace(self) -> Backtrace:
        return parse(self.text)

    @property
    def node(self) -> str:
        """The node where it crashed; if that is unknown, the node that read it."""
        return self.location.host or self.location.reader

    @property
    def when(self) -> str:
        """The time of writing: ISO 8601, UTC."""
        try:
            moment = datetime.fromtimestamp(self.location.file.modified_ns // 10**9, timezone.utc)
        except (OverflowError, ValueError, OSError):
            return ""
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")

    @property
    def age_s(self) -> float:
        """By the node's clock."""
        return round(self.location.file.age_s, 1)

    @property
    def pid(self) -> int | None:
        """The pid on the host, if the file's name has it; else in the process's own namespace."""
        return self.core.pid if self.location.file.pid is None else self.location.file.pid

    @property
    def signal(self) -> int | None:
        return self.location.file.signal if self.core.signal is None else self.core.signal

    @property
    def program(self) -> str:
        """The program's name, without its directory."""
        return self.core.program.rpartition("/")[2] or self.core.comm

    @property
    def truncated(self) -> bool:
        total_bytes = self.core.whole_bytes
        return total_bytes is not None and self.location.file.size_bytes < total_bytes


@dataclass(frozen=True)
class CoreGroup:
    """Crashes of the same program by the same signal in the same place."""

    JSON: ClassVar = (
        *("signal", "signal_name", "program", "function", "cores", "nodes", "ranks", "frames"),
    )

    signal: int | None  # 0: copies of live processes; None: not known
    program: str  # without its directory
    # of the thread that got the signal, innermost first, as gdb numbers them
    frames: tuple[CoreFrame, ...]
    crashes: tuple[Crash, ...]  # the earliest first
    cores: tuple[Count, ...]  # their indexes into `cores`

    @property
    def signal_name(self) -> str:
        """Such as ``SIGSEGV``; ``live``: of a live process."""
        return signal_name(self.signal)

    @property
    def function(self) -> str:
        """The first named function that does not only end a program: it crashed there, or in a
        function that it called.
        """
        return self.headline.function if self.headline else ""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the crashes, in their order."""
        return tuple(dict.fromkeys(crash.node for crash in self.crashes))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the crashes, sorted."""
        ranks = {crash.core.rank for crash in self.crashes}
        return tuple(sorted(rank for rank in ranks if rank is not None))

    @property
    def headline(self) -> CoreFrame | None:
        return headline(self.frames)


@dataclass(frozen=True)
class Cores:
    """The document of `nodeready cores`, and DIR/cores.json: where the program of every core
    crashed. Equal crashes are one group; the group of the earliest crash is first.
    """

    SCHEMA: ClassVar = "cores"
    VERSION: ClassVar = 2
    JSON: ClassVar = (
        *("started", "finished", "complete", "groups", "crashes", "gaps", "notes", "unlisted"),
    )
    JSON_KEYS: ClassVar = {"crashes": "cores", "unlisted": "more"}

    started: str  # ISO 8601, UTC
    finished: str  # ISO 8601, UTC
    nodes: tuple[str, ...]  # all nodes that were asked
    crashes: tuple[Crash, ...]  # every core file once
    gaps: NodeGaps = ()  # the nodes that gave no answer
    # node -> the places that it could not search, and why
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # node -> number of older cores that were not read
    unlisted: Mapping[str, int] = field(default_factory=dict)
    complete: bool = True  # False when it was interrupted

    @cached_property
    def read(self) -> tuple[Crash, ...]:
        """The cores with a backtrace."""
        return tuple(crash for crash in self.crashes if not crash.core.unread)

    @cached_property
    def unread(self) -> tuple[Crash, ...]:
        return tuple(crash for crash in self.crashes if crash.core.unread)

    @cached_property
    def groups(self) -> tuple[CoreGroup, ...]:
        """The cores with a backtrace, by their crash."""
        return group_crashes(self.crashes)


def cores_code(cores: Cores) -> int:
    """The exit code of ``cores``: success needs every node's answer and every core's backtrace."""
    return gaps_code(cores.gaps, complete=cores.complete, check=bool(cores.unread))


def signal_name(number: int | None) -> str:
    """``SIGSEGV``; ``live``: a copy of a live process; ``signal?``: unknown."""
    if number is None:
        return "signal?"
    if number == 0:
        return "live"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def group_crashes(crashes: Sequence[Crash]) -> tuple[CoreGroup, ...]:
    """The crashes with a backtrace, equal ones together.

    The group of the earliest crash is first: it may be the cause of later crashes.
    """
    by_key: dict[tuple[int | None, str, tuple[CoreFrame, ...]], list[int]] = {}
    readable = [index for index, crash in enumerate(crashes) if not crash.core.unread]

    def age(index: int) -> tuple[int, str]:
        return crashes[index].location.modified_ns, crashes[index].node

    for index in sorted(readable, key=age):
        crash = crashes[index]
        key = crash.signal, crash.program, crash_key(crash.backtrace.crashed)
        by_key.setdefault(key, []).append(index)
    groups = []
    for (crash_signal, program_name, _), indexes in by_key.items():
        members = tuple(crashes[index] for index in indexes)
        frames = members[0].backtrace.crashed
        groups.append(CoreGroup(crash_signal, program_name, frames, members, tuple(indexes)))
    return tuple(groups)


def _short_name(name: str) -> str:
    return name.partition(".")[0].lower()


def deduplicate(listings: Mapping[str, Listing]) -> list[CrashFile]:
    """Every core file once, the newest first, each with the node that is to read it.

    Several nodes see a file on a shared file system: path, inode, size and time are equal. The
    node that wrote it reads it, if the file's name tells that node, else the node with the fewest
    files to read.
    """
    nodes_by_file: dict[tuple[str, int, int, int], list[tuple[str, CoreFile]]] = {}
    for node, listing in listings.items():
        for file in listing.files:
            key = (file.path, file.inode, file.modified_ns, file.size_bytes)
            nodes_by_file.setdefault(key, []).append((node, file))
    by_short_name = {_short_name(node): node for node in listings}
    load = dict.fromkeys(listings, 0)
    crash_files = []
    for sightings in sorted(nodes_by_file.values(), key=lambda rows: -rows[0][1].modified_ns):
        files = dict(sightings)
        host = sightings[0][1].host
        home = by_short_name.get(_short_name(host), "") if host else ""
        reader = home if home in files else min(files, key=lambda node: load[node])
        load[reader] += 1
        file = files[reader]
        # The file's name may be false: if that node had written the file, it would see the file.
        host = "" if home and home not in files else home or file.host
        crash_files.append(CrashFile(file, reader, tuple(files), host))
    return crash_files


def with_file_names(crashes: Iterable[Crash]) -> tuple[Crash, ...]:
    """The crashes with the files of their texts: ``NODE-PID.txt``; equal names get numbers."""
    named: list[Crash] = []
    taken: dict[str, int] = {}
    for crash in crashes:
        node = "".join(c if c.isalnum() or c in ".-_" else "_" for c in crash.node).lstrip(".-")
        stem = f"{node[:200] or '_'}-{'unknown' if crash.pid is None else crash.pid}"
        name, number = stem, taken.get(stem, 0) + 1
        while number > 1 and (name := f"{stem}-{number}") in taken:
            number += 1
        taken[stem] = number
        taken.setdefault(name, 1)
        named.append(replace(crash, text_file=f"{name}.txt" if crash.text else ""))
    return tuple(named)


# --- Two rounds: the nodes list their core files, by names alone; then the node that wrote a core
# reads it, even if further nodes see it.

MAX_CORES = 20  # maximum cores that one node reads
_MAX_CANDIDATES = 60  # maximum cores of one node among which those of a job are searched
_LIST_S = 30  # seconds to list the cores; a directory on a mount that hangs takes all of it
#: Seconds to read a core, to start reading, and maximum for all cores of a node.
_READ_S, _START_S, _MAX_READ_S = 60, 20, 1200
#: Maximum bytes of an unpacked backtrace: the node caps its text at 1 MiB of characters.
_TEXT_BYTES = 8 << 20


def collect_cores(
    ask: Asks, tag: str, policies: Mapping[str, Policy], since_s: float = 0, job: str = ""
) -> Cores:
    """List the cores of these nodes, and read each once.

    tag:     of the run
    since_s: maximum age of a core in seconds; 0: any
    job:     only cores of this job; "": all
    """
    started = utc_now()
    gaps: dict[str, Gap] = {}
    nonce = new_nonce()
    requests = {}
    for name, policy in policies.items():
        patterns = (policy.core_pattern,) if policy.core_handler == "path" else ()
        requests[name] = program.CoresConfig(nonce, tag, _LIST_S, patterns, since_s)
    answers = _ask_all(ask, "looking", requests)
    listings: dict[str, Listing] = {}
    for name, answer in answers.items():
        try:
            received = rows(answer, requests[name], {"listing": Listing})
        except ProbeError as problem:
            gaps[name] = Gap(INVALID, problem.reason, problem.evidence)
            continue
        if received:
            listings[name] = received[0]
        else:
            gaps[name] = no_answer(answer, requests[name])
    unlisted = {name: listing.unlisted_count for name, listing in listings.items()}
    notes = {name: list(listing.notes) for name, listing in listings.items()}
    by_reader: dict[str, list[CrashFile]] = {}
    for crash_file in deduplicate(listings):
        by_reader.setdefault(crash_file.reader, []).append(crash_file)
    crashes: list[Crash] = []
    complete = not any(answer.has_gap(INTERRUPTED) for answer in answers.values())
    if by_reader:
        # After an interrupt, no node is asked, and the cores are listed as unread.
        asks = ask if complete else lambda _, names: dict.fromkeys(names, Answer(gap=INTERRUPT))
        crashes, lost, complete = _read(asks, tag, by_reader, job, unlisted=unlisted, notes=notes)
        gaps |= lost
    counts = {name: number for name, number in unlisted.items() if number}
    notes_of = {name: tuple(lines) for name, lines in notes.items() if lines}
    looked = started, utc_now(), tuple(policies), with_file_names(crashes)
    return Cores(*looked, node_gaps(gaps), notes_of, counts, complete)


def _ask_all(
    ask: Asks, phase: str, configs: Mapping[str, program.CoresConfig]
) -> Mapping[str, Answer]:
    requests = {name: request(name, program.__name__, config) for name, config in configs.items()}
    return ask(phase, requests)


def _read(
    ask: Asks,
    tag: str,
    by_reader: Mapping[str, list[CrashFile]],
    job: str,
    *,
    unlisted: dict[str, int],
    notes: dict[str, list[str]],
) -> tuple[list[Crash], dict[str, Gap], bool]:
    """Every core with its backtrace; the gaps of the nodes that were lost meanwhile; and
    whether it was not interrupted.

    Adds to ``unlisted`` the number of cores that were not read, and to ``notes``.
    """
    maximum = _MAX_CANDIDATES if job else MAX_CORES
    chosen = {name: by_turns(files)[:maximum] for name, files in by_reader.items()}
    requests = {}
    for name, files in chosen.items():
        unlisted[name] += len(by_reader[name]) - len(files)
        limit_s = min(_MAX_READ_S, _START_S + _READ_S * min(len(files), MAX_CORES))
        located = (crash_file.file for crash_file in files)
        selected = tuple((f.path, f.inode, f.modified_ns, f.size_bytes) for f in located)
        config = program.CoresConfig(new_nonce(), tag, limit_s, selected=selected)
        requests[name] = replace(config, job=job, maximum=MAX_CORES)
    answers = _ask_all(ask, "reading", requests)
    crashes = []
    for name, files in chosen.items():
        answer, refused = answers[name], list[str]()
        try:
            kinds = {"core": CoreSummary, "done": ReadTotals}
            received = rows(answer, requests[name], kinds, refused)
        except ProbeError as problem:
            received, answer = [], Answer(gap=Gap(INVALID, problem.reason))
        cores = {core.number: core for core in received if isinstance(core, CoreSummary)}
        end = next((row for row in received if isinstance(row, ReadTotals)), None)
        if end is None:
            refused.append(f"no answer: {no_answer(answer, requests[name]).reason}")
        else:
            unlisted[name] += end.unread_count
            if end.unknown_job_count:
                count = counted(end.unknown_job_count, "core")
                notes[name].append(f"the job of {count} is unknown")
        if refused:
            missing = (number for number in range(len(files)) if number not in cores)
            cores |= {number: CoreSummary(number, unread=refused[0]) for number in missing}
        for number, core in cores.items():
            if 0 <= number < len(files):
                crashes.append(Crash(files[number], core, _unpacked(core.text)))
    gaps = {name: answer.gap for name, answer in answers.items() if answer.gap}
    lost = {name: gap for name, gap in gaps.items() if gap.is_unreached}
    return crashes, lost, not any(answer.has_gap(INTERRUPTED) for answer in answers.values())


def _unpacked(text: str) -> str:
    """gdb's output; "" for text that cannot be unpacked."""
    try:
        return wire.unpack(text, _TEXT_BYTES).decode("utf-8", "replace")
    except wire.DecodeError:
        return ""


# --- A core of a live process on one node.

_PREVIEW_S = 30  # seconds for the preview, which starts gdb once for its version
#: Maximum seconds to take a core of any size, and bytes per second of a slow disk.
_MAX_TAKE_S, _SLOW_DISK = 3600, 50_000_000


class DumpError(Exception):
    """No core was taken: the reason, one line. gap: of the node; None: it answered"""

    def __init__(self, reason: str, gap: Gap | None = None) -> None:
        super().__init__(reason)
        self.gap = gap


@dataclass(frozen=True)
class CoreDumper:
    ask: Asks
    tag: str  # of the run
    node: str  # its name, and its policy
    policy: Policy
    pid: int
    directory: str = ""  # on this machine only; "": the core directory

    def _ask(self, limit_s: int, started: int, kinds: dict[str, type]) -> Any:
        """The first row of the answer. Raises DumpError. started: 0: only preview"""
        name, policy = self.node, self.policy
        pattern = policy.core_pattern if policy.core_handler == "path" else ""
        process = self.pid, pattern, self.directory, started
        config = gcore.AttachConfig(new_nonce(), self.tag, limit_s, *process)
        answer = self.ask("gcore", {name: request(name, gcore.__name__, config)})[name]
        if answer.has_gap(INTERRUPTED):
            raise DumpError(f"{name}: {answer.reason()}", answer.gap)
        try:
            received = rows(answer, config, kinds)
        except ProbeError as problem:
            raise DumpError(f"{name}: {problem.reason}") from None
        if not received:
            raise DumpError(f"{name}: {no_answer(answer, config).reason}", answer.gap)
        return received[0]

    def preview(self) -> gcore.Preview:
        """The process and its future core. Raises DumpError when no core can be taken."""
        preview: gcore.Preview = self._ask(_PREVIEW_S, 0, {"seen": gcore.Preview})
        if preview.refused:
            raise DumpError(preview.refused)
        return preview

    def take(self, preview: gcore.Preview) -> gcore.DumpResult:
        """Take the core. Raises DumpError."""
        limit_s = min(_MAX_TAKE_S, 60 + preview.size_bytes // _SLOW_DISK)
        kinds = {"taken": gcore.DumpResult, "seen": gcore.Preview}
        taken: gcore.DumpResult | gcore.Preview = self._ask(limit_s, preview.started, kinds)
        if isinstance(taken, gcore.Preview):
            raise DumpError(taken.refused)
        return taken


# --- The run of `nodeready cores`.


def run(inventory: str | None, options: CoresOptions, tell: Tell) -> Cores:
    """The cores of the nodes; without inventory of this machine, or the job. Raises Refused."""
    nodes = _targets(inventory, options, tell)
    with nodes.transport as transport:
        ask = ask_with_progress(transport, tell)
        job, since_s = options.job or "", options.since_s
        cores = collect_cores(ask, transport.tag, nodes.policies, since_s, job)
    unread = (crash.location.reader for crash in cores.unread)
    keep_gaps(nodes, tell, cores.gaps, complete=cores.complete, further=unread)
    return cores


def dump(
    inventory: str | None,
    options: CoresOptions,
    tell: Tell,
    confirm: Callable[[gcore.Preview], bool],
) -> tuple[gcore.Preview, gcore.DumpResult] | None:
    """Take a core of ``--gcore PID``; None: it was not confirmed. Raises Refused, DumpError."""
    pid = options.pid
    assert pid is not None
    nodes = _targets(inventory, options, tell)
    with nodes.transport as transport:
        if len(nodes.policies) != 1:
            raise Refused(f"--gcore {pid}: choose one node with --limit, or --local")
        if options.output is not None and inventory is not None:
            raise Refused(
                "-o: with --gcore only for --local; a node keeps the core in its own directory"
            )
        ((name, policy),) = nodes.policies.items()
        directory = ""
        if options.output is not None:
            directory = str(output_directory(Path(options.output), "cores.json").resolve())
        ask = ask_with_progress(transport, tell)
        dumper = CoreDumper(ask, transport.tag, name, policy, pid, directory)
        preview = dumper.preview()
        return (preview, dumper.take(preview)) if confirm(preview) else None


def _targets(inventory: str | None, options: CoresOptions, tell: Tell) -> Targets:
    if options.via == "ssh" and options.local == (inventory is not None):
        raise Refused("give either an INVENTORY or --local")
    if options.local and options.via != "ssh":
        raise Refused(f"--via {options.via}: cannot be combined with --local")
    if options.local and options.limit is not None:
        raise Refused("--limit: cannot be combined with --local")
    if options.local:
        return targets.local_targets(targets.local_policy(options, tell.note))
    return targets.targets_of_ended_job(inventory, options, options.job, tell)

"""The document of `cores`: every core file once, its backtrace, equal crashes grouped.

`deduplicated` to `Cores` are pure; `collect_cores` and `Dumping` ask the nodes.
"""

from __future__ import annotations

import re
import signal
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeVar

from nodeready.node.cores import gcore, program
from nodeready.node.cores.gdb import CRASHED, EVERY, PYTHON
from nodeready.node.cores.listing import CoreFile, Listing
from nodeready.node.cores.program import CoreSummary, ReadTotals
from nodeready.node.users_file import by_turns
from nodeready.policy import Policy
from nodeready.subjects import wire
from nodeready.subjects.base import ProbeError
from nodeready.subjects.json_types import Count
from nodeready.text import now
from nodeready.transport.base import (
    INTERRUPTED,
    UNREACHED,
    Answer,
    Asks,
    Failure,
    Request,
    interrupted,
    new_nonce,
    no_answer_reason,
    request,
    rows,
)

# --- gdb's backtraces: from its text to frames, and when two crashes are equal.

#: Characters of a name that are kept, and of a line in which it is looked for.
_NAME, _LONGEST = 2000, 20_000
_FRAME = re.compile(r"#[0-9]+ +(?:0x([0-9a-f]+) in )?(.+)")
_PLACE = re.compile(r"(.+):([0-9]+)")
# Brackets in a function's name, before its arguments, and operators that look like some.
_BRACKET = re.compile(
    r"operator[<>=!+*/%&|^~\[\],-]*(?:\(\))?"
    r"|( ?\()(anonymous namespace\))?|([<{])|([)}]|(?<!-)>)"
)
_THREAD = re.compile(r"Thread ([0-9]+) \((?:Thread 0x[0-9a-f]+ )?\(?LWP ([0-9]+)\)?.*")
# glibc chooses one of these by the CPU: on two kinds of nodes, the same crash has two names. Each
# name can be read in one way only: a program's author chooses the names of its functions.
_BY_CPU = re.compile(
    r"(?:_asimd|_sve|_mte)*(?:_(?:sse|avx|evex|erms|rtm|unaligned)[0-9_a-z]*|_asimd|_sve|_mte)\Z"
)
_OF_SUFFIX = string.ascii_lowercase + string.digits + "_"
#: Functions through which a program ends itself: what called them is where it crashed.
_ENDING = frozenset(
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
class Frame:
    """One call, without addresses and values.

    function: ``??`` where gdb has no name
    file:     of the source, as gdb has it; "": no debug information
    line:     0: none
    library:  the file name of the shared library; "": the program itself, or not known
    offset:   of a function without a name, the address within its page: it is the same wherever
              the program was loaded
    """

    JSON: ClassVar = ("function", "file", "line", "library")

    function: str
    file: str = ""
    line: Count = 0
    library: str = ""
    offset: int = 0

    @property
    def place(self) -> str:
        """``strlen.S:79``, or ``libc.so.6``; "": nobody knows."""
        if self.file:
            return f"{self.file.rpartition('/')[2]}:{self.line}"
        return self.library


class CoreThread(NamedTuple):
    """One thread: its number by gdb, its id in the kernel, and where it stood."""

    number: int
    lwp: int
    frames: tuple[Frame, ...]


class Backtrace(NamedTuple):
    """What gdb said of one core; frames innermost first, as gdb numbers them.

    crashed: of the thread that got the signal
    python:  the lines of ``py-bt``, where gdb has that
    """

    crashed: tuple[Frame, ...] = ()
    threads: tuple[CoreThread, ...] = ()
    python: tuple[str, ...] = ()


def _function(text: str) -> str:
    """``f`` of ``f (x=1)``: what stands before the arguments, which begin at the first `` (`` that
    is in no bracket. C++ has both in names, and operators that look like brackets."""
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
    """What stands before and behind the last `` from `` that a path or a library follows."""
    path, last = text.rfind(" from /"), text.rfind(" from ")
    name = text[last + 6 :]
    at = last if last >= 0 and ".so" in name and " " not in name else path
    return (text[:at], text[at + 6 :]) if at >= 0 else None


def frame(row: str) -> Frame | None:
    """One line of a backtrace; None: it is none."""
    match = _FRAME.fullmatch(row.rstrip())
    if match is None:
        return None
    text, file, line, library = match[2], "", 0, ""
    before, at, behind = text.rpartition(" at ")
    if at and (place := _PLACE.fullmatch(behind)):
        text, file, line = before, place[1], int(place[2][:9])
    elif within := _library(text):
        text, library = within[0], within[1].rpartition("/")[2]
    function = _function(text[:_LONGEST])[:_NAME]
    offset = int(match[1] or "0", 16) & 0xFFF if function == "??" else 0
    return Frame(function, file[:_NAME], line, library[:_NAME], offset)


def parse(text: str) -> Backtrace:
    """All that gdb said, by our headings; a line that is no frame is passed over."""
    section, backtrace = "", Backtrace()
    crashed: list[Frame] = []
    threads: list[tuple[int, int, list[Frame]]] = []
    python: list[str] = []
    for row in text.splitlines():
        if row in (CRASHED, EVERY, PYTHON):
            section = row
        elif section == PYTHON and row.strip():
            python.append(row)
        elif section == EVERY and (head := _THREAD.match(row)):
            threads.append((int(head[1][:9]), int(head[2][:9]), []))
        elif shown_frame := frame(row):
            if section == CRASHED:
                crashed.append(shown_frame)
            elif section == EVERY and threads:
                threads[-1][2].append(shown_frame)
    return backtrace._replace(
        crashed=tuple(crashed),
        threads=tuple(CoreThread(number, lwp, tuple(rows)) for number, lwp, rows in threads),
        python=tuple(python),
    )


def crash_key(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """What two equal crashes have in common."""
    return tuple(
        Frame(short)
        if (short := _without_cpu(shown_frame.function)) != shown_frame.function
        else shown_frame
        for shown_frame in frames
    )


def _without_cpu(function: str) -> str:
    """``memcpy`` of ``memcpy_avx_unaligned_erms``."""
    match = _BY_CPU.search(function, len(function.rstrip(_OF_SUFFIX)))
    return function[: match.start()] if match else function


def headline(frames: Sequence[Frame]) -> Frame | None:
    """The frame to name a crash by: the first with a name that is not only how it ended."""
    named = [f for f in frames if f.function != "??"]
    return next((f for f in named if f.function not in _ENDING), named[0] if named else None)


def crashed_in(frames: Sequence[Frame], top: Frame) -> bool:
    """Whether it crashed in this very frame, and not in one without a name that it called."""
    before = frames[: frames.index(top)]
    return all(frame.function in _ENDING for frame in before)


# --- The core files, the crashes and their groups.


@dataclass(frozen=True)
class CrashFile:
    """One file, however many nodes see it.

    reader: the node that is asked about it
    nodes:  all that see it
    host:   where it was written, when its name tells: the node's name, else the host's; else ""
    """

    file: CoreFile
    reader: str
    nodes: tuple[str, ...]
    host: str = ""

    @property
    def owner(self) -> int:
        return self.file.owner

    @property
    def modified_ns(self) -> int:
        return self.file.modified_ns


@dataclass(frozen=True)
class Crash:
    """One core with what was read from it.

    text: gdb's words; ""
    """

    found: CrashFile
    core: CoreSummary
    text: str = ""

    @cached_property
    def backtrace(self) -> Backtrace:
        return parse(self.text)

    @property
    def node(self) -> str:
        """Where it crashed, as far as anybody knows."""
        return self.found.host or self.found.reader

    @property
    def when(self) -> str:
        """When it was written: ISO 8601, UTC."""
        try:
            moment = datetime.fromtimestamp(self.found.file.modified_ns // 10**9, timezone.utc)
        except (OverflowError, ValueError, OSError):
            return ""
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")

    @property
    def pid(self) -> int | None:
        """As the host numbered it, where the file's name has that."""
        return self.core.pid if self.found.file.pid is None else self.found.file.pid

    @property
    def signal(self) -> int | None:
        return self.found.file.signal if self.core.signal is None else self.core.signal

    @property
    def program(self) -> str:
        """The program's name, without its directory."""
        return self.core.program.rpartition("/")[2] or self.core.comm

    @property
    def truncated(self) -> bool:
        total_bytes = self.core.whole_bytes
        return total_bytes is not None and self.found.file.size_bytes < total_bytes


@dataclass(frozen=True)
class CoreGroup:
    """Crashes of the same program by the same signal in the same place.

    signal:  0: copies of live processes; None: not known
    program: without its directory
    frames:  of the thread that got the signal, innermost first, as gdb numbers them
    crashes: the first to crash stands first
    cores:   indexes into `cores`, the first to crash first
    """

    JSON: ClassVar = (
        *("signal", "signal_name", "program", "function", "cores", "nodes", "ranks", "frames"),
    )

    signal: int | None
    program: str
    frames: tuple[Frame, ...]
    crashes: tuple[Crash, ...]
    cores: tuple[Count, ...] = ()

    @property
    def signal_name(self) -> str:
        """Such as ``SIGSEGV``; ``live``: of a live process."""
        return signal_name(self.signal)

    @property
    def function(self) -> str:
        """The first function with a name that does not only end a program: where it crashed, or
        what called that."""
        return self.headline.function if self.headline else ""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the crashes, in their order."""
        return tuple(dict.fromkeys(crash.node for crash in self.crashes))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the crashes, sorted."""
        return tuple(sorted({c.core.rank for c in self.crashes if c.core.rank is not None}))

    @property
    def headline(self) -> Frame | None:
        return headline(self.frames)


@dataclass(frozen=True)
class CoreRow:
    """One core file, however many nodes see it.

    node:        where it crashed, by the file's name; else the node that read it
    seen_on:     the nodes that see this file
    written:     ISO 8601, UTC
    age_s:       by the node's clock
    whole_bytes: the size that its own headers give
    command:     the first 80 characters
    threads:     0: not known
    unread:      why there is no backtrace; "": there is one
    text_file:   of `-o DIR`: the output of gdb; "": there is none
    python:      the lines of py-bt
    """

    node: str
    seen_on: tuple[str, ...]
    path: str
    written: str
    age_s: float
    size_bytes: int
    whole_bytes: int | None
    truncated: bool
    signal: int | None
    pid: int | None
    uid: int | None
    user: str
    comm: str
    program: str
    command: str
    threads: int
    rank: int | None
    job: str
    unread: str
    warning: str
    text_file: str
    python: tuple[str, ...]

    @classmethod
    def of(cls, crash: Crash, text_file: str) -> CoreRow:
        """The row of a core in the document."""
        file, core = crash.found.file, crash.core
        return cls(
            node=crash.node,
            seen_on=crash.found.nodes,
            path=file.path,
            written=crash.when,
            age_s=round(file.age_s, 1),
            size_bytes=file.size_bytes,
            whole_bytes=core.whole_bytes,
            truncated=crash.truncated,
            signal=crash.signal,
            pid=crash.pid,
            uid=core.uid,
            user=core.user,
            comm=core.comm,
            program=core.program,
            command=core.command,
            threads=core.threads,
            rank=core.rank,
            job=core.job,
            unread=core.unread,
            warning=core.warning,
            text_file=text_file if crash.text else "",
            python=crash.backtrace.python,
        )


@dataclass(frozen=True)
class Cores:
    """The document of `nodeready cores`, and DIR/cores.json: where the program of every core
    crashed, equal crashes together, the group that began first in front.

    started:  ISO 8601, UTC
    finished: ISO 8601, UTC
    asked:    the nodes
    errors:   node -> why it gave no answer
    unreachable: the nodes among these that could not be reached
    notes:    node -> what kept it from looking somewhere
    more:     node -> how many older cores were not read
    complete: False when it was interrupted
    """

    SCHEMA: ClassVar = "cores"
    JSON: ClassVar = (
        *("started", "finished", "complete", "groups", "cores", "errors", "notes", "more"),
    )

    started: str
    finished: str
    asked: tuple[str, ...]
    crashes: tuple[Crash, ...]
    errors: Mapping[str, str] = field(default_factory=dict)
    unreachable: frozenset[str] = frozenset()
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    more: Mapping[str, int] = field(default_factory=dict)
    complete: bool = True

    @cached_property
    def read(self) -> tuple[Crash, ...]:
        """The cores with a backtrace."""
        return tuple(crash for crash in self.crashes if not crash.core.unread)

    @cached_property
    def unread(self) -> tuple[Crash, ...]:
        """The cores without one, each with its reason."""
        return tuple(crash for crash in self.crashes if crash.core.unread)

    @cached_property
    def groups(self) -> tuple[CoreGroup, ...]:
        """The cores with a backtrace by their crash."""
        indexes = {id(crash): index for index, crash in enumerate(self.crashes)}
        return tuple(
            replace(group, cores=tuple(indexes[id(crash)] for crash in group.crashes))
            for group in grouped(self.read)
        )

    @property
    def cores(self) -> tuple[CoreRow, ...]:
        """Every core file once."""
        return tuple(map(CoreRow.of, self.crashes, self.file_names))

    @cached_property
    def file_names(self) -> tuple[str, ...]:
        """For each of the crashes the name of the file that holds its text; see `file_names`."""
        return tuple(file_names(self.crashes))


def signal_name(number: int | None) -> str:
    """``SIGSEGV``; ``live``: of a live process; ``signal?``: the core does not say."""
    if number is None:
        return "signal?"
    if number == 0:
        return "live"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def grouped(crashes: Iterable[Crash]) -> tuple[CoreGroup, ...]:
    """Equal crashes together; the group that began first stands first: it may be the cause of the
    others, which lost their peer."""
    by_key: dict[tuple[object, ...], list[Crash]] = {}
    for crash in sorted(crashes, key=lambda crash: (crash.found.file.modified_ns, crash.node)):
        frames = crash_key(crash.backtrace.crashed)
        by_key.setdefault((crash.signal, crash.program, frames), []).append(crash)
    return tuple(
        CoreGroup(rows[0].signal, rows[0].program, rows[0].backtrace.crashed, tuple(rows))
        for rows in by_key.values()
    )


def _label(name: str) -> str:
    return name.partition(".")[0].lower()


def deduplicated(listings: Mapping[str, Listing]) -> list[CrashFile]:
    """Every core file once, the newest first, each with the node that is to read it.

    On a shared file system several nodes see the same one: path, inode, size and time are equal.
    It is read where it was written, if its name tells that, else where least is to be read.
    """
    read_places: dict[tuple[str, int, int, int], list[tuple[str, CoreFile]]] = {}
    for node, listing in listings.items():
        for file in listing.files:
            key = (file.path, file.inode, file.modified_ns, file.size_bytes)
            read_places.setdefault(key, []).append((node, file))
    by_label = {_label(node): node for node in listings}
    load = dict.fromkeys(listings, 0)
    crashes = []
    for places in sorted(read_places.values(), key=lambda places: -places[0][1].modified_ns):
        nodes, file = tuple(node for node, _ in places), places[0][1]
        home = by_label.get(_label(file.host), "") if file.host else ""
        reader = home if home in nodes else min(nodes, key=lambda node: load[node])
        load[reader] += 1
        file = next(one for node, one in places if node == reader)
        # A node may name a file after another one, which would see it, too, if it were its own.
        host = "" if home and home not in nodes else home or file.host
        crashes.append(CrashFile(file, reader, nodes, host))
    return crashes


def file_names(crashes: Sequence[Crash]) -> list[str]:
    """A name for the text of each: ``NODE-PID.txt``; a second one of that name has a number."""
    names: list[str] = []
    taken: dict[str, int] = {}
    for crash in crashes:
        node = "".join(c if c.isalnum() or c in ".-_" else "_" for c in crash.node).lstrip(".-")
        stem = f"{node[:200] or '_'}-{'unknown' if crash.pid is None else crash.pid}"
        name, number = stem, taken.get(stem, 0) + 1
        while number > 1 and (name := f"{stem}-{number}") in taken:
            number += 1
        taken[stem] = number
        taken.setdefault(name, 1)
        names.append(f"{name}.txt")
    return names


# --- Two rounds: the nodes list their core files, by names alone; then each core is read once, on
# the node that wrote it, however many nodes see it; or one core is taken of a live process.

#: What is missing where there is no Python.
NOT_DONE = "cores cannot be looked at"
#: Cores that are read on one node.
MOST = 20
#: Cores among which those of one job are looked for, on one node.
_AMONG = 60
#: Seconds to list them; a directory on a mount that hangs takes all of it.
_LIST_S = 30
#: Seconds to read one, beside the first, and all of a node's.
_READ_S, _FIRST_S, _ALL_S = 60, 20, 1200
#: Bytes of a backtrace that are unpacked: the node caps its text at 1 MiB of characters.
_TEXT_BYTES = 8 << 20


def collect_cores(
    ask: Asks, tag: str, policies: Mapping[str, Policy], since_s: float = 0, job: str = ""
) -> Cores:
    """List the cores of these nodes, and read each once.

    tag:     of the run
    since_s: only those of the last so many seconds; 0: all
    job:     only those of this job; "": all
    """
    started = now()
    errors: dict[str, str] = {}
    nonce = new_nonce()
    requests = {
        name: _list_config(nonce, tag, policy, since_s) for name, policy in policies.items()
    }
    answers = _ask_all(ask, "looking", requests)
    complete = not any(answer.kind == INTERRUPTED for answer in answers.values())
    listings = {}
    for name, answer in answers.items():
        try:
            received = rows(answer, requests[name], {"listing": Listing})
            listings[name] = received[0] if received else None
        except ProbeError as problem:
            errors[name] = problem.reason
            continue
        if listings[name] is None:
            errors[name] = no_answer_reason(answer, requests[name], NOT_DONE)
    readable = {name: listing for name, listing in listings.items() if listing is not None}
    unlisted = {name: listing.unlisted_count for name, listing in readable.items()}
    reading: dict[str, list[CrashFile]] = {}
    for crash in deduplicated(readable):
        reading.setdefault(crash.reader, []).append(crash)
    crashes: list[Crash] = []
    gone = {
        name for name, answer in answers.items() if answer.kind in UNREACHED and name in errors
    }
    notes = {name: list(listing.notes) for name, listing in readable.items()}
    if reading:
        # Cores that an interrupt left unread are listed as such.
        reads = ask if complete else _ask_nothing
        crashes, lost, complete = _read(reads, tag, reading, job, unlisted=unlisted, notes=notes)
        errors |= lost
        gone |= lost.keys()
    return Cores(
        started=started,
        finished=now(),
        asked=tuple(policies),
        crashes=tuple(crashes),
        errors=errors,
        unreachable=frozenset(gone),
        notes={name: tuple(cores) for name, cores in notes.items() if cores},
        more={name: number for name, number in unlisted.items() if number},
        complete=complete,
    )


def _ask_all(
    ask: Asks, phase: str, configs: Mapping[str, program.CoresConfig]
) -> Mapping[str, Answer]:
    return ask(phase, {n: request(n, program.__name__, c) for n, c in configs.items()})


def _ask_nothing(phase: str, requests: Mapping[str, Request]) -> Mapping[str, Answer]:
    """Ask nobody any more."""
    return dict.fromkeys(requests, interrupted())


def _list_config(nonce: str, tag: str, policy: Policy, since_s: float) -> program.CoresConfig:
    patterns = (policy.core_pattern,) if policy.core_handler == "path" else ()
    return program.CoresConfig(nonce, tag, _LIST_S, patterns, since_s)


def _read(
    ask: Asks,
    tag: str,
    reading: Mapping[str, list[CrashFile]],
    job: str,
    *,
    unlisted: dict[str, int],
    notes: dict[str, list[str]],
) -> tuple[list[Crash], dict[str, str], bool]:
    """Every core with its backtrace; the nodes that were lost meanwhile, each with the reason; and
    whether it came to its end.

    Counts in ``more`` what is not read.
    """
    maximum = _AMONG if job else MOST
    chosen = {name: by_turns(files)[:maximum] for name, files in reading.items()}
    requests = {}
    for name, files in chosen.items():
        unlisted[name] += len(reading[name]) - len(files)
        limit_s = min(_ALL_S, _FIRST_S + _READ_S * min(len(files), MOST))
        requests[name] = program.CoresConfig(
            new_nonce(),
            tag,
            limit_s,
            selected=tuple(
                (f.file.path, f.file.inode, f.file.modified_ns, f.file.size_bytes) for f in files
            ),
            job=job,
            maximum=MOST,
        )
    answers = _ask_all(ask, "reading", requests)
    crashes = []
    for name, files in chosen.items():
        answer, refused = answers[name], list[str]()
        try:
            received = rows(
                answer, requests[name], {"core": CoreSummary, "done": ReadTotals}, refused
            )
        except ProbeError as problem:
            received, answer = [], Failure(error=problem.reason)
        cores = {core.number: core for core in received if isinstance(core, CoreSummary)}
        for end in (row for row in received if isinstance(row, ReadTotals)):
            unlisted[name] += end.unread_count
            if end.unknown_job_count:
                notes.setdefault(name, []).append(
                    f"{end.unknown_job_count} cores do not tell their job"
                )
            break
        else:
            refused.append(f"no answer: {no_answer_reason(answer, requests[name], NOT_DONE)}")
        if refused:
            missing = (number for number in range(len(files)) if number not in cores)
            cores |= {number: CoreSummary(number, unread=refused[0]) for number in missing}
        for number, core in cores.items():
            if 0 <= number < len(files):
                crashes.append(Crash(files[number], core, _unpacked(core.text)))
    lost = {name: answer.error for name, answer in answers.items() if answer.kind in UNREACHED}
    return crashes, lost, not any(answer.kind == INTERRUPTED for answer in answers.values())


def _unpacked(text: str) -> str:
    """gdb's words; "" for what makes no sense."""
    try:
        return wire.unpack(text, _TEXT_BYTES).decode("utf-8", "replace")
    except wire.DecodeError:
        return ""


# --- A core of a live process on one node: first what would be done, then doing it.

Seen = TypeVar("Seen")

#: Seconds to look, which starts gdb once for its version.
_LOOK_S = 30
#: Seconds that it may take at most, whatever its size.
_TAKE_S = 3600


class DumpError(Exception):
    """No core was taken: why, one line.

    kind: of the node's failure; "": it answered
    """

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.unreachable = kind in UNREACHED
        self.interrupted = kind == INTERRUPTED


@dataclass(frozen=True)
class Dumping:
    """A core of a live process: first what would be done, then doing it.

    tag:    of the run
    node:   its name, and its policy
    into:   the directory, on this machine alone; "": the core directory
    """

    ask: Asks
    tag: str
    node: str
    policy: Policy
    pid: int
    into: str = ""

    def _ask(self, limit_s: int, started: int, kind: str, of: type[Seen]) -> Seen | gcore.Preview:
        """Raises DumpError when there is no answer."""
        name, policy = self.node, self.policy
        config = gcore.AttachConfig(
            new_nonce(),
            self.tag,
            limit_s,
            self.pid,
            policy.core_pattern if policy.core_handler == "path" else "",
            self.into,
            started,
        )
        answer = self.ask("gcore", {name: request(name, gcore.__name__, config)})[name]
        if answer.kind == INTERRUPTED:
            raise DumpError(f"{name}: {answer.error}", answer.kind)
        try:
            received = rows(answer, config, {kind: of, "seen": gcore.Preview})
        except ProbeError as problem:
            raise DumpError(f"{name}: {problem.reason}") from None
        if not received:
            raise DumpError(f"{name}: {no_answer_reason(answer, config, NOT_DONE)}", answer.kind)
        first: Seen | gcore.Preview = received[0]
        return first

    def look(self) -> gcore.Preview:
        """What would be done. Raises DumpError when it cannot be done, or nobody answers."""
        preview = self._ask(_LOOK_S, 0, "seen", gcore.Preview)
        if preview.refused:
            raise DumpError(preview.refused)
        return preview

    def take(self, preview: gcore.Preview) -> gcore.DumpResult:
        """Do it; slow disks take 50 MB a second. Raises DumpError as `look` does."""
        limit_s = min(_TAKE_S, 60 + preview.size_bytes // 50_000_000)
        taken = self._ask(limit_s, preview.started, "taken", gcore.DumpResult)
        if isinstance(taken, gcore.Preview):
            raise DumpError(taken.refused)
        return taken

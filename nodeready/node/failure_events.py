"""The failures that the lines of a dead job's logs report: events with their rank, kind and time.

Pure, and the same code on a node and on the control machine. A line is data of a job's user: an
event says what its own file reports, and never more.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nodeready.node.witnesses.logs import WatchdogReport, reports
from nodeready.subjects import wire

#: Roles of an event. The rank failed by itself; it lost a peer; it waited until a timeout; a
#: signal or the scheduler ended it; a launcher or Slurm reports how a rank ended.
FAILED, LOST, WAITED, ENDED, REPORT = ROLES = ("failed", "lost", "waited", "ended", "report")
#: Kinds of a failure.
KINDS = (
    "oom", "exception", "segfault", "gpu", "network", "storage", "timeout", "limit", "signal",
)  # fmt: skip
#: Maximum characters of an event's text, and of a line that is searched.
MAX_TEXT, _MAX_LINE = 300, 4096
#: Maximum events of one file; of one stream, the first and the last.
_MAX_EVENTS, _MAX_OF_STREAM = 4000, 12
#: Maximum lines in which reports of the watchdog are searched.
_MAX_FOUND = 20_000


@dataclass(frozen=True)
class FailureEvent:
    """One failure that a log reports.

    kind:        see KINDS
    role:        see ROLES
    source:      who reports it: ``torchrun``, ``torchrun-root`` (its first observed failure),
                 ``srun``, ``slurm``, ``mpirun``, ``deepspeed``, ``shell``, ``error-file``; "": the
                 rank itself
    text:        the exception or the line
    frame:       innermost call of the user's code, ``train.py:12 in step``; "": none
    ranks:       global ranks; (): not known
    local_rank:  None: not known
    host:        that the line names; ""
    pid:         0: not known
    code:        exit status, or minus the signal; 0: not known
    time_s:      of the line, in seconds since 1970; None: it has none
    after_s:     of the last line with a time before it; None: there is none
    line:        number of the line in the part of the file that was read
    lines_after: lines of the same rank after it that belong to no failure
    """

    kind: wire.Name
    role: wire.Name
    source: wire.Name
    text: wire.Line
    frame: wire.Line
    ranks: tuple[wire.Number, ...]
    local_rank: wire.Number | None
    host: wire.Name
    pid: wire.Number
    code: int
    time_s: float | None
    after_s: float | None
    line: wire.Number
    lines_after: wire.Number


@dataclass(frozen=True)
class LogStream:
    """The lines of one rank in one file.

    rank, local_rank: None: the lines name none
    host:   "": the lines name none
    lines:  their number
    last:   the last line that belongs to no failure
    last_s: time of the last line that has one; None: none has
    """

    rank: wire.Number | None
    local_rank: wire.Number | None
    host: wire.Name
    lines: wire.Number
    last: wire.Line
    last_s: float | None


@dataclass(frozen=True)
class FileFailures:
    """What one file reports.

    path:    "": not set yet
    mtime_s: of its last change; 0: not known
    skipped: bytes in its middle that were not read
    reports: of PyTorch's watchdog
    """

    path: wire.Path
    size_bytes: wire.Number
    mtime_s: float
    skipped: wire.Number
    events: tuple[FailureEvent, ...]
    streams: tuple[LogStream, ...]
    reports: tuple[WatchdogReport, ...]


# --- What a text means.


class TextRule(NamedTuple):
    """A text that matches has this role and kind."""

    role: str
    kind: str
    pattern: re.Pattern[str]


def _rule(role: str, kind: str, pattern: str) -> TextRule:
    return TextRule(role, kind, re.compile(pattern))


#: Names of clients of services outside of the job: a connection that they lose is no peer.
_OUTSIDE = r"requests\.|urllib3|HTTPS?Connection|botocore|boto3|huggingface|aiohttp|httpx|wandb"
#: Exceptions and messages, the most special first. Sources: PyTorch's ProcessGroupNCCL.cpp,
#: ProcessGroupGloo.cpp, TCPStore.cpp, socket.cpp and CUDAException.cpp, gloo's transport/tcp,
#: NCCL's enqueue.cc and net_ib.cc, Python's errno.
TEXT_RULES = (
    _rule(
        FAILED, "oom",
        r"(?:CUDA|HIP) out of memory|CUDA error: out of memory|Cuda failure '?out of memory"
        r"|CUBLAS_STATUS_ALLOC_FAILED|DefaultCPUAllocator: (?:can't|not enough)|std::bad_alloc"
        r"|OutOfMemoryError|^MemoryError|Cannot allocate memory|Unable to allocate .* for an array",
    ),
    _rule(FAILED, "network", rf"(?:{_OUTSIDE}).*(?i:connect|timed? ?out|resol|reset)"),
    _rule(FAILED, "timeout", r"DataLoader timed out"),
    _rule(
        FAILED, "storage",
        r"No space left on device|Disk quota exceeded|Stale (?:NFS )?file handle"
        r"|Input/output error|Read-only file system|Transport endpoint is not connected"
        r"|\[Errno (?:5|28|30|116|122)\]|insufficient shared memory|unable to (?:open|mmap) shared"
        r"|PytorchStreamWriter failed|unexpected pos \d+ vs",
    ),
    _rule(
        WAITED, "timeout",
        r"Timed out waiting \d+ms|[Ww]atchdog caught collective operation timeout"
        r"|wait timeout after|Socket Timeout|Timed out after \d+ seconds? waiting for clients"
        r"|RendezvousTimeoutError|monitoredBarrier|client socket has timed out"
        r"|Heartbeat monitor timed out|watchdog hang|Connect timeout|failed to pass monitored"
        r"|collective timeout|due to timeout",
    ),
    _rule(
        LOST, "network",
        r"(?i)connection (?:closed|reset|refused|aborted|was)|(?:reset|closed) by (?:remote )?peer"
        r"|broken ?pipe|ConnectionResetError|ConnectionRefusedError|ConnectionAbortedError"
        r"|remote process|ncclRemoteError|failed on Socket|flag on TCPStore|remote peer"
        r"|communicator was aborted|NCCL communicator.{0,40}abort|RendezvousClosedError"
        r"|RendezvousConnectionError|peer (?:process )?has (?:unexpectedly|exited|disconnected)"
        r"|^EOFError$|readv failed|Endpoint is not connected|failed to send a keep-alive"
        r"|Application timeout caused pair closure|socketProgress",
    ),
    _rule(
        FAILED, "gpu",
        r"CUDA (?:driver )?error|CUBLAS_STATUS_|CUDNN_STATUS|cuDNN error|HIP error|hipError"
        r"|ECC error|no CUDA-capable device|CUDA unknown error|Found no NVIDIA driver"
        r"|invalid device ordinal|NVML|[Cc]uda failure|unhandled cuda error"
        r"|block: \[[\d,]+\], thread: .*Assertion",
    ),
    _rule(
        FAILED, "network",
        r"[Aa]ddress already in use|EADDRINUSE|No route to host|Network is unreachable"
        r"|Name or service not known|Temporary failure in name resolution|getaddrinfo"
        r"|[Uu]nable to resolve|Connection timed out|No socket interface found"
        r"|[Uu]nable to find (?:address|interface)|Cannot assign requested address",
    ),
    _rule(ENDED, "signal", r"^KeyboardInterrupt|SignalException|got signal: (?:15|2|1)\b|SIGTERM"),
    _rule(FAILED, "segfault", r"(?i)segmentation fault|SIGSEGV"),
)  # fmt: skip
#: A first line that says nothing; the lines after it do.
_VAGUE = re.compile(
    r"NCCL [Ee]rror|unhandled system error|internal error|CUDA error|:\s*$|what\(\)"
)


class Meaning(NamedTuple):
    """The role and the kind of a text; is_known: a rule has it."""

    role: str
    kind: str
    is_known: bool


def meaning(text: str) -> Meaning:
    """The role and the kind of an exception or a message.

    >>> meaning("RuntimeError: Connection closed by peer [10.0.0.2]:4711").role
    'lost'
    >>> meaning("OSError: [Errno 28] No space left on device").kind
    'storage'
    """
    for rule in TEXT_RULES:
        if rule.pattern.search(text[:_MAX_LINE]):
            return Meaning(rule.role, rule.kind, True)
    return Meaning(FAILED, "exception", False)


#: Signal -> kind, and its words in a shell and in srun.
_SIGNAL_KINDS = {11: "segfault", 4: "segfault", 8: "segfault"}
SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 11: "SIGSEGV", 13: "SIGPIPE", 15: "SIGTERM",
}  # fmt: skip
_SIGNAL_WORDS = {
    "Hangup": 1, "Interrupt": 2, "Quit": 3, "Illegal instruction": 4, "Aborted": 6,
    "Bus error": 7, "Floating point exception": 8, "Killed": 9, "Segmentation fault": 11,
    "Broken pipe": 13, "Terminated": 15, "Out Of Memory": 9,
}  # fmt: skip
_NUMBERS = {name: number for number, name in SIGNAL_NAMES.items()}
_WORDS = "|".join(_SIGNAL_WORDS)


def kind_of_code(code: int) -> str:
    """The kind of an exit status, or of minus a signal."""
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    return _SIGNAL_KINDS.get(number, "signal") if number else "exception"


def signal_of(code: int) -> int:
    """The signal of an exit status (137) or of minus a signal; 0: none.

    >>> signal_of(137), signal_of(-11), signal_of(1)
    (9, 11, 0)
    """
    return -code if code < 0 else code - 128 if code - 128 in SIGNAL_NAMES else 0


# --- Times.

_CLOCK = r"(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?"
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_STAMPS = (
    # 2026-03-01T12:00:00.123Z, 2026-03-01 12:00:00,123, torchrun's 2026-03-01_12:00:00
    re.compile(rf"(\d{{4}})[-/](\d\d)[-/](\d\d)[T _]{_CLOCK}(Z|[+-]\d\d:?\d\d)?"),
    # glog: E0301 12:00:00.123456
    re.compile(rf"\b[IWEFDV](\d\d)(\d\d) {_CLOCK}"),
    # syslog, and dmesg -T with a year: Mar  1 12:00:00
    re.compile(rf"\b({'|'.join(_MONTHS)}) +(\d{{1,2}}) {_CLOCK}(?: (\d{{4}}))?"),
)
#: Characters at the beginning of a line in which its time stands.
_STAMP_CHARACTERS = 80
_TIMED = re.compile(r"\d\d:\d\d:\d\d")
#: Makes seconds since 1970 of year, month, day, hour, minute and second in a log's time zone.
Calendar = Callable[[tuple[int, int, int, int, int, int]], float]


def node_calendar(moment: tuple[int, int, int, int, int, int]) -> float:
    """The seconds since 1970 of a moment in this machine's time zone."""
    return time.mktime((*moment, 0, 0, -1))


def stamp(text: str, year: int, calendar: Calendar) -> float | None:
    """The time at the beginning of a line, in seconds since 1970; None: it has none.

    year: of a line that has none
    """
    head = text[:_STAMP_CHARACTERS]
    iso, glog, syslog = (pattern.search(head) for pattern in _STAMPS)
    try:
        if iso:
            *words, fraction, zone = iso.groups()
            moment = tuple(map(int, words))
        elif glog:
            *words, fraction = glog.groups()
            moment, zone = (year, *map(int, words)), None
        elif syslog:
            month, *words, fraction, own_year = syslog.groups()
            moment = (int(own_year or year), _MONTHS.index(month) + 1, *map(int, words))
            zone = None
        else:
            return None
        if not (1970 <= moment[0] < 2200 and moment[1] <= 12 and moment[2] <= 31):
            return None
        seconds = _zoned(moment, zone) if zone else calendar(moment)  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        return None
    return seconds + (float(f"0.{fraction}") if fraction else 0.0)


def utc_calendar(moment: tuple[int, int, int, int, int, int]) -> float:
    """The seconds since 1970 of a moment in UTC."""
    import calendar

    return float(calendar.timegm((*moment, 0, 0, 0)))


def _zoned(moment: tuple[int, int, int, int, int, int], zone: str) -> float:
    digits = zone.replace(":", "")
    minutes = 0 if zone == "Z" else int(digits[1:3]) * 60 + int(digits[3:5])
    return utc_calendar(moment) - (-60 if digits.startswith("-") else 60) * minutes


# --- Lines outside of tracebacks.


class LineRule(NamedTuple):
    """A line that matches is an event.

    kind:   "": by the named group ``word``, ``signal`` or ``code``, else by the text
    groups: ``ranks``, ``local``, ``host``, ``pid``, ``code``, ``signal``, ``word``, ``text``
    """

    role: str
    kind: str
    source: str
    pattern: re.Pattern[str]


def _line(role: str, kind: str, source: str, pattern: str) -> LineRule:
    return LineRule(role, kind, source, re.compile(pattern))


_RANKS = r"(?P<ranks>\d{1,7}(?:[,-]\d{1,7}){0,1000})"
_HOST = r"(?P<host>[\w.-]{1,255})"
#: Sources: Slurm's src/srun/task_state.c, src/srun/libsrun/launch.c, src/slurmd/slurmstepd (req.c,
#: mgr.c); torch's distributed/elastic (agent, multiprocessing/api.py) and multiprocessing/spawn.py;
#: Open MPI's help-orterun.txt and PRRTE's help-prterun.txt, MPICH's hydra; DeepSpeed's
#: launcher/launch.py; bash's jobs.c; CPython's faulthandler.c; UCX's debug.c; glibc's malloc.c.
LINE_RULES = (
    _line(
        REPORT, "", "srun",
        rf"srun: error: {_HOST}: tasks? {_RANKS}: "
        rf"(?:(?P<word>{_WORDS})\b|Exited with exit code (?P<code>\d{{1,3}}))",
    ),
    _line(
        ENDED, "limit", "slurm",
        rf"\*\*\* (?:JOB|STEP) \S+ ON {_HOST} CANCELLED AT \S+ "
        r"DUE TO (?P<text>TIME LIMIT|PREEMPTION|DEADLINE|JOB REQUEUE)",
    ),
    _line(ENDED, "limit", "slurm", r"(?P<text>Job \S+ exceeded time limit|DUE TO TIME LIMIT)"),
    _line(FAILED, "network", "slurm", rf"(?P<text>CANCELLED AT \S+ DUE TO NODE {_HOST}? ?FAILURE)"),
    _line(FAILED, "network", "slurm", rf"srun: error: (?P<text>Node failure on {_HOST})"),
    _line(ENDED, "signal", "slurm-job", rf"\*\*\* JOB \S+ ON {_HOST} CANCELLED AT \S+ \*\*\*"),
    _line(ENDED, "signal", "slurm", rf"\*\*\* STEP \S+ ON {_HOST} CANCELLED AT \S+ \*\*\*"),
    _line(
        FAILED, "oom", "slurm",
        r"slurmstepd(?:-(?P<host>[\w.-]{1,64}))?: error: (?P<text>Detected \d+ oom[_-]kill "
        r"event.*|(?:Step|Job) \S+ exceeded (?:virtual )?memory limit.*|Exceeded \S* ?memory limit"
        r".*)",
    ),
    _line(
        REPORT, "", "torchrun",
        r"failed \(exitcode: (?P<code>-?\d{1,5})\) local_rank: (?P<local>\d{1,5}) "
        r"\(pid: (?P<pid>\d{1,10})\)",
    ),
    _line(
        ENDED, "signal", "torchrun",
        r"Sending process (?P<pid>\d{1,10}) closing signal (?P<signal>SIG[A-Z]{1,8})",
    ),
    _line(
        ENDED, "signal", "agent",
        r"Received (?:Signals\.)?(?P<signal>SIG[A-Z]{1,8}|\d{1,2}) death signal"
        r"|SignalException: Process \d+ got signal: (?P<code>\d{1,2})",
    ),
    _line(
        REPORT, "", "spawn",
        r"ProcessExitedException: process (?P<ranks>\d{1,7}) terminated with "
        r"(?:exit code (?P<code>\d{1,3})|signal (?P<signal>SIG[A-Z]{1,8}))",
    ),
    _line(FAILED, "exception", "mpirun", r"(?P<text>MPI_ABORT was invoked on rank (?P<ranks>\d+))"),
    _line(
        FAILED, "exception", "mpirun",
        r"^(?P<text>Abort\(-?\d+\) on node (?P<ranks>\d{1,7}) .{0,200})",
    ),
    _line(
        REPORT, "", "mpirun",
        r"(?:mpi|prte)\w+ noticed that process rank (?P<ranks>\d{1,7}) with PID (?P<pid>\d{1,10}) "
        rf"on node {_HOST} exited on signal (?P<signal>\d{{1,2}})",
    ),
    _line(
        REPORT, "", "deepspeed",
        r"sigkill_handler\] .*--local_rank=(?P<local>\d{1,5}).* exits with return code = "
        r"(?P<code>-?\d{1,5})",
    ),
    _line(
        FAILED, "", "",
        r"DataLoader worker \(pid(?:\(s\))? (?P<pid>\d{1,10})[\d, ]*\) "
        rf"(?:is killed by signal: (?P<word>{_WORDS})|exited unexpectedly.*)",
    ),
    _line(FAILED, "", "", rf"Fatal Python error: (?P<word>{_WORDS})"),
    _line(
        FAILED, "", "",
        rf"\[[\w.-]+:(?P<pid>\d{{1,10}})(?::\d+:\d+)?\] (?:Caught signal \d+ \(|Signal: )"
        rf"(?P<word>{_WORDS})",
    ),
    _line(
        FAILED, "segfault", "",
        r"(?P<text>double free or corruption.*|(?:free|malloc|realloc)\(\): .*"
        r"|corrupted (?:size|double).*|\*\*\* stack smashing detected.*)",
    ),
    _line(
        REPORT, "", "shell",
        rf"^(?:\S+: line \d+: +)?(?:(?P<pid>\d{{1,10}}) )?(?P<word>{_WORDS})"
        r"(?: \(core dumped\))?(?:  .*)?$",
    ),
    _line(FAILED, "gpu", "", r"(?P<text>block: \[[\d,]+\], thread: .*Assertion .* failed.*)"),
    _line(FAILED, "", "", r"^F\d{4} \d\d:\d\d:\d\d\S* .*?\] (?P<text>.*)"),
    _line(
        FAILED, "exception", "",
        r"^(?P<text>\S*python[\d.]*: (?:can't open file|No module named) .*"
        r"|[\w./-]+: error: (?:unrecognized|argument|the following|ambiguous|invalid) .*"
        r"|\S+: error while loading shared libraries: .*"
        r"|(?:\S*(?:bash|sh|slurm_script)|slurmstepd): .*(?:command not found"
        r"|: No such file or directory|Permission denied))$",
    ),
    # Of a process group or NCCL; the text decides.
    _line("", "", "", r"(?P<text>terminated with exception: .*)"),
    _line("", "", "", r"\] (?P<text>.*[Ww]atchdog caught collective operation timeout.*)"),
    _line("", "", "", r"(?P<text>NCCL WARN .*)"),
    _line("", "", "", r"^\[[EWF]\d{4} .*?\] (?P<text>.*)"),
)  # fmt: skip
#: Every line of a failure, and every line of the watchdog, has one of these words. A search for
#: words is ten times faster than their pattern.
_NEEDLES = (
    *(
        "rror",
        "xception",
        "raceback",
        "ABORT",
        "ault",
        "ailed",
        "ailure",
        "illed",
        "illing",
        "bort",
    ),
    *("ermina", "CANCEL", "imed out", "imeout", "NCCL WARN", "oom", "emory", "ssert", "ignal"),
    *(" peer", "pipe", "nterrupt", "xit", "noticed", "corrupt", "TIME LIMIT", "not found"),
    *("No such", "No module", "ermission", "Hangup", "Quit", "atchdog", "nqueued ", "Barrier"),
    *("onnection ", "on Socket", "on TCPStore", "is running ", "ollective #", "lagging ranks"),
    *("eartbeat", "at NCCL work", "Root Cause", "Process name", 'File "'),
)


def _has_needle(text: str) -> bool:
    return any(map(text.__contains__, _NEEDLES)) or text.startswith(("F", "[F"))


_RANK_PREFIX = re.compile(r"^\[rank(\d{1,7})\]: ?")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_HEADER = re.compile(r"(?:^|[\s|:\]])(?:Original )?Traceback \(most recent call last\):\s*$")
_FRAME = re.compile(r'^\s*(?:\| *)?File "([^"]{1,1000})", line (\d{1,7})(?:,? in (.{1,200}))?')
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_IGNORED = ("Exception ignored in", "--- Logging error ---")
#: An exception without its traceback, and with it.
_NAMED = re.compile(r"^(?:[A-Za-z_][\w.]*\w)(?:Error|Exception)(?::\s.*|:?\s*$)")
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?::\s.*|:?\s*$)")
_LIBRARY = re.compile(r"(?:site|dist)-packages/|/lib(?:64)?/python3|^<|/torch/|/bin/torchrun$")
_SPAWNED = re.compile(r"^-- Process (\d{1,7}) terminated with the following error:")
#: Exceptions of launchers: they report the failure of a rank.
_LAUNCHERS = re.compile(
    r"^(?:\S*\.)?(?:ChildFailedError|CalledProcessError|ProcessExitedException|"
    r"ProcessRaisedException|SystemExit)\b"
)
_TERMINATE = re.compile(r"terminate called after throwing an instance of '(.{1,200})'")
_MPI_RANK = re.compile(r"\s*Process name: \[\S*?[,@](?:\d+,)?(\d{1,7})\]")
_MPI_CODE = re.compile(r"\s*Exit code: +(\d{1,3})")
#: Maximum further lines of an exception's message.
_DETAILS = 12


class RankLine(NamedTuple):
    """A line of a log, without its prefix."""

    host: str
    rank: int | None
    local_rank: int | None
    text: str


Split = Callable[[str], RankLine]


def unsplit(line: str) -> RankLine:
    """The line of a file without prefixes."""
    return RankLine("", None, None, line)


@dataclass
class _Exception:
    """An exception while its lines are read."""

    event: FailureEvent
    is_known: bool
    has_user_frame: bool


@dataclass
class _Stream:
    """The lines of one rank, and the state of reading them."""

    key: tuple[str, int | None, int | None]
    lines: int = 0
    plain: int = 0
    last: str = ""
    timed: str = ""
    events: list[FailureEvent] = field(default_factory=list)
    mode: str = ""
    frames: list[tuple[str, str, str]] = field(default_factory=list)
    #: The exceptions of a chain; the details of the last one.
    chain: list[_Exception] = field(default_factory=list)
    is_chained: bool = False
    is_ignored: bool = False
    details: list[str] = field(default_factory=list)
    spawned: int | None = None
    #: The fields of torchrun's report, and mpirun's.
    block: dict[str, str] = field(default_factory=dict)
    is_root: bool = False


class FailureReader:
    """Reads the lines of one file, one at a time.

    year:  of times without a year
    split: takes the prefix off a line
    found: the lines that may be of a failure or of the watchdog
    """

    def __init__(
        self, year: int, calendar: Calendar = node_calendar, split: Split = unsplit
    ) -> None:
        self.year, self.calendar, self.split = year, calendar, split
        self.streams: dict[tuple[str, int | None, int | None], _Stream] = {}
        self.number = 0
        self.found: list[str] = []

    def feed(self, line: str) -> None:
        """Read one line."""
        self.number += 1
        if "\x1b" in line:
            line = _ANSI.sub("", line)
        host, rank, local, text = self.split(line[:_MAX_LINE].rstrip())
        if match := _RANK_PREFIX.match(text):
            rank, text = int(match[1]), text[match.end() :]
        key = host, rank, local
        stream = self.streams.get(key)
        if stream is None:
            stream = self.streams[key] = _Stream(key)
        stream.lines += 1
        is_plain = not stream.mode and not _has_needle(text)
        if is_plain or not self._read(stream, text, line):
            stream.plain += 1
            if text.strip():
                stream.last = text
        # Parsed only when an event needs it.
        if _TIMED.search(text, 0, _STAMP_CHARACTERS):
            stream.timed = text

    # --- One line of a stream. Whether it belongs to a failure.

    def _read(self, stream: _Stream, text: str, line: str) -> bool:
        if stream.mode == "traceback" and self._in_traceback(stream, text):
            return True
        if stream.mode == "block" and self._in_block(stream, text):
            return True
        if stream.mode == "fatal" and self._in_fatal(stream, text):
            return True
        is_indented = not text or text[0] in " \t|+"
        if is_indented and "raceback" not in text:
            return self._special(stream, text) or self._detail(stream, text)
        if text.startswith(_CHAINED):
            stream.is_chained = True
            self._end_details(stream)
            return True
        if text.startswith(_IGNORED):
            stream.is_ignored = True
            return True
        if len(self.found) < _MAX_FOUND:
            self.found.append(line)
        if _HEADER.search(text):
            self._end_details(stream)
            is_original = "Original Traceback" in text
            if is_original and stream.chain:
                stream.is_chained = True
            stream.mode, stream.frames = "traceback", []
            return True
        if match := _SPAWNED.match(text):
            stream.spawned = int(match[1])
            return True
        if match := _TERMINATE.search(text):
            self._end_chain(stream)
            self._add_exception(stream, match[1])
            stream.mode = "details"
            return True
        if self._starts_block(stream, text):
            return True
        if self._line(stream, text):
            return True
        if _NAMED.match(text) and not _LAUNCHERS.match(text):
            self._end_chain(stream)
            self._add_exception(stream, text)
            stream.mode = "details"
            return True
        return self._special(stream, text) or self._detail(stream, text)

    def _special(self, stream: _Stream, text: str) -> bool:
        """A frame without the beginning of its traceback; a field of mpirun's report."""
        if _FRAME.match(text) and not stream.chain:
            stream.mode, stream.frames = "traceback", []
            return self._in_traceback(stream, text)
        if match := _MPI_RANK.match(text):
            stream.block = {"mpi": match[1]}
            return True
        if "mpi" in stream.block and (match := _MPI_CODE.match(text)):
            code, ranks = int(match[1]), (int(stream.block.pop("mpi")),)
            event = self._event(stream, REPORT, kind_of_code(code), f"exit status {code}")
            self._add(stream, replace(event, source="mpirun", ranks=ranks, code=code))
            return True
        return False

    def _detail(self, stream: _Stream, text: str) -> bool:
        """A further line of an exception's message."""
        if stream.mode != "details":
            return False
        if len(stream.details) >= _DETAILS:
            self._end_chain(stream)
            return False
        stream.details.append(text.strip())
        return True

    # --- Tracebacks.

    def _in_traceback(self, stream: _Stream, text: str) -> bool:
        if match := _FRAME.match(text):
            if len(stream.frames) < 1000:
                stream.frames.append((match[1], match[2], match[3] or ""))
            return True
        if not text.strip() or text[0] in " \t":
            return True
        stream.mode = ""
        if _HEADER.search(text) or not _RAISED.match(text):
            return False
        if stream.is_ignored:
            stream.is_ignored = False
            return True
        if _LAUNCHERS.match(text):
            # Its report, with the ranks, follows.
            stream.chain, stream.is_chained = [], False
            return "ProcessExited" not in text
        self._add_exception(stream, text)
        stream.mode = "details"
        return True

    def _add_exception(self, stream: _Stream, text: str) -> None:
        if not stream.is_chained:
            self._end_chain(stream)
        stream.is_chained = False
        user = [frame for frame in stream.frames if not _LIBRARY.search(frame[0])]
        path, number, function = (user or stream.frames or [("", "", "")])[-1]
        name = path.rpartition("/")[2]
        where = f" in {function}" if function else ""
        frame = f"{name}:{number}{where}" if path else ""
        known = meaning(text)
        event = self._event(stream, known.role, known.kind, text)
        event = replace(event, frame=frame[:MAX_TEXT])
        if stream.spawned is not None:
            event = replace(event, local_rank=stream.spawned)
            stream.spawned = None
        stream.chain.append(_Exception(event, known.is_known, bool(user)))
        stream.frames, stream.details = [], []

    def _end_details(self, stream: _Stream) -> None:
        """Complete the last exception by the lines after it."""
        if not stream.chain:
            return
        last = stream.chain[-1]
        if stream.details and (not last.is_known or _VAGUE.search(last.event.text)):
            details = "\n".join(stream.details)
            known = meaning(details)
            if known.is_known and _VAGUE.search(last.event.text):
                first = next(filter(None, stream.details), "")
                text = f"{last.event.text} {first}"[:MAX_TEXT]
                if not last.is_known or known.role == FAILED:
                    last.event = replace(last.event, role=known.role, kind=known.kind, text=text)
                    last.is_known = True
            elif last.event.text.endswith(("'", ":", "std::exception")):
                first = next(filter(None, stream.details), "")
                last.event = replace(last.event, text=f"{last.event.text} {first}"[:MAX_TEXT])
        stream.details = []
        if stream.mode == "details":
            stream.mode = ""

    def _end_chain(self, stream: _Stream) -> None:
        """Add the event of a chain of exceptions: what began it, then what it became."""
        self._end_details(stream)
        chain, stream.chain = stream.chain, []
        if not chain:
            return
        first, last = chain[0], chain[-1]
        event = first.event
        if first is not last:
            # A loader's worker reports the original exception after its own.
            is_wrapped = event.text.partition(": ")[2].startswith("Caught ")
            if is_wrapped:
                first, last = last, first
                event = first.event
            elif not first.is_known and not first.has_user_frame and last.is_known:
                event = last.event
            text = event.text
            if last.event.text != text and event is first.event:
                text = f"{text[:200]}; then {last.event.text}"[:MAX_TEXT]
            kinds = [item.event.kind for item in chain if item.event.role == event.role]
            kind = next((kind for kind in kinds if kind != "exception"), event.kind)
            event = replace(event, text=text, kind=kind if event.role == FAILED else event.kind)
        self._add(stream, event)

    def _in_fatal(self, stream: _Stream, text: str) -> bool:
        """The stack that faulthandler writes: the innermost call first."""
        match = _FRAME.match(text)
        if match and stream.events:
            if not _LIBRARY.search(match[1]) and not stream.events[-1].frame:
                name = match[1].rpartition("/")[2]
                frame = f"{name}:{match[2]} in {match[3]}"[:MAX_TEXT]
                stream.events[-1] = replace(stream.events[-1], frame=frame)
            return True
        if not text or "most recent call first" in text or text.startswith(("Extension mod", " ")):
            return True
        stream.mode = ""
        return False

    # --- torchrun's report.

    def _starts_block(self, stream: _Stream, text: str) -> bool:
        if text in ("Failures:", "Root Cause (first observed failure):"):
            self._end_chain(stream)
            stream.mode, stream.block = "block", {}
            stream.is_root = text.startswith("Root")
            return True
        return False

    def _in_block(self, stream: _Stream, text: str) -> bool:
        if re.match(r"^(?:\[\d+\]:|-{5,}|={5,}|Root Cause|Failures:)", text):
            self._end_block(stream)
            if text.startswith("="):
                stream.mode = ""
            elif text.startswith("Root"):
                stream.is_root = True
            return True
        if match := re.match(r"^  (time|host|rank|exitcode|error_file|traceback) *: ?(.*)", text):
            stream.block[match[1]] = match[2]
        elif not text or text.startswith(" "):
            if "traceback" in stream.block and _RAISED.match(text[2:]):
                stream.block["exception"] = text[2:]
        else:
            self._end_block(stream)
            stream.mode = ""
            return False
        return True

    def _end_block(self, stream: _Stream) -> None:
        block, stream.block = stream.block, {}
        rank = re.match(r"(\d{1,7})(?: \(local_rank: (\d{1,5})\))?", block.get("rank", ""))
        code = re.match(r"(-?\d{1,5})(?: *\(pid: (\d{1,10})\))?", block.get("exitcode", ""))
        if not rank or not code:
            return
        status = int(code[1])
        text = block.get("exception", "")
        event = replace(
            self._event(stream, REPORT, kind_of_code(status), text),
            source="torchrun-root" if stream.is_root else "torchrun",
            ranks=(int(rank[1]),),
            local_rank=int(rank[2]) if rank[2] else None,
            host=block.get("host", "")[:255],
            pid=int(code[2] or 0),
            code=status,
            time_s=stamp(block.get("time", ""), self.year, self.calendar),
        )
        self._add(stream, event)
        if text:
            known = meaning(text)
            self._add(stream, replace(event, role=known.role, kind=known.kind, code=0))

    # --- Events.

    def _line(self, stream: _Stream, text: str) -> bool:
        for rule in LINE_RULES:
            match = rule.pattern.search(text)
            if not match:
                continue
            groups = {name: value for name, value in match.groupdict().items() if value}
            code = _code(groups)
            known = meaning(groups.get("text", text))
            if not rule.role and not known.is_known:
                return False
            self._end_chain(stream)
            kind = rule.kind or (kind_of_code(code) if code else known.kind)
            role = rule.role or known.role
            if rule.source in ("srun", "shell", "") and "Out Of Memory" in text:
                kind = "oom"
            if rule.source == "shell" and signal_of(code) in (1, 2, 15):
                role = ENDED
            event = replace(
                self._event(stream, role, kind, groups.get("text", text)),
                time_s=self._moment(text),
                source=rule.source,
                ranks=_ranks(groups["ranks"]) if "ranks" in groups else _own(stream),
                local_rank=int(groups["local"]) if "local" in groups else stream.key[2],
                host=groups.get("host", stream.key[0]),
                pid=int(groups.get("pid", 0)),
                code=code,
            )
            self._add(stream, event)
            if "Fatal Python error" in text:
                stream.mode = "fatal"
            return True
        return False

    def _moment(self, text: str) -> float | None:
        return stamp(text, self.year, self.calendar)

    def _event(self, stream: _Stream, role: str, kind: str, text: str) -> FailureEvent:
        host, _, local = stream.key
        return FailureEvent(
            *(kind, role, "", text.strip()[:MAX_TEXT], "", _own(stream), local, host, 0, 0),
            *(None, self._moment(stream.timed), self.number, stream.plain),
        )

    def _add(self, stream: _Stream, event: FailureEvent) -> None:
        stream.events.append(event)
        if len(stream.events) > 2 * _MAX_OF_STREAM:
            del stream.events[_MAX_OF_STREAM]

    def failures(self) -> FileFailures:
        """What the lines so far report."""
        events = []
        for stream in self.streams.values():
            self._end_chain(stream)
            if stream.mode == "block":
                self._end_block(stream)
            # An event keeps the number of plain lines before it until now.
            events += [replace(e, lines_after=stream.plain - e.lines_after) for e in stream.events]
        events.sort(key=lambda event: event.line)
        half = _MAX_EVENTS // 2
        if len(events) > _MAX_EVENTS:
            events = events[:half] + events[-half:]
        streams = tuple(
            LogStream(
                *(stream.key[1], stream.key[2], stream.key[0], stream.lines),
                *(stream.last[:MAX_TEXT], self._moment(stream.timed)),
            )
            for stream in self.streams.values()
        )
        return FileFailures(*("", 0, 0.0, 0, tuple(events), streams, reports(self.found)))


def _own(stream: _Stream) -> tuple[int, ...]:
    return () if stream.key[1] is None else (stream.key[1],)


def _code(groups: dict[str, str]) -> int:
    """The exit status, or minus the signal, that a line names; 0: none."""
    if "word" in groups:
        return -_SIGNAL_WORDS[groups["word"]]
    if "signal" in groups:
        name = groups["signal"]
        return -(int(name) if name.isdigit() else _NUMBERS.get(name, 0))
    return int(groups.get("code", 0))


def _ranks(text: str) -> tuple[int, ...]:
    """The ranks of ``3``, ``0-2,5``; at most 100,000."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), min(int(last or first), int(first) + 100_000) + 1)
    return tuple(numbers[:100_000])


def read_lines(
    lines: Sequence[str], year: int, calendar: Calendar = node_calendar, split: Split = unsplit
) -> FileFailures:
    """What the lines of one file report."""
    reader = FailureReader(year, calendar, split)
    for line in lines:
        reader.feed(line)
    return reader.failures()


# --- The error files of torchelastic (TORCHELASTIC_ERROR_FILE).


def read_error_file(text: str, calendar: Calendar = node_calendar) -> FileFailures | None:
    """The exception in an error file; None: it is none."""
    try:
        data = wire.load_json(text)
    except wire.DecodeError:
        return None
    message = data.get("message") if isinstance(data, dict) else None
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    stack = extra.get("py_callstack") if isinstance(extra, dict) else ""
    words = message.get("message") if isinstance(message, dict) else message
    if not isinstance(words, str) or not isinstance(stack, str):
        return None
    moment = extra.get("timestamp") if isinstance(extra, dict) else data.get("timestamp")
    found = read_lines(stack.splitlines() or [words], 1970, calendar)
    seconds = float(moment) if re.fullmatch(r"\d{9,11}", str(moment)) else None
    events = [event for event in found.events if event.role != REPORT][-1:]
    if not events:
        return None
    event = replace(events[0], source="error-file", time_s=seconds)
    return replace(found, events=(event,), streams=())

"""What the words of an error mean: a rank's own failure, a lost peer, a timeout; its kind.

The words are rows of knowledge: failures.toml, failure_phrases.toml, launcher_reports.toml,
error_kinds.toml and nccl_errors.toml.
A line is data of a job's user.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from nodeready import knowledge
from nodeready.agent.witnesses import nccl_errors

#: Roles of an event. The rank failed by itself; it lost a peer; it waited until a timeout; the
#: error says itself that its cause is elsewhere; a signal or the scheduler ended the rank; a
#: launcher or Slurm reports how a rank ended.
FAILED, LOST, WAITED, CONSEQUENCE, ENDED, REPORT = ROLES = (
    "failed", "lost", "waited", "consequence", "ended", "report",
)  # fmt: skip
#: Roles of rows alone: the text decides; the table of the collectives' errors decides; a part of
#: the next report; no failure.
TEXT, COLLECTIVES, PART, NOTE = "text", "nccl", "part", "note"
#: Kinds of a failure.
KINDS = (
    "oom", "exception", "segfault", "gpu", "network", "storage", "timeout", "limit", "signal",
)  # fmt: skip
#: Maximum characters of a line that are searched. The patterns bound what stands between two
#: words, so that a line takes milliseconds at most.
MAX_LINE = 4096
_WORDS = 600  # characters of a text in which the general words of a kind stand

#: Signal -> its name, and its words in a shell and in srun.
SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM",
    15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ",
}  # fmt: skip
#: The signals from outside that ask a process, or a job, to end.
STOPS = 1, 2, 15
_OUT_OF_MEMORY = "Out Of Memory"
_SIGNAL_WORDS = {
    "Hangup": 1, "Interrupt": 2, "Quit": 3, "Illegal instruction": 4, "Aborted": 6,
    "Bus error": 7, "Floating point exception": 8, "Killed": 9, "Segmentation fault": 11,
    "User defined signal 1": 10, "User defined signal 2": 12,
    "Broken pipe": 13, "Alarm clock": 14, "Terminated": 15, _OUT_OF_MEMORY: 9,
}  # fmt: skip
#: Status of Windows (ntstatus.h) -> the signal of such an end elsewhere.
_WINDOWS = {
    0xC0000005: 11, 0xC00000FD: 11, 0xC0000374: 11, 0xC0000409: 6, 0xC000001D: 4, 0xC0000094: 8,
    0xC000013A: 2,
}  # fmt: skip
_NUMBERS = {name: number for number, name in SIGNAL_NAMES.items()}
#: What stands for a longer expression in the patterns of rows.
_PARTS = {
    "WORDS": "|".join(_SIGNAL_WORDS),
    "RANKS": r"(?P<ranks>\d{1,7}(?:[,-]\d{1,7}){0,1000})(?!\d)",
    "HOST": r"(?P<host>[\w.-]{1,255})",
}


class FailureRow(NamedTuple):
    """A row of failures.toml or launcher_reports.toml; both explain the fields."""

    key: str
    role: str
    kind: str
    needles: tuple[str, ...]
    pattern: re.Pattern[str]
    reporter: str = ""
    is_line: bool = False
    details: bool = False
    stack: bool = False
    repeats: bool = False
    explains: bool = False
    is_own: bool = False
    completes: bool = False
    begins: bool = False
    aborts: bool = False


#: Rows, each once for each of its needles: a loop over them is the quickest search.
Rows = tuple[tuple[str, FailureRow], ...]
_WORDS_ALONE = ("source", "meaning")  # fields of a row that only people read


def _row(key: str, row: Mapping[str, object]) -> FailureRow:
    fields = {name: value for name, value in row.items() if name not in _WORDS_ALONE}
    pattern = str(fields.pop("pattern", ""))
    for word, part in _PARTS.items():
        pattern = pattern.replace(word, part)
    needles = tuple(str(fields.pop("needles")).split("|"))
    fields.setdefault("kind", "")
    return FailureRow(key, needles=needles, pattern=re.compile(pattern), **fields)  # type: ignore[arg-type]


_FAILURES = knowledge.rows("failures")
_ROWS = tuple(_row(key, row) for key, row in _FAILURES.items() if isinstance(row, dict))


def _by_needle(rows: Iterable[FailureRow]) -> Rows:
    return tuple((needle, row) for row in rows for needle in row.needles)


#: What launchers and schedulers report; all rows that explain a line without a traceback; those of
#: them that explain a line that begins with a blank; those that explain a text.
REPORT_ROWS = _by_needle(_row(*item) for item in knowledge.rows("launcher_reports").items())
LINE_ROWS = (*REPORT_ROWS, *_by_needle(row for row in _ROWS if row.is_line))
INDENTED_ROWS = tuple(pair for pair in LINE_ROWS if pair[1].pattern.pattern.startswith(r"^\s"))
TEXT_ROWS = _by_needle(
    row for row in _ROWS
    if (row.kind and not row.completes) or row.role in (COLLECTIVES, NOTE)
)  # fmt: skip
SKIPPED = tuple(_FAILURES["skipped"])  # how lines of the failure before begin
#: Files of calls that are not of the user's code; the end of the file of the collectives.
LIBRARY_FILES = re.compile(_FAILURES["library_files"])
LAUNCHER_FILES = re.compile(_FAILURES["launcher_files"])
_PACKAGE = re.compile(r"(?:site|dist)-packages/[^/]+/")
OUTSIDE_FILES = re.compile(_FAILURES["outside_files"])
BEFORE_RANKS = re.compile(_FAILURES["before_ranks"])
EXIT_STATUS = re.compile(_FAILURES["exit_status"])
TELEMETRY_FILES = re.compile(_FAILURES["telemetry_files"])
PRINTED_CALLS = re.compile(_FAILURES["printed_calls"])
STANDARD_FILES = re.compile(_FAILURES["standard_files"])
COLLECTIVE_FILES = _FAILURES["collective_files"]
#: The function of torch.distributed that connects the ranks, and the end of its file's path.
FIRST_CALL, FIRST_CALL_FILES = "init_process_group", _FAILURES["first_call_files"]
_QUICK_WORDS = tuple(_FAILURES["words"])
#: A first line that says nothing, where the lines after it do; the beginning of a list of names.
VAGUE = re.compile(_FAILURES["vague"])
#: A row of failure_phrases or failures -> the words by which a line or an error says so.
PHRASES = {row.key: row.pattern for row in _ROWS}
PHRASES.update((k, re.compile(r["pattern"])) for k, r in knowledge.rows("failure_phrases").items())
LISTS = re.compile(_FAILURES["lists"])
#: Key of a row -> its kind, and the general words of an error that no other table explains.
KIND_WORDS = {
    key: (row.get("kind", key), re.compile(row["pattern"]))
    for key, row in knowledge.rows("error_kinds").items()
}


def is_of_launcher(paths: Sequence[str]) -> bool:
    """Whether an error was raised by a launcher itself: all installed files of its traceback are
    of the launcher's package. paths: of its frames, without those of Python itself
    """
    launchers = [path for path in paths if LAUNCHER_FILES.search(path)]
    packages = {match[0] for path in paths if (match := _PACKAGE.search(path))}
    return bool(launchers) and len(packages) == 1


def has_needle(text: str) -> bool:
    """Whether a line may be of a failure. A search for words is ten times faster than patterns."""
    return any(map(text.__contains__, _QUICK_WORDS)) or text[:1] == "F" or text[:2] in ("[E", "[F")


class Meaning(NamedTuple):
    """The role and the kind of a text; is_known: a row has it."""

    role: str
    kind: str
    is_known: bool
    explains: bool = False  # the errors before it in a chain of exceptions are its effects


_UNKNOWN = Meaning(FAILED, "exception", False)


def meaning(text: str) -> Meaning:
    """The role and the kind of an exception or a message.

    >>> meaning("RuntimeError: Connection closed by peer [10.0.0.2]:4711").role
    'lost'
    >>> meaning("OSError: [Errno 28] No space left on device").kind
    'storage'
    """
    return explain(text)[1]


def quoted(text: str) -> str:
    """The error that an error quotes as its cause; the text itself where it quotes none."""
    match = PHRASES["quotes"].search(text[:MAX_LINE]) if "Job aborted" in text else None
    return match[1] if match else text


def explain(text: str) -> tuple[str, Meaning]:
    """The key of the row that explains an exception or a message, and its meaning; "": none."""
    head = text[:MAX_LINE]
    for needle, row in TEXT_ROWS:
        if needle not in head or not row.pattern.search(head):
            continue
        if row.role == NOTE:
            return row.key, _UNKNOWN
        means = _collective(text) if row.role == COLLECTIVES else (row.role, row.kind)
        if means:
            return row.key, Meaning(*means, True, row.explains)
    return "", Meaning(FAILED, kind_of_words(head), False)


def kind_of_words(text: str) -> str:
    """The kind of an error by the general words at the beginning of its text."""
    key = key_of_words(text)
    return KIND_WORDS[key][0] if key else "exception"


def key_of_words(text: str) -> str:
    """The key of the row of `KIND_WORDS` that has the words of a text; "": none."""
    head = text[:_WORDS]
    return next((key for key, (_, words) in KIND_WORDS.items() if words.search(head)), "")


def _collective(text: str) -> tuple[str, str] | None:
    """The role and the kind of an error of a library of collectives, by its clearest line."""
    errors = [error for line in text.split("\n") if (error := nccl_errors.meaning(line))]
    for role in (nccl_errors.CAUSE, nccl_errors.VICTIM, nccl_errors.FOLLOWS):
        for error in errors:
            if error.role != role:
                continue
            if role == nccl_errors.CAUSE:
                return FAILED, error.kind
            if error.kind == "timeout":
                return WAITED, error.kind
            is_own = role == nccl_errors.FOLLOWS and error.kind != "network"
            return (FAILED if is_own else LOST), error.kind
    return None


def find_row(
    rows: Rows, text: str, parts: Container[str] | None = None
) -> tuple[FailureRow, dict[str, str]] | None:
    """The first row that matches, and the named groups of its pattern.
    parts: reporters with an unfinished report, which a row that completes one needs; None: any
    """
    for needle, row in rows:
        if needle not in text or not (match := row.pattern.search(text)):
            continue
        if parts is None or not row.completes or row.reporter in parts:
            return row, {name: value for name, value in match.groupdict().items() if value}
    return None


def kind_of_groups(groups: Mapping[str, str], text_kind: str) -> str:
    """The kind of a line: by its signal or exit status; without them, that of its text."""
    if groups.get("word") == _OUT_OF_MEMORY:
        return "oom"
    code = code_of(groups)
    return kind_of_code(code) if code else text_kind


def kind_of_code(code: int) -> str:
    """The kind of an exit status, or of minus a signal."""
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    return "segfault" if number == 11 else "signal" if number else "exception"


def signal_of(code: int) -> int:
    """The signal of an exit status (137) or of minus a signal; 0: none.

    >>> signal_of(137), signal_of(-11), signal_of(1)
    (9, 11, 0)
    """
    return -code if code < 0 else code - 128 if code - 128 in SIGNAL_NAMES else 0


def code_of(groups: Mapping[str, str]) -> int:
    """The exit status, or minus the signal, that a line names; 0: none."""
    if "word" in groups:
        return -_SIGNAL_WORDS[groups["word"]]
    if "signal" in groups:
        name = groups["signal"]
        return -(int(name) if name.isdigit() else _NUMBERS.get(name, 0))
    # Another status of Windows says no more than that its process failed.
    status = groups.get("status", "")
    windows = int(status, 16) if status[:2] == "0x" else -int(status) if status.isdigit() else 0
    code = -_WINDOWS.get(windows % (1 << 32), -1) if status else 0
    return int(groups.get("code", code))

"""The kinds of settings: the check of a value, its form in a Policy, and its words in the docs.

A kind with a parameter is a function (`whole_number`, `one_of`), any other a constant (`PATHS`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nodeready.core.base import grouped

Names = tuple[str, ...]
#: A mapping of names to settings, as plain tuples so that a Policy can be compared and hashed;
#: `rows` turns it back into dicts.
Table = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


class Invalid(ValueError):
    """One value breaks its rule; the text completes 'KEY = VALUE: ...'."""


def value_text(value: object) -> str:
    """A wrong value for a message, of at most 60 characters."""
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to print a whole number of more than 4300 digits.
        return "a number that is too large to be shown"
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class SettingKind:
    """The kind of a setting."""

    check: Callable[[Any], Any]  # value in group_data -> value in a Policy. Raises Invalid
    takes: str  # the possible values, in Markdown
    # value in a Policy -> value in group_data, or in JSON
    plain: Callable[[Any], Any] = lambda value: list(value) if isinstance(value, tuple) else value
    named: bool = False  # whether a value is a Table


def setting(default: Any, kind: SettingKind) -> Any:
    return field(default=default, metadata={"kind": kind})


def rows(table: Table) -> dict[str, dict[str, Any]]:
    """A Table as ``{name: {column: value}}``."""
    return {name: dict(columns) for name, columns in table}


# --- The kinds with a parameter.


def _check_whole_number(value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Invalid("must be a whole number")
    if not low <= value <= high:
        raise Invalid(f"must be between {low} and {high}")
    return value


#: Characters that end a line for some program, or are no characters: the control characters (C0,
#: C1, DEL), Unicode's separators of lines and paragraphs, and halves of surrogate pairs.
_NO_LINE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
#: Maximum characters of a value: more than any key of ssh, less than a process's word of 128 KiB.
MOST_CHARACTERS = 16384


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Invalid("must be a string")
    if len(value) > MOST_CHARACTERS:
        raise Invalid(f"must have at most {MOST_CHARACTERS} characters")
    if _NO_LINE.search(value):
        raise Invalid("must be one line without control characters")
    return value


def whole_number(low: int, high: int) -> SettingKind:
    """A whole number, ``low`` and ``high`` included."""
    return SettingKind(lambda value: _check_whole_number(value, low, high), f"{low} to {high}")


def or_none(kind: SettingKind) -> SettingKind:
    takes = f"{kind.takes}, or `None`"
    return SettingKind(lambda value: None if value is None else kind.check(value), takes)


def whole_numbers(low: int, high: int) -> SettingKind:
    """Whole numbers; a Policy holds them sorted."""

    def check(value: Any) -> tuple[int, ...]:
        if isinstance(value, str) or not isinstance(value, (tuple, list, set, frozenset)):
            raise Invalid(f"must be a list of numbers: ({value_text(value)},)?")
        return tuple(sorted(_check_whole_number(item, low, high) for item in value))

    return SettingKind(check, f"numbers, {low} to {high}")


def one_of(*choices: str) -> SettingKind:
    def check(value: Any) -> str:
        if value not in choices:
            raise Invalid("must be one of " + ", ".join(choices))
        return str(value)

    return SettingKind(check, ", ".join(f'`"{choice}"`' for choice in choices))


def matching(pattern: str, noun: str) -> SettingKind:
    """Strings that match ``pattern``; ``noun`` is the word for a single string."""

    def check(value: Any) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, (tuple, list)):
            raise Invalid(f"must be a list of {noun}s: ({value_text(value)},)?")
        for item in value:
            if not re.fullmatch(pattern, _text(item)):
                raise Invalid(f"{item!r} is no {noun}")
        return tuple(value)

    return SettingKind(check, f"{noun}s")


def table(**columns: type) -> SettingKind:
    """Names with columns, each a positive whole number or a line of text; see Table."""

    def check(value: Any) -> Table:
        if value == ():
            return ()
        if not isinstance(value, Mapping):
            raise Invalid("must map names to settings: {'NAME': {...}}")
        rows_of = ((name, _columns(name, settings, columns)) for name, settings in value.items())
        return tuple(sorted(rows_of))

    takes = "names with " + ", ".join(f"`{name}`" for name in columns)
    return SettingKind(check, takes, rows, named=True)


def _columns(name: Any, settings: Any, columns: Mapping[str, type]) -> tuple[tuple[str, Any], ...]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]*", _text(name)):
        raise Invalid(f"{name!r} is no name")
    if not isinstance(settings, Mapping):
        raise Invalid(f"{name!r} must have settings: {{'{next(iter(columns))}': ...}}")
    for column, setting_value in settings.items():
        if column not in columns:
            hint = suggestion(column, columns)
            raise Invalid(f"{name!r} has the unknown setting {value_text(column)}: {hint}")
        if columns[column] is int:
            _check_whole_number(setting_value, 1, 10_000_000)
        else:
            _text(setting_value)
    return tuple(sorted(settings.items()))


# --- The kinds without a parameter.


def _limit(value: Any) -> str:
    if value == "unlimited":
        return "unlimited"
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_KIB:
        return str(value)
    raise Invalid(f"must be 'unlimited' or a number of KiB up to {_MOST_KIB}")


#: A limit is a number of bytes in 64 bits; all ones are "unlimited" (getrlimit(2)).
_MOST_KIB = (1 << 54) - 1
#: core(5), "Naming of core dump files", Linux 6.12. %F is for pipes only.
CORE_SPECIFIERS = frozenset("%cCdeEfghiIpPstu")
#: CORENAME_MAX_SIZE in the kernel: the pattern and its terminating zero.
CORE_PATTERN_MAX_BYTES = 128
#: The system's directories (hier(7)), which must not be writable for all users.
_SYSTEM = re.compile(r"/(bin|boot|dev|etc|lib(|32|64|x32)|proc|root|run|sbin|sys|usr)(/.*)?")
#: Shared directories: a directory below them may be for cores alone.
_SHARED = re.compile(r"/(home|media|mnt|opt|srv|var(|/cache|/lib|/log|/mail|/spool))?")


def _no_core_directory(directory: str) -> bool:
    """Whether the directory must not become writable for all users, and lose its old files."""
    plain = "/" + "/".join(word for word in directory.split("/") if word not in ("", "."))
    return bool(_SYSTEM.fullmatch(plain) or _SHARED.fullmatch(plain))


def _core_pattern(value: Any) -> str:
    text = _text(value)
    if not text.startswith("/"):
        raise Invalid("must be an absolute path (a pipe is core_handler = 'systemd-coredump')")
    if len(text.encode()) > CORE_PATTERN_MAX_BYTES - 1:
        raise Invalid(f"is longer than {CORE_PATTERN_MAX_BYTES - 1} bytes; the kernel cuts it off")
    for specifier in re.findall(r"%(.?)", text):
        if specifier not in CORE_SPECIFIERS or not specifier:
            raise Invalid(f"has the unknown specifier %{specifier} (core(5) lists them)")
    directory, _, name = text.rpartition("/")
    if not directory or not name or "%" in directory:
        raise Invalid("must name a fixed directory and then the file: /DIRECTORY/core.%e.%P.%h.%t")
    if "/../" in f"{directory}/" or any(char.isspace() or char in "'\"\\" for char in text):
        raise Invalid("must not contain '..', white space, quotes or backslashes")
    if _no_core_directory(directory):
        harm = f"would make {directory} writable for all users, and remove its old files"
        raise Invalid(f"{harm}: name a directory for cores alone")
    return text


def _textfile(value: Any) -> str:
    text: str = PATH.check(value)
    if text and (not text.endswith(".prom") or text.endswith("/.prom") or "/../" in text):
        raise Invalid("must name a file *.prom, since node_exporter reads no other, without '..'")
    return text


def _directory(value: Any) -> str:
    text: str = PATH.check(value)
    if text and ("/../" in f"{text}/" or _no_core_directory(text)):
        raise Invalid(
            "must name a directory for this alone, not one of the system's, without '..'"
        )
    return text


def _node_share(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"([1-9][0-9]?|100)%", value):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65536:
        return str(value)
    raise Invalid("must be a share of nodes from '1%' to '100%', or a number from 1 to 65536")


def _port_range(value: Any) -> tuple[int, int]:
    if not (isinstance(value, (tuple, list)) and len(value) == 2):
        raise Invalid("must be two port numbers: (first, last)")
    first, last = (_check_whole_number(port, 1, 65535) for port in value)
    if first > last:
        raise Invalid(f"is the wrong way round: ({last}, {first})?")
    return (first, last)


def _version(value: Any) -> str:
    if not re.fullmatch(r"([0-9]{1,9}(\.[0-9]{1,9}){0,5})?", _text(value)):
        raise Invalid("must be a version such as 0.4.3")
    return str(value)


#: The name of a user.
USER_NAME = r"[A-Za-z_][A-Za-z0-9_.-]{0,31}"


def _single(kind: SettingKind, takes: str) -> SettingKind:
    """One value of a kind that takes a list, or "" for none."""
    return SettingKind(lambda value: value if value == "" else kind.check((value,))[0], takes)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Invalid("must be True or False")
    return value


FLAG = SettingKind(_flag, "`True`, `False`")
LINE = SettingKind(_text, "one line of text")
VERSION = SettingKind(_version, 'a version, or `""`')
LIMIT = SettingKind(
    _limit, '`"unlimited"`, or KiB', lambda value: value if value == "unlimited" else int(value)
)

CORE_PATTERN = SettingKind(_core_pattern, "an absolute path pattern")
NODE_SHARE = SettingKind(
    _node_share,
    '`"1%"` to `"100%"`, or 1 to 65536 nodes',
    lambda value: value if value.endswith("%") else int(value),
)
PORT_RANGE = SettingKind(_port_range, "`(first, last)`, 1 to 65535")

USERS = matching(USER_NAME, "user name")
PATHS = matching(r"/[^:\s'\"]*", "absolute path")
PATH = _single(PATHS, 'an absolute path, or `""`')
LINES = SettingKind(matching(r".+", "line").check, "lines of text")
WORDS = SettingKind(matching(r".+", "word").check, "the words of a command")
# The variables that bash exports (an exported function's name has other characters).
VARIABLES = SettingKind(
    matching(r"[A-Za-z_][A-Za-z0-9_]*=.*", "variable (NAME=VALUE)").check, "`NAME=VALUE`s"
)
DOMAINS = matching(r"\*|@?[A-Za-z_][A-Za-z0-9_.-]{0,31}", "limits.conf domain")
# With ".service.d" it is a component of a path, which has at most 255 bytes.
UNITS = matching(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,199}", "service name")
# "NAME-" asks apt to remove a package, as "-NAME" does elsewhere.
PACKAGES = matching(r"[a-z0-9]([a-z0-9+.-]{0,126}[a-z0-9+.])?", "package name")
PATTERNS = matching(r"!?[A-Za-z0-9*?_][A-Za-z0-9*?_.:%-]*", "ssh host pattern")
KERNEL_ARGS = or_none(
    matching(r"[A-Za-z_][A-Za-z0-9_.-]*(=[A-Za-z0-9_.,:+-]+)?", "kernel argument")
)
USER = _single(USERS, 'a user name, or `""`')
NETWORK = _single(
    matching(r"[A-Za-z0-9][A-Za-z0-9_ .+-]{0,39}", "NCCL network"),
    '`"IB"`, `"OFI"`, `"Socket"`, the name of a plugin\'s network, or `""`',
)
DIRECTORY = SettingKind(_directory, 'an absolute path of a directory, or `""`')
TEXTFILE = SettingKind(_textfile, 'an absolute path of a file `*.prom`, or `""`')


# --- Words of a command line: a range of ports, and the known word that resembles an unknown word.


def port_range(words: str) -> tuple[int, int]:
    """``29500-29510``, or one port, as an option ``--ports`` takes it.

    Raises ValueError with the form of the words.
    """
    match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", words.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise ValueError("must be FIRST-LAST, two ports from 1 to 65535")
    return first, last


def closest_word(word: str, known_words: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word that begins with ``word``, else the most similar one; "" for none."""
    names = list(known_words)
    if completions := [name for name in names if len(word) > 1 and name.startswith(word)]:
        return completions[0]
    # Imported late: few runs have an unknown word, and the program on a node starts often.
    import difflib

    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=cutoff)), "")


def suggestion(word: Any, known_words: Iterable[str]) -> str:
    """The advice for an unknown word: the closest known one, else all of them.

    >>> suggestion("severty", ("reason", "severity"))
    'did you mean severity?'
    >>> suggestion("x", ("reason", "severity"))
    'there are reason, severity'
    """
    names = list(known_words)
    close = closest_word(word, names) if isinstance(word, str) else ""
    return f"did you mean {close}?" if close else f"there are {', '.join(names)}"


# --- A waiver: the policy accepts the finding of one check, for a reason and until a day.

#: Days before the end of a waiver in which its finding is a warning: the owner has two weeks to
#: repair it or to extend the waiver, before the finding can stop a job.
ENDING_DAYS = 14
KEYS = ("reason", "owner", "until", "nodes")


@dataclass(frozen=True, order=True)
class Waiver:
    """One waiver."""

    check: str  # the id of the check
    reason: str  # why its finding is accepted
    owner: str = ""  # who answers for the waiver; "": not named
    until: str = ""  # the last day on which it holds, ``2027-01-31``, UTC; "": it does not end
    nodes: str = ""  # the node set to which it is restricted; "": all nodes that have the policy

    def days_left(self, today: str) -> int | None:
        """Days until the last day, negative after it; None: it does not end."""
        if not self.until:
            return None
        # Imported late: few waivers end, and the program on a node starts often.
        from datetime import date

        return (date.fromisoformat(self.until) - date.fromisoformat(today)).days

    def setting(self) -> Any:
        """The waiver as group_data declares it: its reason, or a dict."""
        values = {key: getattr(self, key) for key in KEYS if getattr(self, key)}
        return self.reason if [*values] == ["reason"] else values


def _checked(value: Any) -> tuple[Waiver, ...]:
    if value == ():
        return ()
    if not isinstance(value, Mapping):
        raise Invalid("must map check ids to reasons: {'nics.mtu': 'why'}")
    waivers: list[Waiver] = []
    for check, declared in value.items():
        if not re.fullmatch(r"[a-z_]+\.[a-z0-9_]+", LINE.check(check)):
            raise Invalid(f"{check!r} is no check id")
        rows = declared if isinstance(declared, (list, tuple)) and declared else [declared]
        waivers += [_waiver(check, row) for row in rows]
    return tuple(sorted({*waivers}))


def _waiver(check: str, declared: Any) -> Waiver:
    values = declared if isinstance(declared, Mapping) else {"reason": declared}
    for key, value in values.items():
        if key not in KEYS:
            hint = suggestion(key, KEYS)
            raise Invalid(f"{check!r} has the unknown key {value_text(key)}: {hint}")
        try:
            LINE.check(value)
        except Invalid as error:
            raise Invalid(f"{check!r}: {key} {error}") from None
    if not values.get("reason", "").strip():
        raise Invalid(f"{check!r} needs a reason")
    if "until" in values:
        # Imported late, as above.
        from datetime import date

        is_date = re.fullmatch(r"\d{4}-\d\d-\d\d", values["until"], re.ASCII)
        try:
            date.fromisoformat(values["until"] if is_date else "")
        except ValueError:
            raise Invalid(f"{check!r}: until must be a day, YYYY-MM-DD") from None
    if "nodes" in values and not values["nodes"].strip():
        raise Invalid(f"{check!r}: nodes names no node")
    return Waiver(check, **values)


def _plain(waivers: tuple[Waiver, ...]) -> dict[str, Any]:
    settings = grouped((waiver.check, waiver.setting()) for waiver in waivers)
    return {check: rows if len(rows) > 1 else rows[0] for check, rows in settings.items()}


WAIVERS = SettingKind(
    _checked,
    "check ids and reasons: `{'ID': 'WHY'}`, or a dict with `reason`, `owner`, `until`, `nodes`, "
    "or a list of such dicts",
    _plain,
)

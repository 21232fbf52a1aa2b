"""Turn group_data into a Policy, or into errors that say which file, which key and what to do.

Pure: a mapping goes in, a Policy or a PolicyError comes out. Nothing is contacted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any

from nodeready.policy import Policy
from nodeready.setting import rows
from nodeready.spelling import closest

#: core(5), "Naming of core dump files", Linux 6.12. %F is for pipes only.
CORE_SPECIFIERS = frozenset("%cCdeEfghiIpPstu")
#: CORENAME_MAX_SIZE in the kernel: the pattern and its terminating zero.
CORE_PATTERN_MAX_BYTES = 128

#: First words of our keys: an unknown key that begins with one of them is meant for us.
_PREFIXES = (
    "ptrace_", "core_", "limit_", "pdshrc_", "ssh_client_", "iommu_", "py_spy_", "gpu_", "xid_",
    "rdma_", "gate_",
)  # fmt: skip
_FIELDS: dict[str, Field[Any]] = {f.name: f for f in fields(Policy)}


class PolicyError(ValueError):
    """A policy that cannot be used. Each of ``problems`` is one line: file, key, meaning."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class _Wrong(ValueError):
    """One value breaks its rule; the text completes 'key VALUE ...'."""


def _int(value: Any, rule: Mapping[str, Any]) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Wrong("must be a whole number")
    if not rule["low"] <= value <= rule["high"]:
        raise _Wrong(f"must be between {rule['low']} and {rule['high']}")
    return value


def _count(value: Any, rule: Mapping[str, Any]) -> int | None:
    return None if value is None else _int(value, rule)


def _bool(value: Any, rule: Mapping[str, Any]) -> bool:
    if not isinstance(value, bool):
        raise _Wrong("must be True or False")
    return value


def _numbers(value: Any, rule: Mapping[str, Any]) -> Any:
    if isinstance(value, str) or not isinstance(value, (tuple, list, set, frozenset)):
        raise _Wrong(f"must be a list of numbers: ({value!r},)?")
    return tuple(sorted(_int(item, rule) for item in value))


def _table(value: Any, rule: Mapping[str, Any]) -> Any:
    """A mapping of names to columns; see policy.Table."""
    columns: Mapping[str, type] = rule["columns"]
    if value == ():
        return ()
    if not isinstance(value, Mapping):
        raise _Wrong("must map names to settings: {'NAME': {...}}")
    found = []
    for name, settings in sorted(value.items(), key=lambda item: str(item[0])):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]*", _text(name)):
            raise _Wrong(f"{name!r} is no name")
        if not isinstance(settings, Mapping):
            raise _Wrong(f"{name!r} must have settings: {{'{next(iter(columns))}': ...}}")
        for column, wanted in settings.items():
            if column not in columns:
                close = closest(str(column), columns)
                meant = f"did you mean {close}?" if close else "there are " + ", ".join(columns)
                raise _Wrong(f"{name!r} has the unknown setting {column!r}: {meant}")
            if columns[column] is int:
                _int(wanted, {"low": 1, "high": 10_000_000})
            else:
                _text(wanted)
        found.append((name, tuple(sorted(settings.items()))))
    return tuple(found)


def _waivers(value: Any, rule: Mapping[str, Any]) -> Any:
    if value == ():
        return ()
    if not isinstance(value, Mapping):
        raise _Wrong("must map check ids to reasons: {'nics.mtu': 'why'}")
    for check, reason in value.items():
        if not re.fullmatch(r"[a-z_]+\.[a-z_]+", _text(check)):
            raise _Wrong(f"{check!r} is no check id")
        if not _text(reason).strip():
            raise _Wrong(f"{check!r} needs a reason")
    return tuple(sorted(value.items()))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong("must be a string")
    if any(ord(char) < 32 or ord(char) == 127 for char in value):
        raise _Wrong("must be one line without control characters")
    return value


def _choice(value: Any, rule: Mapping[str, Any]) -> str:
    if value not in rule["choices"]:
        raise _Wrong("must be one of " + ", ".join(rule["choices"]))
    return str(value)


def _limit(value: Any, rule: Mapping[str, Any]) -> str:
    if value == "unlimited":
        return "unlimited"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    raise _Wrong("must be 'unlimited' or a number of KiB")


def _core_pattern(value: Any, rule: Mapping[str, Any]) -> str:
    text = _text(value)
    if not text.startswith("/"):
        raise _Wrong("must be an absolute path (a pipe is core_handler = 'systemd-coredump')")
    if len(text.encode()) > CORE_PATTERN_MAX_BYTES - 1:
        raise _Wrong(f"is longer than {CORE_PATTERN_MAX_BYTES - 1} bytes; the kernel cuts it off")
    for specifier in re.findall(r"%(.?)", text):
        if specifier not in CORE_SPECIFIERS or not specifier:
            raise _Wrong(f"has the unknown specifier %{specifier} (core(5) lists them)")
    directory, _, name = text.rpartition("/")
    if not directory or not name or "%" in directory:
        raise _Wrong("must name a fixed directory and then the file: /DIRECTORY/core.%e.%P.%h.%t")
    if "/../" in f"{directory}/" or any(char.isspace() for char in text):
        raise _Wrong("must not contain '..' or white space")
    return text


def _port_range(value: Any, rule: Mapping[str, Any]) -> Any:
    if not (isinstance(value, (tuple, list)) and len(value) == 2):
        raise _Wrong("must be two port numbers: (first, last)")
    first, last = (_int(port, {"low": 1, "high": 65535}) for port in value)
    if first > last:
        raise _Wrong(f"is the wrong way round: ({last}, {first})?")
    return (first, last)


def _each(pattern: str, what: str) -> Callable[[Any, Mapping[str, Any]], Any]:
    """A validator for a list of strings that must all match ``pattern``."""
    compiled = re.compile(pattern)

    def validate(value: Any, rule: Mapping[str, Any]) -> Any:
        if isinstance(value, str) or not isinstance(value, (tuple, list)):
            raise _Wrong(f"must be a list of {what}s: ({value!r},)?")
        for item in value:
            if not compiled.fullmatch(_text(item)):
                raise _Wrong(f"{item!r} is no {what}")
        return tuple(value)

    return validate


#: What may be the name of a user.
USER = r"[A-Za-z_][A-Za-z0-9_.-]{0,31}"
_users = _each(USER, "user name")
_paths = _each(r"/[^:\s'\"]*", "absolute path")
_kernel_args = _each(r"[A-Za-z_][A-Za-z0-9_.-]*(=[A-Za-z0-9_.,:+-]+)?", "kernel argument")


def _version(value: Any, rule: Mapping[str, Any]) -> str:
    if not re.fullmatch(r"(\d+(\.\d+)*)?", _text(value)):
        raise _Wrong("must be a version such as 0.4.3")
    return str(value)


_VALIDATORS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "int": _int,
    "count": _count,
    "bool": _bool,
    "numbers": _numbers,
    "table": _table,
    "waivers": _waivers,
    "choice": _choice,
    "limit": _limit,
    "core_pattern": _core_pattern,
    "port_range": _port_range,
    "version": _version,
    "line": lambda value, rule: _text(value),
    "lines": _each(r".+", "line"),
    "user": lambda value, rule: value if value == "" else _users((value,), rule)[0],
    "users": _users,
    "domains": _each(r"\*|@?[A-Za-z_][A-Za-z0-9_.-]{0,31}", "limits.conf domain"),
    "units": _each(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*", "service name"),
    "packages": _each(r"[a-z0-9][a-z0-9+.-]*", "package name"),
    "path": lambda value, rule: value if value == "" else _paths((value,), rule)[0],
    "paths": _paths,
    "patterns": _each(r"!?[A-Za-z0-9*?_][A-Za-z0-9*?_.:%-]*", "ssh host pattern"),
    "kernel_args": lambda value, rule: None if value is None else _kernel_args(value, rule),
}


def _misspelt(key: str) -> str:
    """What the unknown ``key`` was probably meant to be, or "" when it is not ours."""
    import difflib

    close = difflib.get_close_matches(key, _FIELDS, n=1, cutoff=0.85)
    if close:
        return f"did you mean {close[0]}?"
    if key.startswith(_PREFIXES):
        ours = [name for name in _FIELDS if name.split("_")[0] == key.split("_", maxsplit=1)[0]]
        return "the settings are " + ", ".join(ours)
    return ""


def check_settings(
    data: Mapping[str, Any], where: str, foreign: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The validated settings among ``data`` (other people's keys are left out).

    where:   the file or other origin, for the error text
    foreign: keys that belong to pyinfra, never taken for a misspelt one of ours
    Raises PolicyError with every problem of this origin.
    """
    settings: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in data.items():
        if key in _FIELDS:
            rule = _FIELDS[key].metadata
            try:
                settings[key] = _VALIDATORS[rule["kind"]](value, rule)
            except _Wrong as wrong:
                shown = repr(value)
                shown = shown if len(shown) <= 60 else shown[:57] + "..."
                problems.append(f"{where}: {key} = {shown}: {wrong}")
        elif isinstance(key, str) and not key.startswith("_") and key not in foreign:
            meant = _misspelt(key)
            if meant:
                problems.append(f"{where}: unknown setting {key}: {meant}")
    if problems:
        raise PolicyError(problems)
    return settings


def make_policy(data: Mapping[str, Any], where: str = "policy") -> Policy:
    """The Policy that ``data`` declares; settings that it does not name keep their default."""
    return Policy(**check_settings(data, where))


def as_data(policy: Policy) -> dict[str, Any]:
    """All settings as group_data, or JSON, holds them: `make_policy` makes the same of it."""
    return {
        name: _plain(rule.metadata["kind"], vars(policy)[name]) for name, rule in _FIELDS.items()
    }


def _plain(kind: str, value: Any) -> Any:
    if kind == "table":
        return rows(value)
    if kind == "waivers":
        return dict(value)
    if kind == "limit" and value != "unlimited":
        return int(value)
    return list(value) if isinstance(value, tuple) else value

"""A check of a site's own, as a file of `checks.d` or the setting `site_checks` declares it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nodeready.core.policy.fields import (
    MOST_CHARACTERS,
    Invalid,
    SettingKind,
    suggestion,
    value_text,
)

#: The directory of the files that declare checks, beside an inventory.
FOLDER = "checks.d"
#: Where a check can be made: by `nodeready audit`, by `nodeready ready`, by the gate on a node.
AUDIT, READY, GATE = MOMENTS = ("audit", "ready", "gate")
#: The ways to judge an output; a check has exactly one.
COMPARATORS = ("matches", "equals", "range", "status")
KEYS = (
    *("id", "run", "file", "json", *COMPARATORS),
    *("severity", "reason", "fix", "timeout_s", "groups", "in"),
)
#: The result of a subject that could not be observed has this name.
_RESERVED = "observed"
#: `timeout`, and a shell for a command that was ended by a signal, use higher ones.
_MAX_STATUS = 123
#: Control characters other than tab and newline, and halves of surrogate pairs.
_NO_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
#: ``a.b[0].c``: names and positions.
_JSON_PATH = re.compile(r"(?:[^.\[\]]+|\[\d{1,6}\])(?:\.[^.\[\]]+|\[\d{1,6}\])*")
_JSON_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


@dataclass(frozen=True)
class SiteCheck:
    """One check."""

    name: str  # its id is ``site.NAME``
    run: str  # POSIX sh that prints what is judged; "": ``file`` is read
    file: str  # absolute path of the file on the node whose text is judged; "": ``run`` is run
    json: str  # the way to a value in the JSON that was read (``a.b[0].c``); "": the text itself
    comparator: str  # one of COMPARATORS
    expected: Any  # the value that it compares with: a text, (low, high), or an exit status
    # the status of a result that is not as it should be: ``fail`` or ``warn``
    severity: str = "fail"
    reason: str = ""  # why this must hold
    fix: str = ""  # what repairs it
    timeout_s: int = 5  # seconds for the command
    groups: tuple[str, ...] = ()  # the inventory's groups whose nodes are checked; (): all nodes
    moments: tuple[str, ...] = MOMENTS  # those of MOMENTS at which it is made
    source: str = ""  # ``checks.d/FILE.toml:LINE``; "": no file declares it

    @property
    def id(self) -> str:
        return f"site.{self.name}"

    @property
    def json_steps(self) -> tuple[str | int, ...]:
        """The names and positions of ``json``."""
        steps = _JSON_STEP.finditer(self.json)
        return tuple(int(step[1]) if step[1] else step[2] for step in steps)

    def table(self) -> dict[str, Any]:
        """The check as a file declares it, without the defaults."""
        table: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("comparator", "expected") and value not in ("", field.default):
                key = {"name": "id", "moments": "in"}.get(field.name, field.name)
                table[key] = list(value) if isinstance(value, tuple) else value
        is_range = self.comparator == "range"
        return {**table, self.comparator: list(self.expected) if is_range else self.expected}


def parse(table: Any, source: str = "") -> SiteCheck:
    """The check that a table with KEYS declares. Raises Invalid; the text names no check."""
    if not isinstance(table, Mapping):
        raise Invalid("must be a table with id, run or file, and how to judge it")
    for key in table:
        if key not in KEYS:
            raise Invalid(f"unknown key {value_text(key)}: {suggestion(key, KEYS)}")
    name = table.get("id", "")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,59}", name):
        raise Invalid(
            f"id = {value_text(name)}: must be a small letter, then small letters, digits and _"
            if "id" in table
            else "has no id"
        )
    if name == _RESERVED:
        raise Invalid(f'id = "{_RESERVED}": is the result of a node that could not be observed')
    run, file = _text(table, "run"), _line(table, "file")
    if bool(run.strip()) == bool(file):
        raise Invalid("must have either run or file")
    if file and (not file.startswith("/") or "\t" in file):
        raise Invalid(f"file = {value_text(file)}: must be an absolute path")
    path = _line(table, "json")
    if "json" in table and not _JSON_PATH.fullmatch(path):
        raise Invalid(f"json = {value_text(path)}: must be names and positions: a.b[0].c")
    comparator, expected = _comparison(table)
    if comparator == "status" and (file or path):
        raise Invalid(f"status: is for run alone, not for {'file' if file else 'json'}")
    severity = table.get("severity", "fail")
    if severity not in ("fail", "warn"):
        raise Invalid(f'severity = {value_text(severity)}: must be "fail" or "warn"')
    timeout_s = table.get("timeout_s", 5)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int) or not 1 <= timeout_s <= 60:
        raise Invalid(f"timeout_s = {value_text(timeout_s)}: must be a whole number from 1 to 60")
    return SiteCheck(
        *(name, run, file, path, comparator, expected, severity),
        *(_line(table, "reason"), _line(table, "fix"), timeout_s),
        *(_words(table, "groups", ()), _words(table, "in", MOMENTS), source),
    )


def _text(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str):
        raise Invalid(f"{key} = {value_text(value)}: must be a string")
    if len(value) > MOST_CHARACTERS:
        raise Invalid(f"{key}: must have at most {MOST_CHARACTERS} characters")
    value = value.replace("\r\n", "\n")
    if _NO_TEXT.search(value):
        raise Invalid(f"{key} = {value_text(value)}: must not contain control characters")
    return value


def _line(table: Mapping[str, Any], key: str) -> str:
    value = _text(table, key).strip()
    if "\n" in value:
        raise Invalid(f"{key} = {value_text(value)}: must be one line")
    return value


def _comparison(table: Mapping[str, Any]) -> tuple[str, Any]:
    present = [key for key in COMPARATORS if key in table]
    if len(present) != 1:
        several = f"has {' and '.join(present)}: " if present else ""
        raise Invalid(f"{several}must have exactly one of {', '.join(COMPARATORS)}")
    (comparator,) = present
    value = table[comparator]
    if comparator == "matches":
        return comparator, _pattern(_text(table, comparator))
    if comparator == "equals":
        # A number or a truth value as JSON writes it.
        text = json.dumps(value) if isinstance(value, (bool, int, float)) else value
        return comparator, _text({comparator: text}, comparator).strip()
    if comparator == "range":
        return comparator, _range(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_STATUS:
        raise Invalid(
            f"status = {value_text(value)}: must be 0 to {_MAX_STATUS}; a shell and timeout use "
            "higher ones for a command that was ended or cannot be run"
        )
    return comparator, value


def _pattern(text: str) -> str:
    try:
        re.compile(text, re.MULTILINE)
    except (re.error, RecursionError, OverflowError) as error:
        raise Invalid(f"matches = {value_text(text)}: no regular expression: {error}") from None
    if not text:
        raise Invalid('matches = "": matches everything')
    return text


def _range(value: Any) -> tuple[float, float]:
    if not (isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_number, value))):
        raise Invalid(f"range = {value_text(value)}: must be two numbers: [LOW, HIGH]")
    low, high = value
    if low > high:
        raise Invalid(f"range = {value_text(value)}: is the wrong way round: [{high}, {low}]?")
    return (low, high)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and abs(value) <= 1e300


def _words(table: Mapping[str, Any], key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """The words of ``groups`` or ``in``; ``in`` has a fixed choice of them."""
    value = table.get(key, default)
    if (
        isinstance(value, str)
        or not isinstance(value, (list, tuple))
        or not all(isinstance(word, str) and word for word in value)
    ):
        raise Invalid(f'{key} = {value_text(value)}: must be a list of words: ["WORD"]')
    if key in table and not value:
        raise Invalid(f"{key} = []: selects nothing; leave it out for all")
    for word in value:
        if default and word not in default:
            raise Invalid(f"{key} = {value_text(list(value))}: {suggestion(word, default)}")
    return tuple(word for word in default if word in value) if default else tuple(value)


def _checks(value: Any) -> tuple[SiteCheck, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise Invalid("must be a list of tables: [{'id': ..., 'run': ..., 'equals': ...}]")
    checks: dict[str, SiteCheck] = {}
    for number, item in enumerate(value, 1):
        table, source = item, ""
        if isinstance(item, Mapping):
            table = {key: item[key] for key in item if key != "source"}
            source = _line(item, "source")
        try:
            check = parse(table, source)
        except Invalid as error:
            raise Invalid(f"check {number}: {error}") from None
        if check.name in checks:
            raise Invalid(f'check {number}: id = "{check.name}": there are two')
        checks[check.name] = check
    return tuple(checks.values())


SITE_CHECKS = SettingKind(
    _checks,
    "tables as in a file of `checks.d`",
    lambda checks: [check.table() for check in checks],
)

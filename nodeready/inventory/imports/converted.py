"""What became of each check of another tool, and the file of `checks.d` made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nodeready.text import sanitise

CONVERTED, COVERED, IMPOSSIBLE, SETTING = "converted", "covered", "cannot", "setting"
#: What can become of a line, in the order of the counts.
OUTCOMES = (CONVERTED, COVERED, IMPOSSIBLE, SETTING)

#: Larger than every size in kB or number of inodes, for a range without an upper end.
NO_LIMIT = 1e18
#: Maximum characters of an id, less those of the number of an equal one.
_MAX_ID = 48


class NotConvertible(Exception):
    """A check has no counterpart; the text says why."""


class ImportFileError(Exception):
    """A file that cannot be imported; the text says where and why."""


@dataclass(frozen=True)
class ImportedLine:
    """One line of the other tool's file.

    place:   where it is (``nhc.conf:12``)
    text:    the line
    outcome: one of OUTCOMES
    detail:  the ids of the checks that it became or that cover it, or why it cannot be converted
    checks:  the tables of `checks.d` that it became, without their reason: it is the place
    nodes:   the target that selects the nodes; "": all nodes
    """

    place: str
    text: str
    outcome: str
    detail: str = ""
    checks: tuple[Mapping[str, Any], ...] = ()
    nodes: str = ""


@dataclass
class IdMaker:
    """Ids of checks, each once."""

    used: set[str] = field(default_factory=set)

    def make(self, *words: str) -> str:
        """An id of these words.

        >>> IdMaker().make("fs_used", "/var/tmp", "90%")
        'fs_used_var_tmp_90'
        """
        text = re.sub(r"[^a-z0-9]+", "_", " ".join(words).lower()).strip("_")[:_MAX_ID].rstrip("_")
        name = text if text[:1].isalpha() else f"check_{text}".rstrip("_")
        unique, number = name, 1
        while unique in self.used or unique == "observed":
            number += 1
            unique = f"{name}_{number}"
        self.used.add(unique)
        return unique


def counts(lines: Iterable[ImportedLine]) -> dict[str, int]:
    """Outcome -> number of lines."""
    outcomes = [line.outcome for line in lines]
    return {outcome: outcomes.count(outcome) for outcome in OUTCOMES}


def write_toml(lines: Iterable[ImportedLine], tool: str) -> Iterator[str]:
    """The file of `checks.d`, line by line. A check for some nodes only is commented out."""
    yield f"# Checks imported from {tool} by nodeready import."
    for line in lines:
        if not line.checks:
            continue
        yield ""
        yield f"# {_plain(line.place)}: {_plain(line.text)}"
        comment = ""
        if line.nodes:
            yield f"# Only for the nodes {_plain(line.nodes)}: put them into a group, and name it"
            yield "# by groups = [...] in this check."
            comment = "# "
        for check in line.checks:
            yield f"{comment}[[check]]"
            table = {**check, "reason": _plain(line.place)}
            yield from (f"{comment}{key} = {_value(value)}" for key, value in table.items())


def _plain(text: str) -> str:
    return sanitise(" ".join(text.split()), 300)


def _value(value: Any) -> str:
    """A value in TOML. A text with backslashes is a literal string where that is possible."""
    if isinstance(value, str) and "\\" in value and "'" not in value and value.isprintable():
        return f"'{value}'"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

"""The files ``checks.d/*.toml``: a site's own checks, beside the inventory as group_data is."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from pyinfra.api.exceptions import InventoryError

from nodeready.core.files import read_regular
from nodeready.core.policy import SiteCheck, parse
from nodeready.core.settings import Invalid, closest_word
from nodeready.core.text import sanitise
from nodeready.fleet.inventory.python_files import refuse_strangers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLE = "check"
#: Maximum bytes of a file.
_MAX_BYTES = 1 << 20


def read(
    folders: Iterable[Path], trusted: bool = False, authors: Collection[int] = ()
) -> tuple[list[SiteCheck], list[str]]:
    """The checks in the files of these folders, in the order of the files' names, and a line for
    each problem. A folder that does not exist has none.

    trusted: take files that other users could have written; see `nodeready.fleet.inventory.trust`
    authors: as for `trust.distrust`
    """
    checks: dict[str, SiteCheck] = {}
    problems: list[str] = []
    for folder in folders:
        for file in sorted(folder.glob("*.toml")):
            if file.name.startswith("."):
                continue
            for check, problem in _read_file(file, trusted, authors):
                if check is None:
                    problems.append(problem)
                elif check.name in checks:
                    first = checks[check.name].source
                    problems.append(f'{file}: id = "{check.name}": is in {first}, too')
                else:
                    checks[check.name] = check
    return list(checks.values()), problems


def _read_file(
    file: Path, trusted: bool, authors: Collection[int]
) -> Iterable[tuple[SiteCheck | None, str]]:
    """Each check of the file, or None and what is wrong with it."""
    shown = sanitise(str(file))
    try:
        refuse_strangers(file, trusted, authors)
        if file.stat().st_size > _MAX_BYTES:
            raise InventoryError(f"{shown}: is larger than {_MAX_BYTES} bytes")
        text = read_regular(file).decode("utf-8-sig")
        tables = _tables(tomllib.loads(text))
    except InventoryError as error:
        return [(None, str(error))]
    except OSError as error:
        return [(None, f"{shown}: {error.strerror}")]
    except UnicodeDecodeError:
        return [(None, f"{shown}: is not in UTF-8")]
    except (tomllib.TOMLDecodeError, Invalid, RecursionError) as error:
        return [(None, f"{shown}: {sanitise(' '.join(str(error).split()))}")]
    return [_read_table(file, text, number, table) for number, table in enumerate(tables, 1)]


def _tables(data: dict[str, Any]) -> list[Any]:
    """The tables of a file's checks. Raises Invalid."""
    for key in data:
        if key != _TABLE:
            close = closest_word(key, [_TABLE])
            hint = f"write [[{_TABLE}]]" if close else f"there is only [[{_TABLE}]]"
            raise Invalid(f"unknown key {key!a}: {hint}")
    tables = data.get(_TABLE)
    if not isinstance(tables, list) or not tables:
        raise Invalid(f"has no check: each begins with a line [[{_TABLE}]]")
    return tables


def _read_table(file: Path, text: str, number: int, table: Any) -> tuple[SiteCheck | None, str]:
    name = table.get("id") if isinstance(table, dict) else None
    place, shown = f"{file.parent.name}/{file.name}", f"check {number}"
    if isinstance(name, str) and name:
        shown = f"check {sanitise(name, 60)}"
        match = re.search(rf"""^[^#\n]*\bid["']?\s*=\s*["']{re.escape(name)}["']""", text, re.M)
        if match:
            place += f":{text.count(chr(10), 0, match.end()) + 1}"
    try:
        return parse(table, place), ""
    except Invalid as error:
        line = place.partition(":")[2]
        origin = sanitise(str(file)) + (f":{line}" if line else "")
        return None, f"{origin}: {shown}: {sanitise(str(error))}"

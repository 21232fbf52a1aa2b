"""The values of amd-smi's and rocm-smi's JSON: plain, "N/A", or with a unit."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

#: GT/s of each generation of PCI Express.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_MEGABYTES = {"B": 1 / (1 << 20), "KB": 1 / 1024, "MB": 1.0, "GB": 1024.0, "TB": 1024.0 * 1024}
#: A tool prints one or two documents; what else begins like one is text around them.
_MOST_DOCUMENTS = 40


def _whole(digits: str) -> int | None:
    """No counter has more digits, and reading a million of them would take minutes."""
    return int(digits) if len(digits) <= 20 else None


def documents(printed: str) -> Iterator[Any]:
    """The JSON documents in ``printed``, each from the start of a line; other text is skipped."""
    decoder = json.JSONDecoder(parse_int=_whole)
    position, tries = 0, 0
    for start in re.finditer(r"^[\[{]", printed, re.M):
        if start.start() < position:
            continue
        tries += 1
        if tries > _MOST_DOCUMENTS:
            return
        try:
            document, position = decoder.raw_decode(printed, start.start())
        except (ValueError, RecursionError):
            continue
        yield document


def entries(printed: str) -> Iterator[Json]:
    """The devices that amd-smi printed: the dictionaries that name a ``gpu``."""
    for document in documents(printed):
        lists = [document] if isinstance(document, list) else []
        if isinstance(document, dict):
            lists = [[document], *(item for item in document.values() if isinstance(item, list))]
        for items in lists:
            for item in items:
                if isinstance(item, dict) and whole(item.get("gpu")) is not None:
                    yield item


def table(entry: Json, name: str) -> Json:
    """The dictionary of this name; an empty one where the tool prints "N/A"."""
    found = entry.get(name)
    return found if isinstance(found, dict) else {}


def at(entry: Json, *path: str) -> Any:
    """The value at the end of ``path``; None where there is none."""
    found: Any = entry
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def text(value: Any) -> str | None:
    """A word or a number as text; None for "N/A", nothing and lists."""
    if isinstance(value, dict):
        value = value.get("value")
    if value is None or isinstance(value, (list, dict)):
        return None
    found = str(value).strip()
    return None if found in ("", "N/A", "n/a", "None", "unknown", "0x0") else found


def number(value: Any) -> float | None:
    """A number, with or without its unit; None for anything else."""
    found = text(value)
    match = re.match(r"-?[0-9]{1,20}(\.[0-9]{1,9})?(?![0-9xa-fA-F])", found) if found else None
    result = float(match[0]) if match else None
    return result if result is not None and math.isfinite(result) else None


def whole(value: Any) -> int | None:
    """A count; None for anything else, and for less than nothing."""
    found = number(value)
    return int(found) if found is not None and found >= 0 else None


def degrees(value: Any) -> int | None:
    """Degrees Celsius; None for what no chip survives: 0 and 65535 stand for no sensor."""
    found = whole(value)
    return found if found is not None and 0 < found < 200 else None


def megabytes(value: Any) -> int | None:
    """An amount of memory in MiB: the tool's MB and GB are powers of 1024."""
    found = number(value)
    unit = value.get("unit") if isinstance(value, dict) else "MB"
    factor = _MEGABYTES.get(unit) if isinstance(unit, str) else None
    return None if found is None or factor is None else int(found * factor)


def generation(value: Any) -> int | None:
    """The generation of PCI Express that has this speed in GT/s."""
    found = number(value)
    return None if found is None else _GENERATIONS.get(found)


def address(value: Any) -> str:
    """A PCI address in lower case with a domain of four digits; "" for anything else."""
    match = re.fullmatch(
        r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])", text(value) or ""
    )
    return f"{(match[1] or '0000')[-4:]}:{match[2]}:{match[3]}.{match[4]}".lower() if match else ""

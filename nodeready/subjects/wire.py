"""Observations as JSON: as lines that a program on the node writes, read back into dataclasses;
and as a document shows them (`plain`).

A line is ``NONCE NAME {json}``. Other lines are passed over: a profile or a tool that prints in
between cannot know the nonce. A node's answer is data: JSON of another shape than the dataclass is
refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from nodeready.subjects.base import ProbeError, Unknown

Seen = TypeVar("Seen")

#: The answer of a node that has no Python for the program.
NO_PYTHON = "no Python 3.9 or newer"

_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
}


def line(nonce: str, name: str, seen: Any) -> str:
    """One observation (a dataclass) as its line."""
    return f"{nonce} {name} {json.dumps(dataclasses.asdict(seen), separators=(',', ':'))}"


def lines(text: str, nonce: str) -> Iterator[tuple[str, Any]]:
    """Every ``(name, data)`` in what a node printed; a line that is no JSON is passed over."""
    mark = f"{nonce} "
    for row in text.splitlines():
        # The mark may stand inside of a line: what a login prints can end without a newline.
        _, found, rest = row.partition(mark)
        name, _, data = rest.partition(" ")
        if not found or not name.isidentifier():
            continue
        try:
            yield name, json.loads(data)
        except (ValueError, RecursionError):
            continue


def decode(kind: type[Seen], data: Any) -> Seen:
    """``data`` as this dataclass.

    Its fields are int, float, str, bool, another dataclass of its module, ``X | None`` and
    ``tuple[X, ...]``. Raises ProbeError when the data has another shape.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    if not isinstance(data, Mapping) or set(data) != {field.name for field in fields}:
        raise ProbeError("the proof's answer makes no sense", repr(data))
    module = vars(sys.modules[kind.__module__])
    return kind(**{f.name: _value(str(f.type), data[f.name], module) for f in fields})


def _value(kind: str, data: Any, module: Mapping[str, Any]) -> Any:
    if kind.endswith(" | None"):
        return None if data is None else _value(kind[: -len(" | None")], data, module)
    if kind.startswith("tuple[") and kind.endswith(", ...]") and isinstance(data, list):
        inner = kind[len("tuple[") : -len(", ...]")]
        return tuple(_value(inner, item, module) for item in data)
    if kind in _PLAIN:
        if isinstance(data, _PLAIN[kind]) and isinstance(data, bool) == (kind == "bool"):
            return data
    elif dataclasses.is_dataclass(module.get(kind)):
        return decode(module[kind], data)
    raise ProbeError("the proof's answer makes no sense", f"{data!r} is no {kind}")


# --- An observation as data that JSON can hold.

#: The fields of a dataclass that was met, none of another type: 10,000 nodes have the same ones.
_FIELDS: dict[type, tuple[str, ...]] = {}


def _names(kind: Any) -> tuple[str, ...]:
    if kind not in _FIELDS:
        found = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        _FIELDS[kind] = tuple(field.name for field in found)
    return _FIELDS[kind]


def plain(observed: Any) -> Any:
    """An observation as dicts, lists, text and numbers.

    A subject that could not be observed is ``{"unknown": reason}``; a file's content is only
    counted; what is no number in JSON (infinity) is None.
    """
    if observed is None or isinstance(observed, (str, int)):
        return observed
    if isinstance(observed, Unknown):
        return {"unknown": observed.reason}
    names = _names(type(observed))
    if names:
        return {name: plain(getattr(observed, name)) for name in names}
    if isinstance(observed, Mapping):
        return {str(key): plain(value) for key, value in observed.items()}
    if isinstance(observed, (list, tuple)):
        return [plain(value) for value in observed]
    if isinstance(observed, (set, frozenset)):
        return sorted((plain(value) for value in observed), key=str)
    if isinstance(observed, bytes):
        return f"{len(observed)} bytes"
    if isinstance(observed, float):
        return observed if math.isfinite(observed) else None
    return str(observed)

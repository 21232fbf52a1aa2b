"""Observations as lines of JSON: written by a program on the node, read back into dataclasses.

A line is ``NONCE NAME {json}``. Other lines are passed over: a profile or a tool that prints in
between cannot know the nonce. A node's answer is data: JSON of another shape than the dataclass is
refused.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from nodeready.subjects.base import ProbeError

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

"""An observation as data that JSON can hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nodeready.probes.base import Unknown

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

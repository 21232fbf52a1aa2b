"""An observation as data that JSON can hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nodeready.probes.base import Unknown


def plain(observed: Any) -> Any:
    """An observation as dicts, lists, text and numbers.

    A subject that could not be observed is ``{"unknown": reason}``; a file's content is only
    counted; what is no number in JSON (infinity) is None.
    """
    if isinstance(observed, Unknown):
        return {"unknown": observed.reason}
    if dataclasses.is_dataclass(observed) and not isinstance(observed, type):
        return {f.name: plain(getattr(observed, f.name)) for f in dataclasses.fields(observed)}
    if isinstance(observed, Mapping):
        return {str(key): plain(value) for key, value in observed.items()}
    if isinstance(observed, (list, tuple)):
        return [plain(value) for value in observed]
    if isinstance(observed, (set, frozenset)):
        return sorted((plain(value) for value in observed), key=str)
    if isinstance(observed, bytes):
        return f"{len(observed)} bytes"
    if isinstance(observed, float) and not math.isfinite(observed):
        return None
    if observed is None or isinstance(observed, (str, int, float)):
        return observed
    return str(observed)

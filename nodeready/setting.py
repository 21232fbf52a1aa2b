"""One setting of the policy: how it is declared, and the shapes that its value can have."""

from __future__ import annotations

from dataclasses import field
from typing import Any

Names = tuple[str, ...]
#: A mapping of names to settings, as plain tuples so that a Policy can be compared and hashed;
#: `rows` turns it back into dicts.
Table = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


def setting(default: Any, kind: str, doc: str, **rule: Any) -> Any:
    """A field with its kind (the key of a validator in settings.py), its rule and its meaning."""
    return field(default=default, metadata={"kind": kind, "doc": doc, **rule})


def rows(table: Table) -> dict[str, dict[str, Any]]:
    """A Table as ``{name: {column: value}}``."""
    return {name: dict(columns) for name, columns in table}

"""What the field knows, as rows of data: a table is a TOML file in this folder.

A row says what it matches, what it means, and its source, and it has examples: lines that it
matches, and lines that it does not match. tests/unit/test_knowledge.py holds every row against its
examples. A node gets the tables that its program reads as the module ``compiled``, without the
examples, because Python 3.9 reads no TOML.

The patterns of a table can share ``parts``: ``<network>`` stands for the part of that name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

#: The module with tables, which only the program of a node has.
COMPILED = f"{__name__}.compiled"
#: What only the tests read of a row.
EXAMPLES = frozenset({"matches", "not_matches", "cures"})


def read(table: str) -> dict[str, Any]:
    """A table as its file has it, with the examples: key -> row, in the order of the file."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    text = resources.files(__name__).joinpath(f"{table}.toml").read_text("utf-8")
    data: dict[str, Any] = tomllib.loads(text)
    for name, part in data.pop("parts", {}).items():
        for row in data.values():
            for column in row.keys() & {"pattern", "cured"}:
                row[column] = row[column].replace(f"<{name}>", part)
    return data


@cache
def rows(table: str) -> dict[str, Any]:
    """A table without its examples: key -> row, in their order.

    table: a literal, because `nodeready.agent.payload` finds a node's tables by their names
    """
    try:
        from nodeready.knowledge.compiled import TABLES  # type: ignore[import-not-found]
    except ImportError:
        return {
            key: {name: value for name, value in row.items() if name not in EXAMPLES}
            if isinstance(row, dict)
            else row
            for key, row in read(table).items()
        }
    table_rows: dict[str, Any] = TABLES[table]
    return table_rows


def compiled(tables: Iterable[str]) -> str:
    """The source of the module `COMPILED` with these tables."""
    data = {table: rows(table) for table in sorted(set(tables))}
    return f'"""Tables of nodeready.knowledge, without their examples."""\nTABLES = {data!r}\n'

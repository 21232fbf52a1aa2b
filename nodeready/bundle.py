"""The node's own program as one file: a zip that Python runs, with the modules that a node needs.

The same modules and the same policy make the same bytes, whoever builds it: nothing is compressed,
because compressors differ, and nothing is compiled, because Pythons do.
"""

from __future__ import annotations

import ast
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

from nodeready.policy import Policy
from nodeready.settings import as_data

_PACKAGE = Path(__file__).parent
#: Rooms that go whole: what they run is found by name.
_ROOMS = ("local", "proofs")
#: Imported by what a node needs, but never there: it folds the names of many nodes.
_LEFT_OUT = ("nodeready.nodesets",)
_SHEBANG = b"#!/usr/bin/env python3\n"
#: The earliest time that a zip file can hold.
_TIME = (1980, 1, 1, 0, 0, 0)


def _file(name: str) -> Path | None:
    """The source of a module of ours by its dotted name; None when there is no such module."""
    path = _PACKAGE.parent.joinpath(*name.split("."))
    found = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return found if found.is_file() else None


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything that can run: not what stands there for the type checker alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from _statements(node)


def imports(source: str) -> set[str]:
    """The dotted names that a module imports: a module's, and ``MODULE.NAME`` of what it takes."""
    found: set[str] = set()
    for node in _statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _parents(name: str) -> Iterator[str]:
    """The module and the packages around it."""
    words = name.split(".")
    return (".".join(words[:count]) for count in range(1, len(words) + 1))


def modules() -> dict[str, Path]:
    """The modules that run on a node: what the commands there import, and what those do."""
    found: dict[str, Path] = {}
    todo = [
        f"nodeready.{room}.{path.stem}"
        for room in _ROOMS
        for path in (_PACKAGE / room).glob("*.py")
        if path.stem not in ("__init__", "__main__")
    ]
    while todo:
        for name in _parents(todo.pop()):
            path = _file(name) if name.partition(".")[0] == "nodeready" else None
            if path is not None and name not in found and name not in _LEFT_OUT:
                found[name] = path
                todo += imports(path.read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def _entries(policy: Policy | None) -> Iterator[tuple[str, bytes]]:
    """Path in the zip -> content."""
    yield "__main__.py", (_PACKAGE / "local" / "__main__.py").read_bytes()
    for path in [*modules().values(), *(_PACKAGE / "sh").glob("*.sh")]:
        yield path.relative_to(_PACKAGE.parent).as_posix(), path.read_bytes()
    if policy is not None:
        text = json.dumps(as_data(policy), indent=1, sort_keys=True) + "\n"
        yield "nodeready/local/policy.json", text.encode()


def build(policy: Policy | None = None) -> bytes:
    """The program as a file's bytes, with the policy that it judges by; None: the defaults."""
    made = io.BytesIO(_SHEBANG)
    made.seek(0, io.SEEK_END)
    with zipfile.ZipFile(made, "w") as zipped:
        for name, content in sorted(_entries(policy)):
            entry = zipfile.ZipInfo(name, _TIME)
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            zipped.writestr(entry, content)
    return made.getvalue()

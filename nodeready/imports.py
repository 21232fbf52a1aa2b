"""The modules of ours that a module needs, found by its imports; from files or out of a zip."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import Any


def _file(name: str) -> Any:
    """The source of a module of ours by its dotted name; None when there is no such module."""
    words = name.split(".")[1:]
    path: Any = resources.files("nodeready")
    for word in words[:-1]:
        path = path.joinpath(word)
    package = path.joinpath(words[-1]) if words else path
    for found in (package.joinpath("__init__.py"), path.joinpath(f"{(words or [''])[-1]}.py")):
        if found.is_file():
            return found
    return None


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


def closure(roots: Iterable[str], without: Iterable[str] = ()) -> dict[str, str]:
    """These modules (dotted names) and all of ours that they import, each with its source.

    without: those that are left out, with what only they import
    """
    found: dict[str, str] = {}
    todo, left_out = list(roots), frozenset(without)
    while todo:
        for name in _parents(todo.pop()):
            if name.partition(".")[0] != "nodeready" or name in found or name in left_out:
                continue
            file = _file(name)
            if file is not None:
                found[name] = file.read_text("utf-8")
                todo += imports(found[name])
    return dict(sorted(found.items()))


def is_package(name: str) -> bool:
    """Whether a module of ours is a package."""
    return str(_file(name)).endswith("__init__.py")

"""A function's docstring names the exceptions that it raises, and its examples hold."""

import ast
import builtins
import doctest
import importlib
import re
from collections.abc import Iterator

import pytest

from tests.paths import ROOT


def _name(node: ast.expr | None) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _catches(handler: ast.ExceptHandler, raised: str) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    for kind in map(_name, kinds):
        both = [getattr(builtins, name, None) for name in (raised, kind)]
        if kind in ("", raised) or (all(both) and issubclass(*both)):
            return True
    return False


def raised(node: ast.AST) -> Iterator[str]:
    """The classes that a function's own statements raise and do not catch."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(child, ast.Raise) and _name(child.exc)[:1].isupper():
            yield _name(child.exc)
        elif isinstance(child, ast.Try):
            for one in child.body:
                for name in raised(ast.Module([one], [])):
                    if not any(_catches(handler, name) for handler in child.handlers):
                        yield name
            for one in (*child.handlers, *child.orelse, *child.finalbody):
                yield from raised(ast.Module([one], []))
        else:
            yield from raised(child)


def public(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Functions and methods without an underscore, but for commands: those have a --help."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node)
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            decorators = {_name(one) for one in node.decorator_list}
            if not decorators & {"command", "group"}:
                yield node


def silent(source: str) -> list[str]:
    """``FUNCTION: CLASS`` for every class that a function raises without saying so."""
    found = []
    for function in public(ast.parse(source)):
        said = re.search(r"\braises?\b.*", ast.get_docstring(function) or "", re.I | re.S)
        for name in dict.fromkeys(raised(function)):
            if said is None or not re.search(rf"\b{name}\b", said[0]):
                found.append(f"{function.name}: {name}")
    return found


def test_a_docstring_names_what_its_function_raises():
    paths = [*(ROOT / "nodeready").rglob("*.py"), *(ROOT / "operations").glob("*.py")]
    functions = {path: silent(path.read_text()) for path in paths}
    assert {str(path): names for path, names in functions.items() if names} == {}


def test_a_docstring_that_does_not_is_reported():
    assert silent('def f():\n    "Raises KeyError."\n    raise OSError("x")\n') == ["f: OSError"]
    assert silent("class A:\n    def f(self):\n        if 1:\n            raise A.B\n") == ["f: B"]
    caught = "def f():\n    try:\n        raise FileExistsError\n    except {}:\n        raise X\n"
    assert silent(caught.format("(KeyError, OSError)")) == ["f: X"]
    assert silent(caught.format("KeyError")) == ["f: FileExistsError", "f: X"]


EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "nodeready").rglob("*.py"))
    if re.search(r"^ *>>> ", path.read_text(), re.M)
]


@pytest.mark.parametrize("module", EXAMPLES)
def test_an_example_gives_what_the_docstring_says(module):
    outcome = doctest.testmod(importlib.import_module(module))
    assert outcome.attempted
    assert not outcome.failed, "the captured output has the difference"

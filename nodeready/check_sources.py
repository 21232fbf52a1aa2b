"""What the code of a check says about it: what a person has to do, and which settings it asks.

Read from the source, never run: the texts of `fail`, `warn` and `fixable` with the parts that
depend on the node in capitals, and the fields of the policy that are looked at.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from nodeready.policy import Policy

#: Who repairs what these make (nodeready/results.py); any other call with a ``fix``: a person.
_SAYS = {"fail": "By a person", "warn": "By a person", "fixable": "Repaired by"}
_PERSON = "By a person"
#: Helpers within helpers that are followed.
_DEEPEST = 4

_KEYS = tuple(field.name for field in fields(Policy))


@dataclass(frozen=True)
class Code:
    """A function with its syntax tree."""

    function: FunctionType
    tree: ast.FunctionDef

    @property
    def home(self) -> ModuleType:
        return sys.modules[self.function.__module__]

    def named(self, node: ast.AST) -> Any:
        """The object that a name or ``module.name`` in it stands for, or None."""
        if isinstance(node, ast.Name):
            return getattr(self.home, node.id, None)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = getattr(self.home, node.value.id, None)
            return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        return None


@cache
def _trees(module: str) -> dict[str, ast.FunctionDef]:
    """The functions of a module by name; none where its source is not at hand."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, SyntaxError):
        return {}
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def code(function: Any, rooms: tuple[str, ...] = ("checks",)) -> Code | None:
    """The code of a function of ours, of one of these rooms; else None."""
    if not isinstance(function, FunctionType):
        return None
    if not function.__module__.startswith(tuple(f"nodeready.{room}." for room in rooms)):
        return None
    tree = _trees(function.__module__).get(function.__name__)
    return Code(function, tree) if tree is not None else None


def _reached(
    check: Code, follow: Callable[[Code, Code], bool], rooms: tuple[str, ...]
) -> list[Code]:
    """The check, and the functions of these rooms that it uses and that are to be followed."""
    found, todo = [], [check]
    while todo:
        one = todo.pop(0)
        found.append(one)
        for node in ast.walk(one.tree):
            other = code(one.named(node), rooms)
            if other and other not in [*found, *todo] and follow(one, other):
                todo.append(other)
    return found


def _judges(check: Code, other: Code) -> bool:
    """Whether a check hands its judgement to this one: a helper that returns a Result."""
    returns = ast.unparse(other.tree.returns) if other.tree.returns else ""
    apart = other.tree.name.startswith("_") or other.home is not check.home
    return apart and returns.startswith("Result")


def acts(function: Any) -> list[str]:
    """What repairs what this check finds, beside the operations: one text per way to fail.

    Each begins with who does it: ``By a person: …``, ``Repaired by: …``.
    """
    check, texts = code(function), list[str]()
    for one in _reached(check, _judges, ("checks",)) if check else ():
        for call in (node for node in ast.walk(one.tree) if isinstance(node, ast.Call)):
            maker = call.func.id if isinstance(call.func, ast.Name) else ""
            fix = _fix(call, one, maker)
            if fix is not None:
                said = _texts(fix, one, _assigned(one.tree, call.lineno))
                texts += [f"{_SAYS.get(maker, _PERSON)}: {text}" for text in said if text]
    return list(dict.fromkeys(texts))


def _fix(call: ast.Call, one: Code, maker: str) -> ast.expr | None:
    """What a call hands on as ``fix``: by name, or in the place where the callee has it."""
    for word in call.keywords:
        if word.arg == "fix":
            return word.value
    helper = code(one.named(call.func))
    names = [argument.arg for argument in helper.tree.args.args] if helper else []
    # `judge = fail if bad else warn` makes results as well: a name of the function's own.
    local = maker and one.named(call.func) is None and not hasattr(builtins, maker)
    place = names.index("fix") if "fix" in names else 4
    makes = "fix" in names or maker in _SAYS or local
    return call.args[place] if makes and place < len(call.args) else None


def settings(function: Any) -> list[str]:
    """The fields of Policy that decide what this check wants, in the order of Policy."""
    rooms = ("checks", "probes")
    check, found = code(function, rooms), set[str]()
    for one in _reached(check, lambda _, other: True, rooms) if check else ():
        for node in ast.walk(one.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found |= {node.attr} if node.value.id in ("want", "policy") else set()
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                found |= set(_dynamic(node, function))
    return [key for key in _KEYS if key in found]


def _dynamic(call: ast.Call, function: FunctionType) -> Iterator[str]:
    """The fields that ``getattr(want, f"limit_{item}")`` can mean in this check."""
    if ast.unparse(call.args[0]) not in ("want", "policy"):
        return
    if not isinstance(call.args[1], ast.JoinedStr):
        return
    pattern = "".join(
        re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"(\w+)"
        for part in call.args[1].values
    )
    checks = [one.__name__ for one in sys.modules[function.__module__].__dict__.get("CHECKS", ())]
    for key in _KEYS:
        match = re.fullmatch(pattern, key)
        exact = pattern.replace(r"(\w+)", function.__name__) in _KEYS
        if match and (match[1] == function.__name__ if exact else match[1] in checks):
            yield key


def _assigned(function: ast.FunctionDef, line: int) -> dict[str, list[ast.expr]]:
    """What the variables of a function hold at ``line``: the last value, and what was added."""
    found: dict[str, list[ast.expr]] = {}
    nodes = [n for n in ast.walk(function) if isinstance(n, ast.Assign | ast.AugAssign)]
    for node in sorted(nodes, key=lambda node: node.lineno):
        if node.lineno > line:
            break
        if isinstance(node, ast.AugAssign):
            if isinstance(node.target, ast.Name):
                found.setdefault(node.target.id, []).append(node.value)
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                found[target.id] = [node.value]
    return found


def _texts(
    node: ast.expr, one: Code, named: dict[str, list[ast.expr]], depth: int = 0
) -> list[str]:
    """What an expression can say; a variable's value, a helper's words, where they are given."""
    if depth > _DEEPEST:
        return []
    inner: list[ast.expr] = []
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(_piece(part, one, named) for part in node.values)]
    if isinstance(node, ast.IfExp):
        inner = [node.body, node.orelse]
    elif isinstance(node, ast.BoolOp):
        inner = node.values
    elif isinstance(node, ast.List | ast.Tuple):
        inner = node.elts
    elif isinstance(node, ast.ListComp | ast.GeneratorExp):
        inner = [node.elt]
    elif isinstance(node, ast.Name) and node.id in named:
        rest = {name: value for name, value in named.items() if name != node.id}
        return [text for value in named[node.id] for text in _texts(value, one, rest, depth + 1)]
    elif isinstance(node, ast.Name):
        value = one.named(node)
        return [value] if isinstance(value, str) else []
    elif isinstance(node, ast.Call):
        helper = code(one.named(node.func))
        own = _said_by(helper, depth + 1) if helper else []
        return own or [t for part in node.args for t in _texts(part, one, named, depth + 1)]
    return [text for part in inner for text in _texts(part, one, named, depth + 1)]


def _said_by(helper: Code, depth: int) -> list[str]:
    """The texts that a helper returns."""
    returns = [n for n in ast.walk(helper.tree) if isinstance(n, ast.Return) and n.value]
    return [
        text
        for node in returns
        if node.value is not None
        for text in _texts(node.value, helper, _assigned(helper.tree, node.lineno), depth)
        if text and " " in text
    ]


def _piece(part: ast.expr, one: Code, named: dict[str, list[ast.expr]]) -> str:
    """A piece of an f-string: its words, or in capitals what the node shows there."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    inner: ast.AST = part.value
    if isinstance(inner, ast.Name) and any(
        isinstance(v, ast.IfExp) for v in named.get(inner.id, ())
    ):
        said = [text for text in _texts(inner, one, named) if text]
        if said:
            return said[0]
    while not isinstance(inner, ast.Name | ast.Attribute):
        # source.rpartition(":")[0], high or low, seen.boot[0], _names(cut): the name that is
        # asked says what it is; of a helper of ours its argument does.
        if isinstance(inner, ast.Call) and code(one.named(inner.func)) and inner.args:
            inner = inner.args[0]
            continue
        below = [node for node in ast.iter_child_nodes(inner) if isinstance(node, ast.expr)]
        if not below:
            return str(inner.value) if isinstance(inner, ast.Constant) else "VALUE"
        inner = below[0]
    if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Call | ast.Subscript):
        return inner.attr.upper()
    name = inner.id if isinstance(inner, ast.Name) else inner.attr
    if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "want":
        return f"`{name}`"
    if name in ("partition", "rpartition", "join") and isinstance(inner, ast.Attribute):
        name = ast.unparse(inner.value).rpartition(".")[2]
    value = one.named(inner) if name.isupper() else None
    return value if isinstance(value, str) else name.upper().replace("_", " ").strip()

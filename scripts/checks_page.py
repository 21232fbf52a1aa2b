"""docs/checks.md, from the checks themselves: id, meaning, reason, what repairs it.

A check is a function of nodeready/checks/SUBJECT.py that takes the observation and the policy and
returns a Result; its id is ``SUBJECT.FUNCTION``. What a person has to do is read from the calls of
`fail` and `warn` in its code, with the parts that depend on the node in capitals.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import dedent

from tables import plain

import nodeready.checks
from nodeready.operations import STEPS
from nodeready.subjects import SUBJECTS

_HEAD = """\
# Checks

What nodeready looks at, and why. This page is made from the code by `scripts/make_docs.py`.

An id never changes its meaning. What each status says:

| Status | Meaning |
| --- | --- |
| ok | as the policy wants it, now and at the next boot |
| fail | not so: jobs, or the people who debug them, will run into it |
| warn | a person should know or do something; it stops no job |
| unknown | could not be observed, for the reason given; never counts as ok |
| na | does not apply to this node, for the reason given |

A failure that an operation repairs is what `nodeready deploy` changes. Everything else stands
under "for a person" in its output, with what to do; words in capitals stand for what the node
shows. A subject that could not be observed at all gives one result, `SUBJECT.observed`, with the
status unknown and the reason.
"""

#: Who repairs what these make (nodeready/results.py).
_SAYS = {
    "fail": "By a person",
    "warn": "By a person",
    "judged": "By a person",
    "fixable": "Repaired by",
}


class Subject:
    """One module of checks, as source."""

    def __init__(self, name: str) -> None:
        self.name = name
        path = Path(nodeready.checks.__path__[0], f"{name}.py")
        tree = ast.parse(path.read_text())
        self.functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        self.doc = ast.get_docstring(tree) or ""

    def checks(self) -> Iterator[ast.FunctionDef]:
        """The checks, in the order in which they are judged."""
        for check in SUBJECTS[self.name].checks:
            yield self.functions[check.__name__]

    def reached(self, function: ast.FunctionDef) -> list[ast.FunctionDef]:
        """The function, and those of the module that it hands its judgement to."""
        found, todo = [], [function]
        while todo:
            one = todo.pop(0)
            found.append(one)
            for call in (node for node in ast.walk(one) if isinstance(node, ast.Call)):
                name = call.func.id if isinstance(call.func, ast.Name) else ""
                other = self.functions.get(name)
                returns = ast.unparse(other.returns) if other and other.returns else ""
                private = name.startswith("_") and returns.startswith("Result")
                if other and private and other not in [*found, *todo]:
                    todo.append(other)
        return found

    def acts(self, function: ast.FunctionDef) -> list[str]:
        """What repairs it beside the operations: who and what, one text per way to fail."""
        texts: list[str] = []
        for one in self.reached(function):
            for call in (node for node in ast.walk(one) if isinstance(node, ast.Call)):
                who = call.func.id if isinstance(call.func, ast.Name) else ""
                given = {word.arg: word.value for word in call.keywords}
                fix = given.get("fix", call.args[4] if len(call.args) > 4 else None)
                if who in _SAYS and fix is not None:
                    named = _assigned(one, call.lineno)
                    texts += [f"{_SAYS[who]}: {text}" for text in _texts(fix, named) if text]
        return list(dict.fromkeys(texts))


def _assigned(function: ast.FunctionDef, line: int) -> dict[str, ast.expr]:
    """What the variables of a function were last given in the lines before ``line``."""
    found: dict[str, ast.expr] = {}
    for node in sorted(
        (node for node in ast.walk(function) if isinstance(node, ast.Assign)),
        key=lambda node: node.lineno,
    ):
        for target in node.targets:
            if isinstance(target, ast.Name) and node.lineno <= line:
                found[target.id] = node.value
    return found


def _texts(node: ast.expr, named: dict[str, ast.expr]) -> list[str]:
    """What an expression can say, node by node; a variable's value where it is set in words."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(_piece(part, named) for part in node.values)]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, named), *_texts(node.orelse, named)]
    if isinstance(node, ast.Name) and node.id in named:
        value = named[node.id]
        return _texts(value, {k: v for k, v in named.items() if k != node.id})
    return []


def _piece(part: ast.expr, named: dict[str, ast.expr]) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    inner = part.value
    if isinstance(inner, ast.Name) and isinstance(named.get(inner.id), ast.IfExp):
        said = [text for text in _texts(named[inner.id], named) if text]
        if said:
            return said[0]
    while not isinstance(inner, ast.Name | ast.Attribute):
        # source.rpartition(":")[0], high or low, seen.boot[0]: the name in front says what it is.
        below = [node for node in ast.iter_child_nodes(inner) if isinstance(node, ast.expr)]
        inner = below[0]
    if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Call | ast.Subscript):
        return inner.attr.upper()
    name = inner.id if isinstance(inner, ast.Name) else inner.attr
    if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "want":
        return f"`{name}`"
    if name in ("partition", "rpartition") and isinstance(inner, ast.Attribute):
        name = ast.unparse(inner.value).rpartition(".")[2]
    return _constant(name) or name.upper().replace("_", " ")


def _constant(name: str) -> str:
    """The value of one of the probes' or checks' own constants, such as a path."""
    if not name.isupper():
        return ""
    for subject in SUBJECTS:
        for room in ("probes", "checks"):
            value = getattr(import_module(f"nodeready.{room}.{subject}"), name, None)
            if isinstance(value, str):
                return value
    return ""


def page() -> str:
    """The whole page."""
    parts = [_HEAD, "\n", *_contents()]
    for name in SUBJECTS:
        subject = Subject(name)
        about = subject.doc.splitlines()[0].removeprefix("Judge ")
        parts.append(f"\n## {name}\n\n{about[:1].upper()}{about[1:]}\n")
        for function in subject.checks():
            parts.append(_entry(subject, function))
    return "".join(parts)


def _contents() -> Iterator[str]:
    for name in SUBJECTS:
        ids = [f"{name}.{function.name}" for function in Subject(name).checks()]
        links = ", ".join(f"[{one}](#{one.replace('.', '')})" for one in ids)
        yield f"- **{name}**: {links}\n"


def _entry(subject: Subject, function: ast.FunctionDef) -> str:
    check = f"{subject.name}.{function.name}"
    text = re.sub(r"``(.+?)``", r"`\1`", dedent(ast.get_docstring(function) or ""), flags=re.S)
    lines = [f"\n### {check}\n", plain(text), ""]
    for step in STEPS:
        if check in step.fixes:
            does = (step.act.__doc__ or "").split("\n")[0]
            lines.append(f"- Repaired by the operation `{step.name}`: {_lower(does)}")
    lines += [f"- {plain(act)}" for act in subject.acts(function)]
    return "\n".join(lines).rstrip() + "\n"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]

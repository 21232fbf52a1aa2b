"""docs/facts.md from the dataclasses of the observations: each key, its type and its meaning."""

from __future__ import annotations

import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union

from tables import markdown, plain

from nodeready.reports.schema import meanings
from nodeready.subjects.json_types import json_fields
from nodeready.subjects.registry import LOOKED_AT, SUBJECTS
from nodeready.subjects.result import no_facts

_HEAD = """\
# Facts

What nodeready observes on a node, by subject: `facts` in the JSON of an audit, `node.facts` in
[Python](python.md), and the facts of [pyinfra](pyinfra.md#facts). This page is made from the code
by `scripts/make_docs.py`.

A subject that could not be observed has the one key `unknown`, with the reason. A type "or null"
is null where the node does not show a value. The unit of a number is in its key (`speed_mbps`) or
in its meaning.
"""
_WORDS = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    bytes: "text: its size",
    type(None): "null",
    Any: "any",
}


def observation(subject: str) -> Any:
    """The dataclass that the subject's parser returns."""
    probe = SUBJECTS[subject].probe
    assert probe is not None
    parse: Any = inspect.unwrap(probe.parse)
    return eval(parse.__annotations__["return"], parse.__globals__)


def derived(subject: str) -> Any:
    """The class of the facts that need the fleet; None: there are none."""
    function: Any = SUBJECTS[subject].derived
    if function is no_facts:
        return None
    return typing.get_type_hints(inspect.unwrap(function))["return"]


def objects(hint: Any) -> Iterator[Any]:
    """The classes in a type that are objects of JSON."""
    if isinstance(hint, type) and (json_fields(hint) or typing.is_typeddict(hint)):
        yield hint
    for member in typing.get_args(hint):
        yield from objects(member)


def fields(kind: Any) -> Iterator[tuple[str, Any, str]]:
    """Each key of an object, its type and its meaning."""
    hints, about = typing.get_type_hints(kind), meanings(kind)[1]
    rows = [(row.key, row.path) for row in json_fields(kind)] or [(key, key) for key in hints]
    for key, path in rows:
        yield key, hints[path], about.get(path, "")


def kinds(subject: str) -> list[Any]:
    """The classes of a subject's facts, the observation first."""
    found: dict[Any, None] = {}
    todo = [kind for kind in (observation(subject), derived(subject)) if kind]
    while todo:
        kind = todo.pop(0)
        if kind not in found:
            found[kind] = None
            todo += [inner for _, hint, _ in fields(kind) for inner in objects(hint)]
    return list(found)


def type_words(hint: Any) -> str:
    """A type in words, with a link for an object. Raises TypeError for an unknown type."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return type_words(inside[0])
    if origin in (Union, types.UnionType):
        return " or ".join(map(type_words, inside))
    if origin in (tuple, list, frozenset, set):
        members = [member for member in inside if member is not ...]
        return f"list of {', '.join(map(type_words, members))}"
    if origin in (Mapping, dict):
        return f"object: {type_words(inside[0])} → {type_words(inside[1])}"
    if any(objects(hint)):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    if isinstance(hint, type) and issubclass(hint, Mapping):
        return "object"
    return _WORDS[hint]


def _text(kind: Any, before: str = "") -> str:
    """What the class is, in lines of the page."""
    return textwrap.fill(before + plain(meanings(kind)[0]), 100)


def _table(kind: Any) -> str:
    rows = []
    for key, hint, meaning in fields(kind):
        rows.append((f"`{key}`", type_words(hint), plain(meaning)))
    return markdown(("Key", "Type", "Meaning"), rows)


def page() -> str:
    """The whole page."""
    parts, shown = [_HEAD], set()
    for subject in LOOKED_AT:
        main = observation(subject)
        fact = "".join(word.capitalize() for word in subject.split("_"))
        head = f"## {subject}\n\n{_text(main, f'The fact `nodeready.facts.{fact}`. ')}"
        for kind in kinds(subject):
            if kind in shown:
                continue
            shown.add(kind)
            if kind is derived(subject):
                head = "Beside these, what only all nodes together tell:"
            elif kind is not main:
                head = f"### {kind.__name__}\n\n{_text(kind)}"
            parts.append(f"\n{head}\n\n{_table(kind)}")
    return "".join(parts)

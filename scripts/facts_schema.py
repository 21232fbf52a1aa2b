"""docs/schema/facts-1.json: each fact of each subject, its type and its meaning."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterator
from typing import Any

from nodeready.core.json_types import json_fields
from nodeready.core.result import no_facts
from nodeready.reports.schema import SchemaWriter, meanings
from nodeready.subjects.registry import LOOKED_AT, SUBJECTS

_ABOUT = (
    "What nodeready observes on a node, by subject: `facts` in the JSON of an audit. The unit of "
    "a number is in its key (`speed_mbps`) or its meaning. null: the node does not show a value."
)


def observations(subject: str) -> Iterator[Any]:
    """The class that the subject's parser returns, and that of the facts that need the fleet."""
    probe = SUBJECTS[subject].probe
    assert probe is not None
    parse: Any = inspect.unwrap(probe.parse)
    yield eval(parse.__annotations__["return"], parse.__globals__)
    derived: Any = SUBJECTS[subject].derived
    if derived is not no_facts:
        yield typing.get_type_hints(inspect.unwrap(derived))["return"]


def classes() -> list[Any]:
    """The classes of all facts."""
    found: dict[Any, None] = {}
    todo = [kind for subject in LOOKED_AT for kind in observations(subject)]
    while todo:
        kind = todo.pop()
        todo += typing.get_args(kind)
        if kind not in found and (json_fields(kind) or typing.is_typeddict(kind)):
            found[kind] = None
            todo += typing.get_type_hints(kind).values()
    return list(found)


def missing_meanings(kind: Any) -> list[str]:
    """The fields of a class that its docstring does not describe."""
    names = [field.path for field in json_fields(kind)] or [*typing.get_type_hints(kind)]
    return [name for name in names if not meanings(kind)[1].get(name)]


def _subject(writer: SchemaWriter, subject: str) -> dict[str, Any]:
    """The schema of a subject's facts: those of the fleet are keys of the same object."""
    facts, *of_fleet = [writer.object(kind) for kind in observations(subject)]
    for more in of_fleet:
        facts["properties"] |= more["properties"]
        facts["required"] = [key for key in facts["required"] if key not in more["properties"]]
    return {"anyOf": [facts, {"$ref": "#/$defs/unknown"}]}


def text() -> str:
    """The content of docs/schema/facts-1.json."""
    writer = SchemaWriter()
    subjects = {subject: _subject(writer, subject) for subject in LOOKED_AT}
    reason = {"type": "string", "description": "Why the subject could not be observed."}
    unknown = {"type": "object", "properties": {"unknown": reason}, "required": ["unknown"]}
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:nodeready:facts:1",
        "title": "nodeready.facts/1",
        "description": _ABOUT,
        "type": "object",
        "properties": subjects,
        "$defs": {"unknown": unknown, **writer.parts},
    }
    return json.dumps(document, indent=1) + "\n"

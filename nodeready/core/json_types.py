"""The keys and the limits of a class's JSON.

A class is both its JSON (`nodeready.reports.json_report`) and its schema
(`nodeready.reports.schema`). Its fields are the keys, without those with ``repr=False``: they are
made of other fields.

JSON:      the attributes in order, where these are not the fields. A dotted one is an attribute's
           attribute; one with ``?`` is left out without a value
JSON_KEYS: attribute -> its key, where they differ: keys are stable, names are not
SCHEMA:    the name of a document; its VERSION is 1 where it has none

Limits are words of JSON Schema: ``Annotated[int, {"minimum": 0}]``.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

_SECOND = "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}"
#: A moment, UTC; one without a fraction; one that is "" for stacks that were read from files.
Moment = Annotated[str, {"format": "date-time", "pattern": rf"^{_SECOND}(\.[0-9]+)?Z$"}]
WholeSecond = Annotated[str, {"format": "date-time", "pattern": f"^{_SECOND}Z$"}]
MomentOrEmpty = Annotated[str, {"pattern": f"^$|^{_SECOND}Z$"}]
Count = Annotated[int, {"minimum": 0}]
Positive = Annotated[int, {"minimum": 1}]
Name = Annotated[str, {"minLength": 1}]
Names = Annotated[tuple[Name, ...], {"minItems": 1}]


class JsonField(NamedTuple):
    """One key of an object, and the attribute of the class that holds its value."""

    key: str
    path: str
    is_optional: bool


def schema_name(kind: Any) -> str:
    """The value of a document's key ``schema``, such as ``nodeready.audit/2``."""
    return f"nodeready.{kind.SCHEMA}/{getattr(kind, 'VERSION', 1)}"


def json_fields(kind: Any) -> tuple[JsonField, ...]:
    """The keys of a class's JSON; () for a type that is no object.

    >>> json_fields(JsonField)[0]
    JsonField(key='key', path='key', is_optional=False)
    """
    attributes = getattr(kind, "JSON", getattr(kind, "_fields", ()))
    if not attributes and dataclasses.is_dataclass(kind):
        attributes = [field.name for field in dataclasses.fields(kind) if field.repr]
    paths = [(attribute.rstrip("?"), attribute.endswith("?")) for attribute in attributes]
    keys = getattr(kind, "JSON_KEYS", {})
    return tuple(
        JsonField(keys.get(path, path.rpartition(".")[2]), path, is_optional)
        for path, is_optional in paths
    )

"""The JSON Schema of every document, generated from the documents' classes: docs/schema/.

A key's description is the comment of its field, or the docstring of its property.
The types of the fields have the limits (`nodeready.core.json_types`). `scripts/make_docs.py`
writes the files; the tests validate real documents with them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import json
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Union, cast

from nodeready.agent.audit_document import Audit, Ready
from nodeready.core.json_types import JsonField, json_fields, schema_name
from nodeready.runs.audit.waiver_list import WaiverList
from nodeready.runs.cores import Cores
from nodeready.runs.deploy.document import Deploy
from nodeready.runs.incident import Incident
from nodeready.runs.jobs import Jobs
from nodeready.runs.memory.diff import Diff
from nodeready.runs.memory.history import History
from nodeready.runs.memory.lemons import Lemons
from nodeready.runs.postmortem.document import Postmortem
from nodeready.runs.ready.batch_script import BatchScript
from nodeready.runs.ready.job_env import Environment
from nodeready.runs.smoke.document import SmokeReport
from nodeready.runs.stacks.debuggable import Debuggable
from nodeready.runs.stacks.document import Group, Stacks
from nodeready.runs.tail import TailDocument
from nodeready.runs.undrain import Undrain

#: The document of `nodeready.reports.registry.Format` -> the class that is its JSON.
DOCUMENTS: dict[str, Any] = {
    kind.SCHEMA: kind
    for kind in (
        *(Audit, Ready, SmokeReport, Deploy, Stacks),
        *(Debuggable, Jobs, Undrain, Cores, TailDocument, Environment, BatchScript, Incident),
        *(Postmortem, WaiverList, Diff, History, Lemons),
    )
}


def _when(field: str, *values: str) -> dict[str, Any]:
    """The condition of a rule: the field has one of these values."""
    return {"properties": {field: {"enum": list(values)}}}


#: The rules between the fields of one object.
_RULES: dict[type, list[dict[str, Any]]] = {
    Group: [
        {
            "if": _when("kind", "stack"),
            "then": {"properties": {"processes": {"minimum": 1}, "nodes": {"minItems": 1}}},
            "else": {"properties": {"verdict": {"const": None}}},
        },
        {
            "if": _when("kind", "missing"),
            "then": {"properties": {"processes": {"const": 0}, "ranks": {"minItems": 1}}},
        },
    ]
}
_PLAIN: dict[type, str] = {
    str: "string", bytes: "string", int: "integer", float: "number", bool: "boolean",
    type(None): "null",
}  # fmt: skip


def _sentence(text: str) -> str:
    """A docstring's words in the terms of JSON: ``None: none;`` becomes ``null: none.``"""
    words = " ".join(text.split()).rstrip(";.").replace("``", "`")
    words = re.sub(r"\bNone\b", "null", words).replace("() ", "empty ")
    if not words or re.fullmatch(r"one of [A-Z_]+", words):
        return ""  # The enum says it.
    starts_with_value = words.split()[0].endswith(":")
    return f"{words if starts_with_value else words[0].upper() + words[1:]}."


@functools.cache
def meanings(kind: Any) -> tuple[str, dict[str, str]]:
    """The meaning of a class, from its docstring, and of its fields by name, from their comments.
    A field's comment stands behind it, or in whole lines above it; ``likewise`` is that of the
    field before.
    """
    about = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
    by_field: dict[str, str] = {}
    for base in reversed([base for base in kind.__mro__ if "__annotations__" in vars(base)]):
        text, meaning = textwrap.dedent(inspect.getsource(base)), ""
        comments, comment_lines = {}, set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                comments[token.start[0]] = token.string.lstrip("#: ")
                if not token.line[: token.start[1]].strip():
                    comment_lines.add(token.start[0])
        for field in cast(ast.ClassDef, ast.parse(text).body[0]).body:
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            first = field.lineno
            while first - 1 in comment_lines:
                first -= 1
            leading_text = " ".join(comments[line] for line in range(first, field.lineno))
            words = leading_text or comments.get(field.end_lineno or 0, "")
            meaning = meaning if words == "likewise" else _sentence(words)
            by_field[field.target.id] = meaning
    return _sentence(about), by_field


def _attribute(kind: Any, path: str) -> tuple[Any, str]:
    """The type and the meaning of a field, a property, or a dotted path of these."""
    name, _, inner = path.partition(".")
    member = getattr(kind, name, None)
    if isinstance(member, (property, functools.cached_property)):
        getter: Any = member.fget if isinstance(member, property) else member.func
        hint = typing.get_type_hints(getter, include_extras=True)["return"]
        meaning = _sentence(getter.__doc__ or "")
    else:
        hint = typing.get_type_hints(kind, include_extras=True)[name]
        meaning = meanings(kind)[1].get(name, "")
    return _attribute(hint, inner) if inner else (hint, meaning)


class SchemaWriter:
    """One document's schema while its parts are collected."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type. Raises TypeError for one that JSON does not have."""
        origin, inside = typing.get_origin(kind), typing.get_args(kind)
        if origin is Annotated:
            return self._annotated(inside[0], inside[1:])
        if kind is Any:
            return {}
        if isinstance(kind, type) and kind in _PLAIN:
            return {"type": _PLAIN[kind]}
        if origin in (Union, types.UnionType):
            return self._either([self.of(member) for member in inside])
        if origin in (Sequence, list, frozenset) or (origin is tuple and inside[1:] == (...,)):
            return {"type": "array", "items": self.of(inside[0])}
        if origin is tuple:
            return {"type": "array", "prefixItems": [self.of(member) for member in inside]}
        if origin in (Mapping, dict):
            return {"type": "object", "additionalProperties": self.of(inside[1])}
        if json_fields(kind) or typing.is_typeddict(kind):
            name = kind.__name__.lower()
            if name not in self.parts:
                self.parts[name] = {}
                self.parts[name] = self.object(kind)
            return {"$ref": f"#/$defs/{name}"}
        raise TypeError(f"{kind}: no type of JSON")

    def _annotated(self, kind: Any, limits: tuple[Any, ...]) -> dict[str, Any]:
        schema = self.of(kind)
        for limit in limits:
            words = json.loads(json.dumps(limit))
            if (keys := words.pop("keys", None)) is not None:
                schema["properties"] = dict.fromkeys(keys, schema.pop("additionalProperties"))
                schema |= {"required": keys, "additionalProperties": False}
            if "enum" in words:
                schema.pop("type", None)
            schema |= words
        return schema

    def _either(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        is_plain = all(set(row) == {"type"} for row in rows)
        return {"type": [row["type"] for row in rows]} if is_plain else {"anyOf": rows}

    def object(self, kind: Any, schema: str = "") -> dict[str, Any]:
        """The schema of an object: all of its fields, and no other."""
        fields: dict[str, Any] = {"schema": {"const": schema}} if schema else {}
        required = [*fields]
        rows = json_fields(kind) or [JsonField(name, name, False) for name in kind.__annotations__]
        for key, path, is_optional in rows:
            hint, meaning = _attribute(kind, path)
            if is_optional:
                members = typing.get_args(hint)
                hint = members[0] if type(None) in members else hint
            else:
                required.append(key)
            fields[key] = self.of(hint) | ({"description": meaning} if meaning else {})
        about, rules = meanings(kind)[0], _RULES.get(kind, [])
        shape = {"type": "object", "properties": fields, "required": required}
        schema_of: dict[str, Any] = {"description": about} if about else {}
        schema_of |= {**shape, "additionalProperties": False}
        return {**schema_of, "allOf": rules} if rules else schema_of


def schema(document: str) -> dict[str, Any]:
    """The JSON Schema of a document. Raises KeyError for an unknown document."""
    writer, name = SchemaWriter(), schema_name(DOCUMENTS[document])
    fields = writer.object(DOCUMENTS[document], name)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:nodeready:{document}:{name.rpartition('/')[2]}",
        "title": name,
        **fields,
        **({"$defs": writer.parts} if writer.parts else {}),
    }


def text(document: str) -> str:
    """The content of the document's file in docs/schema/."""
    return json.dumps(schema(document), indent=2) + "\n"


def file_name(document: str) -> str:
    """The name of the document's file in docs/schema/, such as ``audit-2.json``."""
    return f"{schema_name(DOCUMENTS[document]).partition('.')[2].replace('/', '-')}.json"

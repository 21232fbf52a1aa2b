"""Every command's document as JSON: docs/schema/. One line per node, group or process.

The text is plain ASCII. Characters that a terminal obeys, and bytes that are no UTF-8, are visible
escapes (``\\x1b``), as in every other report; tabs stay.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nodeready.agent.audit_document import NodeReport
from nodeready.core.base import Unknown
from nodeready.core.json_types import JsonField, json_fields, schema_name
from nodeready.core.result import Result
from nodeready.core.text import sanitise
from nodeready.core.wire import plain, shown_keys
from nodeready.reports.registry import PLAIN, Options
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.snapshot import shown_facts

if TYPE_CHECKING:
    # The program of a node has no document but the audit's.
    from nodeready.runs.deploy.document import Deploy

# One escape of a JSON text; a surrogate pair is one character.
_ESCAPE = re.compile(
    r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|u([0-9a-f]{4})|([bfnrt\"\\/]))"
)
_CONTROL = {"b": "\b", "f": "\f", "n": "\n", "r": "\r"}


def _safe(match: re.Match[str]) -> str:
    if match[1]:
        return match[0]
    char = chr(int(match[3], 16)) if match[3] else _CONTROL.get(match[4], "")
    shown = sanitise(char)
    return match[0] if shown == char else shown.replace("\\", "\\\\")


def dump(data: Any) -> str:
    """Plain data as one line of JSON, without a character that a terminal obeys."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return _ESCAPE.sub(_safe, text) if "\\" in text else text


# --- Text of values. Thousands of nodes' observations are most of a document: their text is made
# without plain data in between, and the text of a value that many nodes share is made once.

#: Texts -> their JSON; the maximum number of texts, and the maximum characters of a text.
_QUOTED: dict[str, str] = {}
_MAX_QUOTED, _MAX_QUOTED_LENGTH = 20_000, 160
#: Maximum number of shared values that a writer remembers, and the minimum length of a value.
_MAX_SHARED, _MIN_SHARED_LENGTH = 512, 4
_Text = Callable[[Any], str]


def _quoted(text: str) -> str:
    cached = _QUOTED.get(text)
    if cached is not None:
        return cached
    quoted = encode_basestring_ascii(text)
    quoted = _ESCAPE.sub(_safe, quoted) if "\\" in quoted else quoted
    if len(text) <= _MAX_QUOTED_LENGTH:
        if len(_QUOTED) >= _MAX_QUOTED:
            _QUOTED.clear()
        _QUOTED[text] = quoted
    return quoted


class TextWriter:
    """Values as JSON text. fields_of: the keys of a type's object; () for a plain type"""

    def __init__(self, fields_of: Callable[[type], Sequence[JsonField]]) -> None:
        self._fields_of = fields_of
        # Id of a value -> the value, and its text from the second time on.
        self._shared: dict[int, tuple[Any, str]] = {}
        # Type -> how its values are written.
        self.texts: dict[type, _Text] = {
            str: _quoted, int: int.__repr__, bool: lambda value: "true" if value else "false",
            type(None): lambda value: "null",
            float: lambda value: float.__repr__(value) if math.isfinite(value) else "null",
            list: self._list, tuple: self._once(self._list), dict: self.mapping,
            MappingProxyType: self._once(self.mapping),
        }  # fmt: skip

    def __call__(self, value: Any) -> str:
        write = self.texts.get(type(value))
        if write is None:
            kind = type(value)
            fields = self._fields_of(kind)
            if issubclass(kind, (str, int, Unknown)) or not fields:
                return dump(plain(value))
            write = self.texts[kind] = self.object(fields)
        return write(value)

    def _once(self, write: _Text) -> _Text:
        """``write``, which writes an immutable value only once if many nodes share it."""

        def text(value: Any) -> str:
            if len(value) < _MIN_SHARED_LENGTH:
                return write(value)
            cached = self._shared.get(id(value))
            is_shared = cached is not None and cached[0] is value
            if cached is not None and is_shared and cached[1]:
                return cached[1]
            written = write(value)
            if len(self._shared) >= _MAX_SHARED:
                self._shared.clear()
            self._shared[id(value)] = value, written if is_shared else ""
            return written

        return text

    def _list(self, values: Iterable[Any]) -> str:
        return f"[{','.join([self(value) for value in values])}]"

    def mapping(self, values: Mapping[Any, Any]) -> str:
        rows = [f"{_quoted(str(key))}:{self(value)}" for key, value in values.items()]
        return f"{{{','.join(rows)}}}"

    def object(self, fields: Sequence[JsonField]) -> _Text:
        """The writer of the objects of a class."""
        first, *further = (field.path for field in fields)
        values = attrgetter(first, *further) if further else lambda value: (getattr(value, first),)
        # Each key, and room for its value.
        template = [part for field in fields for part in (f',"{field.key}":', "")] + ["}"]
        template[0] = f'{{"{fields[0].key}":'
        texts = self.texts

        def text(value: Any) -> str:
            row = template[:]
            row[1::2] = [texts.get(type(member), self)(member) for member in values(value)]
            return "".join(row)

        return text


#: An observation, as `dump` shows it as plain data.
shown = TextWriter(
    lambda kind: [JsonField(key, name, False) for name, key in shown_keys(kind).items()]
)


def facts(subjects: Mapping[str, Any]) -> str:
    """The observations of one node, by subject, as the documents show them."""
    names = (name for name in SUBJECTS if name in subjects)
    return shown.mapping({name: shown_facts(name, subjects[name]) for name in names})


# --- Documents.

_part = TextWriter(json_fields)


def _result_writer() -> _Text:
    """The writer of results. Most are ok or na, and have no severity."""
    fields = json_fields(Result)
    write_good = _part.object([field for field in fields if not field.is_optional])
    write_bad = _part.object(fields)
    return lambda result: write_bad(result) if result.severity else write_good(result)


_part.texts[Result] = lru_cache(maxsize=8192)(_result_writer())


def _node(node: NodeReport) -> str:
    """One node of an audit. Its facts are in memory only while its line is written."""
    subjects = node.snapshot.subjects if node.snapshot else {}
    observed = facts(subjects) if node.read_facts is None else node.read_facts()
    head = {"name": node.name, "status": node.status, "seconds": round(node.seconds, 3)}
    head |= {} if node.age_s is None else {"age_seconds": node.age_s}
    return f'{dump(head)[:-1]},"facts":{observed},"results":{_part(node.results)}}}'


_part.texts[NodeReport] = _node
_SHORT = ("others", "missing")  # lists of objects that stand on one line


def listed(rows: Iterator[str]) -> Iterator[str]:
    """A JSON list, a row per line."""
    yield "["
    before = "\n"
    for row in rows:
        yield before + row
        before = ",\n"
    yield "\n]" if before != "\n" else "]"


def render(document: Any, options: Options = PLAIN) -> Iterator[str]:
    """A document in pieces: a key per line, and an object per line of a list."""
    yield f'{{\n"schema": "{schema_name(type(document))}"'
    for key, path, is_optional in json_fields(type(document)):
        value = attrgetter(path)(document)
        if value is None and is_optional:
            continue
        yield f',\n"{key}": '
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if is_list and value and key not in _SHORT and json_fields(type(value[0])):
            yield from listed(map(_part, value))
        else:
            yield _part(value)
    yield "\n}\n"


def render_deploy(deploy: Deploy, options: Options = PLAIN) -> Iterator[str]:
    """A deploy in pieces; its changes have the differences of their files under ``--diff``."""
    if not options.diff:
        changes = (tuple(replace(row, diff=()) for row in node.changes) for node in deploy.nodes)
        nodes = (replace(node, changes=rows) for node, rows in zip(deploy.nodes, changes))
        deploy = replace(deploy, nodes=tuple(nodes))
    return render(deploy, options)

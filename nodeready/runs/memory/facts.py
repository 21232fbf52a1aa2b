"""The facts of a node that stay the same until something changes, by unique names."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from nodeready.core.result import COUNTER, VOLATILE, FactKinds
from nodeready.runs.memory.look import Value
from nodeready.subjects.limits.limit_files import UNLIMITED
from nodeready.subjects.registry import SUBJECTS

#: Maximum characters of a value and of an element's name. A longer text ends with its digest, so
#: that its change is seen.
_LONGEST_VALUE, _LONGEST_NAME = 400, 120
#: Maximum names below one path that are remembered.
_MAX_NAMES = 256

_NO_KINDS = FactKinds()
_ELEMENT = re.compile(r"\[[^\]]*\]")
_BRACKETS = str.maketrans("[]", "()")


class ComparedFacts(NamedTuple):
    """The facts of one subject that are compared."""

    # key -> value. An element of a list or mapping stands in brackets. A list without names of its
    # elements is one text. A fact that the node does not show has no key
    stable: dict[str, Value]
    counters: dict[str, int]  # ``SUBJECT.ELEMENTS.NAME`` -> total in this boot


def compared_facts(subject: str, facts: Any) -> ComparedFacts:
    """The facts of one subject that are compared; a subject that was not observed has none.

    facts: as in `NodeReport.facts`, plain data

    >>> compared_facts("nics", {"interfaces": {"eth0": {"mtu": 9000, "rx_errors": 7}}})
    ComparedFacts(stable={'nics.interfaces[eth0].mtu': 9000}, counters={'nics.eth0.rx_errors': 7})
    """
    compared = ComparedFacts({}, {})
    if isinstance(facts, dict) and "unknown" not in facts:
        _Walk(subject, compared).members(_root(subject), facts, subject, ())
    return compared


def kind_of(key: str) -> str:
    """``hardware``, ``version`` or ``setting``, of a key of `ComparedFacts.stable`."""
    return _kinds_of(key.partition(".")[0]).kind(_path(key))


def is_unique(key: str) -> bool:
    """Whether healthy peers differ in the fact with this key (serial numbers, addresses)."""
    return _kinds_of(key.partition(".")[0]).is_unique(_path(key))


def shown_value(key: str, value: Value) -> str:
    """The value of a fact in words: a mode in octal, no limit as a word.

    >>> shown_value("core_dumps.directory_mode", 0o1777)
    '1777'
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and key.endswith("mode"):
        return f"{value & 0o7777:04o}"
    return str(value).replace(str(UNLIMITED), "unlimited")


def _path(key: str) -> str:
    return _ELEMENT.sub("", key).partition(".")[2]


def _kinds_of(subject: str) -> FactKinds:
    return SUBJECTS[subject].kinds if subject in SUBJECTS else _NO_KINDS


class _Place:
    """One path in a subject's facts: the kind of what is there, and the places below it.

    identity: the keys that identify an element of the list or mapping here; None: it has none
    """

    def __init__(self, kinds: FactKinds, path: str) -> None:
        self._kinds, self._path = kinds, path
        self.kind, self.is_counted = kinds.kind(path), kinds.is_counted(path)
        names = kinds.elements.get(path)
        self.identity = None if names is None else names.split()
        self._inner: dict[str, _Place] = {}

    def inner(self, name: str) -> _Place:
        place = self._inner.get(name)
        if place is None:
            path = f"{self._path}.{name}" if self._path else name
            place = _Place(self._kinds, path)
            # A node can choose the names of a mapping.
            if len(self._inner) < _MAX_NAMES:
                self._inner[name] = place
        return place


@cache
def _root(subject: str) -> _Place:
    return _Place(_kinds_of(subject), "")


class _Walk:
    def __init__(self, subject: str, compared: ComparedFacts) -> None:
        self._subject = subject
        self._stable, self._counters = compared

    def members(
        self, place: _Place, data: dict[str, Any], key: str, elements: tuple[str, ...]
    ) -> None:
        """Take the facts of an object."""
        for name, value in data.items():
            if value is None or value == "":
                continue
            inner = place.inner(name)
            if inner.kind == VOLATILE:
                continue
            inner_key = f"{key}.{_bounded(name, _LONGEST_NAME)}"
            if inner.identity is not None and isinstance(value, (dict, list)):
                for element_name, element in _named(inner, value):
                    self._value(
                        inner, element, f"{inner_key}[{element_name}]", (*elements, element_name)
                    )
            else:
                self._value(inner, value, inner_key, elements)

    def _value(self, place: _Place, value: Any, key: str, elements: tuple[str, ...]) -> None:
        if isinstance(value, dict):
            self.members(place, value, key, elements)
        elif place.kind == COUNTER:
            if type(value) is int:
                name = f"{self._subject}.{'/'.join(elements)}.{key.rpartition('.')[2]}"
                self._counters[name] = self._counters.get(name, 0) + value
        elif not isinstance(value, (list, str)):
            self._stable[key] = value
        elif place.is_counted:
            text = json.dumps(value).encode()
            self._stable[key] = f"{len(value)} ({hashlib.sha256(text).hexdigest()[:8]})"
        elif value:
            self._stable[key] = _bounded(_text(place, value), _LONGEST_VALUE)


def _named(place: _Place, data: Any) -> Iterator[tuple[str, Any]]:
    """The elements of a list or mapping with their names.

    Equal elements are one; further elements of the same name are numbered.
    """
    if isinstance(data, dict):
        for name, element in data.items():
            yield _element_name(name), element
        return
    same_name: dict[str, list[Any]] = {}
    for element in data:
        if isinstance(element, dict):
            values = [element.get(key) for key in place.identity or ()]
            name = " ".join([str(value) for value in values if value is not None])
            same_name.setdefault(_element_name(name), []).append(element)
    for name, elements in same_name.items():
        yield name, elements[0]
        if len(elements) > 1:
            different = {_text(place, element): element for element in reversed(elements)}
            different.pop(_text(place, elements[0]))
            for number, element in enumerate(reversed(different.values()), 2):
                yield f"{name}#{number}", element


def _element_name(name: str) -> str:
    if "[" in name or "]" in name:
        name = name.translate(_BRACKETS)
    return _bounded(name, _LONGEST_NAME)


def _text(place: _Place, value: Any) -> str:
    """A value as one text, without its volatile members."""
    if isinstance(value, dict):
        shown = {
            name: _text(inner, member)
            for name, member in value.items()
            if member not in (None, "") and (inner := place.inner(name)).kind != VOLATILE
        }
        if len(shown) == 1:
            return next(iter(shown.values()))
        return " ".join(f"{name}={text}" for name, text in shown.items())
    if isinstance(value, list):
        joint = "; " if value and isinstance(value[0], (dict, list)) else ", "
        return joint.join([_text(place, member) for member in value])
    return value if isinstance(value, str) else json.dumps(value)


def _bounded(text: str, maximum: int) -> str:
    if len(text) <= maximum:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{text[: maximum - 20]}...{digest}"

"""The facts of a node that stay the same until something changes, by unique names."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from nodeready.memory.look import Value
from nodeready.subjects.fact_kinds import COUNTER, VOLATILE, FactKinds
from nodeready.subjects.registry import SUBJECTS

#: Maximum characters of a value and of an element's name. A longer text ends with its digest, so
#: that its change is seen.
_LONGEST_VALUE, _LONGEST_NAME = 400, 120

_NO_KINDS = FactKinds()
_ELEMENT = re.compile(r"\[[^\]]*\]")
_BRACKETS = str.maketrans("[]", "()")

#: A fact: the names of the elements around it, its key with them, its kind, its value.
_Fact = tuple[tuple[str, ...], str, str, Value]


def stable_facts(subject: str, facts: Any) -> dict[str, Value]:
    """Key -> value of the facts of one subject that are compared.

    facts: as in `NodeReport.facts`, plain data

    An element of a list or mapping stands in brackets. A list without names of its elements is one
    text. A fact that the node does not show has no key.

    >>> stable_facts("nics", {"interfaces": {"eth0": {"mtu": 9000, "rx_errors": 7}}})
    {'nics.interfaces[eth0].mtu': 9000}
    """
    every = _members(_kinds_of(subject), facts, "", subject, ())
    return {key: value for _, key, kind, value in every if kind != COUNTER}


def counters(subject: str, facts: Any) -> dict[str, int]:
    """``SUBJECT.ELEMENTS.NAME`` -> total in this boot, of the facts of one subject.

    >>> counters("nics", {"interfaces": {"eth0": {"mtu": 9000, "rx_errors": 7}}})
    {'nics.eth0.rx_errors': 7}
    """
    totals: dict[str, int] = {}
    for elements, key, kind, value in _members(_kinds_of(subject), facts, "", subject, ()):
        if kind == COUNTER and type(value) is int:
            name = ".".join((subject, "/".join(elements), key.rpartition(".")[2]))
            totals[name] = totals.get(name, 0) + value
    return totals


def kind_of(key: str) -> str:
    """``hardware``, ``version`` or ``setting``, of a key of `stable_facts`."""
    subject, _, path = _ELEMENT.sub("", key).partition(".")
    return _kind(_kinds_of(subject), path)


def is_unique(key: str) -> bool:
    """Whether healthy peers differ in the fact with this key (serial numbers, addresses)."""
    subject, _, path = _ELEMENT.sub("", key).partition(".")
    return _kinds_of(subject).is_unique(path)


def _kinds_of(subject: str) -> FactKinds:
    return SUBJECTS[subject].kinds if subject in SUBJECTS else _NO_KINDS


@lru_cache(maxsize=8192)
def _kind(kinds: FactKinds, path: str) -> str:
    return kinds.kind(path)


def _members(
    kinds: FactKinds, data: Any, path: str, key: str, elements: tuple[str, ...]
) -> Iterator[_Fact]:
    """The facts of an object. A subject that was not observed has none."""
    if not isinstance(data, dict) or (not path and "unknown" in data):
        return
    for name, value in data.items():
        inner = f"{path}.{name}" if path else name
        if value is None or value == "" or _kind(kinds, inner) == VOLATILE:
            continue
        inner_key = f"{key}.{_bounded(name, _LONGEST_NAME)}"
        if inner in kinds.elements and isinstance(value, (dict, list)):
            for element_name, element in _named(kinds, inner, value):
                names = (*elements, element_name)
                yield from _value_facts(
                    kinds, element, inner, f"{inner_key}[{element_name}]", names
                )
        else:
            yield from _value_facts(kinds, value, inner, inner_key, elements)


def _value_facts(
    kinds: FactKinds, value: Any, path: str, key: str, elements: tuple[str, ...]
) -> Iterator[_Fact]:
    """The facts of one value; an empty list has none."""
    if isinstance(value, dict):
        yield from _members(kinds, value, path, key, elements)
    elif not isinstance(value, (list, str)):
        yield elements, key, _kind(kinds, path), value
    elif value:
        text = _text(kinds, path, value)
        yield elements, key, _kind(kinds, path), _bounded(text, _LONGEST_VALUE)


def _named(kinds: FactKinds, path: str, data: Any) -> Iterator[tuple[str, Any]]:
    """The elements of a list or mapping with their names.

    Equal elements are one; further elements of the same name are numbered.
    """
    if isinstance(data, dict):
        for name, element in data.items():
            yield _element_name(name), element
        return
    keys = kinds.elements[path].split()
    texts: dict[str, list[str]] = {}
    for element in data:
        if not isinstance(element, dict):
            continue
        values = (element.get(key) for key in keys)
        name = _element_name(" ".join(str(value) for value in values if value is not None))
        same_name = texts.setdefault(name, [])
        text = _text(kinds, path, element)
        if text not in same_name:
            same_name.append(text)
            yield (f"{name}#{len(same_name)}" if len(same_name) > 1 else name), element


def _element_name(name: str) -> str:
    return _bounded(name.translate(_BRACKETS), _LONGEST_NAME)


def _text(kinds: FactKinds, path: str, value: Any) -> str:
    """A value as one text, without its volatile members."""
    if isinstance(value, dict):
        shown = {
            name: _text(kinds, f"{path}.{name}", member)
            for name, member in value.items()
            if member not in (None, "") and _kind(kinds, f"{path}.{name}") != VOLATILE
        }
        if len(shown) == 1:
            return next(iter(shown.values()))
        return " ".join(f"{name}={text}" for name, text in shown.items())
    if isinstance(value, list):
        joint = "; " if value and isinstance(value[0], (dict, list)) else ", "
        return joint.join(_text(kinds, path, member) for member in value)
    return value if isinstance(value, str) else json.dumps(value)


def _bounded(text: str, maximum: int) -> str:
    if len(text) <= maximum:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{text[: maximum - 20]}...{digest}"
